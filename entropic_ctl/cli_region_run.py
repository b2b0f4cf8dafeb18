"""What ``entropic region`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from entropic_ctl import cli_live, cli_output
from entropic_ctl import config as configs
from entropic_ctl.cli_console import console
from entropic_ctl.cli_run import bank_vocabulary, load_config, need, placed, say, write_json

__all__ = ["region"]


def region(
    config_file: Path,
    out: Path,
    *,
    vocab: int | None,
    assume: Sequence[str],
    cells: int,
    force: bool,
    json_file: Path | None,
) -> int:
    """Decide the slices, write table and picture; 1 if a cell contradicts the small-gain theorem."""
    config = load_config(config_file)
    cli_output.check_file(json_file, "--json", out, config_file, *configs.inputs_of(config))
    given = need("proofs.assumptions", "proofs").parse(assume)
    regions, drawing = need("proofs.region", "proofs"), need("figures.region", "figures")
    need("cvxpy", "proofs")
    vocab = vocab if vocab is not None else bank_vocabulary(config)
    subject = {"command": "region", "vocab": vocab, "cells": cells, "assume": list(assume)}
    subject["config"] = configs.resolve(config)
    results = need("entropic_ctl.results", "sim")
    with cli_output.folder(out, subject, force=force) as work, cli_live.progress("region") as report:
        with placed(config_file):
            table = regions.region(config, vocab, given, count=cells, progress=report)
        results.write_table(work / "region.parquet", table, results.stamp(config, config.seed))
        wait = config.loop.pruning.config.widen_after
        title = (
            f"coupled loop, {vocab:,} tokens: stable, and shown by one quadratic function\nthe slices assume a budget "
            f"that follows at once (widen_after = 1); this config's is {wait}, which small gain covers too"
        )
        limits = regions.gain_limits(config, vocab)
        drawing.draw(work / "region.parquet", work / "region.png", title=title, limits=limits)
    counts = regions.summary(table)
    write_json(json_file, {"vocab_size": vocab, "slices": counts, "gain_limits": limits}, config)
    _tell(counts)
    say(f"figure: {out / 'region.png'}")
    return 1 if any(row["contradictions"] for row in counts) else 0


def _tell(counts: Sequence[dict[str, Any]]) -> None:
    table = Table(title="cells of the region", title_justify="left", box=None, pad_edge=False)
    for name in counts[0]:
        table.add_column(name.replace("_", " "), justify="left" if name == "slice" else "right")
    for row in counts:
        table.add_row(*map(str, row.values()), style="red" if row["contradictions"] else None)
    console().print(table)
