"""Standard inference: a constant temperature."""

from __future__ import annotations

from dataclasses import dataclass

from entropic_ctl.arrays import namespace
from entropic_ctl.signals import Array, LogitView
from entropic_ctl.temperature.base import Stateless, TemperatureConfig, TemperatureLaw

__all__ = ["Config", "Fixed", "build"]


@dataclass(frozen=True)
class Config(TemperatureConfig):
    """Only the common parameters; ``temperature`` is the constant."""


class Fixed(Stateless):
    """T = T0 at every step."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config

    def temper(self, u: Array, view: LogitView) -> tuple[Array, Array, Array]:
        """Return (exp u, tempered entropy, varentropy)."""
        temperature = namespace(u).exp(u)
        return temperature, *view.at(temperature)


def build(config: Config) -> TemperatureLaw:
    """Return the law."""
    return Fixed(config)
