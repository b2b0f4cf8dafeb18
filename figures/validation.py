"""Simulator against engine: every cell of a validation, and the requests behind them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from figures import style

__all__ = ["draw"]

_ERRORS = ("setting", "utilisation", "metric", "engine", "engine_half", "simulated")
_REQUESTS = ("world", "setting", "utilisation", "tpot_s", "ttft_s")
_SHOWN = {
    "tpot_mean_s": ("TPOT", "blue"),
    "ttft_mean_s": ("TTFT", "orange"),
    "e2e_mean_s": ("E2E", "green"),
}


def draw(
    errors: Mapping[str, Any] | str | os.PathLike[str],
    requests: Mapping[str, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str],
) -> None:
    """Draw predicted against measured means, the errors by setting, and the distribution of TPOT.

    Parameters
    ----------
    errors : table
        One row per (setting, utilisation, metric): ``engine``, ``engine_half`` (half a 95% interval), ``simulated``.
    requests : table
        One row per request: ``world`` (engine or simulator), ``setting``, ``utilisation``, ``tpot_s``, ``ttft_s``.
    path : path
        PNG to write.
    """
    table, rows = style.columns(errors), style.columns(requests)
    style.require(table, _ERRORS, "errors")
    style.require(rows, _REQUESTS, "requests")
    with style.canvas(path, cols=3, size=(13.0, 4.6), gridspec_kw={"width_ratios": (1.0, 1.15, 1.0)}) as (_, axes):
        _scatter(axes[0], table)
        _errors(axes[1], table)
        _distributions(axes[2], rows)
        style.label_panels(axes, ("mean latencies, every cell", "error against repeat noise", "TPOT, base setting"))


def _scatter(axis: Any, table: Mapping[str, np.ndarray]) -> None:
    low, high = np.inf, 0.0
    for number, (metric, (name, colour)) in enumerate(_SHOWN.items()):
        pick = table["metric"] == metric
        x, y, half = (table[key][pick].astype(float) for key in ("engine", "simulated", "engine_half"))
        half = np.minimum(np.nan_to_num(half), 0.95 * x)  # a logarithmic axis has no room below 0
        look = {"color": style.COLOURS[colour], "marker": style.MARKERS[number]}
        axis.errorbar(x, y, xerr=half, ls="", ms=4.5, elinewidth=0.8, label=name, **look)
        low, high = min(low, x.min(), y.min()), max(high, x.max(), y.max())
    ends = np.array([0.8 * low, 1.25 * high])
    axis.plot(ends, ends, color=style.GREY, lw=1.0, zorder=0)
    axis.fill_between(ends, 0.95 * ends, 1.05 * ends, color=style.GREY, alpha=0.18, lw=0, label="within 5%", zorder=0)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("engine (s), 95% interval")
    axis.set_ylabel("simulator (s)")
    axis.legend(loc="upper left")


def _errors(axis: Any, table: Mapping[str, np.ndarray]) -> None:
    keys = list(dict.fromkeys(zip(table["setting"].tolist(), table["utilisation"].tolist(), strict=True)))
    base = keys[0][0]
    names = [f"{setting} at {u:g}" if setting == base else setting for setting, u in keys]
    at = np.arange(len(keys))[::-1]
    for number, (metric, (_, colour)) in enumerate(_SHOWN.items()):
        error, half = np.full(len(keys), np.nan), np.zeros(len(keys))
        for i, (setting, u) in enumerate(keys):
            mine = (table["metric"] == metric) & (table["setting"] == setting) & (table["utilisation"] == u)
            if mine.any():
                mean = float(table["engine"][mine][0])
                error[i] = 100 * (float(table["simulated"][mine][0]) / mean - 1)
                half[i] = 100 * float(np.nan_to_num(table["engine_half"][mine][0])) / mean
        look = {"color": style.COLOURS[colour], "marker": style.MARKERS[number]}
        axis.errorbar(error, at + 0.22 * (1 - number), xerr=half, ls="", ms=4.5, elinewidth=0.8, **look)
    reach = float(np.nanmax(np.abs(100 * (table["simulated"] / table["engine"] - 1)))) if keys else 10.0
    axis.set_xlim(-max(12.0, 1.3 * reach), max(12.0, 1.3 * reach))
    axis.axvspan(-5, 5, color=style.GREY, alpha=0.18, lw=0, zorder=0)
    axis.axvline(0, color=style.GREY, lw=1.0, zorder=0)
    axis.set_yticks(at, names)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("simulator / engine − 1 (%), engine's 95% interval")


def _distributions(axis: Any, rows: Mapping[str, np.ndarray]) -> None:
    base = rows["setting"] == rows["setting"][0]
    palette = ("sky", "blue", "vermillion", "purple")
    for number, u in enumerate(np.unique(rows["utilisation"][base])):
        for world, dash in (("engine", "-"), ("simulator", "--")):
            mine = base & (rows["utilisation"] == u) & (rows["world"] == world) & np.isfinite(rows["tpot_s"])
            if not mine.any():
                continue
            x = np.sort(1e3 * rows["tpot_s"][mine].astype(float))
            y = np.arange(1, x.shape[0] + 1) / x.shape[0]
            label = f"utilisation {u:g}" if world == "engine" else None
            axis.step(x, y, where="post", ls=dash, color=style.COLOURS[palette[number % len(palette)]], label=label)
    axis.plot([], [], color="black", label="engine")
    axis.plot([], [], color="black", ls="--", label="simulator")
    axis.set_xlabel("TPOT of a request (ms)")
    axis.set_ylabel("share of requests below")
    axis.set_ylim(0, 1.02)
    axis.legend(loc="lower right")
