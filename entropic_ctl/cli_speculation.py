"""``entropic bench speculation``: draft-length rules compared on the real engine."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from entropic_ctl.cli_options import Force, Json, Model

__all__ = ["register"]

_SHOWN = {
    "tok/s": "tokens_per_s",
    "speedup": "speedup",
    "clock": "wall_speedup",
    "yield": "tokens_per_step",
    "drafts": "drafted_per_step",
    "right": "acceptance",
}
"""Column to key of a row."""


def speculation(
    *,
    tokens: Annotated[int, typer.Option("--tokens", min=2, max=512, help="New tokens per prompt and seed.")] = 64,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Seeds per prompt when sampling.")] = 2,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The first seed.")] = 0,
    model: Model = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write the tables and the figure into this folder.")
    ] = None,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Speculative decoding by draft-length rule: fixed 0, 2, 4, 8, acceptance history, entropy; prompt lookup, batch 1.

    Four kinds of text, greedy and sampled. `speedup` charges every step its measured cost, with a 95% interval over
    prompts and seeds; `clock` is the ratio of wall times; `yield` and `drafts` are tokens per step; `right` is the
    share of drafted tokens accepted. Texts equal those without drafts, but for rounding where the layers run in
    PyTorch. The second table of each mode asks the same texts what every rule would gain if a drafted token cost so
    many one-token steps: batches and other machines are not this one.

    Example: `entropic bench speculation --out out/speculation`
    """
    from entropic_ctl import cli_live, cli_output, cli_run
    from entropic_ctl.config import RunConfig

    cli_output.check_file(json_file, "--json", out)
    config = cli_run.with_overrides(RunConfig(), model=model)
    loaded = cli_run.load_model(config)
    bench = cli_run.need("backends.bench_speculation", "engine")
    settings = {"command": "bench speculation", "tokens": tokens, "repeats": repeats, "seed": seed}
    settings["model"] = config.model.path
    place = contextlib.nullcontext() if out is None else cli_output.folder(out, settings, force=force)
    with place as work, cli_live.progress("speculation") as report:
        values = bench.bench_speculation(loaded, tokens=tokens, repeats=repeats, seed=seed, progress=report)
        units = values.pop("units")
        if work is not None:
            _write(work, values, units, settings)
    cli_run.write_json(json_file, values, settings)
    _show(values)
    if out is not None:
        cli_run.say(f"figure: {out / 'speculation.png'}")


def _write(work: Path, values: dict[str, Any], units: Any, settings: dict[str, Any]) -> None:
    from entropic_ctl import cli_run

    results = cli_run.need("entropic_ctl.results", "sim")
    stamp = results.stamp(settings, settings["seed"])
    rows = {name: [row[name] for row in values["rows"]] for name in values["rows"][0]}
    results.write_table(work / "speculation.csv", rows, stamp)
    results.write_table(work / "units.csv", units, stamp)
    title = f"prompt lookup on {values['model']}, batch 1, T = {values['temperature']:g} where sampled"
    cli_run.need("figures.speculation", "figures").draw(rows, work / "speculation.png", title=title)


def _show(values: dict[str, Any]) -> None:
    from rich.table import Table

    from entropic_ctl.cli_console import console

    screen = console(soft_wrap=True)
    for mode in dict.fromkeys(row["mode"] for row in values["rows"]):
        table = Table(title=mode, title_justify="left", box=None, pad_edge=False)
        for name in ("text", "draft"):
            table.add_column(name, no_wrap=True)
        for name in _SHOWN:
            table.add_column(name, justify="right", no_wrap=True)
        for row in values["rows"]:
            if row["mode"] == mode:
                table.add_row(row["kind"], row["arm"], *(_cell(row, key) for key in _SHOWN.values()))
        screen.print(table)
        costs = Table(title=f"{mode}, by what a drafted token costs", title_justify="left", box=None, pad_edge=False)
        rows = [row for row in values["sensitivity"] if row["mode"] == mode]
        arms = list(dict.fromkeys(row["arm"] for row in rows))
        for name in ("cost", *arms):
            costs.add_column(name, justify="right", no_wrap=True)
        for cost in dict.fromkeys(row["cost"] for row in rows):
            costs.add_row(f"{cost:g}", *(f"{row['speedup']:.2f}" for row in rows if row["cost"] == cost))
        screen.print(costs)
        same = min(row["same_text"] for row in values["rows"] if row["mode"] == mode)
        screen.print(f"texts equal to those without drafts, in the worst row: {100 * same:.0f}%\n")
    milliseconds = ", ".join(f"{ms:.1f}" for ms in values["step_ms"])
    screen.print(
        f"step by drafted tokens 0, 1, ...: {milliseconds} ms; rule_cost {values['rule_cost']:g}, "
        f"rule_start {values['rule_start']:g}"
    )
    for mode, fit in values["fit"].items():
        screen.print(
            f"first drafted token accepted, {mode}: {fit['rule_acceptance']:.2f} exp(-H / {fit['rule_scale_nats']:.2f})"
        )


def _cell(row: dict[str, Any], key: str) -> str:
    if row[key] != row[key]:
        return "–"
    interval = f" [{row[key + '_low']:.2f}, {row[key + '_high']:.2f}]" if key == "speedup" else ""
    return f"{row[key]:.2f}{interval}"


def register(bench_app: typer.Typer) -> None:
    """Add the command to the group of benchmarks."""
    bench_app.command("speculation")(speculation)
