from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_driver import Scored, Trace, check_invariants, drive, make, step

from entropic_ctl.config import EngineConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.ordering import wait_bound
from entropic_ctl.signals import FinishReason, Request, StepResult


def engine(**values: int | bool) -> EngineConfig:
    defaults: dict[str, int | bool] = {"page_tokens": 4, "pages": 64, "max_batch": 8, "max_batch_tokens": 64}
    return EngineConfig(**(defaults | values))


def test_s1_preemption_by_recompute_keeps_the_accounts() -> None:
    loop = make(engine(pages=4))
    trace = drive(loop, [Request(0, 0.0, 4, 8), Request(1, 0.0, 4, 8)], check=check_invariants)
    assert trace.preemptions(0) + trace.preemptions(1) >= 1
    for times in (trace.token_times[0], trace.token_times[1]):
        gaps = np.diff(times)
        assert len(times) == 8
        assert len(gaps) == 7
        assert times[0] + gaps.sum() == times[-1]
    assert loop.batcher.pages.pool.used == 0
    assert set(trace.reasons().values()) == {FinishReason.LENGTH}


def test_s1_exact_timeline() -> None:
    """Pages: both hold 1 after step 0, 2 after step 1; the 9th token (step 5) needs a third: request 1 gives way.

    Request 0 ends with its 8th token in step 7; request 1 (4 + 5 known) recomputes in step 8, which samples.
    """
    loop = make(engine(pages=4))
    trace = drive(loop, [Request(0, 0.0, 4, 8), Request(1, 0.0, 4, 8)])
    assert trace.token_times[0] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert trace.token_times[1] == [1, 2, 3, 4, 5, 9, 10, 11]
    assert [plan.preempted.tolist() for plan in trace.plans] == [[], [], [], [], [], [1], [], [], [], [], []]
    again = trace.plans[8]
    assert (again.context.tolist(), again.n_tokens.tolist(), again.samples.tolist()) == ([0], [9], [True])


def test_s2_impossible_work_is_rejected_with_numbers() -> None:
    loop = make(EngineConfig(page_tokens=16, pages=50))
    trace = drive(loop, [Request(0, 0.0, 900, 5), Request(1, 0.0, 10, 5)], limit=20, check=check_invariants)
    assert trace.reasons() == {0: FinishReason.REJECTED, 1: FinishReason.LENGTH}
    detail = trace.finished[0].detail
    assert "900" in detail
    assert "800" in detail


def test_s3_a_request_that_outgrows_the_pool_ends_with_capacity() -> None:
    loop = make(EngineConfig(page_tokens=16, pages=50))
    trace = drive(loop, [Request(0, 0.0, 790, 100)], limit=40, check=check_invariants)
    assert trace.reasons() == {0: FinishReason.CAPACITY}
    assert len(trace.token_times[0]) == 11  # 790 + 11 - 1 = 800
    assert trace.preemptions(0) == 0
    assert "800" in trace.finished[0].detail


@pytest.mark.parametrize("by_context", [False, True])
def test_s4_validation_and_admission_use_one_formula(by_context: bool) -> None:
    pool = {"pages": 500, "max_context": 800} if by_context else {"pages": 50}
    loop = make(EngineConfig(page_tokens=16, **pool))
    prompts = [783, 784, 785, 799, 800, 801, 10]
    requests = [Request(i, 0.0, prompt, 1) for i, prompt in enumerate(prompts)]
    trace = drive(loop, requests, limit=60, check=check_invariants)
    served = dict.fromkeys(range(7), FinishReason.LENGTH) | {5: FinishReason.REJECTED}
    assert trace.reasons() == served


def test_s8_a_step_that_preempts_still_runs_rows() -> None:
    """check_invariants asserts rows in every plan; here the pool is so short that plans preempt all the time."""
    loop = make(engine(pages=3, page_tokens=1, max_live=3), macro=Scored(lambda v: -v.arrival_order, quantum_steps=1))
    trace = drive(loop, [Request(i, 0.0, 1, 3) for i in range(3)], limit=50, check=check_invariants)
    assert sum(plan.preempted.shape[0] for plan in trace.plans) > 0
    assert all(len(times) == 3 for times in trace.token_times.values())


