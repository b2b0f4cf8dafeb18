"""The command ``entropic bench theta``: entropy-driven against constant budgets at equal KV bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from entropic_ctl import cli_live, cli_output
from entropic_ctl.cli_console import console
from entropic_ctl.cli_options import Force, Json, Model
from entropic_ctl.errors import BadInputError

__all__ = ["register", "theta"]


def theta(
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for tables, findings and the figure.")],
    quick: Annotated[bool, typer.Option("--quick", help="One short text: to try the command.")] = False,
    model: Model = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of bootstrap and permutations.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that a kill or Ctrl-C interrupted.")
    ] = False,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Does a budget driven by entropy beat a constant one at equal KV bytes? Quality against bytes, with intervals.

    Measures on real text what each budget of a ladder costs at each position (KL to dense, NLL, bytes) and reads every
    rule off that table: the shipped law, mirrored, in shuffled order, log-linear in other signals, and hindsight. About
    8 minutes on two cores; `--quick` under one. Finished parts are kept in DIR.parts until DIR is written.

    Example: `entropic bench theta --out out/theta`
    """
    from entropic_ctl import cli_run
    from entropic_ctl.config import ModelConfig, RunConfig

    cli_output.check_file(json_file, "--json", out)
    exact = RunConfig(model=ModelConfig(dtype="float32"))  # KL needs it
    config = cli_run.with_overrides(exact, model=model)
    bench = cli_run.need("backends.bench_theta", "engine")
    draw = cli_run.need("figures.theta", "figures").draw
    settings = {"quick": quick, "seed": seed, "model": config.model.path}
    whole = out.resolve()
    parts = whole.with_name(f"{whole.name}.parts")
    with (
        cli_output.folder(out, {"command": "bench theta", **settings}, force=force, parts=parts) as work,
        cli_live.progress("bench theta") as report,
    ):
        if parts.exists() and not resume:
            raise BadInputError(
                "an interrupted run is kept here",
                where=str(parts),
                remedy="pass --resume to go on with it, or delete that folder to start anew",
            )
        loaded = cli_run.load_model(config)
        found = bench.bench_theta(loaded, work, quick=quick, seed=seed, parts=parts, progress=report)
        draw(work / "curves.parquet", work / "effects.parquet", work / "theta.png")
    cli_run.write_json(json_file, found, settings)
    _show(found)
    cli_run.say(f"figure: {out / 'theta.png'}")


def _show(found: dict[str, object]) -> None:
    """Print the answer and the laws and best rules."""
    from rich.table import Table

    effects: dict[str, list[object]] = found["effects"]  # type: ignore[assignment]
    table = Table(title="mean KL to dense against constant theta, at equal KV bytes", title_justify="left", box=None)
    for name in ("rule", "signal", "strength", "change", "95% interval", "to shuffled"):
        table.add_column(name, justify="left" if name in ("rule", "signal") else "right", no_wrap=True)
    columns = ("rule", "signal", "strength", "change", "low", "high", "against_shuffled_change")
    for rule, signal, strength, change, low, high, information in zip(
        *(effects[name] for name in columns), strict=True
    ):
        if rule in ("constant", "log-linear"):
            continue
        numbers = [float(str(value)) for value in (change, low, high, information)]
        span = f"{100 * numbers[1]:+.1f} to {100 * numbers[2]:+.1f}%"
        shuffled = "" if numbers[3] != numbers[3] else f"{100 * numbers[3]:+.1f}%"
        table.add_row(
            str(rule), str(signal), f"{float(str(strength)):.2f}", f"{100 * numbers[0]:+.1f}%", span, shuffled
        )
    console().print(table)
    console().print(f"{found['question']} {found['answer']}")


def register(app: typer.Typer) -> None:
    """Add the command to the ``bench`` group."""
    app.command("theta")(theta)
