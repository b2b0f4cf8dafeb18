"""Rounding of the C++ decode attention: integer scores of the shadow, sums over pages, certificates (theorem 9).

The numbers granted are those of ``backends/native/src/{score,attend,pruned,simd}``; each gap is granted less needed.
With W = sum |q_d| w_d 128 a and C = sum |q_d m_d|, W + C <= |q| N for the stored norm N (Cauchy-Schwarz). Source: ours.
"""

from __future__ import annotations

from fractions import Fraction

from proofs.enclosures import exp, log

__all__ = ["MOST_PAGES", "exp_error", "integer_gaps", "per_channel"]

MOST_PAGES = 2**21
"""From here on the budget that selection may spend is not positive: nothing is dropped."""

_U, _W = Fraction(1, 2**24), Fraction(1, 2**53)
_FLUSHED = Fraction(1, 2**126)
_BITS = 64


def _gamma(n: int, unit: Fraction = _U) -> Fraction:
    return n * unit / (1 - n * unit)


def per_channel() -> Fraction:
    """Bound |q w / (256 alpha) - qw|: q by 1 / alpha, of at most 32,767, to the nearest, then by w / 256."""
    return (Fraction(1, 2) + 32768 * _gamma(2)) * Fraction(255, 256) + Fraction(1, 2)


def exp_error() -> Fraction:
    """Bound the relative error of ``simd.h``'s exp: reduction, the polynomial of degree 7, its rounding."""
    r = (
        log(Fraction(2), _BITS).hi / 2 * (1 + Fraction(1, 1000))
    )  # n is a log2(e), rounded: to the nearest but for 2^-16
    reduction = 2 * r * _U + 128 * Fraction(213, 10**6) * _U  # two fused steps; ln 2 in two parts, the first exact
    cut = r**8 / _factorial(8) * Fraction(11, 10)
    worst = Fraction(0)
    # Horner: a partial value is at most its constant term for negative arguments, its value at r for positive ones
    for positive, least in ((False, exp(-r, _BITS).lo), (True, Fraction(1))):
        error, value = Fraction(0), Fraction(0)
        for k in range(7, 0, -1):
            c = Fraction(1, _factorial(k))
            value = c + (value * r if positive else 0)
            error = error * r + value * _U + (c * _U if k > 2 else 0)  # 1 and 1/2 are exact
        worst = max(worst, (error * r + cut) / least)
    return (worst + reduction) * (1 + r) + 2 * _U  # the last rounding is relative to the result; products of errors


def _factorial(n: int) -> int:
    return n * _factorial(n - 1) if n else 1


def integer_gaps(page_tokens: int, pages: int, head_size: int) -> dict[str, Fraction]:
    """Return, by name, granted less needed slack; none may be negative.

    ``page_tokens`` are those of a page, ``pages`` those of one row, ``head_size`` the channels of a head.
    """
    d, blocks, p = head_size, -(-page_tokens // 16), min(pages, MOST_PAGES)
    most = (32767 * 255 * 128 + 16384) // 32768  # of |qw|
    ln2 = log(Fraction(2), _BITS)
    chord = -log(ln2.lo, _BITS).lo - 1 + ln2.hi  # most of ln(1 + f) - f ln 2
    cut = Fraction(1, 2**17)  # bits of 2^x near 2^30 are rounded to 128, and one is 2^-23
    granted = Fraction(102, 100) * (1 - _U) ** 3
    # on W: dots and factor 2 g_5, the offset g_8, fused sum 3 u of at most 3 W + C; on C: the sum and the offset.
    # With a score cap reference and log2 e come after the sum: 2 g_3 + g_5 + 15 u and g_(d+6) + 5 u, which is less.
    whole, centre = 2 * _gamma(5) + _gamma(8) + 9 * _gamma(1), _gamma(d + 9) + 3 * _gamma(1)
    needed = per_channel()
    return {
        "dot products fit in 31 bits": Fraction(2**31 - 1 - most * 255 * d),
        "sums of weighted queries are exact": Fraction(2**24 - most * d),
        "integers in place of the query": granted * (1 + 32 * _U) * (1 - _gamma(10)) - needed * (1 + whole),
        "integers in the stored error": granted - needed,
        "the width in float32": (1 + 32 * _U) * (1 - _gamma(10)) - 1,
        "the scores from integers": Fraction(101, 100) * (d + 32) * _U * (1 - _gamma(8)) - max(whole, centre),
        "queries taken for 0": 8 * _U - Fraction(1, 10**30) * d * 3 * 65504,
        "their unit is a normal number": Fraction(1, 10**30) / 32768 - _FLUSHED,
        "exp to 2 ulp": 4 * _U - exp_error(),
        "2^x from above": 132 * _U * (1 - _gamma(4)) - cut / (1 - cut),
        "2^x from above, for the lower end": Fraction(597, 10**4) - chord - cut,
        "a token too light": Fraction(199, 10**40)
        - max(exp(Fraction(-87), _BITS).hi, _FLUSHED * (1 + cut)) * (1 + 8 * _U),
        # sums over blocks and lanes, two exp, two products, one sum; the rest for the rounding of the slack itself
        "the sum over a page": (16 * blocks + 24) * _U * (1 - _gamma(4)) - _gamma(blocks + 4 + 4 + 4 + 4),
        "the reference": 8 * (1 - _gamma(4)) - 4 * (1 + _gamma(4)),
        "operands below 2^-126": Fraction(1, 10**36) - 17 * _FLUSHED,  # 16 = sqrt(256)
        "the norm of keys": Fraction(1, 10**5) - _gamma(-(-d // 16) + 6),
        "squares below 2^-126": Fraction(4, 10**18) ** 2 - d * _FLUSHED,
        "the sum of dropped pages, float32": (1 + (p + 64) * _U) * (1 - _gamma(4, _W)) * (1 - _U) ** (p // 16 + 5) - 1
        if p <= 2**12
        else (p + 64) * _U * (1 - _gamma(4, _W)) - (p // 16 + 6) * _U * (1 + (p + 64) * _U),
        "the sum of kept pages, float32": 1 - (1 - (p + 64) * _U) * (1 + _gamma(p // 16 + 6)) * (1 + _gamma(4, _W)),
        "what was kept, float64": Fraction(1, 10**9) - _gamma(16, _W),
        "masses near 1, float64": Fraction(2, 10**15) - Fraction(1, 10**15) - 6 * _W,
        "the budget, float64": Fraction(2, 10**9) * (1 - 8 * _W) - Fraction(1, 10**9) - 16 * _W,
    }
