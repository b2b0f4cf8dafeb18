from __future__ import annotations

import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from proofs import theory


def loop_variance_ratio(g: float, phi: float = 0.0, steps: int = 4000) -> float:
    """Run y = w + u, u+ = u - g y on the impulse response of w: sum y^2 / sum w^2 is the exact variance ratio."""
    w = phi ** np.arange(steps)
    u, y = 0.0, np.empty(steps)
    for t in range(steps):
        y[t] = w[t] + u
        u -= g * y[t]
    return float((y**2).sum() / (w**2).sum())


@pytest.mark.parametrize("g", [0.05, 0.5, 1.0, 1.5, 1.95])
def test_white_entropy_funnel(g: float) -> None:
    assert theory.white_ratio(g) == pytest.approx(loop_variance_ratio(g), rel=1e-9)
    assert theory.white_ratio(g) > 1
    assert theory.ar1_ratio(0.0, g) == pytest.approx(theory.white_ratio(g), rel=1e-14)


@pytest.mark.parametrize("g", [0.05, 0.4, 1.0, 1.7])
@pytest.mark.parametrize("phi", [-0.5, 0.2, 0.6, 0.95])
def test_ar1_entropy(g: float, phi: float) -> None:
    assert theory.ar1_ratio(phi, g) == pytest.approx(loop_variance_ratio(g, phi), rel=1e-9)


def test_random_varentropy_uses_its_second_moment() -> None:
    """White entropy, V drawn anew each token: 2 / (2 - k E[V^2] / E[V]); many loops in parallel, fixed seed."""
    rng, k, rows, steps = np.random.default_rng(7), 0.08, 20_000, 300
    u, total, count = np.zeros(rows), 0.0, 0
    for t in range(steps):
        v = rng.choice([2.0, 14.0], rows)
        y = rng.standard_normal(rows) + v * u
        u = u - k * y
        if t >= 150:
            total, count = total + float((y**2).sum()), count + rows
    expected = theory.white_ratio(k * 100.0 / 8.0)
    assert total / count == pytest.approx(expected, rel=0.01)
    assert abs(expected - theory.white_ratio(k * 8.0)) > 0.5  # the plain mean of V would be told apart


@given(st.floats(0.01, 1.99), st.floats(-0.98, 0.98))
def test_ar1_threshold_is_where_feedback_starts_to_help(g: float, phi: float) -> None:
    edge = theory.ar1_threshold(g)
    if abs(phi - edge) > 1e-6:
        assert (theory.ar1_ratio(phi, g) < 1) == (phi > edge)


@given(st.floats(0.34, 0.99), st.floats(0.001, 1.999))
def test_ar1_best_is_attained_and_not_beaten(phi: float, g: float) -> None:
    best_g, best = theory.ar1_best(phi)
    assert theory.ar1_ratio(phi, best_g) == pytest.approx(best, rel=1e-9)
    assert theory.ar1_ratio(phi, g) >= best - 1e-12


def test_ar1_without_enough_memory_is_best_left_alone() -> None:
    assert theory.ar1_best(0.3) == (0.0, 1.0)


@pytest.mark.parametrize(("cut", "phi"), [(0.15, 0.531), (0.20, 0.567)])
def test_memory_needed_for_the_claimed_cuts(cut: float, phi: float) -> None:
    found = theory.phi_for_cut(cut)
    assert found == pytest.approx(phi, abs=5e-4)
    assert theory.ar1_best(found)[1] == pytest.approx(1 - cut, rel=1e-12)
    assert loop_variance_ratio(theory.ar1_best(found)[0], found) == pytest.approx(1 - cut, rel=1e-9)


@pytest.mark.parametrize("phi", [-0.4, 0.1, 1 / 3, 0.7])
def test_small_gain_slope(phi: float) -> None:
    slope = theory.small_gain_slope([phi**j for j in range(1, 200)])
    g = 1e-5
    assert (theory.ar1_ratio(phi, g) - 1) / g == pytest.approx(slope, abs=1e-4)


