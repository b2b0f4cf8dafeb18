"""Two thousand mixed requests under everything that can go wrong at once, each compared with its run alone.

Cancelled at random (before arrival, waiting, running, from inside the text callback), preempted (a pool of 30 pages for
24 live requests), paused, prefilled in chunks, sharing prefixes that are identical, diverge inside a page, or end on a
page boundary; logits overwritten with NaN or infinities for some; a prompt token whose embedding is NaN, so that keys
and values of whole pages are; stop strings, allowed sets, penalties, greedy and sampled.

Tolerance. A row's float32 logits depend on its company in their last bits only (sums in another order, here below
2e-5), so a finished text equals that of the request alone, token for token, except from a token on whose choice flips
under changes of ``NEAR`` in the logits. With these seeds no text parts at all. Under pruning, rounding may also flip
the choice of a page, which moves logits by what the budget allows: there one text in a hundred may part. And a request
preempted under pruning is recomputed exactly, so its cache differs from the pruned steps it redoes: it is compared up
to its first preemption.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import byte_tokenizer, tiny_llama

from backends import models
from backends.engine import Engine
from backends.jobs import Output
from backends.sampling import SamplingParams, process, sample
from entropic_ctl import config as configs
from entropic_ctl.metrics import Metrics
from entropic_ctl.signals import FinishReason, StepPlan, StepResult

pytestmark = pytest.mark.usefixtures("one_thread")

POISON = 255  # this token's embedding is NaN
REQUESTS, CASES, NEAR = 1000, 90, 1e-4
LOOP: dict[str, Any] = {
    "temperature": {"law": "feedback", "target_nats": 2.0, "gain": 0.05},
    "scheduling": {"policy": "entropic", "quantum_steps": 3, "wait_limit_steps": 40},
}
PRUNED = LOOP | {
    "pruning": {
        "law": "budget", "theta_nats": 0.1, "theta_wide_nats": 0.4, "dense_layers": 0, "recent_pages": 1,
        "sink_pages": 1,
    }
}  # fmt: skip
CROWDED = {
    "pages": 30, "page_tokens": 4, "max_batch": 12, "max_batch_tokens": 40, "prefill_chunk": 9, "max_live": 24,
    "prefix_caching": True,
}  # fmt: skip
ALONE = CROWDED | {"pages": 30, "prefix_caching": False, "prefill_chunk": 40}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is asked for; many requests ask for the same."""

    prompt: tuple[int, ...]
    params: SamplingParams


class Ticks:
    """A clock that advances by a tenth of a millisecond per look."""

    t = 0.0

    def __call__(self) -> float:
        self.t += 1e-4
        return self.t

    def sleep(self, seconds: float) -> None:
        self.t += seconds


class Sabotaged(Engine):
    """Overwrites the logits of chosen requests at a chosen token; remembers where requests were preempted."""

    def prepare(self, sabotage: dict[int, tuple[int, float, bool]]) -> None:
        self.sabotage, self.preempted, self.paused, self.kept = sabotage, {}, 0, []

    def _execute(self, plan: StepPlan, on_text: Any) -> StepResult:
        self.plan = plan
        self.paused += plan.paused.size
        for number in plan.preempted.tolist():
            self.preempted.setdefault(number, len(self.outputs[number].token_ids))
        result = super()._execute(plan, on_text)
        self.kept += result.kept_fraction.tolist()
        return result

    def _forward(self, batch: Any, tokens: Any) -> torch.Tensor:
        logits = super()._forward(batch, tokens)
        for row, number in enumerate(self.plan.ids[self.plan.samples].tolist()):
            at, value, everywhere = self.sabotage.get(number, (-1, 0.0, False))
            if len(self.outputs[number].token_ids) == at:
                logits[row, slice(None) if everywhere else slice(100, 101)] = value
        return logits


@pytest.fixture(scope="module")
def model() -> models.LoadedModel:
    network = tiny_llama()
    with torch.no_grad():
        network.model.embed_tokens.weight[POISON] = torch.nan
    return models.wrap(network, byte_tokenizer())


def engine_of(model: models.LoadedModel, loop: dict[str, Any], limits: dict[str, Any], sabotage: Any = None) -> Any:
    run, ticks = configs.from_mapping({"engine": limits, "loop": loop}), Ticks()
    metrics = Metrics(limits["page_tokens"])
    engine = Sabotaged(run, model, uncertified=True, metrics=metrics, clock=ticks, sleep=ticks.sleep)
    engine.prepare(sabotage or {})
    return engine


def cases(rng: np.random.Generator) -> list[Case]:
    """Prompts that share their beginnings, in all ways; every kind of parameters."""
    stems = [rng.integers(0, POISON, 44).tolist() for _ in range(5)]
    letters, found = tuple(range(97, 123)), []
    for i in range(CASES):
        stem, shared = stems[rng.integers(5)], int(rng.choice([0, 4, 8, 11, 16, 30, 32, 40]))
        prompt = stem[:shared] + rng.integers(0, POISON, int(rng.integers(0 if shared else 1, 12))).tolist()
        if i % 15 == 7:
            prompt[int(rng.integers(len(prompt)))] = POISON
        kinds: list[dict[str, Any]] = [
            {"greedy": True},
            {"greedy": True, "allowed": letters, "stop": ("qu", "e")},
            {"allowed": letters, "stop": ("xy", "a")},
            {"top_k": 20, "repetition_penalty": 1.3},
            {"top_p": 0.9, "min_p": 0.02},
            {"greedy": True, "repetition_penalty": 0.7},
            {},
        ]
        params = SamplingParams(max_new_tokens=int(rng.integers(1, 13)), seed=i, **kinds[i % len(kinds)])
        found.append(Case(tuple(prompt), params))
    found.append(Case(tuple(stems[0] + stems[1] + stems[2]), SamplingParams(max_new_tokens=2)))  # exceeds the pool
    return found


