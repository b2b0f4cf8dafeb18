"""Commands about workloads: look at one before it is run, and convert recorded traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from entropic_ctl import cli_output, cli_run
from entropic_ctl import config as configs
from entropic_ctl.cli_options import Config, Force, Json, Out, Seed
from entropic_ctl.errors import BadInputError

__all__ = ["register"]

Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="A recorded trace, in place of the arrivals.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("workload")(workload)
    traces = typer.Typer(no_args_is_help=True, help="Work with recorded traces.")
    traces.command("convert")(convert)
    traces.callback()(lambda: None)  # keeps the subcommand's name although it is the only one
    app.add_typer(traces, name="trace")


def workload(
    config: Config,
    *,
    trace: Trace = None,
    out: Out = None,
    json_file: Json = None,
    seed: Seed = None,
    force: Force = False,
) -> None:
    """Draw (or read) the workload of a config and print what it is like; nothing is simulated.

    With `--out` the requests are written as a table, with a picture of arrivals and lengths.

    Example: `entropic workload run.toml --out out/workload`
    """
    settings = cli_run.with_overrides(cli_run.load_config(config), seed=seed, trace=trace)
    cli_output.check_file(json_file, "--json", out, config, trace, *configs.inputs_of(settings))
    summary = cli_run.need("sim.workload_summary", "sim")
    with cli_run.placed(config):
        work = summary.drawn(settings)
    values = summary.summarise(work)
    if out is not None:
        _write(out, settings, summary.table(work), force=force)
    cli_run.write_json(json_file, values, settings)
    cli_run.show("workload", values)


def _write(out: Path, settings: configs.RunConfig, table: dict[str, Any], *, force: bool) -> None:
    results, figure = cli_run.need("entropic_ctl.results", "sim"), cli_run.need("figures.workload", "figures")
    subject = {"command": "workload", "config": configs.resolve(settings)}
    with cli_output.folder(out, subject, force=force) as work:
        stamp = results.stamp(settings, settings.seed)
        for suffix in ("parquet", "csv"):
            results.write_table(work / f"workload.{suffix}", table, stamp)
        name = Path(settings.workload.trace).name if settings.workload.replays else settings.workload.kind
        figure.draw(table, work / "workload.png", title=name)


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Azure, BurstGPT or Vidur CSV, Mooncake JSONL, Parquet.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Parquet file to write.")],
) -> None:
    """Convert a recorded trace of any known format into our Parquet format, checking every row.

    Rows that ask for no output are left out and counted.

    Example: `entropic trace convert mooncake.jsonl mooncake.parquet`
    """
    if target.suffix != ".parquet":
        raise BadInputError(
            "unknown kind of trace to write", where=str(target), value=target.suffix, allowed=".parquet"
        )
    cli_output.check_file(target, "OUT", source)
    trace = cli_run.need("sim.traces", "sim").read_trace(source)
    cli_run.need("sim.trace_parquet", "sim").write_parquet(target, trace)
    cli_run.say(f"{target}: {len(trace):,} requests, {trace.skipped_rows:,} rows left out")
