"""The Azure LLM inference traces of 2023 and 2024: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

Times carry up to nine fractional digits and are kept as integers until the first one has been subtracted, so no digit
is lost. A UTC offset (``+00:00``, ``Z``) is honoured. A row with ``GeneratedTokens`` 0 records a call that produced
nothing: it is left out and counted.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from functools import lru_cache

from sim.trace_csv import BadCellError, CsvFormat, tokens

__all__ = ["AZURE"]

_TIME = rb"(\d{4}-\d\d-\d\d[ T](?:[01]\d|2[0-3]):[0-5]\d):([0-5]\d)(?:\.(\d{1,9}))?(Z|[+-](?:0\d|1[0-4]):[0-5]\d)?"
_STAMP = re.compile(_TIME)
_ROW = re.compile(_TIME + rb",0*([1-9]\d{0,6}),0*(\d{1,7})[ \t]*\r?\n?")
_ALLOWED = "YYYY-MM-DD HH:MM:SS[.fraction][+00:00]"


@lru_cache(maxsize=4096)
def _minute(text: bytes) -> int | None:
    """Return seconds from 1 January of year 1 to a minute ``YYYY-MM-DD HH:MM``, or None if there is no such date."""
    try:
        day = dt.date.fromisoformat(text[:10].decode()).toordinal() - 1
    except ValueError:
        return None
    return ((day * 24 + int(text[11:13])) * 60 + int(text[14:16])) * 60


def _time(minute: bytes, second: bytes, fraction: bytes | None, zone: bytes | None) -> tuple[int, int] | None:
    """Return (seconds, nanoseconds) of a matched time, or None if there is no such date."""
    seconds = _minute(minute)
    if seconds is None:
        return None
    if zone is not None and zone != b"Z":
        offset = (int(zone[1:3]) * 60 + int(zone[4:6])) * 60
        seconds -= -offset if zone[:1] == b"-" else offset
    return seconds + int(second), int(fraction.ljust(9, b"0")) if fraction is not None else 0


def _fast(raw: bytes) -> tuple[int, int, int, int] | None:
    found = _ROW.fullmatch(raw)
    if found is None:
        return None
    minute, second, fraction, zone, prompt, output = found.groups()
    when = _time(minute, second, fraction, zone)
    return None if when is None else (*when, int(prompt), int(output))


def _parse(cells: Sequence[str]) -> tuple[int, int, int, int]:
    found = _STAMP.fullmatch(cells[0].encode())
    if found is None:
        raise BadCellError(0, "unparsable time", _ALLOWED)
    when = _time(found[1], found[2], found[3], found[4])
    if when is None:
        raise BadCellError(0, "no such date", _ALLOWED)
    return *when, tokens(cells, 1, least=1), tokens(cells, 2, least=0, skip=True)


AZURE = CsvFormat(
    "an Azure LLM inference trace of 2023 or 2024",
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "TIMESTAMP",
    "GeneratedTokens",
    _parse,
    _fast,
)
