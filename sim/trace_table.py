"""A recorded workload as columns, and how readers of rows fill them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, IntArray
from sim.prefixes import TraceBlocks

__all__ = ["MAX_TOKENS", "TOKENS_ALLOWED", "Row", "Trace", "collect"]

MAX_TOKENS = 9_999_999
"""Largest token count a row may carry."""
TOKENS_ALLOWED = f"an integer in [1, {MAX_TOKENS}]"
_LONGEST_SPAN_S = 10**9
"""31 years: beyond it, float64 seconds no longer resolve a tenth of a microsecond."""


class Row(NamedTuple):
    """One request of a trace as a reader yields it; its ranges are checked.

    Parameters
    ----------
    line : int
        One-based line of the file (Parquet: row).
    seconds, nanos : int
        Time since the format's own origin; ``nanos`` in [0, 1e9).
    prompt_tokens, output_tokens : int
        ``output_tokens`` 0: the call produced nothing, and the row is left out.
    client : int
    block_ids : sequence of int
    """

    line: int
    seconds: int
    nanos: int
    prompt_tokens: int
    output_tokens: int
    client: int = -1
    block_ids: Iterable[int] = ()


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
        One-based line of the file each row came from (Parquet: row).
    skipped : IntArray
        Lines left out because they generated no token.
    client : IntArray, shape (N,), optional
        Who asked, -1 where unknown; None if the format does not say.
    blocks : TraceBlocks, optional
        Hash ids of the prompts' blocks; None if the format has none.
    """

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    line: IntArray
    skipped: IntArray
    client: IntArray | None = None
    blocks: TraceBlocks | None = None

    def __len__(self) -> int:
        return int(self.arrival_s.shape[0])

    @property
    def skipped_rows(self) -> int:
        """How many rows were left out."""
        return int(self.skipped.shape[0])

    def take(self, rows: IntArray, origin_s: float = 0.0) -> Trace:
        """Return ``rows``, in that order, with times counted from ``origin_s``."""
        return replace(
            self,
            arrival_s=self.arrival_s[rows] - origin_s,
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            line=self.line[rows],
            client=None if self.client is None else self.client[rows],
            blocks=None if self.blocks is None else self.blocks.take(rows),
        )


def collect(rows: Iterable[Row], *, where: str, time: str, output: str, block_tokens: int | None = None) -> Trace:
    """Gather rows into columns (48 bytes per row, and 8 per block), sorted by time.

    Parameters
    ----------
    rows : iterable of Row
        In file order; ties in time keep it.
    where, time, output : str
        Names of the file and of its columns of times and output tokens, for errors.
    block_tokens : int, optional
        Tokens per block id, if rows carry them.

    Raises
    ------
    BadInputError
        If no row is left to simulate, or the times span more than 31 years.
    """
    lines, seconds, nanos, prompts, outputs, clients, skipped, ids, ends = (array("q") for _ in range(9))
    for line, whole, rest, prompt_tokens, output_tokens, client, block_ids in rows:
        if output_tokens == 0:
            skipped.append(line)
            continue
        lines.append(line)
        seconds.append(whole)
        nanos.append(rest)
        prompts.append(prompt_tokens)
        outputs.append(output_tokens)
        clients.append(client)
        if block_tokens is not None:
            ids.extend(block_ids)
            ends.append(len(ids))
    if not lines:
        raise BadInputError(
            "no row to simulate",
            where=where,
            value=f"{len(skipped)} rows with {output} 0" if skipped else "a header only",
            allowed="at least one row",
        )
    line_of, whole_s, rest_ns, asked_by = (_column(column) for column in (lines, seconds, nanos, clients))
    order = np.lexsort((rest_ns, whole_s))  # a stable sort
    first, last = int(order[0]), int(order[-1])
    if (span := int(whole_s[last] - whole_s[first])) > _LONGEST_SPAN_S:
        raise BadInputError(
            f"{span:,} s lie between lines {line_of[first]} and {line_of[last]}",
            where=where,
            field=time,
            allowed=f"a trace of at most {_LONGEST_SPAN_S:,} s",
            remedy="one of the two times is wrong: correct or delete the row",
        )
    offset_ns = (whole_s - whole_s[first]) * 1_000_000_000 + (rest_ns - rest_ns[first])
    unsorted = Trace(
        offset_ns / 1e9,
        _column(prompts),
        _column(outputs),
        line_of,
        _column(skipped),
        asked_by if (asked_by >= 0).any() else None,
        TraceBlocks(np.concatenate([[0], _column(ends)]), _column(ids), block_tokens) if block_tokens else None,
    )
    return unsorted if (np.diff(order) == 1).all() else unsorted.take(order)


def _column(values: array[int]) -> IntArray:
    """Return a gathered column without copying it."""
    return np.frombuffer(values, np.int64) if values else np.empty(0, np.int64)
