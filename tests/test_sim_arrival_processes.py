"""Arrival processes: documented means, dispersion, and rates that rescale the same randomness."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.config import WorkloadConfig
from entropic_ctl.errors import BadInputError
from sim.arrival_processes import _states, arrival_times
from sim.streams import stream

PROCESSES: dict[str, dict[str, Any]] = {
    "poisson": {"rate_per_s": 3.0},
    "gamma": {"rate_per_s": 3.0, "arrival_cv": 2.5},
    "mmpp": {"rates_per_s": [1.0, 8.0, 0.0], "dwell_s": [4.0, 1.0, 0.5]},
    "diurnal": {"rates_per_s": [0.5, 6.0, 0.0, 2.0], "period_s": 40.0},
}


def process(kind: str, **more: Any) -> WorkloadConfig:
    return WorkloadConfig(kind=kind, **{**PROCESSES[kind], **more})


def counts(times: np.ndarray, window_s: float) -> np.ndarray:
    """Arrivals in consecutive windows that end before the last arrival."""
    edges = np.arange(0.0, times[-1], window_s)
    return np.diff(np.searchsorted(times, edges))


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gamma_gaps_have_the_documented_mean_and_cv(cv: float) -> None:
    n = 200_000
    gaps = np.diff(arrival_times(process("gamma", arrival_cv=cv), n, 1))
    assert abs(gaps.mean() * 3.0 - 1) < 4 * cv / math.sqrt(n)
    # the variance of a sample variance: (mu4 - var^2) / n, with Gamma's excess kurtosis 6 cv^2
    spread = math.sqrt((2 + 6 * cv**2) / n)
    assert abs(gaps.var() * 9 / cv**2 - 1) < 4 * spread


def test_gamma_of_cv_zero_is_regular() -> None:
    np.testing.assert_allclose(arrival_times(process("gamma", arrival_cv=0.0), 5, 1), np.arange(1, 6) / 3, rtol=1e-15)


def test_mmpp_mean_rate_is_the_documented_one_from_time_zero_on() -> None:
    """The process is stationary from the start: counts in a short first window have the mean rate."""
    config, window_s = process("mmpp"), 2.0
    rate = config.mean_rate_per_s
    assert rate == pytest.approx((1 * 4 + 8 * 1 + 0) / 5.5)
    first = np.array([np.searchsorted(arrival_times(config, 60, seed), window_s) for seed in range(2000)])
    assert first.max() < 60
    assert abs(first.mean() - rate * window_s) < 4 * first.std() / math.sqrt(len(first))
    assert abs(first.mean() - 1.0 * window_s) > 8 * first.std() / math.sqrt(
        len(first)
    )  # starting in state 0 would fail


def test_mmpp_long_run_rate_and_index_of_dispersion_of_two_states() -> None:
    """Variance over mean of counts against the closed form (Heffes and Lucantoni, 1986)."""
    (r1, r2), (d1, d2) = (2.0, 20.0), (3.0, 1.0)
    config = WorkloadConfig(kind="mmpp", rates_per_s=[r1, r2], dwell_s=[d1, d2])
    times = arrival_times(config, 400_000, 3)
    mean = config.mean_rate_per_s
    for t in (0.5, 10.0):
        n = counts(times, t)
        c = 1 / (1 / d1 + 1 / d2)
        factor = 2 * (r1 - r2) ** 2 * d1 * d2 * c / ((d1 + d2) * (r1 * d1 + r2 * d2))
        dispersion = 1 + factor * (1 - (1 - math.exp(-t / c)) * c / t)
        blocks = np.array([(block.var() / block.mean(), block.mean()) for block in np.array_split(n, 20)])
        error = blocks.std(axis=0, ddof=1) / math.sqrt(20)
        assert abs(blocks[:, 0].mean() - dispersion) < 4 * error[0]
        assert abs(n.mean() - mean * t) < 4 * error[1]
        assert dispersion > 3  # far from Poisson, so the test can fail
        assert error[0] < 0.1 * dispersion


def test_diurnal_counts_follow_the_integral_of_the_rate() -> None:
    config = process("diurnal")
    times = arrival_times(config, 100_000, 5)
    periods = math.floor(times[-1] / 40.0)
    inside = times[times < periods * 40.0]
    seen = np.bincount((inside % 40.0 // 10.0).astype(int), minlength=4)
    expected = periods * 10.0 * np.array([0.5, 6.0, 0.0, 2.0])
    assert seen[2] == 0
    assert (np.abs(seen - expected) <= 4 * np.sqrt(expected)).all()
    assert config.mean_rate_per_s == 2.125


def test_diurnal_inverts_its_integral_exactly() -> None:
    """S_i, pushed through the inverse and integrated again, is S_i."""
    config = process("diurnal")
    times = arrival_times(config, 5000, 2)
    rates, slices = np.array(config.rates_per_s), np.arange(5) * 10.0
    paid = np.concatenate([[0.0], np.cumsum(rates * 10.0)])
    again = times // 40.0 * paid[-1] + np.interp(times % 40.0, slices, paid)
    np.testing.assert_allclose(again, np.cumsum(stream(2, "arrivals").standard_exponential(5000)), rtol=1e-11)


def test_one_slice_or_equal_states_are_poisson() -> None:
    poisson = arrival_times(process("poisson"), 500, 9)
    flat = arrival_times(WorkloadConfig(kind="diurnal", rates_per_s=[3.0, 3.0], period_s=7.0), 500, 9)
    same = arrival_times(WorkloadConfig(kind="mmpp", rates_per_s=[3, 3], dwell_s=[0.1, 0.7]), 500, 9)
    np.testing.assert_allclose(flat, poisson, rtol=1e-12)
    np.testing.assert_allclose(same, poisson, rtol=1e-12)


@given(st.sampled_from(sorted(PROCESSES)), st.integers(0, 2**32), st.integers(1, 300), st.floats(0.1, 10.0))
def test_any_process_is_sorted_prefix_stable_and_rescaled(kind: str, seed: int, n: int, factor: float) -> None:
    base = arrival_times(process(kind), n, seed)
    assert base.shape == (n,)
    assert (np.diff(base) >= 0).all()
    assert base[0] >= 0
    longer = arrival_times(process(kind), n + 7, seed)
    np.testing.assert_array_equal(longer[:n], base)  # asking for more does not move the first ones
    faster = arrival_times(process(kind, rate_scale=factor), n, seed)
    if kind in ("poisson", "gamma"):
        np.testing.assert_allclose(faster * factor, base, rtol=1e-12)
    elif factor > 1:
        assert (faster <= base * (1 + 1e-12)).all()  # the same arrivals, all earlier


def test_dwell_times_do_not_depend_on_rates() -> None:
    """A state path of its own: with a silent second state, the arrivals of any rate lie in the same stays."""
    quiet = [WorkloadConfig(kind="mmpp", rates_per_s=[r, 0.0], dwell_s=[1.0, 1.0]) for r in (2.0, 50.0)]
    paths = [_states(config, 1000.0, 4) for config in quiet]
    n = min(len(start) for start, _ in paths)
    np.testing.assert_array_equal(paths[0][0][:n], paths[1][0][:n])
    start, rate = paths[0]
    for config in quiet:
        times = arrival_times(config, 1000, 4)
        assert (rate[np.searchsorted(start, times) - 1] > 0).all()
        assert len(set(np.searchsorted(start, times))) > 5


def test_states_that_change_too_often_are_refused() -> None:
    config = WorkloadConfig(kind="mmpp", n_requests=64, rates_per_s=[1e-6, 1e-6], dwell_s=[1e-3, 1e-3])
    with pytest.raises(BadInputError, match=r"dwell_s.*10,000,000"):
        arrival_times(config, 64, 0)
