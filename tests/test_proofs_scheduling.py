"""The waiting bound and the stability of the queue, against the shipped batcher and the simulator."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_driver import Scored, drive, make

from entropic_ctl import config
from entropic_ctl.batching import Batcher
from entropic_ctl.config import EngineConfig, RunConfig
from entropic_ctl.ordering import wait_bound
from entropic_ctl.scheduling.base import SchedulingConfig
from entropic_ctl.signals import Finish, FinishReason, Request, StepResult
from proofs.assumptions import parse
from proofs.check import Assumptions, Claim, Hints, Subject
from proofs.check.scheduling import capacity, claims, longest_computation, seats, wait_steps, work_seconds
from sim.cost import LinearCost, preset
from sim.drift import queue_drift
from sim.load import StepLoad
from sim.load_bounds import assumed, longest_step, token_slope
from sim.replica import simulate


def judge(tables: dict[str, Any], **assumptions: float) -> dict[str, Claim]:
    run = config.from_mapping(tables)
    subject = Subject(run, 32_000, Assumptions(**assumptions))  # type: ignore[arg-type]
    return {claim.theorem: claim for claim in claims(subject, Hints({}))}


engines = st.builds(
    lambda page, room, batch, spare, chunk, live: (page, room, batch, batch + spare, chunk, live),
    st.integers(1, 4),
    st.floats(1.0, 7.0),
    st.integers(1, 4),
    st.integers(0, 12),
    st.integers(1, 12),
    st.integers(1, 6),
)
workloads = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 14), st.integers(1, 9)), min_size=1, max_size=14)


def engine_of(drawn: tuple[int, float, int, int, int, int], longest: int) -> EngineConfig:
    page, room, batch, tokens, chunk, live = drawn
    pages = max(1, int(room * -(-(longest - 1) // page)))
    return EngineConfig(
        page_tokens=page, pages=pages, max_batch=batch, max_batch_tokens=tokens, prefill_chunk=chunk, max_live=live
    )


class Drive:
    """The batcher alone under hostile scores; ends of text at random; measures waits and work."""

    def __init__(self, engine: EngineConfig, law: SchedulingConfig, longest: int, seed: int, ends: float) -> None:
        self.engine, self.batcher, self.rng = engine, Batcher(engine, law), np.random.default_rng(seed)
        self.found, self.ends = seats(engine, longest), ends
        self.longest_wait, self.drops, self.waiting = 0, [], []  # type: ignore[var-annotated]

    def score(self, slots: Any) -> Any:
        s, kind = self.batcher.slots, self.rng.integers(4)
        bias = (s.order[slots], -s.order[slots], self.batcher.pages.count[slots], s.known[slots] - s.cached[slots])
        return 10.0 * bias[kind] + self.rng.normal(size=slots.shape[0])

    def work(self, known: int, cached: int, stop: int) -> Fraction:
        """V of one request: outputs left, tokens and page ends left to compute, in outputs."""
        e, f = self.engine, self.found
        chunk = min(e.prefill_chunk, e.max_batch_tokens - e.max_batch + 1)
        tokens = Fraction(known - cached - 1, chunk)
        pages = ((known - 1) // e.page_tokens - cached // e.page_tokens) if f.short else 0
        assert tokens >= 0
        assert pages >= 0
        assert cached or pages <= Fraction(known, e.page_tokens)
        return stop - known + f.sure * (tokens + pages)

    def total(self) -> Fraction:
        s = self.batcher.slots
        return sum(
            (self.work(int(s.known[i]), int(s.cached[i]), int(s.stop_at[i])) for i in s.live.tolist()), Fraction(0)
        )

    def run(self, requests: list[tuple[int, int, int]]) -> None:
        waiting, b, step = sorted(requests), self.batcher, 0
        theta, ids = np.zeros(self.engine.max_live), 0
        while waiting or b.live or b.backlog:
            while waiting and waiting[0][0] <= step:
                _, prompt, output = waiting.pop(0)
                assert b.submit(Request(ids, 0.0, prompt, output)) is None
                ids += 1
            b.admit()
            before, live = self.total(), b.live
            cached = b.slots.cached.copy()
            plan = b.plan(0.0, self.score, theta)
            assert (plan.n_rows > 0) == (live > 0)
            s, redone = b.slots, Fraction(0)
            for i in (b.slots.slot_of[r] for r in plan.preempted.tolist()):
                known, stop = int(s.known[i]), int(s.stop_at[i])
                more = self.work(known, 0, stop) - self.work(known, int(cached[i]), stop)
                share = min(self.engine.prefill_chunk, self.engine.max_batch_tokens - self.engine.max_batch + 1)
                per_token = self.found.sure * (Fraction(1, share) + Fraction(1, self.engine.page_tokens))
                assert 0 <= more <= per_token * int(cached[i])
                redone += more
            assert self.found.short or not plan.preempted.shape[0]
            sampled = plan.ids[plan.samples]
            ended = tuple(Finish(int(i), FinishReason.EOS) for i in sampled.tolist() if self.rng.random() < self.ends)
            if plan.n_rows:
                b.observe(StepResult(plan.step, 0.0, 1.0, token_ids=sampled, finished=ended))
            if live >= self.found.sure:
                self.drops.append(before + redone - self.total())
            if b.live:
                self.longest_wait = max(self.longest_wait, int((b.step - 1 - b.slots.last_run[b.slots.live]).max()))
            step += 1
            assert step < 5000


@settings(max_examples=80)
@given(engines, workloads, st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**32), st.sampled_from([0.0, 0.1]))
def test_waits_are_bounded_and_the_work_falls_whatever_the_scores(
    drawn: Any, workload: list[tuple[int, int, int]], limit: int, quantum: int, seed: int, ends: float
) -> None:
    longest = max(prompt + output for _, prompt, output in workload)
    engine = engine_of(drawn, longest)
    law = SchedulingConfig(wait_limit_steps=limit, quantum_steps=quantum)
    driven = Drive(engine, law, longest, seed, ends)
    driven.run(workload)
    assert driven.longest_wait <= wait_steps(engine, driven.found, limit, quantum)
    assert all(drop >= driven.found.sure for drop in driven.drops)


def test_the_fall_of_the_work_is_sharp() -> None:
    """Two decode rows in two seats: the work falls by exactly F = 2 in each step with both."""
    engine = EngineConfig(page_tokens=4, pages=64, max_batch=2, max_batch_tokens=2, max_live=2)
    driven = Drive(engine, SchedulingConfig(), 12, 0, 0.0)
    driven.run([(0, 1, 10), (0, 1, 10)])
    assert driven.drops == [2] * 10


@pytest.mark.parametrize(("live", "quantum"), [(2, 1), (3, 4), (6, 7)])
def test_the_waiting_bound_is_attained_to_one_iteration(live: int, quantum: int) -> None:
    """One seat, W = 1: every other row takes its turn of q steps before a row runs again."""
    engine = EngineConfig(page_tokens=4, pages=64, max_batch=1, max_batch_tokens=8, max_live=live)
    law = SchedulingConfig(wait_limit_steps=1, quantum_steps=quantum)
    driven = Drive(engine, law, 32, 1, 0.0)
    driven.run([(0, 1, 30)] * live)
    bound = wait_steps(engine, driven.found, 1, quantum)
    assert bound == 1 + (live - 1) * max(quantum, longest_computation(engine, driven.found))
    short = 1 + (live - 1) * quantum  # nothing is ever recomputed here: P is 1
    assert driven.longest_wait == short - 1


def test_the_bound_for_rows_that_fit_together_breaks_when_they_do_not() -> None:
    """Four rows of a whole pool each, four seats: one runs at a time, recomputing token by token."""
    engine = EngineConfig(page_tokens=4, pages=4, max_batch=4, max_batch_tokens=4, prefill_chunk=1, max_live=4)
    driven = Drive(engine, SchedulingConfig(wait_limit_steps=2, quantum_steps=2), 17, 3, 0.0)
    driven.run([(0, 15, 2)] * 4)
    assert driven.found.sure == 1
    assert driven.found.tokens == 16
    together = wait_bound(4, 4, 2, 16)  # W + ceil(N/B) h, as if the pool held all four
    assert together < driven.longest_wait <= wait_steps(engine, driven.found, 2, 2)


def test_a_protected_rows_chunk_shrinks_to_the_free_pages_while_rows_behind_hold_theirs() -> None:
    """Why P has a term in pages: request 1, overdue, computes 2 of its last 6 tokens where 6 holders are paused."""
    engine = EngineConfig(page_tokens=1, pages=24, max_batch=2, max_batch_tokens=14, prefill_chunk=6, max_live=14)
    batcher = Batcher(engine, SchedulingConfig(wait_limit_steps=6, quantum_steps=1))
    for i, (prompt, output) in enumerate([(10, 3), (12, 1)] + [(1, 12)] * 12):
        batcher.submit(Request(i, 0.0, prompt, output))
    batcher.admit()
    table = batcher.slots

    def score(slots: Any) -> Any:  # the two long ones last, then who holds no pages
        return np.where(table.order[slots] < 2, -100.0, -1.0 * batcher.pages.count[slots])

    shares = []
    for _ in range(9):
        plan = batcher.plan(0.0, score, np.zeros(14))
        shares.append(dict(zip(plan.ids.tolist(), plan.n_tokens.tolist(), strict=True)))
        batcher.observe(StepResult(plan.step, 0.0, 1.0, token_ids=plan.ids[plan.samples]))
    assert [share[1] for share in shares[6:]] == [6, 2, 4]
    found = seats(engine, 13)
    assert (found.sure, found.short) == (2, True)
    assert longest_computation(engine, found) == 12
    assert longest_computation(engine, found._replace(short=False)) == 5


def test_without_overdue_rows_first_a_wait_has_no_bound() -> None:
    macro = Scored(lambda v: (v.arrival_order > 0).astype(float), wait_limit_steps=10**9, quantum_steps=1)
    engine = EngineConfig(page_tokens=4, pages=64, max_batch=1, max_batch_tokens=8, max_live=3)
    loop = make(engine, macro=macro)
    trace = drive(loop, [Request(i, float(i), 1, 1 if i else 3) for i in range(80)])
    first = next(plan.step for plan in trace.plans[1:] if 0 in plan.ids)
    found = seats(engine, 4)
    assert first > 70 > wait_steps(engine, found, 7, 1)


def test_what_the_claims_say_follows_the_config() -> None:
    table = {"pages": 64, "page_tokens": 16, "max_live": 8, "max_batch": 4, "max_batch_tokens": 64, "prefill_chunk": 32}
    fits = judge({"engine": table}, longest_tokens=129)["wait"]
    assert (fits.numbers["rows_together"], fits.status) == (4, "proved")
    tight = judge({"engine": table | {"pages": 16}}, longest_tokens=129)["wait"]
    assert tight.numbers["rows_together"] == 2
    assert "engine.pages = 32" in tight.reason
    assert tight.numbers["wait_steps"] > fits.numbers["wait_steps"]
    alone = judge({"engine": table | {"max_live": 4}}, longest_tokens=129)["wait"]
    assert alone.numbers["wait_steps"] == 200
    patient = judge({"engine": table, "loop": {"scheduling": {"wait_limit_steps": 300}}}, longest_tokens=129)["wait"]
    assert patient.numbers["wait_steps"] == fits.numbers["wait_steps"] + 100


@given(st.integers(1, 10**4), st.integers(1, 10**4))
def test_longer_requests_never_lower_the_bounds(a: int, b: int) -> None:
    engine = EngineConfig()
    short, long = (seats(engine, n) for n in sorted((a, b)))
    assert short.sure >= long.sure
    assert wait_steps(engine, short, 200, 8) <= wait_steps(engine, long, 200, 8)


# the queue


@pytest.mark.parametrize("live", [4, 16])
def test_the_capacity_decides_between_proved_and_unknown(live: int) -> None:
    table = {"engine": {"max_live": live, "max_batch": 4, "pages": 40}}
    given_ = Assumptions(longest_tokens=160, step_s=0.05, token_s=0.001, recomputed_tokens=3.0)  # of any request
    run = config.from_mapping(table)
    most = capacity(run.engine, given_)
    seated = seats(run.engine, 160)
    assert seated == (4, 159, 10, live == 16)
    per_token = Fraction(1, 256) + (Fraction(1, 16) if live == 16 else 0)
    tokens = 128 + (3 if live == 16 else 0)
    by_hand = Fraction(0.05) * (16 + per_token * tokens) + Fraction(0.001) * tokens
    assert work_seconds(run.engine, seated, given_) == by_hand
    for factor, status in ((0.999, "proved"), (1.001, "unknown")):
        rate = factor * float(most)
        found = claims(Subject(run, 32_000, dataclasses.replace(given_, rate_per_s=rate)), Hints({}))[1]
        assert found.status == status
        assert Fraction(found.numbers["capacity_per_s"]) <= most
        assert Fraction(found.numbers["load"]) >= Fraction(rate) / most
        assert (Fraction(found.numbers["drift_s"]) < 0) == (status == "proved")


def test_at_the_capacity_itself_nothing_is_proved() -> None:
    """One seat, one output of one second, a prompt of one chunk: work of 2 s, exactly."""
    table = {"max_batch": 1, "max_live": 1, "max_batch_tokens": 64, "prefill_chunk": 64}
    run = config.from_mapping({"engine": table})
    given_ = Assumptions(step_s=1.0, prompt_tokens=64.0, output_tokens=1.0, longest_tokens=65)
    assert capacity(run.engine, given_) == Fraction(1, 2)
    for rate, status in ((0.5, "unknown"), (np.nextafter(0.5, 0.0), "proved")):
        at = dataclasses.replace(given_, rate_per_s=float(rate))
        assert claims(Subject(run, 32_000, at), Hints({}))[1].status == status


def run_of(rate: float, n: int, **engine: int) -> RunConfig:
    limits = {"max_batch": 4, "max_batch_tokens": 64, "prefill_chunk": 32, "max_live": 64, "pages": 256} | engine
    work = {"kind": "poisson", "rate_per_s": rate, "n_requests": n, "prompt_tokens": 32, "prompt_cv": 0.3}
    return config.from_mapping({"workload": work | {"output_tokens": 16, "output_length": "limit"}, "engine": limits})


@pytest.mark.parametrize("pages", [40, 1024])
def test_below_the_certified_capacity_the_simulated_queue_is_stable_and_far_above_it_grows(pages: int) -> None:
    """Step time is the linear one, so step_s and token_s are exact; what a request recomputes is measured."""
    cost = LinearCost(0.01, 0.0005)
    base = run_of(1.0, 1500, pages=pages)
    known = {k: v for k, v in assumed(base, ("step_s", "token_s")).items() if k != "rate_per_s"}
    longest = int(known["longest_tokens"])
    step_s = longest_step(base, cost, longest)
    token_s = token_slope(base, cost, longest, step_s)
    assert step_s == pytest.approx(0.012)
    assert token_s == pytest.approx(0.0005)
    given_ = dataclasses.replace(parse([], known), step_s=step_s, token_s=token_s, recomputed_tokens=20.0)
    most = float(capacity(base.engine, given_))
    verdicts = {}
    for factor in (0.95, 3.0):
        run = run_of(factor * most, 1500, pages=pages)
        requests = simulate(run, cost=cost, uncertified=True).requests
        if factor < 1:
            assert requests["preemptions"].max() * longest <= 20.0
        verdicts[factor] = queue_drift(requests["arrival_s"], requests["left_s"]).verdict
    assert verdicts == {0.95: "stable", 3.0: "unstable"}


@settings(max_examples=40)
@given(st.data())
def test_the_affine_step_time_covers_what_the_roofline_charges(data: Any) -> None:
    run = config.from_mapping({"loop": {"pruning": {"law": data.draw(st.sampled_from(["off", "budget"]))}}})
    cost, longest = preset(data.draw(st.sampled_from(["cpu2-smollm2-135m", "a100-80-llama-3-8b"]))), 700
    step_s = longest_step(run, cost, longest)
    token_s = token_slope(run, cost, longest, step_s)
    engine = run.engine
    prefill = data.draw(st.integers(0, engine.max_batch))
    decode = data.draw(st.integers(0, engine.max_batch - prefill))
    share = (engine.max_batch_tokens - decode) // max(1, prefill)
    rows = [(data.draw(st.integers(1, min(share, 256))), data.draw(st.booleans())) for _ in range(prefill)]
    rows = [(n, s if n > 1 else False) for n, s in rows]
    context = [data.draw(st.integers(0, 699 - n)) for n, _ in rows]
    seen = float(sum(data.draw(st.integers(0, 699)) for _ in range(decode)))
    sampling, tokens = decode + sum(s for _, s in rows), decode + sum(n for n, _ in rows)
    load = StepLoad(
        prefill + decode,
        tokens,
        sampling,
        decode,
        seen,
        prefill_context=float(sum(context)),
        prefill_pairs=sum(n * (c + 0.5 * (n + 1)) for (n, _), c in zip(rows, context, strict=True)),
    )
    assert cost.step(load).seconds <= (step_s + token_s * (tokens - sampling)) * (1 + 1e-9)


def test_assumptions_come_from_the_workload_and_replace_nothing_that_was_told() -> None:
    run = run_of(2.5, 300)
    known = assumed(run)
    assert known["rate_per_s"] == 2.5
    assert known["output_tokens"] == 16.0
    assert known["prompt_tokens"] == pytest.approx(32, rel=0.1)
    assert set(known) == {"rate_per_s", "prompt_tokens", "output_tokens", "longest_tokens", "step_s", "token_s"}
    assert "step_s" not in assumed(run, ["step_s"])
    assert parse(["rate_per_s=9"], assumed(run, ["rate_per_s"])).rate_per_s == 9.0
    split = dataclasses.replace(run, cluster=config.ClusterConfig(replicas=2))
    assert "rate_per_s" not in assumed(split)  # what a router passes on is no Poisson stream


NOT_POISSON: dict[str, dict[str, Any]] = {
    "burst": {},
    "closed": {"users": 4},
    "gamma": {"rate_per_s": 0.001},
    "mmpp": {"rates_per_s": [0.001, 20.0], "dwell_s": [1000.0, 1.0]},
    "diurnal": {"rates_per_s": [0.001, 0.002]},
    "sessions": {"turns": 5, "rate_per_s": 0.001},
}


@pytest.mark.parametrize("kind", NOT_POISSON)
def test_arrivals_that_the_proof_does_not_cover_are_unknown_whatever_their_rate(kind: str) -> None:
    work = {"kind": kind, "n_requests": 50} | NOT_POISSON[kind]
    run = config.from_mapping({"workload": work, "engine": {"max_live": 8, "pages": 4096}})
    known = assumed(run)
    assert "rate_per_s" not in known
    claim = claims(Subject(run, 32_000, parse([], known)), Hints({}))[1]
    assert claim.status == "unknown"
    assert "Poisson" in claim.reason
    assert not seats(run.engine, int(known["longest_tokens"])).short
    told = claims(Subject(run, 32_000, parse(["rate_per_s=0.001"], known)), Hints({}))[1]
    assert told.status == "proved"  # if somebody states that they are a Poisson stream


def test_a_trace_is_no_poisson_stream(tmp_path: Any) -> None:
    lines = ["arrived_at,num_prefill_tokens,num_decode_tokens", *(f"{100.0 * i},8,8" for i in range(5))]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = config.from_mapping({"workload": {"kind": "trace", "trace": str(tmp_path / "t.csv")}})
    assert "rate_per_s" not in assumed(run)


@pytest.mark.parametrize(("pages", "expected"), [(64, "unknown"), (64 * 256, "proved")])
def test_where_pages_are_short_a_backlog_can_grow_at_three_tenths_of_the_capacity_of_one_request_alone(
    pages: int, expected: str
) -> None:
    """Overdue turns throw away what the others computed: what is computed again grows with the live requests."""
    run = config.from_mapping({"engine": {"pages": pages, "max_live": 256}})
    given_ = Assumptions(step_s=1.0, prompt_tokens=768, output_tokens=256, longest_tokens=1024)
    if expected == "proved":  # the same load, on a pool that holds them all
        small = config.from_mapping({"engine": {"pages": 64, "max_live": 256}}).engine
    else:
        small = run.engine
    rate = 0.3 * float(capacity(small, given_))
    claim = claims(Subject(run, 32_000, dataclasses.replace(given_, rate_per_s=rate)), Hints({}))[1]
    assert claim.status == expected
    if expected == "unknown":
        assert "max_live <= 1" in claim.reason
        assert "16384 pages" in claim.reason
        assert "recomputed_tokens" in claim.reason
    spec, rng = run.loop.scheduling.config, np.random.default_rng(0)
    law = SchedulingConfig(wait_limit_steps=spec.wait_limit_steps, quantum_steps=spec.quantum_steps)
    batcher, arrived, backlog = Batcher(run.engine, law), 0, []
    for step in range(8000):
        for _ in range(rng.poisson(rate) + (200 if step == 0 else 0)):
            batcher.submit(Request(arrived, 0.0, 768, 256))
            arrived += 1
        batcher.admit()
        backlog.append(batcher.live + batcher.backlog)
        if batcher.live:
            order = batcher.slots.order
            plan = batcher.plan(0.0, lambda slots, order=order: -order[slots].astype(float), np.zeros(256))
            batcher.observe(StepResult(plan.step, 0.0, 1.0, token_ids=plan.ids[plan.samples]))
    assert (backlog[-1] > backlog[3999] > 200) if expected == "unknown" else (backlog[-1] < 10)
