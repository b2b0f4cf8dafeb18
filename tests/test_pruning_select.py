from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.certificate import kl_nats
from entropic_ctl.pruning.select import heads_per_group, select

INF = np.inf


@dataclass
class Problem:
    lower: np.ndarray
    upper: np.ndarray
    protected: np.ndarray
    kv_heads: int

    def select(self, theta: float, selection: str = "union"):
        return select(self.lower, self.upper, self.protected, theta, self.kv_heads, selection=selection)


@st.composite
def problems(draw: st.DrawFn, *, odd: bool = True) -> Problem:
    kv_heads, group, pages = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([0.0, 1.0, 5.0, 300.0]))
    width = draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0]))
    centre = rng.normal(size=(kv_heads * group, pages)) * scale + draw(st.sampled_from([0.0, -1e5, 700.0]))
    half = rng.random(centre.shape) * width
    lower, upper = centre - half, centre + half
    if odd and draw(st.booleans()):
        lower[rng.random(lower.shape) < 0.2] = -INF
        upper[rng.random(upper.shape) < 0.1] = INF
        empty = rng.random(upper.shape) < 0.1
        lower[empty] = upper[empty] = -INF
    return Problem(lower, upper, rng.random(pages) < 0.3, kv_heads)


def true_mass(x: np.ndarray, kept: np.ndarray, group: int) -> np.ndarray:
    top = x.max(axis=1, keepdims=True)
    w = np.exp(x - np.where(np.isfinite(top), top, 0.0))
    pruned = np.repeat(~kept, group, axis=0)
    return np.where(pruned, w, 0).sum(axis=1) / w.sum(axis=1)


thetas = st.sampled_from([1e-12, 1e-3, 0.01, 0.3, 3.0, 40.0])


@given(problems(), thetas)
def test_union_guarantee_for_every_query_head(p: Problem, theta: float) -> None:
    got = p.select(theta)
    assert (kl_nats(got.mass) <= theta).all()
    assert got.kept[:, p.protected].all()
    assert got.kept.any(axis=1).all()
    assert got.kept.shape == (p.kv_heads, p.lower.shape[1])


@given(problems(), thetas, st.sampled_from(["union", "group_mean"]), st.integers(0, 2**32 - 1))
def test_adversarial_masses_inside_the_intervals_never_exceed_the_certificate(
    p: Problem, theta: float, selection: str, seed: int
) -> None:
    got = p.select(theta, selection)
    group = p.lower.shape[0] // p.kv_heads
    pruned = np.repeat(~got.kept, group, axis=0)
    worst = np.where(pruned, p.upper, p.lower)  # pruned pages as heavy, kept ones as light as they can be
    with np.errstate(invalid="ignore"):
        inside = p.lower + (p.upper - p.lower) * np.random.default_rng(seed).random(p.lower.shape)
    for x in (worst, np.where(np.isnan(inside), worst, inside)):
        live = np.isfinite(x.max(axis=1))
        mass = true_mass(x[live], np.repeat(got.kept, group, axis=0)[live], 1)
        assert (mass <= got.mass[live]).all()


@given(problems(odd=False), st.lists(thetas, min_size=2, max_size=4, unique=True))
def test_kept_sets_are_nested_in_theta(p: Problem, budgets: list[float]) -> None:
    for selection in ("union", "group_mean"):
        kept = [p.select(theta, selection).kept for theta in sorted(budgets)]
        for narrow, wide in itertools.pairwise(kept):
            assert (wide <= narrow).all()


@given(problems())
def test_zero_budget_keeps_everything(p: Problem) -> None:
    got = p.select(0.0)
    assert got.kept.all()
    assert (got.mass == 0).all()
    assert (got.log_pruned == -INF).all()


@given(problems(odd=False), thetas, st.integers(0, 2**32 - 1))
def test_page_order_does_not_matter(p: Problem, theta: float, seed: int) -> None:
    assume(len(np.unique(p.upper)) == p.upper.size)
    perm = np.random.default_rng(seed).permutation(p.lower.shape[1])
    moved = select(p.lower[:, perm], p.upper[:, perm], p.protected[perm], theta, p.kv_heads)
    np.testing.assert_array_equal(moved.kept, p.select(theta).kept[:, perm])


