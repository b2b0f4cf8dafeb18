"""Plain sentences from result tables: what got worse, what was guaranteed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from paper_repro.experiments import METRICS
from paper_repro.report import number

__all__ = ["guarantees", "worse"]

_NOTICE = 0.01
"""Smallest unresolved change (relative) worth a sentence."""


def worse(effects: Mapping[str, np.ndarray], arms: Sequence[str], runs: Mapping[str, np.ndarray]) -> list[str]:
    """Return one sentence per metric that got worse, then one per arm for what is not resolved; never empty.

    A metric is *resolved* worse if its whole 95% interval lies on the worse side of 1.
    """
    resolved: list[str] = []
    unresolved: dict[str, list[str]] = {}
    better_is = {metric.name: metric.higher_is_better for metric in METRICS}
    titles = {metric.name: metric.title for metric in METRICS}
    for i in range(effects["metric"].shape[0]):
        arm, world, metric = str(effects["arm"][i]), str(effects["world"][i]), str(effects["metric"][i])
        if arm not in arms or metric in ("τ", "quality"):
            continue
        ratio, low, high = (float(effects[name][i]) for name in ("ratio", "low", "high"))
        if not math.isfinite(ratio):
            continue
        sign = -1.0 if better_is[metric] else 1.0
        if sign * math.log(ratio) <= 0:
            continue
        known = math.isfinite(low) and math.isfinite(high)
        sure = known and (high < 1 if better_is[metric] else low > 1)
        shown = f"{100 * (ratio - 1):+.1f}%" + (
            f" [{100 * (low - 1):+.1f}%, {100 * (high - 1):+.1f}%]" if known else ""
        )
        if sure:
            resolved.append(f"{world}, {arm}: {titles[metric]} {shown}.")
        elif abs(ratio - 1) >= _NOTICE:
            unresolved.setdefault(f"{world}, {arm}", []).append(f"{titles[metric]} {shown}")
    out = resolved + [
        f"{where}, not resolved (the interval includes no change): {'; '.join(what)}."
        for where, what in unresolved.items()
    ]
    for world in dict.fromkeys(runs["world"].tolist()):
        for arm in arms:
            pick = (runs["world"] == world) & (runs["arm"] == arm)
            kl = runs["kl_nats"][pick] if "kl_nats" in runs else np.empty(0)
            kl = kl[np.isfinite(kl)]
            if kl.size and kl.mean() > 0:
                out.append(
                    f"{world}, {arm}: pruning moved the next-token distribution by {number(float(kl.mean()))} nats "
                    "of KL to dense attention per decode token."
                )
    return out or ["No metric got worse by more than 1%."]


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
