"""What holds for every macro policy on offer: order, waiting bound, pages, replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_reference import REFERENCE, Fair, Row, World
from toy_driver import Trace, check_invariants, drive, entropy_of, step

from entropic_ctl import config as configs
from entropic_ctl import registry
from entropic_ctl.config import RunConfig
from entropic_ctl.loop import Loop, Recorder
from entropic_ctl.ordering import wait_bound
from entropic_ctl.replay import replay
from entropic_ctl.signals import Request

POLICIES = registry.names("entropic_ctl.scheduling")
VARIANTS = [
    *((name, {}) for name in POLICIES),
    ("fair", {"prompt_weight": 0.0, "output_weight": 1.0}),
    ("sjf", {"prior_tokens": 3.0}),
    ("srpt", {"prior_tokens": 3.0}),
    ("mlfq", {"base_steps": 2.0, "levels": 4}),
    ("mlfq", {"base_steps": 0.1, "levels": 6, "entry": "skip", "boost_s": 7.0}),
    ("qoe", {"ttft_s": 4.0, "reading_tokens_per_s": 0.4, "horizon_s": 5.0}),
    ("entropic", {"expected_output_tokens": 5.0, "latency_objective_s": 3.0}),
]
each_policy = pytest.mark.parametrize("name", POLICIES)
each_variant = pytest.mark.parametrize(("name", "parameters"), VARIANTS, ids=str)


def setup(name: str, engine: dict[str, Any], **parameters: Any) -> RunConfig:
    return configs.from_mapping({"engine": engine, "loop": {"scheduling": {"policy": name, **parameters}}})


def loop_of(run: RunConfig, recorder: Recorder | None = None) -> Loop:
    return Loop(run.loop, run.engine, 100, recorder=recorder)


workloads = st.lists(
    st.tuples(
        st.integers(0, 20), st.integers(1, 14), st.integers(1, 12), st.sampled_from([-1, 0, 1, 2]), st.integers(0, 9)
    ),
    min_size=1,
    max_size=12,
)  # fmt: skip


def requests_of(workload: list[tuple[int, int, int, int, int]]) -> list[Request]:
    return [
        Request(i, float(at), prompt, output, client=client, expected_tokens=expected)
        for i, (at, prompt, output, client, expected) in enumerate(sorted(workload, key=lambda w: w[0]))
    ]


def test_every_policy_has_a_reference() -> None:
    assert set(REFERENCE) == set(POLICIES)


@each_variant
@settings(max_examples=25)
@given(workload=workloads, batch=st.integers(1, 3), limit=st.sampled_from([3, 9, 10**6]))
def test_s13_with_quantum_1_each_step_serves_the_head_of_a_full_sort(
    name: str,
    parameters: dict[str, Any],
    workload: list[tuple[int, int, int, int, int]],
    batch: int,
    limit: int,
) -> None:
    """S13: who runs is compared with a plain sort, by scores that an independent model of the requests computes."""
    engine = {"page_tokens": 4, "pages": 500, "max_batch": batch, "max_batch_tokens": 48, "prefill_chunk": 48}
    run = setup(name, engine, quantum_steps=1, wait_limit_steps=limit, **parameters)
    loop, trace, reference = loop_of(run), Trace(), REFERENCE[name](run.loop.scheduling.config)
    scores, drawn, score = loop._score, [], dict.fromkeys(range(12), 0.0)
    loop._score = lambda slots: drawn.append(1) or scores(slots)  # type: ignore[method-assign,func-returns-value]
    live: dict[int, Row] = {}
    waiting, now = requests_of(workload), 0.0
    while waiting or live:
        while waiting and waiting[0].arrival_s <= now:
            r = waiting.pop(0)
            loop.submit(r)
            live[r.id] = Row(r.id, r.arrival_s, r.prompt_tokens, r.max_new_tokens, r.client, r.expected_tokens)
        if live:
            world = World(now, float(len(trace.plans) > 0), 48, 500, 4)
            drawn.clear()
            step(loop, now, trace, check_invariants)
            if drawn:
                score |= reference(list(live.values()), world)
            else:  # nobody has to wait, so no order is drawn
                assert len(live) <= batch

            def key(row: Row, score: dict[int, float] = score) -> tuple[int, float, int]:
                return (0, -row.waited, row.id) if row.waited >= limit else (1, -round(score[row.id], 10), row.id)

            head = sorted(live.values(), key=key)[:batch]
            assert set(trace.plans[-1].ids.tolist()) == {row.id for row in head}
            for row in live.values():
                row.waited = 0 if row in head else row.waited + 1
            for row in head:
                if isinstance(reference, Fair):
                    reference.served(row)
                row.entropies.append(entropy_of(row.id, row.generated))
                row.started, row.generated = True, row.generated + 1
                if row.generated == row.limit:
                    del live[row.id]
        now += 1.0
        assert now < 400


@each_variant
@pytest.mark.parametrize(("limit", "quantum"), [(7, 1), (5, 4)])
def test_s13_nobody_waits_longer_than_the_bound_under_a_stream_of_better_jobs(
    name: str, parameters: dict[str, Any], limit: int, quantum: int
) -> None:
    """S13: one seat; a long job (late, well fed, predicted long) against a new short one every second."""
    run = setup(
        name,
        {"max_batch": 1, "max_batch_tokens": 8, "max_live": 4, "pages": 400, "page_tokens": 4},
        wait_limit_steps=limit,
        quantum_steps=quantum,
        **parameters,
    )
    loop, trace = loop_of(run), Trace()
    waits: list[int] = []

    def check(loop_: Loop, plan: Any) -> None:
        check_invariants(loop_, plan)
        slots = loop.batcher.slots
        waits.append(int((plan.step - slots.last_run[slots.live]).max(initial=0)))

    loop.submit(Request(0, 0.0, 8, 30, client=0, expected_tokens=30))
    for now in range(120):
        loop.submit(Request(now + 1, float(now), 1, 1, client=now + 1, expected_tokens=1))
        step(loop, float(now), trace, check)
    assert max(waits) <= wait_bound(4, 1, limit, quantum)
    if name in ("sjf", "srpt") and not parameters:
        assert max(waits) >= limit  # the policy alone would starve it: the bound is what serves it


@each_variant
@pytest.mark.parametrize("quantum", [1, 3])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_s14_no_thrashing(name: str, parameters: dict[str, Any], quantum: int, batch: int) -> None:
    """S14: S1 and a third request of equal standing; 4 pages of 4 tokens."""
    engine = {"page_tokens": 4, "pages": 4, "max_batch": batch}
    trace = drive(
        loop_of(setup(name, engine, quantum_steps=quantum, **parameters)),
        [Request(i, 0.0, 4, 8, client=i, expected_tokens=8) for i in range(3)],
        limit=80,
        check=check_invariants,
    )
    assert all(len(trace.token_times[i]) == 8 for i in range(3))
    assert max(trace.preemptions(i) for i in range(3)) <= 2


@each_policy
def test_s5_s6_cached_prefixes_survive_any_order(name: str) -> None:
    """S5, S6: a prefix of 2 pages in a pool of 4: reused with 2 new pages; only a whole, contiguous prefix is."""
    run = setup(name, {"page_tokens": 4, "pages": 4, "prefix_caching": True, "max_batch_tokens": 16})
    loop = loop_of(run)
    drive(loop, [Request(0, 0.0, 8, 1, prefix_hashes=(1, 2))], check=check_invariants)
    trace = drive(loop, [Request(1, 0.0, 16, 1, prefix_hashes=(1, 2, 7, 8))], check=check_invariants)
    assert (trace.plans[0].context.tolist(), trace.plans[0].n_tokens.tolist()) == ([8], [8])
    trace = drive(loop, [Request(2, 0.0, 20, 1, prefix_hashes=(1, 2, 9, 10, 11))])  # 5 pages never fit
    assert [str(finish.reason) for finish in trace.finished] == ["rejected"]
    trace = drive(loop, [Request(3, 0.0, 9, 1, prefix_hashes=(1, 2))], check=check_invariants)
    assert trace.plans[0].context.tolist() == [8]  # still there
    trace = drive(loop, [Request(4, 0.0, 9, 1, prefix_hashes=(5, 2))], check=check_invariants)
    assert trace.plans[0].context.tolist() == [0]  # page 2 alone is no prefix
    assert loop.batcher.pages.pool.used == 0


@each_variant
def test_a_log_replays_bit_for_bit(name: str, parameters: dict[str, Any], tmp_path: Path) -> None:
    """State that outlives requests (counters, boosts) comes back from the calls alone; preemptions, cancellations."""
    engine = {"pages": 12, "page_tokens": 4, "max_batch": 4, "max_batch_tokens": 16, "max_live": 8, "prefill_chunk": 8}
    run = setup(name, engine, quantum_steps=2, wait_limit_steps=9, **parameters)
    path, rng = tmp_path / "run.jsonl", np.random.default_rng(5)
    with Recorder(path) as recorder:
        loop, trace, now = loop_of(run, recorder), Trace(), 0.0
        for i in range(30):
            loop.submit(Request(i, now, 5 + i % 13, 4 + i % 17, client=int(rng.integers(-1, 4)), expected_tokens=i % 9))
            for _ in range(int(rng.integers(0, 4))):
                step(loop, now, trace)
                now += 1.0
            if i % 10 == 9:
                loop.cancel(i - 1)
        while loop.live or loop.backlog:
            step(loop, now, trace)
            now += 1.0
    assert sum(plan.preempted.shape[0] for plan in trace.plans) > 0
    report = replay(path, tolerance=0.0)
    assert report.equal, report.difference
    assert report.steps == len(trace.plans)
