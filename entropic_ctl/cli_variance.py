"""The command ``entropic variance``: recorded real trajectories against the linear theory of entropy feedback."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from entropic_ctl import cli_live, cli_output
from entropic_ctl.cli_console import console
from entropic_ctl.cli_options import Force, Json, within
from entropic_ctl.errors import BadInputError

__all__ = ["register", "variance"]


def variance(
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for tables, findings and the figure.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Few laws on few and short texts: to try the command.")
    ] = False,
    replay: Annotated[bool, typer.Option("--replay", help="Only the recorded texts of the bank, no engine.")] = False,
    uncertified: Annotated[
        bool, typer.Option("--uncertified", help="Also run gains that nothing proves stable.")
    ] = False,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="T0: fixed T of the comparison, recorded in the bank.")
    ] = 0.8,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Root seed of sampling and bootstrap.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that a kill or Ctrl-C interrupted.")
    ] = False,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Measure what entropy feedback does to the variance of entropy on real text, beside what linear theory predicts.

    Laws run on recorded distributions (text fixed) and on the real engine (the text reacts), against fixed T on the
    same texts, prompts and seeds. Writes tables (`ratios`, `ladder`, `memory`, `texts`), `findings.json` and
    `variance.png`; says for each reading of "variance" whether the paper's cut of 15 to 20% is there. About 5 minutes
    on two cores; `--replay` seconds. Each finished law on the engine is kept in DIR.parts until DIR is written: after a
    kill or Ctrl-C the same command with `--resume` goes on, to the same results; changed settings are refused.

    Example: `entropic variance --uncertified --out out/variance`
    """
    from entropic_ctl import cli_run

    within("--temperature", [temperature], 0.0, 10.0)
    cli_output.check_file(json_file, "--json", out)
    module = cli_run.need("paper_repro.variance", "all")
    settings = {
        "quick": quick,
        "replay_only": replay,
        "uncertified": uncertified,
        "temperature": temperature,
        "seed": seed,
    }
    subject = {"command": "variance", **settings}
    whole = out.resolve()
    parts = None if replay else whole.with_name(f"{whole.name}.parts")
    with cli_output.folder(out, subject, force=force, parts=parts) as work, cli_live.progress("variance") as report:
        if parts is not None and parts.exists() and not resume:
            raise BadInputError(
                "an interrupted run is kept here",
                where=str(parts),
                remedy="pass --resume to go on with it, or delete that folder to start anew",
            )
        outcome = module.run(work, progress=report, parts=parts, **settings)
    cli_run.write_json(json_file, outcome.numbers, outcome.config)
    outcome.show(console())
    cli_run.say(f"figure: {out / 'variance.png'}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(variance)
