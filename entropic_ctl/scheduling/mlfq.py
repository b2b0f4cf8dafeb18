"""Multi-level feedback queue: requests that have received little service go before those that have received much.

    score = -level,   level = number of thresholds b, b + b r, b + b r + b r^2, ... that the attained service has passed

Attained service is counted in steps (an output token is one, a prompt token the share of a step's token budget it
fills), so level k is left after a quantum of b r^k steps. Nothing needs to be predicted: short requests finish in the
first levels. The classical rule (Corbato et al., 1962); within a level, first come first served.

``entry = "skip"`` is the skip-join variant of FastServe (Wu et al., 2023): the prompt is known, so a request whose
prefill does not fit the quantum of the first level starts in the first level whose quantum it fits.

``boost_s`` > 0 forgets attained service (and the entry level) of all live requests every so many seconds, as the
textbook rule does against starvation; here the waiting bound guards against starvation anyway. The boost happens when
the order is first drawn in a new period [k boost_s, (k + 1) boost_s).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from entropic_ctl import fields
from entropic_ctl.scheduling.base import ScheduleView, SchedulingConfig, SchedulingPolicy
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["Config", "FeedbackQueue", "build"]


@dataclass(frozen=True)
class Config(SchedulingConfig):
    """Levels and their quanta, the way in, and the boost."""

    levels: int = fields.integer(6, 1, 64, "number of levels")
    base_steps: float = fields.number(8.0, 0.0, 1e9, "b: quantum of the first level, steps of service", open_lo=True)
    ratio: float = fields.number(2.0, 1.0, 1e3, "r: quantum of a level over that of the one before")
    entry: str = fields.choice(
        "top", ("top", "skip"), "level a request starts in: the first, or the one its prompt fits"
    )
    boost_s: float = fields.number(0.0, 0.0, 1e9, "seconds between boosts of everybody to the first level; 0: never")


class FeedbackQueue:
    """Levels from attained service; state: what each live request had attained at the last boost."""

    stateful: ClassVar[bool] = True  # the order is drawn whenever somebody comes or goes

    def __init__(self, config: Config) -> None:
        self.config = config
        self._quantum: FloatArray = config.base_steps * config.ratio ** np.arange(config.levels - 1, dtype=np.float64)
        self._threshold: FloatArray = np.cumsum(self._quantum)
        self._period = 0
        self._boosted: IntArray = np.empty(0, np.int64)  # arrival orders, rising
        self._before: FloatArray = np.empty(0)  # attained at the boost, steps

    def level(self, view: ScheduleView) -> IntArray:
        """Return the level of each request, 0 first; shape (L,)."""
        c, prompt = self.config, view.prompt_tokens / view.token_budget
        attained = view.prompt_computed / view.token_budget + view.generated_tokens
        entry = np.searchsorted(self._quantum, prompt) if c.entry == "skip" else np.zeros(prompt.shape[0], np.int64)
        if c.boost_s > 0:
            period = int(view.now_s // c.boost_s)
            if period > self._period:
                self._period = period
                self._boosted, self._before = view.arrival_order, attained
            elif self._boosted.shape[0]:
                here = np.isin(self._boosted, view.arrival_order, assume_unique=True)
                self._boosted, self._before = self._boosted[here], self._before[here]
            row = np.searchsorted(view.arrival_order, self._boosted)
            attained = attained.copy()
            attained[row] -= self._before
            entry[row] = 0
        level: IntArray = np.maximum(np.searchsorted(self._threshold, attained, side="right"), entry)
        return level

    def score(self, view: ScheduleView) -> FloatArray:
        """Return minus the level, shape (L,)."""
        return -self.level(view).astype(np.float64)


def build(config: Config) -> SchedulingPolicy:
    """Return the policy."""
    return FeedbackQueue(config)
