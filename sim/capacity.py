r"""The highest arrival rate at which a service level holds, as an interval.

A rate *holds* if at least p percent of the requests meet each objective (time to first token; time per output token)
and the queue does not drift. Refused requests meet nothing; a request without a second token has no time per output
token and meets that one. Arrivals in the first tenth of a run are left out: the system starts empty.

**One rate** is judged by a sequential test over repeats: the margin of a repeat is the smallest attained share minus
p/100. Repeats are added, in rounds, until the Student interval of the mean margin excludes 0 (*holds* or *fails*) or
their number runs out (*undecided*). Looking k times costs coverage, so each look uses the level 1 - alpha/k
(Bonferroni). A rate is shown to hold only by enough requests: (1 - p/100) n >= 3, because n requests without one miss
show a miss rate below 3/n at 95%. **Drift**: the slope of the waiting time (arrival to first token) over the arrival
time. Overload by a factor 1 + x gives the slope x or more; a rate fails if the slope's interval lies above 0 and its
mean above 1%.

**Search**: rates double (or halve) until one holds and one fails, then the bracket is bisected. An undecided rate
splits the search in two, for the highest rate shown to hold and the lowest shown to fail: the interval. The estimate
bisects on the point estimates of margin and drift. All rates share the seeds of their repeats, and with Poisson
arrivals a rate only rescales the same arrivals, so attainment is close to monotone in the rate. Source: ours, from
textbook parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from entropic_ctl.errors import BadInputError
from sim.intervals import mean_interval

__all__ = ["Capacity", "Evaluate", "Level", "Sample", "Trial", "capacity", "judge"]

DRIFT = 0.01
_MOST_STEPS = 40
_RULE_OF_THREE = 3.0


@dataclass(frozen=True)
class Level:
    """A service-level objective.

    Parameters
    ----------
    ttft_s, tpot_s : float
        Largest time to first token and mean time per further token, seconds; infinite leaves one out.
    percentile : float
        Share of requests, in percent, that must meet each.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    percentile: float = 99.0

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise BadInputError("out of range", where="--slo", field=name, value=getattr(self, name), allowed="> 0")
        if math.isinf(self.ttft_s) and math.isinf(self.tpot_s):
            raise BadInputError("no objective", where="--slo", remedy="give --slo-ttft, --slo-tpot or both")
        if not 0 < self.percentile < 100:
            raise BadInputError("out of range", where="--percentile", value=self.percentile, allowed="(0, 100)")


@dataclass(frozen=True)
class Sample:
    """What one run at one rate showed: attained shares in [0, 1], drift of the wait (seconds per second), requests."""

    ttft: float
    tpot: float
    drift: float
    n: int


Evaluate = Callable[[float, Sequence[int]], Sequence[Sample]]
"""(rate, numbers of repeats) -> one sample per repeat; the seed of a repeat does not depend on the rate."""


@dataclass(frozen=True)
class Trial:
    """A judged rate: ``verdict`` is ``holds``, ``fails`` or ``undecided``; margins and drifts have shape (repeats,)."""

    rate: float
    verdict: str
    margins: np.ndarray
    drifts: np.ndarray

    @property
    def leans(self) -> bool:
        """True if the point estimates alone say that the rate holds."""
        return self.verdict != "fails" and bool(self.margins.mean() >= 0 and self.drifts.mean() <= DRIFT)


@dataclass(frozen=True)
class Capacity:
    """The answer.

    Parameters
    ----------
    rate : float
        Estimate.
    low, high : float
        Highest rate shown to hold and lowest shown to fail: the interval. ``low`` is 0 and ``high`` infinite where
        there is none.
    trials : tuple of Trial
        Every rate that was judged, ascending.
    """

    rate: float
    low: float
    high: float
    trials: tuple[Trial, ...] = field(repr=False)


