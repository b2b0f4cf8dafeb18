"""The dwell time of theta and the loop through it: every move of the shipped law, both sides of the cycle's bound."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_ctl import config
from entropic_ctl.policy import Policy
from entropic_ctl.pruning.laws import budget
from entropic_ctl.scheduling import fcfs
from entropic_ctl.signals import FloatArray
from entropic_ctl.temperature import fixed
from proofs import budget_moves
from proofs.check import Assumptions, Claim, Hints, Subject
from proofs.check.dwell import claims


def judge(r: float = 0.05, lag: int = 0, n: int = 32_000, drafts: int = 0, **table: Any) -> dict[str, Claim]:
    tables: dict[str, Any] = {"engine": {"observation_lag": lag}, "loop": {"pruning": {"law": "budget", **table}}}
    run = config.from_mapping(tables | ({"speculation": {"draft_tokens": drafts}} if drafts else {}))
    return {claim.theorem: claim for claim in claims(Subject(run, n, Assumptions(r=r)), Hints({}))}


configs = st.builds(
    lambda narrow, more, low, wider, d: budget.Config(
        theta_nats=narrow,
        theta_wide_nats=narrow + more,
        entropy_low_nats=low,
        entropy_high_nats=low + wider,
        widen_after=d,
    ),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 3.0),
    st.floats(0.01, 4.0),
    st.integers(1, 9),
)


# dwell


@pytest.mark.parametrize("d", [1, 2, 3, 5])
def test_every_history_of_the_shipped_law_keeps_the_dwell_time(d: int) -> None:
    """All states reachable with five levels of entropy, with the age of the last widening: no widening before age d."""
    law = budget.Budget(budget.Config(theta_nats=0.01, theta_wide_nats=0.09, widen_after=d))
    entropies = np.array([0.5, 1.0, 1.5, 2.5, 3.0])
    start = (*law.start(), d)  # nothing was ever widened: an age that forbids nothing
    seen, todo, ages = {start}, [start], set()
    while todo:
        theta, timer, age = todo.pop()
        after, count = law.update(np.full(5, theta), np.full(5, timer), entropies)
        asked = law.wanted(entropies)
        for new, j, h in zip(after.tolist(), count.tolist(), asked.tolist(), strict=True):
            assert new <= max(theta, h)
            assert new in (h, theta)
            if h < theta:
                assert new == h  # at once
            if new > theta:
                ages.add(age + 1)
            state = (new, j, 0 if new > theta else min(age + 1, 2 * d))
            if state not in seen:
                seen.add(state)
                todo.append(state)
    assert min(ages) == d  # the bound is attained, and nothing is below it
    assert len(seen) > 5 * d


@given(configs)
def test_the_exhaustive_moves_find_no_fault_in_the_shipped_law(law: budget.Config) -> None:
    assert budget_moves.fault(law) == ""


@pytest.mark.parametrize("fault", ["early", "lazy", "forgetful"])
def test_a_law_that_breaks_the_dwell_time_is_refuted(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = budget.Budget.update

    def update(self: budget.Budget, theta: Any, timer: Any, entropy: Any) -> Any:
        asked = self.wanted(entropy)
        after, count = honest(self, theta, timer, entropy)
        if fault == "early":  # widens one move too soon
            soon = (asked > theta) & (timer >= self.config.widen_after - 2)
            return np.where(soon, asked, after), np.where(soon, 0, count)
        if fault == "lazy":  # narrows half of the way
            return np.where(asked < theta, (theta + asked) / 2, after), count
        return after, np.where(asked < theta, timer, count)  # an interruption does not reset the timer

    monkeypatch.setattr(budget.Budget, "update", update)
    assert judge()["dwell"].status == "refuted"


@pytest.mark.parametrize("d", [1, 4, 7, 2000, 10**6])
def test_the_numbers_of_a_thousand_tokens_are_attained_and_never_passed(d: int) -> None:
    found = judge(widen_after=d)["dwell"]
    law = budget.Budget(budget.Config(widen_after=d))
    worst = [3.0 if t and t % d == 0 else 0.5 for t in range(1000)]  # ask d times for wide, then once for narrow
    for entropies in (worst, np.random.default_rng(d).uniform(0, 4, 1000).tolist()):
        theta, timer = (np.array([x]) for x in law.start())
        path = [float(theta[0])]
        for h in entropies:
            theta, timer = law.update(theta, timer, np.array([h]))
            path.append(float(theta[0]))
        moves = np.diff(path)
        assert int((moves > 0).sum()) <= found.numbers["widenings"]
        assert np.abs(moves).sum() <= float(Fraction(found.numbers["total_variation_nats"])) + 1e-9
        turns = np.sign(moves[moves != 0])
        assert int((np.diff(turns) != 0).sum()) <= found.numbers["turns"]
    assert (d, found.numbers["widenings"]) in {(1, 1000), (4, 250), (7, 142), (2000, 0), (10**6, 0)}


def test_widenings_come_every_d_plus_one_tokens_at_most_where_each_is_taken_back() -> None:
    """With full swings a widening needs a narrowing first: period d + 1; in small rises it is d."""
    law = budget.Budget(budget.Config(theta_nats=0.0, theta_wide_nats=1.0, widen_after=3))
    rising = [3.0 - 0.25 * (t // 3) for t in range(3, 33)]
    theta, timer = (np.array([x]) for x in law.start())
    ups = []
    for t, h in enumerate(rising):
        new, timer = law.update(theta, timer, np.array([h]))
        if new[0] > theta[0]:
            ups.append(t)
        theta = new
    assert set(np.diff(ups)) == {3}


def test_off_is_not_applicable_and_equal_budgets_are_constant() -> None:
    run = config.from_mapping({})
    assert {c.status for c in claims(Subject(run, 300, Assumptions()), Hints({}))} == {"not applicable"}
    found = judge(theta_nats=0.03, theta_wide_nats=0.03)
    assert found["dwell"].numbers["widenings"] == 0
    assert "never moves" in found["dwell"].reason
    assert found["theta-cycle"].status == "proved"


# the cycle


@given(configs)
def test_the_shipped_want_falls_from_wide_to_narrow_in_one_line_over_the_band(law: budget.Config) -> None:
    """What the slope and the counter-example of `theta-cycle` rest on."""
    ends = np.linspace(law.entropy_low_nats, law.entropy_high_nats, 5)
    wide, narrow = law.theta_wide_nats, law.theta_nats
    shipped = budget.Budget(law).wanted(np.array([0.0, *ends, 99.0]))
    np.testing.assert_allclose(shipped, [wide, *np.linspace(wide, narrow, 5), narrow], rtol=1e-12, atol=1e-12)


def closed_loop(law: budget.Config, effect: Any, lag: int, tokens: int) -> FloatArray:
    """Theta token by token in the shipped policy, when the model entropy of a token is ``effect(theta)``."""
    policy = Policy(
        fixed.build(fixed.Config()), budget.Budget(law), fcfs.build(fcfs.Config()), slots=1, observation_lag=lag
    )
    slot = np.array([0])
    policy.start(slot)
    path = []
    for _ in range(tokens):
        path.append(float(policy.theta[0]))
        h = np.array([effect(path[-1])])
        policy.observe(slot, h, h, np.array([False]))
    return np.array(path)


def period(path: FloatArray) -> int:
    tail = path[len(path) // 2 :]
    for p in range(1, 40):
        if (tail[p:] == tail[:-p]).all():
            return p
    return 0


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("d", [1, 4])
def test_a_refuted_config_cycles_on_the_shipped_law_and_just_below_it_settles(d: int, lag: int) -> None:
    table = {"theta_nats": 0.25, "theta_wide_nats": 0.75, "entropy_low_nats": 1.0, "entropy_high_nats": 3.0}
    law = budget.Config(**table, widen_after=d)  # type: ignore[arg-type]
    above, below = (judge(r, lag, widen_after=d, **table)["theta-cycle"] for r in (4.0, math.nextafter(4.0, 0.0)))
    assert (above.status, below.status) == ("refuted", "proved")
    low, effect = float(Fraction(above.numbers["entropy_nats"][0])), float(Fraction(above.numbers["effect"]))
    path = closed_loop(law, lambda theta: low + effect * (theta - 0.25), lag, 400)
    assert period(path) == above.numbers["period_tokens"] == d + 1 + 2 * lag
    assert set(path) == {0.25, 0.75}
    calm = closed_loop(law, lambda theta: low + 0.95 * effect * (theta - 0.25), lag, 400 * (d + lag))
    assert period(calm) <= 1 or np.ptp(calm[-40:]) < 1e-3
    assert below.numbers["settles_tokens"] > 10**6  # just below the bound it may take for ever


@pytest.mark.parametrize("lag", [0, 1])
@settings(max_examples=20)
@given(law=configs, share=st.floats(0.0, 0.9), baseline=st.floats(-2.0, 5.0), bend=st.floats(-1.0, 1.0))
def test_below_the_bound_every_baseline_settles_in_the_tokens_claimed(
    law: budget.Config, share: float, baseline: float, bend: float, lag: int
) -> None:
    """Any effect with slope at most r: here a sine, so neither monotone nor linear."""
    width = law.theta_wide_nats - law.theta_nats
    if width < 1e-6:
        return
    r = min(share * (law.entropy_high_nats - law.entropy_low_nats) / width, 999.0)
    table = {k: v for k, v in dataclasses.asdict(law).items() if k.startswith(("theta", "entropy", "widen"))}
    found = judge(r, lag, **table)["theta-cycle"]
    assert found.status == "proved"
    wave = 9.0 / width

    def effect(theta: float) -> float:
        return baseline + bend * r / wave * math.sin(wave * (theta - law.theta_nats))

    tokens = found.numbers["settles_tokens"]
    path = closed_loop(law, effect, lag, tokens + 60 * (law.widen_after + lag))
    assert np.ptp(path[tokens:]) <= 0.02 * width + 1e-9


def test_the_vocabulary_decides_whether_the_counter_example_is_real() -> None:
    table = {"theta_wide_nats": 0.5, "entropy_low_nats": 1.0, "entropy_high_nats": 3.0}
    assert judge(10.0, n=32_000, **table)["theta-cycle"].status == "refuted"
    assert judge(10.0, n=10, **table)["theta-cycle"].status == "unknown"  # ln 10 = 2.3
    never = judge(10.0, n=2, **table)["theta-cycle"]
    assert (never.status, "never" in never.reason or "all that is asked" in never.reason) == ("proved", True)


def test_every_order_of_a_short_history_narrows_at_once() -> None:
    law = budget.Budget(budget.Config(theta_nats=0.0, theta_wide_nats=1.0, widen_after=2))
    for history in itertools.product([0.5, 1.75, 3.0], repeat=6):
        theta, timer = (np.array([x]) for x in law.start())
        for h in history:
            asked, old = float(law.wanted(np.array([h]))[0]), float(theta[0])
            theta, timer = law.update(theta, timer, np.array([h]))
            assert theta[0] == asked if asked < old else theta[0] in (old, asked)


def test_with_drafts_a_loop_that_should_settle_moves_longer_so_nothing_is_claimed() -> None:
    """Slope 0.9 and five accepted tokens a step, all computed under the theta from before the step."""
    table = {"theta_nats": 0.02, "theta_wide_nats": 0.03, "widen_after": 1}
    assert judge(225.0, **table)["theta-cycle"].status == "proved"
    tokens = judge(225.0, **table)["theta-cycle"].numbers["settles_tokens"]
    with_drafts = judge(225.0, drafts=4, **table)
    assert with_drafts["theta-cycle"].status == "unknown"
    assert "5 tokens a step" in with_drafts["theta-cycle"].reason
    assert with_drafts["dwell"].status == "proved"  # about accepted tokens, whatever theta they were computed under
    law = budget.Config(**table)  # type: ignore[arg-type]
    policy = Policy(fixed.build(fixed.Config()), budget.Budget(law), fcfs.build(fcfs.Config()), slots=1)
    slot = np.array([0])
    policy.start(slot)
    path = []
    for _ in range(3 * tokens):
        h = np.full(5, 1.0 + 225.0 * (policy.theta[0] - 0.02))
        path += [float(policy.theta[0])] * 5
        policy.observe(np.zeros(5, np.int64), h, h, np.zeros(5, np.bool_))
    assert np.ptp(path[tokens:]) > 0.01 * 0.01  # the 1% of the range that one token a step would have reached
    assert judge(drafts=4, theta_nats=0.03, theta_wide_nats=0.03)["theta-cycle"].status == "proved"
    assert judge(drafts=4, n=2, entropy_low_nats=1.0)["theta-cycle"].status == "proved"


@pytest.mark.parametrize("share", [0.5, 0.9, 0.98])
def test_the_settling_time_is_attained_by_a_steep_effect_within_a_factor_of_two(share: float) -> None:
    """w alternates about its fixed point; with d = 1 every token is a jump."""
    law = budget.Config(theta_nats=0.0, theta_wide_nats=1.0, entropy_low_nats=1.0, entropy_high_nats=2.0, widen_after=1)
    table = {k: v for k, v in dataclasses.asdict(law).items() if k.startswith(("theta", "entropy", "widen"))}
    tokens = judge(share, **table)["theta-cycle"].numbers["settles_tokens"]
    path = closed_loop(law, lambda theta: 1.0 + share * theta, 0, 2 * tokens)
    assert np.ptp(path[tokens:]) <= 0.02
    assert np.ptp(path[int(0.8 * tokens) :]) <= 0.05
    assert np.ptp(path[int(0.4 * tokens) :]) > 0.05
