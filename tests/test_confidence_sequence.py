from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entropic_ctl.confidence import MeanBound, samples_needed
from entropic_ctl.errors import BadInputError


def heavy(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Losses as KL has them: mostly tiny, rarely large; squares of a normal, to the power 1.5, capped at 1."""
    return np.minimum(0.02 * np.abs(rng.standard_normal(shape)) ** 3, 1.0)


def ever_missed(losses: np.ndarray, means: np.ndarray, alpha: float) -> float:
    """Share of the runs (runs, n) in which the interval misses the running mean of the conditional means at any n."""
    missed = 0
    for row, target in zip(losses, np.cumsum(means, axis=1) / np.arange(1, losses.shape[1] + 1), strict=True):
        bound = MeanBound(1.0, alpha=alpha)
        for n, (y, m) in enumerate(zip(row, target, strict=True)):
            bound.add(y)
            if n % 4 == 0 or n == row.shape[0] - 1:
                low, high = bound.interval
                if not low <= m <= high:
                    missed += 1
                    break
    return missed / losses.shape[0]


def naive_missed(losses: np.ndarray, mean: float, alpha: float) -> float:
    """The same for mean +- z s / sqrt(n), from 30 samples on."""
    z = {0.05: 1.96, 0.2: 1.2816}[alpha]
    n = np.arange(1, losses.shape[1] + 1)
    centre = np.cumsum(losses, axis=1) / n
    spread = np.sqrt(np.maximum(np.cumsum(losses**2, axis=1) / n - centre**2, 0))
    return float((np.abs(centre - mean) > z * spread / np.sqrt(n))[:, 30:].any(axis=1).mean())


def test_covers_at_every_time_at_once_where_a_fixed_interval_does_not() -> None:
    rng = np.random.default_rng(1)
    losses = heavy(rng, (150, 400))
    mean = float(heavy(rng, (1_000_000,)).mean())
    assert ever_missed(losses, np.full(losses.shape, mean), 0.2) <= 0.2
    assert naive_missed(losses, mean, 0.2) > 0.4  # what a reader who stops at the right moment makes of it


def test_covers_coins_and_means_that_move_with_the_past() -> None:
    rng = np.random.default_rng(2)
    assert ever_missed((rng.random((100, 300)) < 0.03).astype(float), np.full((100, 300), 0.03), 0.2) <= 0.2
    losses, means = np.empty((100, 300)), np.empty((100, 300))
    for run in range(100):
        level = 0.1
        for t in range(300):  # an opponent: after a small loss the chance of a large one grows
            means[run, t] = level
            losses[run, t] = float(rng.random() < level)
            level = 0.02 if losses[run, t] else min(0.4, level * 1.05)
    assert ever_missed(losses, means, 0.2) <= 0.2


def test_the_guarantee_is_a_supermartingale_bound() -> None:
    """exp(l x - psi(l) x^2) <= 1 + l x for x >= -1: the one inequality everything rests on, on a fine grid."""
    x = np.linspace(-1, 1, 4001)
    for bet in np.geomspace(1e-4, 0.95, 60):
        psi = -math.log1p(-bet) - bet
        assert (np.exp(bet * x - psi * x**2) <= 1 + bet * x + 1e-15).all()
        assert (np.exp(bet * x - 0.9 * psi * x**2) > 1 + bet * x + 1e-15).any()  # and no smaller psi would do


def test_random_looks_cover_the_realised_mean_of_all_steps() -> None:
    rng = np.random.default_rng(3)
    missed, p = 0, 0.25
    for _ in range(100):
        bound, total = MeanBound(0.5, alpha=0.2, rate=p), 0.0
        for n in range(1, 401):
            x = float(min(heavy(rng, (1,))[0], 0.5)) * (3.0 if n > 200 else 1.0)  # the level changes half-way
            x = min(x, 0.5)
            total += x
            if rng.random() < p:
                bound.add(x)
            else:
                bound.skip()
            low, high = bound.interval if n % 8 == 0 else (0.0, 1.0)
            if not low <= total / n <= high:
                missed += 1
                break
    assert missed <= 20
    assert bound.looked < bound.steps == 400


def test_a_look_whenever_the_loss_is_large_is_no_random_look() -> None:
    """The check can fail: coins that know the loss break the bound."""
    rng = np.random.default_rng(4)
    bound, total = MeanBound(1.0, alpha=0.2, rate=0.5), 0.0
    for _ in range(2000):
        x = float(heavy(rng, (1,))[0])
        total += x
        if x < 0.02:
            bound.add(x)
        else:
            bound.skip()
    assert not bound.interval[0] <= total / 2000 <= bound.interval[1]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=40), st.floats(0.01, 10), st.floats(0.01, 0.5))
def test_scales_with_its_unit_and_grows_with_confidence(losses: list[float], unit: float, alpha: float) -> None:
    one, scaled, strict = MeanBound(1.0, alpha=alpha), MeanBound(unit, alpha=alpha), MeanBound(1.0, alpha=alpha / 2)
    for loss in losses:
        one.add(loss)
        scaled.add(loss * unit)
        strict.add(loss)
    assert np.allclose(np.array(one.interval) * unit, scaled.interval, atol=1e-9 * unit)
    low, high = one.interval
    assert strict.interval[0] <= low <= one.mean <= high <= strict.interval[1]
    assert one.capped == sum(loss > 1.0 for loss in losses)
    assert one.mean == pytest.approx(np.minimum(losses, 1.0).mean())


def test_width_shrinks_like_a_fixed_interval_within_a_factor() -> None:
    rng = np.random.default_rng(5)
    bound, losses = MeanBound(1.0), heavy(rng, (20_000,))
    for loss in losses:
        bound.add(loss)
    low, high = bound.interval
    fixed = 2 * 1.96 * losses.std() / math.sqrt(losses.shape[0])
    assert 1.0 < (high - low) / fixed < 2.2  # the price of being allowed to look at any time


def test_nothing_seen_says_nothing_and_zeros_narrow_it_like_one_over_n() -> None:
    bound = MeanBound(0.1)
    assert bound.interval == (0.0, 0.1)
    assert math.isnan(bound.mean)
    for _ in range(1000):
        bound.add(0.0)
    low, high = bound.interval
    assert low == 0.0
    assert 0.0 < high < 0.1 * math.log(2 / 0.05 * 48) / 0.95 / 1000 + 1e-12


def test_samples_needed_is_where_the_width_gets_there() -> None:
    rng = np.random.default_rng(6)
    y = 0.1 * heavy(rng, (200_000,))
    n = samples_needed(0.0005, cap=0.1, mean=float(y.mean()), deviation=float(y.std()))
    bound = MeanBound(0.1)
    for loss in y[:n]:
        bound.add(loss)
    low, high = bound.interval
    assert (high - low) / 2 == pytest.approx(0.0005, rel=0.15)
    assert samples_needed(0.001, cap=0.1, mean=0.003, deviation=0.005) < n


@pytest.mark.parametrize(
    "bad", [{"cap": 0.0}, {"cap": math.inf}, {"cap": 1.0, "alpha": 1.0}, {"cap": 1.0, "rate": 0.0}]
)
def test_refuses_what_is_no_setting(bad: dict[str, float]) -> None:
    with pytest.raises(BadInputError, match=list(bad)[-1]):
        MeanBound(**bad)
    with pytest.raises(BadInputError, match="loss"):
        MeanBound(1.0).add(math.nan)
    with pytest.raises(BadInputError, match="resolution"):
        samples_needed(0.0, cap=1.0, mean=0.1, deviation=0.1)
