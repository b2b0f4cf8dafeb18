"""The demonstration: simulate, tune, certify, and run the tuned loop on a real model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from backends import fetch, models
from entropic_ctl import replay
from entropic_ctl.config import LoopConfig, RunConfig
from paper_repro import controls, experiments, setup
from paper_repro.arms import arms, with_loop
from paper_repro.claims import ARMS, BASELINE
from paper_repro.experiments import Progress
from paper_repro.outcome import Outcome
from paper_repro.report import number
from paper_repro.setup import Size
from paper_repro.study import Study, span
from paper_repro.worlds import Certifier, RealEngine, Simulation
from sim.space import Range
from sim.trajectories import load_bank
from sim.tune import tune

__all__ = ["run", "tuned"]


def tuned(
    config: RunConfig, certifier: Certifier, bank: Any, trials: int, progress: Progress
) -> tuple[LoopConfig, Any]:
    """Tune three gains of the full loop in simulation, the temperature gain inside the certified range.

    Returns
    -------
    LoopConfig, dict of ndarray
        The tuned loop, and the table of trials.
    """
    limit = certifier.verdict(config.loop).limit
    gains = [
        Range("loop.temperature.gain", 0.05 * limit, 0.9 * limit, log=True),
        Range("loop.pruning.theta_nats", 0.005, 0.05, log=True, also=("loop.pruning.theta_wide_nats",)),
        Range("loop.scheduling.gamma", 0.1, 10.0, log=True),
    ]
    found = tune(
        config,
        gains,
        trials=trials,
        gain_limit=limit,
        certify=lambda run: certifier.verdict(run.loop),
        scalar=True,
        bank=bank,
        progress=lambda done, total, best: progress(
            f"tune: trial {done} of {total}, best cost {best:+.3f}", done / total
        ),
    )
    return found.loop, found.table()


def tuning_note(trials: Mapping[str, np.ndarray]) -> str:
    """Return what tuning chose, and by how much its own objective fell."""
    best = int(np.argmin(trials["objective"]))
    names = [name for name in trials if name not in ("trial", "objective")]
    chosen = ", ".join(
        f"{name} {number(float(trials[name][0]))} -> {number(float(trials[name][best]))}" for name in names
    )
    count = trials["objective"].shape[0]
    fell = number(float(trials["objective"][0] - trials["objective"][best]))
    return (
        f"Tuning ({count} simulations, on seeds not used elsewhere) took {chosen}; its objective (no unit, lower is "
        f"better) fell by {fell} (0.01 is 1% of latency; one or two percent is within the noise of one workload)."
    )


def materials(model: Any, bank: Any, say: Progress) -> tuple[Any, Any]:
    """Return model and bank, the embedded and the shipped one where None is given."""
    if model is None:
        fetch.fetch(lambda line: say(f"model: {line}", 0.01))
        model = models.load()
    return model, load_bank() if bank is None else bank


def run(
    work: Path,
    *,
    seed: int = 0,
    size: Size | None = None,
    progress: Progress | None = None,
    model: Any = None,
    bank: Any = None,
) -> Outcome:
    """Run the demonstration and write tables, figures and ``report.html`` into ``work``.

    Parameters
    ----------
    work : Path
        Existing folder.
    seed : int
        Root seed of everything.
    size : Size, optional
    progress : callable, optional
        (what, share of the whole).
    model : backends.models.LoadedModel, optional
        In place of the embedded default.
    bank : entropic_ctl.bank.Bank, optional
        In place of the shipped one.
    """
    size = size or Size()
    say = span(progress, 0.0, 1.0)
    say("model: look for it", 0.0)
    model, bank = materials(model, bank, say)
    config = setup.simulation_config(seed, size)
    recorded, certifier = Certifier(config, int(bank.meta["vocab_size"])), Certifier(config, model.vocab_size)
    tuning_config = setup.simulation_config(seed + 1, dataclasses.replace(size, sim_requests=4 * size.sim_requests))
    loop, trials = tuned(tuning_config, recorded, bank, size.tune_trials, span(progress, 0.05, 0.2))
    config = with_loop(config, loop)
    table = arms(loop)
    own = with_loop(setup.engine_config(seed), loop)
    engine, logs = real_engine(own, model, certifier, work=work, size=size)
    title, command = "Entropic-time inference: demonstration", f"entropic demo --seed {seed}"
    study = Study(work, title, config, table, command, engine.config)
    study.trials = trials
    study.write("trials", trials)
    study.notes.append(tuning_note(trials))
    say("certify the tuned loop", 0.2)
    study.certify(*certifier.both(loop))
    (work / "certificate.json").write_text(json.dumps(study.certificate, indent=2) + "\n", encoding="utf-8")
    simulated = experiments.ablation(
        {"simulation": Simulation(config, recorded, bank)},
        {**table, **controls.entropy_blind(table["scheduling only"])},
        {"simulation": size.sim_repeats},
        seed,
        span(progress, 0.22, 0.35),
    )
    say("engine: warm up", 0.35)
    engine.warm_up(loop)
    real = experiments.ablation(
        {"engine": engine},
        {arm: table[arm] for arm in (BASELINE, ARMS[-1])},
        {"engine": size.engine_repeats},
        seed,
        span(progress, 0.35, 0.9),
    )
    study.compare(experiments.stacked(simulated, real))
    study.notes += controls.blind_sentences(study.runs)
    say("replay the engine's log", 0.9)
    verify_replay(study, logs)
    say("draw", 0.94)
    study.draw(engine, bank, model.vocab_size)
    say("write the report", 0.98)
    return study.finish(engine, [ARMS[-1]])


def real_engine(
    config: RunConfig, model: Any, certifier: Certifier, *, work: Path, size: Size
) -> tuple[RealEngine, dict[str, Path]]:
    """Return the real world of ``config``, and the logs it will write: one per arm, of its first run."""
    logs: dict[str, Path] = {}

    def log(arm: str, run_seed: int) -> Path | None:  # noqa: ARG001
        if arm in logs:
            return None
        logs[arm] = work / f"engine-{arm.replace(' ', '-')}.jsonl"
        return logs[arm]

    engine = RealEngine(
        config,
        model,
        setup.prompts(model, size.long_tokens),
        certifier,
        size.max_new_tokens,
        log,
    )
    return engine, logs


def verify_replay(study: Study, logs: dict[str, Path]) -> None:
    """Replay every recorded engine run through a fresh loop; a difference is a violated guarantee."""
    lines = []
    for arm, path in logs.items():
        outcome = replay.replay(path)
        if outcome.equal:
            lines.append(
                f"{arm}: {outcome.steps} steps, {outcome.tokens} tokens, every host decision equal bit for bit"
            )
        else:
            study.violations.append(f"replay of the {arm} differs: {outcome.difference}")
            lines.append(f"{arm}: DIFFERS, {outcome.difference}")
    study.replay_text = "Replay of the engine's log through a fresh loop: " + "; ".join(lines) + "."
