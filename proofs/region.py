"""Where the coupled loop is certified: slices through (k, V_lo, r, rho, s, slope) around a config, as a table.

Each cell is decided three ways: a common quadratic Lyapunov function is *sought* (linear matrix inequality), and what
the solver returns is *checked exactly*; whether every vertex has its eigenvalues inside the unit circle (necessary for
any certificate); and the small-gain condition, which by the proof book is necessary and sufficient. The budget here
follows at once (widen_after = 1); small gain also covers one that waits. Source: ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from proofs.check import Assumptions, Hints, Subject
from proofs.check.base import format_hint
from proofs.check.coupled import vertices
from proofs.check.small_gain import Coupling, coupling
from proofs.search.coupled import solve, verified
from proofs.search.gain import hints as gain_hints
from proofs.search.gain import steepest
from proofs.vmax import maximum

__all__ = ["AXES", "OUTCOMES", "SLICES", "around", "cell", "gain_limits", "region", "summary"]

AXES = {"gain": "gain", "varentropy_min": "v_min", "r": "r", "rho": "rho", "s": "s", "slope": "slope", "share": "share"}
"""Axis -> field of :class:`proofs.check.small_gain.Coupling`."""

SLICES = (
    ("gain", "varentropy_min"),
    ("gain", "s"),
    ("rho", "slope"),
    ("r", "slope"),
    ("varentropy_min", "r"),
    ("share", "s"),
)
"""(x, y) of each slice."""

OUTCOMES = ("certified", "unverified", "none")
"""Solver's matrix verified exactly; solver gave one that did not verify; solver gave none."""

_REACH = 4.0


def around(config: RunConfig, vocab_size: int, assumptions: Assumptions) -> Coupling:
    """Return the coupling of a config, the middle of the slices.

    Parameters
    ----------
    config : RunConfig
    vocab_size : int
    assumptions : Assumptions

    Raises
    ------
    BadInputError
        If its laws are not ``feedback`` and a ``budget`` of two levels, its gain is not positive, V_lo is 0 or above
        V_max, or an effect is 0 (the slices are logarithmic).
    """
    for table, law, needed in (
        ("temperature", config.loop.temperature.name, "feedback"),
        ("pruning", config.loop.pruning.name, "budget"),
    ):
        if law != needed:
            raise BadInputError("nothing couples", where="region", field=f"loop.{table}.law", value=law, allowed=needed)
    subject = Subject(config, vocab_size, assumptions)
    c = coupling(subject, Hints({name: format_hint(x) for name, x in gain_hints(subject).items()}))
    if c is None:
        raise ArithmeticError(f"no bound on the varentropy over {vocab_size} tokens was found")
    for name, field in AXES.items():
        if getattr(c, field) <= 0:
            where = "needs theta_wide_nats > theta_nats" if name == "slope" else "> 0"
            raise BadInputError(
                "a slice cannot go through it",
                where="region",
                field=name,
                value=float(getattr(c, field)),
                allowed=where,
            )
    if c.v_min >= c.v_max:
        raise BadInputError(
            "no distribution is that sharp",
            where="region",
            field="varentropy_min",
            value=float(c.v_min),
            allowed=f"< V_max({vocab_size}) = {float(c.v_max):.6g}",
        )
    return c


def gain_limits(config: RunConfig, vocab_size: int) -> dict[str, float]:
    """Return the gains at which u alone starts to repel: ``2/V_max(n)`` and, where it is known, ``2/V* at the target``.

    Parameters
    ----------
    config : RunConfig
        With the ``feedback`` law.
    vocab_size : int
    """
    found = {"2/V_max(n)": 2.0 / float(maximum(vocab_size).upper)}
    ceiling = steepest(vocab_size, config.loop.temperature.config.target_nats)
    return found if ceiling is None else {**found, "2/V* at the target": 2.0 / ceiling}


def _loop_gain(c: Coupling) -> float:
    """Return slope ((theta to u) s + r): below 1 exactly where small gain holds; inf where u alone does not settle."""
    first = c.theta_to_u()
    return math.inf if first is None else float(c.slope * (first * c.s + c.r))


def _spectral_radius(matrices: np.ndarray) -> float:
    return float(np.abs(np.linalg.eigvals(matrices)).max())


def cell(c: Coupling) -> dict[str, Any]:
    """Decide one cell: ``outcome``, ``spectral_radius`` of the worst vertex, ``loop`` (gain from theta to itself)."""
    corners = vertices(c)
    floats = np.array([[[float(x) for x in row] for row in a] for a in corners])
    radius, outcome = _spectral_radius(floats), "none"
    if radius < 1.0:  # else no P exists: x'Px cannot fall along an eigenvector that grows
        p = solve(floats)
        if p is not None:
            outcome = "unverified" if verified(p, Fraction(1), corners) is None else "certified"
    return {"outcome": outcome, "spectral_radius": radius, "loop": _loop_gain(c)}


