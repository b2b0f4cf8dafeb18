"""Mooncake's traces: JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``.

A prompt has exactly one hash id per block of 512 tokens, the last one possibly partly filled: a row with more or fewer
contradicts itself and is refused (S12). Equal ids at equal positions behind equal ids mean equal text; the ids of the
published traces are already chained, but nothing here relies on it. A row with ``output_length`` 0 is left out and
counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

from entropic_ctl.errors import BadInputError
from sim.trace_table import MAX_TOKENS, TOKENS_ALLOWED, Row

__all__ = ["BLOCK_TOKENS", "KEYS", "mooncake_rows"]

BLOCK_TOKENS = 512
KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_KNOWN = set(KEYS)
_LONGEST_LINE = 1 << 20
_LATEST_MS = 10**13
_REMEDY = "correct or delete the row"


def mooncake_rows(handle: BinaryIO, where: str) -> Iterator[Row]:
    """Yield the rows of an open file, in file order; one row is in memory at a time.

    Parameters
    ----------
    handle : BinaryIO
    where : str
        File that errors name.

    Raises
    ------
    BadInputError
        At the first bad row: file, line, key, value, and what is allowed.
    """
    line = 0
    while raw := handle.readline(_LONGEST_LINE):
        line += 1
        if raw.strip():
            yield _row(raw, where, line)


def _row(raw: bytes, where: str, line: int) -> Row:
    def refuse(problem: str, field: str | None, value: Any, allowed: str) -> NoReturn:
        raise BadInputError(problem, where=where, line=line, field=field, value=value, allowed=allowed, remedy=_REMEDY)

    shown = "a JSON object with the keys " + ", ".join(KEYS)
    if len(raw) >= _LONGEST_LINE:
        refuse("row too long", None, raw[:40].decode("utf-8", "backslashreplace"), f"{_LONGEST_LINE} bytes")
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        refuse("not a JSON object", None, raw[:80].decode("utf-8", "backslashreplace").strip(), shown)
    if values.keys() != _KNOWN:
        missing = [key for key in KEYS if key not in values]
        strange = [key for key in values if key not in _KNOWN]
        what = "missing key" if missing else "unknown key"
        refuse(what, ", ".join(missing or strange), sorted(values), shown)
    time, prompt, output, ids = (values[key] for key in KEYS)
    if type(time) not in (int, float) or not 0 <= time <= _LATEST_MS:
        refuse("not a time", KEYS[0], time, f"milliseconds in [0, {_LATEST_MS:g}]")
    if type(prompt) is not int or not 1 <= prompt <= MAX_TOKENS:
        refuse("not a number of tokens", KEYS[1], prompt, TOKENS_ALLOWED)
    if type(output) is not int or not 0 <= output <= MAX_TOKENS:
        refuse("not a number of tokens", KEYS[2], output, TOKENS_ALLOWED + ", or 0 (skipped)")
    blocks = -(-prompt // BLOCK_TOKENS)
    if type(ids) is not list or set(map(type, ids)) != {int} or not 0 <= min(ids) <= max(ids) < 2**63:
        refuse("not block hashes", KEYS[3], ids, f"a list of {blocks} integers >= 0")
    if len(ids) != blocks:
        refuse(
            f"{len(ids)} hashes for a prompt of {prompt} tokens",
            KEYS[3],
            ids,
            f"{blocks}: one per {BLOCK_TOKENS} tokens",
        )
    seconds, nanos = divmod(round(time * 1_000_000), 1_000_000_000)
    return Row(line, seconds, nanos, prompt, output, -1, ids)
