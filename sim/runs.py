"""One simulated run as a task for a worker, and many finished runs as a table.

A run's record holds its metrics (the summary of :func:`sim.replica.simulate`, nested parts flattened with dots, lists
left out) and ``latency_per_token_s``: the sum of end-to-end times over the sum of output tokens, so that shorter texts
do not count as speed. Everything in it is simulated, so the same run gives the same record, bit for bit, wherever and
whenever it is carried out. A run that the configuration or a missing certificate forbids gives a record too, with its
error: it would fail again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from entropic_ctl import config_edit
from entropic_ctl.bank import Bank
from entropic_ctl.certificates import Verdict
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import EntropicError, NoProgressError
from sim.intervals import mean_interval
from sim.replica import simulate
from sim.streams import repeat_seeds

__all__ = ["Certify", "Point", "Task", "failure", "means", "metrics", "prepare", "run", "table"]

Certify = Callable[[RunConfig], Verdict | None]
"""Returns the verdict under which a configuration runs, or None if its law needs none."""


@dataclass(frozen=True)
class Point:
    """A configuration to run: its number, what distinguishes it, and itself (or why it cannot be)."""

    id: int
    settings: Mapping[str, Any]
    config: RunConfig | None
    error: EntropicError | None = None


@dataclass(frozen=True)
class Task:
    """One run: everything a worker needs, picklable."""

    id: int
    repeat: int
    config: RunConfig
    verdict: Verdict | None = None
    uncertified: bool = False
    bank: Bank | None = field(default=None, repr=False)


def metrics(config: RunConfig, *, verdict: Verdict | None, uncertified: bool, bank: Bank | None) -> dict[str, Any]:
    """Simulate and return the metrics, flat: name to number, string or None.

    Parameters
    ----------
    config : RunConfig
    verdict, uncertified, bank
        As in :func:`sim.replica.simulate`.
    """
    result = simulate(config, verdict=verdict, uncertified=uncertified, bank=bank)
    found = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in config_edit.flat(result.summary).items()
        if not isinstance(value, list | tuple | np.ndarray)
    }
    tokens = int(result.requests["output_tokens"].sum())
    found["latency_per_token_s"] = float(np.nansum(result.requests["e2e_s"])) / tokens if tokens else None
    return {name: _finite(value) for name, value in found.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def failure(error: EntropicError) -> dict[str, Any]:
    """Return the outcome of a run that cannot be carried out."""
    return {"error": str(error), "kind": type(error).__name__}


def run(task: Task) -> dict[str, Any]:
    """Carry out a run: ``{"metrics": ...}``, or ``{"error": message, "kind": class}`` if it is not possible."""
    try:
        found = metrics(task.config, verdict=task.verdict, uncertified=task.uncertified, bank=task.bank)
    except (EntropicError, NoProgressError) as error:
        return failure(error)
    return {"metrics": found}


def prepare(
    config: RunConfig, point: int, repeat: int, *, certify: Certify | None, uncertified: bool, bank: Bank | None = None
) -> Task:
    """Return the task of one repeat of a configuration; its root seed depends on the config's seed and the repeat only.

    Parameters
    ----------
    config : RunConfig
    point, repeat : int
        Number of the configuration, and of the repeat.
    certify : callable, optional
    uncertified : bool
        Run a gain no certificate covers.
    bank : Bank, optional
        In place of the configured one (in-process pools only: it travels with the task).

    Raises
    ------
    EntropicError
        If ``certify`` refuses.
    """
    verdict = certify(config) if certify is not None and not uncertified else None
    seeded = dataclasses.replace(config, seed=repeat_seeds(config.seed, repeat + 1)[repeat])
    return Task(point, repeat, seeded, verdict, uncertified, bank)


def _column(values: Sequence[Any]) -> np.ndarray:
    """Return a column: bool, int64 or float64 where all entries allow it (None is NaN), else strings (None is "")."""
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return np.array(values, bool)
    if kinds == {int}:
        return np.array(values, np.int64)
    if kinds <= {int, float, type(None)}:
        return np.array([np.nan if value is None else value for value in values], np.float64)
    return np.array(["" if value is None else str(value) for value in values], str)


def table(rows: Iterable[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return rows as columns, in order of first appearance; a name that a row lacks is None there."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _column([row.get(name) for row in rows]) for name in names}


def means(rows: Sequence[Mapping[str, Any]], by: str, keep: Sequence[str], over: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row per value of ``by``: ``keep`` of its first row, then mean and 95% interval of every number.

    Parameters
    ----------
    rows : sequence of mapping
        One per run, in any order.
    by : str
        Name of the group.
    keep : sequence of str
        Names that are equal within a group.
    over : sequence of str
        Names of numbers; ``NAME``, ``NAME_low``, ``NAME_high`` are made of each (NaN where there are too few).
    """
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row[by], []).append(row)
    out = []
    for group, members in groups.items():
        line: dict[str, Any] = {by: group, **{name: members[0].get(name) for name in keep}}
        for name in over:
            values = [row.get(name) for row in members]
            found = mean_interval([np.nan if value is None else float(value) for value in values])
            line |= {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
        out.append(line)
    return out
