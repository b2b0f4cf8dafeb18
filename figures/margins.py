"""Margins of the linear temperature loop: Nyquist plot, root locus, step responses, Bode plot, sensitivities."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Circle

from figures import style

__all__ = ["draw", "draw_coupled"]

Table = Mapping[str, Any] | str | os.PathLike[str]

_LOOPS = (
    "loop", "loop_gain", "stable", "phase_margin_deg", "crossover", "disk_margin", "disk_gain_low", "disk_gain_high",
    "sensitivity_peak",
)  # fmt: skip
_FREQUENCY = ("loop", "w", "re", "im", "magnitude", "phase_deg", "sensitivity", "complementary")
_LOCUS = ("lag", "branch", "loop_gain", "re", "im")
_CIRCLE = np.exp(1j * np.linspace(0, 2 * np.pi, 361))


def draw(
    loops: Table,
    frequency: Table,
    locus: Table,
    poles: Table,
    steps: Table,
    path: str | os.PathLike[str],
    *,
    title: str,
    certified: tuple[float, float] | None = None,
) -> None:
    """Draw six panels: Nyquist plot, root locus, step responses; |L|, its phase, |S| and |T|.

    Parameters
    ----------
    loops, frequency, locus, poles, steps : table
        As ``entropic margins`` writes them.
    path : path
        PNG to write.
    title : str
    certified : (float, float), optional
        Largest certified gain k, and the loop gain k V at which the root locus is marked for it.
    """
    rows, curves, loci, marks, answers = (style.columns(t) for t in (loops, frequency, locus, poles, steps))
    style.require(rows, _LOOPS, "loops")
    style.require(curves, _FREQUENCY, "frequency")
    style.require(loci, _LOCUS, "locus")
    style.require(marks, ("loop", "re", "im"), "poles")
    style.require(answers, ("loop", "token", "entropy"), "step")
    names = [str(name) for name in rows["loop"]]
    palette = [style.COLOURS[name] for name in ("vermillion", "blue", "green", "purple", "orange", "sky")]
    colours = {name: palette[i % len(palette)] for i, name in enumerate(names)}
    worst = int(np.nanargmin(rows["disk_margin"])) if np.isfinite(rows["disk_margin"]).any() else None
    with style.canvas(path, rows=2, cols=3, size=(14.2, 8.4)) as (figure, axes):
        nyquist, plane, time, magnitude, phase, sensitivity = axes
        _nyquist(nyquist, rows, curves, colours, worst)
        _locus(plane, loci, marks, colours, certified)
        for i, name in enumerate(names):
            mine = curves["loop"] == name
            look = {"color": colours[name]}
            w = curves["w"][mine]
            magnitude.loglog(w, curves["magnitude"][mine], **look)
            if i == 0:  # a varentropy scales L, so every loop has this phase
                phase.semilogx(w, curves["phase_deg"][mine], color="black", lw=1.4)
            if rows["stable"][i]:  # else neither S nor a step response means anything
                sensitivity.loglog(w, curves["sensitivity"][mine], **look)
                sensitivity.loglog(w, curves["complementary"][mine], ls="--", **look)
                answer = (answers["loop"] == name) & (answers["token"] > 0)
                time.step(answers["token"][answer], answers["entropy"][answer], where="post", **look)
            if np.isfinite(rows["sensitivity_peak"][i]) and i == worst:
                at = int(np.argmax(curves["sensitivity"][mine]))
                sensitivity.annotate(
                    f"peak {float(rows['sensitivity_peak'][i]):.3g}", (w[at], curves["sensitivity"][mine][at]),
                    xytext=(-8, 7), textcoords="offset points", ha="right", fontsize=8.5, **look,
                )  # fmt: skip
            cross, margin = float(rows["crossover"][i]), float(rows["phase_margin_deg"][i])
            if math.isfinite(cross) and math.isfinite(margin):
                magnitude.plot(cross, 1.0, "o", **look)
                phase.plot([cross, cross], [-180.0, margin - 180.0], "-", lw=1.2, **look)
                phase.plot(cross, margin - 180.0, "o", **look)
                beside = int(np.sum((rows["crossover"] > 0.2 * cross) & (rows["crossover"] < cross)))
                phase.annotate(
                    f"{margin:.1f}°",
                    (cross, margin - 180.0),
                    xytext=(-5, -13 * (1 + beside)),
                    textcoords="offset points",
                    ha="right",
                    fontsize=8.5,
                    color=colours[name],
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
                )
        magnitude.axhline(1.0, color="black", lw=0.8)
        phase.axhline(-180.0, color="black", lw=0.8)
        sensitivity.axhline(1.0, color="black", lw=0.8)
        sensitivity.set_ylim(max(1e-3, sensitivity.get_ylim()[0]), None)
        time.axhline(1.0, color="black", lw=0.8)
        time.axhspan(0.98, 1.02, color="#e8e8e8", zorder=0)
        time.set_xscale("log")
        high = [
            float(answers["entropy"][answers["loop"] == n].max())
            for n, ok in zip(names, rows["stable"], strict=True)
            if ok
        ]
        time.set_ylim(-0.06, 1.15 * max([1.0, *high]))
        time.set_xlabel("accepted tokens after the step")
        time.set_ylabel("entropy, per nat of target step")
        for axis in (magnitude, phase, sensitivity):
            axis.set_xlabel("ω, rad per token")
            axis.axvline(math.pi, color=style.GREY, ls=":", lw=1)
        magnitude.set_ylabel("|L|")
        phase.set_ylabel("phase of L, degrees")
        phase.set_yticks(np.arange(-270, 1, 45))
        phase.set_ylim(max(-275.0, min(-190.0, float(curves["phase_deg"].min()) - 8)), -80)
        sensitivity.set_ylabel("|S| solid, |T| dashed")
        style.label_panels(
            axes,
            (
                "Nyquist plot" if worst is None else f"Nyquist plot, disk margin of {names[worst]}",
                "root locus: closed-loop poles over k V",
                "target step, ±2% band",
                "Bode: loop gain, crossover",
                "Bode: phase, phase margin",
                "sensitivities (dotted: 2 tokens per period)",
            ),
        )
        figure.legend(
            handles=[
                Line2D([], [], color=colours[name], label=f"{name}: k V = {float(g):.4g}{'' if ok else ' UNSTABLE'}")
                for name, g, ok in zip(names, rows["loop_gain"], rows["stable"], strict=True)
            ],
            loc="outside upper right",
            ncol=len(names),
            fontsize=9,
        )
        figure.suptitle(title, fontsize=9.5, x=0.01, ha="left")


def _nyquist(
    axis: Axes, rows: Mapping[str, Any], curves: Mapping[str, Any], colours: Mapping[str, str], worst: int | None
) -> None:
    axis.plot(_CIRCLE.real, _CIRCLE.imag, color=style.GREY, ls=":", lw=1)
    if worst is not None:
        low, high = float(rows["disk_gain_low"][worst]), float(rows["disk_gain_high"][worst])
        ends = -1.0 / max(low, 0.05), -1.0 / high
        name = str(rows["loop"][worst])
        axis.add_patch(
            Circle(((ends[0] + ends[1]) / 2, 0), (ends[1] - ends[0]) / 2, color=colours[name], alpha=0.13, lw=0)
        )
    for name, colour in colours.items():
        mine = curves["loop"] == name
        re, im = curves["re"][mine], curves["im"][mine]
        axis.plot(re, im, color=colour)
        at = int(np.argmin(np.abs(np.hypot(re + 0.45, im + 1.1) - 0.2)))
        if 0 < at < re.size - 1:
            axis.annotate(
                "", (re[at + 1], im[at + 1]), (re[at - 1], im[at - 1]), arrowprops={"arrowstyle": "->", "color": colour}
            )
    axis.plot(-1, 0, "+", color="black", ms=11, mew=2)
    axis.set_aspect("equal", adjustable="box")
    axis.set_xlim(-2.4, 1.2)
    axis.set_ylim(-2.1, 1.2)
    axis.axhline(0, color="black", lw=0.6)
    axis.axvline(0, color="black", lw=0.6)
    axis.set_xlabel("Re L")
    axis.set_ylabel("Im L")


def _locus(
    axis: Axes,
    loci: Mapping[str, Any],
    marks: Mapping[str, Any],
    colours: Mapping[str, str],
    certified: tuple[float, float] | None,
) -> None:
    axis.plot(_CIRCLE.real, _CIRCLE.imag, color="black", lw=1)
    lags = np.unique(loci["lag"])
    for lag, colour, width in zip(lags, ("#444444", "#bdbdbd"), (2.0, 1.4), strict=False):
        mine = loci["lag"] == lag
        for branch in np.unique(loci["branch"][mine]):
            one = mine & (loci["branch"] == branch)
            axis.plot(loci["re"][one], loci["im"][one], color=colour, lw=width, zorder=3 if lag == lags[0] else 2)
        if certified is not None and lag == lags[0]:
            away = np.abs(loci["loop_gain"] - certified[1])
            pick = mine & (away == away[mine].min())
            axis.plot(loci["re"][pick], loci["im"][pick], "D", mfc="none", mec="black", ms=9, mew=1.4, zorder=5)
    for name, colour in colours.items():
        mine = marks["loop"] == name
        axis.plot(marks["re"][mine], marks["im"][mine], "x", color=colour, ms=9, mew=2.2, zorder=6)
    axis.set_aspect("equal", adjustable="box")
    axis.set_xlim(min(-1.5, 1.08 * float(marks["re"].min())), max(1.5, 1.08 * float(marks["re"].max())))
    axis.set_ylim(-max(1.75, 1.2 * float(marks["im"].max())), max(1.35, 1.08 * float(marks["im"].max())))
    axis.set_xlabel("Re z")
    axis.set_ylabel("Im z")
    handles = [Line2D([], [], marker="x", ls="", color="black", ms=8, mew=2, label="this gain")]
    if certified is not None:
        most, at = f"limit k = {certified[0]:.4g}", f"(largest certified), at V = {certified[1] / certified[0]:.4g}"
        handles.append(Line2D([], [], marker="D", mfc="none", mec="black", ls="", ms=8, label=f"{most}\n{at}"))
    handles += [
        Line2D([], [], lw=2, color=colour, label=f"lag {int(lag)}")
        for lag, colour in zip(lags, ("#444444", "#bdbdbd"), strict=False)
    ]
    axis.legend(handles=handles, loc="lower left", fontsize=7.5, ncol=2)


def draw_coupled(corners: Table, poles: Table, frequency: Table, path: str | os.PathLike[str], *, title: str) -> None:
    """Draw the coupled loop: closed-loop poles at the corners of the assumptions, and the multi-loop disk margin.

    Parameters
    ----------
    corners, poles, frequency : table
        ``coupled``, ``coupled_poles`` and ``coupled_frequency`` of ``entropic margins``.
    path : path
        PNG to write.
    title : str
    """
    rows, marks, curve = (style.columns(table) for table in (corners, poles, frequency))
    style.require(rows, ("varentropy", "effective", "disk_margin"), "coupled")
    style.require(marks, ("varentropy", "re", "im"), "coupled poles")
    style.require(curve, ("w", "alpha"), "coupled frequency")
    with style.canvas(path, cols=2, size=(10.4, 4.8)) as (figure, (plane, alpha)):
        plane.plot(_CIRCLE.real, _CIRCLE.imag, color="black", lw=1)
        ends = np.unique(marks["varentropy"])
        for end, colour, shape in zip(ends, (style.COLOURS["green"], style.COLOURS["vermillion"]), "ox", strict=False):
            mine = marks["varentropy"] == end
            plane.plot(
                marks["re"][mine], marks["im"][mine], shape, color=colour, mfc="none", ms=8, mew=1.6, ls="",
                label=f"V = {end:.4g} nats²",
            )  # fmt: skip
        plane.set_aspect("equal", adjustable="box")
        plane.set_xlim(min(-1.45, 1.1 * float(marks["re"].min())), max(1.45, 1.1 * float(marks["re"].max())))
        plane.set_ylim(-max(1.15, 1.1 * float(marks["im"].max())), max(1.3, 1.1 * float(marks["im"].max())))
        plane.set_xlabel("Re z")
        plane.set_ylabel("Im z")
        plane.legend(loc="upper left")
        alpha.semilogx(curve["w"], curve["alpha"], color=style.COLOURS["blue"])
        alpha.axvline(math.pi, color=style.GREY, ls=":", lw=1)
        if not np.isfinite(curve["alpha"]).any():
            alpha.set_xlim(float(curve["w"].min()), float(curve["w"].max()))
            alpha.text(
                0.5, 0.5, "unstable: no margin", transform=alpha.transAxes, ha="center", va="center", fontsize=13,
                color=style.COLOURS["vermillion"],
            )  # fmt: skip
        else:
            at = int(np.nanargmin(curve["alpha"]))
            alpha.plot(curve["w"][at], curve["alpha"][at], "o", color=style.COLOURS["blue"])
        alpha.set_ylim(0, 2.1)
        alpha.set_xlabel("ω, rad per token")
        alpha.set_ylabel("disk margin α, worst corner")
        style.label_panels((plane, alpha), ("closed-loop poles, every corner", "both loops perturbed at once"))
        figure.suptitle(title, fontsize=9.5, x=0.01, ha="left")
