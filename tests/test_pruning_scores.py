from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from entropic_ctl import registry
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.scores import corner, entropic_share, mass, page_mean
from entropic_ctl.pruning.select import select


def concentrated(peak: float, pages: int, page_tokens: int = 16) -> np.ndarray:
    """Page 0 holds ``peak`` on one token; ``pages`` diffuse ones share the rest evenly."""
    weights = np.full((pages + 1, page_tokens), (1 - peak) / (pages * page_tokens))
    weights[0] = 0.0
    weights[0, 5] = peak
    return weights


def test_scores_on_offer() -> None:
    assert registry.names("entropic_ctl.pruning.scores") == ("corner", "entropic_share", "mass", "page_mean")


def test_a15_mass_on_one_token_ranks_first_by_mass_and_last_by_entropic_share() -> None:
    weights = concentrated(0.99, 9)
    assert int(np.argmax(mass.importance(weights))) == 0
    literal = entropic_share.importance(weights)
    assert int(np.argmin(literal)) == 0
    assert literal[0] == pytest.approx(-0.99 * np.log(0.99))


def test_a15_absolute_threshold_keeps_the_page_by_mass_and_drops_it_by_entropic_share() -> None:
    weights = concentrated(1 - 1e-6, 200)
    assert mass.importance(weights)[0] > 1e-5
    assert entropic_share.importance(weights)[0] < 1e-5


weights = hnp.arrays(np.float64, (5, 4), elements=st.floats(0, 1)).filter(lambda a: a.sum() > 1e-3)


@given(weights)
def test_shares_add_up_to_the_attention_entropy(raw: np.ndarray) -> None:
    a = raw / raw.sum()
    flat = a[a > 0]
    assert entropic_share.importance(a).sum() == pytest.approx(-(flat * np.log(flat)).sum(), abs=1e-12)
    m = mass.importance(a)
    inside = a / np.where(m > 0, m, 1.0)[:, None]
    page_entropy = -(inside * np.log(np.where(inside > 0, inside, 1.0))).sum(axis=1)
    literal = -m * np.log(np.where(m > 0, m, 1.0)) + m * page_entropy
    np.testing.assert_allclose(entropic_share.importance(a), literal, atol=1e-12)


@given(
    hnp.arrays(np.float64, (4, 8), elements=st.floats(-200, 200)),
    hnp.arrays(np.float64, (4, 8), elements=st.floats(-1, 1)),
    st.floats(0, 5),
)
def test_interval_contains_every_log_mass_within_the_error(
    exact: np.ndarray, direction: np.ndarray, error: float
) -> None:
    lower, upper = mass.interval(exact + direction * error * (1 - 1e-9), error)
    true = mass.log_mass(exact)
    assert (lower <= true).all()
    assert (true <= upper).all()


def test_empty_pages_and_unknown_errors() -> None:
    lower, upper = mass.interval([[-np.inf, -np.inf], [0.0, -np.inf]], [1.0, np.inf])
    assert lower[0] == upper[0] == -np.inf
    assert lower[1] == -np.inf
    assert upper[1] == np.inf
    with pytest.raises(BadInputError, match="error"):
        mass.interval([[0.0]], [-1.0])


keys = hnp.arrays(np.float64, (3, 6, 5), elements=st.floats(-30, 30))
queries = hnp.arrays(np.float64, 5, elements=st.floats(-5, 5))


