"""Intervals by hand, and their coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sim.intervals import mean_interval, paired


def test_by_hand() -> None:
    found = mean_interval([1.0, 3.0, math.nan])
    assert (found.mean, found.n) == (2.0, 2)
    assert found.high - found.mean == pytest.approx(
        12.706204736 * math.sqrt(2) / math.sqrt(2)
    )  # t_{1, 0.975}, s = sqrt 2
    assert mean_interval([]).n == 0
    assert math.isnan(mean_interval([5.0]).low)


def test_coverage_is_the_level() -> None:
    rng = np.random.default_rng(1)
    inside = [i.low <= 0.0 and i.high >= 0.0 for i in map(mean_interval, rng.standard_normal((2000, 5)))]
    assert abs(np.mean(inside) - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)


def test_pairing_removes_what_both_share() -> None:
    rng = np.random.default_rng(2)
    shared = np.exp(rng.standard_normal(8))
    effect = paired(1.1 * shared, shared)
    assert effect.ratio == pytest.approx(1.1)
    assert effect.low == pytest.approx(effect.high)
