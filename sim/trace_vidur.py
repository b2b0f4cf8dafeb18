"""Vidur's traces: ``arrived_at,num_prefill_tokens,num_decode_tokens``, times in seconds.

A row with ``num_decode_tokens`` 0 asks for nothing: it is left out and counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sim.trace_csv import CsvFormat, decimal_time, tokens

__all__ = ["VIDUR"]

_ROW = re.compile(rb"(\d{1,10})(?:\.(\d{1,9}))?,0*([1-9]\d{0,6}),0*(\d{1,7})\r?\n?")


def _fast(raw: bytes) -> tuple[int, int, int, int] | None:
    found = _ROW.fullmatch(raw)
    if found is None:
        return None
    second, fraction, prompt, output = found.groups()
    return int(second), int(fraction.ljust(9, b"0")) if fraction is not None else 0, int(prompt), int(output)


def _parse(cells: Sequence[str]) -> tuple[int, int, int, int]:
    return *decimal_time(cells, 0), tokens(cells, 1, least=1), tokens(cells, 2, least=0, skip=True)


VIDUR = CsvFormat(
    "a Vidur trace",
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    "arrived_at",
    "num_decode_tokens",
    _parse,
    _fast,
)
