"""Many configurations, several repeats each, with common random numbers; safe to kill, to resume and to compare.

Repeat r has the same root seed in every point, so arrivals, lengths and texts are shared and differences between
points are due to their settings. Finished runs go to the journal of :mod:`sim.campaign`; when all are there, two tables
are made of the journal alone: ``results`` (one row per point and repeat) and ``points`` (per point, mean and 95%
Student interval over repeats). Their rows stand in the order of the plan, whatever the order of completion, and hold no
time of day, so an interrupted and resumed sweep gives the same bytes as an uninterrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from entropic_ctl import results
from entropic_ctl.config import RunConfig
from entropic_ctl.config_edit import with_fields
from entropic_ctl.errors import BadInputError
from sim import runs
from sim.campaign import definition, open_folder
from sim.carry_out import carry_out
from sim.journal import Journal
from sim.runs import Certify, Point
from sim.space import LARGEST, Choice, Dimension, number_of_points, points
from sim.streams import repeat_seeds
from sim.workers import Pool

__all__ = ["Sweep", "plan", "remaining", "sweep"]

Report = Callable[[str, float], None]
"""(what is being done, share of the whole)."""


@dataclass(frozen=True)
class Sweep:
    """The tables of a finished sweep, and what could not run.

    Parameters
    ----------
    results : dict of ndarray
        Columns ``point``, ``repeat``, ``root_seed``, ``status`` ("ok" or "failed"), ``error``, one per swept field (its
        path), one per metric.
    points : dict of ndarray
        Columns ``point``, one per swept field, ``repeats`` (that ran), and ``NAME``, ``NAME_low``, ``NAME_high`` per
        numeric metric.
    failed : dict
        Number of a point to the first error of its runs.
    """

    results: dict[str, np.ndarray]
    points: dict[str, np.ndarray]
    failed: dict[int, str]


def plan(config: RunConfig, dimensions: Sequence[Dimension], count: int) -> list[Point]:
    """Return the points of a sweep.

    Parameters
    ----------
    config : RunConfig
        What the settings of a point change; its seed scrambles the Sobol points.
    dimensions : sequence of Choice and Range
    count : int
        Sobol points per cell of the grid.

    Raises
    ------
    BadInputError
        If no point at all is a possible configuration (the first one's error), or the plan is impossible.
    """
    out = []
    for i, settings in enumerate(points(dimensions, count, config.seed)):
        try:
            out.append(Point(i, settings, with_fields(config, settings, where=f"point {i}")))
        except BadInputError as error:
            out.append(Point(i, settings, None, error))
    if all(point.config is None for point in out):
        raise out[0].error or BadInputError("no point", where="sweep")
    return out


def remaining(seconds: float) -> str:
    """Return a duration as ``h:mm:ss`` or ``m:ss``.

    Examples
    --------
    >>> remaining(75), remaining(3675.4)
    ('1:15', '1:01:15')
    """
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minutes}:{second:02d}"


def _eta(report: Report | None, total: int, already: int) -> Callable[[int], None]:
    """Return a function of the number of runs done that reports share and remaining time."""
    start = time.monotonic()

    def done(count: int) -> None:
        if report is not None:
            fresh = max(1, count - already)
            left = (time.monotonic() - start) / fresh * (total - count)
            report(f"{count:,} of {total:,} runs, {remaining(left)} left", count / max(1, total))

    return done


def rows(planned: Sequence[Point], records: Mapping[tuple[int, int], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per finished run, in the order of the plan."""
    order = {point.id: i for i, point in enumerate(planned)}
    out = []
    for key in sorted(records, key=lambda k: (order.get(k[0], len(order)), k[1])):
        record, point = records[key], planned[order[key[0]]]
        out.append(
            {
                "point": key[0],
                "repeat": key[1],
                "root_seed": repeat_seeds(point.config.seed, key[1] + 1)[key[1]] if point.config is not None else None,
                "status": "ok" if "metrics" in record else "failed",
                "error": record.get("error", ""),
                **point.settings,
                **record.get("metrics", {}),
            }
        )
    return out


def sweep(
    config: RunConfig,
    dimensions: Sequence[Dimension],
    out: Path,
    pool: Pool,
    *,
    count: int = 16,
    repeats: int = 1,
    certify: Certify | None = None,
    uncertified: bool = False,
    resume: bool = False,
    report: Report | None = None,
) -> Sweep:
    """Run a sweep, or what is left of it, and write its tables.

    Parameters
    ----------
    config : RunConfig
        Settings that no dimension changes; its seed is the root seed of every point.
    dimensions : sequence of Choice and Range
    out : Path
        Folder: ``run.json``, ``runs.jsonl``, and at the end ``results`` and ``points`` as Parquet and CSV.
    pool : Pool
        Over :func:`sim.runs.run`, not started.
    count : int
        Sobol points per cell of the grid.
    repeats : int
        Runs per point, >= 1.
    certify : callable, optional
        Gives each point the verdict it runs under; a point whose gain is not proved counts as failed.
    uncertified : bool
        Run gains no certificate covers.
    resume : bool
        Go on with a folder that has been begun.
    report : callable, optional

    Raises
    ------
    BadInputError
        If the plan is impossible, or the folder belongs to other settings.
    CrashedError
        If a worker died over a run; the journal keeps the rest.
    """
    if repeats < 1:
        raise BadInputError("out of range", where="--repeats", value=repeats, allowed=">= 1")
    if (total := number_of_points(dimensions, count) * repeats) > LARGEST:
        raise BadInputError(
            "too many runs",
            where="sweep",
            field="points x repeats",
            value=total,
            allowed=f"<= {LARGEST:,}",
            remedy="lower --points or --repeats, or split the grid into several folders",
        )
    planned = plan(config, dimensions, count)
    about = definition(
        "sweep",
        config,
        {
            "dimensions": {
                d.field: list(d.values) if isinstance(d, Choice) else f"{d.low!r}:{d.high!r}{':log' * d.log}"
                for d in dimensions
            },
            "points": count,
            "repeats": repeats,
            "uncertified": uncertified,
        },
        (point.config for point in planned if point.config is not None),
    )
    with open_folder(out, about, resume=resume) as campaign:
        _check(campaign.journal, planned, repeats)
        already = len(campaign.journal.records)
        if already < total:
            with pool:
                carry_out(
                    campaign.journal,
                    ((point, repeat) for point in planned for repeat in range(repeats)),
                    pool,
                    certify=certify,
                    uncertified=uncertified,
                    done=_eta(report, total, already),
                )
        found = _tables(planned, campaign.journal.records, [d.field for d in dimensions])
        stamp = {**results.stamp(config, config.seed), "plan": about["plan"], "inputs": about["inputs"]}
        for name, columns in (("results", found.results), ("points", found.points)):
            for suffix in ("parquet", "csv"):
                results.write_table(campaign.out / f"{name}.{suffix}", columns, stamp)
        campaign.seal()
    return found


def _check(journal: Journal, planned: Sequence[Point], repeats: int) -> None:
    """Refuse a journal that this plan cannot have written."""
    journal.check(len(planned), repeats)
    for (number, repeat), record in journal.records.items():
        if record["set"] != results.plain(dict(planned[number].settings)):
            raise BadInputError(
                "a record of other settings than the plan's",
                where=str(journal.path),
                field=f"set (record of id {number}, repeat {repeat})",
                value=record["set"],
                allowed=str(dict(planned[number].settings)),
                remedy="delete its line: the run is done again",
            )


def _tables(
    planned: Sequence[Point], records: Mapping[tuple[int, int], Mapping[str, Any]], swept: Sequence[str]
) -> Sweep:
    lines = rows(planned, records)
    good = [line for line in lines if line["status"] == "ok"]
    lead = ("point", "repeat", "root_seed", "status", "error", *swept)
    numeric = [
        name
        for name in dict.fromkeys(name for line in good for name in line)
        if name not in lead
        and all(isinstance(line.get(name), int | float | None) for line in good)
        and any(line.get(name) is not None for line in good)
    ]
    summary = runs.means(good, "point", swept, numeric)
    count = {line["point"]: 0 for line in summary}
    for line in good:
        count[line["point"]] += 1
    for line in summary:
        line["repeats"] = count[line["point"]]
    failed: dict[int, str] = {}
    for line in lines:
        if line["status"] != "ok":
            failed.setdefault(line["point"], line["error"])
    return Sweep(runs.table(lines), runs.table(summary), failed)
