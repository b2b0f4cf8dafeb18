"""Commands about entropy banks: ``record`` one from a model, ``fit-entropy`` a parametric model to one."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from entropic_ctl import cli_live, cli_output, cli_run
from entropic_ctl.cli_options import Json, MaybeConfig, Model
from entropic_ctl.errors import BadInputError

__all__ = ["register"]

_QUICK: dict[str, Any] = {"max_new_tokens": 16, "contexts": (256, 512), "texts": 1, "positions": 4}
_LISTS = {"--temperatures": float, "--contexts": int, "--thetas": float}


def register(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    app.command()(record)


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


def _command(**options: Any) -> str:
    """Return the command line that asks for this recording, without the place it is written to."""
    words = ["entropic", "record"]
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
