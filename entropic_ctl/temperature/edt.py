"""Baseline: entropy-based dynamic temperature (Zhang, Bao and Huang 2024, "EDT").

    T = T0 * N^(theta / H),   0 < N < 1 (the authors fix 0.8),   H = this step's model entropy

T rises with H towards T0 and falls to 0 as H does: the **opposite sign** of the paper's feedback, which lowers T where
entropy is high. There is no target, no state and no feedback of a past error, hence nothing to certify, and nothing
is stabilised either: the law widens the spread of the tempered entropy.

Variants: with N > 1 (also tried by the authors) T falls as H rises; not offered, because T is then unbounded at H = 0.
They measure H on the raw distribution at T = 1, as here (the *model* entropy; masks and penalties do not enter); the
base of its logarithm only rescales theta, nats are meant here. The clamps are ours; H = 0 ends at the lower one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from entropic_ctl import fields
from entropic_ctl.arrays import clip, namespace
from entropic_ctl.signals import Array, LogitView
from entropic_ctl.temperature.base import Stateless, TemperatureConfig, TemperatureLaw, clamped_temperature

__all__ = ["Config", "Edt", "build"]


@dataclass(frozen=True)
class Config(TemperatureConfig):
    """T0 is ``temperature``: the temperature at high entropy."""

    base: float = fields.number(0.8, 0.0, 1.0, "N: base of the power; 1 is a fixed temperature", open_lo=True)
    theta_nats: float = fields.number(0.5, 0.0, 100.0, "theta: entropy at which T = N T0, nats; 0 is fixed")


class Edt(Stateless):
    """T = T0 N^(theta / H) inside the clamps."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        self._slope = config.theta_nats * math.log(config.base)

    def temper(self, u: Array, view: LogitView) -> tuple[Array, Array, Array]:
        """Return (T, tempered entropy, varentropy) with ln T = u + theta ln N / H; a NaN entropy stays NaN."""
        entropy = namespace(u).astype(view.model_entropy, u.dtype, copy=False)
        temperature = clamped_temperature(u + self._slope / clip(entropy, 1e-30, math.inf), self.config)
        return temperature, *view.at(temperature)


def build(config: Config) -> TemperatureLaw:
    """Return the law."""
    return Edt(config)
