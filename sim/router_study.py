"""Routers compared on one configuration: every router sees the same requests, several times over.

Repeat r runs with the root seed plus r, and within a repeat all routers share arrivals, lengths and recordings (common
random numbers), so differences are taken within a repeat.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.bank import Bank
from entropic_ctl.certificates import Verdict
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from sim.arrivals import Workload
from sim.replica import simulate
from sim.routers import ROUTERS
from sim.trajectories import bank_of

__all__ = ["MEASURES", "compare"]

MEASURES = ("e2e_mean_s", "e2e_p99_s", "ttft_mean_s", "ttft_p99_s", "queue_depth_mean", "scheduled_tokens")
"""Summary keys that are compared; ``scheduled_tokens`` falls when prefixes are found in the cache."""


def compare(
    config: RunConfig,
    *,
    repeats: int = 5,
    routers: Sequence[str] = tuple(ROUTERS),
    verdict: Verdict | None = None,
    uncertified: bool = False,
    bank: Bank | None = None,
    workload: Callable[[RunConfig], Workload] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Run every router ``repeats`` times.

    Parameters
    ----------
    config : RunConfig
        At least two replicas.
    repeats : int
        At least 1.
    routers : sequence of str
    verdict, uncertified, bank
        As in :func:`sim.replica.simulate`.
    workload : callable, optional
        Makes the requests of a configuration, in place of the configured ones.
    progress : callable, optional
        ``progress(what is done, share)``.

    Returns
    -------
    dict of str to ndarray
        One row per run: ``router``, ``repeat``, ``seed``, the :data:`MEASURES` (NaN where undefined) and ``imbalance``,
        the largest share of busy time of a replica over the mean share.

    Raises
    ------
    BadInputError
        With fewer than two replicas, no repeat, or an unknown router.
    """
    if config.cluster.replicas < 2:
        raise BadInputError(
            "a router needs a choice", field="cluster.replicas", value=config.cluster.replicas, allowed=">= 2"
        )
    if repeats < 1:
        raise BadInputError("no repeats", field="repeats", value=repeats, allowed=">= 1")
    used = bank_of(config) if bank is None else bank
    rows: list[tuple[Any, ...]] = []
    for repeat in range(repeats):
        for name in routers:
            run = dataclasses.replace(
                config, seed=config.seed + repeat, cluster=dataclasses.replace(config.cluster, router=name)
            )
            result = simulate(
                run,
                verdict=verdict,
                uncertified=uncertified,
                bank=used,
                workload=workload(run) if workload is not None else None,
            )
            busy = np.array([part["busy_s"] for part in result.replicas])
            values = (result.summary[key] for key in MEASURES)
            measured = (np.nan if value is None else float(value) for value in values)
            rows.append((name, repeat, run.seed, *measured, float(busy.max() / busy.mean())))
            if progress is not None:
                progress(f"{name}, repeat {repeat + 1} of {repeats}", len(rows) / (repeats * len(routers)))
    names = ("router", "repeat", "seed", *MEASURES, "imbalance")
    return {name: np.array([row[i] for row in rows]) for i, name in enumerate(names)}
