"""Same-step micro law *(ours)*: a fraction of the way, in u = ln T, from the base temperature to :mod:`solve`'s.

    u = u0 + f (u_solve - u0),   0 < f <= 1

f = 1 is ``solve``. To first order H(u) - H* = (1 - f) (H(u0) - H*), so the variance of white entropy about H* is
multiplied by about (1 - f)^2. No state, no feedback of a past error: nothing to certify.
"""

from __future__ import annotations

from dataclasses import dataclass

from entropic_ctl import fields
from entropic_ctl.signals import Array, LogitView
from entropic_ctl.temperature import solve
from entropic_ctl.temperature.base import Stateless, TemperatureLaw, clamped_temperature

__all__ = ["Config", "Damped", "build"]


@dataclass(frozen=True)
class Config(solve.Config):
    """The parameters of ``solve`` and the fraction."""

    fraction: float = fields.number(0.5, 0.0, 1.0, "f: share of the way from ln T0 to the solution", open_lo=True)


class Damped(Stateless):
    """T a fraction of the way to the temperature at which H(T) = H*."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config

    def temper(self, u: Array, view: LogitView) -> tuple[Array, Array, Array]:
        """Return (T, tempered entropy, varentropy) at u0 + f (u_solve - u0)."""
        solution, _, _ = solve.solve_u(u, view, self.config)
        damped = u + self.config.fraction * (solution - u)
        temperature = clamped_temperature(damped, self.config)
        return temperature, *view.at(temperature)


def build(config: Config) -> TemperatureLaw:
    """Return the law."""
    return Damped(config)
