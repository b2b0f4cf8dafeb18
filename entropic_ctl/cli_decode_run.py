"""What ``entropic bench decode`` and ``entropic bench steps`` do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entropic_ctl import cli_output
from entropic_ctl.cli_console import console
from entropic_ctl.cli_run import load_model, need, say, with_overrides, write_json
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError

__all__ = ["bench_decode", "bench_steps"]

_WIDE = 110
"""Columns of a terminal from which the table shows everything."""
_COLUMNS = (  # column, heading, pattern, shown at 80 columns
    ("name", "engine", "{}", True),
    ("cell", "at", "{}", True),
    ("step_ms", "ms", "{:,.2f}", True),
    ("spread", "of rounds", "{}", True),
    ("tokens_per_s", "tok/s", "{:,.0f}", False),
    ("floor_ms", "floor ms", "{:,.1f}", False),
    ("floor_fraction", "floor", "{:.0%}", True),
    ("kv_bytes_fraction", "KV", "{:.0%}", True),
    ("attention_gb_s", "attn GB/s", "{:.1f}", False),
    ("kl_mean", "KL", "{:.2g}", True),
    ("certificate_max", "cert.", "{:.3g}", True),
    ("disturbed", "dist.", "{}", False),
)


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
    bad, total = sum(row["disturbed"] for row in values["rows"]), len(values["rows"]) * values["repeats"]
    if bad:
        screen.print(
            f"{bad} of {total} rounds were disturbed by other work (--json: `disturbed`).\n"
            "Medians are over the others, where there are any; better repeat.",
            soft_wrap=True,
        )
    for peer in values["peers"]:
        remedy = f": {peer['remedy']}" if peer["remedy"] else ""
        screen.print(f"{peer['engine']}: {peer['state']}{remedy}", soft_wrap=True)
    _ratios(screen, values["ratios"])
    _targets(screen, values["targets"])
    for found in values.get("crossover", ()):
        _crossover(screen, found)


def _print(screen: Any, heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> None:
    """Print columns, the first ``left`` to the left; nothing is cut, whatever the width."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        cells = [
            text.ljust(w) if i < left else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        screen.print("  ".join(cells).rstrip(), soft_wrap=True)


def _short(engine: str) -> str:
    return engine.removeprefix("ours ")


def _at(entry: Mapping[str, Any]) -> str:
    return f"{entry['batch']} x {entry['context']:,}"


def _table(screen: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = [column for column in _COLUMNS if column[3] or screen.width >= _WIDE]
    lines = []
    for row in rows:
        low, high = f"{row['step_ms_low']:,.1f}", f"{row['step_ms_high']:,.1f}"
        shown = {**row, "name": _short(row["engine"]), "cell": _at(row), "spread": f"{low}-{high}"}
        if not row["engine"].startswith("ours"):
            shown["kl_mean"] = math.nan  # not compared
        if not row["certificate_max"]:
            shown["certificate_max"] = math.nan
        lines.append([_cell(shown[name], pattern) for name, _, pattern, _ in columns])
    _print(screen, [head for _, head, _, _ in columns], lines, left=1)
    screen.print(
        "at: batch x context. ms: median step, and the range of the rounds' medians.\n"
        "floor: share of ms that reading the weights and the KV bytes takes.\n"
        "KV: bytes read, of dense. KL: nats lost per token. cert.: largest certificate.",
        soft_wrap=True,
    )
    if heads := sum(row["audited_heads"] for row in rows):
        wrong = sum(row["violations"] for row in rows)
        screen.print(f"{wrong} of {heads:,} audited heads lost more than certified", soft_wrap=True)


def _cell(value: Any, pattern: str) -> str:
    return "–" if isinstance(value, float) and math.isnan(value) else pattern.format(value)


def _ratios(screen: Any, ratios: Sequence[Mapping[str, Any]]) -> None:
    lines = [
        [_short(entry["engine"]), _short(entry["over"]), _at(entry), f"{entry['speedup']:.2f}",
         f"{entry['low']:.2f}-{entry['high']:.2f}"]
        for entry in ratios
    ]  # fmt: skip
    if lines:
        screen.print()
        _print(screen, ("faster", "than", "at", "times", "of rounds"), lines, left=2)


def _targets(screen: Any, targets: Sequence[Mapping[str, Any]]) -> None:
    lines = []
    for entry in targets:
        sign, verdict = "<=" if entry["at_most"] else ">=", "met" if entry["met"] else "missed"
        lines.append(
            [entry["target"].replace("ours ", ""), verdict, f"{entry['value']:.4g}", f"{sign} {entry['wanted']:g}"]
        )
    if lines:
        screen.print()
        _print(screen, ("goal", "", "measured", "wanted"), lines, left=2)


def _crossover(screen: Any, found: Mapping[str, Any]) -> None:
    at = found["crossover_tokens"]
    columns = zip(*(found[n] for n in ("contexts", "dense_ms", "pruned_ms", "speedup", "prunes")), strict=True)
    lines = [
        [f"{context:,}", f"{dense:.2f}", f"{pruned:.2f}", f"{speedup:.3f}", "yes" if prunes else "no"]
        for context, dense, pruned, speedup, prunes in columns
    ]
    screen.print()
    _print(screen, ("context", "dense ms", "pruned ms", "speedup", "prunes"), lines)
    where = f"from about {at:,.0f} tokens" if at is not None else "at none of these contexts"
    screen.print(f"batch {found['batch']}, theta {found['theta_nats']:g}: pruning pays {where}", soft_wrap=True)
