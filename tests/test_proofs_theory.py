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
        lambda: theory.delay_limit(-1),
        lambda: theory.ema_limit(0.0),
        lambda: theory.phi_for_cut(1.0),
    ):
        with pytest.raises(BadInputError):
            call()


def test_docstrings() -> None:
    assert doctest.testmod(theory).failed == 0
