"""Shortest remaining processing time: the least predicted work *left* goes first.

    score = -(tokens to compute / token budget + predicted output left), in steps

With true lengths (``lengths = "oracle"``, in the simulator) and one seat this minimises the mean time in the system
(Schrage, 1968), up to the steps for which a seat is held (``quantum_steps``). With predictions it is the rule that
learned schedulers of language-model requests approximate. Work left includes recomputation after a preemption. What a
prediction is, and what is assumed without one: :mod:`entropic_ctl.scheduling._lengths`.
"""

from __future__ import annotations

from dataclasses import dataclass

from entropic_ctl.scheduling._lengths import LengthConfig, remaining_steps
from entropic_ctl.scheduling.base import ScheduleView, SchedulingPolicy
from entropic_ctl.signals import FloatArray

__all__ = ["Config", "ShortestRemaining", "build"]


@dataclass(frozen=True)
class Config(LengthConfig):
    """Source of the lengths, and the prior."""


class ShortestRemaining:
    """Least predicted work left first."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def score(self, view: ScheduleView) -> FloatArray:
        """Return minus the predicted work left, shape (L,), steps."""
        return -remaining_steps(view, self.config)


def build(config: Config) -> SchedulingPolicy:
    """Return the policy."""
    return ShortestRemaining(config)
