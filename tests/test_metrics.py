from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.clock import EntropicClock
from entropic_ctl.errors import BadInputError
from entropic_ctl.metrics import Metrics
from entropic_ctl.signals import Finish, FinishReason, Request, StepPlan, StepResult


def plan_of(
    step: int,
    ids: Sequence[int],
    slots: Sequence[int],
    *,
    context: Sequence[int] | None = None,
    n_tokens: Sequence[int] | None = None,
    samples: Sequence[bool] | None = None,
    preempted: Sequence[int] = (),
    rejected: tuple[Finish, ...] = (),
    now_s: float = 0.0,
) -> StepPlan:
    n = len(ids)
    return StepPlan(
        step,
        now_s,
        np.array(ids, np.int64),
        np.array(slots, np.int64),
        np.array([5] * n if context is None else context, np.int64),
        np.array([1] * n if n_tokens is None else n_tokens, np.int64),
        np.array([True] * n if samples is None else samples, bool),
        np.zeros(n, bool),
        np.full(n, 0.02),
        np.zeros(n, np.int64),
        np.empty(0, np.int64),
        np.array(preempted, np.int64),
        rejected,
        np.zeros((1, 1), np.int32),
        np.empty((0, 3), np.int32),
    )


def result_of(
    step: int, start: float, end: float, token_ids: Sequence[int], H: Sequence[float], rows: int, kept: float = 1.0
) -> StepResult:
    entropy = np.array(H, np.float64)
    return StepResult(
        step,
        start,
        end,
        np.array(token_ids, np.int64),
        np.full(len(token_ids), -1, np.int64),
        np.ones(len(token_ids)),
        entropy,
        0.5 * entropy,
        np.ones(len(token_ids)),
        np.full(rows, kept),
        np.full(rows, 0.001),
        np.full(rows, 0.002),
        np.full(rows, 0.01),
        kv_bytes=100.0 * rows,
        flops=10.0 * rows,
    )


def test_exact_timeline_of_two_requests() -> None:
    m = Metrics(4, keep_tokens=True, target_nats=1.0)
    m.submitted(Request(7, 0.0, 5, 3))
    m.submitted(Request(3, 0.5, 6, 2))
    done = (Finish(7, FinishReason.LENGTH), Finish(3, FinishReason.EOS))
    # step 0: 7 prefills alone; 1: both; 2: 3 alone (7 preempted); 3: 7 recomputes and ends
    m.step(plan_of(0, [7], [0], context=[0], n_tokens=[5]), result_of(0, 0.0, 1.0, [7], [3.0], 1), ())
    m.step(
        plan_of(1, [7, 3], [0, 1], context=[5, 0], n_tokens=[1, 6]), result_of(1, 1.0, 2.5, [7, 3], [1.0, 4.0], 2), ()
    )
    m.step(plan_of(2, [3], [1], preempted=[7]), result_of(2, 2.5, 3.0, [3], [2.5], 1, kept=0.5), done[1:])
    m.step(plan_of(3, [7], [0], context=[0], n_tokens=[7]), result_of(3, 3.0, 5.0, [7], [2.0], 1), done[:1])
    t = m.requests_table()
    assert t["id"].tolist() == [7, 3]
    assert t["status"].tolist() == ["length", "eos"]
    assert t["output_tokens"].tolist() == [3, 2]
    np.testing.assert_allclose(t["ttft_s"], [1.0, 2.0])
    np.testing.assert_allclose(t["e2e_s"], [5.0, 2.5])
    np.testing.assert_allclose(t["gap_sum_s"], [4.0, 0.5])
    np.testing.assert_allclose(t["tpot_s"], [2.0, 0.5])
    np.testing.assert_allclose(t["gap_max_s"], [2.5, 0.5])
    np.testing.assert_allclose(t["tau_nats"], [2.0, 1.5])
    assert t["preemptions"].tolist() == [1, 0]
    assert t["longest_wait_steps"].tolist() == [1, 1]
    np.testing.assert_allclose(t["longest_wait_s"], [0.5, 0.5])
    np.testing.assert_allclose(t["model_entropy_mean"], [2.0, 3.25])
    np.testing.assert_allclose(t["tempered_variance"], [np.var([1.5, 0.5, 1.0], ddof=1), np.var([2, 1.25], ddof=1)])
    np.testing.assert_allclose(t["tempered_target_mean_square"], [0.5 / 3, (1.0 + 0.0625) / 2])
    tokens = m.tokens_table()
    assert tokens["id"].tolist() == [7, 7, 3, 3, 7]
    assert tokens["index"].tolist() == [0, 1, 0, 1, 2]
    np.testing.assert_allclose(tokens["kept_fraction"], [1, 1, 1, 0.5, 1])
    np.testing.assert_allclose(tokens["theta_nats"], 0.02)
    steps = m.steps_table()
    assert steps["pages_held"].tolist() == [2, 4, 2, 2]
    assert steps["pages_read"].tolist() == [2, 4, 1, 2]
    assert steps["live"].tolist() == [2, 2, 2, 1]
    assert steps["scheduled_tokens"].tolist() == [5, 7, 1, 7]
    np.testing.assert_allclose(steps["kept_fraction"], [np.nan, 1.0, 0.5, np.nan])
    s = m.summary()
    assert s["requests_finished"] == 2
    assert s["requests_live"] == 0
    assert s["output_tokens"] == 5
    assert s["throughput_tokens_per_s"] == pytest.approx(1.0)
    assert s["tau_per_second"] == pytest.approx(3.5 / 5.0)
    assert s["tau_per_kv_byte"] == pytest.approx(3.5 / 500)
    assert s["tau_per_flop"] == pytest.approx(3.5 / 50)
    assert s["kept_fraction_mean"] == pytest.approx(0.75)
    assert s["e2e_p50_s"] == pytest.approx(3.75)
    pooled = [1.5, 0.5, 2.0, 1.25, 1.0]
    assert s["tempered_variance_pooled"] == pytest.approx(np.var(pooled, ddof=1))
    assert s["tempered_target_mean_square"] == pytest.approx(np.mean((np.array(pooled) - 1) ** 2))
    json.dumps(s, allow_nan=False)


