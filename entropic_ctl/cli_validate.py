"""Commands that tie the simulator to the machine: ``calibrate`` and ``validate``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from entropic_ctl import cli_live, cli_output
from entropic_ctl.cli_console import console
from entropic_ctl.cli_options import Json, Model
from entropic_ctl.config import RunConfig, inputs_of

__all__ = ["register"]


def calibrate(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help="Engine logs, some under the fixed temperature law.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Calibration to write (JSON).")],
    device: Annotated[
        Path | None,
        typer.Option("--device", metavar="FILE", help="Also fit the roofline's CPU; device to write (JSON)."),
    ] = None,
    shape: Annotated[
        str,
        typer.Option("--shape", metavar="NAME", help="With --device: the model that ran, as `cost.model` names it."),
    ] = "smollm2-135m",
    json_file: Json = None,
) -> None:
    """Fit what a step costs on this machine from logs of the real engine.

    Prints each term with its standard error and what the fit leaves over. It needs a load that varies (batch sizes,
    contexts, prefill chunks; pruning and temperature laws if the simulator is to charge for them) and logs under the
    `fixed` temperature law; `entropic generate --log` runs one request, so its log alone says nothing of batches. The
    demo's engine logs do, and `entropic validate` makes its own.

    `--device` fits six numbers of the roofline besides, for loads beyond those of the logs: `[cost] device =
    "cpu.json"`; steps that several logs repeat count by the fastest. `entropic bench steps` makes such logs.

    Example: `entropic calibrate out/demo/engine-*.jsonl --out cost.json`, then `[cost] calibrated = "cost.json"`.
    """
    from entropic_ctl import cli_run

    cli_output.check_file(out, "--out", *logs)
    cli_output.check_file(device, "--device", out, *logs)
    cli_output.check_file(json_file, "--json", out, device, *logs)
    fitting = cli_run.need("sim.calibrate", "sim")
    found = fitting.calibrate(logs)
    results = cli_run.need("entropic_ctl.results", "sim")
    results.write_json(out, cli_run.need("sim.calibrated", "sim").to_json(found))
    numbers = fitting.summary(found)
    if device is not None:
        roofline = cli_run.need("sim.device_fit", "sim")
        fitted = roofline.fit_logs(logs, shape)
        results.write_json(device, {k: v for k, v in dataclasses.asdict(fitted.device).items() if k != "name"})
        numbers |= roofline.summary(fitted)
    cli_run.write_json(json_file, {"calibration": numbers}, {"command": "calibrate", "logs": [p.name for p in logs]})
    cli_run.show(str(out), numbers)


def validate(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Base setting, in place of standard inference.")
    ] = None,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for journal, tables, figure and report.")],
    quick: Annotated[bool, typer.Option("--quick", help="Few and short runs: to try the command.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what the folder holds.")] = False,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.0, help="Start no run later than this; go on with --resume.")
    ] = None,
    model: Model = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Root seed, in place of the config's.")] = None,
    json_file: Json = None,
) -> None:
    """Run one workload on the real engine and in the simulator, calibrated on another load, and report the errors.

    Twelve controller settings fixed in advance, three repeats each, 15 to 25 minutes on two cores. It needs a quiet
    machine: disturbed runs are detected, reported and repeated. Exit 1 if an error exceeds its target.

    Example: `entropic validate --out out/validate`; in pieces: `entropic validate --out DIR --minutes 6 --resume`.
    """
    from entropic_ctl import cli_run

    module = cli_run.need("paper_repro.validation", "all")
    report = cli_run.need("paper_repro.validation_report", "all")
    base: RunConfig = module.BASE if config is None else cli_run.load_config(config)
    base = cli_run.with_overrides(base, seed=seed, model=model)
    cli_output.check_file(json_file, "--json", out, config, *inputs_of(base))
    scale = module.QUICK if quick else module.Scale()
    with cli_run.need("sim.validation_run", "sim").held(out, resume=resume) as folder:
        loaded = cli_run.load_model(base)
        with cli_run.placed(config):
            work = module.Validation(folder, base, loaded, scale=scale, resume=resume)
        with cli_live.progress("validate") as tell:
            done = work.measure(minutes=minutes, progress=tell)
            findings: Any = work.judge(progress=tell) if done else None
        if findings is not None:
            work.write(findings)
    settings = {"command": "validate", "seed": base.seed, "scale": dataclasses.asdict(scale)}
    if findings is None:
        cli_run.say(f"not finished: {len(work.journal.entries)} runs are in {out}; go on with --resume")
        cli_run.write_json(json_file, {"validation": None, "runs": len(work.journal.entries)}, settings)
        return
    cli_run.write_json(json_file, {"validation": report.numbers(findings)}, settings)
    report.show(findings, console())
    cli_run.say(f"report: {out / 'report.html'}")
    raise typer.Exit(0 if findings.ok else 1)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(calibrate)
    app.command()(validate)
