"""Where the coupled loop of temperature and budget is certified: slices through gain, varentropy and effects."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from figures import style

__all__ = ["draw"]

NEEDS = ("x_name", "x", "y_name", "y", "outcome", "spectral_radius", "loop", "x_here", "y_here")
_NAMES = {
    "gain": "gain k (u = ln T per nat)",
    "varentropy_min": "least varentropy V_lo (nats²)",
    "r": "r: θ on model entropy (nats per nat)",
    "rho": "ρ: θ on tempered entropy (nats per nat)",
    "s": "s: u on next model entropy (nats per unit)",
    "slope": "|g|: budget slope (nats per nat)",
    "share": "least share λ of the error acted on",
}
_LOOK = (
    ("one quadratic function falls at every vertex, checked exactly", "#9fd8c4"),
    ("solver claims one, exact check says no", style.COLOURS["purple"]),
    ("stable, but no quadratic function found", style.COLOURS["orange"]),
    ("unstable at a vertex of the model (V up to V_max(n))", "#dcdcdc"),
)


_DASHES = (":", "--")


def _kinds(table: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the index into ``_LOOK`` of each cell."""
    outcome = table["outcome"].astype(str)
    stable = table["spectral_radius"].astype(float) < 1.0
    return np.select([outcome == "certified", outcome == "unverified", stable], [0, 1, 2], 3)


def _edges(values: np.ndarray, logarithmic: bool) -> np.ndarray:
    """Return cell edges half-way between values."""
    shown = np.log(values) if logarithmic else values
    half = np.diff(shown) / 2
    edges = np.concatenate([[shown[0] - half[0]], shown[:-1] + half, [shown[-1] + half[-1]]])
    return np.exp(edges) if logarithmic else np.maximum(edges, 0.0)


def draw(
    region: Mapping[str, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    title: str = "",
    limits: Mapping[str, float] | None = None,
) -> None:
    """Draw one panel per slice: the outcome of each cell, the small-gain limit as a line, the config as a diamond.

    Parameters
    ----------
    region : table
        Columns ``x_name``, ``x``, ``y_name``, ``y``, ``outcome`` (``certified``, ``unverified`` or ``none``),
        ``spectral_radius`` (of the worst vertex), ``loop`` (gain from theta to itself), ``x_here`` and ``y_here``.
    path : path
        PNG to write.
    title : str
        Figure title.
    limits : mapping of str to float, optional
        Gains to mark on the slices over the gain, by label.
    """
    table = style.columns(region)
    style.require(table, NEEDS, "region")
    kinds = _kinds(table)
    slices = list(dict.fromkeys(zip(table["x_name"].tolist(), table["y_name"].tolist(), strict=True)))
    rows = -(-len(slices) // 2)
    with style.canvas(path, rows=rows, cols=min(2, len(slices)), size=(9.6, 0.9 + 3.5 * rows)) as (figure, axes):
        for axis, (x_name, y_name) in zip(axes, slices, strict=False):
            mine = (table["x_name"] == x_name) & (table["y_name"] == y_name)
            xs, ys = np.unique(table["x"][mine].astype(float)), np.unique(table["y"][mine].astype(float))
            order = np.lexsort((table["x"][mine].astype(float), table["y"][mine].astype(float)))
            grid, loop = (
                values[mine][order].astype(float).reshape(len(ys), len(xs)) for values in (kinds, table["loop"])
            )
            logarithmic = x_name != "gain"
            axis.pcolormesh(
                _edges(xs, logarithmic),
                _edges(ys, True),
                grid,
                cmap=ListedColormap([colour for _, colour in _LOOK]),
                vmin=-0.5,
                vmax=len(_LOOK) - 0.5,
            )
            level = np.log10(np.clip(loop, 0.1, 10.0))  # steep ends would bend the line between cells
            if level.min() < 0 < level.max():
                axis.contour(xs, ys, level, levels=[0.0], colors="black", linewidths=1.3)
            for (name, gain), dash in zip((limits or {}).items() if x_name == "gain" else (), _DASHES, strict=False):
                axis.axvline(gain, color=style.COLOURS["vermillion"], ls=dash, lw=1.2, label=name)
            axis.plot(
                table["x_here"][mine][:1].astype(float),
                table["y_here"][mine][:1].astype(float),
                "D",
                ms=6,
                mfc="white",
                mec="black",
                zorder=5,
            )
            axis.set_xscale("log" if logarithmic else "linear")
            axis.set_yscale("log")
            for scale in (axis.xaxis, axis.yaxis) if logarithmic else (axis.yaxis,):
                scale.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                scale.set_minor_formatter(NullFormatter())
            axis.set_xlabel(_NAMES.get(x_name, x_name))
            axis.set_ylabel(_NAMES.get(y_name, y_name))
            axis.grid(visible=False)
        for axis in axes[len(slices) :]:
            axis.set_visible(False)
        style.label_panels(axes, ["" for _ in slices])
        shown = [Patch(color=colour, label=label) for i, (label, colour) in enumerate(_LOOK) if (kinds == i).any()]
        line = axes[0].plot([], [], color="black", lw=1.3, label="small gain: loop gain 1")[0]
        here = axes[0].plot([], [], "D", ms=6, mfc="white", mec="black", ls="", label="this config")[0]
        marked = [
            Line2D([], [], color=style.COLOURS["vermillion"], ls=dash, lw=1.2, label=f"{name} = {gain:.4g}")
            for (name, gain), dash in zip((limits or {}).items(), _DASHES, strict=False)
        ]
        figure.legend(handles=[*shown, line, here, *marked], loc="outside lower center", ncols=2)
        if title:
            figure.suptitle(title, fontsize=10.5, x=0.01, ha="left")
