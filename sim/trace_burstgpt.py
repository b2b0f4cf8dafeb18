"""BurstGPT: ``Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type``, times in seconds.

A row with ``Response tokens`` 0 is a failed call (often all counts are 0): it is left out and counted. The total must
be the sum of the other two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sim.trace_csv import BadCellError, CsvFormat, decimal_time, tokens

__all__ = ["BURSTGPT"]

_ROW = re.compile(rb"(\d{1,10})(?:\.(\d{1,9}))?,[^,\0]*,0*(\d{1,7}),0*(\d{1,7}),0*(\d{1,8}),[^,\0\r\n]*\r?\n?")


def _fast(raw: bytes) -> tuple[int, int, int, int] | None:
    found = _ROW.fullmatch(raw)
    if found is None:
        return None
    second, fraction, request, response, total = found.groups()
    prompt_tokens, output_tokens = int(request), int(response)
    if int(total) != prompt_tokens + output_tokens or (output_tokens and not prompt_tokens):
        return None
    nanos = int(fraction.ljust(9, b"0")) if fraction is not None else 0
    return int(second), nanos, prompt_tokens, output_tokens


def _parse(cells: Sequence[str]) -> tuple[int, int, int, int]:
    when = decimal_time(cells, 0)
    output_tokens = tokens(cells, 3, least=0, skip=True)
    prompt_tokens = tokens(cells, 2, least=1 if output_tokens else 0)
    total = cells[4]
    expected = prompt_tokens + output_tokens
    if not re.fullmatch(r"\d{1,20}", total, re.ASCII):
        raise BadCellError(4, "not a plain integer" if total.strip() else "empty", f"the sum, {expected}")
    if int(total) != expected:
        raise BadCellError(4, "not the sum of request and response tokens", str(expected))
    return *when, prompt_tokens, output_tokens


BURSTGPT = CsvFormat(
    "a BurstGPT trace",
    ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"),
    "Timestamp",
    "Response tokens",
    _parse,
    _fast,
)
