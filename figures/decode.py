"""Decode steps of several engines beside the floor that memory sets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from figures import style

__all__ = ["draw"]


def draw(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw one panel per (batch, context): a bar per engine, its spread over rounds, its floor, its tokens per second.

    Parameters
    ----------
    rows : sequence of mapping
        ``engine``, ``batch``, ``context``, ``step_ms``, ``step_ms_low``, ``step_ms_high``, ``floor_ms``,
        ``tokens_per_s``: the rows of ``entropic bench decode``.
    path : path
        PNG to write.
    title : str
    """
    cells = list(dict.fromkeys((int(row["batch"]), int(row["context"])) for row in rows))
    engines = list(dict.fromkeys(str(row["engine"]) for row in rows))
    palette = [style.COLOURS[name] for name in ("blue", "green", "vermillion", "orange", "purple", "sky")]
    size = (3.4 * max(2, len(cells)) + 1.2, 0.42 * len(engines) + 1.5)
    with style.canvas(path, cols=len(cells), size=size, sharey=True) as (figure, axes):
        if title:
            figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        for axis, cell in zip(axes, cells, strict=True):
            mine = [row for row in rows if (row["batch"], row["context"]) == cell]
            at = [engines.index(row["engine"]) for row in mine]
            step, floor, low, high = (
                np.array([row[name] for row in mine], float)
                for name in ("step_ms", "floor_ms", "step_ms_low", "step_ms_high")
            )
            colours = [palette[i % len(palette)] for i in at]
            axis.barh(at, step, height=0.62, color=colours, alpha=0.85)
            error = np.maximum(0.0, [step - low, high - step])
            axis.errorbar(step, at, xerr=error, fmt="none", ecolor=style.COLOURS["black"], elinewidth=1, capsize=2.5)
            axis.vlines(floor, np.array(at) - 0.36, np.array(at) + 0.36, color="black", lw=2.2)
            edge = 1.42 * float(high.max())
            for place, row, end in zip(at, mine, high, strict=True):
                axis.text(end + 0.015 * edge, place, f"{row['tokens_per_s']:,.0f} tok/s", va="center", fontsize=8)
            axis.set_xlim(0, edge)
            axis.set_title(f"{cell[0]} x {cell[1]:,} tokens")
            axis.set_xlabel("ms per decode step")
            axis.grid(visible=False, axis="y")
        axes[0].set_yticks(range(len(engines)), engines)
        axes[0].invert_yaxis()
        axes[0].plot([], [], color="black", lw=2.2, label="floor: bytes read / read bandwidth")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left")
