"""The trials of a tuning run: what was tried, what it cost, which are worth having, and how they are evaluated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from entropic_ctl import config_edit, results
from entropic_ctl.config import LoopConfig, RunConfig
from entropic_ctl.errors import BadInputError
from sim import runs
from sim.carry_out import Records, carry_out
from sim.intervals import Interval
from sim.objectives import Objective
from sim.runs import Point

__all__ = ["Judged", "Search", "Trial", "TuneResult", "pareto"]


@dataclass(frozen=True)
class Trial:
    """One configuration tried.

    Parameters
    ----------
    number : int
        0 is the configuration as given.
    stage : str
        ``given``, ``joint`` or the law being tuned.
    settings : dict
        Path to value: what the search chose.
    config : RunConfig or None
        None if the settings are impossible.
    cost : ndarray, shape (objectives, repeats)
        Relative to the given configuration on the same seed; NaN if it failed.
    error : str
        Why it failed, or "".
    """

    number: int
    stage: str
    settings: Mapping[str, Any]
    config: RunConfig | None
    cost: np.ndarray
    error: str = ""

    @property
    def mean(self) -> np.ndarray:
        """Mean cost per objective, shape (objectives,)."""
        return np.asarray(self.cost.mean(axis=1))


@dataclass(frozen=True)
class TuneResult:
    """Every trial, and the one chosen."""

    trials: tuple[Trial, ...]
    objectives: tuple[str, ...]
    weights: np.ndarray
    fields: tuple[str, ...] = ()
    best: Trial = field(init=False)

    def __post_init__(self) -> None:
        good = [trial for trial in self.trials if not trial.error]
        object.__setattr__(self, "best", min(good, key=self.weighted))  # ties: the earliest

    def weighted(self, trial: Trial) -> float:
        """Return J of a trial; infinite if it failed."""
        value = float(self.weights @ trial.mean)
        return value if math.isfinite(value) else math.inf

    @property
    def config(self) -> RunConfig:
        """The chosen configuration."""
        if self.best.config is None:
            raise BadInputError("the chosen trial has no configuration", where="tune")
        return self.best.config

    @property
    def loop(self) -> LoopConfig:
        """The chosen laws."""
        return self.config.loop

    @property
    def objective(self) -> float:
        """J of the chosen trial, at most 0."""
        return self.weighted(self.best)

    def table(self) -> dict[str, np.ndarray]:
        """Return one row per trial: ``trial``, ``objective`` (J), and the value of every tuned field it has."""
        rows = []
        for trial in self.trials:
            value = trial.settings.get if trial.config is None else partial(config_edit.value_of, trial.config)
            rows.append(
                {
                    "trial": trial.number,
                    "objective": self.weighted(trial),
                    **{name: value(name) for name in self.fields},
                }
            )
        return runs.table(rows)


@dataclass(frozen=True)
class Judged:
    """Costs of a configuration on fresh seeds: per objective, and their weighted sum."""

    costs: Mapping[str, Interval]
    weighted: Interval

    @property
    def verdict(self) -> str:
        """``better``, ``worse`` or ``undecided``: on which side of 0 the 95% interval of J lies."""
        if self.weighted.high < 0:
            return "better"
        return "worse" if self.weighted.low > 0 else "undecided"


def pareto(points: np.ndarray) -> np.ndarray:
    """Return which rows no other row dominates (at least as good in every column, better in one; lower is better).

    Parameters
    ----------
    points : ndarray, shape (n, k)
        Rows with a value that is not finite are never in the set.

    Returns
    -------
    ndarray of bool, shape (n,)
    """
    good: np.ndarray = np.isfinite(points).all(axis=1)
    out: np.ndarray = good.copy()
    for i in np.flatnonzero(good):
        others = points[good]
        out[i] = not ((others <= points[i]).all(axis=1) & (others < points[i]).any(axis=1)).any()
    return out


class Search:
    """Runs trials and turns records into costs."""

    def __init__(
        self, config: RunConfig, goals: Sequence[Objective], repeats: int, journal: Records, **how: Any
    ) -> None:
        self.config, self.goals, self.repeats, self.journal, self.how = config, goals, repeats, journal, how
        self.target = getattr(config.loop.temperature.config, "target_nats", None)

    def evaluate(self, points: Sequence[Point], first: int = 0) -> list[tuple[np.ndarray, str]]:
        """Return (costs, shape (objectives, repeats), and error or "") of each point, over repeats from ``first``."""
        repeats = range(first, first + self.repeats)
        carry_out(self.journal, [(point, r) for point in points for r in repeats], **self.how)
        return [self._costs(point, repeats) for point in points]

    def _costs(self, point: Point, repeats: range) -> tuple[np.ndarray, str]:
        out = np.full((len(self.goals), len(repeats)), np.nan)
        for column, repeat in enumerate(repeats):
            record = self.journal.records[point.id, repeat]
            if record["set"] != results.plain(dict(point.settings)):
                raise BadInputError(
                    "the journal holds other settings for this trial",
                    where="tune",
                    field=f"trial {point.id}",
                    value=record["set"],
                    allowed=str(dict(point.settings)),
                    remedy="resume with the versions that began it, or start in another folder",
                )
            if "error" in record:
                return out, str(record["error"])
            given = self.journal.records[0, repeat]["metrics"]
            for row, goal in enumerate(self.goals):
                out[row, column] = goal.cost(record["metrics"], given, self.target)
                if not math.isfinite(out[row, column]):
                    return np.full_like(out, np.nan), f"{goal.name} is undefined in repeat {repeat}"
        return out, ""
