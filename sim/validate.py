"""The simulator against the engine: the same workload in both worlds, errors per metric, and how settings rank.

Per run: TTFT, TPOT and E2E over its requests (mean, P50, P99) and throughput, as :mod:`entropic_ctl.metrics` defines
them. Engine: mean over its repeats with Student's 95% interval, and the relative standard deviation over repeats beside
it: an error below that is noise. Simulator: mean over its own replicates, each with its own entropies and step noise.
Error: simulated / measured - 1.

Ranking: two settings *separate* in a metric if the engine's intervals do not overlap; the pair is ranked alike if the
simulator orders the two means as the engine does.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from entropic_ctl.bank import Bank
from entropic_ctl.certificates import Verdict
from entropic_ctl.config import RunConfig, WorkloadConfig
from entropic_ctl.signals import FloatArray
from sim import cost as costs
from sim.arrivals import Workload
from sim.calibrated import CalibratedCost, Calibration
from sim.intervals import mean_interval
from sim.replica import simulate
from sim.streams import stream
from sim.trajectories import Trajectories, bank_of
from sim.validation_plan import UTILISATIONS, Load

__all__ = [
    "METRICS",
    "RANKED",
    "REPLICATES",
    "Ranking",
    "capacity_per_s",
    "compare",
    "measured",
    "predict",
    "rank",
    "target",
    "workload",
]

METRICS = (
    "tpot_mean_s",
    "tpot_p50_s",
    "tpot_p99_s",
    "ttft_mean_s",
    "ttft_p99_s",
    "e2e_mean_s",
    "e2e_p99_s",
    "throughput_tokens_per_s",
)
"""Keys of a run's summary that are compared."""
RANKED = ("ttft_mean_s", "tpot_mean_s", "e2e_mean_s")
"""Metrics by which settings are ranked."""
REPLICATES = 8
"""Simulated runs per cell."""
ALIKE = 0.95
"""Target share of the separated pairs that are ranked alike."""


def target(metric: str, utilisation: float) -> float:
    """Return the largest |error| allowed, infinity for metrics without a target."""
    ttft = 0.12 if utilisation <= 0.8 else 0.20
    limits = {"tpot_mean_s": 0.05, "tpot_p99_s": 0.08, "e2e_mean_s": 0.07, "throughput_tokens_per_s": 0.05}
    return {**limits, "ttft_mean_s": ttft}.get(metric, math.inf)


def workload(load: Load, prompts: int, seed: int, *, greedy: bool = False) -> Workload:
    """Return a validation load as the simulator's workload: fixed output lengths, recordings drawn by ``seed``.

    Parameters
    ----------
    load : Load
    prompts : int
        Recorded prompts to choose from.
    seed : int
    greedy : bool
        Every request is decoded at T = 0.
    """
    rng, n = stream(seed, "entropy"), load.arrival_s.shape[0]
    return Workload(
        WorkloadConfig(kind="poisson", n_requests=n, output_length="limit"),
        load.arrival_s,
        prompt_tokens=load.prompt_tokens,
        limit_tokens=load.output_tokens,
        prompt=rng.integers(0, prompts, (n,)),
        xi=rng.random((n,)),
        greedy=greedy,
    )


class Prediction(NamedTuple):
    """Simulated runs of one cell: their summaries, all their requests, and iterations outside the calibration."""

    summaries: list[dict[str, Any]]
    requests: dict[str, npt.NDArray[Any]]
    beyond_steps: int


def predict(
    config: RunConfig,
    load: Load,
    calibration: Calibration,
    *,
    verdict: Verdict | None = None,
    replicates: int = REPLICATES,
    bank: Bank | None = None,
) -> Prediction:
    """Simulate a cell.

    Parameters
    ----------
    config : RunConfig
        Replicate i runs with seed ``config.seed + i``.
    load : Load
    calibration : Calibration
    verdict : Verdict, optional
    replicates : int
    bank : Bank, optional
        In place of the configured one.

    Raises
    ------
    BadInputError
        If the calibration or the bank cannot be used for this setting.
    """
    bank = bank_of(config) if bank is None else bank
    accounts = costs.preset(config.cost.preset, config.engine.page_tokens, config.loop.pruning.config)
    summaries, tables, beyond = [], [], 0
    for i in range(replicates):
        run = dataclasses.replace(config, seed=config.seed + i)
        cost = CalibratedCost(calibration, run, accounts, beyond="count")
        greedy = config.loop.temperature.config.temperature == 0.0
        work = workload(load, Trajectories.count_prompts(bank), run.seed, greedy=greedy)
        result = simulate(run, verdict=verdict, cost=cost, workload=work, bank=bank)
        summaries.append(result.summary)
        tables.append(result.requests)
        beyond += cost.beyond_steps
    requests = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    return Prediction(summaries, requests, beyond)


