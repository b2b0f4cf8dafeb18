"""The ablation as a paired experiment, the same in every world.

A *world* is a function (arm, loop, seed) -> one row of numbers. Every arm runs with the same list of seeds (common
random numbers), arms are interleaved within a repeat and their order rotates, so that drift of the machine falls on all
arms alike. Out of it come two tables: ``runs`` (one row per world, arm and repeat, measured) and ``effects`` (ratio to
baseline with a 95% interval and a verdict on the paper's claim).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from entropic_ctl.config import LoopConfig
from entropic_ctl.errors import BadInputError
from paper_repro import verdicts
from paper_repro.claims import ARMS, BASELINE, CLAIMS, claim
from sim.streams import repeat_seeds as seeds

__all__ = [
    "METRICS",
    "Measure",
    "Metric",
    "Progress",
    "ablation",
    "claims_by_metric",
    "effects",
    "seeds",
    "stacked",
    "synergy",
]

Measure = Callable[[str, LoopConfig, int], Mapping[str, float]]
"""(arm, loop, seed) -> measurements by column name; absent columns become NaN."""
Progress = Callable[[str, float], None]
"""(what is being done, share of the whole done in [0, 1])."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A column of the runs table that is compared with the baseline.

    ``claim`` is the metric of the paper that it answers, "" if none.
    """

    name: str
    column: str
    title: str
    claim: str
    higher_is_better: bool


METRICS: tuple[Metric, ...] = (
    Metric("latency", "latency_s", "mean end-to-end latency", "latency", higher_is_better=False),
    Metric("p99 latency", "latency_p99_s", "99th-percentile end-to-end latency", "", higher_is_better=False),
    Metric("longest wait", "longest_wait_s", "longest time a request went unserved", "", higher_is_better=False),
    Metric("TTFT", "ttft_s", "mean time to first token", "", higher_is_better=False),
    Metric("TPOT", "tpot_s", "mean time per output token", "", higher_is_better=False),
    Metric("throughput", "throughput_tok_s", "output tokens per second", "throughput", higher_is_better=True),
    Metric("dτ/d second", "tau_per_s", "entropic efficiency per second", "efficiency", higher_is_better=True),
    Metric("dτ/d FLOP", "tau_per_flop", "entropic efficiency per FLOP", "efficiency", higher_is_better=True),
    Metric("dτ/d KV byte", "tau_per_kv_byte", "entropic efficiency per KV byte", "efficiency", higher_is_better=True),
    Metric("τ", "tau_nats", "entropic time", "", higher_is_better=True),
    Metric("KV bytes read", "kv_bytes", "KV-cache bytes read", "", higher_is_better=False),
    Metric(
        "entropy variance", "entropy_variance", "variance of tempered entropy, per sequence", "", higher_is_better=False
    ),
    Metric("quality", "quality", "exp(-KL to dense) per token", "quality", higher_is_better=True),
)


def claims_by_metric() -> dict[str, np.ndarray]:
    """Return the paper's claims under the names of our metrics (one claim may be answered by several).

    Columns ``arm``, ``metric``, ``paper``, ``source`` (always "paper").
    """
    said = [(metric.name, item) for metric in METRICS for item in CLAIMS if item.metric == metric.claim]
    return {
        "arm": np.array([item.arm for _, item in said]),
        "metric": np.array([name for name, _ in said]),
        "paper": np.array([item.paper for _, item in said]),
        "source": np.array(["paper"] * len(said)),
    }


def ablation(
    worlds: Mapping[str, Measure],
    arms: Mapping[str, LoopConfig],
    repeats: Mapping[str, int],
    root_seed: int,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """Run every arm in every world and return the ``runs`` table.

    Parameters
    ----------
    worlds : mapping
        Name ("simulation", "engine") to measuring function.
    arms : mapping
        Arm to loop; must hold the baseline.
    repeats : mapping
        World to number of repeats (>= 1).
    root_seed : int
    progress : callable, optional

    Returns
    -------
    dict of ndarray
        ``world``, ``arm``, ``repeat``, ``seed`` and one float64 column per measured quantity (NaN where absent).
    """
    if BASELINE not in arms:
        raise BadInputError("no baseline among the arms", field="arms", value=list(arms), allowed=f"{BASELINE!r}, ...")
    rows: list[tuple[str, str, int, int, Mapping[str, float]]] = []
    total = sum(len(arms) * repeats[world] for world in worlds)
    names = list(arms)
    for world, measure in worlds.items():
        for repeat, seed in enumerate(seeds(root_seed, repeats[world])):
            turn = repeat % len(names)
            for arm in names[turn:] + names[:turn]:
                if progress is not None:
                    progress(f"{world}: {arm}, repeat {repeat + 1} of {repeats[world]}", len(rows) / total)
                rows.append((world, arm, repeat, seed, measure(arm, arms[arm], seed)))
    measured = sorted({name for *_, values in rows for name in values})
    table: dict[str, np.ndarray] = {
        "world": np.array([row[0] for row in rows]),
        "arm": np.array([row[1] for row in rows]),
        "repeat": np.array([row[2] for row in rows], np.int64),
        "seed": np.array([row[3] for row in rows], np.int64),
    }
    for name in measured:
        table[name] = np.array([_number(row[4].get(name)) for row in rows], float)
    return table


def stacked(*tables: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return runs tables on top of each other; a column that one lacks is NaN there."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {
        name: np.concatenate([table.get(name, np.full(table["arm"].shape[0], np.nan)) for table in tables])
        for name in names
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _of(runs: Mapping[str, np.ndarray], world: str, arm: str, column: str) -> np.ndarray:
    """Values of a column for one arm, in order of repeat."""
    pick = (runs["world"] == world) & (runs["arm"] == arm)
    if column not in runs:
        return np.full(int(pick.sum()), np.nan)
    return runs[column][pick][np.argsort(runs["repeat"][pick], kind="stable")]


def effects(
    runs: Mapping[str, np.ndarray], not_identifiable: Callable[[str, str, str], str] | None = None
) -> dict[str, np.ndarray]:
    """Compare every arm with the baseline of its world.

    Parameters
    ----------
    runs : table
        From :func:`ablation`.
    not_identifiable : callable, optional
        (world, arm, metric) to the reason why that world cannot decide the claim, or "".

    Returns
    -------
    dict of ndarray
        ``world``, ``arm``, ``metric``, ``ratio``, ``low``, ``high``, ``pairs``, ``verdict``, ``reason``; the last two
        are empty where the paper claims nothing.
    """
    out: dict[str, list[object]] = {
        name: [] for name in ("world", "arm", "metric", "ratio", "low", "high", "pairs", "verdict", "reason")
    }
    present = [str(world) for world in dict.fromkeys(runs["world"].tolist())]
    for world in present:
        for arm in [a for a in ARMS if a != BASELINE and ((runs["arm"] == a) & (runs["world"] == world)).any()]:
            for metric in METRICS:
                effect = verdicts.paired(
                    _of(runs, world, arm, metric.column), _of(runs, world, BASELINE, metric.column)
                )
                said = claim(arm, metric.claim) if metric.claim else None
                judged = verdicts.Judgement("", "")
                if said is not None:
                    excuse = not_identifiable(world, arm, metric.name) if not_identifiable else ""
                    judged = verdicts.judge(
                        effect, said.paper, higher_is_better=said.higher_is_better, not_identifiable=excuse
                    )
                values = (world, arm, metric.name, effect.ratio, effect.low, effect.high, effect.pairs)
                for name, value in zip(out, (*values, judged.verdict, judged.reason), strict=True):
                    out[name].append(value)
    numbers = {"ratio": float, "low": float, "high": float, "pairs": np.int64}
    return {name: np.array(values, numbers.get(name)) for name, values in out.items()}


def synergy(runs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Test "super-additive" on the multiplicative scale: full / baseline over the product of the single-law ratios.

    Returns
    -------
    dict of ndarray
        ``world``, ``metric``, ``ratio``, ``low``, ``high``, ``better`` ("yes" if the interval lies on the better side
        of 1, "no" if on the worse side, "undecided" otherwise).
    """
    out: dict[str, list[object]] = {name: [] for name in ("world", "metric", "ratio", "low", "high", "better")}
    parts: Sequence[str] = ARMS[1:-1]
    for world in dict.fromkeys(runs["world"].tolist()):
        for metric in METRICS:
            if metric.name == "quality":  # a proxy that two of the three laws cannot move
                continue
            columns = [_of(runs, world, arm, metric.column) for arm in (ARMS[-1], BASELINE, *parts)]
            if any(column.size == 0 or column.shape != columns[0].shape for column in columns):
                continue
            effect = verdicts.interaction(columns[0].tolist(), [c.tolist() for c in columns[2:]], columns[1].tolist())
            if effect.pairs == 0:
                continue
            better = "undecided"
            if math.isfinite(effect.low) and (effect.low > 1 or effect.high < 1):
                better = "yes" if (effect.low > 1) == metric.higher_is_better else "no"
            values = (world, metric.name, effect.ratio, effect.low, effect.high, better)
            for name, value in zip(out, values, strict=True):
                out[name].append(value)
    numbers = {"ratio": float, "low": float, "high": float}
    return {name: np.array(values, numbers.get(name)) for name, values in out.items()}
