"""Plain sentences from result tables: what improved, what got worse, what was guaranteed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paper_repro.experiments import METRICS
from paper_repro.report import number
from paper_repro.verdicts import SAME

__all__ = ["Change", "changes", "guarantees", "improved", "unresolved", "worse"]

_NOTICE = 0.01
"""Smallest unresolved change (relative) worth a mention."""
_NEUTRAL = ("τ", "quality")
"""More entropic time is neither better nor worse by itself; quality is a proxy, told as KL."""


@dataclass(frozen=True, slots=True)
class Change:
    """One arm's effect on one metric.

    ``state`` is "better" or "worse" if the whole 95% interval lies on that side of 1, else "unresolved".
    """

    world: str
    arm: str
    metric: str
    title: str
    ratio: float
    low: float
    high: float
    state: str

    @property
    def size(self) -> float:
        """|ln ratio|."""
        return abs(math.log(self.ratio))

    @property
    def small(self) -> bool:
        """True if the whole interval lies within the band of no effect."""
        return max(abs(math.log(self.low)), abs(math.log(self.high))) <= SAME

    @property
    def shown(self) -> str:
        """Change in percent with its interval."""
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return f"{self.title} {_percent(self.ratio)} (one run, no interval)"
        return f"{self.title} {_percent(self.ratio)} [{_percent(self.low)}, {_percent(self.high)}]"


def _percent(ratio: float) -> str:
    change = 100 * (ratio - 1)
    return f"{change:+.0f}%" if abs(change) >= 9.95 else f"{change:+.1f}%"


def changes(effects: Mapping[str, np.ndarray], arms: Sequence[str]) -> list[Change]:
    """Return every measured change of the arms, largest first within (world, arm)."""
    known = {metric.name: metric for metric in METRICS}
    out = []
    for i in range(effects["metric"].shape[0]):
        arm, world, metric = str(effects["arm"][i]), str(effects["world"][i]), str(effects["metric"][i])
        ratio, low, high = (float(effects[name][i]) for name in ("ratio", "low", "high"))
        if arm not in arms or metric in _NEUTRAL or not math.isfinite(ratio):
            continue
        state = "unresolved"
        if math.isfinite(low) and math.isfinite(high) and (low > 1 or high < 1):
            state = "better" if (low > 1) == known[metric].higher_is_better else "worse"
        out.append(Change(world, arm, metric, known[metric].title, ratio, low, high, state))
    worlds = list(dict.fromkeys(effects["world"].tolist()))
    return sorted(out, key=lambda c: (worlds.index(c.world), arms.index(c.arm), -c.size))


def _of_state(found: Sequence[Change], state: str) -> list[str]:
    out = [f"{c.world}, {c.arm}: {c.shown}." for c in found if c.state == state and not c.small]
    small = [f"{c.world}, {c.arm}, {c.title}" for c in found if c.state == state and c.small]
    if small:
        out.append(f"{state.capitalize()}, but by no more than {SAME:.0%}: {'; '.join(small)}.")
    return out


def improved(effects: Mapping[str, np.ndarray], arms: Sequence[str]) -> list[str]:
    """Return one sentence per metric that surely got better, largest first; never empty."""
    return _of_state(changes(effects, arms), "better") or ["No metric surely got better."]


def worse(effects: Mapping[str, np.ndarray], arms: Sequence[str], runs: Mapping[str, np.ndarray]) -> list[str]:
    """Return one sentence per metric that surely got worse, largest first; never empty.

    Surely: the whole 95% interval lies on the worse side of 1. Preemptions are counts, often zero in the baseline, and
    are told as means per run; so is the KL that pruning causes.
    """
    out = _of_state(changes(effects, arms), "worse")
    for world in dict.fromkeys(runs["world"].tolist()):
        for arm in arms:
            before, after = (_mean(runs, world, a, "preemptions") for a in ("baseline", arm))
            if after > before:
                out.append(f"{world}, {arm}: {number(after)} preemptions a run, {number(before)} in the baseline.")
            if (kl := _mean(runs, world, arm, "kl_nats")) > 0:
                out.append(
                    f"{world}, {arm}: pruning moved the next-token distribution by {number(kl)} nats of KL to dense "
                    "attention per decode token."
                )
    return out or ["No metric surely got worse."]


def unresolved(effects: Mapping[str, np.ndarray], arms: Sequence[str]) -> list[str]:
    """Return, one line per world and arm, the changes whose interval includes none."""
    lines: dict[str, list[str]] = {}
    for c in changes(effects, arms):
        if c.state == "unresolved" and abs(c.ratio - 1) >= _NOTICE:
            lines.setdefault(f"{c.world}, {c.arm}", []).append(c.shown)
    return [f"{where}: {'; '.join(what)}." for where, what in lines.items()]


def _mean(runs: Mapping[str, np.ndarray], world: str, arm: str, column: str) -> float:
    if column not in runs:
        return math.nan
    values = runs[column][(runs["world"] == world) & (runs["arm"] == arm)]
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else math.nan


def guarantees(rows: int, violations: int, worst_share: float, replay: str) -> list[str]:
    """Return what was promised and whether it held.

    Parameters
    ----------
    rows : int
        Pruned decode rows on the engine.
    violations : int
        Rows whose certificate exceeded their budget.
    worst_share : float
        Largest certificate / budget.
    replay : str
        Outcome of the replay, "" if none was made.
    """
    if rows:
        held = "held" if not violations else f"VIOLATED in {violations:,} rows"
        said = f"Certified information loss within budget: {held} in {rows:,} pruned decode rows"
        out = [f"{said} (largest certificate / budget: {worst_share:.3f})."]
    else:
        out = ["No decode row was pruned: nothing to certify."]
    return out + ([replay] if replay else [])
