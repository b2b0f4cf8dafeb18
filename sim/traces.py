"""Readers of public request traces: the Azure LLM inference traces of 2023 and 2024.

The format is ``TIMESTAMP,ContextTokens,GeneratedTokens`` with CRLF or LF line ends. Times carry up to nine fractional
digits and are kept as integer nanoseconds until the first one has been subtracted, so no digit is lost. A UTC offset
(``+00:00``, ``Z``) is honoured. Rows out of order are sorted stably: ties keep their order in the file.

A row with ``GeneratedTokens`` 0 records a call that produced nothing. It cannot be simulated as a generation (a request
asks for at least one token), so it is left out and counted in :attr:`Trace.skipped`. Every other deviation is an error.
"""

from __future__ import annotations

import datetime as dt
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["MAX_TOKENS", "Trace", "azure_rows", "read_azure"]

MAX_TOKENS = 9_999_999
"""Largest token count a row may carry."""

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_LONGEST_LINE = 4096
_LONGEST_SPAN_S = 10**9
"""31 years: beyond it, float64 seconds no longer resolve a tenth of a microsecond."""
_TIME = rb"(\d{4}-\d\d-\d\d)[ T]([01]\d|2[0-3]):([0-5]\d):([0-5]\d)(?:\.(\d{1,9}))?(Z|[+-](?:0\d|1[0-4]):[0-5]\d)?"
_STAMP = re.compile(_TIME)
_ROW = re.compile(_TIME + rb",0*([1-9]\d{0,6}),0*(\d{1,7})[ \t]*\r?\n?")
_TIME_ALLOWED = "YYYY-MM-DD HH:MM:SS[.fraction][+00:00]"
_TOKENS_ALLOWED = f"an integer in [1, {MAX_TOKENS}]"


@dataclass(frozen=True)
class Trace:
    """A recorded workload, sorted by arrival time (stably).

    Parameters
    ----------
    arrival_s : FloatArray, shape (N,)
        Seconds since the earliest row; non-decreasing, starts at 0.
    prompt_tokens, output_tokens : IntArray, shape (N,)
        Both at least 1.
    line : IntArray, shape (N,)
        One-based line of the file each row came from.
    skipped : IntArray
        Lines left out because they generated no token.
    """

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    line: IntArray
    skipped: IntArray

    def __len__(self) -> int:
        return int(self.arrival_s.shape[0])


