from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.entropy_interval import (
    TopKInterval,
    _box,
    interval_from_logits,
    interval_from_logprobs,
    interval_from_probabilities,
)
from entropic_ctl.errors import BadInputError


def entropy(p: np.ndarray[Any, Any]) -> float:
    q = p[p > 0].astype(np.longdouble)
    return float(-(q * np.log(q)).sum())


def tempered(p: np.ndarray[Any, Any], T: float) -> np.ndarray[Any, Any]:
    with np.errstate(divide="ignore"):
        z = np.log(p) / T
    w = np.exp(z - z.max())
    return w / w.sum()


def holds(found: TopKInterval, H: float) -> bool:
    return bool(found.lower - 1e-15 <= H <= found.upper + 1e-15)  # the reference's own rounding


@pytest.mark.parametrize(
    ("n", "p", "lower", "upper"), [(10, (0.6, 0.2), 0.950271, 1.366159), (20, (0.4, 0.1), 1.748067, 2.388534)]
)
def test_e1_tail_bounds(n: int, p: tuple[float, ...], lower: float, upper: float) -> None:
    """E1, from probabilities, log-probabilities and logits; both ends are attained."""
    spread = np.array([*p, *[(1 - sum(p)) / (n - len(p))] * (n - len(p))])
    for found in (
        interval_from_probabilities(np.array(p), n),
        interval_from_logprobs(np.log(p), n),
        interval_from_logits(np.log(spread), len(p)),
    ):
        assert found.feasible
        assert found.lower == pytest.approx(lower, abs=1e-6)
        assert found.upper == pytest.approx(upper, abs=1e-6)
        assert found.tail_mass == pytest.approx(1 - sum(p))
    assert entropy(spread) == pytest.approx(upper, abs=1e-6)


def test_e2_whole_distribution_and_rounded_logprobs() -> None:
    """E2: k = n, exact and rounded to two digits with a mass above 1."""
    p = np.array([0.5, 0.3, 0.2])
    for found in (
        interval_from_probabilities(p, 3),
        interval_from_logprobs(np.log(p), 3),
        interval_from_logits(np.log(p), 3),
    ):
        assert found.feasible
        assert found.upper - found.lower <= 1e-6
        assert holds(found, 1.0296530140645737)
    found = interval_from_probabilities(np.array([0.5, 0.3, 0.2], np.float32), 3)
    assert found.feasible
    assert holds(found, 1.0296530140645737)
    rounded = np.array([-0.69, -1.20, -1.61])
    assert np.exp(rounded).sum() == pytest.approx(1.00266, abs=1e-5)
    found = interval_from_logprobs(rounded, 3, rounding=0.005)
    assert found.feasible
    assert 1.0282 <= found.lower <= 1.0284  # exact range of the rounding box: [1.028474, 1.030484]
    assert 1.0305 <= found.upper <= 1.0307 <= math.log(3)
    undeclared = interval_from_logprobs(rounded, 3)
    assert not undeclared.feasible
    assert (undeclared.lower, undeclared.upper) == (0.0, math.log(3))


def test_infeasible_tails_are_flagged_and_widened() -> None:
    found = interval_from_probabilities(np.array([[0.6, 0.01], [0.6, 0.3]]), 12)
    assert found.feasible.tolist() == [False, True]
    assert (found.lower[0], found.upper[0]) == (0.0, pytest.approx(math.log(12)))


@st.composite
def distributions(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], int]:
    n = draw(st.integers(1, 40))
    sharp = draw(st.floats(0.0, 30.0))
    seed = draw(st.integers(0, 2**32 - 1))
    z = np.random.default_rng(seed).normal(size=n) * sharp
    if draw(st.booleans()):
        z = np.round(z)  # ties
    p = np.exp(z - z.max())
    return p / p.sum(), draw(st.integers(1, n))


@given(distributions(), st.sampled_from([0.3, 0.5, 1.0, 1.7, 4.0]))
def test_interval_holds_the_entropy_of_any_distribution_that_agrees(
    case: tuple[np.ndarray[Any, Any], int], T: float
) -> None:
    p, k = case
    n, top = len(p), np.sort(p)[::-1][: case[1]]
    H = entropy(tempered(p, T))
    for found in (
        interval_from_probabilities(top, n, temperature=T),
        interval_from_logprobs(np.log(np.maximum(top, 1e-300)), n, temperature=T),
        interval_from_logits(np.log(np.maximum(p, 1e-300)), k, T),
    ):
        assert found.feasible
        assert found.lower <= H + 1e-15
        assert found.upper >= H - 1e-15
        assert 0 <= found.lower <= found.upper <= math.log(n)


@given(distributions(), st.sampled_from([0.5, 1.0, 2.0]), st.integers(1, 4))
def test_interval_holds_after_rounding(case: tuple[np.ndarray[Any, Any], int], T: float, digits: int) -> None:
    p, k = case
    top, H = np.sort(p)[::-1][:k], entropy(tempered(p, T))
    half = 0.5 * 10.0**-digits * (1 + 1e-9)
    lp = np.round(np.log(np.maximum(top, 1e-300)), digits)
    found = interval_from_logprobs(lp, len(p), rounding=half, temperature=T)
    assert found.feasible
    assert holds(found, H)
    found = interval_from_probabilities(np.round(top, digits), len(p), rounding=half, temperature=T)
    assert found.feasible
    assert holds(found, H)


