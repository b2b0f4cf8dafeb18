"""From paired runs to a verdict on a claim.

Runs of two arms with the same seed share arrivals, prompts and random streams (common random numbers), so the log ratio
is taken within each pair and its mean gets a Student interval over pairs: with d_i = ln(x_i / y_i), i = 1..n,
mean(d) +- t_{n-1, 0.975} s_d / sqrt(n), exponentiated. Log ratios, because every metric is positive and the claims are
ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sim.intervals import Effect, paired

__all__ = ["SAME", "Effect", "Judgement", "judge", "paired"]

SAME = 0.02
"""Half-width (log ratio) of the band in which an effect is too small to count, in either direction."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and the sentence that justifies it."""

    verdict: str
    reason: str


def judge(effect: Effect, paper: float, *, higher_is_better: bool, not_identifiable: str = "") -> Judgement:
    """Compare a measured effect with a claimed ratio.

    On the scale of improvement (log ratio, sign so that positive is better) let [l, h] be our interval, c the claim.

    - *not identifiable*: a reason is given, there are no usable pairs, or no pair differs at all;
    - claimed change (c != 0): *not reproduced* if [l, h] lies inside +-b, b = min(2%, |c| / 2), whatever its sign: no
      effect worth the name; *reproduced* if l >= c / 2 and h >= c (a wide interval that merely holds c does not
      count); *partly* if [l, h] lies on the claimed side of 0 otherwise; *refuted* if it lies beyond b on the other
      side; else *not reproduced* (the reason says what the interval excludes and what it leaves open). A claim of 2%
      gets the narrower band, or it could never be met;
    - claimed no change (c = 0): *reproduced* if [l, h] is within +-2%; *refuted* if it is worse than that;
      otherwise *not reproduced* (better than claimed counts as *reproduced*).

    Parameters
    ----------
    effect : Effect
    paper : float
        Claimed ratio.
    higher_is_better : bool
    not_identifiable : str
        Why this experiment cannot decide the claim, if it cannot.
    """
    if not_identifiable:
        return Judgement("not identifiable", not_identifiable)
    if effect.pairs == 0:
        return Judgement("not identifiable", "this metric was not measured in this world")
    if effect.identical and effect.pairs > 1:
        return Judgement(
            "not identifiable", "the arm equals the baseline in every run: this workload does not exercise it"
        )
    if not (math.isfinite(effect.low) and math.isfinite(effect.high)):
        return Judgement("not reproduced", "one pair of runs gives no interval; run more repeats")
    sign = 1.0 if higher_is_better else -1.0
    low, high = sorted((sign * math.log(effect.low), sign * math.log(effect.high)))
    claimed = sign * math.log(paper)
    shown = f"{effect.ratio:.3f} [{effect.low:.3f}, {effect.high:.3f}]"
    if claimed == 0.0:
        return _unchanged(low, high, shown)
    if claimed < 0:  # the paper itself says it gets worse: mirror, so that "the claimed side" is positive
        low, high, claimed = -high, -low, -claimed
    return _changed(low, high, claimed, shown, max(abs(effect.low - 1), abs(effect.high - 1)))


def _changed(low: float, high: float, claimed: float, shown: str, most: float) -> Judgement:
    """Judge [low, high] against a claimed change > 0; ``most`` is the largest relative effect the interval allows."""
    band = min(SAME, claimed / 2)
    if -band <= low and high <= band:
        size = f"no effect: within {band:.0%} (none larger than {max(most, 5e-4):.1%})"
        return Judgement("not reproduced", f"{shown}: {size}")
    if low > 0:
        if high < claimed:
            return Judgement("partly", f"{shown}: the claimed direction, but short of the claimed size")
        if low < claimed / 2:
            return Judgement("partly", f"{shown}: the claimed direction, but less than half the claim is established")
        return Judgement("reproduced", f"{shown}: at least half established, and not short of the claimed size")
    if high < -band:
        return Judgement("refuted", f"{shown}: the opposite direction, by more than {band:.0%}")
    if high < 0:
        return Judgement("not reproduced", f"{shown}: the opposite direction, but not surely by more than {band:.0%}")
    if high < claimed:
        return Judgement("not reproduced", f"{shown}: no effect resolved, and the claimed size is excluded")
    return Judgement("not reproduced", f"{shown}: undecided, the interval holds both no effect and the claimed size")


def _unchanged(low: float, high: float, shown: str) -> Judgement:
    if low >= -SAME:
        word = "unchanged" if high <= SAME else "no worse"
        return Judgement("reproduced", f"{shown}: {word}, within {SAME:.0%}")
    if high < -SAME:
        return Judgement("refuted", f"{shown}: worse by more than {SAME:.0%}")
    return Judgement("not reproduced", f"{shown}: undecided, the interval reaches beyond {SAME:.0%} worse")


def interaction(full: Sequence[float], parts: Sequence[Sequence[float]], baseline: Sequence[float]) -> Effect:
    """Return full / baseline over the product of part / baseline, paired by seed: 1 is multiplicative, no synergy.

    Parameters
    ----------
    full, baseline : sequence of float, length n
    parts : sequence of such sequences
        One per arm that the full loop combines.
    """
    base = np.asarray(baseline, float)
    product = base.copy()
    for part in parts:
        product = product * np.asarray(part, float) / base
    return paired(full, product)
