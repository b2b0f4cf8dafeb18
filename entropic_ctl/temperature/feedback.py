"""The paper's micro law: entropy feedback on u = ln T. High entropy lowers T, low entropy raises it.

    u+ = clip(u - clip(k phi(H - H*), -r, r), ln T_min, ln T_max)

phi is odd and non-decreasing with slope 1 at 0 and between 0 and 1 elsewhere (``linear``: e; ``tanh``: s tanh(e/s)).
T_t = exp(u_t) samples token t; after the token is accepted u_{t+1} follows from H_t(T_t): integral action on the
previous error, hence a gain certificate (0 < k < 2 / V_max(n) at lag 0). The default 0.02 is certified at lags 0 and 1
for every vocabulary up to 2^20 tokens.

Anti-windup: the state *is* the clamped u, so saturation stores nothing and the law leaves a clamp at the first error of
the other sign. Clamps and rate limit are non-expansive, so they keep the contraction that the certificate proves.
The paper describes the law in words; the formula, the choice of u = ln T, the rate limit and the clamps are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_ctl import fields
from entropic_ctl.arrays import clip, namespace
from entropic_ctl.compiled import compiled
from entropic_ctl.signals import Array, FloatArray, LogitView
from entropic_ctl.temperature.base import TemperatureConfig, TemperatureLaw, clamped_temperature

__all__ = ["Config", "Feedback", "build"]


@dataclass(frozen=True)
class Config(TemperatureConfig):
    """Target, gain and shape of the feedback."""

    target_nats: float = fields.number(1.5, 0.0, 20.0, "H*: tempered entropy to hold, nats")
    gain: float = fields.number(0.02, -10.0, 10.0, "k in u = ln T per nat; negative is the wrong sign (refuted)")
    phi: str = fields.choice("linear", ("linear", "tanh"), "shape of the error")
    phi_scale_nats: float = fields.number(2.0, 0.0, 100.0, "tanh: error at which it saturates, nats", open_lo=True)
    rate_limit: float = fields.number(0.25, 0.0, 10.0, "largest change of u per token; 0 is no limit")


@compiled
def _linear_step(
    u: FloatArray, entropy: FloatArray, target: float, gain: float, rate: float, low: float, high: float
) -> FloatArray:
    """Twin of :meth:`Feedback.update` with linear phi; ``rate`` 0 is no limit."""
    out = np.empty_like(u)
    for i in range(u.shape[0]):
        change = -gain * (entropy[i] - target)
        if np.isnan(change):
            out[i] = u[i]
            continue
        if rate > 0:
            change = min(max(change, -rate), rate)
        out[i] = min(max(u[i] + change, low), high)
    return out


class Feedback:
    """Entropy feedback with clamps, rate limit and anti-windup."""

    integral_action: ClassVar[bool] = True

    def __init__(self, config: Config) -> None:
        self.config = config
        self._low, self._high = math.log(config.t_min), math.log(config.t_max)

    def start(self) -> float:
        """Return ln T0 (for a greedy configuration: u = 0 moved inside the clamps; never used)."""
        return min(max(self.config.u_start, self._low), self._high)

    def temper(self, u: Array, view: LogitView) -> tuple[Array, Array, Array]:
        """Return (exp u, tempered entropy, varentropy)."""
        temperature = clamped_temperature(u, self.config)
        return temperature, *view.at(temperature)

    def update(self, u: Array, tempered_entropy: Array) -> Array:
        """Return the next u; an entry whose entropy is NaN keeps its u.

        Parameters
        ----------
        u : array, shape (M,)
            State, u = ln T.
        tempered_entropy : array, shape (M,), nats
            Entropy at the temperature that sampled the accepted token.
        """
        config = self.config
        if _linear_step is not None and type(u) is np.ndarray and config.phi == "linear":
            return _linear_step(
                u, tempered_entropy, config.target_nats, config.gain, config.rate_limit, self._low, self._high
            )
        xp = namespace(u)
        error = xp.astype(tempered_entropy, u.dtype, copy=False) - config.target_nats
        if config.phi == "tanh":
            error = config.phi_scale_nats * xp.tanh(error / config.phi_scale_nats)
        change = -config.gain * error
        if config.rate_limit > 0:
            change = clip(change, -config.rate_limit, config.rate_limit)
        return xp.where(xp.isnan(change), u, clip(u + change, self._low, self._high))


def build(config: Config) -> TemperatureLaw:
    """Return the law."""
    return Feedback(config)
