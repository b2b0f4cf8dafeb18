"""What speculative decoding gains by rule of draft length, kind of text and way of sampling.

Every unit (prompt, seed) is decoded alone by every arm, one arm after the other, in an order that rotates from unit
to unit, so a disturbance of the machine meets all arms. The text of a unit is the same in all arms (up to the
rounding of logits where layers run in PyTorch: ``same_text`` tells), so tokens, steps and drafts compare within
units. Two times are reported: the wall time of the decode steps, and a *modelled* one that charges each step the
measured cost of a step of its size (:func:`step_costs`); the second does not feel what else the machine does.

Intervals: percentile bootstrap over units, of the ratio of sums to the arm without drafts (95%, 2,000 resamples).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from backends.draft_replay import Recorded, fit_acceptance, sensitivity
from backends.drafting import Drafted
from backends.engine import Engine
from backends.jobs import Job
from backends.models import LoadedModel
from backends.prompts import Prompt
from backends.sampling import SamplingParams
from backends.speculation_prompts import TEXT_KINDS
from entropic_ctl import config as configs
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, StepPlan, StepResult

__all__ = ["ARMS", "bench_speculation", "step_costs", "summarise"]

ARMS: dict[str, dict[str, Any]] = {
    "fixed 0": {"draft_tokens": 0},
    "fixed 2": {"draft_tokens": 2},
    "fixed 4": {"draft_tokens": 4},
    "fixed 8": {"draft_tokens": 8},
    "history": {"draft_tokens": 8, "rule": "history"},
    "entropy": {"draft_tokens": 8, "rule": "entropy"},
}
"""Arm to ``[speculation]`` settings."""
MODES: dict[str, dict[str, Any]] = {"greedy": {"greedy": True}, "sampled": {"greedy": False}}
TEMPERATURE = 0.8
_BASE = "fixed 0"
Progress = Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class _Run:
    """One unit decoded by one arm: per decode step its positions, tokens, seconds; and the drafts' fate by entropy."""

    tokens: list[int]
    positions: FloatArray
    seconds: FloatArray
    drafted: int
    accepted: int
    entropy: FloatArray  # model entropy of each token, nats
    first: list[tuple[float, float]]  # (last entropy seen, 1 if the first drafted token was accepted)


def _engine(model: LoadedModel, speculation: Mapping[str, Any], **more: Any) -> Engine:
    limits = {"pages": 64, "page_tokens": 16, "max_batch": 1, "max_batch_tokens": 1024, "prefill_chunk": 1024}
    law = {"law": "fixed", "temperature": TEMPERATURE}
    run = configs.from_mapping({"engine": limits, "speculation": dict(speculation), "loop": {"temperature": law}})
    return Engine(run, model, **more)


def _decode(engine: Engine, ids: Sequence[int], params: SamplingParams) -> _Run:
    number = engine.submit(list(ids), params)
    results: list[StepResult] = []
    while not engine.idle:
        result = engine.step()
        if result is not None and result.token_ids.shape[0]:
            results.append(result)
    first: list[tuple[float, float]] = []
    for before, after in itertools.pairwise(results):
        if after.drafted.shape[0] and after.drafted[0] > 0:
            first.append((float(before.model_entropy[-1]), float(after.token_ids.shape[0] > 1)))
    steps = results[1:]  # the first is the prefill
    return _Run(
        list(engine.outputs[number].token_ids),
        np.array([1.0 + (step.drafted[0] if step.drafted.shape[0] else 0) for step in steps]),
        np.array([step.end_s - step.start_s for step in steps]),
        engine.drafted,
        engine.accepted,
        np.concatenate([step.model_entropy for step in results]) if results else np.empty(0),
        first,
    )


class _Forced:
    """Drafts of a given length, all wrong or right as it happens: what a step costs does not depend on it."""

    def __init__(self) -> None:
        self.length = 0

    def propose(self, plan: StepPlan, jobs: Sequence[Job]) -> Drafted:
        lengths = [min(self.length, int(most)) for most in plan.n_draft]
        return Drafted([job.known[:length] for job, length in zip(jobs, lengths, strict=True)])

    def leave(self, request_id: int) -> None:
        pass


