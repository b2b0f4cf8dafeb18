"""Expected gain in quality of experience per unit of memory.

A reader expects the first token ``ttft_s`` after asking and from then on ``reading_tokens_per_s``: by time t

    d(t) = min(limit, 1 + rate (t - arrival - ttft)),   0 before arrival + ttft.

Tokens ahead of the reader are worth nothing yet. The quality of experience up to t is the area under min(delivered, d)
over the area under d. The score is what being served for the next ``horizon_s`` would add to it, per token of memory:

    score = [A(served) - A(not served)] / [integral of d from arrival to now + horizon] / known tokens

with A the area under min(delivered, d) over the horizon; a served request gets its next token after its pending tokens
are computed and then one per step, at the steps' recent mean duration. So a request whose reader has enough to read
gives way, and so does one already far behind, whose quality a seat can hardly raise (the waiting bound serves it).

After Liu et al., "Andes: Defining and Enhancing Quality-of-Experience in LLM-Based Text Streaming Services" (2024):
expected token delivery, gain of serving over waiting, context length as the price. Ours: the reader catches up at once
(delivered capped by d, where the paper lets a late reader go on at reading speed), and areas are midpoint sums over 16
parts of the horizon. Lengths are not predicted: demand goes on to the token limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entropic_ctl import fields
from entropic_ctl.scheduling.base import ScheduleView, SchedulingConfig, SchedulingPolicy
from entropic_ctl.signals import FloatArray

__all__ = ["Config", "QualityGain", "build"]

_PARTS = 16


@dataclass(frozen=True)
class Config(SchedulingConfig):
    """What readers expect, and how far ahead to look."""

    ttft_s: float = fields.number(1.0, 0.0, 1e6, "expected time to the first token, seconds")
    reading_tokens_per_s: float = fields.number(5.0, 0.0, 1e6, "reading speed, tokens per second", open_lo=True)
    horizon_s: float = fields.number(2.0, 0.0, 1e6, "time over which the gain is counted, seconds", open_lo=True)


class QualityGain:
    """Gain in quality of experience per token of memory."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._after_s: FloatArray = (np.arange(_PARTS, dtype=np.float64) + 0.5) * (config.horizon_s / _PARTS)

    def demanded_area(self, view: ScheduleView, until_s: float) -> FloatArray:
        """Return the integral of d from the arrival to ``until_s``, shape (L,), token seconds (exact)."""
        c = self.config
        late = np.maximum(until_s - view.arrival_s - c.ttft_s, 0.0)
        rise = np.minimum((view.token_limit - 1) / c.reading_tokens_per_s, late)  # d still grows
        area: FloatArray = rise * (1.0 + 0.5 * c.reading_tokens_per_s * rise) + (late - rise) * view.token_limit
        return area

    def gain(self, view: ScheduleView) -> FloatArray:
        """Return what being served over the horizon adds to the quality of experience (0 to 1), shape (L,)."""
        c = self.config
        due_s = (view.arrival_s + c.ttft_s - view.now_s)[:, None]
        limit, have = view.token_limit[:, None], view.generated_tokens[:, None]
        late = self._after_s - due_s
        demand = np.where(late < 0, 0.0, np.minimum(1.0 + c.reading_tokens_per_s * late, limit))
        step_s = view.step_s or 1.0 / c.reading_tokens_per_s  # before the first step: as fast as one reads
        pending = np.maximum(view.known_tokens - view.cached_tokens, 1)
        start = np.ceil(pending / view.token_budget)[:, None] - 1.0  # steps before the one that gives a token
        more = np.maximum(np.floor(self._after_s / step_s - start), 0.0)
        served = np.minimum(np.minimum(have + more, limit), demand)
        area = (served - np.minimum(have, demand)).sum(axis=1) * (c.horizon_s / _PARTS)
        whole = self.demanded_area(view, view.now_s + c.horizon_s)
        gain: FloatArray = np.divide(area, whole, out=np.zeros(area.shape[0]), where=whole > 0)
        return gain

    def score(self, view: ScheduleView) -> FloatArray:
        """Return the gain per known token, shape (L,)."""
        score: FloatArray = self.gain(view) / view.known_tokens
        return score


def build(config: Config) -> SchedulingPolicy:
    """Return the policy."""
    return QualityGain(config)
