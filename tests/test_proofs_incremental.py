"""What `bounded`, `incremental` and `variance` say at the edges of their conditions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_claims import micro

from entropic_ctl import config
from entropic_ctl.entropy import ArrayLogitView, entropy_varentropy
from entropic_ctl.temperature import damped, feedback, solve
from proofs import search
from proofs.check import Assumptions, Claim, Hints, Subject, changing, gain, variance
from proofs.vmax import maximum
from sim.frozen import LevelView, drive

N = 32_000
V_MAX = float(maximum(N).upper)


def decide(run: config.RunConfig, n: int = N, **assumed: float) -> dict[str, Claim]:
    subject = Subject(run, n, Assumptions(**assumed))  # type: ignore[arg-type]
    hints = Hints(search._verified(subject, gain.claims, {}))
    return {claim.theorem: claim for claim in changing.claims(subject, hints)}


# copies


def test_at_lag_1_two_temperatures_may_move_apart_though_never_beyond_the_start() -> None:
    """At k = 0.03 and the sharp target swings grow within an excursion; the start is never exceeded."""
    sharp = maximum(N)
    run = micro(gain=0.03, lag=1, target_nats=sharp.entropy_nats, temperature=1.0, rate_limit=0.0)
    claim = decide(run)["bounded"]
    assert claim.numbers["never_beyond_start"] == "proved"
    assert "never further apart than at the start" in claim.reason
    assert "move apart" not in claim.reason
    law = feedback.build(run.loop.temperature.config)
    view = LevelView([sharp.logit, 0.0], [1, N - 1], 2)
    u, _ = drive(law, lambda _t, _rows: view, np.array([-1e-4, 1e-4]), 200, 1)
    apart = np.abs(u[:, 1] - u[:, 0])
    assert (np.diff(apart) > 1e-6).any()  # they do move apart for a while
    assert apart.max() <= apart[0] * (1 + 1e-9)
    assert "never move apart" in decide(micro(gain=0.03))["bounded"].reason


@pytest.mark.parametrize(
    ("run", "status"),
    [
        (micro(gain=1.5 / V_MAX, lag=1, target_nats=0.5), "unknown"),  # 1 < k V_max < 2, below 1 at the target
        (micro(gain=0.99 / V_MAX, lag=1, target_nats=0.5), "proved"),
        (micro(gain=0.6 / V_MAX, drafts=2, target_nats=0.5), "unknown"),  # 3 k V_max - 1 = 0.8, but 2 k V_max = 1.2
        (micro(gain=0.49 / V_MAX, drafts=2, target_nats=0.5), "proved"),
        (micro(gain=1.9 / V_MAX, target_nats=0.5, rate_limit=0.0), "proved"),
        (micro(gain=0.3, lag=1), "refuted"),
        (micro(gain=-0.01), "refuted"),
    ],
)
def test_copies_at_every_lag_and_number_of_updates(run: config.RunConfig, status: str) -> None:
    assert decide(run)["bounded"].numbers["never_beyond_start"] == status
    assert (decide(run)["incremental"].status == "proved") == (status == "proved")


def test_the_tokens_that_halve_the_distance_count_the_lag_twice() -> None:
    """|d_t| <= q^(t - 2 lag) |d_0|: the stated number is the least with at most a half."""
    for lag in (0, 1):
        numbers = decide(micro(gain=0.02, lag=lag))["incremental"].numbers
        q, halve = float(numbers["q"]), numbers["halve"]
        assert q ** (halve - 2 * lag) <= 0.5 < q ** (halve - 2 * lag - 1)


def test_a_counter_example_below_the_assumed_varentropy_is_none() -> None:
    """Two-level logits that repel count only if the assumptions allow them."""
    run = micro(gain=0.16, target_nats=1.5)  # k V = 2.45 at the target
    assert decide(run, varentropy_min=15.0)["incremental"].status == "refuted"
    assert decide(run, varentropy_min=16.0)["incremental"].status == "unknown"


def test_equal_logits_hold_two_copies_apart_only_if_both_fit_between_the_clamps() -> None:
    """The step of all updates, not of one, must be shorter than the clamps are apart."""
    step = 0.01 * math.log(2)  # of one update on logits with some ln m within ln 2 of the target
    for drafts, updates in ((0, 1), (2, 3)):
        for factor, status in ((1.1, "refuted"), (0.9, "unknown")):
            wide = {"t_min": 0.8, "t_max": 0.8 * math.exp(factor * updates * step), "temperature": 0.8}
            run = micro(gain=0.01, drafts=drafts, **wide)
            assert decide(run, varentropy_min=0.0)["incremental"].status == status


def test_the_wrong_sign_and_none_at_all_are_told_apart() -> None:
    wrong, none = (decide(micro(gain=k))["incremental"] for k in (-0.02, 0.0))
    assert (wrong.status, none.status) == ("refuted", "refuted")
    assert "apart until a clamp" in wrong.reason
    assert "leaves every distance" in none.reason


def test_a_loop_that_never_saturates_needs_no_assumed_error() -> None:
    """Linear without a rate limit: the same for any `error_nats`; tanh, or a limit in reach, is not."""
    for rest, needs in (
        ({"rate_limit": 0.0}, False),
        ({}, False),
        ({"rate_limit": 0.05}, True),
        ({"phi": "tanh", "phi_scale_nats": 6.0, "rate_limit": 0.0}, True),
    ):
        said = {decide(micro(gain=0.02, **rest), error_nats=e)["incremental"].reason for e in (0.5, 1.0)}
        assert (len(said) == 2, all("|H - H*|" in one for one in said)) == (needs, needs)


# variance


@pytest.mark.parametrize("lag", [0, 1])
def test_the_ratio_of_white_entropy_is_not_understated(lag: int) -> None:
    for k in (0.001, 0.007, 0.0123, 0.02):
        numbers = decide(micro(gain=k, lag=lag))["variance"].numbers
        for place in ("v_lo", "target", "v_max"):
            above, below = variance.ar1_form(lag, Fraction(k) * Fraction(numbers[place]["varentropy"]), Fraction(0))
            assert 0 <= Fraction(numbers[place]["white_ratio"]) - above / below < Fraction(1, 10**14)


def errors(run: config.RunConfig, z: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the error at T0, the one after, and whether the target is within reach, of each row of logits."""
    c: Any = run.loop.temperature.config
    view = ArrayLogitView(z)
    law = (damped if run.loop.temperature.name == "damped" else solve).build(c)
    after = law.temper(np.full(len(z), law.start()), view)[1] - c.target_nats
    ends = [entropy_varentropy(z, T)[0] - c.target_nats for T in (c.t_min, c.t_max)]
    return entropy_varentropy(z, c.temperature)[0] - c.target_nats, after, (ends[0] <= 0) & (ends[1] >= 0)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]), st.sampled_from([1e-9, 0.03, 0.3]))
