"""The command ``entropic eval``: what the loop does to a model's quality."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from entropic_ctl.cli_options import Certificate, Force, Json, Model, Seed, Uncertified

__all__ = ["evaluate", "register"]

_TEXT = (
    "Long UTF-8 text in place of the built-in one; at least the longest context + --positions + 1 tokens (4,145 by "
    "default, 1,041 with --quick)."
)


def evaluate(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="TOML file; its laws are an arm of their own.")
    ] = None,
    *,
    theta: Annotated[
        list[float] | None,
        typer.Option("--theta", metavar="X", help="Constant budget in nats, repeatable; without CONFIG 0.01 and 0.05."),
    ] = None,
    model: Model = None,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help=_TEXT)] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="Prompts, one per line, or JSON Lines.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", metavar="NAME", help="long, texts or needle, repeatable; default all.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option("--context", metavar="N", help="Context of long text, tokens; repeatable.")
    ] = None,
    positions: Annotated[int | None, typer.Option("--positions", help="Tokens decoded behind each context.")] = None,
    new_tokens: Annotated[int | None, typer.Option("--new-tokens", help="Most tokens written to a prompt.")] = None,
    needle_length: Annotated[
        list[int] | None, typer.Option("--needle-length", metavar="N", help="Text around a needle, tokens; repeatable.")
    ] = None,
    depth: Annotated[
        list[float] | None, typer.Option("--depth", metavar="D", help="Where the needle stands, 0 to 1; repeatable.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short contexts, few texts: under a minute.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for tables and figures.")] = Path(
        "out/eval"
    ),
    seed: Seed = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that a kill or Ctrl-C interrupted.")
    ] = False,
    certificate: Certificate = None,
    uncertified: Uncertified = False,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Measure what pruning and temperature laws do to quality, against dense attention at a fixed temperature.

    Teacher-forced KL, NLL and perplexity on long text by context; ROUGE-L, BLEU and exact match of greedy texts;
    self-repetition; retrieval of a hidden number by depth and length. Every arm sees the same texts, prompts and seeds,
    every comparison has an interval, and a budget of 1e-06 nats shows what is mere rounding. Writes
    `summary`, `positions`, `texts` and `needles` as tables, `quality.png` and `needle.png`. Finished parts are kept in
    DIR.parts until DIR is written: after an interrupt the same command with `--resume` goes on.

    Example: `entropic eval --theta 0.01 --theta 0.05 --out out/eval`
    """
    from entropic_ctl import cli_eval_run

    cli_eval_run.evaluate(
        config,
        theta=theta,
        model=model,
        text=text,
        prompts=prompts,
        wanted={
            "tasks": task,
            "contexts": context,
            "positions": positions,
            "new_tokens": new_tokens,
            "needle_lengths": needle_length,
            "depths": depth,
        },
        quick=quick,
        out=out,
        seed=seed,
        resume=resume,
        certificate=certificate,
        uncertified=uncertified,
        force=force,
        json_file=json_file,
    )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("eval")(evaluate)