def test_s13_one_slot_hostile_arrivals_start_within_the_bound_in_sorted_order() -> None:
    """Job 0 has the worst priority; one-second jobs of the best priority arrive every second.

    With quantum 1 each plan must equal the head of a full sort, done here by a separate model.
    """
    limit, live = 7, 4
    macro = Scored(lambda v: (v.arrival_order > 0).astype(float), wait_limit_steps=limit, quantum_steps=1)
    loop = make(engine(max_batch=1, max_batch_tokens=8, max_live=live), macro=macro)
    trace, queue, waited, first_run = Trace(), [], {}, {}
    for now in range(60):
        for i in [0, 1] if now == 0 else [now + 1]:
            loop.submit(Request(i, float(now), 1, 1))
            queue.append(i)
        waited = {i: waited.get(i, 0) for i in queue[:live]}
        head = min(waited, key=lambda i: (0, -waited[i], i) if waited[i] >= limit else (1, -float(i > 0), i))
        step(loop, float(now), trace, check_invariants)
        assert trace.plans[-1].ids.tolist() == [head]
        first_run[head] = now
        queue.remove(head)
        waited = {i: steps + 1 for i, steps in waited.items() if i != head}
    assert first_run[0] == limit
    assert first_run[0] <= wait_bound(live, 1, limit, 1)


@pytest.mark.parametrize("switch", range(7))
def test_s14_no_thrashing_when_an_earlier_arrival_has_not_started(switch: int) -> None:
    """Request 0 arrived first and is held back until step ``switch``; from then on all have equal priority."""
    macro = Scored(
        lambda v: np.where((v.arrival_order == 0) & (v.now_s < switch), -1.0, 0.0), wait_limit_steps=50, quantum_steps=1
    )
    loop = make(engine(pages=4, max_batch=2), macro=macro)
    trace = drive(loop, [Request(i, 0.0, 4, 8) for i in range(3)], limit=60, check=check_invariants)
    assert all(len(trace.token_times[i]) == 8 for i in range(3))
    assert max(trace.preemptions(i) for i in range(3)) <= 2
    assert sum(trace.preemptions(i) for i in range(3)) >= 1


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_s14_first_come_first_served(batch: int) -> None:
    loop = make(engine(pages=4, max_batch=batch))
    trace = drive(loop, [Request(i, 0.0, 4, 8) for i in range(3)], limit=60, check=check_invariants)
    assert all(len(trace.token_times[i]) == 8 for i in range(3))
    assert max(trace.preemptions(i) for i in range(3)) <= 2


def test_s15_a_cached_prefix_leaves_one_short_chunk_that_samples() -> None:
    config = EngineConfig(page_tokens=16, pages=128, max_batch_tokens=512, prefill_chunk=512, prefix_caching=True)
    loop = make(config)
    hashes = tuple(range(1000, 1037))
    drive(loop, [Request(0, 0.0, 600, 1, prefix_hashes=hashes)], check=check_invariants)
    trace = drive(loop, [Request(1, 0.0, 600, 1, prefix_hashes=hashes)], check=check_invariants)
    (plan,) = trace.plans
    assert (plan.context.tolist(), plan.n_tokens.tolist(), plan.samples.tolist()) == ([592], [8], [True])
    assert plan.allocated.shape == (38, 3)  # shared pages are reported too
    assert np.array_equal(plan.block_table[plan.slots[0], :38], plan.allocated[:, 2])
    assert loop.batcher.pages.pool.used == 0


@pytest.mark.parametrize(("prompt", "cached"), [(63, 48), (64, 48), (65, 64)])
def test_at_least_one_token_is_recomputed_behind_a_cached_prefix(prompt: int, cached: int) -> None:
    loop = make(EngineConfig(page_tokens=16, pages=32, prefix_caching=True))
    hashes = tuple(range(prompt // 16))
    drive(loop, [Request(0, 0.0, prompt, 2, prefix_hashes=hashes)])
    trace = drive(loop, [Request(1, 0.0, prompt, 2, prefix_hashes=hashes)], check=check_invariants)
    assert trace.plans[0].context.tolist() == [cached]
    assert trace.plans[0].n_tokens.tolist() == [prompt - cached]


def test_long_prefill_never_stalls_decodes() -> None:
    loop = make(engine(pages=200, max_batch=4, max_batch_tokens=8, prefill_chunk=8))
    trace = drive(loop, [Request(0, 0.0, 4, 40), Request(1, 0.0, 100, 2)], check=check_invariants)
    assert np.diff(trace.token_times[0]).max() == 1
    chunks = [int(plan.n_tokens[plan.ids == 1][0]) for plan in trace.plans if 1 in plan.ids]
    assert sum(chunks) == 101
    assert chunks[0] == 4  # beside the first prompt; 7 beside a decode row
    assert set(chunks[1:13]) == {7}


workloads = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 14), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=12
)


