"""What a run attains of a service level, and the evaluation of a rate by the simulator, for :mod:`sim.capacity`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from entropic_ctl.certificates import Verdict
from entropic_ctl.config import RunConfig
from entropic_ctl.config_edit import with_fields
from entropic_ctl.errors import BadInputError
from sim.capacity import Evaluate, Level, Sample
from sim.carry_out import CrashedError
from sim.replica import simulate
from sim.streams import repeat_seeds
from sim.workers import Crash, Pool

__all__ = ["WARM_UP", "Load", "rate_field", "run", "sample", "simulated"]

WARM_UP = 0.1


def sample(requests: Mapping[str, np.ndarray], level: Level) -> Sample:
    """Return what the requests of one run attained.

    Parameters
    ----------
    requests : table
        Columns ``arrival_s``, ``ttft_s``, ``tpot_s`` (seconds, NaN where undefined) and ``status``.
    level : Level
    """
    arrival = requests["arrival_s"]
    start = arrival.min() + WARM_UP * (arrival.max() - arrival.min())
    used = arrival >= start
    served = used & ~np.isin(requests["status"], ["rejected", "cancelled", "live"])
    n = max(1, int(used.sum()))
    first, each = requests["ttft_s"], requests["tpot_s"]
    met_first = served & (first <= level.ttft_s)
    met_each = served & (np.isnan(each) | (each <= level.tpot_s))
    known = served & ~np.isnan(first)
    drift = 0.0
    if known.sum() > 2 and np.ptp(arrival[known]) > 0:
        drift = float(np.polyfit(arrival[known] - start, first[known], 1)[0])
    return Sample(float(met_first.sum()) / n, float(met_each.sum()) / n, drift, n)


def rate_field(config: RunConfig) -> str:
    """Return the field that scales the arrivals of a workload.

    Raises
    ------
    BadInputError
        If nobody arrives at a rate: everybody at once, or in a closed loop.
    """
    kind = config.workload.kind
    if kind in ("burst", "closed") or "session" in kind:
        raise BadInputError(
            "no arrival rate to vary: requests come all at once or when others leave",
            where="capacity",
            field="workload.kind",
            value=kind,
            allowed="open arrivals",
            remedy="set workload.kind = 'poisson', or replay a trace",
        )
    return "workload.rate_scale" if config.workload.trace else "workload.rate_per_s"


@dataclass(frozen=True)
class Load:
    """One run as a task for a worker."""

    repeat: int
    config: RunConfig
    level: Level
    verdict: Verdict | None = None
    uncertified: bool = False


def run(load: Load) -> Sample:
    """Simulate one run and return what its requests attained."""
    found = simulate(load.config, verdict=load.verdict, uncertified=load.uncertified)
    return sample(found.requests, load.level)


def simulated(
    config: RunConfig, level: Level, pool: Pool, *, verdict: Verdict | None = None, uncertified: bool = False
) -> Evaluate:
    """Return the evaluation of a configuration by the simulator.

    Parameters
    ----------
    config : RunConfig
    level : Level
    pool : Pool
        Started, over :func:`run`.
    verdict, uncertified
        As in :func:`sim.replica.simulate`.

    Raises
    ------
    BadInputError
        If the workload has no arrival rate, or a worker died (when called).
    """
    path = rate_field(config)

    def evaluate(rate: float, repeats: Sequence[int]) -> list[Sample]:
        loads = []
        for repeat in repeats:
            seed = repeat_seeds(config.seed, repeat + 1)[repeat]
            loads.append(Load(repeat, with_fields(config, {path: rate, "seed": seed}), level, verdict, uncertified))
        found: dict[int, Sample] = {}
        for load, result in pool.each(loads):
            if isinstance(result, Crash):
                raise CrashedError(f"the run at {path} = {rate:g}, repeat {load.repeat}, lost its worker: {result.how}")
            found[load.repeat] = result
        return [found[repeat] for repeat in repeats]

    return evaluate
