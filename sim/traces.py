"""Recorded workloads: one reader for every format, which is detected or demanded.

===============  ==========================================================================
kind             format
===============  ==========================================================================
``azure``        CSV of the Azure LLM inference traces (:mod:`sim.trace_azure`)
``burstgpt``     CSV of BurstGPT (:mod:`sim.trace_burstgpt`)
``vidur``        CSV of Vidur (:mod:`sim.trace_vidur`)
``mooncake``     JSON lines with prefix hashes (:mod:`sim.trace_mooncake`)
``parquet``      our own (:mod:`sim.trace_parquet`)
``trace``        whichever of them the file's first bytes show
===============  ==========================================================================

Rules common to all: a row that asks for no output cannot be simulated as a generation (a request asks for at least one
token), so it is left out and counted in :attr:`Trace.skipped`; every other deviation is an error that names file, line
(Parquet: row), column, value and what is allowed. Rows out of order are sorted stably: ties keep their order in the
file. Files are read row by row; what stays in memory is 48 bytes per row and 8 per hashed block.
"""

from __future__ import annotations

from pathlib import Path

from entropic_ctl.errors import BadInputError
from sim.trace_azure import AZURE
from sim.trace_burstgpt import BURSTGPT
from sim.trace_csv import header_of
from sim.trace_mooncake import BLOCK_TOKENS, KEYS, mooncake_rows
from sim.trace_parquet import block_tokens, parquet_rows
from sim.trace_table import MAX_TOKENS, Trace, collect
from sim.trace_vidur import VIDUR

__all__ = ["CSV_FORMATS", "MAX_TOKENS", "Trace", "read_trace"]

CSV_FORMATS = {"azure": AZURE, "burstgpt": BURSTGPT, "vidur": VIDUR}
_PEEK = 4096


def _detect(first: bytes, where: str) -> str:
    """Return the format whose file begins with ``first``."""
    if first.startswith(b"PAR1"):
        return "parquet"
    line = first.partition(b"\n")[0]
    if line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return "mooncake"
    for name, form in CSV_FORMATS.items():
        if header_of(line) == form.columns:
            return name
    known = [f"{name} ({','.join(form.columns)})" for name, form in CSV_FORMATS.items()]
    known += [f"mooncake (JSON lines with {', '.join(KEYS)})", "parquet"]
    raise BadInputError(
        "no known kind of trace" if first else "empty file",
        where=where,
        line=1,
        value=line[:80].decode("utf-8", "backslashreplace").strip("\r\n"),
        allowed="; ".join(known),
    )


def read_trace(path: str | Path, kind: str = "trace") -> Trace:
    """Read a whole trace into columns, sorted by time.

    Parameters
    ----------
    path : str or Path
    kind : str
        A format of the table above, or ``trace``.

    Raises
    ------
    BadInputError
        If the file cannot be read or is of another format, at the first bad row, or if no row is left.
    """
    where = str(path)
    try:
        handle = Path(path).open("rb")  # noqa: SIM115 - closed by the with below; only opening may raise OSError here
    except OSError as error:
        raise BadInputError(
            f"cannot read trace: {error.strerror}", where=where, remedy="pass the path of a trace file"
        ) from None
    with handle:
        if kind == "trace":
            kind = _detect(handle.peek(_PEEK), where)
        if kind == "parquet":
            per_block = block_tokens(path)
            return collect(
                parquet_rows(path), where=where, time="arrival_s", output="output_tokens", block_tokens=per_block
            )
        if kind == "mooncake":
            return collect(
                mooncake_rows(handle, where), where=where, time=KEYS[0], output=KEYS[2], block_tokens=BLOCK_TOKENS
            )
        form = CSV_FORMATS[kind]
        return collect(form.rows(handle, where), where=where, time=form.time, output=form.output)
