"""Fields to vary: a range of numbers or a list of choices, and points drawn from them.

A grid is the product of its choices in the given order, the last one varying fastest. Ranges are filled with a
scrambled Sobol sequence (Sobol 1967, Owen's scrambling, by SciPy), the same points in every cell of the grid, so that
cells differ by their choices alone. Same ranges, number and seed give the same points on every machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropic_ctl import config_edit
from entropic_ctl.errors import BadInputError
from sim.streams import stream

__all__ = ["LARGEST", "Choice", "Dimension", "Range", "number_of_points", "parse_choice", "parse_range", "points"]

LARGEST = 1_000_000
"""Most points, and most runs, of one plan."""


@dataclass(frozen=True)
class Choice:
    """A field with its values to try.

    Parameters
    ----------
    field : str
        Path as in :mod:`entropic_ctl.config_edit`.
    values : tuple
        At least one, all different.
    """

    field: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "field", config_edit.full_path(self.field))
        if not self.values or len(set(map(repr, self.values))) != len(self.values):
            raise BadInputError(
                "values missing or repeated", where="grid", field=self.field, value=self.values, allowed="distinct"
            )


@dataclass(frozen=True)
class Range:
    """A number to vary.

    Parameters
    ----------
    field : str
        Path as in :mod:`entropic_ctl.config_edit`, for example ``"loop.pruning.theta_nats"``.
    low, high : float
        Both ends included.
    log : bool
        Uniform in the logarithm.
    also : tuple of str
        Further fields that move with it, keeping their ratio to it in the starting run.
    only : tuple of (str, str)
        Where not empty: the (field, value) pair that must hold for this number to exist (a law's parameter).
    """

    field: str
    low: float
    high: float
    log: bool = False
    also: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "field", config_edit.full_path(self.field))
        object.__setattr__(self, "also", tuple(config_edit.full_path(path) for path in self.also))
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise BadInputError("empty range", where="range", field=self.field, value=(self.low, self.high))
        if self.log and self.low <= 0:
            raise BadInputError("a logarithmic range starts above 0", where="range", field=self.field, value=self.low)

    @property
    def integer(self) -> bool:
        """True if the field takes integers only."""
        return config_edit.kind(self.field, where="range") == "integer"

    def at(self, share: float) -> float | int:
        """Return the value at a share in [0, 1) of the range; integers are equally likely (in the log, nearly)."""
        low, high = (self.low, self.high + 1) if self.integer else (self.low, self.high)
        value = low * (high / low) ** share if self.log else low + share * (high - low)
        if self.integer:
            return min(max(math.floor(value), math.ceil(self.low)), math.floor(self.high))
        return min(max(float(value), self.low), self.high)


Dimension = Range | Choice


def parse_choice(text: str, option: str = "--grid") -> Choice:
    """Read ``table.key=v1,v2,...``.

    Parameters
    ----------
    text : str
    option : str
        What an error names.

    Raises
    ------
    BadInputError
        If it is of another form, or the field does not exist.
    """
    field, equals, values = text.partition("=")
    if not equals or not field.strip() or not values.strip():
        raise BadInputError("not a list of values", where=option, value=text, allowed="table.key=v1,v2,...")
    config_edit.kind(field.strip(), where=option)
    return Choice(field.strip(), tuple(config_edit.parse_values(values)))


def parse_range(text: str, option: str = "--sobol") -> Range:
    """Read ``table.key=lo:hi`` or ``table.key=lo:hi:log``.

    Parameters
    ----------
    text : str
    option : str
        What an error names.

    Raises
    ------
    BadInputError
        If it is of another form, the field does not exist or is not a number, or the range is empty.
    """
    field, _, rest = text.partition("=")
    parts = rest.split(":")
    try:
        if len(parts) not in (2, 3) or parts[2:] not in ([], ["log"]):
            raise ValueError  # noqa: TRY301
        low, high = float(parts[0]), float(parts[1])
    except ValueError:
        raise BadInputError(
            "not a range", where=option, value=text, allowed="table.key=lo:hi or table.key=lo:hi:log"
        ) from None
    found = config_edit.kind(field.strip(), where=option)
    if found not in ("number", "integer"):
        raise BadInputError("not a number", where=option, field=field, value=found, remedy="use --grid for choices")
    return Range(field.strip(), low, high, log=parts[2:] == ["log"])


def number_of_points(dimensions: Sequence[Dimension], count: int) -> int:
    """Return how many points :func:`points` makes."""
    cells = math.prod(len(d.values) for d in dimensions if isinstance(d, Choice))
    return cells * (count if any(isinstance(d, Range) for d in dimensions) else 1)


def points(dimensions: Sequence[Dimension], count: int, seed: int) -> list[dict[str, Any]]:
    """Return the settings of every point: the product of the choices, times ``count`` Sobol points of the ranges.

    Parameters
    ----------
    dimensions : sequence of Choice and Range
        Fields, each at most once.
    count : int
        Sobol points per cell of the grid; used only if there are ranges.
    seed : int
        Root seed of the scrambling.

    Returns
    -------
    list of dict
        Path to value; never empty (without dimensions: one point that changes nothing).

    Raises
    ------
    BadInputError
        If a field is named twice, or there are more than a million points.
    """
    choices = [d for d in dimensions if isinstance(d, Choice)]
    ranges = [d for d in dimensions if isinstance(d, Range)]
    names = [d.field for d in dimensions]
    for name in names:
        if names.count(name) > 1:
            raise BadInputError("named twice", where="sweep", field=name, remedy="give each field one list or range")
    if ranges and count < 1:
        raise BadInputError("out of range", where="--points", value=count, allowed=">= 1")
    total = number_of_points(dimensions, count)
    if total > LARGEST:
        raise BadInputError("too many points", where="sweep", value=total, allowed=f"<= {LARGEST:,}")
    inner: list[dict[str, Any]] = [{}]
    if ranges:
        from scipy.stats import qmc

        sampler = qmc.Sobol(len(ranges), scramble=True, rng=stream(seed, "sobol"))
        unit = sampler.random_base2(max(0, math.ceil(math.log2(count))))[:count]
        inner = [{r.field: r.at(float(u)) for r, u in zip(ranges, row, strict=True)} for row in np.atleast_2d(unit)]
    cells = itertools.product(*([(c.field, v) for v in c.values] for c in choices))
    return [{**dict(cell), **settings} for cell in cells for settings in inner]
