"""Theorems `gain-at-target` and `gain-drafts`, on distributions and on the shipped law; sharp on both sides."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from certified import judge, make
from frozen_loops import (
    Levels,
    largest_target,
    moments,
    normalised,
    random_levels,
    run,
    settled,
    sharp_varentropy,
    two_levels,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from entropic_ctl.policy import Policy
from entropic_ctl.registry import load
from entropic_ctl.temperature import feedback
from proofs.check.gain import loop_limit
from proofs.search.gain import equilibrium_tail_mass
from proofs.vmax import maximum

N = 32_000


def tangent(n: int, target: float) -> tuple[float, float]:
    """Return (V*, lam) of V <= V* + lam (H - H*)."""
    tail = equilibrium_tail_mass(n, target)
    assert tail is not None
    x = math.log1p(-tail) - math.log(tail)
    return sharp_varentropy(n, target), (x + math.log(n - 1)) * math.tanh(x / 2) - 2


targets = st.floats(0.01, 0.999)
"""Share of the range of targets with a known V_max(n; H*)."""


# the largest varentropy at a given entropy


@given(st.sampled_from([2, 3, 4, 10, 300, N, 2**20]), targets, st.integers(0, 2**32))
def test_no_distribution_lies_above_the_tangent(n: int, share: float, seed: int) -> None:
    target = share * largest_target(n)
    v, lam = tangent(n, target)
    rng = np.random.default_rng(seed)
    plants = random_levels(rng, n, rng.uniform(0.05, 0.95) * math.log(n), -1.0, 1.0, 50)
    log_p = normalised(plants.gaps * np.exp(-plants.at + rng.normal(0, 0.5, plants.at.shape))[:, None], plants.counts)
    found, varentropy = moments(log_p, plants.counts)
    assert (varentropy <= v + lam * (found - target) + 1e-9).all()
    here = random_levels(rng, n, target, -1.0, 1.0, 50)
    found, varentropy = moments(normalised(here.gaps * np.exp(-here.at)[:, None], here.counts), here.counts)
    np.testing.assert_allclose(found, target, atol=1e-6)
    assert (varentropy <= v + 1e-4).all()


def test_three_tokens_by_a_fine_grid() -> None:
    """The whole simplex of three tokens; the tangents of 40 targets touch it and are crossed nowhere."""
    a, b = np.meshgrid(np.linspace(1e-6, 1, 800), np.linspace(1e-6, 1, 800))
    inside = a + b < 1 - 1e-6
    p = np.stack([a[inside], b[inside], 1 - a[inside] - b[inside]], axis=1)
    entropy, varentropy = moments(np.log(p), np.ones(3))
    for target in np.linspace(0.02, 0.999, 40) * largest_target(3):
        v, lam = tangent(3, float(target))
        gap = v + lam * (entropy - target) - varentropy
        assert gap.min() >= -1e-12
        assert gap.min() < 1e-3


@pytest.mark.parametrize(
    "counts", [(1, 1, 1), (1, 2), (1, 1, 1, 1), (1, 3, 10), (1, 1, N - 2), (1, 10, 1000, N - 1011)]
)
@pytest.mark.parametrize("share", [0.05, 0.4, 0.8, 0.99])
def test_an_optimiser_finds_nothing_above_the_tangent(counts: tuple[int, ...], share: float) -> None:
    """Maximise V - lam H over free logits of each level, from many starts; the two-level optimum is found, no more."""
    n, many = sum(counts), np.asarray(counts, float)
    target = share * largest_target(n)
    v, lam = tangent(n, target)

    def gap(gaps: np.ndarray) -> float:
        entropy, varentropy = moments(normalised(gaps[None], many), many)
        return float(v + lam * (entropy[0] - target) - varentropy[0])

    rng = np.random.default_rng(1)
    tail = equilibrium_tail_mass(n, target)
    assert tail is not None
    near = np.zeros(len(counts))
    near[0] = math.log((1 - tail) * (n - 1) / tail)
    starts = [rng.normal(0, 6, len(counts)) for _ in range(5)] + [near + rng.normal(0, 0.5, len(counts))]
    best = min(optimize.minimize(gap, start, method="L-BFGS-B").fun for start in starts)
    assert best >= -1e-7
    assert best < 0.01 * v  # the search does get there


@pytest.mark.parametrize("n", [2, 3, 10, N, 151_936])
def test_it_is_concave_and_ends_at_v_max(n: int) -> None:
    at = np.linspace(0.01, 0.9999, 400) * largest_target(n)
    v = np.array([sharp_varentropy(n, float(target)) for target in at])
    assert (np.diff(v, 2) < 1e-12).all()
    assert v.max() <= float(maximum(n).upper)
    assert v.max() == pytest.approx(float(maximum(n).upper), rel=1e-3)


def test_numbers_of_the_specification() -> None:
    assert 2 / sharp_varentropy(151_936, 1.0) == pytest.approx(0.1565, abs=5e-5)
    assert 2 / sharp_varentropy(151_936, 2.0) == pytest.approx(0.0903, abs=5e-5)
    assert judge(make(0.05, target_nats=1.0), 151_936).limit == pytest.approx(2 / sharp_varentropy(151_936, 1.0))


# every loop below the limit settles, the sharpest just above does not


def random_law(rng: np.random.Generator, target: float, gain: float) -> feedback.Config:
    low, high = sorted(rng.uniform(0.15, 4.0, 2))
    return feedback.Config(
        temperature=low,
        target_nats=target,
        gain=gain,
        phi=str(rng.choice(["linear", "tanh"])),
        phi_scale_nats=float(np.exp(rng.uniform(-2, 3))),
        rate_limit=float(rng.choice([0.0, 0.02, 0.25, 1.0])),
        t_min=low,
        t_max=high,
    )


def frozen_loops(laws: int, each: int, seed: int, *, drafts: int = 0, lag: int = 0) -> tuple[int, int]:
    """Return (loops run, loops that do not settle) at 0.999 of the limit."""
    rng = np.random.default_rng(seed)
    count = bad = 0
    for _ in range(laws):
        n = int(rng.choice([2, 3, 4, 50, 2000, N, 2**20]))
        target = float(rng.uniform(0.02, 0.999)) * largest_target(n)
        most = float(maximum(n).upper) if lag else sharp_varentropy(n, target)
        config = random_law(rng, target, min(0.999 * float(loop_limit(lag, drafts)) / most, 10.0))
        law, (low, high) = feedback.Feedback(config), np.log([config.t_min, config.t_max])
        reach = 0.3 * (high - low)  # some equilibria lie beyond a clamp
        plant = random_levels(rng, n, target, low - reach, high + reach, each)
        u = run(law, plant, rng.uniform(low, high, plant.at.shape), 600, lag=lag, updates=patterns(rng, drafts, plant))
        count, bad = count + u.shape[1], bad + int((~settled(u)).sum())
        assert (
            np.abs(u[-1] - np.clip(plant.at, low, high)) <= np.abs(u[0] - np.clip(plant.at, low, high)) + 1e-9
        ).all()
    return count, bad


def patterns(rng: np.random.Generator, drafts: int, plant: Levels):
    """Return how many updates a step makes: at random, always the most, in turn, or the most on one side only."""
    kind = rng.integers(0, 5, plant.at.shape)

    def updates(t: int, u: np.ndarray) -> np.ndarray:
        most, one = np.full(u.shape, drafts + 1), np.ones(u.shape, int)
        turn = most if t % 2 else one
        side = np.where(u > plant.at, most, one)
        return np.choose(kind, [rng.integers(1, drafts + 2, u.shape), most, turn, side, np.where(t % 3, one, most)])

    return updates


def test_thousands_of_loops_settle_just_below_the_limit() -> None:
    count, bad = frozen_loops(60, 60, 1)
    assert count > 3000
    assert bad == 0


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drafts", [1, 2, 5])
def test_loops_that_draft_settle_just_below_their_limit(drafts: int, lag: int) -> None:
    count, bad = frozen_loops(15, 40, 10 * drafts + lag, drafts=drafts, lag=lag)
    assert count > 500
    assert bad == 0


@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize(("n", "share"), [(2, 0.6), (3, 0.5), (4, 0.5), (N, 0.02), (N, 0.3), (N, 0.999), (2**20, 0.7)])
def test_two_level_logits_settle_at_0_999_and_never_at_1_001(n: int, share: float, drafts: int) -> None:
    """Sharp at lag 0: with every draft accepted the equilibrium repels just above the limit."""
    target = share * largest_target(n)
    gain = 2 / (drafts + 1) / sharp_varentropy(n, target)
    plant = two_levels(n, target, np.zeros(1))
    for factor in (0.999, 1.001):
        law = feedback.Config(target_nats=target, gain=factor * gain, t_min=0.1, t_max=10.0, rate_limit=0.0)
        u = run(
            feedback.Feedback(law), plant, np.array([1e-3]), 8000, updates=lambda _t, u: np.full(u.shape, drafts + 1)
        )
        assert bool(settled(u, 1e-7)[0]) == (factor < 1)
        assert (abs(u[-1, 0]) < 1e-6) == (factor < 1)
        said = judge(make(factor * gain, target_nats=target, drafts=drafts, temperature=0.8), n)
        assert said.status == ("proved" if factor < 1 else "refuted")


@pytest.mark.parametrize("share", [0.3, 0.999])
def test_the_limit_of_another_target_is_not_enough(share: float) -> None:
    """The bound is about the target: at the one of V_max a gain proved for a smaller target cycles."""
    sharp = maximum(N)
    gain = 0.999 * 2 / sharp_varentropy(N, share * 2.0)
    assert judge(make(gain, target_nats=share * 2.0)).status == "proved"
    assert judge(make(gain, target_nats=sharp.entropy_nats)).status == "refuted"
    law = feedback.Config(target_nats=sharp.entropy_nats, gain=gain, t_min=0.1, t_max=10.0, rate_limit=0.0)
    u = run(feedback.Feedback(law), two_levels(N, sharp.entropy_nats, np.zeros(1)), np.array([1e-3]), 2000)
    assert not settled(u)[0]


def test_two_temperatures_may_part_while_logits_change_under_a_gain_proved_at_the_target() -> None:
    """Weaker than `gain-lag-0`: on logits of largest varentropy two temperatures move apart."""
    sharp = maximum(N)
    gain = 0.999 * 2 / sharp_varentropy(N, 1.0)
    law = feedback.Feedback(feedback.Config(target_nats=1.0, gain=gain, t_min=0.1, t_max=10.0, rate_limit=0.0))
    u = np.array([-1e-3, 1e-3])
    after = law.update(u, two_levels(N, sharp.entropy_nats, np.zeros(2)).entropy(u))
    assert abs(after[1] - after[0]) > 1.5 * (u[1] - u[0])


# drafts


@pytest.mark.parametrize("lag", [0, 1])
def test_the_shipped_policy_updates_once_per_token_of_a_step(lag: int) -> None:
    """Policy.observe with a slot several times is what :func:`frozen_loops.run` does, float by float."""
    law = feedback.Feedback(feedback.Config(target_nats=2.0, gain=0.02, rate_limit=0.02))
    off, fcfs = (load(f"entropic_ctl.{kind}", name) for kind, name in (("pruning.laws", "off"), ("scheduling", "fcfs")))
    policy = Policy(law, off.build(off.Config()), fcfs.build(fcfs.Config()), slots=3, observation_lag=lag)
    slots = np.arange(3)
    policy.start(slots)
    plant = random_levels(np.random.default_rng(3), 500, 2.0, -0.5, 0.4, 3)
    assert plant.at.shape == (3,)
    counts = np.random.default_rng(4).integers(1, 5, (40, 3))
    expected = run(law, plant, policy.u.copy(), 40, lag=lag, updates=lambda t, _u: counts[t])
    for t in range(40):
        rows = np.repeat(slots, counts[t])
        seen = plant.entropy(policy.u.copy())[rows]
        policy.observe(rows, seen, seen, np.zeros(rows.shape, bool))
        np.testing.assert_array_equal(policy.u, expected[t + 1])
    assert np.abs(expected[-1] - expected[0]).min() > 1e-3


@pytest.mark.parametrize(
    ("drafts", "steps", "factor"), [(1, (1, 1, 2), 1.11), (2, (1, 1, 3, 1, 3), 1.1), (5, (1, 6), 1.06)]
)
def test_at_lag_1_the_limit_is_sharp_to_a_tenth(drafts: int, steps: tuple[int, ...], factor: float) -> None:
    sharp = maximum(N)
    plant = two_levels(N, sharp.entropy_nats, np.zeros(1))
    for times in (0.999, factor):
        gain = times * float(loop_limit(1, drafts) / sharp.upper)
        law = feedback.Config(target_nats=sharp.entropy_nats, gain=gain, t_min=0.1, t_max=10.0, rate_limit=0.0)
        counts = itertools.cycle(steps)
        u = run(
            feedback.Feedback(law),
            plant,
            np.array([1e-3]),
            3000,
            lag=1,
            updates=lambda _t, u: np.full(u.shape, next(counts)),  # noqa: B023
        )
        assert (abs(u[-60:, 0]).max() > 0.01) == (times > 1)


@given(st.integers(0, 2**32), st.integers(0, 6), st.sampled_from(["linear", "tanh"]))
def test_on_frozen_logits_a_steps_updates_never_move_temperatures_apart(seed: int, drafts: int, phi: str) -> None:
    """(d+1) k V_max < 2, the same number of updates on both: chord slope in [1 - (d+1) k V_max, 1]."""
    rng = np.random.default_rng(seed)
    gain = 1.999 / (drafts + 1) / float(maximum(N).upper)
    law = feedback.Feedback(dataclasses.replace(random_law(rng, 4.0, gain), phi=phi))
    low, high = np.log([law.config.t_min, law.config.t_max])
    plant = random_levels(rng, N, 4.0, low, high, 40)
    pair = [rng.uniform(low, high, plant.at.shape) for _ in range(2)]
    many = int(rng.integers(1, drafts + 2))
    after = [run(law, plant, u, 1, updates=lambda _t, u: np.full(u.shape, many))[-1] for u in pair]
    assert (np.abs(after[1] - after[0]) <= np.abs(pair[1] - pair[0]) + 1e-12).all()


def apart(drafts: int, loop_gain: float) -> float:
    """Return by how much a step that drafts multiplies the distance of two temperatures on logits changing within it.

    Its first token is nearly certain, so the first update presses both against the upper clamp; the others are the
    sharpest logits there are.
    """
    sharp = maximum(N)
    law = feedback.Feedback(
        feedback.Config(
            target_nats=sharp.entropy_nats,
            gain=loop_gain / float(sharp.upper),
            t_min=0.1,
            t_max=1.0,
            temperature=1.0,
            rate_limit=0.0,
        )
    )
    u = np.array([-2e-4, -1e-4])
    seen = two_levels(N, sharp.entropy_nats, np.full(2, -1.5e-4)).entropy(u)
    seen = seen - seen.min() + sharp.entropy_nats  # one stays where it is, the other moves
    after = law.update(u, np.full(2, 1e-3))
    assert (after == 0.0).all()
    for _ in range(drafts):
        after = law.update(after, seen)
    return float(abs(after[1] - after[0]) / abs(u[1] - u[0]))


def test_on_changing_logits_a_clamp_between_updates_can_move_them_apart() -> None:
    """Refutes that (d+1) k V_max < 2 keeps `gain-lag-0`'s contraction; d k V_max <= 1 does."""
    assert apart(2, 0.6) == pytest.approx(1.2, rel=1e-3)
    assert apart(6, 1.99 / 7) == pytest.approx(6 * 1.99 / 7, rel=1e-3)
    for drafts in (1, 2, 6):
        assert apart(drafts, 1.0 / drafts) <= 1.0 + 1e-6


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_on_changing_logits_they_never_part_if_d_k_v_max_is_at_most_1(seed: int, drafts: int) -> None:
    rng = np.random.default_rng(seed)
    law = feedback.Feedback(random_law(rng, 4.0, 1.0 / drafts / float(maximum(N).upper)))
    low, high = np.log([law.config.t_min, law.config.t_max])
    start = rng.uniform(low, high, (2, 30))
    u = start.copy()
    for _ in range(int(rng.integers(1, drafts + 2))):
        target = float(rng.uniform(0.5, 9.0))
        plant = random_levels(rng, N, target, low, high, 30)
        if plant.at.shape[0] < 30:
            continue
        seen = np.stack([plant.entropy(row) for row in start])  # every position was sampled at the step's first u
        u = np.stack([law.update(row, entropy) for row, entropy in zip(u, seen, strict=True)])
    assert (np.abs(u[1] - u[0]) <= np.abs(start[1] - start[0]) + 1e-12).all()


