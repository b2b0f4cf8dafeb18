"""The coupled loop in the plane of log-temperature and budget: field, nullclines, switching band, trajectories."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.lines import Line2D

from figures import style

__all__ = ["draw"]

_TRAJECTORIES = ("start", "token", "u", "theta")
_FIELD = ("u", "theta", "du", "widening", "holding")
_CURVES = ("curve", "u", "theta")


def draw(
    trajectories: Mapping[str, Any] | str | os.PathLike[str],
    field: Mapping[str, Any] | str | os.PathLike[str],
    curves: Mapping[str, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    title: str,
    band: tuple[float, float] | None = None,
) -> None:
    """Draw the plane on the left, u and theta over tokens on the right.

    Parameters
    ----------
    trajectories, field, curves : table
        As ``proofs.phase_coupled`` makes them.
    path : path
        PNG to write.
    title : str
    band : (float, float), optional
        The u between which the budget follows the model entropy; outside it is at an end.
    """
    moves, arrows, lines = (style.columns(table) for table in (trajectories, field, curves))
    style.require(moves, _TRAJECTORIES, "coupled trajectories")
    style.require(arrows, _FIELD, "coupled field")
    style.require(lines, _CURVES, "coupled curves")
    palette = [style.COLOURS[name] for name in ("blue", "orange", "green", "vermillion", "purple", "sky")]
    with style.canvas(path, rows=1, cols=3, size=(13.5, 4.6), gridspec_kw={"width_ratios": [1.7, 1, 1]}) as (
        figure,
        (plane, temperature, budget),
    ):
        low, high = float(arrows["u"].min()), float(arrows["u"].max())
        floor, top = float(arrows["theta"].min()), float(arrows["theta"].max())
        width, height = high - low, top - floor
        cells = max(np.unique(arrows["u"]).size, 2)
        dx, dy = arrows["du"] / width, arrows["widening"] / height
        size = np.hypot(dx, dy)
        length = np.where(size > 0, np.minimum(size, 0.75 / cells) / np.where(size > 0, size, 1.0), 0.0)
        plane.quiver(
            arrows["u"], arrows["theta"], dx * length * width, dy * length * height, color="#b5b5b5", angles="xy",
            scale_units="xy", scale=1, width=0.0022, headwidth=4, headlength=5, zorder=1,
        )  # fmt: skip
        for name, colour, dash in (("settled budget", "black", "-"), ("target", "black", "--")):
            mine = lines["curve"] == name
            plane.plot(lines["u"][mine], lines["theta"][mine], dash, color=style.COLOURS[colour], lw=1.6, zorder=3)
        if band is not None:
            inside = max(low, min(band)), min(high, max(band))
            if inside[0] < inside[1] and (inside[0] > low or inside[1] < high):
                plane.axvspan(*inside, color=style.COLOURS["sky"], alpha=0.15, lw=0, zorder=0)
        for number, start in enumerate(np.unique(moves["start"])):
            mine = moves["start"] == start
            order = np.argsort(moves["token"][mine], kind="stable")
            u, theta, token = (moves[name][mine][order].astype(float) for name in ("u", "theta", "token"))
            look = {"color": palette[number % len(palette)], "alpha": 0.9}
            plane.plot(u, theta, ".-", ms=3, lw=0.9, zorder=4, **look)
            plane.plot(u[0], theta[0], "o", mfc="white", mec=look["color"], ms=6, zorder=5)
            plane.plot(u[-1], theta[-1], "o", color="black", ms=5, zorder=6)
            temperature.plot(token, u, lw=1.1, **look)
            budget.step(token, theta, where="post", lw=1.1, **look)
        plane.set_xlim(low - 0.03 * width, high + 0.03 * width)
        plane.set_ylim(floor - 0.06 * height, top + 0.06 * height)
        plane.set_xlabel("u = ln T")
        plane.set_ylabel("budget θ, nats")
        temperature.set_xlabel("accepted token")
        temperature.set_ylabel("u = ln T")
        budget.set_xlabel("accepted token")
        budget.set_ylabel("budget θ, nats")
        style.label_panels((plane, temperature, budget), ("phase plane", "log-temperature", "budget"))
        figure.legend(
            handles=[
                Line2D([], [], color="black", lw=1.6, label="θ asks for itself: narrows at once above, widens below"),
                Line2D([], [], color="black", lw=1.6, ls="--", label="tempered entropy = H*"),
                Line2D([], [], color="#b5b5b5", marker=">", ls="-", label="one step, widening timer run out"),
                Line2D([], [], marker="o", mfc="white", mec="black", ls="", label="start"),
                Line2D([], [], marker="o", color="black", ls="", label="last token"),
            ],
            loc="outside lower left",
            ncol=5,
            fontsize=8,
        )
        figure.suptitle(title, fontsize=9, x=0.01, ha="left")
