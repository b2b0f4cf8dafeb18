from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from proofs import exact


@pytest.mark.parametrize("a", [1 + 1e-9, "1.000000001", Fraction(10**9 + 1, 10**9), 1, -1.0, -1 - 1e-9])
def test_p1_unstable_scalars_are_never_certified(a: exact.Number) -> None:
    """P1: a = 1 + 1e-9."""
    assert exact.linear_scalar(a).status == "refuted"


@pytest.mark.parametrize("a", [1 - 1e-9, "0.999999999", Fraction(10**9 - 1, 10**9), 0, -1 + 1e-9])
def test_p1_stable_scalars_are_certified_exactly(a: exact.Number) -> None:
    """P1: a = 1 - 1e-9."""
    assert exact.linear_scalar(a).status == "proved"


@given(st.fractions(-2, 2))
def test_p1_decides_every_rational(a: Fraction) -> None:
    assert (exact.linear_scalar(a).status == "proved") == (-1 < a < 1)


def test_p1_neighbouring_floats_are_told_apart() -> None:
    assert exact.linear_scalar(math.nextafter(1.0, 0.0)).status == "proved"
    assert exact.linear_scalar(math.nextafter(1.0, 2.0)).status == "refuted"
    assert exact.linear_scalar(0.5).subject != exact.linear_scalar(0.25).subject


@pytest.mark.parametrize("a", [math.nan, math.inf, -math.inf, "nan", "x", "1/0", True, None])
def test_p1_refuses_what_is_no_number(a: object) -> None:
    with pytest.raises(BadInputError, match="a: not"):
        exact.linear_scalar(a)  # type: ignore[arg-type]


def test_p2_incomplete_lyapunov_candidates() -> None:
    """P2: V = -x^2 for x+ = 2x decreases but is not positive; V = x^2 + 0.1 does not vanish at 0."""
    first = exact.quadratic_lyapunov(2, -1)
    second = exact.quadratic_lyapunov("0.5", 1, "0.1")
    assert (first.status, second.status) == ("unknown", "unknown")
    assert "not positive definite" in first.reason
    assert "V(0)" in second.reason
    assert exact.quadratic_lyapunov("0.5", 1).status == "proved"
    assert exact.quadratic_lyapunov(1, 1).status == "unknown"


def test_p4_definiteness_is_not_judged_elementwise() -> None:
    """P4: all entries negative yet indefinite; a tiny negative diagonal entry; NaN."""
    assert not exact.negative_definite([[-1, -5], [-5, -1]])
    assert exact.negative_definite([[-5, -1], [-1, -5]])
    assert not exact.positive_definite([[1, 0], [0, -5e-10]])
    assert not exact.positive_definite([[1, 1], [1, 1]])
    with pytest.raises(BadInputError, match="not finite"):
        exact.positive_definite([[math.nan, 0], [0, 1]])


@pytest.mark.parametrize("matrix", [[], [[1, 2]], [[1, 2], [3, 4]], [[1], [2]]])
def test_p4_refuses_what_is_not_symmetric(matrix: list[list[exact.Number]]) -> None:
    with pytest.raises(BadInputError, match=r"not (a square|symmetric)"):
        exact.positive_definite(matrix)


@given(st.integers(1, 4), st.integers(0, 2**31))
def test_p4_agrees_with_eigenvalues(n: int, seed: int) -> None:
    entries = np.random.default_rng(seed).integers(-6, 7, (n, n))
    matrix = entries + entries.T
    smallest = np.linalg.eigvalsh(matrix.astype(float)).min()
    if abs(smallest) > 1e-9:
        assert exact.positive_definite(matrix.tolist()) == (smallest > 0)
