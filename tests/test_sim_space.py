"""Points are a function of dimensions, number and seed; they fill their ranges and share Sobol points between cells."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from sim.space import Choice, Range, parse_choice, parse_range, points

RATE = Range("workload.rate_per_s", 0.1, 10.0, log=True)
SIZE = Range("engine.max_batch", 1, 8)
POLICY = Choice("loop.scheduling.policy", ("fcfs", "entropic"))


@given(st.integers(1, 40), st.integers(0, 99))
def test_the_plan_is_deterministic_and_inside_its_ranges(count: int, seed: int) -> None:
    plan = points([POLICY, RATE, SIZE], count, seed)
    assert plan == points([POLICY, RATE, SIZE], count, seed)
    assert len(plan) == 2 * count
    for settings in plan:
        assert 0.1 <= settings["workload.rate_per_s"] <= 10.0
        assert settings["engine.max_batch"] in range(1, 9)
        assert type(settings["engine.max_batch"]) is int
    first, second = plan[:count], plan[count:]
    drop = "loop.scheduling.policy"
    assert [{k: v for k, v in p.items() if k != drop} for p in first] == [
        {k: v for k, v in p.items() if k != drop} for p in second
    ]
    assert points([RATE], 8, seed) != points([RATE], 8, seed + 1)


def test_more_points_extend_a_plan() -> None:
    assert points([RATE], 32, 3)[:16] == points([RATE], 16, 3)


def test_sobol_points_are_even() -> None:
    """2^m scrambled Sobol points put exactly one into each of the 2^m equal intervals, in the logarithm here."""
    for dimension in (RATE, Range("loop.pruning.theta_nats", 0.0, 0.1)):
        values = np.array([p[dimension.field] for p in points([dimension], 64, 5)])
        low, high = dimension.low, dimension.high
        share = np.log(values / low) / math.log(high / low) if dimension.log else (values - low) / (high - low)
        assert sorted(np.floor(share * 64).astype(int).tolist()) == list(range(64))
    sizes = [p["engine.max_batch"] for p in points([SIZE], 64, 5)]
    assert [sizes.count(k) for k in range(1, 9)] == [8] * 8


def test_a_grid_is_the_product_last_fastest() -> None:
    seeds = Choice("seed", (1, 2))
    assert points([seeds, POLICY], 99, 0) == [
        {"seed": s, "loop.scheduling.policy": p} for s, p in itertools.product((1, 2), ("fcfs", "entropic"))
    ]
    assert points([], 5, 0) == [{}]


def test_text_forms() -> None:
    assert parse_choice("scheduling.policy=fcfs,entropic") == POLICY
    assert parse_choice("engine.max_batch=1,2").values == (1, 2)
    assert parse_range("workload.rate_per_s=0.1:10:log") == RATE
    assert parse_range("engine.max_batch=1:8") == SIZE


@pytest.mark.parametrize("text", ["a", "=1", "seed=", "nope.x=1,2", "seed=1,1"])
def test_bad_choices(text: str) -> None:
    with pytest.raises(BadInputError):
        parse_choice(text)


@pytest.mark.parametrize(
    "text",
    [
        "seed",
        "seed=1",
        "seed=1:2:lin",
        "seed=1:2:log:x",
        "seed=b:2",
        "seed=2:1",
        "seed=1:nan",
        "workload.rate_per_s=0:1:log",
        "loop.scheduling.policy=1:2",
        "loop.gain=1:2",
    ],
)
def test_bad_ranges(text: str) -> None:
    with pytest.raises(BadInputError):
        parse_range(text)


def test_bad_plans() -> None:
    with pytest.raises(BadInputError, match="named twice"):
        points([RATE, RATE], 4, 0)
    with pytest.raises(BadInputError, match="--points"):
        points([RATE], 0, 0)
    with pytest.raises(BadInputError, match="too many"):
        points([Choice("seed", tuple(range(2000))), RATE], 2000, 0)