def step_costs(model: LoadedModel, ids: Sequence[int], *, most: int = 8, repeats: int = 12) -> FloatArray:
    """Return the median seconds of a decode step that verifies 0 .. ``most`` drafted tokens, batch 1.

    Parameters
    ----------
    model : LoadedModel
    ids : sequence of int
        Prompt.
    most : int
        Longest draft.
    repeats : int
        Steps per length; the lengths take turns.
    """
    drafter = _Forced()
    endless = dataclasses.replace(model, eos_ids=frozenset())
    engine = _engine(endless, {"draft_tokens": most}, drafter=drafter)
    engine.submit(list(ids), SamplingParams(max_new_tokens=(repeats + 1) * (most + 1) * (most + 1), greedy=True))
    engine.step()
    times: dict[int, list[float]] = {d: [] for d in range(most + 1)}
    for turn in range((repeats + 1) * (most + 1)):
        drafter.length = turn % (most + 1)
        result = engine.step()
        if result is not None and turn > most:
            times[int(result.drafted[0])].append(result.end_s - result.start_s)
    return np.array([float(np.median(times[d])) for d in range(most + 1)])


def _rule_costs(cost: FloatArray) -> dict[str, float]:
    """Return c and b - 1 of cost(d) = cost(0) (b + c d), d >= 1; negative ones are 0."""
    if cost.shape[0] < 3:
        return {}
    c, b = np.polyfit(np.arange(1, cost.shape[0]), cost[1:] / cost[0], 1)
    return {name: round(float(np.clip(x, 0.0, 10.0)), 3) for name, x in (("rule_cost", c), ("rule_start", b - 1))}


def _units(
    model: LoadedModel, kinds: Mapping[str, Sequence[Prompt]], repeats: int, seed: int
) -> Iterator[tuple[str, str, int, int, list[int]]]:
    """Yield (mode, kind, prompt, repeat, ids); greedy decoding has no noise to repeat."""
    for mode in MODES:
        for repeat in range(repeats if mode == "sampled" else 1):
            for kind, prompts in kinds.items():
                for number, prompt in enumerate(prompts):
                    yield mode, kind, number, seed + repeat, model.prompt_ids(prompt.text, chat=prompt.chat)


