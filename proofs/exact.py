"""Exact decisions for small linear systems: no solver status, no tolerance, every number taken as the rational it is.

Floats are binary rationals and enter as such; NaN and infinities are refused. Source: textbook criteria (Schur,
Lyapunov, Sylvester), decided in ``fractions.Fraction``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from entropic_ctl.certificates import Verdict
from entropic_ctl.config import digest
from entropic_ctl.errors import BadInputError

__all__ = [
    "Number",
    "linear_scalar",
    "negative_definite",
    "positive_definite",
    "quadratic_lyapunov",
    "rational",
    "schur_stable",
]

Number = Fraction | float | int | str


def rational(value: Number, field: str) -> Fraction:
    """Return ``value`` as an exact rational.

    Raises
    ------
    BadInputError
        For NaN, an infinity, a boolean or a string that is no number.
    """
    if isinstance(value, bool) or not isinstance(value, Fraction | float | int | str):
        raise BadInputError("not a number", field=field, value=value, allowed="Fraction, int, float or decimal string")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadInputError("not finite", field=field, value=value, allowed="finite numbers")
    try:
        return Fraction(value)
    except (ValueError, ZeroDivisionError):
        raise BadInputError("not a number", field=field, value=value, allowed="such as '0.1' or '1/10'") from None


def linear_scalar(a: Number) -> Verdict:
    """Decide asymptotic stability of x+ = a x: proved exactly when |a| < 1, refuted otherwise (case P1)."""
    exact = rational(a, "a")
    stable = abs(exact) < 1
    return Verdict(
        status="proved" if stable else "refuted",
        theorem="scalar",
        subject=digest({"system": "x+ = a x", "a": str(exact)}),
        limit=1.0,
        reason=f"|a| = {float(abs(exact))!r} is {'below' if stable else 'not below'} 1, compared as exact rationals",
    )


def quadratic_lyapunov(a: Number, p: Number, offset: Number = 0) -> Verdict:
    """Check V(x) = p x^2 + offset as a Lyapunov function of x+ = a x (case P2).

    All three conditions are needed: V(0) = 0, V positive elsewhere, and V decreasing along the motion.
    A failed condition refutes the *candidate* only, so the verdict on the system is then ``unknown``.
    """
    a_, p_, c_ = rational(a, "a"), rational(p, "p"), rational(offset, "offset")
    failed = [
        text
        for bad, text in (
            (c_ != 0, f"V(0) = {c_} is not 0"),
            (p_ <= 0, f"p = {p_} is not positive: V is not positive definite"),
            (p_ * (a_ * a_ - 1) >= 0, "V does not decrease along x+ = a x"),
        )
        if bad
    ]
    return Verdict(
        status="unknown" if failed else "proved",
        theorem="quadratic-lyapunov",
        subject=digest({"system": "x+ = a x", "a": str(a_), "p": str(p_), "offset": str(c_)}),
        limit=math.nan,
        reason="; ".join(failed) or "V(0) = 0, V > 0 elsewhere and V decreases, in exact rationals",
    )


def positive_definite(matrix: Sequence[Sequence[Number]]) -> bool:
    """Decide positive definiteness of a symmetric matrix exactly, by elimination: every pivot must be positive.

    Raises
    ------
    BadInputError
        If the matrix is empty, not square, not symmetric, or holds a NaN or an infinity.
    """
    rows = [[rational(entry, f"matrix[{i}][{j}]") for j, entry in enumerate(row)] for i, row in enumerate(matrix)]
    n = len(rows)
    if n == 0 or any(len(row) != n for row in rows):
        raise BadInputError("not a square matrix", field="matrix", value=[len(row) for row in rows])
    if any(rows[i][j] != rows[j][i] for i in range(n) for j in range(i)):
        raise BadInputError("not symmetric", field="matrix", remedy="pass (A + A') / 2")
    for k in range(n):
        if rows[k][k] <= 0:
            return False
        for i in range(k + 1, n):
            factor = rows[i][k] / rows[k][k]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[k], strict=True)]
    return True


def negative_definite(matrix: Sequence[Sequence[Number]]) -> bool:
    """Decide negative definiteness exactly; see :func:`positive_definite`."""
    return positive_definite(
        [[-rational(entry, f"matrix[{i}][{j}]") for j, entry in enumerate(row)] for i, row in enumerate(matrix)]
    )


def schur_stable(coefficients: Sequence[Number]) -> bool:
    """Decide exactly whether every root of a_0 + a_1 z + ... + a_n z^n lies in |z| < 1 (a root on the circle: no).

    p is Schur stable iff |a_0| < |a_n| and (p - (a_0/a_n) p*) / z is, where p* has the coefficients in reverse order.

    Parameters
    ----------
    coefficients : sequence of numbers
        a_0, ..., a_n; the last one not 0.

    Raises
    ------
    BadInputError
        If there are none, the last one is 0, or one is not a finite number.

    References
    ----------
    Schur (1917), Cohn (1922), Jury (1964).
    """
    a = [rational(entry, f"coefficients[{i}]") for i, entry in enumerate(coefficients)]
    if not a or a[-1] == 0:
        raise BadInputError(
            "no leading coefficient", field="coefficients", value=list(coefficients), allowed="last one not 0"
        )
    while len(a) > 1:
        if abs(a[0]) >= abs(a[-1]):
            return False
        ratio = a[0] / a[-1]
        a = [x - ratio * y for x, y in zip(a[1:], reversed(a[:-1]), strict=True)]
    return True
