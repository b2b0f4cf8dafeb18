"""``entropic bench decode`` times decode steps beside others and the floor; ``bench steps`` logs steps to fit from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from entropic_ctl.cli_options import Json, Model

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``, the group ``bench``."""
    app.command("decode")(bench_decode)
    app.command("steps")(bench_steps)


def bench_decode(
    *,
    cells: Annotated[
        str, typer.Option("--cells", metavar="BxC,...", help="Batches and contexts to time.")
    ] = "1x128,8x128,8x2000,8x8000",
    theta: Annotated[
        str, typer.Option("--theta", metavar="NATS,...", help="Budgets of the pruned engine.")
    ] = "0.05,0.075",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Rounds; every engine runs once in each.")] = 5,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed decode steps per engine and round.")] = 16,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Untimed decode steps before them.")] = 3,
    texts: Annotated[int, typer.Option("--texts", min=1, help="Texts on which the loss is measured.")] = 2,
    positions: Annotated[int, typer.Option("--positions", min=1, help="Tokens of each text that are audited.")] = 64,
    page_tokens: Annotated[int, typer.Option("--page-tokens", min=1, max=1024, help="Tokens per KV page.")] = 32,
    min_context: Annotated[
        int, typer.Option("--min-context", min=0, help="Tokens below which the pruned engine reads everything too.")
    ] = 1600,
    peers: Annotated[
        Path | None,
        typer.Option("--peers", metavar="DIR", help="Environment of `make bench-peers`; or ENTROPIC_PEERS=DIR."),
    ] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Only this engine.")] = False,
    crossover: Annotated[
        bool, typer.Option("--crossover", help="Also find the context from which pruning pays.")
    ] = False,
    figure: Annotated[Path | None, typer.Option("--figure", metavar="FILE", help="Also draw the table (PNG).")] = None,
    model: Model = None,
    json_file: Json = None,
) -> None:
    """Milliseconds per decode step: this engine dense and pruned, vLLM and llama.cpp, and the memory floor.

    All in one run, in interleaved rounds; what pruning loses is measured on real text, certificates against float64.
    Exit 1 if a head lost more than was certified (a missed goal leaves it 0). A terminal of 110 columns shows more of
    the table, `--json` holds all of it.

    Example: `entropic bench decode --cells 8x8000 --theta 0.03,0.05 --crossover --json decode.json`
    """
    from entropic_ctl import cli_decode_run

    raise typer.Exit(
        cli_decode_run.bench_decode(
            cells,
            theta,
            repeats=repeats,
            steps=steps,
            warmup=warmup,
            texts=texts,
            positions=positions,
            page_tokens=page_tokens,
            min_context=min_context,
            peers=peers,
            without_peers=no_peers,
            crossover=crossover,
            figure=figure,
            model=model,
            json_file=json_file,
        )
    )


def bench_steps(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the logs.")],
    *,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Rounds over all loads.")] = 2,
    page_tokens: Annotated[int, typer.Option("--page-tokens", min=1, max=1024, help="Tokens per KV page.")] = 16,
    model: Model = None,
) -> None:
    """Log engine steps under known loads: what `entropic calibrate` fits this machine from.

    Decode steps at several batches, contexts and budgets, and prefill in chunks of several sizes; about 40 seconds a
    round on a quiet 2-core machine. Rounds repeat the same steps, so that a fit can take the undisturbed ones.

    Example: `entropic bench steps --out out/steps`, then
    `entropic calibrate out/steps/*.jsonl --out cost.json --device cpu.json`.
    """
    from entropic_ctl import cli_decode_run

    cli_decode_run.bench_steps(out, repeats=repeats, page_tokens=page_tokens, model=model)
