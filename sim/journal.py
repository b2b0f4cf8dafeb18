"""An append-only journal of finished runs: one JSON object per line, on disk before the next one is written.

A process can be killed at any moment. Each record is one ``write`` of a whole line, flushed and fsynced, so that at
most the last line is torn. Opening the journal drops a last line that is not a complete record (its run is redone); a
damaged line anywhere else is an error, because no kill can have made it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from entropic_ctl.errors import BadInputError

__all__ = ["Journal", "read"]

Key = tuple[int, int]


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line, or None if it is none."""
    try:
        values = json.loads(line)
        key = values["id"], values["repeat"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return dict(values) if all(type(part) is int and part >= 0 for part in key) else None


def read(path: Path) -> tuple[dict[Key, dict[str, Any]], int]:
    """Return the records by (id, repeat), and how many bytes of the file they fill.

    Raises
    ------
    BadInputError
        If a line other than the last is damaged, or two lines of one run differ.
    """
    raw = path.read_bytes() if path.exists() else b""
    lines = raw.split(b"\n")
    torn = lines.pop()  # what follows the last line feed: empty, or half a line
    records: dict[Key, dict[str, Any]] = {}
    good = 0
    for number, line in enumerate(lines, start=1):
        values = _record(line)
        if values is None:
            if number == len(lines) and not torn:
                break
            raise BadInputError(
                "damaged record",
                where=str(path),
                line=number,
                value=line[:60].decode("utf-8", "replace"),
                remedy="delete the line: its run is done again",
            )
        key = values["id"], values["repeat"]
        if records.setdefault(key, values) != values:
            raise BadInputError("two different records of one run", where=str(path), line=number, value=key)
        good += len(line) + 1
    return records, good


def _value(value: object) -> bool:
    """Return True for what a metric may be: a string, null, a boolean, or a number that a table can hold."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return value is None or isinstance(value, float | str)


class Journal:
    """The journal of one folder, open for appending.

    Parameters
    ----------
    path : Path
        Made if missing; a torn last line is cut off.

    Attributes
    ----------
    records : dict
        (id, repeat) to record, those found and those appended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records, good = read(path)
        self._handle: IO[bytes] = path.open("ab")
        if self._handle.tell() != good:
            self._handle.truncate(good)
        os.fsync(self._handle.fileno())

    def check(self, ids: int, repeats: int) -> None:
        """Refuse records that no run of a plan with ``ids`` numbers and ``repeats`` repeats can have written.

        Raises
        ------
        BadInputError
            Naming the file and the record.
        """
        value: object
        for (number, repeat), record in self.records.items():
            kind = "error" if "error" in record else "metrics"
            found = record.get(kind)
            fits = (
                isinstance(found, str)
                if kind == "error"
                else isinstance(found, dict) and all(map(_value, found.values()))
            )
            if number >= ids or repeat >= repeats:
                problem, field, value = "a record of no run of this plan", "id, repeat", (number, repeat)
                allowed = f"id in [0, {ids - 1}], repeat in [0, {repeats - 1}]"
            elif not isinstance(record.get("set"), dict):
                problem, field, value, allowed = "damaged record", "set", record.get("set"), "a table of settings"
            elif not fits or ("metrics" in record and kind == "error"):
                problem, field, value = "damaged record", kind, found
                allowed = "a text" if kind == "error" else "a table of numbers, texts and nulls"
            else:
                continue
            raise BadInputError(
                problem,
                where=str(self.path),
                field=f"{field} (record of id {number}, repeat {repeat})",
                value=value,
                allowed=allowed,
                remedy="delete its line: a run of the plan is done again",
            )

    def append(self, record: Mapping[str, Any]) -> None:
        """Put a record (JSON-able, with integers ``id`` and ``repeat``) on disk."""
        line = json.dumps(record, separators=(",", ":"), allow_nan=False)
        self._handle.write(line.encode() + b"\n")
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self.records[record["id"], record["repeat"]] = json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._handle.close()