def exact(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Log-mass of each page in extended precision."""
    s = (q.astype(np.longdouble) * k.astype(np.longdouble)).sum(axis=-1)
    top = s.max(axis=-1, keepdims=True)
    return top[..., 0] + np.log(np.exp(s - top).sum(axis=-1))


@given(queries, keys)
def test_the_corners_bound_every_score_and_the_mass(q: np.ndarray, k: np.ndarray) -> None:
    low, high = k.min(axis=1), k.max(axis=1)
    lower, upper = corner.bounds(q, low, high)
    s = (q.astype(np.longdouble) * k.astype(np.longdouble)).sum(axis=-1)
    assert (lower <= s.min(axis=1)).all()
    assert (s.max(axis=1) <= upper).all()
    lower, upper = corner.interval(q, low, high, 6)
    assert (lower <= exact(q, k)).all()
    assert (exact(q, k) <= upper).all()


@given(queries, keys)
def test_equal_keys_leave_no_width_but_rounding(q: np.ndarray, k: np.ndarray) -> None:
    same = np.broadcast_to(k[:, :1], k.shape)
    for lower, upper in (
        corner.interval(q, same.min(axis=1), same.max(axis=1), 6),
        page_mean.interval(q, same[:, 0], 6, radius=0.0),
    ):
        true = exact(q, same)
        assert (lower <= true).all()
        assert (true <= upper).all()
        assert (upper - lower < 1e-10).all()


@given(queries, keys, st.floats(0, 0.1))
def test_the_mean_bounds_the_mass_from_below_and_with_a_radius_from_above(
    q: np.ndarray, k: np.ndarray, error: float
) -> None:
    mean = k.astype(np.longdouble).mean(axis=1)
    radius = np.sqrt(((k - mean[:, None]) ** 2).sum(axis=-1)).max(axis=1).astype(np.float64) * (1 + 1e-12)
    stored = mean.astype(np.float64) + error * np.where(np.arange(5) % 2, 1, -1) * (1 - 1e-9)
    lower, upper = page_mean.interval(q, stored, 6, radius, error + 1e-13)
    assert (lower <= exact(q, k)).all()
    assert (exact(q, k) <= upper).all()
    blind = page_mean.interval(q, stored, 6)[1]
    assert (np.isinf(blind) | (np.abs(q).sum() == 0)).all()


def test_the_mean_ranks_the_page_that_holds_almost_all_the_mass_last() -> None:
    """One aligned key among fifteen that point away; the corner's upper bound sees it."""
    k = np.zeros((10, 16, 2))
    k[0, :, 0], k[0, 5, 0] = -2.0, 20.0
    q = np.array([1.0, 0.0])
    mass_of = np.exp(exact(q, k) - exact(q, k).max())
    assert mass_of[0] / mass_of.sum() > 0.999
    assert int(np.argmin(page_mean.interval(q, k.mean(axis=1), 16)[0])) == 0
    assert int(np.argmax(corner.interval(q, k.min(axis=1), k.max(axis=1), 16)[1])) == 0


@given(queries, keys, st.floats(0.01, 1.0))
def test_a_budget_on_corner_intervals_is_kept_by_the_true_masses(q: np.ndarray, k: np.ndarray, theta: float) -> None:
    lower, upper = corner.interval(q, k.min(axis=1), k.max(axis=1), 6)
    chosen = select(lower[None], upper[None], np.array([True, False, False]), theta, 1)
    true = np.exp((exact(q, k) - exact(q, k).max()).astype(np.float64))
    assert true[~chosen.kept[0]].sum() / true.sum() <= -np.expm1(-theta) + 1e-12


def test_empty_pages_and_bad_bounds_of_corner_and_mean() -> None:
    z = np.zeros((2, 3))
    for lower, upper in (corner.interval(z[0], z, z, [0, 2]), page_mean.interval(z[0], z, [0, 2])):
        assert lower[0] == upper[0] == -np.inf
        assert lower[1] == pytest.approx(np.log(2)) == upper[1]
    for build, name in (
        (lambda: corner.bounds(z, z + 1, z), "low"),
        (lambda: corner.interval(z, z, z, -1), "count"),
        (lambda: page_mean.interval(z, z, 1, radius=-1.0), "radius"),
        (lambda: page_mean.interval(z, z, 1, error=np.nan), "error"),
        (lambda: page_mean.interval(z, z, -1), "count"),
    ):
        with pytest.raises(BadInputError, match=name):
            build()
