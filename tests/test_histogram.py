from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from entropic_ctl.histogram import RELATIVE_ERROR, DurationHistogram

durations = st.lists(st.floats(2.0**-20, 2.0**20, exclude_max=True), min_size=1, max_size=60)


@given(durations, st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_the_exact_one_within_the_stated_error(values: list[float], share: float) -> None:
    histogram = DurationHistogram()
    histogram.add(np.array(values))
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    found = histogram.quantile(share)
    assert found is not None
    assert abs(found - exact) <= RELATIVE_ERROR * exact * (1 + 1e-12)
    assert histogram.n == len(values)
    assert histogram.quantile(1.0) == max(values)


def test_the_stated_error_is_reached() -> None:
    """Sharp: just above a power of two the middle of the bin is 1/128 away."""
    histogram = DurationHistogram()
    histogram.add(np.array([1.0, 2.0]))  # of 1.0 alone the maximum would be given
    assert histogram.quantile(0.5) == 1.0 + RELATIVE_ERROR


@given(durations, durations, st.integers(1, 59))
def test_merging_and_splitting_change_nothing(a: list[float], b: list[float], cut: int) -> None:
    whole, one, two = DurationHistogram(), DurationHistogram(), DurationHistogram()
    both = np.array(a + b)
    whole.add(both)
    one.add(both[:cut])
    two.add(both[cut:])
    one.merge(two)
    np.testing.assert_array_equal(one.counts, whole.counts)
    assert one.maximum_s == whole.maximum_s


def test_what_lies_beyond_the_bins() -> None:
    histogram = DurationHistogram()
    assert histogram.quantile(0.5) is None
    histogram.add(np.array([0.0, 0.0, 1e-9, 1e9]))
    assert histogram.quantile(0.75) == 0.0
    assert histogram.quantile(0.76) == 1e9
    for share in (0.0, 1.5, math.nan):
        with pytest.raises(BadInputError, match="not a share"):
            histogram.quantile(share)


def test_memory_is_constant() -> None:
    """S16: as many values as one likes."""
    histogram = DurationHistogram()
    before = histogram.counts.nbytes
    for scale in range(20):
        histogram.add(np.full(1000, 10.0**-scale))
    assert histogram.counts.nbytes == before
    assert histogram.n == 20_000
