"""Speculative decoding: how much faster than plain decoding, by draft-length rule and kind of text."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.ticker import NullLocator

from figures import style

__all__ = ["draw"]

NEEDS = ("mode", "kind", "arm", "speedup", "speedup_low", "speedup_high", "acceptance", "drafted_per_step")


def draw(rows: Mapping[str, Any] | str | os.PathLike[str], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw speed relative to plain decoding with intervals, and below it the share of drafted tokens accepted.

    Parameters
    ----------
    rows : table
        One row per (mode, kind, arm), arms in drawing order: ``speedup`` with ``speedup_low`` and ``speedup_high``
        (tokens per second over those without drafts), ``acceptance``, ``drafted_per_step``.
    path : path
        PNG to write.
    title : str
        Figure title.
    """
    table = style.columns(rows)
    style.require(table, NEEDS, "speculation")
    modes, kinds, arms = (list(dict.fromkeys(table[name].tolist())) for name in ("mode", "kind", "arm"))
    palette = [style.GREY, *(style.COLOURS[c] for c in ("sky", "blue", "green", "orange", "vermillion", "purple"))]
    with style.canvas(
        path, rows=2, cols=len(modes), size=(5.4 * len(modes), 5.6), sharex=True, sharey="row",
        gridspec_kw={"height_ratios": [2, 1]},
    ) as (figure, axes):  # fmt: skip
        if title:
            figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        for column, mode in enumerate(modes):
            speed, share = axes[column], axes[len(modes) + column]
            for number, arm in enumerate(arms):
                pick = [(table["mode"] == mode) & (table["kind"] == kind) & (table["arm"] == arm) for kind in kinds]
                x = np.array([i for i, at in enumerate(pick) if at.any()]) + 0.13 * (number - (len(arms) - 1) / 2)
                value, low, high, accepted, drafted = (
                    np.array([table[name][at][0] for at in pick if at.any()], float)
                    for name in ("speedup", "speedup_low", "speedup_high", "acceptance", "drafted_per_step")
                )
                look = {"color": palette[number % len(palette)], "marker": style.MARKERS[number % len(style.MARKERS)]}
                speed.errorbar(
                    x, value, yerr=[np.maximum(value - low, 0), np.maximum(high - value, 0)], ls="none", lw=1.1,
                    label=arm, **look,
                )  # fmt: skip
                some = drafted > 0
                share.plot(x[some], accepted[some], ls="none", **look)
            for axis in (speed, share):
                axis.set_xticks(range(len(kinds)), kinds)
                axis.grid(visible=False, axis="x")
                for edge in range(1, len(kinds)):
                    axis.axvline(edge - 0.5, color="#e4e4e4", lw=0.7)
            speed.axhline(1.0, color="black", lw=0.8)
            share.set_ylim(0, 1.06)
        axes[0].set_ylabel("tokens per second\n(1 = plain decoding)")
        axes[len(modes)].set_ylabel("drafted tokens accepted")
        axes[0].legend(ncols=2, loc="upper left", title="draft length")
        axes[0].set_yscale("log")
        low, high = float(table["speedup_low"].min()), float(table["speedup_high"].max())
        ticks = (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 8, 12)
        axes[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes[0].yaxis.set_minor_locator(NullLocator())
        axes[0].set_ylim(0.9 * min(low, 1.0), 1.8 * max(high, 1.2))
        style.label_panels(axes, [*(f"speed, {mode}" for mode in modes), *(f"acceptance, {mode}" for mode in modes)])
