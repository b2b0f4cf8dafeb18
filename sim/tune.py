r"""Tuning on the simulator: one cost or several, gains and laws, inside the certified range, over shared seeds.

Every trial runs the same repeats (root seeds) as the configuration as given, so differences between trials are due to
their settings, and every cost is a paired comparison with it. The given configuration is trial 0 and costs 0; the
result is therefore never worse than it on these seeds. The search is Optuna's tree-structured Parzen estimator
(Bergstra et al. 2011; several objectives: Ozaki et al. 2022) or NSGA-II (Deb et al. 2002), seeded.

Which trial is best: the one with the lowest weighted sum of mean costs (default weights 1)::

    J = sum_j w_j mean_r cost_j(trial, r)

With ``scalar`` the search itself minimises J; otherwise it looks for the Pareto set (no other trial at least as good in
every mean cost and better in one) and J only picks one member. A minimum over many noisy trials flatters itself: judge
the choice on fresh seeds (:func:`held_out`).

Certified gains: a range of ``loop.temperature.gain`` that leaves (0, ``gain_limit``) is refused, and with ``certify``
every trial runs under a verdict of its own.

Resuming: the sampler is asked and told in a fixed order, and finished runs are read from the journal instead of run
again, so a resumed search continues exactly as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from entropic_ctl import config_edit
from entropic_ctl.bank import Bank
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from sim import objectives as costs
from sim import runs
from sim.carry_out import Memory, Records
from sim.intervals import mean_interval
from sim.objectives import Objective
from sim.runs import Certify, Point
from sim.space import Choice, Dimension
from sim.trajectories import bank_of
from sim.tune_space import check_space, settings_of
from sim.tune_trials import Judged, Search, Trial, TuneResult
from sim.workers import Inline, Pool

__all__ = ["SAMPLERS", "held_out", "tune"]

SAMPLERS = ("tpe", "nsga2")

Progress = Callable[[int, int, float], None]
"""``progress(trials done, trials in all, lowest weighted cost)``."""


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    """Import Optuna and hold its log to warnings while the block runs."""
    try:
        import optuna
    except ImportError:
        raise BadInputError(
            "Optuna is not installed", where="tune", remedy="pip install 'entropic-ctl[sweep]'"
        ) from None
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield optuna
    finally:
        optuna.logging.set_verbosity(verbosity)


def _ask(trial: Any, space: Sequence[Dimension], base: RunConfig) -> dict[str, Any]:
    """Return what the sampler chooses for the dimensions that exist in this trial."""
    chosen: dict[str, Any] = {}
    for dimension in sorted(space, key=lambda d: not isinstance(d, Choice)):
        if isinstance(dimension, Choice):
            chosen[dimension.field] = trial.suggest_categorical(dimension.field, dimension.values)
            continue
        if dimension.only:
            path, value = dimension.only
            if chosen.get(path, config_edit.value_of(base, path)) != value:
                continue
        suggest = trial.suggest_int if dimension.integer else trial.suggest_float
        low, high = (math.ceil, math.floor) if dimension.integer else (float, float)
        chosen[dimension.field] = suggest(dimension.field, low(dimension.low), high(dimension.high), log=dimension.log)
    return chosen


def _point(config: RunConfig, number: int, settings: Mapping[str, Any]) -> Point:
    try:
        return Point(number, settings, config_edit.with_fields(config, settings, where=f"trial {number}"))
    except BadInputError as error:
        return Point(number, settings, None, error)


def _weights(goals: Sequence[Objective], weights: Mapping[str, float] | None) -> np.ndarray:
    names = [goal.name for goal in goals]
    for name, value in (weights or {}).items():
        if name not in names or not (math.isfinite(value) and value >= 0):
            raise BadInputError("bad weight", where="--weight", field=name, value=value, allowed=f">= 0, of {names}")
    return np.array([(weights or {}).get(name, 1.0) for name in names])


def _shared_bank(config: RunConfig) -> Bank | None:
    """Return a recorded bank, read once for all trials; a fitted model generates one for every repeat instead."""
    return None if config.cost.bank.endswith(".json") else bank_of(config)


def tune(
    config: RunConfig,
    stages: Mapping[str, Sequence[Dimension]] | Sequence[Dimension],
    *,
    trials: int = 20,
    objectives: Sequence[Objective] = (costs.OBJECTIVES["latency"], costs.OBJECTIVES["quality"]),
    weights: Mapping[str, float] | None = None,
    scalar: bool = False,
    sampler: str = "tpe",
    repeats: int = 1,
    batch: int = 1,
    gain_limit: float | None = None,
    certify: Certify | None = None,
    bank: Bank | None = None,
    pool: Pool | None = None,
    journal: Records | None = None,
    progress: Progress | None = None,
) -> TuneResult:
    """Search.

    Parameters
    ----------
    config : RunConfig
        Workload, engine, starting loop and root seed; the seed also seeds the search.
    stages : mapping of str to sequence of dimensions, or one sequence
        Tuned one after the other, each from the best configuration so far, on an equal share of the trials.
    trials : int
        Configurations in all, the given one included; at least 1.
    objectives : sequence of Objective
    weights : mapping, optional
        Objective to weight in J, 1 where absent.
    scalar : bool
        Search for the lowest J instead of the Pareto set.
    sampler : str
        ``tpe`` or ``nsga2``.
    repeats : int
        Runs per trial.
    batch : int
        Trials proposed at once (they run in parallel with their repeats).
    gain_limit : float, optional
        Supremum of certified gains of ``loop.temperature.gain``.
    certify : callable, optional
        Returns the verdict under which a configuration runs. Without it trials run uncertified, inside ``gain_limit``.
    bank : Bank, optional
        In place of the configured one; for in-process pools.
    pool : Pool, optional
        Started, over :func:`sim.runs.run`; this process by default.
    journal : Records, optional
        Finished runs are taken from it and added to it.
    progress : callable, optional

    Raises
    ------
    BadInputError
        If the space or an option is wrong, the given configuration cannot run, or Optuna is not installed.
    """
    if not isinstance(stages, Mapping):
        stages = {"joint": stages}
    for space in stages.values() or ((),):
        check_space(config, space, gain_limit)
    for name, value in (("trials", trials), ("repeats", repeats), ("batch", batch)):
        if value < 1:
            raise BadInputError("out of range", where="tune", field=name, value=value, allowed=">= 1")
    if sampler not in SAMPLERS:
        raise BadInputError(
            "no such sampler", where="tune", field="sampler", value=sampler, allowed=", ".join(SAMPLERS)
        )
    factors = _weights(objectives, weights)
    search = Search(
        config,
        objectives,
        repeats,
        journal if journal is not None else Memory(),
        pool=pool if pool is not None else Inline(runs.run),
        certify=certify,
        uncertified=certify is None,
        bank=_shared_bank(config) if bank is None and pool is None else bank,
    )
    ((cost, error),) = search.evaluate([Point(0, {}, config)])
    if error:
        raise BadInputError(f"the configuration as given cannot be judged: {error}", where="tune")
    fields = tuple(dimension.field for space in stages.values() for dimension in space)
    found = [Trial(0, "given", {}, config, cost)]
    names = tuple(goal.name for goal in objectives)

    def result() -> TuneResult:
        return TuneResult(tuple(found), names, factors, fields)

    shares = np.diff(np.linspace(1, trials, len(stages) + 1).round().astype(int)).tolist()
    with _quiet() as optuna:
        for (stage, space), share in zip(stages.items(), shares, strict=True):
            base, settled = result().config, dict(result().best.settings)
            study = optuna.create_study(
                directions=["minimize"] * (1 if scalar else len(objectives)),
                sampler=_sampler(optuna, sampler, config.seed, share),
            )
            end = len(found) + share
            while len(found) < end:
                asked = [study.ask() for _ in range(min(batch, end - len(found)))]
                points = []
                for offset, trial in enumerate(asked):
                    settings = {**settled, **settings_of(config, space, _ask(trial, space, base))}
                    points.append(_point(config, len(found) + offset, settings))
                for trial, point, (cost, error) in zip(asked, points, search.evaluate(points), strict=True):
                    done = Trial(point.id, stage, point.settings, point.config, cost, error)
                    found.append(done)
                    if error:
                        study.tell(trial, state=optuna.trial.TrialState.FAIL)
                    else:
                        study.tell(trial, [float(factors @ done.mean)] if scalar else done.mean.tolist())
                if progress is not None:
                    progress(len(found), trials, result().objective)
    return result()


def _sampler(optuna: Any, name: str, seed: int, trials: int) -> Any:
    seed %= 2**32
    if name == "nsga2":
        return optuna.samplers.NSGAIISampler(population_size=max(4, min(20, trials // 3)), seed=seed)
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(5, min(12, trials // 4)))


def held_out(
    config: RunConfig,
    found: TuneResult,
    objectives: Sequence[Objective],
    *,
    repeats: int,
    first: int,
    certify: Certify | None = None,
    pool: Pool | None = None,
    bank: Bank | None = None,
    journal: Records | None = None,
) -> Judged:
    """Compare the chosen configuration with the given one on seeds the search has not seen.

    Parameters
    ----------
    config : RunConfig
        As given.
    found : TuneResult
    objectives : sequence of Objective
        Those of the search.
    repeats, first : int
        Repeats ``first`` to ``first + repeats - 1``; ``first`` is the search's number of repeats.
    certify, pool, bank, journal
        As in :func:`tune`.

    Raises
    ------
    BadInputError
        If a cost is undefined on a fresh seed.
    """
    search = Search(
        config,
        objectives,
        repeats,
        journal if journal is not None else Memory(),
        pool=pool if pool is not None else Inline(runs.run),
        certify=certify,
        uncertified=certify is None,
        bank=bank,
    )
    best = found.best
    points = [Point(0, {}, config)]
    if best.number:
        points.append(Point(best.number, best.settings, best.config))
    cost, error = search.evaluate(points, first)[-1]
    if error:
        raise BadInputError(f"the chosen configuration cannot be judged on fresh seeds: {error}", where="tune")
    each = {name: mean_interval(row) for name, row in zip(found.objectives, cost, strict=True)}
    return Judged(each, mean_interval(found.weights @ cost))
