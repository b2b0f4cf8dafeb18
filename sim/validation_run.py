"""The order of a validation's runs, and the journal that lets it be done in pieces.

Each run on the engine is one line of ``journal.jsonl``, appended and flushed to the disk when the run is over: a killed
validation loses the run it was in. The first line says what the journal belongs to; another configuration is refused.

Order. First a third of the calibration blocks: they set the arrival rates, once. Then the other blocks and all trials
in one random order (drawn from the seed), so that a drifting machine meets every setting, and the calibration, alike.
Last, what was disturbed is run again. A run counts as *disturbed* if other processes kept more than ``FOREIGN_CORES``
cores busy, or the small fixed decode before or after it, or the small fixed product during it, took more than ``SLOW``
times the lower quartile of all.
Disturbed runs stay in the journal and in the report; they are left out of the comparison as long as enough undisturbed
ones exist.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from entropic_ctl.cli_output import alone
from entropic_ctl.config import digest
from entropic_ctl.errors import BadInputError
from sim.streams import stream
from sim.validation_plan import SETTINGS, UTILISATIONS, Scale

__all__ = ["FOREIGN_CORES", "JOURNAL", "SLOW", "Journal", "Run", "cells", "disturbed", "held", "next_run", "runs"]

JOURNAL = "journal.jsonl"
"""Name of the journal in its folder."""

FOREIGN_CORES = 0.03
"""Measured: a tenth of a core taken by others makes steps 10-20% slower (a layer waits for its slower thread)."""
SLOW = {"reference_s": 1.08, "probe_s": 1.05}
"""Measured: a virtual machine of this kind has two speeds, a quarter apart, and keeps each for seconds or minutes; a
mean product of 1.05 is a run of which a fifth was slow."""


class Run(NamedTuple):
    """One run: a calibration block (``setting`` is "block"), or a setting at a utilisation."""

    setting: str
    utilisation: float
    repeat: int


def cells() -> list[tuple[str, float]]:
    """Return the (setting, utilisation) pairs that are compared, the base's first."""
    base, middle = SETTINGS[0].name, UTILISATIONS[len(UTILISATIONS) // 2]
    return [(base, u) for u in UTILISATIONS] + [(setting.name, middle) for setting in SETTINGS[1:]]


def runs(seed: int, scale: Scale) -> tuple[list[Run], list[Run]]:
    """Return (the blocks that come first, everything else in random order)."""
    first = max(1, scale.blocks // 3)
    blocks = [Run("block", 0.0, i) for i in range(scale.blocks)]
    trials = [Run(name, u, r) for name, u in cells() for r in range(scale.repeats)]
    rest = blocks[first:] + trials
    order = stream(seed, "validation order").permutation(len(rest))
    return blocks[:first], [rest[i] for i in order.tolist()]


@contextmanager
def held(folder: Path, *, resume: bool) -> Iterator[Path]:
    """Yield ``folder`` with links resolved, made if missing; nobody else can write it while the block runs.

    Parameters
    ----------
    folder : Path
    resume : bool
        Go on with a validation that was begun there; without it such a folder is refused.

    Raises
    ------
    BadInputError
        If it holds anything but a validation, one that is not to be resumed, or another process writes it.
    """
    folder = folder.resolve()
    shown = str(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"cannot make the folder: {error.strerror}", where="--out", value=shown) from None
    with alone(folder):
        if (folder / JOURNAL).is_file():
            if not resume and (folder / JOURNAL).stat().st_size:
                raise _begun(folder / JOURNAL)
        elif any(folder.iterdir()):
            raise BadInputError(
                f"the folder is not empty and holds no {JOURNAL} of a validation",
                where="--out",
                value=shown,
                allowed="a new or empty folder, or one that `entropic validate` began",
                remedy="name another folder",
            )
        yield folder


def _begun(path: Path) -> BadInputError:
    remedy = "pass --resume to go on, or name another folder"
    return BadInputError("a validation was begun here", where=str(path), remedy=remedy)


@dataclass
class Journal:
    """The finished runs, in the order in which they ended; each entry has ``run`` and what was measured.

    Parameters
    ----------
    path : Path
    subject : mapping
        What it belongs to.
    resume : bool
        Continue one that is there.

    Raises
    ------
    BadInputError
        If one is there and ``resume`` is False, or it belongs to something else, or it is broken in the middle.
    """

    path: Path
    subject: Mapping[str, Any]
    resume: bool = False

    def __post_init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        key = digest(self.subject)
        if self.path.exists() and self.path.stat().st_size:
            self._read(key)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._append({"journal": 1, "digest": key, **self.subject})

    def _read(self, key: str) -> None:
        where = str(self.path)
        if not self.resume:
            raise _begun(self.path)
        raw = self.path.read_bytes()
        whole, _, broken = raw.rpartition(b"\n")
        found = ""
        if broken:  # a process was killed while it wrote
            os.truncate(self.path, len(whole) + 1 if whole else 0)
        for number, line in enumerate(whole.split(b"\n"), start=1):
            try:
                values = json.loads(line)
                if number == 1:
                    found = str(values["digest"])
                else:
                    values["run"] = Run(*values["run"])
                    self.entries.append(values)
            except (ValueError, LookupError, TypeError):
                raise BadInputError("not a journal line", where=where, line=number) from None
        if found != key:
            raise BadInputError(
                "the journal belongs to another validation",
                where=where,
                field="digest",
                value=found[:12],
                allowed=key[:12],
                remedy="name another folder",
            )

    def _append(self, values: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(values, separators=(",", ":")) + "\n")
            handle.flush()
            os.fsync(handle.fileno())

    def add(self, run: Run, **values: Any) -> None:
        """Write down a finished run."""
        self._append({"run": list(run), **values})
        self.entries.append({"run": run, **values})

    def of(self, run: Run) -> list[dict[str, Any]]:
        """Return the tries of a run."""
        return [entry for entry in self.entries if entry["run"] == run]


def disturbed(entries: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return for each entry whether somebody else used the machine (see the module)."""
    if not entries:
        return []
    usual = {name: float(np.quantile([float(entry[name]) for entry in entries], 0.25)) for name in SLOW}
    out = []
    for entry in entries:
        foreign = entry["foreign_cores"]
        busy = foreign is not None and np.isfinite(foreign) and foreign > FOREIGN_CORES
        out.append(bool(busy or any(entry[name] > SLOW[name] * usual[name] for name in SLOW)))
    return out


def next_run(journal: Journal, seed: int, scale: Scale) -> Run | None:
    """Return the run to do next, or None when all is done: each run once, then the disturbed ones again.

    Parameters
    ----------
    journal : Journal
    seed : int
        Draws the order.
    scale : Scale
    """
    first, rest = runs(seed, scale)
    for run in (*first, *rest):
        if not journal.of(run):
            return run
    bad = disturbed(journal.entries)
    quiet = {entry["run"] for entry, noisy in zip(journal.entries, bad, strict=True) if not noisy}
    again = [run for run in (*first, *rest) if run not in quiet and len(journal.of(run)) < scale.tries]
    return min(again, key=lambda run: len(journal.of(run))) if again else None