def alone(model: models.LoadedModel, loop: dict[str, Any], case: Case) -> Output:
    engine = engine_of(model, loop, ALONE)
    engine.submit(list(case.prompt), case.params)
    return engine.run()[0]


def close_call(model: models.LoadedModel, loop: dict[str, Any], case: Case, index: int) -> bool:
    """Whether the request's ``index``-th token, alone, flips under changes of ``NEAR`` in its logits."""
    engine, seen = engine_of(model, loop, ALONE), []
    engine._probe = lambda plan, rows, logits: seen.append(logits.clone())
    engine.submit(list(case.prompt), case.params)
    while len(engine.outputs[0].token_ids) <= index:
        result = engine.step()
    known, torch_seed = [list(case.prompt) + engine.outputs[0].token_ids[:index]], torch.manual_seed(0)
    moved = [seen[-1], *(seen[-1] + NEAR * torch.randn(seen[-1].shape, generator=torch_seed) for _ in range(64))]
    greedy = np.array([case.params.greedy])
    tokens = {
        int(sample(process(x, [case.params], known), result.temperature, greedy, [case.params], [index])[0])
        for x in moved
    }
    return len(tokens) > 1


@pytest.mark.parametrize(("loop", "seed"), [(LOOP, 1), (PRUNED, 2)], ids=["dense", "pruned"])
def test_a_thousand_mixed_requests_end_as_they_do_alone(model: models.LoadedModel, loop: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = cases(rng)
    picks = rng.integers(0, len(pool), REQUESTS)
    bad = (float("nan"), float("inf"), float("-inf"))
    sabotage = {}
    for i in np.flatnonzero(rng.random(REQUESTS) < 0.08).tolist():
        value = bad[int(rng.integers(3))]
        sabotage[i] = int(rng.integers(0, 6)), value, value == bad[2] or bool(rng.integers(2))
    engine = engine_of(model, loop, CROWDED, sabotage)
    arrival, hasty = 0.0, set()
    for i, pick in enumerate(picks.tolist()):
        arrival += float(rng.exponential(2e-4))
        engine.submit(list(pool[pick].prompt), pool[pick].params, arrival_s=arrival)
        if rng.random() < 0.05:
            hasty.add(i)  # cancelled by its own text

    def on_text(number: int, _text: str) -> None:
        if number in hasty:
            engine.cancel(number)
            engine.cancel(int(rng.integers(REQUESTS)))  # and somebody else, perhaps in the same step

    while not engine.idle:
        engine.step(on_text=on_text)
        if rng.random() < 0.05:
            live = list(engine._jobs)
            engine.cancel(live[int(rng.integers(len(live)))] if live else 0)
    outputs = [engine.outputs[i] for i in range(REQUESTS)]
    nothing_left(engine)
    assert {output.finish.reason for output in outputs} == set(FinishReason) - {FinishReason.CAPACITY}
    assert len(engine.preempted) > 100
    assert engine.paused > 20
    assert engine.loop.batcher.pages.pool.remembered_pages > 0
    assert (min(engine.kept) < 0.8) == ("pruning" in loop)
    assert compare(model, loop, engine, [pool[i] for i in picks], outputs) > 0.6 * REQUESTS  # not cut by preemption


def nothing_left(engine: Any) -> None:
    batcher, policy = engine.loop.batcher, engine.loop.policy
    pool = batcher.pages.pool
    assert pool.used == 0
    assert all(pool.references(page) == 0 for page in range(pool.pages))
    assert not engine._jobs
    assert not engine._waiting
    assert engine.loop.live == engine.loop.backlog == 0
    assert not batcher.slots.slot_of
    assert not batcher.slots.hashes
    assert not policy.active.any()
    assert not policy.u.any()
    assert engine.metrics.live == 0
    assert set(engine.outputs) == set(range(REQUESTS))
    counted = engine.metrics.requests_table()["output_tokens"]
    assert counted.sum() == sum(len(output.token_ids) for output in engine.outputs.values())


def compare(
    model: models.LoadedModel, loop: dict[str, Any], engine: Any, asked: list[Case], outputs: list[Output]
) -> int:
    """Compare every output with the request's run alone; return how many were compared in full."""
    want: dict[Case, Output] = {case: alone(model, loop, case) for case in set(asked)}
    parted, whole, pruned = 0, 0, "pruning" in loop
    for number, (case, output) in enumerate(zip(asked, outputs, strict=True)):
        solo, got, reason = want[case], output.token_ids, output.finish.reason
        cut = reason in (FinishReason.CANCELLED, FinishReason.EMPTY_SUPPORT)
        if reason is FinishReason.EMPTY_SUPPORT and POISON not in [*case.prompt, *got]:
            assert len(got) == engine.sabotage[number][0]
        same = min(len(got), engine.preempted.get(number, len(got))) if pruned else len(got)
        expected = solo.token_ids[: len(got)] if cut else solo.token_ids
        first = next((i for i in range(same) if i >= len(expected) or got[i] != expected[i]), None)
        if first is not None:
            parted += 1
            assert pruned or close_call(model, loop, case, first), (number, got, expected)
        elif same == len(got):
            whole += 1
            assert len(got) == len(expected), (number, got, expected)
            assert cut or (reason, output.text) == (solo.finish.reason, solo.text)
    assert parted <= REQUESTS // 100
    return whole
