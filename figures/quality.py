"""What pruning and temperature laws cost in quality: long text, written texts, hidden needles, by arm."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from figures import style
from figures.pruning_cost import whole_decades

__all__ = ["draw", "draw_needles"]

NEEDS = ("task", "metric", "group", "arm", "value", "low", "high", "difference", "difference_low", "difference_high")
NEEDLE_NEEDS = ("arm", "length", "depth", "retrieved", "log_p")
_DENSE, _CONTROL = "dense", "rounding"
_FLOOR = 1e-12
_LIKENESS = (("exact", "same text", 1.0), ("rouge_l", "ROUGE-L", 1.0), ("bleu", "BLEU / 100", 100.0))
_REPEATS = (
    ("distinct_1", "distinct-1"),
    ("distinct_2", "distinct-2"),
    ("repeated_4", "repeated\n4-grams"),
    ("longest_repeat", "longest\nrepeat"),
)


def _looks(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return colour and marker of each arm but dense."""
    names = [name for name in style.COLOURS if name != "black"]
    others = [arm for arm in arms if arm not in (_DENSE, _CONTROL)]
    looks: dict[str, dict[str, Any]] = {_CONTROL: {"color": style.GREY, "marker": "x"}}
    for number, arm in enumerate(others):
        looks[arm] = {"color": style.COLOURS[names[number % len(names)]], "marker": style.MARKERS[number % 6]}
    return {arm: looks[arm] for arm in arms if arm != _DENSE}


def _pick(table: Mapping[str, np.ndarray], task: str, metric: str, arm: str) -> np.ndarray:
    found = (table["task"] == task) & (table["metric"] == metric) & (table["arm"] == arm)
    return np.asarray(np.flatnonzero(found))


def _bars(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return error-bar lengths (2, n); none where there is no interval."""
    return np.nan_to_num(np.abs(np.stack([value - low, high - value])), nan=0.0)


def _by_context(
    axis: Axes, table: Mapping[str, np.ndarray], metric: str, prefix: str, looks: Mapping[str, Any]
) -> None:
    """Draw a metric of long text against the context, one line per arm, shifted a little so that bars stay apart."""
    for number, (arm, look) in enumerate(looks.items()):
        rows = _pick(table, "long text", metric, arm)
        rows = rows[[group.startswith("context") for group in table["group"][rows].tolist()]]
        x = np.array([float(group.split()[1]) for group in table["group"][rows].tolist()])
        names = ("difference", "difference_low", "difference_high") if prefix else ("value", "low", "high")
        value, low, high = (table[name][rows].astype(float) for name in names)
        if metric == "kl":
            value, low, high = (np.maximum(part, _FLOOR) for part in (value, low, high))
        shift = 1.0 + 0.04 * (number - (len(looks) - 1) / 2)
        axis.errorbar(x * shift, value, yerr=_bars(value, low, high), capsize=2.5, label=arm, **look)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xlabel("context (tokens)")


def _grouped(
    axis: Axes,
    table: Mapping[str, np.ndarray],
    metrics: Sequence[tuple[str, str, float]],
    group: str,
    prefix: str,
    looks: Mapping[str, Any],
) -> None:
    """Draw several metrics of the written texts side by side, one mark per arm."""
    names = ("difference", "difference_low", "difference_high") if prefix else ("value", "low", "high")
    for number, (arm, look) in enumerate(looks.items()):
        shift = 0.14 * (number - (len(looks) - 1) / 2)
        for place, (metric, _, unit) in enumerate(metrics):
            rows = _pick(table, "texts", metric, arm)
            rows = rows[table["group"][rows] == group]
            value, low, high = (table[name][rows].astype(float) / unit for name in names)
            bars = _bars(value, low, high)
            label = arm if place == 0 else None
            axis.errorbar([place + shift], value, yerr=bars, ls="", capsize=2.5, label=label, **look)
    axis.set_xticks(range(len(metrics)), [shown for _, shown, _ in metrics])
    axis.set_xlim(-0.6, len(metrics) - 0.4)
    axis.grid(visible=False, axis="x")


def draw(summary: Mapping[str, Any] | str | os.PathLike[str], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw KL and change of NLL by context, likeness of greedy texts to dense's, and change in self-repetition.

    Parameters
    ----------
    summary : table
        One row per comparison: ``task``, ``metric``, ``group``, ``arm``, ``value``, ``low``, ``high``, and the paired
        ``difference`` to dense with its interval. Panels without rows are left out.
    path : path
        PNG to write.
    title : str
        Figure title.
    """
    table = style.columns(summary)
    style.require(table, NEEDS, "summary")
    looks = _looks(list(dict.fromkeys(table["arm"].tolist())))
    tasks = set(table["task"].tolist())
    panels = [name for name in ("kl", "nll") if "long text" in tasks]
    panels += [name for name in ("likeness", "repetition") if "texts" in tasks]
    panels = panels or ["needle"]
    rows = -(-len(panels) // 2)
    titles = {
        "kl": "long text: KL to dense",
        "nll": "long text: change of NLL against dense",
        "likeness": "greedy texts: likeness to dense's",
        "repetition": "sampled texts: change of self-repetition",
        "needle": "needles: change of log-probability",
    }
    with style.canvas(path, rows=rows, cols=min(2, len(panels)), size=(10.2, 0.8 + 3.3 * rows)) as (figure, axes):
        for axis, panel in zip(axes, panels, strict=True):
            if panel == "kl":
                _by_context(axis, table, "kl", "", looks)
                axis.set_yscale("log")
                whole_decades(axis)
                axis.set_ylabel("mean KL (nats per token)")
            elif panel == "nll":
                _by_context(axis, table, "nll", "difference", looks)
                axis.axhline(0.0, color="black", lw=0.8)
                axis.set_ylabel("NLL − dense's (nats per token)")
            elif panel == "likeness":
                _grouped(axis, table, _LIKENESS, "greedy", "", looks)
                axis.set_ylim(-0.03, 1.05)
                axis.set_ylabel("share, or score of 1")
            elif panel == "repetition":
                _grouped(axis, table, [(*item, 1.0) for item in _REPEATS], "sampled", "difference", looks)
                axis.axhline(0.0, color="black", lw=0.8)
                axis.set_ylabel("share − dense's share")
            else:
                _needle_lengths(axis, table, looks)
        style.label_panels(axes, [titles[panel] for panel in panels])
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)))
        if title:
            figure.suptitle(f"{title}; bars: 95% intervals", fontsize=10.5, x=0.01, ha="left")


