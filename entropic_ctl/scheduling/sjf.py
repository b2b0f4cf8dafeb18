"""Shortest job first: the least predicted total work goes first.

    score = -(prompt / token budget + predicted output), in steps

The classical rule with the prediction in place of the size. The size is that of the whole job, so a job that has
started is not preferred for it, and a shorter newcomer takes its seat when the order is next drawn (its pages are
kept): preemptive shortest job first. What a prediction is, and what is assumed without one:
:mod:`entropic_ctl.scheduling._lengths`. Unknown lengths are memoryless, so without any predictions the least prompt
plus progress so far goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from entropic_ctl.scheduling._lengths import LengthConfig, total_steps
from entropic_ctl.scheduling.base import ScheduleView, SchedulingPolicy
from entropic_ctl.signals import FloatArray

__all__ = ["Config", "ShortestJob", "build"]


@dataclass(frozen=True)
class Config(LengthConfig):
    """Source of the lengths, and the prior."""


class ShortestJob:
    """Least predicted total work first."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def score(self, view: ScheduleView) -> FloatArray:
        """Return minus the predicted work, shape (L,), steps."""
        return -total_steps(view, self.config)


def build(config: Config) -> SchedulingPolicy:
    """Return the policy."""
    return ShortestJob(config)