def bench_speculation(
    model: LoadedModel,
    *,
    tokens: int = 64,
    repeats: int = 2,
    seed: int = 0,
    kinds: Mapping[str, Sequence[Prompt]] = TEXT_KINDS,
    arms: Mapping[str, Mapping[str, Any]] = ARMS,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run all arms over all units.

    Parameters
    ----------
    model : LoadedModel
    tokens : int
        New tokens per unit; an end of text ends it earlier.
    repeats : int
        Seeds per prompt when sampling.
    seed : int
        The first seed.
    kinds : mapping of str to prompts
    arms : mapping of str to ``[speculation]`` settings
        ``fixed 0`` is the base of the ratios. The rules' ``rule_cost`` and ``rule_start`` are set as measured.
    progress : callable(what, share done), optional

    Returns
    -------
    dict
        ``units`` (one row per unit and arm), ``rows`` (:func:`summarise`), ``sensitivity``
        (:func:`backends.draft_replay.sensitivity` on the texts of ``fixed 0``), ``step_ms`` by drafted tokens,
        ``rule_cost`` and ``rule_start`` (least squares over 1, 2, ... drafted tokens, in steps without a draft),
        ``fit`` (a_0, h by mode, from the longest fixed arm), ``temperature``.
    """
    say = progress or (lambda _what, _share: None)
    say("cost of a step", 0.0)
    plan = list(_units(model, kinds, repeats, seed))
    most = max(int(arm["draft_tokens"]) for arm in arms.values())
    cost = step_costs(model, plan[0][-1], most=most)
    if not np.isfinite(cost).all():
        raise BadInputError(
            "the context is too short for the prompts of this benchmark",
            where=model.name,
            value=f"max_context = {model.max_context:,}",
            remedy="name a model with a longer context: --model DIR",
        )
    rule = _rule_costs(cost)
    columns: dict[str, list[Any]] = {}
    seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
    texts: list[Recorded] = []
    names = list(arms)
    for at, (mode, kind, prompt, number, ids) in enumerate(plan):
        say(f"{mode}, {kind}", at / len(plan))
        runs: dict[str, _Run] = {}
        for shift in range(len(names)):
            arm = names[(at + shift) % len(names)]
            params = SamplingParams(max_new_tokens=tokens, seed=number, **MODES[mode])
            runs[arm] = _decode(_engine(model, {**arms[arm], **rule}), ids, params)
            seen.setdefault((mode, arm), []).extend(runs[arm].first)
        texts.append(Recorded(mode, kind, ids, runs[_BASE].tokens, runs[_BASE].entropy, tokens))
        for arm in names:
            run = runs[arm]
            row = {
                "mode": mode,
                "kind": kind,
                "prompt": prompt,
                "seed": number,
                "arm": arm,
                "tokens": max(len(run.tokens) - 1, 0),  # the first comes with the prefill
                "steps": int(run.positions.size),
                "drafted": run.drafted,
                "accepted": run.accepted,
                "wall_s": float(run.seconds.sum()),
                "model_s": float(cost[run.positions.astype(int) - 1].sum()),
                "same_text": run.tokens == runs[_BASE].tokens,
            }
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
    table = {name: np.asarray(values) for name, values in columns.items()}
    longest = max(names, key=lambda name: (not arms[name].get("rule"), int(arms[name]["draft_tokens"])))
    fits = {mode: fit_acceptance(*np.array(seen[mode, longest]).T) for mode in MODES if seen.get((mode, longest))}
    return {
        "units": table,
        "rows": summarise(table, seed=seed),
        "sensitivity": sensitivity(texts, arms),
        "step_ms": (1e3 * cost).tolist(),
        **rule,
        "fit": {mode: {"rule_acceptance": a, "rule_scale_nats": h} for mode, (a, h) in fits.items()},
        "temperature": TEMPERATURE,
        "tokens": tokens,
        "repeats": repeats,
        "model": model.name,
    }


def summarise(units: Mapping[str, Any], *, seed: int = 0, resamples: int = 2000) -> list[dict[str, Any]]:
    """Return one row per (mode, kind, arm), and per (mode, "all", arm).

    Parameters
    ----------
    units : table
        As in :func:`bench_speculation`.
    seed : int
        Of the bootstrap.
    resamples : int

    Returns
    -------
    list of dict
        ``mode``, ``kind``, ``arm``, ``units``, ``tokens_per_s`` (wall), ``speedup`` (modelled) and ``wall_speedup`` to
        ``fixed 0``, each with ``_low`` and ``_high``, ``tokens_per_step``, ``drafted_per_step``, ``acceptance``
        (accepted over drafted; NaN without drafts), ``same_text`` (share of units).
    """
    table = {name: np.asarray(values) for name, values in units.items()}
    rows = []
    for mode in dict.fromkeys(table["mode"].tolist()):
        here = table["mode"] == mode
        kinds = list(dict.fromkeys(table["kind"][here].tolist()))
        for kind in [*kinds, *(["all"] if len(kinds) > 1 else [])]:
            place = here if kind == "all" else here & (table["kind"] == kind)
            base = {name: values[place & (table["arm"] == _BASE)] for name, values in table.items()}
            n = base["tokens"].shape[0]
            draw = np.random.default_rng([seed, n]).integers(0, n, (resamples, n))
            for arm in dict.fromkeys(table["arm"][place].tolist()):
                mine = {name: values[place & (table["arm"] == arm)] for name, values in table.items()}
                drafted, steps = int(mine["drafted"].sum()), int(mine["steps"].sum())
                rows.append(
                    {
                        "mode": mode,
                        "kind": kind,
                        "arm": arm,
                        "units": n,
                        "tokens_per_s": float(mine["tokens"].sum() / mine["wall_s"].sum()),
                        **_ratio("speedup", mine, base, "model_s", draw),
                        **_ratio("wall_speedup", mine, base, "wall_s", draw),
                        "tokens_per_step": float(mine["tokens"].sum() / steps) if steps else float("nan"),
                        "drafted_per_step": drafted / steps if steps else float("nan"),
                        "acceptance": float(mine["accepted"].sum()) / drafted if drafted else float("nan"),
                        "same_text": float(mine["same_text"].mean()),
                    }
                )
    return rows


def _ratio(name: str, mine: Mapping[str, Any], base: Mapping[str, Any], seconds: str, draw: Any) -> dict[str, float]:
    """Return the ratio of tokens per second, and its interval over resampled units."""

    def speed(part: Mapping[str, Any], pick: Any) -> Any:
        return part["tokens"][pick].sum(-1) / np.maximum(part[seconds][pick].sum(-1), 1e-12)

    everything = np.arange(draw.shape[1])
    ratio = speed(mine, draw) / np.maximum(speed(base, draw), 1e-12)
    low, high = np.quantile(ratio, (0.025, 0.975))
    value = float(speed(mine, everything) / max(speed(base, everything), 1e-12))
    return {name: value, f"{name}_low": float(low), f"{name}_high": float(high)}
