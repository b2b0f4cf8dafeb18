"""Entropy variance under feedback: linear theory against measurement, why they differ, and the memory of real texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from figures import style

__all__ = ["draw"]

_RATIOS = ("world", "arm", "law", "strength", "own", "reading", "measured", "low", "high", "predicted", "predicted_low",
           "predicted_high")  # fmt: skip
_LADDER = ("source", "arm", "rung", "ratio", "low", "high")
_MEMORY = ("source", "temperature", "r1", "best_ratio", "best_ratio_constant_v", "shuffled_ratio_5")
_WORLDS = {"replay, bank": ("sky", "o"), "replay, engine's texts": ("blue", "s"), "live": ("vermillion", "D")}
_SOURCES = {"bank": ("sky", "o"), "engine": ("vermillion", "D")}


def draw(
    ratios: Mapping[str, Any] | str | os.PathLike[str],
    ladder: Mapping[str, Any] | str | os.PathLike[str],
    memory: Mapping[str, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    thresholds: Sequence[tuple[float, float]] = (),
    claim: tuple[float, float] = (0.80, 0.85),
    title: str = "",
) -> None:
    """Draw four panels: predicted against measured near 1, the same over the whole range, the ladder, the memory.

    Parameters
    ----------
    ratios : table
        One row per world, arm and reading, with intervals; the reading drawn is ``within, mean``.
    ladder : table
        ``ratio`` of each arm with one assumption of linear theory less at each rung.
    memory : table
        One row per text.
    path : path
        PNG to write.
    thresholds : sequence of (phi, ratio)
        AR(1) coefficients at which the best gain reaches a ratio, drawn as lines.
    claim : (float, float)
        Band of ratios that the paper claims, shaded.
    title : str
    """
    table, steps, texts = style.columns(ratios), style.columns(ladder), style.columns(memory)
    style.require(table, _RATIOS, "ratios")
    style.require(steps, _LADDER, "ladder")
    style.require(texts, _MEMORY, "memory")
    with style.canvas(path, rows=2, cols=2, size=(12.4, 9.6)) as (figure, axes):
        if title:
            figure.suptitle(title, fontsize=10.5, x=0.01, ha="left")
        feedback = (table["reading"] == "within, mean") & (table["law"] == "feedback") & table["own"]
        _compare(axes[0], table, feedback, claim)
        _compare_levels(axes[1], table, claim)
        _ladder(axes[2], steps)
        _memory(axes[3], texts, thresholds, claim)
        style.label_panels(
            axes,
            (
                "feedback, H* = the text's own mean: theory against measurement",
                "every law and target",
                "one assumption of linear theory dropped at a time",
                "what the memory of real texts allows: the best gain of all, by theory",
            ),
        )


def _points(axis: Any, table: Mapping[str, np.ndarray], pick: np.ndarray, *, hollow: bool = False) -> None:
    for world, (colour, marker) in _WORLDS.items():
        mine = pick & (table["world"] == world)
        if not mine.any():
            continue
        x, y = table["predicted"][mine], table["measured"][mine]
        spread = [
            np.abs(np.stack([table[low][mine], table[high][mine]]) - centre)
            for low, high, centre in (("predicted_low", "predicted_high", x), ("low", "high", y))
        ]
        axis.errorbar(
            x, y, xerr=spread[0], yerr=spread[1], ls="", marker=marker, ms=5, elinewidth=0.9, alpha=0.85,
            color=style.COLOURS[colour], mfc="white" if hollow else style.COLOURS[colour],
            label=None if hollow else world,
        )  # fmt: skip


def _frame(axis: Any, claim: tuple[float, float], ends: tuple[float, float]) -> None:
    axis.plot(ends, ends, color=style.GREY, lw=1.0, zorder=0, label="theory = measurement")
    axis.axhspan(*claim, color=style.COLOURS["green"], alpha=0.13, lw=0, zorder=0, label="the paper's cut, 15 to 20%")
    axis.axhline(1.0, color=style.GREY, lw=0.8, ls=":", zorder=0)
    axis.set_xlabel("predicted variance ratio to fixed T")


def _compare(axis: Any, table: Mapping[str, np.ndarray], pick: np.ndarray, claim: tuple[float, float]) -> None:
    pick = pick & np.isin(table["world"], list(_WORLDS))
    x, top = table["predicted"][pick], table["high"][pick]
    low, high = min(0.78, float(table["low"][pick].min())) - 0.03, max(1.2, float(top.max()), float(x.max())) + 0.05
    _frame(axis, claim, (low, high))
    _points(axis, table, pick)
    _control(axis, table)
    groups: list[list[tuple[float, float, float, float]]] = []
    for k in sorted(set(table["strength"][pick].tolist())):
        mine = pick & (table["strength"] == k)
        x_mid = float(table["predicted"][mine].mean())
        at = (x_mid, float(table["low"][mine].min()), float(table["high"][mine].max()), float(k))
        if groups and x_mid - groups[-1][-1][0] < 0.03:
            groups[-1].append(at)
        else:
            groups.append([at])
    for number, group in enumerate(groups):  # alternately above and below, so that neighbours do not collide
        word = f"k = {group[0][3]:g}" + (f" to {group[-1][3]:g}" if len(group) > 1 else "")
        x_mid, below = float(np.mean([g[0] for g in group])), number % 2 == 1
        y = min(g[1] for g in group) if below else max(g[2] for g in group)
        axis.annotate(
            word, (x_mid, y), xytext=(0, -5 if below else 5), textcoords="offset points", fontsize=8, ha="center",
            va="top" if below else "bottom", color="#444444",
        )  # fmt: skip
    axis.set_xlim(float(min(0.95, table["predicted_low"][pick].min())) - 0.02, high)
    axis.set_ylim(low, high + 0.04)
    axis.set_ylabel("measured, in each text about its mean")
    axis.legend(loc="lower right")


def _control(axis: Any, table: Mapping[str, np.ndarray]) -> None:
    """Draw fixed T with other seeds: how far sampling alone moves the ratio."""
    for i in np.flatnonzero((table["law"] == "fixed") & (table["reading"] == "within, mean")):
        y = float(table["measured"][i])
        spread = np.abs(np.array([[table["low"][i]], [table["high"][i]]], float) - y)
        axis.errorbar([1.0], [y], yerr=spread, fmt="x", color="black", elinewidth=0.9, label=str(table["arm"][i]))


def _compare_levels(axis: Any, table: Mapping[str, np.ndarray], claim: tuple[float, float]) -> None:
    within = table["reading"] == "within, mean"
    known = np.isin(table["world"], list(_WORLDS)) & within
    top = 1.1 * max(1.3, float(table["high"][known].max()))
    _frame(axis, claim, (0.0, top))
    laws = within & (table["law"] != "fixed")
    _points(axis, table, laws & table["own"])
    _points(axis, table, laws & ~table["own"], hollow=True)
    _control(axis, table)
    if (known & laws & ~table["own"]).any():
        axis.plot([], [], ls="", marker="o", mfc="white", color=style.GREY, label="hollow: common H* = 1.5")
    for law, x in (("solve", 0.0), ("damped", 0.25)):
        mine = known & (table["law"] == law)
        if mine.any():
            axis.annotate(
                "solve" if law == "solve" else "damped f=0.5", (x, float(table["high"][mine].max())), xytext=(4, 4),
                textcoords="offset points", fontsize=8, color="#444444",
            )  # fmt: skip
    axis.set_xlim(-0.06, max(1.3, float(np.nanmax(table["predicted_high"][known]))) + 0.08)
    axis.set_ylim(0, top)
    axis.set_ylabel("measured, in each text about its mean")
    axis.legend(loc="upper left")


def _ladder(axis: Any, steps: Mapping[str, np.ndarray]) -> None:
    rungs = list(dict.fromkeys(steps["rung"].tolist()))
    shown = list(dict.fromkeys(steps["arm"].tolist()))
    source = "engine" if (steps["source"] == "engine").any() else "bank"
    palette = [c for c in style.COLOURS if c != "sky"]
    for number, arm in enumerate(shown):
        mine = (steps["arm"] == arm) & (steps["source"] == source)
        at = np.array([rungs.index(r) for r in steps["rung"][mine].tolist()])
        colour = style.COLOURS[palette[number % len(palette)]]
        dash = "-" if number < len(palette) else "--"
        ratio = steps["ratio"][mine]
        spread = np.abs(np.stack([steps["low"][mine], steps["high"][mine]]) - ratio)
        axis.errorbar(
            at + 0.05 * (number - 0.5 * (len(shown) - 1)), ratio, yerr=spread, ls=dash, lw=1.1, elinewidth=0.8,
            marker=style.MARKERS[number % len(style.MARKERS)], color=colour, label=arm,
        )  # fmt: skip
    axis.axhline(1.0, color=style.GREY, lw=0.8, ls=":", zorder=0)
    axis.set_xticks(range(len(rungs)), [r.replace(", ", ",\n") for r in rungs])
    axis.set_ylim(-0.05, 1.3 * float(np.nanmax(steps["high"][steps["source"] == source])))
    axis.set_ylabel(f"variance ratio, in each text about its mean ({source}'s texts)")
    axis.legend(loc="upper left", fontsize=7.5, ncols=2)


def _memory(
    axis: Any, texts: Mapping[str, np.ndarray], thresholds: Sequence[tuple[float, float]], claim: tuple[float, float]
) -> None:
    for source, (colour, marker) in _SOURCES.items():
        mine = texts["source"] == source
        if mine.any():
            axis.plot(
                texts["r1"][mine], texts["best_ratio_constant_v"][mine], marker, ls="", ms=3, alpha=0.6, mfc="none",
                color=style.COLOURS[colour],
            )  # fmt: skip
            axis.plot(
                texts["r1"][mine], texts["best_ratio"][mine], marker, ls="", ms=4.5, alpha=0.85,
                color=style.COLOURS[colour], label=f"texts of the {source} ({int(mine.sum())})",
            )  # fmt: skip
    axis.plot([], [], "o", ms=3, mfc="none", color=style.GREY, label="small, hollow: were V constant")
    phi = np.linspace(1 / 3, max(0.75, float(texts["r1"].max()) + 0.03), 200)
    phi = np.concatenate([[-0.4], phi])
    axis.plot(
        phi, np.where(phi > 1 / 3, 8 * phi * (1 - phi) / (1 + phi) ** 2, 1.0), color="black", lw=1.2,
        label="AR(1): 8φ(1−φ)/(1+φ)²",
    )  # fmt: skip
    shuffled = float(np.median(texts["shuffled_ratio_5"]))
    axis.axhline(shuffled, color=style.GREY, ls="--", lw=1.0, label=f"shuffled texts: 95% above {shuffled:.3f}")
    axis.axhspan(*claim, color=style.COLOURS["green"], alpha=0.13, lw=0, zorder=0)
    for at, ratio in thresholds:
        axis.plot([at, at], [0, ratio], color=style.COLOURS["green"], lw=1.0, ls=":")
        axis.annotate(
            f"φ = {at:.3f}", (at, 0), xytext=(2 if ratio < 0.82 else -2, 6), textcoords="offset points", fontsize=8,
            rotation=90, ha="left" if ratio < 0.82 else "right", va="bottom", xycoords=("data", "axes fraction"),
        )  # fmt: skip
    axis.set_xlim(float(texts["r1"].min()) - 0.04, float(phi[-1]))
    axis.set_ylim(min(0.4, float(texts["best_ratio_constant_v"].min()) - 0.03), 1.03)
    axis.set_xlabel("lag-1 autocorrelation of a text's entropy")
    axis.set_ylabel("least variance ratio over all gains (theory)")
    axis.legend(loc="lower left")