def _needle_lengths(axis: Axes, table: Mapping[str, np.ndarray], looks: Mapping[str, Any]) -> None:
    for arm, look in looks.items():
        rows = _pick(table, "needle", "log_p", arm)
        rows = rows[[group.startswith("length") for group in table["group"][rows].tolist()]]
        x = np.array([float(group.split()[1]) for group in table["group"][rows].tolist()])
        value, low, high = (
            table[name][rows].astype(float) for name in ("difference", "difference_low", "difference_high")
        )
        axis.errorbar(x, value, yerr=_bars(value, low, high), capsize=2.5, label=arm, **look)
    axis.axhline(0.0, color="black", lw=0.8)
    axis.set_xlabel("text around the needle (tokens)")
    axis.set_ylabel("log-probability − dense's (nats per token)")


def draw_needles(
    needles: Mapping[str, Any] | str | os.PathLike[str], path: str | os.PathLike[str], *, title: str = ""
) -> None:
    """Draw heat maps over length and depth: what dense finds, and how each other arm's log-probability differs.

    Parameters
    ----------
    needles : table
        One row per needle and arm: ``arm``, ``length`` (tokens), ``depth`` (0 start, 1 end), ``retrieved`` (0 or 1),
        ``log_p`` (nats per token of the number).
    path : path
        PNG to write.
    title : str
        Figure title.
    """
    table = style.columns(needles)
    style.require(table, NEEDLE_NEEDS, "needles")
    arms = list(dict.fromkeys(table["arm"].tolist()))
    lengths, depths = np.unique(table["length"].astype(float)), np.unique(table["depth"].astype(float))

    def grid(arm: str, name: str) -> np.ndarray:
        out = np.full((depths.size, lengths.size), np.nan)
        for i, j in np.ndindex(out.shape):
            cell = (table["arm"] == arm) & (table["depth"] == depths[i]) & (table["length"] == lengths[j])
            out[i, j] = table[name][cell].astype(float).mean() if cell.any() else np.nan
        return out

    others = [arm for arm in arms if arm != _DENSE]
    base = grid(_DENSE, "log_p")
    changes = {arm: grid(arm, "log_p") - base for arm in others}
    top = max(0.01, max((float(np.nanmax(np.abs(change))) for change in changes.values()), default=0.01))
    columns = 1 + len(others)
    with style.canvas(path, cols=columns, size=(2.0 + 2.7 * columns, 3.9), sharey=True) as (figure, axes):
        shown = [(base, "viridis", None, None), *((changes[arm], "RdBu", -top, top) for arm in others)]
        images = []
        for axis, arm, (values, colours, low, high) in zip(axes, [_DENSE, *others], shown, strict=True):
            images.append(axis.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto", origin="upper"))
            found, middle = grid(arm, "retrieved"), (np.nanmin(values) + np.nanmax(values)) / 2
            for i, j in np.ndindex(values.shape):
                dark = values[i, j] < middle if arm == _DENSE else abs(values[i, j]) > 0.6 * top
                axis.text(j, i, f"{100 * found[i, j]:.0f}%", ha="center", va="center", fontsize=8.5,
                          color="white" if dark else "black")  # fmt: skip
            axis.set_xticks(range(lengths.size), [f"{length:,.0f}" for length in lengths])
            axis.set_yticks(range(depths.size), [f"{100 * depth:.0f}%" for depth in depths])
            axis.grid(visible=False)
            axis.set_xlabel("text (tokens)")
        axes[0].set_ylabel("depth of the needle")
        bars = ((images[0], [axes[0]], "ln p of the number"), (images[-1], axes[1:], "ln p − dense's"))
        for image, beside, label in bars[: 1 + bool(others)]:
            figure.colorbar(image, ax=beside, label=f"{label} (nats per token)", shrink=0.9)
        style.label_panels(axes, [arms[0], *(f"{arm} − dense" for arm in others)])
        note = "percentages: needles whose whole number was the most likely"
        figure.suptitle(f"{title}; {note}" if title else note, fontsize=10, x=0.01, ha="left")
