from __future__ import annotations

import numpy as np
import pytest
from toy_driver import Integral, Rows, Scored, Trace, check_invariants, drive, make, step

from entropic_ctl import config
from entropic_ctl.certificates import Verdict, micro_digest
from entropic_ctl.config import EngineConfig, LawSpec, LoopConfig
from entropic_ctl.errors import BadInputError, UncertifiedError
from entropic_ctl.loop import Loop
from entropic_ctl.signals import Finish, FinishReason, Request, StepResult


def solo(request: Request, **engine: int) -> list[float]:
    return drive(make(EngineConfig(**engine), micro=Integral()), [request]).temperatures[request.id]


def test_e10_the_trajectory_belongs_to_the_request_not_to_the_batch() -> None:
    """Alone, with prefill chunks of 4, and with one preemption after token 20: same T, exactly 40 updates."""
    request = Request(7, 0.0, 10, 40)
    runs, laws = [], [Integral(), Integral(), Integral()]
    alone = make(EngineConfig(), micro=laws[0])
    runs.append(drive(alone, [request]))
    chunked = make(EngineConfig(prefill_chunk=4), micro=laws[1])
    runs.append(drive(chunked, [request]))
    assert [plan.n_tokens.tolist() for plan in runs[1].plans[:3]] == [[4], [4], [2]]
    preempted = make(EngineConfig(), micro=laws[2])
    preempted.submit(request)
    trace, now = Trace(), 0.0
    while len(trace.token_times[7]) < 20:
        step(preempted, now, trace)
        now += 1.0
    batcher = preempted.batcher  # free its pages behind its back, as a shortage would
    slot = batcher.slot_of(7)
    batcher.pages.drop(slot)
    batcher.slots.cached[slot] = 0
    batcher._changed = True
    while preempted.live:
        step(preempted, now, trace)
        now += 1.0
    runs.append(trace)
    assert trace.plans[20].n_tokens.tolist() == [30]
    assert len(runs[0].temperatures[7]) == 40
    assert len(set(runs[0].temperatures[7])) > 20  # the law does move
    assert runs[0].temperatures[7] == runs[1].temperatures[7] == runs[2].temperatures[7]
    assert [law.updates for law in laws] == [40, 40, 40]


def test_e10_a_real_preemption_changes_no_trajectory() -> None:
    requests = [Request(0, 0.0, 4, 8), Request(1, 0.0, 4, 8)]
    law = Integral()
    trace = drive(make(EngineConfig(page_tokens=4, pages=4), micro=law), requests)
    assert trace.preemptions(1) == 1
    for request in requests:
        assert trace.temperatures[request.id] == solo(request)
    assert law.updates == 16


def test_e11_rows_are_compacted_and_every_trajectory_equals_its_solo_run() -> None:
    requests = [Request(seed, 0.0, 6, output) for seed, output in ((1, 5), (2, 10), (3, 20))]
    loop = make(EngineConfig(), micro=Integral())
    trace = drive(loop, requests, check=check_invariants)
    for request in requests:
        assert trace.temperatures[request.id] == solo(request)
    assert not loop.policy.active.any()


