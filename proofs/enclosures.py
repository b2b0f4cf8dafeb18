"""Rational enclosures of exp and log that do not rest on one library being right.

Every value is enclosed twice: by ball arithmetic (Arb, through python-flint) and by a series with a proved remainder
in integer arithmetic. The result is the hull of the two, so it is right if *either* is; if the two do not even overlap,
:class:`EnclosureError` is raised instead of an answer. Ends are exact rationals, rounded outward. Series are
remembered: several theorems need the same logarithms.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from flint import arb, ctx, fmpq

from entropic_ctl.errors import BadInputError, EntropicError

__all__ = ["EnclosureError", "Interval", "exp", "from_arb", "log", "shown", "to_arb"]

_MAX_ARGUMENT = 4096  # |x| for exp; far beyond any log-odds met here


class EnclosureError(EntropicError):
    """Two independent enclosures of one number are disjoint: at least one implementation is wrong."""


class Interval(NamedTuple):
    """A closed interval with exact rational ends, lo <= hi."""

    lo: Fraction
    hi: Fraction


def shown(x: Fraction, spec: str = ".4g") -> str:
    """Return a rational for people: formatted as the nearest float, or a power of ten where float64 has none for it.

    Examples
    --------
    >>> shown(Fraction(1, 3)), shown(Fraction(10) ** 400), shown(Fraction(-1, 10**400))
    ('0.3333', '10^400', '-10^-400')
    """
    try:
        near = float(x)
    except OverflowError:
        near = math.inf
    if near == x or (near and math.isfinite(near)):
        small = spec.endswith("f") and (abs(near) >= 1e15 or (near and not float(format(near, spec))))
        return format(near, ".4g" if small else spec)
    bits = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return f"{'-' if x < 0 else ''}10^{round(bits * math.log10(2))}"


def to_arb(x: Fraction) -> arb:
    """Return a ball that contains ``x``, at the working precision."""
    return arb(fmpq(x.numerator, x.denominator))


def from_arb(ball: arb) -> Interval:
    """Return the ends of a ball as exact rationals, rounded outward.

    Raises
    ------
    EnclosureError
        If the ball is not finite.
    """
    if not ball.is_finite():
        raise EnclosureError(f"ball arithmetic gave no finite enclosure: {ball}")
    ends = []
    for end in (ball.lower(), ball.upper()):
        mantissa, exponent = (int(part) for part in end.man_exp())
        ends.append(Fraction(mantissa) * Fraction(2) ** exponent)
    return Interval(ends[0], ends[1])


def _round(x: Fraction, bits: int, *, up: bool) -> Fraction:
    """Round to about ``bits`` significant bits, downward or upward."""
    if x == 0:
        return x
    shift = bits - (abs(x.numerator).bit_length() - x.denominator.bit_length())
    scaled = x * Fraction(2) ** shift
    whole = -((-scaled.numerator) // scaled.denominator) if up else scaled.numerator // scaled.denominator
    return Fraction(whole) / Fraction(2) ** shift


def _ball_exp(x: Fraction, bits: int) -> Interval:
    with ctx.workprec(bits):
        return from_arb(to_arb(x).exp())


def _ball_log(x: Fraction, bits: int) -> Interval:
    with ctx.workprec(bits):
        return from_arb(to_arb(x).log())


@lru_cache(maxsize=4096)
def _series_exp(x: Fraction, bits: int) -> Interval:
    """Enclose e^x = (e^y)^(2^m), 0 <= y <= 2^-8, by Taylor's series; for x < 0 by 1 / e^-x."""
    if x < 0:
        low, high = _series_exp(-x, bits)
        return Interval(_round(1 / high, bits, up=False), _round(1 / low, bits, up=True))
    halvings = max(0, (x.numerator // x.denominator).bit_length()) + 8
    work = bits + 2 * halvings + 16
    y = x / 2**halvings
    ends = []
    for up in (False, True):
        argument = _round(y, work, up=up)
        term, total, k = Fraction(1), Fraction(1), 0
        while term > Fraction(1, 2 ** (work + 8)):
            k += 1
            term = _round(term * argument / k, work, up=up)
            total = _round(total + term, work, up=up)
        if up:
            total += 2 * term  # terms shrink at least by half from here: the rest is at most the last term
        for _ in range(halvings):
            total = _round(total * total, work, up=up)
        ends.append(_round(total, bits, up=up))
    return Interval(ends[0], ends[1])


@lru_cache(maxsize=4096)
def _atanh_series(z: Fraction, work: int, *, up: bool) -> Fraction:
    """Bound atanh z for 0 <= z <= 1/3 from above or below: sum z^(2j+1)/(2j+1), rest at most last term / (1 - z^2).

    In integers, units of 2^-work, every quotient rounded up or every quotient rounded down.
    """

    def quotient(a: int, b: int) -> int:
        return -(-a // b) if up else a // b

    one = 1 << work
    power = total = quotient(z.numerator * one, z.denominator)
    square, j = quotient(power * power, one), 1
    while power > 1:
        power = quotient(power * square, one)
        total += quotient(power, 2 * j + 1)
        j += 1
    return Fraction(total + 2 * power if up else total, one)


def _series_log(x: Fraction, bits: int) -> Interval:
    """Enclose log x = k log 2 + 2 atanh((m-1)/(m+1)) with m = x / 2^k in (1/2, 2); log 2 = 2 atanh(1/3)."""
    if x < 1:
        low, high = _series_log(1 / x, bits)
        return Interval(-high, -low)
    k = max(0, x.numerator.bit_length() - x.denominator.bit_length())
    m = x / 2**k
    work = bits + 32
    third = Fraction(1, 3)
    ends = []
    for up in (False, True):
        part = (
            _atanh_series((m - 1) / (m + 1), work, up=up)
            if m >= 1
            else -_atanh_series((1 - m) / (1 + m), work, up=not up)
        )
        ends.append(_round(2 * (k * _atanh_series(third, work, up=up) + part), bits, up=up))
    return Interval(ends[0], ends[1])


def _hull(ball: Interval, series: Interval, name: str, x: Fraction) -> Interval:
    if ball.lo > series.hi or series.lo > ball.hi:
        balls, terms = (", ".join(shown(end, "") for end in each) for each in (ball, series))
        raise EnclosureError(
            f"two enclosures of {name}({shown(x, '')}) are disjoint: [{balls}] by balls, [{terms}] by series; the "
            "installed python-flint is not to be trusted"
        )
    return Interval(min(ball.lo, series.lo), max(ball.hi, series.hi))


def exp(x: Fraction, bits: int = 128) -> Interval:
    """Enclose e^x.

    Parameters
    ----------
    x : Fraction
        |x| <= 4096.
    bits : int
        Working precision.

    Returns
    -------
    Interval
        lo <= e^x <= hi.

    Raises
    ------
    BadInputError
        If x is out of range.
    EnclosureError
        If ball arithmetic and the series contradict each other.
    """
    if abs(x) > _MAX_ARGUMENT:
        raise BadInputError("exponent out of range", field="x", value=shown(x, ""), allowed=f"|x| <= {_MAX_ARGUMENT}")
    return _hull(_ball_exp(x, bits), _series_exp(x, bits), "exp", x)


def log(x: Fraction, bits: int = 128) -> Interval:
    """Enclose the natural logarithm of x > 0; parameters and errors as for :func:`exp`."""
    if x <= 0:
        raise BadInputError(
            "logarithm of a number that is not positive", field="x", value=shown(x, ""), allowed="x > 0"
        )
    return _hull(_ball_log(x, bits), _series_log(x, bits), "log", x)