def test_damped_leaves_its_share_of_the_error_plus_the_tolerance(seed: int, f: float, tolerance: float) -> None:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(40, 60)) * rng.uniform(0.3, 6, (40, 1))
    run = micro("damped", fraction=f, target_nats=2.0, tolerance_nats=tolerance)
    numbers = decide(run, 60, varentropy_min=0.3)["variance"].numbers
    worst, floor = float(numbers["error_ratio_worst"]), float(Fraction(numbers["error_nats"]))
    before, after, reach = errors(run, z)
    least = np.min([entropy_varentropy(z, T)[1] for T in np.geomspace(0.3, 1.6, 40)], axis=0)
    fair = reach & (least >= 0.31)
    assert (np.abs(after) <= worst * np.abs(before) + floor + 1e-8)[fair].all()
    assert (np.abs(after) <= np.maximum(np.abs(before), floor) + 1e-8).all()


def test_damped_out_of_reach_keeps_more_than_its_share() -> None:
    """The condition is needed: a token whose target lies below the clamps keeps more of its error."""
    run = micro("damped", fraction=0.99, target_nats=0.5)
    claim = decide(run, 60)["variance"]
    before, after, reach = errors(run, np.linspace(0.0, -4.0, 60)[None])
    assert not reach[0]
    assert abs(after[0]) > 1.5 * float(claim.numbers["error_ratio_worst"]) * abs(before[0])
    assert "within reach of the clamps" in claim.reason


def test_damped_with_a_wide_tolerance_keeps_an_error_though_it_goes_all_the_way() -> None:
    run = micro("damped", fraction=1.0, target_nats=2.0, tolerance_nats=0.3)
    claim = decide(run, 60)["variance"]
    assert (claim.numbers["error_ratio"], float(claim.numbers["error_ratio_worst"])) == ("0", 0.0)
    z = np.random.default_rng(1).normal(size=(200, 60)) * np.linspace(0.3, 6, 200)[:, None]
    before, after, reach = errors(run, z)
    assert 0.01 < np.abs(after[reach]).max() <= 0.3
    assert reach.sum() > 50
    assert "plus the tolerance" in claim.reason
    assert np.abs(before[reach]).max() > 0.3
