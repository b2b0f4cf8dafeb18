"""One look for every figure: colour-blind safe, readable in grey, labelled with units, drawn without a display.

Figures are built on :class:`matplotlib.figure.Figure` with the Agg canvas directly. ``pyplot`` is never imported, so
no display is looked for and no figure stays open, however many are drawn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from entropic_ctl.errors import BadInputError

__all__ = ["COLOURS", "GREY", "MARKERS", "canvas", "columns", "label_panels", "require"]

COLOURS = {  # Okabe and Ito's palette, minus yellow (too pale for lines on white)
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "black": "#000000",
}
GREY = "#777777"
MARKERS = ("o", "s", "^", "D", "v", "P")

_RC: dict[str, Any] = {
    "figure.dpi": 110,
    "savefig.dpi": 130,
    "figure.constrained_layout.use": True,
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.hashsalt": "entropic-ctl",
}


@contextmanager
def canvas(
    path: str | os.PathLike[str], *, rows: int = 1, cols: int = 1, size: tuple[float, float] = (7.2, 4.0), **grid: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield (figure, axes in reading order) and save to ``path`` on a clean exit, by a temporary file and a rename.

    Parameters
    ----------
    path : path
        PNG file to write; missing parent folders are made.
    rows, cols : int
        Panels.
    size : (float, float)
        Inches.
    **grid
        Passed to :meth:`matplotlib.figure.Figure.subplots` (``sharex``, ``gridspec_kw``, ...).
    """
    path = Path(path)
    with mpl.rc_context(_RC):
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        panels = figure.subplots(rows, cols, squeeze=False, **grid)
        yield figure, list(panels.ravel())
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".part")
        figure.savefig(temporary, format="png", metadata={"Software": None})
        temporary.replace(path)


def columns(source: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Return a table as a dict of arrays; ``source`` is such a mapping already, or the path of a results file."""
    if isinstance(source, Mapping):
        return {name: np.asarray(values) for name, values in source.items()}
    from entropic_ctl import results

    table, _ = results.read_table(Path(source))
    return {name: np.asarray(values) for name, values in table.items()}


def require(table: Mapping[str, np.ndarray], names: Sequence[str], what: str) -> None:
    """Refuse a table that lacks a column, is ragged, or is empty.

    Raises
    ------
    BadInputError
        Naming the table and the column.
    """
    for name in names:
        if name not in table:
            raise BadInputError("column missing", where=f"{what} table", field=name, allowed=", ".join(sorted(table)))
    lengths = {table[name].shape[0] for name in names}
    if len(lengths) != 1:
        raise BadInputError("columns of different lengths", where=f"{what} table", value=sorted(lengths))
    if lengths == {0}:
        raise BadInputError("no rows to draw", where=f"{what} table")


def label_panels(axes: Sequence[Axes], titles: Sequence[str]) -> None:
    """Title the panels a, b, c ... in reading order."""
    for letter, axis, title in zip("abcdefghij", axes, titles, strict=False):
        axis.set_title(f"{letter}  {title}")
