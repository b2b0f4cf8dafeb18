from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import byte_tokenizer, tiny_llama
from toy_driver import Rows

from backends import models
from backends.attention.rows import rows_plan
from backends.audit import LiveAudit
from backends.engine import Engine
from backends.sampling import SamplingParams
from entropic_ctl import config as configs
from entropic_ctl import replay
from entropic_ctl.errors import BadInputError
from entropic_ctl.loop import Loop, Recorder
from entropic_ctl.metrics import Metrics
from entropic_ctl.pruning import accountant
from entropic_ctl.signals import Request, StepPlan, StepResult
from sim import replica

BUDGET = {"law": "budget", "theta_nats": 0.2, "theta_wide_nats": 0.3}
TINY = BUDGET | {"dense_layers": 0, "recent_pages": 1}
seeds = st.integers(0, 2**32 - 1)

pytestmark = pytest.mark.usefixtures("one_thread")


@given(seeds)
def test_twins_agree_bit_for_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    theta, spent, total = rng.random(9) * rng.choice([0.0, 0.3], 9), rng.random(9), float(rng.random())
    np.testing.assert_array_equal(
        accountant.allowed_loop(theta, spent, total), accountant._allowed_columns(theta, spent, total)
    )
    cached, least = rng.integers(0, 9, 9), int(rng.integers(0, 9))
    np.testing.assert_array_equal(
        accountant.reaching_loop(theta, cached, least), accountant._reaching_columns(theta, cached, least)
    )
    slots = rng.permutation(9)[: rng.integers(0, 10)]
    cost = np.where(rng.random(9) < 0.3, np.nan, rng.random(9))[slots]
    books = [(spent.copy(), spent.copy()) for _ in range(2)]
    accountant.charge_loop(*books[0], slots, theta[slots], cost)
    accountant._charge_columns(*books[1], slots, theta[slots], cost)
    np.testing.assert_array_equal(books[0], books[1])


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=60), st.floats(1e-6, 3))
def test_the_limit_holds_exactly_and_dense_comes_no_sooner_than_it_must(
    steps: list[tuple[float, float]], total: float
) -> None:
    """Whatever share of its budget a step uses, the sum never passes the limit, not by one rounding."""
    spent, worst, slot = np.zeros(1), np.zeros(1), np.zeros(1, np.int64)
    used = []
    for asked, share in steps:
        before = spent[0]
        theta = accountant.allowed(np.array([asked]), spent, total)
        assert theta[0] == (asked if before + asked <= total else 0.0)
        accountant.charge(spent, worst, slot, theta, theta * share)
        used.append(float((theta * share)[0]))
        assert spent[0] <= total
    assert worst[0] == max(used, default=0.0)
    assert spent[0] == pytest.approx(sum(used))


def made(total: float, **engine: int) -> Loop:
    run = configs.from_mapping({"engine": engine, "loop": {"pruning": BUDGET | {"total_nats": total}}})
    return Loop(run.loop, run.engine, 100)


def advance(loop: Loop, now: float, cost: Any) -> StepPlan:
    """One iteration in which every pruned row loses ``cost(theta)``."""
    plan = loop.plan(now)
    ids = plan.ids[plan.samples]
    tempered = loop.temper(Rows(np.full(ids.shape[0], 5.0)))
    nats = cost(plan.theta_nats)
    loop.observe(
        StepResult(
            plan.step, now, now + 1, ids, np.full(ids.shape[0], -1), tempered.temperature, tempered.model_entropy,
            tempered.tempered_entropy, tempered.varentropy, certificate_max=nats,
        )
    )  # fmt: skip
    return plan


def test_a_request_goes_dense_alone_and_its_account_ends_with_it() -> None:
    loop = made(0.5)
    loop.submit(Request(0, 0.0, 4, 12))
    thetas: dict[int, list[float]] = {0: [], 1: []}
    for step in range(12):
        if step == 6:
            loop.submit(Request(1, 6.0, 4, 4))
        plan = advance(loop, float(step), lambda theta: theta)
        for number, theta in zip(plan.ids.tolist(), plan.theta_nats.tolist(), strict=True):
            thetas[number].append(theta)
    assert thetas[0] == [0.0, 0.2, 0.2] + [0.0] * 9  # prefill, two steps of 0.2, then a third would make 0.6
    assert thetas[1] == [0.0, 0.2, 0.2, 0.0]
    assert not loop.policy.spent.any()
    assert not loop.policy.worst.any()