@given(problems(odd=False), thetas)
def test_single_head_drops_as_many_pages_as_any_prefix_allows(p: Problem, theta: float) -> None:
    """One query head: dropping the next page in ascending order of upper bounds would break the budget."""
    one = select(p.lower[:1], p.upper[:1], p.protected, theta, 1)
    free = [b for b in np.argsort(p.upper[0], kind="stable") if not p.protected[b]]
    dropped = {int(b) for b in np.flatnonzero(~one.kept[0])}
    assert dropped == {int(b) for b in free[: len(dropped)]}
    if len(dropped) < len(free) and len(dropped) + 1 < p.upper.shape[1]:
        more = dropped | {int(free[len(dropped)])}
        pruned = np.isin(np.arange(p.upper.shape[1]), list(more))
        top = p.upper[0].max()
        u = np.exp(p.upper[0][pruned] - top).sum()
        z = np.exp(p.lower[0][~pruned] - top).sum()
        if u < 1e12 * z:  # beyond, 1 - m is lost in float64 and the page is kept to be safe
            assert np.log1p(u / z) > theta * (1 - 1e-9)


def test_protected_pages_are_kept_beside_pages_of_unknown_mass() -> None:
    """Both come last in the order of dropping; a protected page in front of an unknown one was dropped."""
    for unknown in range(3):
        lower, upper, protected = np.zeros((1, 3)), np.zeros((1, 3)), np.arange(3) == 1
        upper[0, unknown] = INF
        for selection in ("union", "group_mean"):
            kept = select(lower, upper, protected, 3.0, 1, selection=selection).kept[0]
            assert kept[1]
            assert kept[unknown]


def test_group_mean_reads_less_and_a_single_head_may_lose_up_to_three_times_the_budget() -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(3, 60)) * 3
    protected = np.zeros(60, np.bool_)
    union, mean = (select(x, x, protected, 0.05, 1, selection=s) for s in ("union", "group_mean"))
    assert mean.kept.sum() < union.kept.sum()
    budget_mass = -np.expm1(-0.05)
    assert mean.mass.mean() <= budget_mass
    assert budget_mass < mean.mass.max() <= 3 * budget_mass
    np.testing.assert_allclose(mean.mass, true_mass(x, mean.kept, 3), rtol=1e-9)


def test_group_mapping_keeps_what_its_own_query_heads_need() -> None:
    x = np.full((4, 5), -50.0)
    x[np.arange(4), [0, 1, 3, 4]] = 0.0
    got = select(x, x, np.zeros(5, np.bool_), 0.01, 2)
    np.testing.assert_array_equal(got.kept, [[True, True, False, False, False], [False, False, False, True, True]])


def test_log_pruned_is_the_log_of_the_pruned_upper_sum() -> None:
    x = np.log(np.array([[5.0, 1.0, 2.0, 992.0]]))
    got = select(x, x, np.zeros(4, np.bool_), 0.0081, 1)
    np.testing.assert_array_equal(got.kept, [[False, False, False, True]])
    assert got.log_pruned[0] == pytest.approx(np.log(8.0), rel=1e-11)
    assert got.log_pruned[0] >= np.log(8.0)
    assert got.mass[0] == pytest.approx(0.008, rel=1e-11)
    tight = select(x, x, np.zeros(4, np.bool_), 0.0079, 1)
    np.testing.assert_array_equal(tight.kept, [[True, False, False, True]])


@pytest.mark.parametrize("theta", [1e-3, 5.0, INF])
def test_single_page_all_protected_and_unknown_pages_are_kept(theta: float) -> None:
    assert select([[0.0]], [[0.0]], [False], theta, 1).kept.all()
    assert select([[0.0, 1.0]], [[0.5, 2.0]], [True, True], theta, 1).kept.all()
    unknown = select([[-INF, -INF, 5.0]], [[INF, -30.0, 6.0]], [False] * 3, theta, 1)
    assert unknown.kept[0, 0]
    assert select([[-INF, -INF]], [[-INF, -INF]], [False, False], theta, 1).kept.all()
    assert select([[INF, 0.0]], [[INF, 0.0]], [False, False], theta, 1).kept[0, 0]


@pytest.mark.parametrize("selection", ["union", "group_mean"])
@pytest.mark.parametrize("theta", [0.1, INF])
def test_a_light_protected_page_stays_beside_a_page_whose_upper_bound_is_unknown(theta: float, selection: str) -> None:
    got = select([[0.0, 9.0]], [[0.0, INF]], [True, False], theta, 1, selection=selection)
    assert got.kept[0, 0]  # its mass is negligible: dropping it would be within the budget
    assert got.kept[0, 1] == (theta < INF)


