"""Commands about entropy banks: ``record`` one from a model, ``fit-entropy`` a parametric model to one."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from entropic_ctl import cli_live, cli_output, cli_run
from entropic_ctl.cli_options import Force, Json, MaybeConfig, Model
from entropic_ctl.errors import BadInputError

__all__ = ["register"]

_QUICK: dict[str, Any] = {"max_new_tokens": 16, "contexts": (256, 512), "texts": 1, "positions": 4}
_MOST_REGIMES = 6
_LISTS = {"--temperatures": float, "--contexts": int, "--thetas": float}


def register(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    app.command()(record)
    app.command("fit-entropy")(fit_entropy)


def numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """Return the numbers of a comma-separated list, or None for None.

    Raises
    ------
    BadInputError
        Naming the option and the item that is no number.
    """
    if text is None:
        return None
    kind = _LISTS[option]
    try:
        return tuple(kind(item) for item in text.split(","))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise BadInputError("not a list", where=option, value=text, allowed=f"{what} with commas between") from None


def record(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Bank to write (.npz).")],
    *,
    config: MaybeConfig = None,
    model: Model = None,
    temperatures: Annotated[str | None, typer.Option("--temperatures", help="Sampling temperatures: 0.4,0.8")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="One chat prompt per line, or .jsonl with text, kind, chat."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longer texts are cut.")] = None,
    contexts: Annotated[str | None, typer.Option("--contexts", help="Context lengths of the response, tokens")] = None,
    thetas: Annotated[str | None, typer.Option("--thetas", help="Pruning budgets, nats: 0,0.02,...")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Few tokens, short contexts: to try the command.")] = False,
    json_file: Json = None,
) -> None:
    """Record an entropy bank from a real model, for the simulator to read.

    Model, page size and pruning rule are those of the config; its laws do not matter. The model runs in float32:
    bfloat16 rounding alone would show as a KL of about 0.001 nats. Finished parts are kept in FILE.parts, so that the
    same command resumes an interrupted recording.

    Example: `entropic record --out bank.npz --temperatures 0.3,0.8,1.3`, then `[cost] bank = "bank.npz"` in the config.
    """
    cli_output.check_file(out, "--out", config, prompts)
    cli_output.check_file(json_file, "--json", out, config, prompts)
    settings = dict(_QUICK) if quick else {}
    options = {"temperatures": temperatures, "contexts": contexts, "thetas": thetas}
    given = {name: numbers(text, f"--{name}") for name, text in options.items() if text is not None}
    if contexts is not None:
        settings.pop("positions", None)
    settings |= given
    if max_tokens is not None:
        settings["max_new_tokens"] = max_tokens
    if prompts is not None:
        settings["prompts"] = cli_run.need("backends.prompts", "engine").read_prompts(prompts)
    run = cli_run.with_overrides(cli_run.load_config(config), seed=seed, model=model)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, dtype="float32"))  # KL needs it
    rule = run.loop.pruning.config
    base = cli_run.need("entropic_ctl.pruning.base", "").PruningConfig
    settings |= {
        "page_tokens": run.engine.page_tokens,
        "pruning": base(**{field.name: getattr(rule, field.name) for field in dataclasses.fields(base)}),
    }
    recording = cli_run.need("backends.record", "engine")
    parts = out.with_name(f"{out.name}.parts")
    command = _command(
        config=config, model=model, **options, prompts=prompts, max_tokens=max_tokens, seed=seed, quick=quick
    )
    with cli_live.progress("record") as report:
        try:
            bank = recording.record(
                cli_run.load_model(run),
                seed=seed,
                command=command,
                progress=lambda stage, done, total: report(stage, done / max(1, total)),
                checkpoint=parts,
                **settings,
            )
        except KeyboardInterrupt:
            if parts.is_dir():
                raise cli_output.Interrupted(parts) from None
            raise
    cli_run.need("entropic_ctl.bank", "").save(bank, out)
    shutil.rmtree(parts, ignore_errors=True)
    counts = {"tokens": int(bank.model_entropy.shape[0]), "trajectories": int(bank.temperature.shape[0])}
    cli_run.write_json(json_file, counts, run)
    cli_run.show(str(out), counts)


def fit_entropy(
    bank: Annotated[Path, typer.Argument(metavar="BANK", help="Entropy bank (.npz); 'shipped' is the one in sim.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Model to write (.json).")],
    *,
    regimes: Annotated[
        str, typer.Option("--regimes", help="Number of regimes, 1 to 6; auto takes the best on prompts left out.")
    ] = "auto",
    report: Annotated[
        Path | None, typer.Option("--report", metavar="DIR", help="Write the goodness of fit into this folder.")
    ] = None,
    draws: Annotated[int, typer.Option("--draws", min=20, help="Synthetic banks behind each interval.")] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Root seed of those.")] = 0,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Fit a regime-switching model of entropy to a bank, and say where it fits badly.

    Example: `entropic fit-entropy shipped --out model.json --report out/fit`, then `[cost] bank = "model.json"`.
    """
    cli_output.check_file(out, "--out", bank)
    cli_output.check_file(json_file, "--json", out, bank, report)
    if out.suffix != ".json":
        raise BadInputError("not a name for a model", where="--out", value=str(out), allowed="FILE.json")
    if regimes != "auto" and not (regimes.isdecimal() and 1 <= int(regimes) <= _MOST_REGIMES):
        raise BadInputError("no such number", where="--regimes", value=regimes, allowed=f"auto, 1 to {_MOST_REGIMES}")
    used = cli_run.need("sim.trajectories", "sim").load_bank("" if str(bank) == "shipped" else str(bank))
    subject = {"command": "fit-entropy", "bank": used.meta, "regimes": regimes, "draws": draws, "seed": seed}
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(cli_output.folder(report, subject, force=force)) if report is not None else None
        say = stack.enter_context(cli_live.progress("fit-entropy"))
        with cli_run.placed(bank):
            found = cli_run.need("sim.goodness", "sim").study(
                used, None if regimes == "auto" else int(regimes), draws=draws, seed=seed, progress=say
            )
        results = cli_run.need("entropic_ctl.results", "sim")
        stamp = results.stamp(subject, seed)
        if work is not None:
            for name, table in found.tables.items():
                for suffix in ("parquet", "csv"):
                    results.write_table(work / f"{name}.{suffix}", table, stamp)
            results.write_json(work / "summary.json", {**found.summary, "stamp": stamp})
            cli_run.need("figures.entropy_fit", "all").draw(found.tables, work / "entropy_fit.png")
        cli_run.need("sim.model_file", "sim").write_model(out, found.model, stamp=stamp)
    cli_run.write_json(json_file, found.summary, subject)
    cli_run.show(str(out), found.summary)


def _command(**options: Any) -> str:
    """Return the command line that asks for this recording, without the place it is written to."""
    words = ["entropic", "record"]
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
