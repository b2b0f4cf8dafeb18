"""Workloads: documented means, common random numbers, arrival order."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.config import WorkloadConfig
from entropic_ctl.errors import BadInputError
from sim.arrivals import Workload, make_workload
from sim.lengths import lognormal_lengths
from sim.streams import stream


def test_streams_are_named_stable_and_independent() -> None:
    assert stream(7, "arrivals").integers(0, 2**62) == stream(7, "arrivals").integers(0, 2**62)
    draws = {stream(seed, name).integers(0, 2**62) for seed in (7, 8) for name in ("arrivals", "lengths", "entropy")}
    assert len(draws) == 6
    assert stream(0, "arrivals").integers(0, 10**6) == 102338  # the same on every platform


@pytest.mark.parametrize(("mean", "cv"), [(128.0, 0.5), (64.0, 0.0), (1.7, 0.3), (3.0, 2.0), (10.5, 0.0)])
def test_mean_length_is_the_documented_mean(mean: float, cv: float) -> None:
    n = 200_000
    x = lognormal_lengths(np.random.default_rng(1), n, mean, cv)
    assert x.min() >= 1
    assert abs(x.mean() - mean) < 5 * max(x.std(), 1e-9) / math.sqrt(n) + 1e-9
    if mean == 128.0:
        assert abs(x.std() / mean - cv) < 0.02


def test_mean_one_is_the_constant_one() -> None:
    assert set(lognormal_lengths(np.random.default_rng(0), 100, 1.0, 3.0)) == {1}


def test_poisson_rate_is_the_documented_rate_and_rescales_the_same_arrivals() -> None:
    n = 50_000
    slow = make_workload(WorkloadConfig(kind="poisson", n_requests=n, rate_per_s=4.0), 3, 5)
    fast = make_workload(WorkloadConfig(kind="poisson", n_requests=n, rate_per_s=8.0), 3, 5)
    gaps = np.diff(slow.arrival_s)
    assert abs(gaps.mean() * 4 - 1) < 5 / math.sqrt(n)
    assert abs(gaps.std() * 4 - 1) < 0.03  # exponential: deviation equals mean
    np.testing.assert_allclose(slow.arrival_s, 2 * fast.arrival_s, rtol=1e-12)
    np.testing.assert_array_equal(slow.prompt_tokens, fast.prompt_tokens)


@given(st.integers(0, 2**32), st.sampled_from(["burst", "poisson", "closed"]))
def test_sources_do_not_move_one_another(seed: int, kind: str) -> None:
    base = make_workload(WorkloadConfig(kind=kind, n_requests=20), seed, 7)
    other = make_workload(
        WorkloadConfig(kind=kind, n_requests=20, prompt_tokens=999.0, output_cv=1.0, output_length="limit"),
        seed,
        7,
        greedy=True,
    )
    np.testing.assert_array_equal(base.arrival_s, other.arrival_s)
    np.testing.assert_array_equal(base.prompt, other.prompt)
    np.testing.assert_array_equal(base.xi, other.xi)
    assert ((base.prompt >= 0) & (base.prompt < 7)).all()


def test_burst_and_poisson_are_pulled_in_order() -> None:
    work = make_workload(WorkloadConfig(kind="poisson", n_requests=30, rate_per_s=1.0), 0, 1)
    seen, now = [], 0.0
    while (upcoming := work.next_s()) is not None:
        assert upcoming >= now
        now = upcoming
        jobs = work.arrived(now)
        assert jobs  # what is due is there: no zero-delay loop
        assert all(job.arrival_s <= now for job in jobs)
        seen += [job.id for job in jobs]
    assert seen == list(range(30))


def test_closed_loop_keeps_each_user_to_one_request() -> None:
    work = make_workload(WorkloadConfig(kind="closed", n_requests=7, users=3, think_s=2.0), 0, 1)
    think = work.arrival_s
    jobs = work.arrived(1e9)
    assert sorted(job.id for job in jobs) == [0, 1, 2]
    assert work.next_s() is None  # everybody waits
    work.left(1, 10.0)
    assert work.next_s() == 10.0 + think[4]
    assert not work.arrived(10.0 + think[4] - 1e-9)
    assert [job.id for job in work.arrived(10.0 + think[4])] == [4]
    work.left(4, 20.0)  # user 1 has no further request: 7 does not exist
    assert work.next_s() is None


def test_closed_loop_without_thinking_starts_at_once() -> None:
    work = make_workload(WorkloadConfig(kind="closed", n_requests=9, users=4), 0, 1)
    assert [job.id for job in work.arrived(0.0)] == [0, 1, 2, 3]


def test_azure_rate_scale(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:00:00,3,4\n2023-11-16 18:00:10,5,6\n2023-11-16 18:00:20,5,0\n"
    )
    work = make_workload(
        WorkloadConfig(kind="azure", trace=str(path), rate_scale=4.0, n_requests=10, output_length="limit"), 0, 1
    )
    jobs = work.arrived(1e9)
    assert [(j.arrival_s, j.prompt_tokens, j.max_new_tokens) for j in jobs] == [
        (0.0, 3, 4),
        (2.5, 5, 6),
    ]
    assert work.skipped_rows == 1


@pytest.mark.parametrize("rate", [5e-324, 1e-300, 1e-12])
def test_a_rate_so_low_that_steps_no_longer_move_the_clock_is_refused(rate: float) -> None:
    with pytest.raises(BadInputError, match="too late"):
        make_workload(WorkloadConfig(kind="poisson", rate_per_s=rate), 0, 4)


def test_s9_a_workload_refuses_times_that_run_backwards() -> None:
    ones, config = np.ones(3, np.int64), WorkloadConfig()
    with pytest.raises(BadInputError, match="arrival_s"):
        Workload(
            config, np.array([0.0, 5.0, 3.0]), prompt_tokens=ones, limit_tokens=ones, prompt=0 * ones, xi=np.zeros(3)
        )
