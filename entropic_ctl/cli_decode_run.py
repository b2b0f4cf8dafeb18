"""What ``entropic bench decode`` and ``entropic bench steps`` do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from entropic_ctl import cli_output
from entropic_ctl.cli_console import console
from entropic_ctl.cli_run import load_model, need, say, with_overrides, write_json
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError

__all__ = ["bench_decode", "bench_steps"]

_COLUMNS = (
    ("engine", "{}"),
    ("batch", "{}"),
    ("context", "{:,}"),
    ("step_ms", "{:.2f}"),
    ("spread", "{}"),
    ("tokens_per_s", "{:,.0f}"),
    ("floor_ms", "{:.1f}"),
    ("floor_fraction", "{:.0%}"),
    ("kv_bytes_fraction", "{:.1%}"),
    ("attention_gb_s", "{:.1f}"),
    ("kl_mean", "{:.2g}"),
    ("certificate_max", "{:.4g}"),
    ("violations", "{}"),
    ("disturbed", "{}"),
)
_HEADS = {
    "step_ms": "step ms",
    "tokens_per_s": "tok/s",
    "floor_ms": "floor ms",
    "floor_fraction": "of step",
    "kv_bytes_fraction": "KV bytes",
    "attention_gb_s": "attn GB/s",
    "kl_mean": "KL",
    "certificate_max": "cert.",
    "violations": "viol.",
    "disturbed": "dist.",
}


def parse_cells(text: str) -> list[tuple[int, int]]:
    """Return the (batch, context) pairs of ``8x128,8x2000``.

    Raises
    ------
    BadInputError
        Naming the item that is none.
    """
    out = []
    for item in text.split(","):
        batch, _, context = item.strip().partition("x")
        if not (batch.isdecimal() and context.isdecimal()):
            raise BadInputError("not a batch and a context", where="--cells", value=item, allowed="e.g. 1x128,8x2000")
        out.append((int(batch), int(context)))
    return list(dict.fromkeys(out))


def parse_thetas(text: str) -> list[float]:
    """Return the budgets of ``0.02,0.05``.

    Raises
    ------
    BadInputError
        Naming the text if an item is no number.
    """
    try:
        return list(dict.fromkeys(float(item) for item in text.split(",") if item.strip()))
    except ValueError:
        raise BadInputError("not a list", where="--theta", value=text, allowed="numbers with commas between") from None


def bench_decode(
    cells: str,
    theta: str,
    *,
    crossover: bool,
    figure: Path | None,
    model: str | None,
    json_file: Path | None,
    **options: Any,
) -> int:
    """Measure, print, write; 1 if a certificate was exceeded."""
    cli_output.check_file(json_file, "--json", figure)
    cli_output.check_file(figure, "--figure", json_file)
    shapes, thetas = parse_cells(cells), parse_thetas(theta)
    config = with_overrides(RunConfig(), model=model)
    bench = need("backends.bench_decode", "engine")
    drawing = need("figures.decode", "figures") if figure is not None else None
    loaded = load_model(config)
    values = bench.bench_decode(loaded, thetas=thetas, cells=shapes, progress=say, **options)
    if crossover:
        sizes = {name: options[name] for name in ("repeats", "steps", "warmup", "page_tokens")}
        batch, longest = max(b for b, _ in shapes), max(c for _, c in shapes)
        contexts = [c for c in bench.CROSSOVER_CONTEXTS if c < longest]
        values["crossover"] = [
            bench.crossover(loaded, t, batch=batch, contexts=[*contexts, longest], progress=say, **sizes)
            for t in thetas
        ]
    settings = {"command": "bench decode", "cells": cells, "theta": theta, **options}
    write_json(
        json_file,
        values,
        {**settings, "peers": str(options["peers"] or ""), "model": dataclasses.asdict(config.model)},
    )
    _show(values)
    if drawing is not None:
        drawing.draw(values["rows"], figure)
    return 1 if any(row["violations"] for row in values["rows"]) else 0


def bench_steps(out: Path, *, repeats: int, page_tokens: int, model: str | None) -> None:
    """Record the logs."""
    steps = need("backends.bench_steps", "engine")
    loaded = load_model(with_overrides(RunConfig(), model=model))
    out.mkdir(parents=True, exist_ok=True)
    for number in range(repeats):
        steps.record_steps(
            loaded, out, name=f"{number + 1}-", page_tokens=page_tokens,
            progress=lambda what, n=number + 1: say(f"round {n} of {repeats}: {what}"),
        )  # fmt: skip


def _show(values: Mapping[str, Any]) -> None:
    screen = console()
    screen.print(
        f"{values['model']} {values['dtype']}, page {values['page_tokens']}, {values['hardware']['threads']} threads, "
        f"read bandwidth {values['read_bytes_per_s'] / 1e9:.1f} GB/s, "
        f"{values['repeats']} rounds of {values['steps']} steps",
        soft_wrap=True,
    )
    _table(screen, values["rows"])
    for peer in values["peers"]:
        remedy = f": {peer['remedy']}" if peer["remedy"] else ""
        screen.print(f"{peer['engine']}: {peer['state']}{remedy}", soft_wrap=True)
    _ratios(screen, values["ratios"])
    _targets(screen, values["targets"])
    for found in values.get("crossover", ()):
        _crossover(screen, found)


def _table(screen: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for name, _ in _COLUMNS:
        table.add_column(_HEADS.get(name, name), justify="left" if name == "engine" else "right", no_wrap=True)
    for row in rows:
        shown = {**row, "spread": f"{row['step_ms_low']:.1f}-{row['step_ms_high']:.1f}"}
        table.add_row(*(_cell(shown[name], pattern) for name, pattern in _COLUMNS))
    screen.print(table)


def _cell(value: Any, pattern: str) -> str:
    return "–" if isinstance(value, float) and math.isnan(value) else pattern.format(value)


def _ratios(screen: Any, ratios: Sequence[Mapping[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for head in ("faster", "than", "at", "times", "in a round"):
        table.add_column(head, justify="left" if head in {"faster", "than"} else "right")
    for entry in ratios:
        table.add_row(
            entry["engine"],
            entry["over"],
            f"{entry['batch']} x {entry['context']:,}",
            f"{entry['speedup']:.2f}",
            f"{entry['low']:.2f}-{entry['high']:.2f}",
        )
    screen.print(table)


def _targets(screen: Any, targets: Sequence[Mapping[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for head in ("target", "measured", "wanted", ""):
        table.add_column(head, justify="right" if head in {"measured", "wanted"} else "left")
    for entry in targets:
        sign = "<=" if entry["at_most"] else ">="
        verdict = "met" if entry["met"] else "missed"
        table.add_row(entry["target"], f"{entry['value']:.4g}", f"{sign} {entry['wanted']:g}", verdict)
    screen.print(table)


def _crossover(screen: Any, found: Mapping[str, Any]) -> None:
    at = found["crossover_tokens"]
    table = Table(box=None, pad_edge=False)
    for head in ("context", "dense ms", "pruned ms", "speedup", "prunes"):
        table.add_column(head, justify="right")
    columns = zip(*(found[n] for n in ("contexts", "dense_ms", "pruned_ms", "speedup", "prunes")), strict=True)
    for context, dense, pruned, speedup, prunes in columns:
        table.add_row(f"{context:,}", f"{dense:.2f}", f"{pruned:.2f}", f"{speedup:.3f}", "yes" if prunes else "no")
    screen.print(table)
    where = f"from about {at:,.0f} tokens" if at is not None else "at none of these contexts"
    screen.print(f"batch {found['batch']}, theta {found['theta_nats']:g}: pruning pays {where}", soft_wrap=True)
