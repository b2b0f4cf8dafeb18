"""Result files: tables stamped with what made them, and JSON.

``write_table`` writes Parquet or CSV by suffix. The stamp (resolved config and its digest, seed, version, commit,
hardware, library versions) travels in the file itself: in Parquet's metadata, or in a first CSV line that starts with
``# ``. It holds no time of day, so equal settings, versions and machine give byte-identical files. Files appear at
once or not at all: a temporary file in the same folder, then a rename.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.errors import BadInputError
from entropic_ctl.provenance import stamp

__all__ = ["atomic", "plain", "read_table", "stamp", "write_json", "write_table"]

SCHEMA = 1
_KEY = b"entropic_ctl"
_SUFFIXES = ".parquet, .csv"
Table = dict[str, npt.NDArray[Any]]


def plain(value: Any) -> Any:
    """Return ``value`` as JSON-able Python: NumPy scalars and arrays unpacked, NaN and infinities None.

    Raises
    ------
    BadInputError
        If something inside has no JSON form.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(item) for item in (value.tolist() if isinstance(value, np.ndarray) else value)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Path):
        return str(value)
    raise BadInputError("no JSON form", value=value, allowed="mappings, sequences, arrays, strings, numbers, None")


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it becomes ``path``, on failure nothing remains.

    A symbolic link stays one (its target is replaced). What is no regular file (a pipe, a device) cannot be replaced
    and is yielded itself.

    Raises
    ------
    BadInputError
        If nothing can be written there.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    path = path.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    except OSError as error:
        raise BadInputError(f"cannot write: {error.strerror}", where=str(path)) from None
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except OSError as error:
        raise BadInputError(f"cannot write: {error.strerror}", where=str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, values: Any) -> None:
    """Write JSON atomically: two-space indent, keys in the given order, NaN and infinities as null."""
    with atomic(Path(path)) as temporary:
        temporary.write_text(json.dumps(plain(values), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_table(path: str | Path, columns: Mapping[str, Any], stamp: Mapping[str, Any]) -> None:
    """Write a table atomically, Parquet or CSV by suffix.

    Parameters
    ----------
    path : str or Path
        ``*.parquet`` (needs pyarrow) or ``*.csv``; the folder is made if missing.
    columns : mapping of str to array_like, each shape (rows,)
        Booleans, integers, floats (NaN is kept) or strings.
    stamp : mapping
        What :func:`stamp` returns, or any JSON-able mapping.

    Raises
    ------
    BadInputError
        For another suffix, columns of different lengths or kinds, or a path that cannot be written.
    """
    path = Path(path)
    table = _arrays(columns, str(path))
    meta = {"schema": SCHEMA, "dtypes": {name: _dtype(a) for name, a in table.items()}, "stamp": plain(stamp)}
    text = json.dumps(meta, sort_keys=True, allow_nan=False)
    if path.suffix == ".parquet":
        pa, parquet = _pyarrow()
        made = pa.table({name: pa.array(a.tolist() if a.dtype.kind == "U" else a) for name, a in table.items()})
        with atomic(path) as temporary:
            parquet.write_table(made.replace_schema_metadata({_KEY: text.encode()}), temporary)
    elif path.suffix == ".csv":
        with atomic(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as handle:
            handle.write(f"# {text}\n")
            writer = csv.writer(handle, lineterminator="\n")
            writer.writerow(table)
            writer.writerows(zip(*(_cells(a) for a in table.values()), strict=True))
    else:
        raise BadInputError("unknown kind of table", where=str(path), value=path.suffix, allowed=_SUFFIXES)


def read_table(path: str | Path) -> tuple[Table, dict[str, Any]]:
    """Read what :func:`write_table` wrote: (columns, stamp), values and dtypes exactly as written.

    Raises
    ------
    BadInputError
        If the file is missing, is truncated, has another suffix, or carries no stamp.
    """
    path = Path(path)
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path)
        if path.suffix == ".csv":
            return _read_csv(path)
    except OSError as error:
        raise BadInputError(f"cannot read table: {error.strerror or error}", where=str(path)) from None
    raise BadInputError("unknown kind of table", where=str(path), value=path.suffix, allowed=_SUFFIXES)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise BadInputError(
            "Parquet needs pyarrow", remedy="pip install 'entropic-ctl[sim]', or write a .csv file"
        ) from None
    return pa, parquet


def _arrays(columns: Mapping[str, Any], where: str) -> Table:
    table = {str(name): np.asarray(values) for name, values in columns.items()}
    rows = {a.shape for a in table.values()}
    if len(rows) > 1 or any(len(shape) != 1 for shape in rows):
        shapes = {name: a.shape for name, a in table.items()}
        raise BadInputError("columns differ in length", where=where, value=shapes, allowed="one axis, equal lengths")
    for name, a in table.items():
        if a.dtype.kind not in "biufU":
            raise BadInputError(
                "no table form", where=where, field=name, value=str(a.dtype), allowed="bool, int, float, str"
            )
    return table


def _dtype(a: npt.NDArray[Any]) -> str:
    return "str" if a.dtype.kind == "U" else str(a.dtype)


def _cells(a: npt.NDArray[Any]) -> list[str]:
    """Return CSV cells: floats in the shortest form that reads back exactly, NaN as ``nan``."""
    if a.dtype.kind == "f":
        return [str(value) for value in a]
    return [str(int(v)) if isinstance(v, bool) else str(v) for v in a.tolist()]


def _meta(text: str | bytes, where: str) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        meta = json.loads(text)
        schema, found = meta["schema"], (dict(meta["dtypes"]), dict(meta["stamp"]))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise BadInputError(
            "no readable stamp", where=where, remedy="only tables written by this project can be read"
        ) from None
    if schema != SCHEMA:
        raise BadInputError("table of another version", where=where, value=schema, allowed=str(SCHEMA))
    return found


def _read_parquet(path: Path) -> tuple[Table, dict[str, Any]]:
    pa, parquet = _pyarrow()
    try:
        made = parquet.read_table(path)
    except pa.ArrowException as error:
        raise BadInputError(f"not a Parquet table: {error}", where=str(path)) from None
    dtypes, stamped = _meta((made.schema.metadata or {}).get(_KEY, b""), str(path))
    if set(dtypes) != set(made.column_names):
        raise BadInputError("columns missing", where=str(path), value=made.column_names, allowed=", ".join(dtypes))
    out = {}
    for name in made.column_names:
        values = made.column(name)
        out[name] = (
            np.array(values.to_pylist(), str) if dtypes[name] == "str" else values.to_numpy().astype(dtypes[name])
        )
    return out, stamped


def _read_csv(path: Path) -> tuple[Table, dict[str, Any]]:
    where = str(path)
    try:
        first, _, rest = path.read_bytes().decode("utf-8").partition("\n")
    except UnicodeDecodeError as error:
        raise BadInputError(f"not UTF-8 at byte {error.start}", where=where) from None
    dtypes, stamped = _meta(first[2:] if first.startswith("# ") else "", where)
    reader = csv.reader(io.StringIO(rest))
    header = next(reader, [])
    if set(header) != set(dtypes):
        raise BadInputError("columns missing", where=where, line=2, value=header, allowed=", ".join(dtypes))
    rows = list(reader)
    for number, row in enumerate(rows, start=3):
        if len(row) != len(header):
            raise BadInputError("wrong number of cells", where=where, line=number, value=row, allowed=str(len(header)))
    out: Table = {}
    for i, name in enumerate(header):
        cells = [row[i] for row in rows]
        try:
            kind = dtypes[name]
            if kind == "bool":
                out[name] = np.array([int(cell) for cell in cells], bool)
            elif kind.startswith(("int", "uint")):
                out[name] = np.array([int(cell) for cell in cells], kind)
            else:
                out[name] = np.array(cells, str if kind == "str" else kind)
        except (ValueError, OverflowError, TypeError) as error:
            raise BadInputError(f"bad cell: {error}", where=where, field=name) from None
    return out, stamped
