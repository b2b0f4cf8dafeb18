"""The micro law's interface: how random the next token is.

State is one number per request, u = ln T (for ``mirostat2`` its mu, nats). A law has three pure, element-wise
operations that run unchanged on NumPy and torch arrays (array API):

- ``start()``: the u of a new request;
- ``temper(u, view)``: the temperature for *this* step, with the tempered entropy and varentropy at it;
- ``update(u, tempered_entropy)``: the u of the next step, called once per accepted token.

``feedback`` and ``mirostat2`` use the entropy they have already seen (integral action on the previous error, so they
need a stability certificate); ``solve``, ``damped``, ``edt`` and ``dynatemp`` act on the current distribution and carry
no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

from entropic_ctl import fields
from entropic_ctl.arrays import clip, exp
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import Array, LogitView

__all__ = ["Stateless", "TemperatureConfig", "TemperatureLaw", "clamped_temperature"]


@dataclass(frozen=True)
class TemperatureConfig:
    """Parameters every micro law has."""

    temperature: float = fields.number(0.8, 0.0, 10.0, "starting (or fixed) temperature; 0 means greedy")
    t_min: float = fields.number(0.3, 0.0, 10.0, "lower clamp on T, > 0", open_lo=True)
    t_max: float = fields.number(1.6, 0.0, 10.0, "upper clamp on T", open_lo=True)

    def __post_init__(self) -> None:
        fields.check(self)
        if self.t_min > self.t_max:
            raise BadInputError("t_min above t_max", field="t_min", value=self.t_min, allowed=f"<= {self.t_max:g}")
        if self.temperature != 0.0 and not self.t_min <= self.temperature <= self.t_max:
            raise BadInputError(
                "starting temperature outside its clamps",
                field="temperature",
                value=self.temperature,
                allowed=f"0 (greedy) or [{self.t_min:g}, {self.t_max:g}]",
            )

    @property
    def u_start(self) -> float:
        """Ln T0; 0 for a greedy configuration, where it is never used."""
        return math.log(self.temperature) if self.temperature > 0 else 0.0


def clamped_temperature(u: Array, config: TemperatureConfig) -> Array:
    """Return T = exp u, moved inside the clamps of ``config`` (exp and log do not invert each other exactly)."""
    return clip(exp(u), config.t_min, config.t_max)


class Stateless:
    """What laws that carry no state share: u stays ln T0, and no past error is fed back."""

    integral_action: ClassVar[bool] = False

    def __init__(self, config: TemperatureConfig) -> None:
        self._u_start = config.u_start

    def start(self) -> float:
        """Return ln T0."""
        return self._u_start

    def update(self, u: Array, tempered_entropy: Array) -> Array:  # noqa: ARG002
        """Return ``u`` unchanged."""
        return u


class TemperatureLaw(Protocol):
    """A micro law. Arrays are (M,) float64 (NumPy) or any float torch tensor."""

    integral_action: ClassVar[bool]
    """True if the law feeds back a past error, so that its gain needs a certificate."""

    @property
    def config(self) -> TemperatureConfig:
        """The parameters."""
        ...

    def start(self) -> float:
        """Return the initial u = ln T."""
        ...

    def temper(self, u: Array, view: LogitView) -> tuple[Array, Array, Array]:
        """Return (T, tempered entropy, varentropy) for this step."""
        ...

    def update(self, u: Array, tempered_entropy: Array) -> Array:
        """Return the next u after one accepted token whose (possibly lagged) tempered entropy was observed."""
        ...