def test_short_outputs_have_no_tpot_and_no_nan_reaches_the_summary() -> None:
    m = Metrics(16)
    assert json.dumps(m.summary(), allow_nan=False)
    m.submitted(Request(1, 0.0, 4, 1))
    m.submitted(Request(2, 0.0, 4, 1))
    m.step(
        plan_of(0, [1, 2], [0, 1]),
        result_of(0, 0.0, 1.0, [1], [2.0], 2),
        (Finish(1, FinishReason.LENGTH), Finish(2, FinishReason.EMPTY_SUPPORT)),
    )
    t, s = m.requests_table(), m.summary()
    assert np.isnan(t["tpot_s"]).all()
    assert np.isnan(t["ttft_s"][1])
    assert s["tpot_mean_s"] is None
    assert s["ttft_mean_s"] == 1.0
    assert s["requests_finished"] == 2
    assert s["finish_empty_support"] == 1
    json.dumps(s, allow_nan=False)


def test_refused_and_cancelled_are_counted_once() -> None:
    m = Metrics(16)
    m.refused(Finish(5, FinishReason.REJECTED, "too long"), 0.0)
    m.submitted(Request(6, 0.0, 4, 4))
    m.submitted(Request(7, 0.0, 4, 4))
    m.submitted(Request(8, 0.0, 4000, 4))
    rejected = Finish(8, FinishReason.REJECTED)
    m.step(plan_of(0, [6], [0], rejected=(rejected,)), result_of(0, 0.0, 1.0, [6], [1.0], 1), (rejected,))
    m.cancelled(6, 1.25)
    s = m.summary()
    assert (s["requests_in"], s["requests_refused"], s["requests_cancelled"], s["requests_live"]) == (4, 2, 1, 1)
    with pytest.raises(BadInputError, match="no such live request"):
        m.cancelled(6, 2.0)
    with pytest.raises(BadInputError, match="a live request has this id"):
        m.submitted(Request(7, 0.0, 4, 4))


def test_an_id_may_come_back_after_it_left() -> None:
    m = Metrics(16)
    for step in range(2):
        m.submitted(Request(1, float(step), 4, 1))
        m.step(
            plan_of(step, [1], [0]), result_of(step, step, step + 1.0, [1], [2.0], 1), (Finish(1, FinishReason.EOS),)
        )
    assert m.requests_table()["output_tokens"].tolist() == [1, 1]
    assert m.requests_table()["ttft_s"].tolist() == [1.0, 1.0]
    assert m.summary()["requests_finished"] == 2


def test_tokens_of_strangers_are_refused() -> None:
    m = Metrics(16)
    with pytest.raises(BadInputError, match="no such live request"):
        m.step(plan_of(0, [1], [0]), result_of(0, 0.0, 1.0, [1], [1.0], 1), ())
    m.submitted(Request(1, 0.0, 4, 4))
    with pytest.raises(BadInputError, match="did not run"):
        m.step(plan_of(0, [1], [0]), result_of(0, 0.0, 1.0, [2], [1.0], 1), ())


def random_run(seed: int, steps: int, m: Metrics) -> dict[int, list[tuple[float, float]]]:
    """A made-up event stream with speculation, preemption, slot reuse, refusals; returns the tokens by request."""
    rng = np.random.default_rng(seed)
    tokens: dict[int, list[tuple[float, float]]] = {}
    slot_of: dict[int, int] = {}
    free, next_id, now = list(range(6)), 0, 0.0
    for step in range(steps):
        while rng.random() < 0.5:
            request = Request(next_id * 3 + 1, now, 4, 8)
            m.submitted(request)
            if rng.random() < 0.1 or not free:
                m.refused(Finish(request.id, FinishReason.REJECTED))
            else:
                slot_of[request.id], tokens[request.id] = free.pop(), []
            next_id += 1
        ids = [i for i in slot_of if rng.random() < 0.8]
        rng.shuffle(ids)
        samples = (rng.random(len(ids)) < 0.8).tolist()
        named = [i for i, s in zip(ids, samples, strict=True) if s for _ in range(int(rng.integers(1, 3)))]
        H = rng.gamma(2.0, 1.0, len(named)).tolist()
        end = now + float(rng.exponential())
        for i, h in zip(named, H, strict=True):
            tokens[i].append((end, h))
        finished = [Finish(i, FinishReason.LENGTH) for i in ids if rng.random() < 0.15]
        preempted = [i for i in slot_of if i not in ids and rng.random() < 0.2]
        plan = plan_of(step, ids, [slot_of[i] for i in ids], samples=samples, preempted=preempted, now_s=now)
        m.step(plan, result_of(step, now, end, named, H, len(ids)), finished)
        free.extend([slot_of.pop(f.id) for f in finished])
        now = end
    return tokens