def _at(c: Coupling, x: tuple[str, float], y: tuple[str, float]) -> Coupling:
    return dataclasses.replace(c, **{AXES[name]: Fraction(value) for name, value in (x, y)})


def _axis(c: Coupling, name: str, count: int) -> np.ndarray:
    """Return values from the config's past the end of small gain, evenly spaced in logarithms (the gain: itself)."""
    here = float(getattr(c, AXES[name]))
    if name == "gain":
        steep = 2.0 / float(c.v_max)
        target = min(2.0 / float(c.v_sure), 3.0 * steep) if c.v_sure else 0.0  # so that 2/V* shows, where it is near
        high = 1.1 * max(here, steep, target)
        return np.linspace(min(high / count, here), high, count)
    if name == "share":
        return np.geomspace(0.02, 1.0, count)
    low, high = here, here
    for _ in range(80):  # walk to the end of the region, in the direction that leaves it
        value = low / 2 if name == "varentropy_min" else high * 2
        low, high = (value, high) if name == "varentropy_min" else (low, value)
        if not _loop_gain(dataclasses.replace(c, **{AXES[name]: Fraction(value)})) < 1:
            break
    low, high = low / _REACH, high * _REACH
    return np.geomspace(low, min(high, 0.9 * float(c.v_max)) if name == "varentropy_min" else high, count)


def _row(c: Coupling, names: tuple[str, str], xs: np.ndarray, y: float) -> list[dict[str, Any]]:
    base = {"x_name": names[0], "y_name": names[1]}
    return [{**base, "x": x, "y": y, **cell(_at(c, (names[0], x), (names[1], y)))} for x in xs.tolist()]


def region(
    config: RunConfig,
    vocab_size: int,
    assumptions: Assumptions | None = None,
    *,
    count: int = 20,
    jobs: int = 2,
    progress: Callable[[str, float], None] | None = None,
) -> Mapping[str, np.ndarray]:
    """Decide every cell of every slice.

    Parameters
    ----------
    config : RunConfig
        With the laws ``feedback`` and ``budget``.
    vocab_size : int
    assumptions : Assumptions, optional
        The other coordinates of the middle.
    count : int
        Cells along each axis, >= 2.
    jobs : int
        Processes; one is enough for up to 8 cells along an axis.
    progress : callable, optional
        ``progress(what, share)``.

    Returns
    -------
    dict of str to ndarray
        One row per cell: ``x_name``, ``x``, ``y_name``, ``y``, ``outcome`` (:data:`OUTCOMES`), ``spectral_radius`` (of
        the worst vertex), ``loop`` (gain from theta to itself; stable exactly below 1), ``x_here``, ``y_here`` (the
        config's).

    Raises
    ------
    BadInputError
        If no slice can be laid through the config.
    """
    from joblib import Parallel, delayed

    if count < 2:
        raise BadInputError("too few cells", where="region", field="count", value=count, allowed=">= 2")
    c = around(config, vocab_size, assumptions or Assumptions())
    tasks = []
    for names in SLICES:
        xs, ys = (_axis(c, name, count) for name in names)
        tasks += [(names, xs, y) for y in ys.tolist()]
    rows: list[dict[str, Any]] = []
    found = Parallel(n_jobs=jobs if count > 8 else 1, return_as="generator")(delayed(_row)(c, *task) for task in tasks)
    for done, (part, (names, _, _)) in enumerate(zip(found, tasks, strict=True), 1):
        here = {f"{axis}_here": float(getattr(c, AXES[name])) for axis, name in zip("xy", names, strict=True)}
        rows += [{**row, **here} for row in part]
        if progress is not None:
            progress(f"{names[0]} by {names[1]}", done / len(tasks))
    return {name: np.asarray([row[name] for row in rows]) for name in rows[0]}


def summary(table: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Count the cells of each slice: by outcome, stable ones, and contradictions of the small-gain theorem.

    A contradiction is a cell that is certified, or whose vertices are all stable, where the loop gain is 1 or more
    (by 1e-6: eigenvalues are floats). The other way round only the outward rounding of vertices shows.
    """
    found = []
    for x_name, y_name in dict.fromkeys(zip(table["x_name"].tolist(), table["y_name"].tolist(), strict=True)):
        mine = (table["x_name"] == x_name) & (table["y_name"] == y_name)
        loop, outcome = table["loop"][mine], table["outcome"][mine]
        stable, small = table["spectral_radius"][mine] < 1.0, loop < 1.0
        wrong = ((outcome == "certified") & ~small) | (stable & (loop > 1.0 + 1e-6))
        found.append(
            {
                "slice": f"{x_name} x {y_name}",
                **{name: int((outcome == name).sum()) for name in OUTCOMES},
                "small_gain": int(small.sum()),
                "contradictions": int(wrong.sum()),
            }
        )
    return found
