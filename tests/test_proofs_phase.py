from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from entropic_ctl.temperature import feedback
from proofs import check, phase
from proofs.vmax import maximum

N = 32_000
SHARP = maximum(N)


def limit(n: int, lag: int = 0) -> float:
    return check.gain_ceiling(n, lag, maximum(n).bracket())


def sharp_law(factor: float, n: int = N) -> feedback.Feedback:
    best = maximum(n)
    c = feedback.Config(
        gain=factor * 2 / float(best.upper), target_nats=best.entropy_nats, rate_limit=0.0, t_min=0.1, t_max=10.0
    )
    return feedback.Feedback(c)


@pytest.mark.parametrize("n", [N, 151_936])
def test_sharpness_of_the_certified_gain_with_the_shipped_law(n: int) -> None:
    """Just above 2/V_max on the sharpest logits: a stable 2-cycle. Just below: convergence to u = 0."""
    plant = phase.two_level_plant(n, maximum(n).logit)
    for start in (0.002, 0.4):
        u, _ = phase.trajectory(sharp_law(1.001, n), plant, [start], 12_000)
        assert u[-1, 0] == pytest.approx(u[-3, 0], abs=1e-9)
        assert abs(u[-1, 0] - u[-2, 0]) > 0.01
        assert u[-1, 0] * u[-2, 0] < 0
        below, _ = phase.trajectory(sharp_law(0.999, n), plant, [start], 12_000)
        assert abs(below[-1, 0]) < 1e-5


@pytest.mark.parametrize("lag", [0, 1])
def test_sharp_portrait(lag: int) -> None:
    table = phase.sharp_portrait(N, factors=(0.9, 1.2), steps=400, lag=lag)
    assert {len(column) for column in table.values()} == {2 * 5 * 401}
    last = table["step"] == 400
    settled = np.abs(table["error"][last & (table["arm"] == "0.9 x limit")])
    cycling = table["error"][(table["step"] > 380) & (table["arm"] == "1.2 x limit")]
    assert settled.max() < 1e-3
    assert np.abs(cycling).max() > 0.5
    np.testing.assert_allclose(table["temperature"], np.exp(table["u"]))


@pytest.mark.parametrize("lag", [0, 1])
@given(st.data())
def test_certified_loops_settle_on_any_logits(lag: int, data: st.DataObject) -> None:
    """Any logits over n tokens, any start, both shapes, rate limit, clamps: successive u agree in the end."""
    n = data.draw(st.integers(2, 60))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = rng.normal(0, data.draw(st.floats(0.3, 8.0)), n) + (np.arange(n) == 0) * data.draw(st.floats(0, 9))
    c = feedback.Config(
        gain=min(10.0, 0.98 * limit(n, lag)),
        target_nats=data.draw(st.floats(0.05, 4.0)),
        phi=data.draw(st.sampled_from(["linear", "tanh"])),
        rate_limit=data.draw(st.sampled_from([0.0, 0.3])),
        t_min=0.2,
        t_max=3.0,
    )
    u, _ = phase.trajectory(feedback.build(c), phase.logits_plant(logits), np.linspace(-1.6, 1.09, 5), 1500, lag=lag)
    assert np.abs(u[-1] - u[-2]).max() < 1e-3
    if lag == 0:  # no two temperatures are ever moved apart
        assert (np.diff(np.abs(np.diff(u, axis=1)), axis=0) <= 1e-12).all()


def test_uncertified_loop_on_the_same_logits_does_not_settle() -> None:
    """The property above can fail: 1.5 times the limit on the sharpest logits of a small vocabulary."""
    best = maximum(50)
    c = feedback.Config(gain=1.5 * limit(50), target_nats=best.entropy_nats, rate_limit=0.0, t_min=0.2, t_max=3.0)
    u, _ = phase.trajectory(feedback.build(c), phase.two_level_plant(50, best.logit), [0.3], 1500)
    assert abs(u[-1, 0] - u[-2, 0]) > 0.05


@given(st.floats(0.05, 0.99), st.integers(0, 2**32))
def test_swings_shrink_by_k_under_any_mix_of_ages(k: float, seed: int) -> None:
    """The lemma of theorem gain-lag-1: x+ = x - s x(t-d), any s in [0, k], any d in {0, 1}."""
    rng = np.random.default_rng(seed)
    x = [float(rng.uniform(-1, 1)), float(rng.uniform(-1, 1))]
    for _ in range(400):
        s = k * rng.choice([0.0, 0.5, 1.0, rng.random()])
        x.append(x[-1] - s * x[-1 - rng.integers(0, 2)])
    signs = np.sign(x)
    edges = np.flatnonzero(signs[1:] * signs[:-1] < 0) + 1
    peaks = [float(np.abs(part).max()) for part in np.split(np.array(x), edges)]
    for before, after in itertools.pairwise(peaks[1:]):  # the first excursion has no history
        assert after <= k * before * (1 + 1e-12)


def test_lag_one_limit_is_sharp_with_the_shipped_law() -> None:
    plant = phase.two_level_plant(N, SHARP.logit)
    for factor, settles in ((0.495, True), (0.505, False)):
        u, _ = phase.trajectory(sharp_law(factor), plant, [0.05], 6000, lag=1)
        assert (np.abs(u[-8:]).max() < 1e-3) == settles


def test_plants_agree() -> None:
    u = np.linspace(-1.0, 1.0, 21)
    logits = np.array([4.0, *[0.0] * 9, -np.inf])
    np.testing.assert_allclose(phase.logits_plant(logits)(u), phase.two_level_plant(10, 4.0)(u), rtol=1e-12)
    temperatures = np.exp(u)
    grid = phase.grid_plant(temperatures, phase.logits_plant(logits)(u))
    np.testing.assert_allclose(grid(u), phase.two_level_plant(10, 4.0)(u), rtol=1e-12)
    assert grid(np.array([5.0]))[0] == pytest.approx(phase.two_level_plant(10, 4.0)(u)[-1])
    assert SHARP.entropy_nats == pytest.approx(phase.two_level_plant(N, SHARP.logit)(np.zeros(1))[0], rel=1e-12)


def test_equal_logits_drift_to_a_clamp() -> None:
    c = feedback.Config(gain=0.01, target_nats=1.0, rate_limit=0.0)
    u, _ = phase.trajectory(feedback.build(c), phase.logits_plant(np.zeros(20)), [0.0], 2000)
    assert u[-1, 0] == pytest.approx(math.log(c.t_min))


def test_bad_plants_and_starts() -> None:
    for logits in ([np.nan, 0.0], [np.inf, 0.0], [-np.inf, -np.inf]):
        with pytest.raises(BadInputError, match="logits"):
            phase.logits_plant(logits)
    with pytest.raises(BadInputError, match="temperatures"):
        phase.grid_plant([1.0, 0.5], [1.0, 2.0])
    with pytest.raises(BadInputError, match="starts"):
        phase.sharp_portrait(N, starts=(9.0,), steps=1)