@given(st.integers(0, 10**6))
def test_conservation_and_agreement_with_a_naive_count(seed: int) -> None:
    """S1, S16: requests are conserved, TTFT + gaps = E2E, and every column equals a per-token recount."""
    m = Metrics(4, keep_tokens=True, max_steps=8)
    tokens = random_run(seed, 40, m)
    t, s = m.requests_table(), m.summary()
    assert s["requests_in"] == (
        s["requests_finished"] + s["requests_refused"] + s["requests_cancelled"] + s["requests_live"]  # type: ignore[operator]
    )
    assert s["requests_live"] == m.live
    assert s["output_tokens"] == sum(map(len, tokens.values())) == m.steps_table()["output_tokens"].sum()
    some = t["output_tokens"] > 0
    np.testing.assert_allclose((t["ttft_s"] + t["gap_sum_s"])[some], t["e2e_s"][some], rtol=1e-12)
    clock = EntropicClock(1)
    for i, request_id in enumerate(t["id"].tolist()):
        seen = tokens.get(request_id, [])
        assert t["output_tokens"][i] == len(seen)
        clock.start(0)
        for _, h in seen:
            clock.update(np.array([0]), np.array([h]))
        assert t["tau_nats"][i] == pytest.approx(clock.tau[0], abs=1e-12)
        assert t["tau_filtered_nats"][i] == pytest.approx(clock.tau_filtered[0], abs=1e-12)
        if seen:
            assert t["ttft_s"][i] == seen[0][0] - t["arrival_s"][i]
            assert t["gap_max_s"][i] == max([0.0, *np.diff([time for time, _ in seen])])
        if len(seen) > 1:
            tempered = 0.5 * np.array([h for _, h in seen])
            assert t["tempered_variance"][i] == pytest.approx(np.var(tempered, ddof=1))
    kept = m.tokens_table()
    for request_id, seen in tokens.items():
        mine = kept["id"] == request_id
        assert kept["index"][mine].tolist() == list(range(len(seen)))
        assert kept["model_entropy"][mine].tolist() == [h for _, h in seen]
    steps = m.steps_table()
    assert len(steps["step"]) <= 8
    assert steps["steps"].sum() == 40
    assert steps["busy_s"].sum() == pytest.approx(s["busy_s"])
    assert steps["kv_bytes"].sum() == pytest.approx(s["kv_bytes"])
    assert (np.diff(steps["start_s"]) > 0).all()


def test_memory_does_not_grow_with_steps_or_tokens() -> None:
    """S16: a step or a token leaves nothing behind."""
    m = Metrics(16, max_steps=64)
    m.submitted(Request(0, 0.0, 4, 10**6))
    reserved = []
    for step in range(4000):
        m.step(plan_of(step, [0], [0]), result_of(step, float(step), step + 1.0, [0], [1.0], 1), ())
        if step in (1000, 2000, 3999):
            reserved.append([m._facts._capacity, len(m._account.sums), len(m._steps.sums)])
    assert reserved[0] == reserved[1] == reserved[2]
    assert max(reserved[2]) <= 1024
    assert m.summary()["iterations"] == 4000
    assert m.summary()["output_tokens"] == 4000
    assert len(m.steps_table()["step"]) <= 64


def test_waits_for_service_count_from_admission() -> None:
    """What a request waited in the queue for a slot is in admission_wait_s, and in no service wait."""
    m = Metrics(4)
    for i in (0, 1):
        m.submitted(Request(i, 0.0, 4, 10))
    for step in range(5):
        m.step(plan_of(step, [0], [0]), result_of(step, float(step), step + 1.0, [0], [1.0], 1), ())
    late = plan_of(5, [0, 1], [0, 1])._replace(admitted=np.array([1]))
    m.step(late, result_of(5, 5.0, 6.0, [0, 1], [1.0, 1.0], 2), ())
    m.step(plan_of(6, [0], [0]), result_of(6, 6.0, 7.0, [0], [1.0], 1), ())
    m.step(plan_of(7, [0], [0]), result_of(7, 7.0, 8.0, [0], [1.0], 1), [Finish(1, FinishReason.LENGTH)])
    t = m.requests_table()
    assert t["admission_wait_s"].tolist() == [0.0, 5.0]
    assert t["longest_wait_steps"].tolist() == [0, 2]  # two iterations without service before it left
    assert t["longest_wait_s"].tolist() == [0.0, 2.0]