@given(st.floats(0.02, 1.98), st.floats(-0.95, 0.95))
def test_any_autocorrelations_include_ar1_and_white(g: float, phi: float) -> None:
    r = [phi**j for j in range(1, 2000)]
    assert theory.stationary_ratio(r, g) == pytest.approx(theory.ar1_ratio(phi, g), rel=1e-9)
    assert theory.stationary_ratio([], g) == pytest.approx(theory.white_ratio(g), rel=1e-12)
    assert theory.stationary_ratio(r, g, g) == theory.stationary_ratio(r, g)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=6), st.floats(0.02, 1.98))
def test_moving_average_entropy(weights: list[float], g: float) -> None:
    """w = white noise through a finite filter: its exact autocorrelations against the loop run on the filter itself."""
    h = np.array([1.0, *weights])
    covariance = [float(h[: h.shape[0] - m] @ h[m:]) for m in range(h.shape[0])]
    r = [c / covariance[0] for c in covariance[1:]]
    u, power = 0.0, 0.0
    for w in [*h.tolist(), *[0.0] * 2000]:
        y = w + u
        u -= g * y
        power += y * y
    assert theory.stationary_ratio(r, g) == pytest.approx(power / covariance[0], rel=1e-7, abs=1e-9)


@given(st.lists(st.floats(-0.2, 0.6), min_size=1, max_size=5), st.floats(0.02, 1.98))
def test_feedback_helps_exactly_where_the_discounted_sum_exceeds_a_half(r: list[float], g: float) -> None:
    discounted = sum((1 - g) ** m * value for m, value in enumerate(r))
    if abs(discounted - 0.5) > 1e-9:
        assert (theory.stationary_ratio(r, g) < 1) == (discounted > 0.5)


def test_stationary_entropy_with_random_varentropy() -> None:
    """AR(1) entropy, V drawn anew each token: both moments of V enter; many loops in parallel, fixed seed."""
    rng, k, phi, rows, steps = np.random.default_rng(8), 0.06, 0.5, 20_000, 300
    u, w, total, count = np.zeros(rows), rng.standard_normal(rows), 0.0, 0
    for t in range(steps):
        v = rng.choice([1.0, 13.0], rows)
        y = w + v * u
        u = u - k * y
        w = phi * w + math.sqrt(1 - phi**2) * rng.standard_normal(rows)
        if t >= 150:
            total, count = total + float((y**2).sum()), count + rows
    g, noisy, r = k * 7.0, k * 85.0 / 7.0, [phi**j for j in range(1, 60)]
    expected = theory.stationary_ratio(r, g, noisy)
    assert total / count == pytest.approx(expected, rel=0.01)
    assert abs(expected - theory.stationary_ratio(r, g)) > 0.1  # constant V would be told apart


def spectral_radius_delay(g: float, delay: int) -> float:
    return float(np.abs(np.roots([1.0, -1.0, *[0.0] * (delay - 1), g] if delay else [1.0, g - 1.0])).max())


@pytest.mark.parametrize("delay", [0, 1, 2, 3, 5])
def test_delay_limit_is_sharp(delay: int) -> None:
    limit = theory.delay_limit(delay)
    assert spectral_radius_delay(0.999 * limit, delay) < 1
    assert spectral_radius_delay(1.001 * limit, delay) > 1


@pytest.mark.parametrize("b", [0.1, 0.5, 0.9, 1.0])
def test_ema_limit_is_sharp(b: float) -> None:
    def radius(g: float) -> float:
        return float(np.abs(np.linalg.eigvals([[1 - g * b, -g * (1 - b)], [b, 1 - b]])).max())

    limit = theory.ema_limit(b)
    assert radius(0.999 * limit) < 1 < radius(1.001 * limit)


def test_bad_arguments() -> None:
    for call in (
        lambda: theory.white_ratio(2.0),
        lambda: theory.white_ratio(math.nan),
        lambda: theory.ar1_ratio(1.0, 0.5),
        lambda: theory.stationary_ratio([0.5], 2.0),
        lambda: theory.stationary_ratio([0.5], 0.5, 2.0),
        lambda: theory.delay_limit(-1),
        lambda: theory.ema_limit(0.0),
        lambda: theory.phi_for_cut(1.0),
    ):
        with pytest.raises(BadInputError):
            call()


def test_docstrings() -> None:
    assert doctest.testmod(theory).failed == 0