def judge(
    rate: float, evaluate: Evaluate, level: Level, *, least: int = 4, most: int = 16, alpha: float = 0.05
) -> Trial:
    """Decide one rate by the sequential test of the module.

    Parameters
    ----------
    rate : float
    evaluate : callable
    level : Level
    least, most : int
        Repeats of the first look, and in all; every look doubles them.
    alpha : float
        Chance of a wrong decision, over all looks.
    """
    looks = max(1, math.ceil(math.log2(most / least)) + 1)
    margins, drifts, requests = np.empty(0), np.empty(0), 0
    verdict = "undecided"
    while verdict == "undecided" and len(margins) < most:
        wanted = range(len(margins), min(most, max(least, 2 * len(margins))))
        found = evaluate(rate, wanted)
        shares = np.array([min(s.ttft, s.tpot) for s in found])
        margins = np.concatenate([margins, shares - level.percentile / 100])
        drifts = np.concatenate([drifts, [s.drift for s in found]])
        requests += sum(s.n for s in found)
        margin = mean_interval(margins, level=1 - alpha / looks)
        drift = mean_interval(drifts, level=1 - alpha / looks)
        if margin.high < 0 or (drift.low > 0 and drift.mean > DRIFT):
            verdict = "fails"
        elif margin.low > 0 and drift.mean <= DRIFT and requests * (1 - level.percentile / 100) >= _RULE_OF_THREE:
            verdict = "holds"
    return Trial(rate, verdict, margins, drifts)


def capacity(
    evaluate: Evaluate,
    level: Level,
    start: float,
    *,
    tolerance: float = 0.02,
    least: int = 4,
    most: int = 16,
    progress: Callable[[Trial, int], None] | None = None,
) -> Capacity:
    """Search the highest rate that holds.

    Parameters
    ----------
    evaluate : callable
    level : Level
    start : float
        First rate, > 0.
    tolerance : float
        Relative width at which a bisection stops.
    least, most : int
        Repeats per rate, see :func:`judge`; at least 2.
    progress : callable, optional
        ``progress(trial, rates judged so far)``.

    Raises
    ------
    BadInputError
        If an option is out of range, or no rate within a factor 2^20 of ``start`` holds, or none fails.
    """
    if not (math.isfinite(start) and start > 0):
        raise BadInputError("out of range", where="capacity", field="start", value=start, allowed="> 0")
    if not 2 <= least <= most:
        raise BadInputError("out of range", where="--repeats", value=(least, most), allowed="2 <= least <= most")
    if not 0 < tolerance < 1:
        raise BadInputError("out of range", where="--tolerance", value=tolerance, allowed="(0, 1)")
    judged: dict[float, Trial] = {}

    def at(rate: float) -> Trial:
        if rate not in judged:
            judged[rate] = judge(rate, evaluate, level, least=least, most=most)
            if progress is not None:
                progress(judged[rate], len(judged))
        return judged[rate]

    def reach(accept: str, factor: float) -> float:
        rate = start
        for _ in range(20):
            if at(rate).verdict == accept:
                return rate
            rate *= factor
        what = "holds" if accept == "holds" else "fails"
        raise BadInputError(
            f"no rate {what} within a factor of a million",
            where="capacity",
            value=f"{start:g} to {rate:g}",
            remedy="relax the objective" if accept == "holds" else "tighten it, or give the workload more requests",
        )

    def bisect(good: float, bad: float, test: Callable[[Trial], bool]) -> tuple[float, float]:
        for _ in range(_MOST_STEPS):
            if bad <= good * (1 + tolerance):
                break
            middle = math.sqrt(good * bad)
            if test(at(middle)):
                good = middle
            else:
                bad = middle
        return good, bad

    middle = bisect(reach("holds", 0.5), reach("fails", 2.0), lambda trial: trial.leans)
    holding = max(t.rate for t in judged.values() if t.verdict == "holds" and t.rate < middle[1])
    failing = min(t.rate for t in judged.values() if t.verdict == "fails" and t.rate > middle[0])
    low = bisect(holding, middle[1], lambda trial: trial.verdict == "holds")[0]
    high = bisect(middle[0], failing, lambda trial: trial.verdict != "fails")[1]
    trials = tuple(judged[rate] for rate in sorted(judged))
    return Capacity(math.sqrt(middle[0] * middle[1]), low, high, trials)
