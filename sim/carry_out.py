"""Carry out the runs that a journal lacks, wherever they run, and keep each record as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from entropic_ctl import results
from entropic_ctl.errors import BadInputError, EntropicError
from sim import runs
from sim.runs import Certify, Point
from sim.workers import Crash, Pool

__all__ = ["CrashedError", "Memory", "Records", "carry_out"]


class CrashedError(EntropicError):
    """A worker process died over a run; what was finished is in the journal, and ``--resume`` tries the rest again."""


class Records(Protocol):
    """Where records go: ``records`` by (id, repeat), and ``append``."""

    records: dict[tuple[int, int], dict[str, Any]]

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record."""
        ...


class Memory:
    """Records of this process only: the journal of work that nobody resumes."""

    def __init__(self) -> None:
        self.records: dict[tuple[int, int], dict[str, Any]] = {}

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record with integers ``id`` and ``repeat``."""
        self.records[record["id"], record["repeat"]] = dict(record)


def carry_out(
    journal: Records,
    wanted: Iterable[tuple[Point, int]],
    pool: Pool,
    *,
    certify: Certify | None = None,
    uncertified: bool = False,
    bank: Any = None,
    done: Callable[[int], None] | None = None,
) -> None:
    """Run what the journal lacks and append each record as it comes.

    Parameters
    ----------
    journal : Records
        A :class:`sim.journal.Journal`, or :class:`Memory`.
    wanted : iterable of (Point, int)
        Points and repeats.
    pool : Pool
        Started; its function is :func:`sim.runs.run`.
    certify, uncertified, bank
        As in :func:`sim.runs.prepare`.
    done : callable, optional
        Told the number of runs in the journal after each.

    Raises
    ------
    CrashedError
        After all others are done, if a worker died over a run.
    """
    settings: dict[tuple[int, int], Mapping[str, Any]] = {}

    def note(key: tuple[int, int], outcome: Mapping[str, Any]) -> None:
        journal.append({"id": key[0], "repeat": key[1], "set": results.plain(settings[key]), **outcome})
        if done is not None:
            done(len(journal.records))

    def tasks() -> Iterator[runs.Task]:
        for point, repeat in wanted:
            key = point.id, repeat
            if key in journal.records:
                continue
            settings[key] = point.settings
            try:
                if point.config is None:
                    raise point.error or BadInputError("not a configuration")
                task = runs.prepare(point.config, *key, certify=certify, uncertified=uncertified, bank=bank)
            except EntropicError as error:
                note(key, runs.failure(error))
            else:
                yield task

    crashes = []
    for task, outcome in pool.each(tasks()):
        key = task.id, task.repeat
        if isinstance(outcome, Crash):
            shown = ", ".join(f"{name} = {value}" for name, value in settings[key].items())
            crashes.append(f"point {key[0]} ({shown}), repeat {key[1]}: {outcome.how}")
        else:
            note(key, outcome)
    if crashes:
        raise CrashedError(
            f"{len(crashes)} runs killed their worker process: {'; '.join(crashes[:3])}; what was finished is kept; "
            "give it more memory or fewer workers and pass --resume"
        )
