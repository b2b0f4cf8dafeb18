from __future__ import annotations

from fractions import Fraction

import mpmath
import pytest
from flint import arb, ctx
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from proofs import enclosures
from proofs.enclosures import EnclosureError, Interval


def at_80_digits(function: object, x: Fraction) -> mpmath.mpf:
    with mpmath.workdps(80):
        return function(mpmath.mpf(x.numerator) / x.denominator)  # type: ignore[operator]


def contains(interval: Interval, value: mpmath.mpf) -> bool:
    with mpmath.workdps(80):
        low, high = (mpmath.mpf(end.numerator) / end.denominator for end in interval)
        return bool(low <= value <= high)


HARD = Fraction(3893924827815215, 2**50)


@pytest.mark.parametrize("bits", [53, 64, 128, 200])
def test_p3_exp_of_a_hard_argument(bits: int) -> None:
    """P3: each route alone, and the hull, contain exp(x); mpmath 1.3's own interval exp at 53 bits does not."""
    truth = at_80_digits(mpmath.exp, HARD)
    for route in (enclosures._ball_exp, enclosures._series_exp, enclosures.exp):
        found = route(HARD, bits)
        assert contains(found, truth)
        assert found.hi - found.lo < Fraction(2) ** (10 - bits)


@given(st.fractions(-60, 60, max_denominator=10**12), st.sampled_from([53, 128]))
def test_both_routes_enclose_exp(x: Fraction, bits: int) -> None:
    truth = at_80_digits(mpmath.exp, x)
    for route in (enclosures._ball_exp, enclosures._series_exp):
        found = route(x, bits)
        assert contains(found, truth)
        assert (found.hi - found.lo) / found.hi < Fraction(1, 2 ** (bits - 12))


@given(st.fractions(Fraction(1, 10**9), 10**9, max_denominator=10**12), st.sampled_from([53, 128]))
def test_both_routes_enclose_log(x: Fraction, bits: int) -> None:
    truth = at_80_digits(mpmath.log, x)
    for route in (enclosures._ball_log, enclosures._series_log):
        found = route(x, bits)
        assert contains(found, truth)
        assert found.hi - found.lo < Fraction(1, 2 ** (bits - 12))


def test_exact_values() -> None:
    assert 0 in Interval(*enclosures.log(Fraction(1)))
    assert enclosures.exp(Fraction(0)).lo <= 1 <= enclosures.exp(Fraction(0)).hi


def test_one_wrong_route_is_outvoted_or_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dependency whose enclosure misses slightly is absorbed by the hull; one that is far off is an error."""
    right = enclosures._series_exp(HARD, 53)
    sliver = Interval(right.lo, right.lo)  # narrower than the truth allows
    monkeypatch.setattr(enclosures, "_ball_exp", lambda x, bits: sliver)
    assert contains(enclosures.exp(HARD, 53), at_80_digits(mpmath.exp, HARD))
    monkeypatch.setattr(enclosures, "_ball_exp", lambda x, bits: Interval(right.lo - 1, right.lo - Fraction(1, 10)))
    with pytest.raises(EnclosureError, match="disjoint"):
        enclosures.exp(HARD, 53)


def test_bad_arguments() -> None:
    with pytest.raises(BadInputError, match="positive"):
        enclosures.log(Fraction(0))
    with pytest.raises(BadInputError, match="out of range"):
        enclosures.exp(Fraction(10**6))
    with pytest.raises(EnclosureError, match="no finite enclosure"):
        enclosures.from_arb(arb("nan"))


@given(st.fractions(-100, 100, max_denominator=10**6))
def test_conversion_to_balls_and_back_loses_nothing(x: Fraction) -> None:
    with ctx.workprec(53):
        back = enclosures.from_arb(enclosures.to_arb(x))
    assert back.lo <= x <= back.hi


def test_p4_ball_product_rounds_outward() -> None:
    """P4: the square of a ball around the double 0.1 contains Fraction(0.1)^2 and has positive width."""
    with ctx.workprec(53):
        square = enclosures.from_arb(arb(0.1) ** 2)
    assert square.lo <= Fraction(0.1) ** 2 <= square.hi
    assert square.hi > square.lo
