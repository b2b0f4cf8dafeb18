"""What the CSV readers share: a header that must match, one strict pattern per row, an explanation when it does not.

No quoting, no blanks around cells, CRLF or LF line ends, a byte-order mark is skipped, empty lines are too. One row is
in memory at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import BinaryIO, NoReturn

from entropic_ctl.errors import BadInputError
from sim.trace_table import MAX_TOKENS, TOKENS_ALLOWED, Row

__all__ = ["BadCellError", "CsvFormat", "decimal_time", "header_of", "tokens"]

_LONGEST_LINE = 4096
_REMEDY = "correct or delete the row"
_SECONDS = re.compile(r"\d{1,10}(?:\.\d*)?(?:[eE][+-]?\d{1,3})?", re.ASCII)


class BadCellError(Exception):
    """A cell that its column refuses.

    Parameters
    ----------
    column : int
        Position of the column, from 0.
    problem, allowed : str
        What is wrong, and what would be right.
    """

    def __init__(self, column: int, problem: str, allowed: str) -> None:
        super().__init__(problem)
        self.column, self.problem, self.allowed = column, problem, allowed


@dataclass(frozen=True)
class CsvFormat:
    """One CSV format.

    Parameters
    ----------
    name : str
        What it is called in errors.
    columns : tuple of str
        The header, exactly.
    time, output : str
        Columns of times and of output tokens.
    parse : callable
        Cells (one per column) to (seconds, nanos, prompt tokens, output tokens); raises :class:`BadCellError` with the
        column it refuses.
    fast : callable, optional
        A raw line to the same four numbers, or None for a line it does not know: it must agree with ``parse``.
    """

    name: str
    columns: tuple[str, ...]
    time: str
    output: str
    parse: Callable[[Sequence[str]], tuple[int, int, int, int]]
    fast: Callable[[bytes], tuple[int, int, int, int] | None] = lambda _: None

    def rows(self, handle: BinaryIO, where: str) -> Iterator[Row]:
        """Yield the rows of an open file, in file order.

        Parameters
        ----------
        handle : BinaryIO
            At its beginning.
        where : str
            File that errors name.

        Raises
        ------
        BadInputError
            At another header and at the first bad row: file, line, column, value, and what is allowed.
        """
        self._check_header(handle.readline(_LONGEST_LINE), where)
        line, fast = 1, self.fast
        while raw := handle.readline(_LONGEST_LINE):
            line += 1
            found = fast(raw)
            if found is None:
                if not raw.strip():
                    continue
                found = self._slowly(raw, where, line)
            yield Row._make((line, *found, -1, ()))

    def _check_header(self, raw: bytes, where: str) -> None:
        if not raw:
            raise BadInputError("empty file", where=where, allowed=",".join(self.columns) + " and at least one row")
        names = header_of(raw)
        if names != self.columns:
            raise BadInputError(
                "wrong header",
                where=where,
                line=1,
                field=next((c for c in self.columns if c not in names), self.columns[0]),
                value=_show(raw[:80]),
                allowed=",".join(self.columns),
                remedy=f"pass {self.name}",
            )

    def _slowly(self, raw: bytes, where: str, line: int) -> tuple[int, int, int, int]:
        """Parse a row cell by cell, or say what is wrong with it."""
        header = ",".join(self.columns)

        def refuse(problem: str, value: str, allowed: str, field: str | None = None) -> NoReturn:
            raise BadInputError(
                problem, where=where, line=line, field=field, value=value, allowed=allowed, remedy=_REMEDY
            )

        if len(raw) >= _LONGEST_LINE or b"\0" in raw:
            refuse("not a text row", _show(raw[:40]), header)
        cells = _show(raw).split(",")
        if missing := self.columns[len(cells) :]:
            refuse("missing column", _show(raw), header, ", ".join(missing))
        if len(cells) > len(self.columns):
            refuse("too many columns", _show(raw), header)
        try:
            return self.parse(cells)
        except BadCellError as bad:
            refuse(bad.problem, cells[bad.column], bad.allowed, self.columns[bad.column])


def _show(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace").strip("\r\n")


def header_of(raw: bytes) -> tuple[str, ...]:
    """Return the column names in a first line."""
    return tuple(_show(raw.removeprefix(b"\xef\xbb\xbf")).split(","))


def tokens(cells: Sequence[str], column: int, *, least: int, skip: bool = False) -> int:
    """Parse a count of tokens.

    Parameters
    ----------
    cells : sequence of str
    column : int
    least : int
        Smallest allowed value, 0 or 1.
    skip : bool
        Say in errors that rows with 0 are left out.

    Raises
    ------
    BadCellError
    """
    cell = cells[column]
    text = cell.strip()
    allowed = TOKENS_ALLOWED + ("" if least else ", or 0 (skipped)" if skip else ", or 0")
    if not re.fullmatch(r"[+-]?\d+", text, re.ASCII):
        raise BadCellError(column, "not an integer" if text else "empty", allowed)
    if not least <= (value := int(text[:20])) <= MAX_TOKENS:
        raise BadCellError(column, "out of range", allowed)
    if text != cell or text.startswith("+"):
        raise BadCellError(column, "not a plain integer", allowed)
    return value


def decimal_time(cells: Sequence[str], column: int) -> tuple[int, int]:
    """Parse non-negative decimal seconds into (seconds, nanoseconds), rounded to the nearest nanosecond.

    Parameters
    ----------
    cells : sequence of str
    column : int

    Raises
    ------
    BadCellError
    """
    cell = cells[column]
    allowed = "seconds >= 0, at most 10 digits before the point"
    if not _SECONDS.fullmatch(cell):
        negative = re.fullmatch(r"-\d+(\.\d*)?", cell, re.ASCII)
        problem = "empty" if not cell.strip() else "out of range" if negative else "unparsable time"
        raise BadCellError(column, problem, allowed)
    nanos = round(Decimal(cell) * 1_000_000_000)
    if nanos >= 10**19:
        raise BadCellError(column, "out of range", allowed)
    return divmod(nanos, 1_000_000_000)