@settings(max_examples=120)
@given(
    workload=workloads,
    batch=st.integers(1, 4),
    live=st.integers(1, 6),
    limit=st.integers(1, 12),
    quantum=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    adversary=st.sampled_from(["random", "youngest", "starters", "holders"]),
    short=st.booleans(),
    caching=st.booleans(),
    chunked=st.booleans(),
)
def test_waiting_is_bounded_for_any_scores_and_nothing_leaks(
    *,
    workload: list[tuple[int, int, int, int]],
    batch: int,
    live: int,
    limit: int,
    quantum: int,
    seed: int,
    adversary: str,
    short: bool,
    caching: bool,
    chunked: bool,
) -> None:
    """W + ceil(N/B) h iterations when B rows fit the pool together, W + N h when only one does; see ordering."""
    rng = np.random.default_rng(seed)

    def score(view: object) -> np.ndarray:
        noise = rng.normal(size=view.pages.shape[0])  # type: ignore[attr-defined]
        bias = {
            "random": 0.0,
            "youngest": view.arrival_order,  # type: ignore[attr-defined]
            "starters": -view.pages,  # type: ignore[attr-defined]
            "holders": view.pages,  # type: ignore[attr-defined]
        }[adversary]
        return noise + 10.0 * bias

    most = 6  # pages of the largest request: 14 + 9 - 1 = 22 tokens of 4
    config = engine(
        pages=most if short else most * live,
        max_batch=batch,
        max_batch_tokens=batch + int(rng.integers(0, 9)) if chunked else 22 * batch,
        prefill_chunk=int(rng.integers(1, 9)) if chunked else 22,
        max_live=live,
        prefix_caching=caching,
    )
    loop = make(config, macro=Scored(score, wait_limit_steps=limit, quantum_steps=quantum))
    hold = max(quantum, 22) if chunked else quantum
    bound = wait_bound(live, 1 if short else batch, limit, hold)

    def check(loop_: object, plan: object) -> None:
        check_invariants(loop_, plan)  # type: ignore[arg-type]
        slots = loop.batcher.slots
        waited = plan.step - slots.last_run[slots.live]  # type: ignore[attr-defined]
        assert (waited <= bound).all()

    requests = [
        Request(i, float(at), prompt, output, prefix_hashes=tuple(100 * kind + k for k in range(prompt // 4)))
        for i, (at, prompt, output, kind) in enumerate(sorted(workload))
    ]
    trace = drive(loop, requests, limit=3000, check=check)
    assert {finish.id for finish in trace.finished} == set(range(len(requests)))
    for i, request in enumerate(requests):
        assert len(trace.token_times[i]) == request.max_new_tokens
    assert loop.batcher.pages.pool.used == 0
    assert loop.live == loop.backlog == 0


@given(workload=workloads, batch=st.integers(1, 4), quantum=st.integers(1, 5))
def test_a_repeated_plan_equals_the_one_decided_from_scratch(
    workload: list[tuple[int, int, int, int]], batch: int, quantum: int
) -> None:
    def run(fast: bool) -> list[list[tuple[int, ...]]]:
        macro = Scored(lambda v: np.sin(v.arrival_order * 7.0), wait_limit_steps=6, quantum_steps=quantum)
        loop = make(engine(pages=14, max_batch=batch, max_live=5), macro=macro)
        if not fast:
            loop.batcher._repeat = lambda now_s, theta: None  # type: ignore[method-assign]
        requests = [Request(i, float(w[0]), w[1], 3 * w[2]) for i, w in enumerate(sorted(workload))]
        trace = drive(loop, requests, limit=3000, check=check_invariants)
        return [
            [
                *sorted(zip(p.ids.tolist(), p.slots.tolist(), p.context.tolist(), p.n_tokens.tolist(), strict=True)),
                tuple(sorted(p.paused.tolist())),
                tuple(p.preempted.tolist()),
            ]
            for p in trace.plans
        ]

    assert run(True) == run(False)


def test_a_row_is_served_in_the_step_in_which_it_becomes_overdue() -> None:
    """One seat, W = 5, a quantum far longer: request 1 runs first in step 5, for q = 50 protected steps."""
    loop = make(engine(max_batch=1), macro=Scored(lambda v: -v.arrival_order, wait_limit_steps=5, quantum_steps=50))
    trace = drive(loop, [Request(i, 0.0, 1, 60) for i in range(2)], check=check_invariants)
    assert [plan.ids.tolist() for plan in trace.plans[:56]] == [[0]] * 5 + [[1]] * 50 + [[0]]


def test_a_row_just_served_does_not_overtake_one_that_waits_longer() -> None:
    """One seat, three rows, W = 1: everyone is overdue all the time; plain arrival order would starve row 2."""
    loop = make(engine(max_batch=1), macro=Scored(lambda v: -v.arrival_order, wait_limit_steps=1, quantum_steps=1))
    trace = drive(loop, [Request(i, 0.0, 1, 4) for i in range(3)], check=check_invariants)
    assert [plan.ids.tolist() for plan in trace.plans] == [[0], [1], [2]] * 4


def test_steady_decoding_takes_the_short_way() -> None:
    loop = make(engine(pages=200, max_live=3))
    calls = []
    decide = loop.batcher._decide
    loop.batcher._decide = lambda *a: calls.append(1) or decide(*a)  # type: ignore[method-assign,func-returns-value]
    drive(loop, [Request(i, 0.0, 5, 100) for i in range(3)])
    assert len(calls) <= 3


def test_cancel_frees_at_once_even_between_plan_and_observe() -> None:
    loop = make(engine(max_live=2))
    for i in range(3):
        loop.submit(Request(i, 0.0, 6, 5))
    plan = loop.plan(0.0)
    assert loop.backlog == 1
    assert loop.cancel(0)
    assert loop.cancel(2)
    assert not loop.cancel(2)
    assert not loop.cancel(99)
    assert loop.batcher.pages.pool.used == 2
    assert loop.live == 1
    three = np.ones(2)
    result = StepResult(
        plan.step, 0.0, 1.0, token_ids=plan.ids, tokens=plan.ids, model_entropy=three, tempered_entropy=three
    )
    assert loop.observe(result) == ()
    assert loop.policy.seen.tolist() == [0, 1]
    loop.submit(Request(0, 1.0, 6, 5))  # the id is free again
    trace = drive(loop, [])
    assert {i: len(times) for i, times in trace.token_times.items()} == {0: 5, 1: 4}


@pytest.mark.parametrize(
    ("request_", "needles"),
    [
        (Request(-1, 0.0, 4, 4), ["id", "-1"]),
        (Request(1, 0.0, 0, 4), ["request 1", "prompt_tokens", "got 0"]),
        (Request(1, 0.0, 4, 0), ["max_new_tokens", ">= 1"]),
        (Request(1, 0.0, 7, 4, prefix_hashes=(1, 2)), ["prefix_hashes", "at most 1"]),
        (Request(0, 0.0, 4, 4), ["already in the system", "got 0"]),
    ],
)
def test_bad_requests(request_: Request, needles: list[str]) -> None:
    loop = make(engine())
    loop.submit(Request(0, 0.0, 4, 4))
    with pytest.raises(BadInputError) as caught:
        loop.submit(request_)
    for needle in needles:
        assert needle in str(caught.value)


def test_protocol_errors_are_named() -> None:
    loop = make(engine())
    loop.submit(Request(0, 0.0, 4, 4))
    with pytest.raises(BadInputError, match="no such plan"):
        loop.observe(StepResult(0, 0.0, 1.0))
    plan = loop.plan(0.0)
    with pytest.raises(BadInputError, match="before observe"):
        loop.plan(1.0)
    with pytest.raises(BadInputError, match="neither a token nor a finish"):
        loop.observe(StepResult(plan.step, 0.0, 1.0))
    one = np.ones(1)
    wrong = StepResult(
        plan.step, 0.0, 1.0, token_ids=np.array([5]), tokens=np.array([1]), model_entropy=one, tempered_entropy=one
    )
    with pytest.raises(BadInputError, match="not sampled"):
        loop.observe(wrong)
    with pytest.raises(BadInputError, match="page table too large"):
        make(EngineConfig(pages=2**24, page_tokens=1, max_live=2**16))


def test_the_mean_step_duration_starts_with_the_first_one() -> None:
    loop = make(EngineConfig())
    loop.submit(Request(0, 0.0, 4, 5))
    seen = []
    for start, seconds in ((0.0, 2.0), (2.0, 1.0)):
        plan = loop.plan(start)
        loop.observe(StepResult(plan.step, start, start + seconds, plan.ids, plan.ids, *np.ones((4, 1))))
        seen.append(loop.batcher.step_s)
    assert seen == [2.0, pytest.approx(2.0 + 0.2 * (1.0 - 2.0))]
