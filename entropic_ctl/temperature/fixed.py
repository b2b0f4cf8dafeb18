"""Standard inference: a constant temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from array_api_compat import array_namespace

from entropic_ctl.signals import Array, LogitView
from entropic_ctl.temperature.base import TemperatureConfig, TemperatureLaw

__all__ = ["Config", "Fixed", "build"]


@dataclass(frozen=True)
class Config(TemperatureConfig):
    """Only the common parameters; ``temperature`` is the constant."""


class Fixed:
    """T = T0 at every step."""

    integral_action: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        self.config = config

    def start(self) -> float:
        """Return ln T0 (0 for a greedy configuration, where u is never used)."""
        return math.log(self.config.temperature) if self.config.temperature > 0 else 0.0

    def temper(self, u: Array, view: LogitView) -> tuple[Array, Array, Array]:
        """Return (exp u, tempered entropy, varentropy)."""
        temperature = array_namespace(u).exp(u)
        return temperature, *view.at(temperature)

    def update(self, u: Array, tempered_entropy: Array) -> Array:  # noqa: ARG002
        """Return ``u`` unchanged."""
        return u


def build(config: Config) -> TemperatureLaw:
    """Return the law."""
    return Fixed(config)
