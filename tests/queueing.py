"""Queues with closed forms, independent of the package: Lindley's recursion, fluid processor sharing, mean values."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]


def lindley(arrival_s: Floats, service_s: Floats) -> Floats:
    """Waits in a first-come-first-served queue with one server: W' = max(0, W + S - (gap to the next arrival))."""
    if len(arrival_s) < 2:
        return np.zeros(len(arrival_s))
    walk = np.concatenate([[0.0], np.cumsum(service_s[:-1] - np.diff(arrival_s))])
    return walk - np.minimum.accumulate(walk)


def pollaczek_khinchine(rate: float, mean: float, second_moment: float) -> float:
    """Mean wait of M/G/1: rate E[S^2] / (2 (1 - rate E[S]))."""
    return rate * second_moment / (2 * (1 - rate * mean))


def processor_sharing(arrival_s: Floats, service_s: Floats) -> Floats:
    """Sojourn times when the server is always shared equally by those present (fluid, exact).

    Virtual time grows at rate 1 / N; a job leaves when it has grown by the job's service.
    """
    n, sojourn = len(arrival_s), np.zeros(len(arrival_s))
    present: list[tuple[float, int]] = []
    now = virtual = 0.0
    i = 0
    while i < n or present:
        leaves = now + (present[0][0] - virtual) * len(present) if present else np.inf
        if i < n and arrival_s[i] <= leaves:
            virtual += (arrival_s[i] - now) / len(present) if present else 0.0
            now = float(arrival_s[i])
            heappush(present, (virtual + float(service_s[i]), i))
            i += 1
        else:
            now = leaves
            virtual, job = heappop(present)
            sojourn[job] = now - arrival_s[job]
    return sojourn


def interval(values: Floats, level: float = 0.99) -> tuple[float, float]:
    """Student's confidence interval of the mean of independent replications."""
    half = stats.t.ppf(0.5 + level / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return float(np.mean(values) - half), float(np.mean(values) + half)
