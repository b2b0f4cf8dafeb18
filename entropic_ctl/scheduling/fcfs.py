"""Standard inference: first come, first served (vLLM's default)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_ctl.scheduling.base import ScheduleView, SchedulingConfig, SchedulingPolicy
from entropic_ctl.signals import FloatArray

__all__ = ["Config", "Fcfs", "build"]


@dataclass(frozen=True)
class Config(SchedulingConfig):
    """Only the common parameters."""


class Fcfs:
    """Equal scores: the arrival order breaks every tie."""

    reads_view: ClassVar[bool] = False  # the loop need not build the columns

    def __init__(self, config: Config) -> None:
        self.config = config

    def score(self, view: ScheduleView) -> FloatArray:
        """Return zeros."""
        return np.zeros(view.arrival_s.shape[0])


def build(config: Config) -> SchedulingPolicy:
    """Return the policy."""
    return Fcfs(config)
