"""Speculative decoding: exact timelines, the closed form of the yield, conservation, and nothing changed when off."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_bank import VOCAB, make_bank

from entropic_ctl import config as configs
from entropic_ctl.config import RunConfig, SpeculationConfig, WorkloadConfig
from entropic_ctl.errors import BadInputError, UncertifiedError
from entropic_ctl.loop import Loop
from entropic_ctl.recording import Recorder
from entropic_ctl.replay import replay
from entropic_ctl.signals import Finish, Request, StepPlan, StepResult
from sim.arrivals import Workload
from sim.clock import Clock
from sim.cost import DEVICES, MODELS, LinearCost, Roofline, cost_model
from sim.load import StepLoad
from sim.replica import SimulationResult, simulate
from sim.speculation import Curve, Speculation, load_acceptance
from sim.step import StepModel
from sim.trajectories import Trajectories

BANK, _ = make_bank(lengths=(30, 50))
SURE, NEVER = 1.0, 1e-300


def setup(draft: dict[str, Any], loop: dict[str, Any] | None = None, **engine: int) -> RunConfig:
    return configs.from_mapping({"speculation": draft, "engine": engine, "loop": loop or {}})


def workload(prompts: list[int], outputs: list[int], *, length: str = "limit", greedy: bool = False) -> Workload:
    n = len(prompts)
    return Workload(
        WorkloadConfig(output_length=length),
        np.zeros(n),
        prompt_tokens=np.array(prompts),
        limit_tokens=np.array(outputs),
        prompt=np.arange(n) % 4,
        xi=np.linspace(0, 0.9, n),
        greedy=greedy,
    )


def run(draft: dict[str, Any], jobs: Workload, cost: Any = None, **more: Any) -> SimulationResult:
    config = setup(draft, more.pop("loop", None), **more)
    return simulate(config, bank=BANK, workload=jobs, cost=cost or LinearCost(0.0, 1.0), keep_tokens=True)


class Driven:
    """A loop and a step model without SimPy, checked at every step."""

    def __init__(self, config: RunConfig, requests: list[Request], recorder: Any = None) -> None:
        self.config = config
        self.loop = Loop(config.loop, config.engine, 64, recorder=recorder, speculation=config.speculation)
        n = len(requests)
        places = Trajectories(BANK, np.arange(n) % 4, np.linspace(0, 0.9, n), base_temperature=0.8, ends=False)
        self.model = StepModel(LinearCost(0.0, 1.0), places, speculation=Speculation.of(config, 16))
        self.clock, self.tokens, self.finished = Clock(), Counter[int](), list[Finish]()
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.finished += [refused for r in requests if (refused := self.loop.submit(r)) is not None]
        while self.loop.live or self.loop.backlog:
            self._step()

    def _step(self) -> None:
        plan = self.loop.plan(self.clock.now_s)
        self.check_plan(plan)
        result = self.model.run(plan, self.loop.temper, self.clock)
        drafted = dict(zip(plan.ids.tolist(), plan.n_draft.tolist(), strict=True))
        assert all(count <= drafted[i] + 1 for i, count in Counter(result.token_ids.tolist()).items())
        self.tokens.update(result.token_ids.tolist())
        self.finished += self.loop.observe(result)
        s = self.loop.batcher.slots
        live = [slot for slot in plan.slots[plan.samples].tolist() if s.id[slot] >= 0]
        assert np.array_equal(s.cached[live], s.known[live] - 1)  # rejected drafts leave no trace
        self.plans.append(plan)
        self.results.append(result)
        assert len(self.plans) < 3000

    def check_plan(self, plan: StepPlan) -> None:
        engine, s, pages = self.config.engine, self.loop.batcher.slots, self.loop.batcher.pages
        slots, end = plan.slots, plan.context + plan.n_tokens
        assert 0 < int(plan.n_tokens.sum()) <= engine.max_batch_tokens
        assert (plan.n_draft <= self.config.speculation.draft_tokens).all()
        drafts = plan.n_draft > 0
        assert (plan.samples | ~drafts).all()
        assert np.array_equal(plan.samples, end - plan.n_draft == s.known[slots])
        assert (plan.n_tokens[drafts] == plan.n_draft[drafts] + 1).all()
        assert (end[drafts] <= s.stop_at[slots][drafts] - 1).all()  # no draft that the limit would cut
        assert (plan.theta_nats[drafts] == 0).all()
        assert (pages.count[slots] * engine.page_tokens >= end).all()
        held = [page for slot in s.live.tolist() for page in pages.view[slot, : pages.count[slot]].tolist()]
        assert len(held) == len(set(held)) == pages.pool.used <= engine.pages


def test_exact_timeline_when_every_draft_is_accepted() -> None:
    """Prompt 4, output 6, d = 2, a second per token: 4 s of prefill, a step of 3 tokens, one of 2 (a third is cut)."""
    got = run({"draft_tokens": 2, "acceptance": SURE}, workload([4], [6]))
    assert got.tokens is not None
    assert got.tokens["time_s"].tolist() == [4, 7, 7, 7, 9, 9]
    assert got.steps["scheduled_tokens"].tolist() == [4, 3, 2]
    assert (got.summary["draft_tokens"], got.summary["draft_tokens_accepted"]) == (3, 3)
    assert got.requests["output_tokens"].tolist() == [6]


def test_exact_timeline_when_every_draft_is_rejected() -> None:
    """One token per step, three computed: until the limit cuts drafts to 1 and 0."""
    got = run({"draft_tokens": 2, "acceptance": NEVER}, workload([4], [6]))
    assert got.tokens is not None
    assert got.tokens["time_s"].tolist() == [4, 7, 10, 13, 15, 16]
    assert (got.summary["draft_tokens"], got.summary["draft_tokens_accepted"]) == (7, 0)


def test_the_gate_drafts_only_below_its_entropy() -> None:
    free = Driven(setup({"draft_tokens": 3, "acceptance": 0.5}), [Request(0, 0.0, 4, 40)])
    gated = Driven(setup({"draft_tokens": 3, "acceptance": 0.5, "draft_below_nats": 1.5}), [Request(0, 0.0, 4, 40)])
    assert sum(int(plan.n_draft.sum()) for plan in gated.plans) < sum(int(plan.n_draft.sum()) for plan in free.plans)
    seen = set()
    for before, plan in zip(gated.results, gated.plans[1:], strict=False):
        if int(plan.context[0]) < 4 + 40 - 2:  # away from the limit, which cuts the last draft
            low = bool(before.model_entropy[-1] < 1.5)
            assert (int(plan.n_draft[0]) > 0) is low
            seen.add(low)
    assert seen == {True, False}


@pytest.mark.parametrize(("alpha", "d"), [(0.5, 1), (0.7, 4), (0.9, 3)])
def test_yield_of_a_step_is_the_geometric_sum(alpha: float, d: int) -> None:
    """E[tokens] = (1 - alpha^(d + 1)) / (1 - alpha); variance from the same law."""
    requests = [Request(i, 0.0, 4, 1000) for i in range(8)]
    config = setup({"draft_tokens": d, "acceptance": alpha}, pages=2000, max_batch_tokens=256)
    driven = Driven(config, requests)
    counts = [
        count
        for plan, result in zip(driven.plans, driven.results, strict=True)
        for i, count in Counter(result.token_ids.tolist()).items()
        if plan.n_draft[plan.ids.tolist().index(i)] == d
    ]
    law = np.array([alpha**k * (1 - alpha) for k in range(d)] + [alpha**d])
    k = np.arange(1, d + 2)
    mean = float(law @ k)
    assert mean == pytest.approx((1 - alpha ** (d + 1)) / (1 - alpha))
    sem = np.sqrt((law @ k**2 - mean**2) / len(counts))
    assert len(counts) > 1000
    assert abs(np.mean(counts) - mean) < 4 * sem


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=6),
    st.fixed_dictionaries(
        {"draft_tokens": st.integers(1, 6), "acceptance": st.sampled_from([NEVER, 0.5, SURE])},
    ),
    st.fixed_dictionaries(
        {
            "max_batch": st.integers(1, 5),
            "max_batch_tokens": st.integers(5, 40),
            "pages": st.integers(15, 24),
            "observation_lag": st.integers(0, 1),
        }
    ),
)
def test_tokens_and_pages_are_conserved(
    jobs: list[tuple[int, int]], draft: dict[str, Any], engine: dict[str, int]
) -> None:
    config = setup(draft, page_tokens=4, prefill_chunk=8, **engine)
    driven = Driven(config, [Request(i, 0.0, prompt, limit) for i, (prompt, limit) in enumerate(jobs)])
    assert dict(driven.tokens) == {i: limit for i, (_, limit) in enumerate(jobs)}
    assert sorted(finish.id for finish in driven.finished) == list(range(len(jobs)))
    assert driven.loop.batcher.pages.pool.used == 0
    assert not driven.loop.policy.active.any()


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=6), st.integers(1, 5))
def test_latencies_reconcile_whatever_is_accepted(jobs: list[tuple[int, int]], d: int) -> None:
    prompts, outputs = [p for p, _ in jobs], [o for _, o in jobs]
    got = run({"draft_tokens": d, "acceptance": 0.6}, workload(prompts, outputs), pages=64, page_tokens=4)
    requests = got.requests
    assert requests["output_tokens"].tolist() == outputs
    np.testing.assert_allclose(requests["ttft_s"] + requests["gap_sum_s"], requests["e2e_s"], rtol=1e-12)
    assert got.tokens is not None
    assert Counter(got.tokens["id"].tolist()) == dict(enumerate(outputs))
    assert int(got.steps["output_tokens"].sum()) == sum(outputs)


@pytest.mark.parametrize("length", ["limit", "bank"])
def test_drafting_changes_no_text_at_a_fixed_temperature(length: str) -> None:
    """The same entropies in the same order, the same ends of text; only the times move."""
    jobs = ([20, 30, 9, 5, 17], [60] * 5)
    plain, drafted = (
        run(draft, workload(*jobs, length=length)) for draft in ({}, {"draft_tokens": 3, "acceptance": 0.6})
    )
    assert plain.tokens is not None
    assert drafted.tokens is not None
    for i in range(5):
        for name in ("model_entropy", "tempered_entropy", "temperature"):
            a, b = (got.tokens[name][got.tokens["id"] == i] for got in (plain, drafted))
            np.testing.assert_array_equal(a, b)
    assert plain.requests["status"].tolist() == drafted.requests["status"].tolist()
    assert drafted.summary["iterations"] < plain.summary["iterations"]
    assert drafted.summary["tau_nats"] == pytest.approx(plain.summary["tau_nats"])


def test_off_is_bit_identical_to_a_loop_that_knows_no_drafts() -> None:
    requests = [Request(i, 0.0, 5 + i, 12) for i in range(4)]
    config = setup({"draft_tokens": 0, "draft_below_nats": 1.0, "acceptance": 0.5}, page_tokens=4, pages=20)
    plain = dataclasses.replace(config, speculation=SpeculationConfig())
    one, two = Driven(config, requests), Driven(plain, requests)
    for a, b in zip(one.plans, two.plans, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        assert not a.n_draft.any()
    for r, s in zip(one.results, two.results, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(r, s, strict=True))


def test_a_recorded_run_with_drafts_replays(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with Recorder(log) as recorder:
        config = setup({"draft_tokens": 3, "acceptance": 0.5, "draft_below_nats": 2.0}, page_tokens=4, pages=24)
        driven = Driven(config, [Request(i, 0.0, 5 + i, 15) for i in range(4)], recorder)
    report = replay(log)
    assert report.difference is None
    assert report.tokens == driven.tokens.total() == 60
    changed = log.read_text().replace('"draft_tokens":3', '"draft_tokens":2')
    log.write_text(changed)
    assert replay(log).difference is not None


def test_verification_costs_its_tokens_and_their_logits() -> None:
    """A step of 3 tokens at context c: layers and head for 3, the cache once, pairs 3 c + 6."""
    model = Roofline(DEVICES["h100"], MODELS["llama-3-8b"])
    got = run({"draft_tokens": 2, "acceptance": SURE}, workload([100], [10]), cost=model)
    shape, c = MODELS["llama-3-8b"], 100
    attention = 4 * shape.layers * shape.q_heads * shape.head_dim * (3 * c + 6)
    assert got.steps["flops"][1] == pytest.approx(6 * (shape.layer_params + shape.head_params) + attention)
    assert got.steps["kv_bytes"][1] == c * shape.kv_bytes_per_token


def test_a_draft_model_is_charged_step_by_step() -> None:
    draft = {"draft_tokens": 2, "acceptance": SURE, "drafter": "model"}
    config = configs.from_mapping({"speculation": draft, "cost": {"preset": "h100-llama-3-8b"}})
    target, small = cost_model(config.cost), cost_model(dataclasses.replace(config.cost, model="smollm2-135m"))
    jobs = workload([100], [4])
    free = run({"draft_tokens": 2, "acceptance": SURE}, jobs, cost=target)
    paid = simulate(config, bank=BANK, workload=workload([100], [4]), cost=target)
    extra = paid.steps["busy_s"] - free.steps["busy_s"]

    def alone(context: float) -> float:
        return small.step(StepLoad(1, 1, 1, 1, context)).seconds

    prefill = small.step(StepLoad(1, 100, 0, 0, 0.0, prefill_pairs=100 * 50.5)).seconds
    assert extra.tolist() == pytest.approx([prefill, alone(100) + alone(101)])
    assert (paid.steps["flops"] > free.steps["flops"]).all()


def test_the_measured_curves_fall_with_entropy_and_are_probabilities() -> None:
    for drafts in load_acceptance().values():
        for curve in (drafts.accepted, drafts.found):
            assert (np.diff(curve.entropy) > 0).all()
            assert ((curve.share >= 0) & (curve.share <= 1)).all()
        accepted = drafts.accepted
        assert accepted(np.array([0.05]))[0] > accepted(np.array([2.0]))[0] > accepted(np.array([5.0]))[0]
        assert accepted(np.array([np.log(49_152)]))[0] == pytest.approx(1 / 49_152)
    assert Curve(np.array([0.0, 2.0]), np.array([1.0, 0.0]))(np.array([0.5, 3.0])).tolist() == [0.75, 0.0]


def test_prompt_lookup_drafts_where_it_finds_one_and_yields_less_at_high_entropy() -> None:
    """With measured curves: some steps find no draft, and hot text is accepted less than cold text."""
    shares = {}
    for temperature in (0.4, 1.6):
        law = {"temperature": {"law": "fixed", "temperature": temperature}}
        got = run({"draft_tokens": 3}, workload([40] * 16, [60] * 16), loop=law, pages=400, max_batch=16)
        steps = got.steps["scheduled_tokens"][1:]
        assert 0 < got.summary["draft_tokens"] < 3 * got.summary["output_tokens"]
        assert len(set(steps.tolist())) > 3
        shares[temperature] = got.summary["draft_tokens_accepted"] / got.summary["draft_tokens"]
    assert shares[0.4] > shares[1.6]


def test_arms_share_the_numbers_that_decide() -> None:
    """The same request and token accept alike under another batch size; another seed does not."""
    ids, token = np.repeat(np.arange(50), 4), np.tile(np.arange(4), 50)
    flat = {
        "greedy": np.zeros(200, bool),
        "model_entropy": np.ones(200),
        "tempered_entropy": np.ones(200),
        "last": np.zeros(200, bool),
    }
    config = SpeculationConfig(draft_tokens=3, acceptance=0.5)
    one, again, other = (
        Speculation(config, seed).verify(ids, token, np.full(50, 3), **flat).accepted for seed in (1, 1, 2)
    )
    half = Speculation(config, 1).verify(
        ids[100:], token[100:], np.full(25, 3), **{name: column[100:] for name, column in flat.items()}
    )
    assert np.array_equal(one, again)
    assert np.array_equal(one[100:], half.accepted)
    assert not np.array_equal(one, other)


def test_a_gain_is_certified_for_the_tokens_it_drafts() -> None:
    pytest.importorskip("flint")
    from proofs import search

    def loop(gain: float, drafts: int, verdict: Any) -> Loop:
        law = {"temperature": {"law": "feedback", "gain": gain, "target_nats": 1.0}}
        config = setup({"draft_tokens": drafts, "acceptance": 0.5}, law)
        verdict = search.certify(config, 64) if verdict is None else verdict
        return Loop(config.loop, config.engine, 64, speculation=config.speculation, verdict=verdict)

    law = {"temperature": {"law": "feedback", "gain": 0.1, "target_nats": 1.0}}
    config = setup({"draft_tokens": 2, "acceptance": 0.5}, law)
    verdict = search.certify(config, 64)
    assert (verdict.status, verdict.theorem) == ("proved", "gain-drafts")
    assert loop(0.1, 2, verdict).plan(0.0).n_rows == 0
    result = simulate(config, bank=BANK, workload=workload([9], [20]), verdict=search.certify(config, VOCAB))
    assert result.summary["output_tokens"] == 20
    with pytest.raises(UncertifiedError, match="number of drafted tokens"):
        loop(0.1, 3, verdict)
    with pytest.raises(UncertifiedError, match="needs a gain certificate"):
        Loop(config.loop, config.engine, 64, speculation=config.speculation)
    assert loop(0.3, 0, None).plan(0.0).n_rows == 0
    with pytest.raises(UncertifiedError, match=r"'gain-drafts' is refuted: .*if every draft is accepted; .*nearest"):
        loop(0.3, 2, None)
    assert simulate(config, bank=BANK, workload=workload([9], [20]), uncertified=True).summary["output_tokens"] == 20


def test_more_tokens_than_drafted_are_refused() -> None:
    config = setup({"draft_tokens": 2, "acceptance": SURE})
    loop = Loop(config.loop, config.engine, 64, speculation=config.speculation)
    loop.submit(Request(7, 0.0, 4, 20))
    for token_ids in ([7], [7] * 4):
        plan, ones = loop.plan(0.0), np.ones(len(token_ids))
        result = StepResult(
            plan.step, 0.0, 1.0, np.array(token_ids), -np.ones(len(token_ids), int), ones, ones, ones, ones
        )
        if len(token_ids) == 1:
            loop.observe(result)
        else:
            with pytest.raises(BadInputError, match=r"4 tokens for request 7.*at most 3"):
                loop.observe(result)


@pytest.mark.parametrize(
    ("draft", "needle"),
    [
        ({"draft_tokens": -1}, "draft_tokens"),
        ({"draft_tokens": 2, "drafter": "guess"}, "prompt_lookup, model"),
        ({"draft_tokens": 2, "rule": "guess"}, "fixed, entropy, history"),
        ({"acceptance": 1.5}, "speculation.acceptance"),
    ],
)
def test_bad_settings_name_the_key(draft: dict[str, Any], needle: str) -> None:
    with pytest.raises(BadInputError, match=needle):
        setup(draft)


def test_the_simulator_asks_for_the_acceptance_of_a_pair_of_models() -> None:
    with pytest.raises(BadInputError, match=r"speculation.acceptance.*\(0, 1\]"):
        Speculation.of(setup({"draft_tokens": 2, "drafter": "model"}), 16)


def test_an_unknown_draft_model_names_its_key() -> None:
    draft = {"draft_tokens": 2, "drafter": "model", "acceptance": 0.8, "draft_model": "nobody"}
    with pytest.raises(BadInputError, match=r"speculation.draft_model.*nobody"):
        Speculation.of(setup(draft), 16)


def test_the_shipped_measurement_says_where_it_comes_from() -> None:
    import sim

    file = Path(sim.__file__).parent / "data" / "smollm2-135m.acceptance.json"
    values = json.loads(file.read_text())
    assert values["drafter"] == "prompt_lookup"
    for name in ("model", "seed", "temperatures", "max_new_tokens", "draft_tokens", "ngrams", "dtype", "vocab_size"):
        assert name in values
    assert all(sum(values[kind]["accepted"]["count"]) > 500 for kind in ("sampled", "greedy"))
