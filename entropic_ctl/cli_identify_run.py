"""What ``entropic identify`` and ``entropic stability`` do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from entropic_ctl import cli_live, cli_output, cli_run
from entropic_ctl import config as configs
from entropic_ctl.cli_console import console
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError

__all__ = ["identify", "stability"]

_SIM_SIZE = {"requests": 160, "tokens": 256}
_ENGINE_SIZE = {"requests": 24, "tokens": 160}


_IDENTIFIED = 0.01
"""Share of the held-out variance below which a fitted transfer function says nothing."""


def identify(
    config: Path,
    out: Path,
    *,
    settings: Mapping[str, Any],
    real: bool,
    model: str | None,
    uncertified: bool,
    seed: int | None,
    force: bool,
    json_file: Path | None,
) -> None:
    """Run an identification experiment; ``settings`` are fields of its ``Experiment``, 0 standing for a default."""
    run = cli_run.with_overrides(cli_run.load_config(config), seed=seed, model=model)
    cli_output.check_file(json_file, "--json", out, config, *configs.inputs_of(run))
    identifying = cli_run.need("sim.identify", "sim")
    world = "engine" if real else "sim"
    sizes = _ENGINE_SIZE if real else _SIM_SIZE
    with cli_run.placed(config):
        experiment = cli_run.need("sim.experiment", "sim").Experiment(
            **{**settings, **{n: settings[n] or size for n, size in sizes.items()}}
        )
    subject = {
        "command": "identify",
        "world": world,
        "experiment": dataclasses.asdict(experiment),
        "config": configs.resolve(run),
    }
    results = cli_run.need("entropic_ctl.results", "sim")
    drawing = cli_run.need("figures.identify", "figures")
    with cli_output.folder(out, subject, force=force) as work, cli_live.progress("identify") as report:
        records = (_excite_engine if real else _excite_sim)(run, experiment, config, uncertified, report)
        report("estimate", 0.9)
        found = identifying.analyse(records, experiment, run)
        stamp = results.stamp(run, run.seed)
        numbers = {"world": world, **dataclasses.asdict(experiment), **found.numbers}
        lengths = [r.shape[0] for r in records.input]
        np = cli_run.need("numpy", "sim")
        every = {f.name: np.concatenate(getattr(records, f.name)) for f in dataclasses.fields(records)}
        every = {"request": np.repeat(np.arange(len(lengths)), lengths), **every}
        for name, table in (("frequency", found.frequency), ("impulse", found.impulse), ("tokens", every)):
            results.write_table(work / f"{name}.parquet", table, stamp)
        documents = {name: fitted.document() for name, fitted in found.models.items()}
        results.write_json(work / "models.json", {"models": documents, "numbers": numbers, "stamp": stamp})
        theory = found.numbers["varentropy_mean"] if experiment.input == "temperature" else None
        drawing.draw(
            work / "frequency.parquet",
            work / "bode.png",
            title=f"{experiment.signal} on {experiment.input}, {experiment.loop} loop, {world}: "
            f"{found.numbers['requests']} requests, {found.numbers['tokens']:,} tokens",
            gain_unit="nats per ln T" if experiment.input == "temperature" else "nats per nat of theta",
            theory_gain=theory,
            level=experiment.level,
        )
    cli_run.write_json(json_file, numbers, run)
    _tell_identify(found)
    cli_run.say(f"figure: {out / 'bode.png'}; models: {out / 'models.json'}")


def _certified(run: RunConfig, vocab: int, experiment: Any, *, uncertified: bool) -> None:
    """Refuse a closed loop whose law has no certificate; the excitation is an outside input and does not change it."""
    if experiment.loop == "open":
        return
    verdict = cli_run.certify(run, vocab, None, uncertified=uncertified)
    law, _, _ = run.loop.build()
    cli_run.need("entropic_ctl.certificates", "").require(
        run.loop.temperature, law.integral_action, run.engine.observation_lag, vocab, verdict, uncertified=uncertified
    )


def _excite_sim(run: RunConfig, experiment: Any, config: Path, uncertified: bool, report: Any) -> Any:
    bank = cli_run.need("sim.trajectories", "sim").bank_of(run)
    _certified(run, int(bank.meta["vocab_size"]), experiment, uncertified=uncertified)

    def progress(left: int, total: int, now_s: float) -> None:  # noqa: ARG001
        report(f"{left:,} of {total:,} requests", 0.9 * left / max(1, total))

    with cli_run.placed(config):
        return cli_run.need("sim.experiment", "sim").run_simulation(run, experiment, bank=bank, progress=progress)


def _excite_engine(run: RunConfig, experiment: Any, config: Path, uncertified: bool, report: Any) -> Any:
    experiments = cli_run.need("sim.experiment", "sim")
    with cli_run.placed(config):
        excited_run, laws, excited = experiments.prepare(run, experiment)
    loaded = cli_run.load_model(run)
    _certified(run, loaded.vocab_size, experiment, uncertified=uncertified)
    engines, sampling = cli_run.need("backends.engine", "engine"), cli_run.need("backends.sampling", "engine")
    prompts = cli_run.need("backends.prompts", "engine").PROMPTS
    metrics = cli_run.need("entropic_ctl.metrics", "").Metrics(run.engine.page_tokens, keep_tokens=True)
    engine = engines.Engine(excited_run, loaded, laws=laws, uncertified=True, metrics=metrics)
    keys = cli_run.need("sim.streams", "sim").stream(run.seed, "identification texts")
    for i in range(experiment.requests):
        prompt = prompts[i % len(prompts)]
        params = sampling.SamplingParams(max_new_tokens=experiment.tokens, seed=int(keys.integers(2**31)))
        engine.submit(prompt.text, params, arrival_s=0.0, chat=prompt.chat)
    engine.run(progress=lambda left, total: report(f"{left} of {total} texts", 0.9 * left / max(1, total)))
    return experiments.collect(metrics.tokens_table(), excited)


def _tell_identify(found: Any) -> None:
    table = Table(title="identification", title_justify="left", box=None, pad_edge=False)
    for name in ("", "found", "interval", "theory", "agrees"):
        table.add_column(name, justify="left" if not name else "right")
    numbers = found.numbers

    def row(name: str, value: dict[str, Any]) -> None:
        shown = f"[{value['low']:.4g}, {value['high']:.4g}]"
        theory = f"{value['theory']:.4g}" if "theory" in value else "–"
        agrees = {True: "yes", False: "no"}[value["agrees"]] if "agrees" in value else "–"
        table.add_row(name, f"{value['value']:.4g}", shown, theory, agrees)

    for name, value in numbers.get("compared", {}).items():
        row(name.replace("_", " "), value)
    for output in ("tempered_entropy", "model_entropy"):
        for part in ("same_step", "next_step", "static_gain"):
            row(f"{output.replace('_', ' ')}: {part.replace('_', ' ')}", numbers[output][part])
    console().print(table)
    for output in ("tempered_entropy", "model_entropy"):
        explained = numbers[output]["explained_held_out"]
        if not explained >= _IDENTIFIED:
            name = f"transfer function of the {output.replace('_', ' ')}"
            console().print(f"{name}: not identified (explains {explained:.2%} of held-out requests)")
    console().print(
        f"coherence with the tempered entropy: mean {numbers['tempered_entropy']['coherence_mean']:.4f}, "
        f"unrelated noise stays below {numbers['tempered_entropy']['coherence_floor']:.4f}"
    )


def stability(
    config: Path, out: Path, *, vocab: int | None, queue: bool, seed: int | None, force: bool, json_file: Path | None
) -> int:
    """Study stability in simulation; 1 if a finding contradicts a certificate."""
    run = cli_run.with_overrides(cli_run.load_config(config), seed=seed)
    cli_output.check_file(json_file, "--json", out, config, *configs.inputs_of(run))
    reporting = cli_run.need("sim.stability_report", "sim")
    bank = cli_run.need("sim.trajectories", "sim").bank_of(run)
    size = int(bank.meta["vocab_size"]) if vocab is None else vocab
    if run.loop.temperature.name != "feedback":
        raise BadInputError(
            "only a law that feeds back a past error can be unstable",
            where=str(config),
            field="loop.temperature.law",
            value=run.loop.temperature.name,
            allowed="feedback",
        )
    claims = _claims(run, size)
    subject = {"command": "stability", "vocab": size, "queue": queue, "config": configs.resolve(run)}
    results = cli_run.need("entropic_ctl.results", "sim")
    drawing = cli_run.need("figures.stability", "figures")
    with cli_output.folder(out, subject, force=force) as work, cli_live.progress("stability") as report:
        with cli_run.placed(config):
            study = reporting.study(run, bank, claims, queue=queue, progress=report)
        stamp = results.stamp(run, run.seed)
        for name, table in study.tables.items():
            results.write_table(work / f"{name}.parquet", table, stamp)
        numbers = {"vocab_size": size, "contradictions": study.contradictions, "findings": study.rows}
        results.write_json(work / "findings.json", {**numbers, "stamp": stamp})
        drawing.draw(
            work / "sweep.parquet",
            work / "lyapunov.png",
            certified=claims.certified,
            gain=run.loop.temperature.config.gain,
            title=f"sharpest logits of {size:,} tokens, shipped law: Lyapunov exponent and long-run amplitude by gain",
        )
    cli_run.write_json(json_file, numbers, run)
    _tell_stability(study)
    cli_run.say(f"figure: {out / 'lyapunov.png'}")
    return 1 if study.contradictions else 0


def _claims(run: RunConfig, vocab: int) -> Any:
    """Ask the checker what it proves about this configuration, and for the sharpest logits of the vocabulary."""
    search, checker = cli_run.need("proofs.search", "proofs"), cli_run.need("proofs.check", "proofs")
    vmax = cli_run.need("proofs.vmax", "proofs")
    sharpest = cli_run.need("sim.stability", "sim").Sharpest
    best = vmax.maximum(vocab)
    sharp = sharpest(vocab, best.logit, best.entropy_nats, float(best.lower))
    target = run.loop.temperature.config.target_nats
    tail = cli_run.need("proofs.search.gain", "proofs").equilibrium_tail_mass(vocab, target)
    own = None
    if tail is not None:
        own = sharpest(vocab, vmax.two_level_logit(vocab, tail), target, vmax.two_level(vocab, tail)[1])
    return cli_run.need("sim.stability_report", "sim").Claims(
        sharp,
        search.certify(run, vocab),
        {lag: checker.gain_ceiling(vocab, lag, best.bracket()) for lag in (0, 1)},
        own,
    )


def _tell_stability(study: Any) -> None:
    table = Table(title="stability", title_justify="left", box=None, pad_edge=False)
    for name in ("property", "found", "certificate or theory", ""):
        table.add_column(name, overflow="fold")
    for row in study.rows:
        says = {True: "agrees", False: "CONTRADICTS", None: ""}[row["agrees"]]
        table.add_row(row["property"], row["found"], row["expected"], says, style="red" if says.isupper() else None)
    console().print(table)
