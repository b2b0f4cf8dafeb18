"""The ablation: every arm relative to the baseline, in both worlds, with intervals and the paper's claim beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, NullLocator

from figures import style

__all__ = ["draw"]

NEEDS = ("world", "arm", "metric", "ratio", "low", "high")
_LOOK = {"simulation": ("blue", "o"), "engine": ("vermillion", "s")}


def _ratio_axis(axis: Any) -> None:
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    low, high = min(low, 0.93), max(high, 1.08)
    axis.set_xlim(low, high)
    ladder = np.array([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100])
    inside = [v for v in ladder if low <= v <= high]
    span = np.log(high / low)
    ticks: list[float] = []
    for value in sorted(inside, key=lambda v: abs(np.log(v))):  # from 1 outwards, dropping crowded labels
        if all(abs(np.log(value / kept)) > span / 9 for kept in ticks):
            ticks.append(value)
    axis.set_xticks(sorted(ticks))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.xaxis.set_minor_locator(NullLocator())


def draw(
    effects: Mapping[str, Any] | str | os.PathLike[str],
    claims: Mapping[str, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    arms: Sequence[str],
    metrics: Mapping[str, str],
) -> None:
    """Draw dots with intervals, one panel per metric, one line per arm and world; hollow diamonds are the paper's.

    Parameters
    ----------
    effects : table
        Our runs: ``world`` ("simulation" or "engine"), ``arm``, ``metric``, ``ratio`` to the baseline and its
        confidence interval ``low``, ``high`` (NaN where there is none).
    claims : table
        The paper's, under our metric names: ``arm``, ``metric``, ``paper`` (ratio to the baseline). Only ever drawn
        hollow.
    path : path
        PNG to write.
    arms : sequence of str
        From top to bottom.
    metrics : mapping
        Metric to panel title, which says which direction is better.
    """
    ours, theirs = style.columns(effects), style.columns(claims)
    style.require(ours, NEEDS, "effects")
    style.require(theirs, ("arm", "metric", "paper"), "claims")
    worlds = [world for world in _LOOK if (ours["world"] == world).any()]
    cols = 2 if len(metrics) > 1 else 1
    rows = -(-len(metrics) // cols)
    with style.canvas(path, rows=rows, cols=cols, size=(8.6, 0.9 + 2.5 * rows), sharey=True) as (figure, axes):
        for axis, metric in zip(axes, metrics, strict=False):
            axis.axvline(1.0, color=style.GREY, lw=1)
            for line, arm in enumerate(arms):
                if line % 2:
                    axis.axhspan(line - 0.5, line + 0.5, color="#f5f5f5", zorder=0)
                for number, world in enumerate(worlds):
                    pick = (ours["world"] == world) & (ours["arm"] == arm) & (ours["metric"] == metric)
                    if not pick.any():
                        continue
                    ratio, low, high = (float(ours[name][pick][0]) for name in ("ratio", "low", "high"))
                    if not np.isfinite(ratio):
                        continue
                    name, marker = _LOOK[world]
                    at = line + (number - (len(worlds) - 1) / 2) * 0.3
                    if np.isfinite(low) and np.isfinite(high):
                        axis.plot([low, high], [at, at], color=style.COLOURS[name], lw=2, solid_capstyle="butt")
                    axis.plot(ratio, at, marker, color=style.COLOURS[name])
                pick = (theirs["arm"] == arm) & (theirs["metric"] == metric)
                if pick.any():
                    said = float(theirs["paper"][pick][0])
                    axis.plot(said, line, "D", mfc="none", mec=style.COLOURS["black"], ms=6, zorder=4)
            axis.set_yticks(range(len(arms)), arms)
            axis.set_ylim(len(arms) - 0.5, -0.5)
            axis.grid(visible=False, axis="y")
            _ratio_axis(axis)
        for axis in axes[len(metrics) :]:
            axis.set_visible(False)
        for axis in axes[max(0, len(metrics) - cols) : len(metrics)]:
            axis.set_xlabel("ratio to baseline (log scale)")
        style.label_panels(axes, list(metrics.values()))
        for world in worlds:
            name, marker = _LOOK[world]
            axes[0].plot([], [], marker, ls="-", color=style.COLOURS[name], label=f"{world} (ours, 95% interval)")
        axes[0].plot([], [], "D", mfc="none", mec="black", label="paper's claim (not measured here)")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
