"""Two-level logits (L, 0, ..., 0) over n tokens, the extremal case of several theorems, in exact rationals.

At temperature T they are (1-r, r/(n-1), ...) with *tempered gap* y = L/T = ln((1-r)(n-1)/r). Entropy falls in y > 0
from ln n to 0. Of all logits over n tokens whose top token leads by at least L, they have the largest entropy at
every T: the tail mass is at most theirs, and at a given tail mass the even spread has the largest entropy.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from proofs.check.base import Hints, Subject
from proofs.check.gain import at_target
from proofs.enclosures import Interval, exp, log, shown

__all__ = ["count", "entropy", "felt", "gap", "idle", "lost", "push", "steps", "tail_mass"]

_FLAT = 40  # tanh(40) = 1 to 34 digits
_FAR = 4000  # within the range of exp


def tail_mass(subject: Subject, hints: Hints, name: str, target: Fraction) -> Interval | None:
    """Return the hinted tail masses, verified to contain the one with a given entropy; None if there is no hint.

    Parameters
    ----------
    subject : Subject
    hints : Hints
    name : str
        Of the hint, an interval of tail masses.
    target : Fraction
        The entropy, nats.

    Raises
    ------
    BadInputError
        If the interval does not contain it.
    """
    found = hints.interval(name)
    if found is not None:
        at_target(subject.vocab_size, target, found, name)
    return found


def gap(n: int, tail: Interval) -> Interval:
    """Enclose the tempered gap y = ln((1-r)(n-1)/r), which falls in r, for r in ``tail``."""
    low, high = (log((1 - r) * (n - 1) / r) for r in (tail.hi, tail.lo))
    return Interval(low.lo, high.hi)


def entropy(n: int, y: Fraction) -> Interval:
    """Enclose ln(1+w) + y w/(1+w), w = (n-1) e^-y, the entropy at the tempered gap y >= 0; it increases in w."""
    if y > _FAR:
        return Interval(Fraction(0), entropy(n, Fraction(_FAR)).hi)
    low, high = ((n - 1) * part for part in exp(-y))
    return Interval(log(1 + low).lo + y * low / (1 + low), log(1 + high).hi + y * high / (1 + high))


def push(law: Any, error: Interval) -> Interval:
    """Enclose how far one update of ``feedback`` moves u: min(rate, |k| phi(e)) for some e in ``error``, e >= 0."""
    scale, ends = Fraction(law.phi_scale_nats), []
    for e, up in zip(error, (False, True), strict=True):
        x = e / scale
        if law.phi == "tanh":  # x - x^3/3 <= tanh x <= min(x, 1)
            power = exp(2 * min(x, Fraction(_FLAT)))
            bent = 1 - 2 / ((power.hi if up else power.lo) + 1)
            x = min(x, Fraction(1), bent if x < _FLAT else Fraction(1)) if up else max(x - x**3 / 3, bent)
        ends.append(abs(Fraction(law.gain)) * scale * x)
    if law.rate_limit > 0:
        ends = [min(end, Fraction(law.rate_limit)) for end in ends]
    return Interval(ends[0], ends[1])


def felt(law: Any, moved: Interval) -> Interval | None:
    """Widen lengths by half a spacing of float64 u between the clamps; None if the least is below one spacing.

    A smaller push may be lost: u + push rounds to u, and u stays where it is for ever.
    """
    spacing = _spacing(law)
    return None if moved.lo < spacing else Interval(moved.lo - spacing / 2, moved.hi + spacing / 2)


def lost(law: Any, moved: Interval) -> str:
    """Say so for people."""
    return (
        f"an update may move u by {shown(moved.lo, '.2g')} only, below the spacing {shown(_spacing(law), '.2g')} of "
        "float64 near the clamps, and be lost: raise the gain (or rate_limit)"
    )


def _spacing(law: Any) -> Fraction:
    """Return the largest distance of neighbouring float64 numbers between the clamps of u = ln T."""
    largest = max(max(abs(end) for end in log(Fraction(clamp))) for clamp in (law.t_min, law.t_max))
    exponent = largest.numerator.bit_length() - largest.denominator.bit_length()
    if largest < Fraction(2) ** exponent:
        exponent -= 1
    return Fraction(2) ** (exponent - 52)


def steps(start: Fraction, end: Fraction, moved: Interval) -> tuple[int, int]:
    """Bound the updates that take T from ``start`` to ``end`` if each moves u towards it by a length in ``moved``."""
    distance = log(max(start, end) / min(start, end))
    return -(-max(distance.lo, Fraction(0)) // moved.hi), -(-distance.hi // moved.lo)


def idle(subject: Subject, *laws: str, pinned: bool = True) -> str:
    """Return why a theorem about some temperature laws says nothing about this config, or an empty string.

    Parameters
    ----------
    subject : Subject
    *laws : str
        Names of the laws it is about.
    pinned : bool
        Equal clamps are a reason.
    """
    name, law = subject.config.loop.temperature.name, subject.law
    if name not in laws:
        return f"the temperature law is {name!r}, the theorem is about {', '.join(laws)}"
    if law.temperature == 0:
        return "temperature 0: requests are greedy and the law is never run"
    return "both clamps are equal: the temperature never moves" if pinned and law.t_min == law.t_max else ""


def count(number: int) -> str:
    """Return a number of steps for people: exact up to a million, else its power of ten."""
    return f"{number:,}" if number < 10**6 else f"10^{len(str(number))}"
