"""Stability from simulation: exponents, cycles, clamps, steps and queues against closed forms, on both sides."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics_doc import undefined
from synthetic_bank import make_bank

from entropic_ctl.certificates import Verdict
from entropic_ctl.config import from_mapping
from entropic_ctl.entropy import ArrayLogitView
from entropic_ctl.errors import BadInputError
from entropic_ctl.temperature import feedback
from proofs.check import gain_ceiling
from proofs.search import certify
from proofs.search.gain import equilibrium_tail_mass
from proofs.theory import delay_limit
from proofs.vmax import maximum, two_level, two_level_logit
from sim.cycles import behaviour, clamp_share, find_cycle
from sim.drift import in_system, queue_drift
from sim.frozen import LevelView, drive, recorded, still
from sim.lyapunov import at_equilibrium, linear_exponent, onset
from sim.stability import (
    Sharpest,
    find_onset,
    gain_sweep,
    long_run,
    on_recordings,
    typical_token,
    varentropy_of,
)
from sim.stability_report import Claims, study
from sim.step_response import step_response

BEST = maximum(32_000)
SHARP = Sharpest(32_000, BEST.logit, BEST.entropy_nats, float(BEST.lower))
SHORT = {"factors": (0.5, 0.9, 1.1), "steps": 400, "run_steps": 4096}
LAW = feedback.Config(target_nats=1.5, gain=0.02)


def test_the_sharpest_logits_are_those_of_the_spec() -> None:
    assert SHARP.logit == pytest.approx(10.7499, abs=1e-4)
    assert SHARP.entropy_nats == pytest.approx(4.8975, abs=1e-4)
    assert varentropy_of(SHARP) == pytest.approx(SHARP.v_max, rel=1e-12)
    assert [SHARP.limit(d) * SHARP.v_max for d in (0, 1, 2)] == pytest.approx([delay_limit(d) for d in (0, 1, 2)])


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=9), st.floats(0.3, 3.0))
def test_levels_equal_the_logits_written_out(levels: list[int], temperature: float) -> None:
    values, counts = np.unique(np.asarray(levels, float), return_counts=True)
    full = ArrayLogitView(np.asarray(levels, float)[None])
    few = LevelView(values, counts)
    for a, b in zip(few.at(np.array([temperature])), full.at(np.array([temperature])), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    np.testing.assert_allclose(few.model_entropy, full.model_entropy, atol=1e-12)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_exponents_map_is_the_shipped_policy(lag: int) -> None:
    """The reference of Benettin's method, run by hand with the law's own functions, is Policy value by value."""
    views, law = still([5.0, 1.0, 0.0], [1, 4, 900]), feedback.build(dataclasses.replace(LAW, target_nats=4.0))
    u, _ = drive(law, views, [0.3], 80, lag)
    mine, ring = np.array([0.3]), []
    for t in range(80):
        assert u[t, 0] == mine[0]
        ring.append(law.temper(mine, views(t, 1))[1])
        if len(ring) > lag:
            mine = law.update(mine, ring.pop(0))
    assert abs(u[-1, 0] - u[0, 0]) > 0.01


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("factor", [0.3, 0.8, 1.1])
def test_the_exponent_at_equilibrium_is_the_linear_one(lag: int, factor: float) -> None:
    law, views, middle = SHARP.scene(LAW)
    gain = factor * SHARP.limit(lag)
    found = at_equilibrium(feedback.build(dataclasses.replace(law, gain=gain)), views, middle, 900, lag=lag)
    assert found == pytest.approx(linear_exponent(gain * SHARP.v_max, lag), abs=0.005)
    assert (found > 0) == (factor > 1)


def test_linear_exponents_in_closed_form() -> None:
    assert linear_exponent(0.3, 0) == pytest.approx(math.log(0.7))
    assert linear_exponent(2.5, 0) == pytest.approx(math.log(1.5))
    assert linear_exponent(0.81, 1) == pytest.approx(math.log(0.9))  # complex roots: modulus sqrt(kV)
    for lag in range(5):
        limit = delay_limit(lag)
        assert linear_exponent(limit, lag) == pytest.approx(0.0, abs=1e-9)
        assert linear_exponent(0.99 * limit, lag) < 0 < linear_exponent(1.01 * limit, lag)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_onset_is_the_linear_limit(lag: int) -> None:
    """2, 1 and 0.618 over V_max, found by measuring: at lags 0 and 1 that is where the certificate ends."""
    assert find_onset(LAW, SHARP, lag, steps=600) == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize(("lag", "period"), [(0, 2), (1, 6)])
def test_a_cycle_just_past_the_limit_and_none_just_below(lag: int, period: int) -> None:
    """k = 1.001 and 0.999 times 2 / V_max (1 / V_max) on (L, 0, ..., 0), n = 32,000."""
    above = long_run(LAW, SHARP, 1.001 * SHARP.limit(lag), lag=lag)
    below = long_run(LAW, SHARP, 0.999 * SHARP.limit(lag), lag=lag)
    assert (above.kind, above.period) == ("cycles", period)
    assert above.amplitude > 1e-3
    assert (below.kind, below.period) == ("settles", 0)


def test_the_wrong_sign_ends_at_a_clamp() -> None:
    assert long_run(LAW, SHARP, -0.02, steps=1024).kind == "clamped"
    assert long_run(LAW, SHARP, 0.02, steps=1024).kind == "settles"


def test_noise_that_rings_is_no_cycle_and_a_cycle_in_noise_is_one() -> None:
    """Guard on both sides: AR(1) noise with coefficient -0.9 peaks at frequency 1/2 and forgets its phase."""
    false = detected = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        noise = np.empty(2048)
        state = 0.0
        for t, e in enumerate(rng.standard_normal(2048)):
            state = -0.9 * state + e
            noise[t] = state
        false += find_cycle(noise, significance=0.01)[0] > 0
        if seed < 20:
            cycle = 0.3 * np.array([1.0, -0.4, -0.6])[np.arange(2048) % 3]
            detected += find_cycle(cycle + rng.standard_normal(2048) * 0.5)[0] == 3
    assert false <= 3
    assert detected == 20


def test_a_decaying_oscillation_is_no_cycle() -> None:
    t = np.arange(4096)
    assert find_cycle(0.999**t * (-1.0) ** t)[0] == 0
    assert find_cycle((-1.0) ** t) == (2, 0.0)
    assert find_cycle(np.array([0.0, 1.0, 0.5, 3.0])[t % 4])[0] == 4
    assert behaviour(np.where(t % 2 == 0, -1.0, 1.0), -1.0, 1.0).at_clamp == 1.0
    with pytest.raises(BadInputError, match="too short"):
        find_cycle(np.zeros(50))
    assert clamp_share(np.array([0.0, 0.5, 1.0, 1.0]), 0.0, 1.0) == 0.75


def test_on_recorded_logits_the_exponent_is_the_mean_of_the_linear_factor() -> None:
    bank = make_bank(seed=1, prompts=3, lengths=(60, 80))[0]
    law = feedback.Config(target_nats=1.5, gain=0.05, t_min=0.3, t_max=1.9, rate_limit=0.0)
    found, table = on_recordings(law, bank, count=6, steps=120)
    assert found.value == pytest.approx(found.linear, rel=0.02)
    assert found.value < 0
    assert table["value"].shape == (6,)
    eager, _ = on_recordings(dataclasses.replace(law, gain=3.0, t_min=0.26, t_max=1.95), bank, count=6, steps=120)
    assert eager.value > found.value


@pytest.mark.parametrize("lag", [0, 1])
def test_the_step_response_settles_as_the_linear_loop_says(lag: int) -> None:
    views = still([5.0, 2.0, 0.0], [1, 30, 900])
    law = feedback.Config(target_nats=1.0, gain=0.01, temperature=1.0)
    found = step_response(law, views, step_nats=0.02, lag=lag)
    assert found.overshoot < 1e-6
    assert found.settling_tokens == pytest.approx(found.expected_tokens, rel=0.08)
    assert found.entropy[-1] == pytest.approx(found.target_nats[1], abs=1e-9)
    eager = step_response(dataclasses.replace(law, gain=1.6 / found.varentropy), views, step_nats=0.02)
    assert eager.overshoot == pytest.approx(0.6, abs=0.03)  # 1 - kV = -0.6: the first step overshoots by 60%
    with pytest.raises(BadInputError, match="cannot reach"):
        step_response(law, views, step_nats=20.0)


def test_onset_needs_a_bracket() -> None:
    assert onset(lambda k: k - 1.3, 1.0, 2.0) == pytest.approx(1.3, abs=2e-4)
    with pytest.raises(BadInputError, match="no onset"):
        onset(lambda _: 1.0, 1.0, 2.0)


def lindley(load: float, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals and departures of an M/M/1 queue at ``load``, by Lindley's recursion."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1.0, n))
    service, free = load * rng.exponential(1.0, n), 0.0
    left = np.empty(n)
    for i in range(n):
        free = max(free, arrival[i]) + service[i]
        left[i] = free
    return arrival, left


def test_queues_below_capacity_are_stable_and_above_it_drift() -> None:
    """M/M/1 at known capacity, 20 seeds a side; the drift above it is lambda - mu."""
    for load, verdict in ((0.6, "stable"), (1.5, "unstable")):
        found = [queue_drift(*lindley(load, 2000, seed)) for seed in range(20)]
        assert sum(f.verdict == verdict for f in found) >= 18
        assert all(f.verdict in (verdict, "undecided") for f in found)
    assert np.mean([f.rate for f in found]) == pytest.approx(1 - 1 / 1.5, abs=0.05)
    critical = [queue_drift(*lindley(1.0, 2000, seed)).verdict for seed in range(20)]
    assert critical.count("stable") <= 4


def test_the_number_in_system_is_counted() -> None:
    number = in_system([0.0, 1.0, 2.0], [1.5, np.nan, 2.5], [0.0, 1.0, 1.5, 2.0, 9.0])
    np.testing.assert_array_equal(number, [1, 2, 1, 2, 1])
    with pytest.raises(BadInputError, match="too few"):
        queue_drift(np.arange(10.0), np.arange(10.0))
    with pytest.raises(BadInputError, match="at once"):
        queue_drift(np.zeros(200), np.arange(200.0))


def test_the_sweep_and_the_study_find_no_contradiction_and_see_one() -> None:
    bank = make_bank(seed=2, prompts=2, lengths=(60, 80))[0]
    sweep = gain_sweep(LAW, SHARP, factors=(0.5, 0.9, 1.1), steps=600)
    assert sweep["kind"].tolist() == ["settles", "settles", "cycles"] * 2
    config = from_mapping(
        {
            "workload": {"kind": "poisson", "n_requests": 160, "rate_per_s": 0.2, "output_tokens": 8},
            "loop": {"temperature": {"law": "feedback", "gain": 0.02, "target_nats": 1.5}},
        }
    )
    proved = Verdict("proved", "gain-lag-0", "", SHARP.limit(0), "")
    certified = {0: 0.999999 * SHARP.limit(0)}
    good = study(config, bank, Claims(SHARP, proved, certified), **SHORT)
    assert good.contradictions == 0
    assert not undefined("stability", {"findings": good.rows})
    queue = next(row for row in good.rows if row["property"].startswith("queue"))
    assert queue["found"].startswith("stable")
    too_much = study(config, bank, Claims(SHARP, proved, {0: 1.2 * SHARP.limit(0)}), queue=False, **SHORT)
    assert too_much.contradictions == 2  # gains that do not settle, an onset below what was claimed
    refuted = dataclasses.replace(proved, status="refuted")
    assert study(config, bank, Claims(SHARP, refuted, certified), queue=False, **SHORT).contradictions == 1


def test_a_gain_proved_at_its_target_is_held_against_the_logits_of_that_target_only() -> None:
    """k = 0.09 at H* = 1.5: proved there (k V* = 1.38), while at the target of V_max it cycles (k V = 2.5)."""
    bank = make_bank(seed=2, prompts=2, lengths=(60, 80))[0]
    config = from_mapping({"loop": {"temperature": {"law": "feedback", "gain": 0.09, "target_nats": 1.5}}})
    verdict = certify(config, 32_000)
    assert (verdict.status, verdict.theorem) == ("proved", "gain-at-target")
    tail = equilibrium_tail_mass(32_000, 1.5)
    assert tail is not None
    own = Sharpest(32_000, two_level_logit(32_000, tail), 1.5, two_level(32_000, tail)[1])
    certified = {0: gain_ceiling(32_000, 0, BEST.bracket())}
    found = study(config, bank, Claims(SHARP, verdict, certified, own), queue=False, **SHORT)
    assert found.contradictions == 0
    moved = next(row for row in found.rows if row["property"].startswith("temperatures on the same"))
    assert moved["agrees"] is None  # nothing is claimed while logits change
    assert study(config, bank, Claims(SHARP, verdict, certified), queue=False, **SHORT).contradictions == 1


def test_a_typical_token_has_entropy_to_spare() -> None:
    bank = make_bank(seed=2)[0]
    row = typical_token(bank, 0.8)
    assert bank.entropy_grid[row, int(np.argmin(np.abs(bank.grid - 0.8)))] > 1.0
    view = recorded(bank, np.array([row]))(5, 2)
    assert view.model_entropy.shape == (2,)