def test_e11_s16_a_thousand_short_requests_leave_no_state() -> None:
    law = Integral()
    loop = make(EngineConfig(pages=64, max_live=16, max_batch=8), micro=law)
    rng = np.random.default_rng(0)
    requests = [Request(i, i // 4, int(rng.integers(1, 9)), int(rng.integers(1, 4))) for i in range(1000)]
    trace = drive(loop, requests)
    assert len(trace.finished) == 1000
    assert law.updates == sum(request.max_new_tokens for request in requests)
    policy, batcher = loop.policy, loop.batcher
    for column in (policy.active, policy.u, policy.theta, policy.timer, policy.seen, policy.stats, policy.spent):
        assert not column.any()
    assert not batcher.slots.slot_of
    assert not batcher.slots.hashes
    assert batcher.slots.live.shape == (0,)
    assert batcher.slots.room == 16
    assert batcher.pages.pool.used == 0
    assert not batcher.pages._new


@pytest.mark.parametrize("lag", [0, 1])
def test_observation_lag_comes_from_the_engine_config(lag: int) -> None:
    law = Integral()
    drive(make(EngineConfig(observation_lag=lag), micro=law), [Request(0, 0.0, 4, 40)])
    assert law.updates == 40 - lag


def test_the_three_laws_can_be_switched_off() -> None:
    run = config.from_mapping(
        {"loop": {"temperature": {"law": "fixed"}, "pruning": {"law": "off"}, "scheduling": {"policy": "fcfs"}}}
    )
    trace = drive(Loop(run.loop, run.engine, 100), [Request(i, 0.0, 4, 3) for i in range(12)])
    assert {t for ts in trace.temperatures.values() for t in ts} == {np.exp(np.log(0.8))}
    assert all((plan.theta_nats == 0).all() for plan in trace.plans)
    assert trace.plans[0].ids.tolist() == list(range(8))


def test_greedy_requests_and_configs() -> None:
    loop = make(EngineConfig(), micro=Integral())
    trace = drive(loop, [Request(0, 0.0, 4, 3, greedy=True), Request(1, 0.0, 4, 3)])
    assert trace.temperatures[0] == [0.0] * 3
    assert min(trace.temperatures[1]) > 0
    run = config.from_mapping({"loop": {"temperature": {"temperature": 0.0}}})
    trace = drive(Loop(run.loop, run.engine, 100), [Request(0, 0.0, 4, 3)])
    assert trace.plans[0].greedy.tolist() == [True]
    assert trace.temperatures[0] == [0.0] * 3


def test_theta_is_for_decode_rows_only() -> None:
    loop = make(EngineConfig(prefill_chunk=4, max_batch_tokens=8))
    loop.policy.pruning = type(
        "Constant", (), {"start": lambda self: (0.5, 0), "update": lambda self, a, b, h: (a, b)}
    )()
    trace = drive(loop, [Request(0, 0.0, 9, 3)], check=check_invariants)
    assert [plan.theta_nats.tolist() for plan in trace.plans] == [[0.0], [0.0], [0.0], [0.5], [0.5]]


def test_driver_finishes_win_over_the_limit_and_unknown_ids_are_ignored() -> None:
    loop = make(EngineConfig())
    for i in range(3):
        loop.submit(Request(i, 0.0, 4, 1))
    plan = loop.plan(0.0)
    t = loop.temper(Rows(np.ones(3)))
    ended = (Finish(1, FinishReason.EOS), Finish(2, FinishReason.EMPTY_SUPPORT), Finish(77, FinishReason.STOP))
    result = StepResult(
        plan.step,
        0.0,
        1.0,
        token_ids=plan.ids[:2],
        tokens=plan.ids[:2],
        model_entropy=t.model_entropy[:2],
        tempered_entropy=t.tempered_entropy[:2],
        finished=ended,
    )
    left = {finish.id: finish.reason for finish in loop.observe(result)}
    assert left == {0: FinishReason.LENGTH, 1: FinishReason.EOS, 2: FinishReason.EMPTY_SUPPORT}
    assert loop.live == 0
    assert loop.plan(1.0).n_rows == 0


def test_a_gain_needs_a_certificate() -> None:
    loop = config.from_mapping({"loop": {"temperature": {"law": "feedback"}}}).loop
    with pytest.raises(UncertifiedError, match="needs a gain certificate"):
        Loop(loop, EngineConfig(), 100)
    other = Verdict("proved", "theorem", micro_digest(loop.temperature, 1, 100), 0.1, "")
    with pytest.raises(UncertifiedError, match="another law"):
        Loop(loop, EngineConfig(), 100, verdict=other)
    right = Verdict("proved", "theorem", micro_digest(loop.temperature, 0, 100), 0.1, "")
    assert Loop(loop, EngineConfig(), 100, verdict=right).live == 0


def test_no_certificate_covers_a_law_object_of_the_callers_own() -> None:
    laws = (Integral(), *LoopConfig().build()[1:])
    spec = LawSpec("fixed", LoopConfig().temperature.config)
    named = Verdict("proved", "stateless", micro_digest(spec, 0, 100), 0.1, "")  # true of the law the config names
    with pytest.raises(UncertifiedError, match="needs a gain certificate"):
        Loop(LoopConfig(), EngineConfig(), 100, laws=laws, verdict=named)
    assert Loop(LoopConfig(), EngineConfig(), 100, laws=laws, uncertified=True).live == 0


def test_misuse_is_named() -> None:
    loop = make(EngineConfig())
    with pytest.raises(BadInputError, match="temper before plan"):
        loop.temper(Rows(np.ones(1)))
    loop.submit(Request(0, 0.0, 4, 1))
    plan = loop.plan(0.0)
    with pytest.raises(BadInputError, match="one per sampling row"):
        loop.temper(Rows(np.ones(2)))
    with pytest.raises(BadInputError, match="one per accepted token"):
        loop.observe(StepResult(plan.step, 0.0, 1.0, token_ids=plan.ids))
    nan = make(EngineConfig(max_batch=1), macro=Scored(lambda v: v.entropy))
    nan.submit(Request(0, 0.0, 4, 1))
    nan.submit(Request(1, 0.0, 4, 1))  # one seat for two: the order matters
    with pytest.raises(BadInputError, match="NaN score"):
        nan.plan(0.0)
