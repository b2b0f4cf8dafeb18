"""Standard inference: dense attention, theta = 0."""

from __future__ import annotations

from dataclasses import dataclass

from entropic_ctl.pruning.base import PruningConfig, PruningLaw
from entropic_ctl.signals import Array

__all__ = ["Config", "Off", "build"]


@dataclass(frozen=True)
class Config(PruningConfig):
    """Only the common parameters."""


class Off:
    """theta = 0 at every step."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def start(self) -> tuple[float, int]:
        """Return (0, 0)."""
        return 0.0, 0

    def update(self, theta: Array, timer: Array, model_entropy: Array) -> tuple[Array, Array]:  # noqa: ARG002
        """Return the state unchanged."""
        return theta, timer


def build(config: Config) -> PruningLaw:
    """Return the law."""
    return Off(config)