def test_hopeless_intervals_fall_back_to_dense() -> None:
    got = select(np.full((2, 8), -500.0), np.full((2, 8), 500.0), np.zeros(8, np.bool_), 0.01, 1)
    assert got.kept.all()
    assert (got.mass == 0).all()


@given(problems(odd=False), thetas, st.sampled_from(["union", "group_mean"]), st.integers(0, 2**32 - 1))
def test_what_was_dropped_before_is_charged_to_the_same_budget(
    p: Problem, theta: float, selection: str, seed: int
) -> None:
    """Some pages of each problem are gone, charged at their upper ends: the bounds hold for both kinds together."""
    rng = np.random.default_rng(seed)
    pages = p.lower.shape[1]
    gone = rng.random(pages) < 0.4
    gone[rng.integers(pages)] = False
    p.protected[rng.integers(pages)] |= rng.random() < 0.5
    heads, group = p.lower.shape[0], p.lower.shape[0] // p.kv_heads
    spent = np.logaddexp.reduce(p.upper[:, gone], axis=1, initial=-INF) + 1e-12 * np.abs(p.upper).max()
    for budget, fixed in ((theta, p.protected), (0.0, p.protected), (theta, np.ones(pages, np.bool_))):
        got = select(
            p.lower[:, ~gone], p.upper[:, ~gone], fixed[~gone], budget, p.kv_heads, selection=selection, log_spent=spent
        )
        left = np.zeros((p.kv_heads, pages), np.bool_)
        left[:, ~gone] = got.kept
        dropped = np.repeat(~left, group, axis=0)
        for x in (np.where(dropped, p.upper, p.lower), p.upper, p.lower):
            assert (true_mass(x, left, group) <= got.mass * (1 + 1e-9)).all()
        total = np.logaddexp.reduce(np.where(dropped, p.upper, -INF), axis=1)
        assert (got.log_pruned >= total - 1e-12 * np.abs(np.where(dropped, p.upper, 0.0)).max()).all()
        assert (got.log_pruned > -INF).all() == (gone.any() or not got.kept.all())
        if not got.kept.all() and selection == "union":
            own = [h for h in range(heads) if group == 1 and not got.kept[h].all()]
            assert (kl_nats(got.mass[own]) <= budget).all()
        if budget == 0.0 or fixed.all():
            assert got.kept.all()
    none = p.select(theta, selection)
    same = select(p.lower, p.upper, p.protected, theta, p.kv_heads, selection=selection, log_spent=np.full(heads, -INF))
    np.testing.assert_array_equal(none.kept, same.kept)
    np.testing.assert_array_equal(none.mass, same.mass)


def test_a_budget_spent_before_leaves_nothing() -> None:
    x = np.log(np.array([[1.0, 1.0, 98.0]]))
    fixed = [False, False, True]
    for spent, kept in ((1e-9, 1), (1.0, 2), (2.0, 3)):
        got = select(x, x, fixed, -np.log1p(-0.0205), 1, log_spent=np.log([spent]))
        assert got.kept.sum() == kept
        left = x[got.kept].size
        lost = spent + 3 - left
        assert got.mass[0] == pytest.approx(lost / (lost + np.exp(x)[got.kept].sum()), rel=1e-9)


def test_a4_heads_that_do_not_divide_are_refused() -> None:
    assert [heads_per_group(*pair) for pair in ((48, 2), (40, 2), (28, 4), (24, 8))] == [24, 20, 7, 3]
    with pytest.raises(BadInputError, match="33"):
        heads_per_group(33, 2)


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"lower": [[1.0, 0.0]]}, "lower <= upper"),
        ({"lower": [[np.nan, 0.0]]}, "lower <= upper"),
        ({"protected": [True]}, "(H, P)"),
        ({"theta_nats": -1.0}, "theta_nats"),
        ({"theta_nats": np.nan}, "theta_nats"),
        ({"selection": "best"}, "group_mean"),
        ({"n_kv_heads": 2}, "divisor"),
        ({"log_spent": [np.nan]}, "log_spent"),
        ({"log_spent": [0.0, 0.0]}, "log_spent"),
    ],
)
def test_bad_input_is_refused(change: dict, needle: str) -> None:
    good = {
        "lower": [[0.0, 0.0]],
        "upper": [[0.0, 0.0]],
        "protected": [False, False],
        "theta_nats": 0.1,
        "n_kv_heads": 1,
    }
    with pytest.raises(BadInputError) as caught:
        select(**{**good, **change})
    assert needle in str(caught.value)
