"""How well a fitted entropy model describes its bank: quantiles, autocorrelation, varentropy, sample paths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from figures import style

__all__ = ["draw"]

NEEDS = ("temperature", "statistic", "argument", "observed", "low", "middle", "high")
PATHS = ("temperature", "source", "token", "entropy_nats")


def draw(tables: Mapping[str, Any], path: str | os.PathLike[str], *, most: int = 3) -> None:
    """Draw the report of ``entropic fit-entropy``: recorded values on the model's intervals.

    One column of panels per temperature.

    Parameters
    ----------
    tables : mapping
        ``goodness`` and ``paths`` as :mod:`sim.goodness` makes them, or the paths of their files.
    path : path
        PNG to write.
    most : int
        At most so many temperatures: the lowest, the highest, and some between.
    """
    table, paths = style.columns(tables["goodness"]), style.columns(tables["paths"])
    style.require(table, NEEDS, "goodness")
    style.require(paths, PATHS, "paths")
    every = np.unique(table["temperature"])
    shown = every[np.unique(np.linspace(0, every.shape[0] - 1, min(most, every.shape[0])).round().astype(int))]
    count = shown.shape[0]
    with style.canvas(path, rows=4, cols=count, size=(3.9 * count, 11.0)) as (figure, axes):
        figure.get_layout_engine().set(wspace=0.05, hspace=0.05)  # type: ignore[union-attr]
        titles = []
        for column, t in enumerate(shown):
            quantiles, lags, slopes, trace = (axes[row * count + column] for row in range(4))
            _band(quantiles, _rows(table, t, "quantile"), against_model=True)
            quantiles.set_xlabel("model quantile of entropy (nats)")
            quantiles.set_ylabel("recorded quantile (nats)")
            _band(lags, _rows(table, t, "autocorrelation"))
            lags.axhline(0.0, color=style.GREY, lw=0.8)
            lags.set_xlabel("lag (tokens)")
            lags.set_ylabel("autocorrelation of entropy")
            _band(slopes, _rows(table, t, "varentropy at entropy fifth"))
            slopes.set_ylim(bottom=0.0)
            slopes.set_xlabel("fifth of the tokens by entropy")
            slopes.set_ylabel("mean varentropy (nats²)")
            for source, colour in (("recorded", "black"), ("model", "sky")):
                pick = (paths["temperature"] == t) & (paths["source"] == source)
                trace.plot(
                    paths["token"][pick], paths["entropy_nats"][pick], color=style.COLOURS[colour], lw=0.9, label=source
                )
            trace.set_ylim(bottom=0.0)
            trace.set_xlabel("token")
            trace.set_ylabel("model entropy (nats)")
            titles.append(f"T = {t:g}")
        style.label_panels(axes[:count], titles)
        axes[0].legend()
        axes[3 * count].legend(loc="upper right")


def _rows(table: Mapping[str, np.ndarray], t: float, name: str) -> dict[str, np.ndarray]:
    pick = (table["temperature"] == t) & (table["statistic"] == name)
    return {key: table[key][pick].astype(float) for key in ("argument", "observed", "low", "middle", "high")}


def _band(axis: Any, rows: Mapping[str, np.ndarray], *, against_model: bool = False) -> None:
    """Draw the model's 95% interval as a band and recorded values as points, filled where they lie outside."""
    x = rows["middle"] if against_model else rows["argument"]
    axis.fill_between(x, rows["low"], rows["high"], color=style.COLOURS["sky"], alpha=0.35, label="model, 95%")
    axis.plot(x, rows["middle"], color=style.COLOURS["blue"], lw=1.0, label="model, median")
    outside = (rows["observed"] < rows["low"]) | (rows["observed"] > rows["high"])
    axis.plot(x[~outside], rows["observed"][~outside], "o", color="black", mfc="white", label="recorded")
    axis.plot(x[outside], rows["observed"][outside], "s", color=style.COLOURS["vermillion"], label="recorded, outside")
