"""A workload before it is run: arrivals over time, and how long prompts and outputs are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, PercentFormatter

from figures import style

__all__ = ["draw"]

NEEDS = ("arrival_s", "prompt_tokens", "output_limit")
_BINS = 60


def draw(
    workload: Mapping[str, Any] | str | os.PathLike[str], path: str | os.PathLike[str], *, title: str = ""
) -> None:
    """Draw the arrival rate over time and the distribution of lengths.

    Parameters
    ----------
    workload : table
        One row per request: ``arrival_s`` (NaN where it waits for another request to leave; such rows are left out of
        the first panel), ``prompt_tokens``, ``output_limit``.
    path : path
        PNG to write.
    title : str
        Figure title.
    """
    table = style.columns(workload)
    style.require(table, NEEDS, "workload")
    times = table["arrival_s"].astype(float)
    times = times[np.isfinite(times)]
    with style.canvas(path, cols=2, size=(10.0, 3.7)) as (figure, axes):
        if title:
            figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        _rate(axes[0], times)
        for name, column, colour in (
            ("prompt", "prompt_tokens", "blue"),
            ("output limit", "output_limit", "vermillion"),
        ):
            values = np.sort(table[column].astype(float))
            share = np.arange(1, values.shape[0] + 1) / values.shape[0]
            axes[1].step(
                values, share, where="post", color=style.COLOURS[colour], label=f"{name}, mean {values.mean():,.0f}"
            )
        axes[1].set_xscale("log")
        axes[1].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 1 else ""))
        axes[1].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes[1].set_ylim(0, 1.02)
        axes[1].set_xlabel("tokens")
        axes[1].set_ylabel("requests at most so long")
        axes[1].legend(loc="upper left")
        waiting = table["arrival_s"].shape[0] - times.shape[0]
        style.label_panels(axes, (f"first arrivals ({waiting:,} follow others)" if waiting else "arrivals", "lengths"))


def _rate(axis: Any, times: np.ndarray) -> None:
    """Draw arrivals per second in equal bins, with their mean; all at one moment: one bar of their number."""
    span = float(times[-1] - times[0]) if times.shape[0] else 0.0
    if span <= 0.0:
        axis.bar([0], [times.shape[0]], width=0.4, color=style.COLOURS["blue"])
        axis.set_xticks([0], [f"all at {times[0]:g} s" if times.shape[0] else "none known"])
        axis.set_xlim(-1, 1)
        axis.set_ylabel("requests")
        return
    unit, name = next(
        (u, n)
        for u, n in ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "s"))
        if span >= 3 * u or u == 1.0
    )
    counts, edges = np.histogram(times, bins=min(_BINS, max(5, times.shape[0] // 5)))
    width = edges[1] - edges[0]
    axis.stairs(counts / width, edges / unit, fill=True, color=style.COLOURS["blue"], alpha=0.75)
    mean = times.shape[0] / span
    axis.axhline(mean, color="black", lw=1.0, ls="--", label=f"mean {mean:.3g} per s")
    axis.set_xlabel(f"time ({name}); bars of {width / unit:.2g} {name}")
    axis.set_ylabel("arrivals per second")
    axis.set_ylim(0, 1.2 * counts.max() / width)
    axis.legend(loc="upper right")
