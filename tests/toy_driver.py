"""A driver without model or cost model: every step lasts one second; entropies come from the request and the token."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from entropic_ctl.config import EngineConfig, LawSpec, LoopConfig
from entropic_ctl.loop import Loop
from entropic_ctl.pruning.laws import off
from entropic_ctl.scheduling.base import ScheduleView, SchedulingConfig
from entropic_ctl.signals import Finish, FinishReason, Request, StepPlan, StepResult
from entropic_ctl.temperature import fixed
from entropic_ctl.temperature.base import TemperatureConfig


class Integral:
    """A minimal law with memory: u falls when the last tempered entropy was above 1 nat."""

    integral_action = True

    def __init__(self) -> None:
        self.config = TemperatureConfig(temperature=0.8)
        self.updates = 0

    def start(self) -> float:
        return float(np.log(0.8))

    def temper(self, u: Any, view: Any) -> tuple[Any, Any, Any]:
        temperature = np.exp(u) if isinstance(u, np.ndarray) else u.exp()
        return temperature, *view.at(temperature)

    def update(self, u: Any, tempered_entropy: Any) -> Any:
        self.updates += len(u)
        return np.clip(u - 0.05 * (tempered_entropy - 1.0), -1.2, 0.47)


class Scored:
    """A macro policy from a function of the view."""

    def __init__(self, score: Callable[[ScheduleView], Any], **parameters: int) -> None:
        self.config = SchedulingConfig(**parameters)
        self._score = score

    def score(self, view: ScheduleView) -> Any:
        return np.asarray(self._score(view), np.float64)


def make(engine: EngineConfig, *, micro: Any = None, macro: Any = None, recorder: Any = None) -> Loop:
    """A loop with any of its laws replaced by an object."""
    defaults = LoopConfig().build()
    laws = (micro or defaults[0], defaults[1], macro or defaults[2])
    return Loop(LoopConfig(), engine, 100, uncertified=True, recorder=recorder, laws=laws)


def entropy_of(request_id: int, index: int) -> float:
    """A fixed pseudo-random entropy in [0, 3) of the index-th output token."""
    return float(np.random.default_rng([request_id, index]).random() * 3)


class Rows:
    """A view whose tempered entropy is T times the model entropy."""

    def __init__(self, entropy: Any) -> None:
        self.model_entropy = entropy

    def at(self, temperature: Any) -> tuple[Any, Any]:
        return self.model_entropy * temperature, self.model_entropy * 0 + 0.5


@dataclasses.dataclass
class Trace:
    """What a drive saw."""

    plans: list[StepPlan] = dataclasses.field(default_factory=list)
    finished: list[Finish] = dataclasses.field(default_factory=list)
    token_times: dict[int, list[float]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    temperatures: dict[int, list[float]] = dataclasses.field(default_factory=lambda: defaultdict(list))

    def reasons(self) -> dict[int, FinishReason]:
        return {finish.id: finish.reason for finish in self.finished}

    def preemptions(self, request_id: int) -> int:
        return sum(int((plan.preempted == request_id).sum()) for plan in self.plans)


def step(loop: Loop, now: float, trace: Trace, check: Callable[[Loop, StepPlan], None] | None = None) -> None:
    """Run one iteration from ``now`` to ``now + 1``."""
    plan = loop.plan(now)
    trace.plans.append(plan)
    if check is not None:
        check(loop, plan)
    if plan.n_rows == 0:
        return
    ids = plan.ids[plan.samples]
    entropies = np.array([entropy_of(i, len(trace.token_times[i])) for i in ids.tolist()])
    tempered = loop.temper(Rows(entropies))
    result = StepResult(
        step=plan.step,
        start_s=now,
        end_s=now + 1.0,
        token_ids=ids,
        tokens=np.full(ids.shape[0], -1),
        temperature=tempered.temperature,
        model_entropy=tempered.model_entropy,
        tempered_entropy=tempered.tempered_entropy,
        varentropy=tempered.varentropy,
    )
    for i, temperature in zip(ids.tolist(), tempered.temperature.tolist(), strict=True):
        trace.token_times[i].append(now + 1.0)
        trace.temperatures[i].append(temperature)
    trace.finished.extend(loop.observe(result))


def drive(
    loop: Loop,
    requests: list[Request],
    *,
    limit: int = 5000,
    check: Callable[[Loop, StepPlan], None] | None = None,
) -> Trace:
    """Submit by arrival time and iterate until nothing is left; fail after ``limit`` iterations."""
    trace, now, waiting = Trace(), 0.0, list(requests)
    while waiting or loop.live or loop.backlog:
        while waiting and waiting[0].arrival_s <= now:
            refused = loop.submit(waiting.pop(0))
            if refused is not None:
                trace.finished.append(refused)
        step(loop, now, trace, check)
        now += 1.0
        if len(trace.plans) >= limit:
            raise AssertionError(f"not finished after {limit} iterations")
    return trace


def check_invariants(loop: Loop, plan: StepPlan) -> None:
    """Properties every plan must have, whatever the policy."""
    batcher, engine = loop.batcher, loop.batcher.engine
    slots, pages, pool = batcher.slots, batcher.pages, batcher.pages.pool
    assert (loop.live > 0) == (plan.n_rows > 0)  # something runs whenever something is live (S8)
    assert plan.n_rows <= engine.max_batch
    assert int(plan.n_tokens.sum()) <= engine.max_batch_tokens
    assert (plan.n_tokens >= 1).all()
    decode = plan.context >= slots.prompt[plan.slots]
    assert (plan.n_tokens <= max(1, engine.prefill_chunk)).all()
    end = plan.context + plan.n_tokens
    assert (end <= slots.known[plan.slots]).all()
    assert np.array_equal(plan.samples, end == slots.known[plan.slots])
    assert (plan.theta_nats[~decode] == 0).all()
    assert (pages.count[plan.slots] == -(-end // engine.page_tokens)).all() or engine.prefix_caching
    assert len(set(plan.ids.tolist())) == plan.n_rows
    for left in (plan.paused, plan.preempted):
        assert not set(plan.ids.tolist()) & set(left.tolist())
    held = [page for slot in slots.live.tolist() for page in pages.view[slot, : pages.count[slot]].tolist()]
    assert pool.used == len(set(held))
    if not engine.prefix_caching:
        assert len(set(held)) == len(held)
    assert not plan.block_table.flags.writeable


__all__ = [
    "Integral",
    "LawSpec",
    "Rows",
    "Scored",
    "Trace",
    "check_invariants",
    "drive",
    "fixed",
    "make",
    "off",
    "step",
]
