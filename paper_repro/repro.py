"""The reproduction: every arm in both worlds, with intervals and a verdict on each claim of the paper's table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from paper_repro import controls, demo, experiments, setup
from paper_repro.arms import arms, with_loop
from paper_repro.claims import ARMS, BASELINE
from paper_repro.experiments import Progress
from paper_repro.outcome import Outcome
from paper_repro.setup import Size
from paper_repro.study import Study, span
from paper_repro.worlds import Certifier, Simulation

__all__ = ["FULL", "QUICK", "run"]

QUICK = Size(sim_requests=32, sim_repeats=8, engine_repeats=4, max_new_tokens=24, tune_trials=0)
FULL = Size(sim_requests=128, sim_repeats=24, engine_repeats=8, max_new_tokens=96, tune_trials=0)


def run(
    work: Path,
    *,
    quick: bool,
    seed: int = 0,
    repeats: int | None = None,
    size: Size | None = None,
    progress: Progress | None = None,
    model: Any = None,
    bank: Any = None,
) -> Outcome:
    """Run the ablation and write tables, figures and ``report.html`` into ``work``.

    The loop is the built-in one, not tuned to any claim.

    Parameters
    ----------
    work : Path
        Existing folder.
    quick : bool
        The small version.
    seed : int
    repeats : int, optional
        Runs per arm on the engine, in place of the version's own.
    size : Size, optional
        In place of the version's own.
    progress : callable, optional
    model, bank : optional
        In place of the embedded default model and the shipped bank.
    """
    size = size or (QUICK if quick else FULL)
    if repeats is not None:
        size = dataclasses.replace(size, engine_repeats=repeats)
    say = span(progress, 0.0, 1.0)
    say("model: look for it", 0.0)
    model, bank = demo.materials(model, bank, say)
    config = setup.simulation_config(seed, size)
    recorded, certifier = Certifier(config, int(bank.meta["vocab_size"])), Certifier(config, model.vocab_size)
    table = arms(config.loop)
    command = f"entropic repro{' --quick' if quick else ''} --seed {seed}"
    own = with_loop(setup.engine_config(seed), config.loop)
    engine, logs = demo.real_engine(own, model, certifier, work=work, size=size)
    title = "Entropic-time inference: the paper's claims, tested"
    study = Study(work, title, config, table, command, engine.config)
    study.certify(*certifier.both(config.loop))
    simulated = experiments.ablation(
        {"simulation": Simulation(config, recorded, bank)},
        {**table, **controls.entropy_blind(table["scheduling only"])},
        {"simulation": size.sim_repeats},
        seed,
        span(progress, 0.05, 0.15),
    )
    say("engine: warm up", 0.15)
    engine.warm_up(config.loop)
    real = experiments.ablation(
        {"engine": engine}, table, {"engine": size.engine_repeats}, seed, span(progress, 0.15, 0.92)
    )
    study.compare(experiments.stacked(simulated, real))
    study.notes += controls.blind_sentences(study.runs)
    say("replay the engine's logs", 0.92)
    demo.verify_replay(study, logs)
    say("draw", 0.95)
    study.draw(engine, bank, model.vocab_size)
    say("write the report", 0.98)
    return study.finish(engine, [arm for arm in ARMS if arm != BASELINE])
