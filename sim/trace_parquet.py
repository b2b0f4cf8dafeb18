"""Our own trace format: one Parquet table, read and written in batches.

=================  ==============  ========================================================================
column             type            meaning
=================  ==============  ========================================================================
``arrival_s``      float64         seconds, >= 0, any order
``prompt_tokens``  int64           1 .. 9,999,999
``output_tokens``  int64           0 .. 9,999,999; rows with 0 are left out when read
``client``         int64           optional; who asked, -1 where unknown
``hash_ids``       list of int64   optional; one id per block of the prompt, the last possibly partly filled
=================  ==============  ========================================================================

No column may hold nulls; other columns are errors. With ``hash_ids`` the schema's metadata has ``block_tokens`` (as
decimal digits), the number of tokens per block.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from entropic_ctl import results
from entropic_ctl.errors import BadInputError
from sim.trace_table import MAX_TOKENS, TOKENS_ALLOWED, Row, Trace

__all__ = ["block_tokens", "parquet_rows", "write_parquet"]

_NEEDED = ("arrival_s", "prompt_tokens", "output_tokens")
_OPTIONAL = ("client", "hash_ids")
_BATCH = 65_536
_LATEST_S = 1e10
_REMEDY = "correct or delete the row"
_INTEGER = f"{TOKENS_ALLOWED}"
_RANGES = {
    "arrival_s": (0.0, _LATEST_S, f"seconds in [0, {_LATEST_S:g}]"),
    "prompt_tokens": (1, MAX_TOKENS, TOKENS_ALLOWED),
    "output_tokens": (0, MAX_TOKENS, TOKENS_ALLOWED + ", or 0 (skipped)"),
    "client": (-1, 2**62, "an integer >= -1"),
}


def _open(path: str | Path) -> Any:
    pa, parquet = _pyarrow()
    try:
        file = parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise BadInputError(f"not a Parquet table: {error}", where=str(path)) from None
    names = set(file.schema_arrow.names)
    allowed = f"{', '.join(_NEEDED)}, and perhaps {', '.join(_OPTIONAL)}"
    for problem, wrong in (
        ("column twice", sorted(name for name in names if file.schema_arrow.names.count(name) > 1)),
        ("column missing", [name for name in _NEEDED if name not in names]),
        ("unknown column", sorted(names - {*_NEEDED, *_OPTIONAL})),
    ):
        if wrong:
            raise BadInputError(problem, where=str(path), field=", ".join(wrong), value=sorted(names), allowed=allowed)
    for name in file.schema_arrow.names:
        kind = file.schema_arrow.field(name).type
        good = (
            pa.types.is_list(kind) and pa.types.is_integer(kind.value_type)
            if name == "hash_ids"
            else pa.types.is_integer(kind) or (name == "arrival_s" and pa.types.is_floating(kind))
        )
        if not good:
            wanted = {"arrival_s": "float64", "hash_ids": "list of int64"}.get(name, "int64")
            raise BadInputError("column of another type", where=str(path), field=name, value=str(kind), allowed=wanted)
    return file


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise BadInputError("Parquet needs pyarrow", remedy="pip install 'entropic-ctl[sim]'") from None
    return pa, parquet


def block_tokens(path: str | Path) -> int | None:
    """Return the tokens per hashed block of a trace file, or None if it has no hashes.

    Raises
    ------
    BadInputError
        If it has hashes and does not say, or is no such file.
    """
    with _open(path) as file:
        schema = file.schema_arrow
    if "hash_ids" not in schema.names:
        return None
    said = (schema.metadata or {}).get(b"block_tokens", b"")
    if not said.isdigit() or not 1 <= int(said[:9]) <= MAX_TOKENS:
        raise BadInputError(
            "hash_ids without a block size",
            where=str(path),
            field="metadata block_tokens",
            value=said.decode("utf-8", "backslashreplace"),
            allowed=TOKENS_ALLOWED,
            remedy="write the file with `entropic trace convert`",
        )
    return int(said)


def parquet_rows(path: str | Path) -> Iterator[Row]:
    """Yield the rows of a trace file, one batch in memory at a time.

    Parameters
    ----------
    path : str or Path

    Raises
    ------
    BadInputError
        If it is no such file, and at the first bad row: file, column, row, value, and what is allowed.
    """
    pa, _ = _pyarrow()
    per_block, where, row = block_tokens(path), str(path), 1
    with _open(path) as file:
        try:
            for batch in file.iter_batches(_BATCH):
                columns = {name: _column(batch.column(name), name, where, row) for name in batch.schema.names}
                n = batch.num_rows
                whole = np.floor(columns["arrival_s"])
                nanos = np.rint((columns["arrival_s"] - whole) * 1e9).astype(np.int64)  # up to 1e9: carried below
                hashes = columns.get("hash_ids")
                for i, (second, rest, prompt, output, client) in enumerate(
                    zip(
                        whole.astype(np.int64).tolist(),
                        nanos.tolist(),
                        columns["prompt_tokens"].tolist(),
                        columns["output_tokens"].tolist(),
                        columns["client"].tolist() if "client" in columns else [-1] * n,
                        strict=True,
                    )
                ):
                    ids = hashes[i] if hashes is not None else ()
                    if per_block is not None and len(ids) != -(-prompt // per_block):
                        raise BadInputError(
                            f"{len(ids)} hashes for a prompt of {prompt} tokens",
                            where=where,
                            field=f"hash_ids (row {row + i})",
                            value=ids,
                            allowed=f"{-(-prompt // per_block)}: one per {per_block} tokens",
                            remedy=_REMEDY,
                        )
                    yield Row(row + i, second + rest // 10**9, rest % 10**9, prompt, output, client, ids)
                row += n
        except pa.ArrowException as error:
            raise BadInputError(f"not a Parquet table: {error}", where=where) from None


def _column(values: Any, name: str, where: str, row: int) -> Any:
    """Return a column of one batch as an array (hashes: as lists), or name the first bad row."""

    def refuse(problem: str, i: int, value: Any, allowed: str) -> None:
        raise BadInputError(
            problem, where=where, field=f"{name} (row {row + i})", value=value, allowed=allowed, remedy=_REMEDY
        )

    if values.null_count:
        i = values.is_null().to_pylist().index(True)
        refuse("empty", i, None, "no nulls")
    if name == "hash_ids":
        lists = values.to_pylist()
        for i, ids in enumerate(lists):
            if any(item is None or not 0 <= item < 2**63 for item in ids):
                refuse("not block hashes", i, ids, "integers >= 0")
        return lists
    low, high, allowed = _RANGES[name]
    array = values.to_numpy(zero_copy_only=False)
    if name == "arrival_s":
        array = array.astype(np.float64, copy=False)
    good = (array >= low) & (array <= high)
    if not good.all():
        i = int(np.argmin(good))
        refuse("out of range", i, array[i].item(), allowed)
    return array


def write_parquet(path: str | Path, trace: Trace) -> None:
    """Write a trace, atomically; reading it gives the same arrivals, lengths, clients and hashes.

    Parameters
    ----------
    path : str or Path
        ``*.parquet``.
    trace : Trace

    Raises
    ------
    BadInputError
        For another suffix, or a path that cannot be written.
    """
    path = Path(path)
    if path.suffix != ".parquet":
        raise BadInputError("unknown kind of trace to write", where=str(path), value=path.suffix, allowed=".parquet")
    pa, parquet = _pyarrow()
    columns: dict[str, Any] = {
        "arrival_s": trace.arrival_s,
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
    }
    if trace.client is not None:
        columns["client"] = trace.client
    metadata = None
    if trace.blocks is not None:
        columns["hash_ids"] = pa.LargeListArray.from_arrays(trace.blocks.offset, trace.blocks.ids).cast(
            pa.list_(pa.int64())
        )
        metadata = {b"block_tokens": str(trace.blocks.tokens).encode()}
    with results.atomic(path) as temporary:
        parquet.write_table(pa.table(columns).replace_schema_metadata(metadata), temporary)
