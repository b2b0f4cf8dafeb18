r"""The largest varentropy a distribution over n tokens can have, by interval branch and bound.

Theorem 1 of the proof book: the maximum over all distributions is attained by a two-level one, (1-r) on one token and r
spread evenly over the other n - 1. With the log-odds x = ln((1-r)/r) and c = ln(n-1),

    V_max(n) = max over x of f(x),   f(x) = (x + c)^2 / (4 cosh^2(x/2)).

Because f(-x) <= f(x) for x >= 0, only x >= 0 is searched. Balls where f' cannot vanish are discarded, the rest are
bisected; what remains encloses every maximiser, and f on it encloses V_max. Source: ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from flint import arb, ctx

from entropic_ctl.errors import BadInputError
from proofs.enclosures import Interval, from_arb, to_arb

__all__ = ["MAX_VOCAB", "VMax", "maximum", "two_level", "two_level_logit"]

MAX_VOCAB = 2**31 - 1
_BITS, _DEPTH, _REACH, _OPEN = 160, 64, 32, Fraction(1, 2**56)


@dataclass(frozen=True, slots=True)
class VMax:
    """Enclosure of V_max(n) and the two-level distribution that attains it.

    Parameters
    ----------
    n : int
        Vocabulary size.
    lower, upper : Fraction
        Rigorous bounds, nats squared; ``lower`` is attained by the distribution below.
    log_odds : tuple of Fraction
        An interval that contains every maximiser x = ln((1-r)/r) >= 0.
    tail_mass : float
        r: probability of the n - 1 equal tokens together.
    logit : float
        L = x + ln(n-1): softmax(L, 0, ..., 0) is the maximiser.
    entropy_nats : float
        Entropy of the maximiser: the target at which the bound is sharp.
    """

    n: int
    lower: Fraction
    upper: Fraction
    log_odds: tuple[Fraction, Fraction]
    tail_mass: float
    logit: float
    entropy_nats: float

    def bracket(self) -> Interval:
        """Return ``log_odds`` opened a little, so that the maximiser lies strictly inside."""
        return Interval(self.log_odds[0] - _OPEN, self.log_odds[1] + _OPEN)


def two_level(n: int, tail_mass: float) -> tuple[float, float]:
    """Return (entropy, varentropy) in nats of mass 1-r on one token and r spread over n - 1 (ordinary floats)."""
    r = tail_mass
    if r <= 0.0 or r >= 1.0:
        return (math.log(n - 1) if r >= 1.0 else 0.0), 0.0
    c = math.log(n - 1)
    entropy = -(1 - r) * math.log1p(-r) - r * math.log(r) + r * c
    return entropy, r * (1 - r) * (math.log1p(-r) - math.log(r) + c) ** 2


def two_level_logit(n: int, tail_mass: float) -> float:
    """Return L with softmax(L, 0, ..., 0) = (1-r, r/(n-1), ...)."""
    return math.log1p(-tail_mass) - math.log(tail_mass) + math.log(n - 1)


def _value(x: arb, c: arb) -> arb:
    """Evaluate f on a ball."""
    return ((x + c) / (2 * (x / 2).cosh())) ** 2


def _slope_sign(x: arb, c: arb) -> arb:
    """A ball with the sign of f' on x >= 0: f' = f (x+c)^-1 (2 - (x+c) tanh(x/2)), and f / (x+c) >= 0."""
    return 2 - (x + c) * (x / 2).tanh()


def maximum(n: int) -> VMax:
    """Enclose V_max(n) to about 18 digits.

    Parameters
    ----------
    n : int
        Vocabulary size, 2 <= n < 2^31.

    Raises
    ------
    BadInputError
        If n is out of range (one token has no varentropy and nothing to control).
    """
    if isinstance(n, bool) or not isinstance(n, int) or not 2 <= n <= MAX_VOCAB:
        raise BadInputError("not a vocabulary size", field="vocab_size", value=n, allowed=f"[2, {MAX_VOCAB}]")
    with ctx.workprec(_BITS):
        c = arb(n - 1).log()
        boxes = [(Fraction(0), Fraction(_REACH))]
        for _ in range(_DEPTH):
            halves = []
            for low, high in boxes:
                middle = (low + high) / 2
                for a, b in ((low, middle), (middle, high)):
                    if _slope_sign(to_arb(a).union(to_arb(b)), c).contains(0):
                        halves.append((a, b))
            boxes = halves
        # (x+c) tanh(x/2) increases, so f' < 0 at 32 means f' < 0 beyond; at 0 the sign term is 2: f rises from there.
        ends_ok = bool(_slope_sign(arb(0), c) > 0) and bool(_slope_sign(arb(_REACH), c) < 0)
        if not boxes or not ends_ok:
            raise ArithmeticError(f"branch and bound lost the maximum of f for n = {n}")
        low, high = min(a for a, _ in boxes), max(b for _, b in boxes)
        upper = max(from_arb(_value(to_arb(a).union(to_arb(b)), c)).hi for a, b in boxes)
        lower = max(from_arb(_value(to_arb(a), c)).lo for a, _ in boxes)
    x = float((low + high) / 2)
    r = 1 / (1 + math.exp(x))
    return VMax(n, lower, upper, (low, high), r, x + math.log(n - 1), two_level(n, r)[0])