@pytest.mark.parametrize("drafts", [0, 1, 3, 64])
@pytest.mark.parametrize("lag", [0, 1])
def test_the_limits_with_drafts(drafts: int, lag: int) -> None:
    found = judge(make(1e-4, drafts=drafts, lag=lag, target_nats=10.0))
    assert found.theorem == ("gain-drafts" if drafts else f"gain-lag-{lag}")
    assert found.limit == pytest.approx(2 / (drafts + 1 + lag) / float(maximum(N).upper), rel=1e-12)
    over = make(math.nextafter(found.limit, 1), drafts=drafts, lag=lag, target_nats=10.0)
    assert judge(over).status == "unknown"
    assert judge(make(found.limit, drafts=drafts, lag=lag, target_nats=10.0)).status == "proved"


def test_a_counter_example_that_drafts_needs_drafts() -> None:
    """Above the limit with drafts, below it without: refuted only if no entropy can keep the config from drafting."""
    for below, status in ((100.0, "refuted"), (10.38, "refuted"), (10.37, "unknown"), (1.0, "unknown")):
        run_ = make(0.06, drafts=2)
        object.__setattr__(run_.speculation, "draft_below_nats", below)
        found = judge(run_)
        assert (found.status, "if every draft is accepted" in found.reason) == (status, status == "refuted")
    assert "if every" not in judge(make(0.4, drafts=2)).reason  # repels without a single draft


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_settled_tells_a_cycle_from_a_decay(seed: int) -> None:
    rng = np.random.default_rng(seed)
    t = np.arange(601.0)[:, None]
    swing = (-1.0) ** t * rng.uniform(0.001, 1.0)
    assert settled(swing * 0.998**t).all()
    assert not settled(swing).any()
