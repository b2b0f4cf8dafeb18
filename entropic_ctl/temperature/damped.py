"""Same-step micro law *(ours)*: a fraction of the way, in u = ln T, from the base temperature to :mod:`solve`'s.

    u = u0 + f (u_solve - u0),   0 < f <= 1

f = 1 is ``solve``. To first order H(u) - H* = (1 - f) (H(u0) - H*), so the variance of white entropy about H* is
multiplied by about (1 - f)^2. No state, no feedback of a past error: nothing to certify.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from array_api_compat import array_namespace

from entropic_ctl import fields
from entropic_ctl.signals import Array, LogitView
from entropic_ctl.temperature import solve
from entropic_ctl.temperature.base import TemperatureLaw

__all__ = ["Config", "Damped", "build"]


@dataclass(frozen=True)
class Config(solve.Config):
    """The parameters of ``solve`` and the fraction."""

    fraction: float = fields.number(0.5, 0.0, 1.0, "f: share of the way from ln T0 to the solution", open_lo=True)


class Damped:
    """T a fraction of the way to the temperature at which H(T) = H*."""

    integral_action: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        self.config = config

    def start(self) -> float:
        """Return the base u0 = ln T0 (0 for a greedy configuration, where it is never used)."""
        return math.log(self.config.temperature) if self.config.temperature > 0 else 0.0

    def temper(self, u: Array, view: LogitView) -> tuple[Array, Array, Array]:
        """Return (T, tempered entropy, varentropy) at u0 + f (u_solve - u0)."""
        xp = array_namespace(u)
        solution, _, _ = solve.solve_u(u, view, self.config)
        damped = u + self.config.fraction * (solution - u)
        temperature = xp.clip(xp.exp(damped), self.config.t_min, self.config.t_max)
        return temperature, *view.at(temperature)

    def update(self, u: Array, tempered_entropy: Array) -> Array:  # noqa: ARG002
        """Return ``u`` unchanged: the law has no state."""
        return u


def build(config: Config) -> TemperatureLaw:
    """Return the law."""
    return Damped(config)
