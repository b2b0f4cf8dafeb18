"""The trials of a tuning run: what was gained in one objective against what it cost in another, and the Pareto set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from entropic_ctl.errors import BadInputError
from figures import style

__all__ = ["draw"]

_PREFIX = "cost."
_NAMES = {
    "latency": "latency per token",
    "p99_latency": "99th percentile of latency",
    "ttft": "time to first token",
    "throughput": "time per token of throughput",
    "tau_per_second": "seconds per nat of τ",
    "tau_per_kv_byte": "KV bytes per nat of τ",
    "tau_per_flop": "FLOPs per nat of τ",
    "energy": "joules per token",
    "quality": "loss of quality (proxy)",
    "weighted": "weighted sum of costs",
}


def draw(trials: Mapping[str, Any] | str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Draw every objective against the first one; lower left is better, the config as given is 0.

    Above all trials with intervals, below the Pareto set alone (it often sits in a corner of the space). Intervals
    are those of the comparison with the given config.

    Parameters
    ----------
    trials : table
        Columns ``trial``, ``status``, ``pareto``, ``chosen`` and, per objective, ``cost.NAME``, ``cost.NAME_low`` and
        ``cost.NAME_high`` (mean over seeds and 95% interval).
    path : path
        PNG to write.

    Raises
    ------
    BadInputError
        If a column is missing, or there is no objective.
    """
    table = style.columns(trials)
    style.require(table, ("trial", "status", "pareto", "chosen"), "trials")
    names = [
        column.removeprefix(_PREFIX)
        for column in table
        if column.startswith(_PREFIX) and not column.endswith(("_low", "_high"))
    ]
    if not names:
        raise BadInputError("no objective", where="trials table", allowed="columns cost.NAME")
    across, others = names[0], names[1:] or ["weighted"]
    shown = [f"{_PREFIX}{name}" for name in names] + ["weighted"] * (len(names) == 1)
    style.require(table, [f"{name}{end}" for name in shown for end in ("", "_low", "_high")], "trials")
    with style.canvas(path, rows=2, cols=len(others), size=(1.2 + 3.6 * len(others), 7.4)) as (figure, axes):
        for i, (axis, name) in enumerate(zip(axes, others * 2, strict=True)):
            _panel(axis, table, across, name, intervals=i < len(others))
        for axis, whole, name in zip(axes[len(others) :], axes, others, strict=False):
            _zoom(axis, whole, table, across, name)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        figure.suptitle(
            "change against the config as given, mean over the search's seeds; lower and further left is better",
            fontsize=9,
            x=0.01,
            ha="left",
        )


def _percent(cost: np.ndarray, name: str) -> np.ndarray:
    """Return a log ratio as a change in percent; the quality cost is no ratio and is scaled only."""
    return 100 * cost if name in ("quality", "weighted") else 100 * np.expm1(cost)


def _column(table: Mapping[str, np.ndarray], which: str, end: str = "") -> np.ndarray:
    return _percent(table[f"{which}{end}"] if which == "weighted" else table[f"{_PREFIX}{which}{end}"], which)


def _zoom(axis: Axes, whole: Axes, table: Mapping[str, np.ndarray], across: str, name: str) -> None:
    """Limit a panel to the Pareto set and the choice, never beyond ``whole``; the given config may fall outside."""
    front = table["pareto"].astype(bool)
    shown = front & (table["trial"] != 0) if (front & (table["trial"] != 0)).any() else front
    shown |= table["chosen"].astype(bool)
    for limit, outer, which in ((axis.set_xlim, whole.get_xlim(), across), (axis.set_ylim, whole.get_ylim(), name)):
        values = _column(table, which)[shown & np.isfinite(_column(table, which))]
        margin = max(0.15 * np.ptp(values), 0.05) if values.size else 1.0
        if values.size:
            limit(max(values.min() - margin, outer[0]), min(values.max() + margin, outer[1]))
    axis.set_title("the Pareto set, enlarged (no intervals)")


def _panel(axis: Axes, table: Mapping[str, np.ndarray], across: str, name: str, *, intervals: bool) -> None:
    x, y = _column(table, across), _column(table, name)
    good = (table["status"] == "ok") & np.isfinite(x) & np.isfinite(y)
    front, chosen = good & table["pareto"].astype(bool), good & table["chosen"].astype(bool)
    given = good & (table["trial"] == 0)
    axis.axhline(0, color=style.GREY, lw=0.8, zorder=1)
    axis.axvline(0, color=style.GREY, lw=0.8, zorder=1)
    axis.plot(x[good & ~front], y[good & ~front], "o", ms=4, color="#b5b5b5", label="dominated trial", zorder=2)
    bars: dict[str, Any] = {}
    for key, values, which in (("xerr", x, across), ("yerr", y, name)):
        ends = np.array([values - _column(table, which, "_low"), _column(table, which, "_high") - values])[:, front]
        if intervals and np.isfinite(ends).all():
            bars[key] = np.abs(ends)
    axis.errorbar(
        x[front],
        y[front],
        fmt="o",
        ms=5,
        elinewidth=0.7,
        color=style.COLOURS["blue"],
        ecolor=style.COLOURS["sky"],
        label="Pareto set, 95% interval",
        zorder=3,
        **bars,
    )
    axis.plot(x[given], y[given], "s", ms=7, color=style.COLOURS["black"], label="config as given", zorder=4)
    axis.plot(x[chosen], y[chosen], "*", ms=14, color=style.COLOURS["vermillion"], label="chosen", zorder=5)
    axis.set_xlabel(f"{_NAMES.get(across, across)}, %")
    axis.set_ylabel(_NAMES.get(name, name) + (", cost × 100" if name in ("quality", "weighted") else ", %"))