def test_what_a_step_did_not_use_stays_available() -> None:
    loop = made(0.5)
    loop.submit(Request(0, 0.0, 4, 30))
    thetas = [advance(loop, float(step), lambda theta: theta / 10).theta_nats[0] for step in range(25)]
    assert thetas[1:] == [0.2] * 16 + [0.0] * 8  # 15 steps of 0.02 leave 0.2, to rounding; after the 16th not
    assert loop.policy.spent[0] == pytest.approx(0.32)
    assert loop.policy.worst[0] == pytest.approx(0.02)


def test_short_contexts_are_read_in_full() -> None:
    run = configs.from_mapping({"loop": {"pruning": BUDGET | {"min_context": 7}}})
    loop = Loop(run.loop, run.engine, 100)
    loop.submit(Request(0, 0.0, 4, 6))
    plans = [advance(loop, float(step), lambda theta: theta) for step in range(6)]
    assert [(int(p.context[0]), float(p.theta_nats[0])) for p in plans] == [
        (0, 0.0), (4, 0.0), (5, 0.0), (6, 0.0), (7, 0.2), (8, 0.2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cost", "lag"),
    [(lambda theta: theta[:0], 0), (lambda theta: np.full(theta.shape, np.nan), 0), (lambda theta: theta / 10, 1)],
)
def test_what_is_not_known_in_time_is_charged_in_full(cost: Any, lag: int) -> None:
    loop = made(0.5, observation_lag=lag)
    loop.submit(Request(0, 0.0, 4, 30))
    thetas = [advance(loop, float(step), cost).theta_nats[0] for step in range(8)]
    assert thetas == [0.0, 0.2, 0.2] + [0.0] * 5


def test_a_cancelled_requests_step_is_charged_to_nobody() -> None:
    loop = made(0.5)
    loop.submit(Request(0, 0.0, 1, 9))
    advance(loop, 0.0, lambda theta: theta)
    plan = loop.plan(1.0)
    assert plan.theta_nats[0] == 0.2
    loop.cancel(0)
    loop.observe(StepResult(plan.step, 1.0, 2.0, certificate_max=np.array([0.2])))
    assert not loop.policy.spent.any()


def test_a_limit_with_heads_that_may_lose_more_than_theta_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"total_nats.*union"):
        configs.from_mapping({"loop": {"pruning": BUDGET | {"total_nats": 1.0, "selection": "group_mean"}}})


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([400, 60]), st.sampled_from([0.05, 0.3]))
def test_simulated_requests_stay_within_their_limit(seed: int, pages: int, total: float) -> None:
    """Through batching and preemption, in the simulator."""
    run = configs.from_mapping(
        {
            "seed": seed,
            "workload": {"kind": "poisson", "n_requests": 12, "rate_per_s": 3.0, "output_tokens": 40.0},
            "engine": {"pages": pages, "prefill_chunk": 64, "max_batch_tokens": 96},
            "loop": {"pruning": {"law": "budget", "total_nats": total}},
        }
    )
    result = replica.simulate(run)
    loss = result.requests["loss_nats"]
    assert (loss <= total).all()
    assert loss.max() > 0.5 * total
    assert result.summary["loss_max_nats"] == loss.max()
    free = dataclasses.replace(run, loop=configs.from_mapping({"loop": {"pruning": {"law": "budget"}}}).loop)
    assert replica.simulate(free).requests["loss_nats"].max() > total


@pytest.fixture(scope="module")
def endless() -> models.LoadedModel:
    return dataclasses.replace(models.wrap(tiny_llama(), byte_tokenizer()), eos_ids=frozenset())


def engine_of(endless: models.LoadedModel, recorder: Any = None, loop: Any = None, **engine: Any) -> Engine:
    limits = {"pages": 48, "page_tokens": 4, "prefill_chunk": 16, "max_batch_tokens": 64} | engine
    run = configs.from_mapping({"engine": limits, "loop": {"pruning": TINY | (loop or {})}})
    return Engine(run, endless, recorder=recorder, metrics=Metrics(4))