def capacity_per_s(config: RunConfig, load: Load, calibration: Calibration, *, bank: Bank | None = None) -> float:
    """Return requests per second when all of them arrive at once (what utilisation 1 means here).

    Parameters
    ----------
    config : RunConfig
        Of the base setting.
    load : Load
        Its arrival times are not read.
    calibration : Calibration
    bank : Bank, optional
        In place of the configured one.
    """
    burst = dataclasses.replace(load, arrival_s=np.zeros_like(load.arrival_s))
    done = predict(config, burst, calibration, replicates=2, bank=bank)
    return float(np.mean([load.arrival_s.shape[0] / s["makespan_s"] for s in done.summaries]))


def measured(values: Sequence[float] | FloatArray) -> tuple[float, float, float]:
    """Return (mean, half width of Student's 95% interval, relative standard deviation); NaN where undefined."""
    found = mean_interval(values)
    deviation = float(np.std(values, ddof=1)) if found.n > 1 else math.nan
    return found.mean, found.high - found.mean, deviation / found.mean if found.mean else math.nan


def compare(
    engine: Mapping[tuple[str, float], Sequence[Mapping[str, Any]]],
    simulated: Mapping[tuple[str, float], Sequence[Mapping[str, Any]]],
) -> dict[str, npt.NDArray[Any]]:
    """Return one row per (setting, utilisation, metric).

    Parameters
    ----------
    engine, simulated : mapping of (setting, utilisation) to summaries of runs

    Returns
    -------
    dict of str to ndarray
        Columns setting, utilisation, metric, repeats, engine, engine_half (95%), noise (relative standard deviation
        over repeats), simulated, error, target (infinity: none), ok.
    """
    rows: list[tuple[Any, ...]] = []
    for cell, summaries in engine.items():
        for metric in METRICS:
            found = [s[metric] for s in summaries if s[metric] is not None]
            own = [s[metric] for s in simulated[cell] if s[metric] is not None]
            if not found or not own:
                continue
            mean, half, noise = measured(found)
            prediction = float(np.mean(own))
            error = prediction / mean - 1.0
            limit = target(metric, cell[1])
            rows.append(
                (*cell, metric, len(found), mean, half, noise, prediction, error, limit, bool(abs(error) <= limit))
            )
    names = (
        "setting utilisation metric repeats engine engine_half noise simulated error target ok".split()  # noqa: SIM905
    )
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


class Ranking(NamedTuple):
    """How the settings rank in one metric: pairs, those that separate, those ranked alike, and the matrix.

    ``matrix[i, j]``: 1 alike, -1 the other way round, 0 not separated; ``settings`` name its axes.
    """

    metric: str
    pairs: int
    separated: int
    alike: int
    settings: tuple[str, ...]
    matrix: npt.NDArray[np.int64]


def rank(table: Mapping[str, npt.NDArray[Any]], metric: str) -> Ranking:
    """Rank the settings at the utilisation they share.

    Parameters
    ----------
    table : mapping
        From :func:`compare`.
    metric : str
    """
    middle = UTILISATIONS[len(UTILISATIONS) // 2]
    pick = np.flatnonzero((table["metric"] == metric) & (table["utilisation"] == middle))
    n = pick.shape[0]
    mean, half, own = (table[name][pick] for name in ("engine", "engine_half", "simulated"))
    matrix = np.zeros((n, n), np.int64)
    for i, j in itertools.combinations(range(n), 2):
        apart = abs(mean[i] - mean[j]) > half[i] + half[j]  # False where an interval is unknown
        if apart:
            matrix[i, j] = matrix[j, i] = 1 if (mean[i] - mean[j]) * (own[i] - own[j]) > 0 else -1
    upper = matrix[np.triu_indices(n, 1)]
    names = tuple(str(x) for x in table["setting"][pick])
    return Ranking(
        metric, n * (n - 1) // 2, int(np.count_nonzero(upper)), int(np.count_nonzero(upper > 0)), names, matrix
    )