@given(distributions(), st.sampled_from([0.4, 1.0, 2.5]))
def test_both_ends_are_attained(case: tuple[np.ndarray[Any, Any], int], T: float) -> None:
    """Tight at T = 1; at other temperatures the extreme tails lie inside."""
    p, k = case
    n, top = len(p), np.sort(p)[::-1][:k]
    e = max(0.0, 1 - top.sum())
    found = interval_from_probabilities(top, n, temperature=T)
    even = np.full(n - k, e / max(n - k, 1))
    packed = np.zeros(n - k)
    full = min(int(e / top[-1] + 1e-9), n - k)
    packed[:full] = top[-1]
    if full < n - k:
        packed[full] = max(0.0, e - full * top[-1])
    ends = [entropy(tempered(np.concatenate([top, tail]), T)) for tail in (packed, even)]
    assert found.lower <= ends[0] + 1e-12
    assert found.upper >= ends[1] - 1e-12
    if T == 1.0:
        assert found.lower == pytest.approx(ends[0], abs=1e-9)
        assert found.upper == pytest.approx(ends[1], abs=1e-9)


@given(distributions(), st.floats(1e-4, 0.2))
def test_no_member_of_a_rounding_box_beats_its_ends(case: tuple[np.ndarray[Any, Any], int], r: float) -> None:
    """The water level and the greedy packing bound every member of the box (members by rejection, the centre first)."""
    p, k = case
    ordered = np.sort(p)[::-1]
    top, rest = ordered[:k], ordered[k:]
    lower, upper, feasible = _box(top * np.exp(-r), np.minimum(top * np.exp(r), 1.0), float(len(rest)))
    assert feasible
    rng = np.random.default_rng(k)
    members = 0
    for scale in np.linspace(0.0, 1.0, 30):
        q = np.concatenate([top * np.exp(rng.uniform(-r, r, k) * scale), rest * rng.uniform(1 - scale, 1, len(rest))])
        if len(rest):
            q[k:] *= max(0.0, 1 - q[:k].sum()) / max(q[k:].sum(), 1e-300)
        else:
            q /= q.sum()
        inside = (abs(np.log(q[:k] / top)) <= r + 1e-12).all() and (q[k:] <= q[:k].min() + 1e-15).all()
        if inside and abs(q.sum() - 1) < 1e-12:
            members += 1
            assert lower - 1e-9 <= entropy(q) <= upper + 1e-9
    assert members > 0


def test_narrower_knowledge_gives_wider_intervals() -> None:
    z = np.random.default_rng(3).normal(size=(5, 500)) * 2
    widths = [interval_from_logits(z, k).upper - interval_from_logits(z, k).lower for k in (1, 5, 50, 499, 500)]
    for wide, narrow in itertools.pairwise(widths):
        assert (narrow <= wide + 1e-12).all()
    assert (widths[-1] < 1e-9).all()


def test_tail_mass_comes_from_the_tail() -> None:
    """A tail of 1e-30 is invisible to 1 - sum, and present in the interval from logits."""
    z = np.array([[0.0, -70.0, -71.0]])
    assert interval_from_logits(z, 1).tail_mass[0] == pytest.approx(math.exp(-70) + math.exp(-71), rel=1e-9)


def test_bad_rows_and_arguments() -> None:
    found = interval_from_logits(np.array([[-np.inf, -np.inf], [0.0, np.nan], [0.0, -np.inf]]), 1)
    assert found.feasible.tolist() == [False, False, True]
    assert np.isnan(found.lower[:2]).all()
    assert found.upper[2] <= 1e-9
    for call in (
        lambda: interval_from_logits(np.zeros(3), 4),
        lambda: interval_from_logits(np.zeros(3), 0),
        lambda: interval_from_probabilities(np.array([1.2]), 3),
        lambda: interval_from_probabilities(np.array([np.nan]), 3),
        lambda: interval_from_probabilities(np.array([0.5]), 3, rounding=-1.0),
        lambda: interval_from_probabilities(np.array([0.5]), 3, temperature=0.0),
        lambda: interval_from_logprobs(np.array([0.1]), 3),
        lambda: interval_from_logprobs(np.array([-0.1]), 0),
    ):
        with pytest.raises(BadInputError, match="allowed"):
            call()


def test_torch_rows_are_read_on_the_host() -> None:
    torch = pytest.importorskip("torch")
    z = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    ours, theirs = interval_from_logits(z, 10), interval_from_logits(z.double().numpy(), 10)
    np.testing.assert_array_equal(ours.lower, theirs.lower)
    lp = torch.log_softmax(z.float(), -1).sort(-1, descending=True).values[:, :10]
    H = [entropy(tempered(row, 1.0)) for row in np.exp(z.double().numpy())]
    found = interval_from_logprobs(lp, 100)
    assert ((found.lower <= H) & (found.upper >= H)).all()