def prompt(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def test_engine_requests_stay_within_their_limit_through_preemption_and_replay(
    endless: models.LoadedModel, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        engine = engine_of(endless, recorder, {"total_nats": 0.7})
        for i in range(4):
            engine.submit(prompt(40, i), SamplingParams(max_new_tokens=24, seed=i))
        outputs = engine.run()
    table = engine.metrics.requests_table()
    assert table["preemptions"].sum() > 0
    assert [o.loss_nats for o in outputs] == table["loss_nats"].tolist()
    assert [o.loss_max_nats for o in outputs] == table["loss_max_nats"].tolist()
    assert all(0.3 < o.loss_nats <= 0.7 for o in outputs)
    assert all(0 < o.loss_max_nats <= 0.3 for o in outputs)
    report = replay.replay(path)
    assert report.equal, report.difference


# -- live audit -----------------------------------------------------------------------------------------------------


def test_random_audits_change_nothing_and_bound_the_mean(endless: models.LoadedModel) -> None:
    texts, reports = [], []
    for rate in (0.0, 0.4, 1.0):
        engine = engine_of(endless, audit_rate=rate)
        for i in range(3):
            engine.submit(prompt(40, i), SamplingParams(max_new_tokens=40, seed=i))
        texts.append([o.token_ids for o in engine.run()])
        reports.append(engine.audit.report())
    assert texts[0] == texts[1] == texts[2]
    none, some, all_ = reports
    assert none["steps"] == none["audited"] == 0
    assert none["low_nats"] is None
    assert some["steps"] == all_["steps"] == all_["audited"] > 30
    assert 0 < some["audited"] < some["steps"]
    assert all_["low_nats"] <= all_["mean_kl_nats"] <= all_["high_nats"]
    assert some["low_nats"] <= all_["mean_kl_nats"] <= some["high_nats"]  # the realised mean, seen or not
    assert some["seconds"] > 0


def test_which_steps_are_audited_depends_on_the_seed_alone(endless: models.LoadedModel) -> None:
    def audited(text: int, seed: int) -> list[float]:
        limits = {"pages": 48, "page_tokens": 4, "audit_rate": 0.5}
        run = configs.from_mapping({"seed": seed, "engine": limits, "loop": {"pruning": TINY}})
        engine = Engine(run, endless)
        engine.submit(prompt(40, text), SamplingParams(max_new_tokens=30, seed=text))
        engine.run()
        return engine.audit.table()["step"].tolist()

    assert audited(0, 1) == audited(1, 1) != audited(0, 2)


def test_the_alarm_ends_pruning_for_good_and_replays(endless: models.LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    wide = {"theta_nats": 3.0, "theta_wide_nats": 3.0}
    with Recorder(path) as recorder:
        engine = engine_of(endless, recorder, wide, audit_rate=1.0, audit_cap_nats=0.002, audit_limit_nats=1e-4)
        for i in range(3):
            engine.submit(prompt(60, i), SamplingParams(max_new_tokens=60, seed=i))
        engine.run()
    lines = path.read_text(encoding="utf-8").splitlines()
    at = [i for i, line in enumerate(lines) if '"event":"stop_pruning"' in line]
    assert len(at) == 1
    assert "above the limit of 0.0001" in lines[at[0]]
    plans = [line for line in lines[at[0] :] if '"event":"plan"' in line]
    assert len(plans) > 5
    assert all(set(json.loads(line)["theta_nats"]) == {0.0} for line in plans)
    assert replay.replay(path).equal
    path.write_text("\n".join(lines[: at[0]] + lines[at[0] + 1 :]) + "\n", encoding="utf-8")
    assert not replay.replay(path).equal  # without the event the decisions are others


def test_an_audited_pass_that_raises_is_timed_too() -> None:
    ticks = iter([1.0, 4.0])
    audit = LiveAudit(configs.EngineConfig(audit_every=1), 0, lambda: next(ticks))
    with pytest.raises(ZeroDivisionError):
        audit.dense(rows_plan(np.array([9]), np.zeros((1, 1), np.int32), theta_nats=0.1), lambda _: 1 // 0)
    assert audit.seconds == 3.0


@pytest.mark.parametrize("engine", [{"audit_rate": 0.1, "audit_every": 4}, {"audit_limit_nats": 0.01}])
def test_audit_settings_that_contradict_are_refused(engine: dict[str, Any]) -> None:
    with pytest.raises(BadInputError, match="audit_"):
        configs.from_mapping({"engine": engine})