def _show(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace").strip("\r\n")


def _refuse(raw: bytes, where: str, line: int) -> NoReturn:
    """Raise the error that says what is wrong with a row the fast pattern did not match."""
    remedy = "correct or delete the row"
    if len(raw) >= _LONGEST_LINE or b"\0" in raw:
        raise BadInputError(
            "not a text row", where=where, line=line, value=_show(raw[:40]), allowed=",".join(_COLUMNS), remedy=remedy
        )
    cells = _show(raw).split(",")
    if len(cells) != len(_COLUMNS):
        missing = [name for name in _COLUMNS[len(cells) :] if name]
        raise BadInputError(
            "missing column" if missing else "too many columns",
            where=where,
            line=line,
            field=", ".join(missing) or None,
            value=_show(raw),
            allowed=",".join(_COLUMNS),
            remedy=remedy,
        )
    if not _STAMP.fullmatch(cells[0].encode()):
        raise BadInputError(
            "unparsable time",
            where=where,
            line=line,
            field=_COLUMNS[0],
            value=cells[0],
            allowed=_TIME_ALLOWED,
            remedy=remedy,
        )
    for name, cell in zip(_COLUMNS[1:], cells[1:], strict=True):
        text = cell.strip()
        if re.fullmatch(r"[+-]?\d+", text, re.ASCII):
            least = 1 if name == _COLUMNS[1] else 0
            if least <= int(text[:20]) <= MAX_TOKENS and text == cell and not text.startswith("+"):
                continue
            problem = "out of range" if not least <= int(text[:20]) <= MAX_TOKENS else "not a plain integer"
        else:
            problem = "empty" if not text else "not an integer"
        allowed = _TOKENS_ALLOWED if name == _COLUMNS[1] else _TOKENS_ALLOWED + ", or 0 (skipped)"
        raise BadInputError(problem, where=where, line=line, field=name, value=cell, allowed=allowed, remedy=remedy)
    raise BadInputError("unreadable row", where=where, line=line, value=_show(raw), remedy=remedy)


def _check_header(raw: bytes, where: str) -> None:
    if not raw:
        raise BadInputError("empty file", where=where, allowed=",".join(_COLUMNS) + " and at least one row")
    names = _show(raw.removeprefix(b"\xef\xbb\xbf")).split(",")
    if names != list(_COLUMNS):
        wrong = next((c for c in _COLUMNS if c not in names), _COLUMNS[0])
        raise BadInputError(
            "wrong header",
            where=where,
            line=1,
            field=wrong,
            value=_show(raw[:80]),
            allowed=",".join(_COLUMNS),
            remedy="pass an Azure LLM inference trace of 2023 or 2024",
        )


def azure_rows(path: str | Path) -> Iterator[tuple[int, int, int, int]]:
    """Yield (line, time in nanoseconds since 1 January of year 1, prompt tokens, output tokens) in file order.

    One row is in memory at a time. Rows with 0 output tokens are yielded as they are.

    Raises
    ------
    BadInputError
        If the file cannot be read, is empty, has another header, or at the first bad row: the message names file,
        line, column, value and what is allowed.
    """
    where = str(path)
    days: dict[bytes, int] = {}
    try:
        handle = Path(path).open("rb")  # noqa: SIM115 - closed by the with below; only opening may raise OSError here
    except OSError as error:
        raise BadInputError(
            f"cannot read trace: {error.strerror}", where=where, remedy="pass the path of a CSV file"
        ) from None
    with handle:
        _check_header(handle.readline(_LONGEST_LINE), where)
        line = 1
        match = _ROW.fullmatch
        while raw := handle.readline(_LONGEST_LINE):
            line += 1
            found = match(raw)
            if found is None:
                if not raw.strip():
                    continue
                _refuse(raw, where, line)
            date, hour, minute, second, fraction, zone, prompt, output = found.groups()
            day = days.get(date)
            if day is None:
                try:
                    day = days[date] = dt.date.fromisoformat(date.decode()).toordinal() - 1
                except ValueError:
                    raise BadInputError(
                        "no such date",
                        where=where,
                        line=line,
                        field=_COLUMNS[0],
                        value=date.decode(),
                        allowed=_TIME_ALLOWED,
                        remedy="correct or delete the row",
                    ) from None
            seconds = ((day * 24 + int(hour)) * 60 + int(minute)) * 60 + int(second)
            if zone is not None and zone != b"Z":
                offset = (int(zone[1:3]) * 60 + int(zone[4:6])) * 60
                seconds -= -offset if zone[:1] == b"-" else offset
            nanos = int(fraction.ljust(9, b"0")) if fraction is not None else 0
            yield line, seconds * 1_000_000_000 + nanos, int(prompt), int(output)


def read_azure(path: str | Path, limit: int | None = None) -> Trace:
    """Read a whole trace into columns (32 bytes per row), sorted by time.

    Parameters
    ----------
    path : str or Path
        CSV file.
    limit : int, optional
        Keep the earliest ``limit`` rows. The whole file is read and checked in any case.

    Raises
    ------
    BadInputError
        See :func:`azure_rows`; also when no row is left.
    """
    lines, seconds, nanos, prompts, outputs, skipped = (array("q") for _ in range(6))
    for line, time_ns, prompt, output in azure_rows(path):
        if output == 0:
            skipped.append(line)
            continue
        lines.append(line)
        whole, rest = divmod(time_ns, 1_000_000_000)  # years in nanoseconds exceed 64 bits
        seconds.append(whole)
        nanos.append(rest)
        prompts.append(prompt)
        outputs.append(output)
    if not lines:
        raise BadInputError(
            "no row to simulate",
            where=str(path),
            value=f"{len(skipped)} rows with GeneratedTokens 0" if skipped else "a header only",
            allowed="at least one row",
        )
    columns = [np.array(c, np.int64) for c in (seconds, nanos, prompts, outputs, lines)]
    order = np.lexsort((columns[1], columns[0]))  # a stable sort
    whole_s, rest_ns, prompt_tokens, output_tokens, line_no = (c[order[:limit]] for c in columns)
    if (span := int(whole_s[-1] - whole_s[0])) > _LONGEST_SPAN_S:
        raise BadInputError(
            f"{span:,} s lie between lines {line_no[0]} and {line_no[-1]}",
            where=str(path),
            field=_COLUMNS[0],
            allowed=f"a trace of at most {_LONGEST_SPAN_S:,} s",
            remedy="one of the two times is wrong: correct or delete the row",
        )
    offset_ns = (whole_s - whole_s[0]) * 1_000_000_000 + (rest_ns - rest_ns[0])
    return Trace(offset_ns / 1e9, prompt_tokens, output_tokens, line_no, np.array(skipped, np.int64))
