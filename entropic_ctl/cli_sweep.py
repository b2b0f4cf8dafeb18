"""Commands that run many simulations: sweep, tune, capacity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from entropic_ctl.cli_options import Certificate, Config, Json, Seed, Uncertified

__all__ = ["register"]

Workers = Annotated[
    int | None, typer.Option("--workers", min=1, help="Worker processes, one thread each; all cores if absent.")
]
Dask = Annotated[
    str | None,
    typer.Option("--dask", metavar="ADDRESS", help="Run on a Dask cluster: tcp://HOST:PORT, or local to start one."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a folder that an earlier call began.")]
Folder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder that grows; safe to kill at any time.")]


def _certifier(vocab_of: Callable[[Any], int]) -> Callable[[Any], Any]:
    """Return a function from a configuration to the verdict it runs under, each proved once."""
    from entropic_ctl import cli_run
    from entropic_ctl.certificates import micro_digest

    known: dict[str, Any] = {}

    def certify(config: Any) -> Any:
        vocab = vocab_of(config)
        key = micro_digest(config.loop.temperature, config.engine.observation_lag, vocab, config.speculation)
        if key not in known:
            known[key] = cli_run.certify(config, vocab, None, uncertified=False)
        return known[key]

    return certify


def _vocabularies() -> Callable[[Any], int]:
    """Return a function from a configuration to the vocabulary of its bank, each bank read once."""
    from entropic_ctl import cli_run

    known: dict[str, int] = {}

    def vocab_of(config: Any) -> int:
        if config.cost.bank not in known:
            known[config.cost.bank] = cli_run.bank_vocabulary(config)
        return known[config.cost.bank]

    return vocab_of


def _pool(workers: int | None, dask: str | None, module: str = "sim.runs") -> Any:
    from entropic_ctl import cli_run

    pools = cli_run.need("sim.workers", "sim")
    return pools.make(
        cli_run.need(module, "sim").run, workers=workers if workers is not None else pools.cores(), dask=dask
    )


def sweep(
    config: Config,
    out: Folder,
    *,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", metavar="KEY=V1,V2,...", help="Values of one field; repeatable.")
    ] = None,
    sobol: Annotated[
        list[str] | None,
        typer.Option("--sobol", metavar="KEY=LO:HI[:log]", help="Range of one field, filled evenly; repeatable."),
    ] = None,
    points: Annotated[int, typer.Option("--points", min=1, help="Sobol points in each cell of the grid.")] = 16,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs per point, on seeds all points share.")] = 1,
    workers: Workers = None,
    dask: Dask = None,
    resume: Resume = False,
    uncertified: Uncertified = False,
    seed: Seed = None,
    json_file: Json = None,
) -> None:
    """Simulate many variants of a config and tabulate them.

    Fields are named as in the TOML file (`workload.rate_per_s`, `loop.scheduling.policy`). Every finished run is on
    disk at once; `--resume` goes on after a crash, a kill or Ctrl-C, and refuses changed settings. Exit 1 if a point
    could not run (an uncertified gain, say); the others are in the tables.

    Example: `entropic sweep run.toml --grid loop.scheduling.policy=fcfs,entropic --sobol workload.rate_per_s=0.2:2:log
    --points 8 --repeats 4 --out out/sweep`
    """
    from entropic_ctl import cli_live, cli_output, cli_run
    from entropic_ctl.config import inputs_of

    run = cli_run.with_overrides(cli_run.load_config(config), seed=seed)
    space, sweeps = cli_run.need("sim.space", "sim"), cli_run.need("sim.sweep", "sim")
    grids = [space.parse_choice(text) for text in grid or ()]
    values = [value for choice in grids for value in choice.values]
    cli_output.check_file(json_file, "--json", out, config, *inputs_of(run, values))
    dimensions = [*grids, *(space.parse_range(text) for text in sobol or ())]
    with cli_run.placed(config), cli_live.progress("sweep") as report:
        found = sweeps.sweep(
            run,
            dimensions,
            out,
            _pool(workers, dask),
            count=points,
            repeats=repeats,
            certify=_certifier(_vocabularies()),
            uncertified=uncertified,
            resume=resume,
            report=report,
        )
    runs, failed = len(found.results["point"]), found.failed
    numbers = {"runs": runs, "points": runs // repeats, "points_failed": len(failed), "failed": failed}
    cli_run.write_json(json_file, numbers, run)
    for number, error in list(failed.items())[:5]:
        cli_run.say(f"point {number} failed: {error}")
    if len(failed) > 5:
        cli_run.say(f"... and {len(failed) - 5} more: see the column error")
    cli_run.say(f"{runs:,} runs of {runs // repeats:,} points in {out / 'results.parquet'}, means in points.parquet")
    raise typer.Exit(1 if failed else 0)


def tune(
    config: Config,
    out: Folder,
    *,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Configurations to try, the given one included.")] = 40,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs per trial, on seeds all trials share.")] = 4,
    objectives: Annotated[
        str, typer.Option("--objectives", metavar="NAMES", help="Costs to minimise, separated by commas.")
    ] = "latency,throughput,tau_per_second,quality",
    weight: Annotated[
        list[str] | None,
        typer.Option("--weight", metavar="NAME=W", help="Weight of a cost in the choice, 1 if absent; repeatable."),
    ] = None,
    joint: Annotated[
        bool, typer.Option("--joint/--law-by-law", help="All laws at once, or one after the other.")
    ] = True,
    law: Annotated[
        list[str] | None,
        typer.Option("--law", metavar="TABLE", help="Tune temperature, pruning or scheduling only; repeatable."),
    ] = None,
    ranges: Annotated[
        list[str] | None,
        typer.Option("--range", metavar="KEY=LO:HI[:log]", help="Range of a field, added or in place of its own."),
    ] = None,
    choices: Annotated[
        list[str] | None,
        typer.Option("--choice", metavar="KEY=V1,V2,...", help="Values of a field, added or in place of its own."),
    ] = None,
    sampler: Annotated[str, typer.Option("--sampler", metavar="NAME", help="tpe or nsga2.")] = "tpe",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Trials proposed at once.")] = 2,
    workers: Workers = None,
    dask: Dask = None,
    resume: Resume = False,
    seed: Seed = None,
    json_file: Json = None,
) -> None:
    """Search laws and gains in simulation, inside the certified gains only, and write the tuned config.

    Costs are relative to the given config on the same seeds. Writes `tuned.toml` (lowest weighted sum of costs), one
    config per point of the Pareto set, `trials.parquet`, `pareto.json` and `pareto.png`; the choice is then judged on
    fresh seeds. `--resume` goes on after a kill.

    Example: `entropic tune run.toml --trials 40 --out out/tune`, then
    `entropic prove out/tune/tuned.toml --out cert.json`
    """
    from entropic_ctl import cli_live, cli_output, cli_run
    from entropic_ctl.config import inputs_of

    run = cli_run.with_overrides(cli_run.load_config(config), seed=seed)
    parse = cli_run.need("sim.space", "sim").parse_choice
    values = [value for text in choices or () for value in parse(text, "--choice").values]
    cli_output.check_file(json_file, "--json", out, config, *inputs_of(run, values))
    session = cli_run.need("sim.tune_session", "sweep")
    bank = cli_run.need("sim.trajectories", "sim").load_bank(run.cost.bank, prompts=1)
    certify = _certifier(_vocabularies())
    verdict = certify(run)
    options = session.Options(
        trials=trials,
        repeats=repeats,
        objectives=tuple(name.strip() for name in objectives.split(",")),
        weights=dict(_weight(text) for text in weight or ()),
        joint=joint,
        laws=tuple(law or session.ALL_LAWS),
        ranges=tuple(ranges or ()),
        choices=tuple(choices or ()),
        sampler=sampler,
        batch=batch,
    )
    with cli_run.placed(config), cli_live.progress("tune") as report:
        outcome = session.tune(
            run,
            options,
            out,
            _pool(workers, dask),
            gain_limit=verdict.limit if verdict is not None else float("nan"),
            theta_top=float(bank.theta[-1]),
            certify=certify,
            resume=resume,
            report=report,
        )
    cli_run.need("figures.pareto", "figures").draw(out / "trials.parquet", out / "pareto.png")
    cli_run.write_json(json_file, outcome.numbers, run)
    cli_run.show("tuned, against the config as given (cost, 95% interval; 0.01 is about 1%)", outcome.lines)
    if failed := outcome.numbers["trials_failed"]:
        cli_run.say(f"{failed} of {outcome.numbers['trials']} trials failed: see the column error in trials.csv")
    cli_run.say(f"{outcome.verdict}; config: {out / 'tuned.toml'}; picture: {out / 'pareto.png'}")


def _weight(text: str) -> tuple[str, float]:
    from entropic_ctl.errors import BadInputError

    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise BadInputError("not a weight", where="--weight", value=text, allowed="NAME=NUMBER") from None


def capacity(
    config: Config,
    *,
    slo_ttft: Annotated[
        float, typer.Option("--slo-ttft", metavar="SECONDS", help="Largest time to first token.")
    ] = float("inf"),
    slo_tpot: Annotated[
        float, typer.Option("--slo-tpot", metavar="SECONDS", help="Largest time per further token.")
    ] = float("inf"),
    percentile: Annotated[float, typer.Option("--percentile", help="Percent of requests that must meet each.")] = 99.0,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Requests per run, in place of workload.n_requests.")
    ] = None,
    tolerance: Annotated[float, typer.Option("--tolerance", help="Relative width at which the search stops.")] = 0.02,
    repeats: Annotated[int, typer.Option("--repeats", min=2, help="Most runs per rate.")] = 16,
    workers: Workers = None,
    dask: Dask = None,
    certificate: Certificate = None,
    uncertified: Uncertified = False,
    seed: Seed = None,
    json_file: Json = None,
) -> None:
    """Find the highest arrival rate at which a service level holds, with an interval.

    Rates share their seeds; each is judged by a sequential test over repeats, and a drifting queue fails it. The
    interval runs from the highest rate shown to hold to the lowest shown to fail.

    Example: `entropic capacity run.toml --slo-ttft 0.5 --slo-tpot 0.1 --percentile 95 --requests 400`
    """
    from entropic_ctl import cli_live, cli_output, cli_run
    from entropic_ctl.config import inputs_of
    from entropic_ctl.config_edit import value_of, with_fields

    run = cli_run.with_overrides(cli_run.load_config(config), seed=seed)
    cli_output.check_file(json_file, "--json", config, certificate, *inputs_of(run))
    if requests is not None:
        run = with_fields(run, {"workload.n_requests": requests})
    search, runs = cli_run.need("sim.capacity", "sim"), cli_run.need("sim.capacity_runs", "sim")
    level = search.Level(slo_ttft, slo_tpot, percentile)
    verdict = cli_run.certify(run, cli_run.bank_vocabulary(run), certificate, uncertified=uncertified)
    with cli_run.placed(config):
        field = runs.rate_field(run)
        with cli_live.progress("capacity") as report, _pool(workers, dask, "sim.capacity_runs") as pool:
            found = search.capacity(
                runs.simulated(run, level, pool, verdict=verdict, uncertified=uncertified),
                level,
                float(value_of(run, field)),
                tolerance=tolerance,
                least=min(4, repeats),
                most=repeats,
                progress=lambda trial, n: report(
                    f"{n} rates judged; {trial.rate:.4g} {trial.verdict} ({len(trial.margins)} runs)", 1 - 0.85**n
                ),
            )
    numbers = {"field": field, "rate": found.rate, "shown_to_hold": found.low, "shown_to_fail": found.high}
    trials = [
        {
            "rate": trial.rate,
            "verdict": trial.verdict,
            "repeats": len(trial.margins),
            "margin_mean": float(trial.margins.mean()),
            "drift_mean": float(trial.drifts.mean()),
        }
        for trial in found.trials
    ]
    slo = {"ttft_s": slo_ttft, "tpot_s": slo_tpot, "percentile": percentile}
    cli_run.write_json(json_file, {**numbers, "slo": slo, "tolerance": tolerance, "trials": trials}, run)
    cli_run.show("capacity", numbers)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(sweep)
    app.command()(tune)
    app.command()(capacity)
