"""Theorem `top-k`: the interval contains the entropy of every distribution that agrees with the top k.

Given p_1 >= ... >= p_k over n tokens, the unseen mass e sits on m = n - k tokens of at most p_k each. Spread evenly it
has the most entropy, packed under the cap the least; both tails exist (or none does: e > m p_k), so both ends are
attained. Decided here for a config: two distributions with its *target* entropy, one light-tailed (geometric), one as
heavy-tailed as can be (two-level), that the interval of their top k contains their entropy, what a sum over the top k
without a tail term would miss of each, and that the float code's outward slack covers its rounding.
Source: ours; packing and spreading are Karamata's inequality.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from proofs.check.base import Claim, Hints, Subject, decimal, refuse
from proofs.check.gain import two_level_entropy
from proofs.enclosures import Interval, exp, log

__all__ = ["SLACK", "Top", "claims", "cut", "ends", "geometric", "rounding_error", "surprisal", "two_level"]

SIZES = (20, 256)
SLACK = Fraction(1, 2**44)
"""Outward slack of ``entropic_ctl.entropy_interval`` per unit of 1 + ln n (a test holds the two together)."""

_NEAR = Fraction(1, 1000)
_U = Fraction(1, 2**53)
_BITS = 64


class Top(NamedTuple):
    """What the top k say: an enclosure of -sum p ln p over them, the unseen mass, the cap p_k, unseen tokens m."""

    known: Interval
    tail: Fraction
    cap: Fraction
    unseen: int


@lru_cache(maxsize=64)
def surprisal(x: Fraction) -> Interval:
    """Enclose -x ln x for 0 <= x <= 1."""
    if x == 0:
        return Interval(x, x)
    found = log(x, _BITS)
    return Interval(-x * found.hi, -x * found.lo)


def _add(*terms: Interval) -> Interval:
    return Interval(sum((t.lo for t in terms), Fraction(0)), sum((t.hi for t in terms), Fraction(0)))


def _times(factor: Fraction | int, term: Interval) -> Interval:
    return Interval(factor * term.lo, factor * term.hi)


def ends(top: Top) -> tuple[Interval, Interval] | None:
    """Enclose the least and the largest entropy of a distribution that agrees, None if there is none.

    The least adds floor(e / p_k) tokens of p_k and one of the rest, the largest m tokens of e / m.
    """
    _, e, cap, m = top
    if e > m * cap:
        return None
    if e == 0:
        return top.known, top.known
    full, rest = divmod(e, cap)
    packed = _add(_times(full, surprisal(cap)), surprisal(rest))
    return _add(top.known, packed), _add(top.known, _times(m, surprisal(e / m)))


def geometric(ratio: Fraction, n: int, k: int) -> Top:
    """Return the top k of (1-r) r^i, r = ``ratio``.

    The known part is -(1-r^k) ln(1-r) - A ln r with A = sum of i (1-r) r^i below k; the tail r^k.
    """
    power = ratio**k
    mean = ratio * (1 - k * ratio ** (k - 1) + (k - 1) * power) / (1 - ratio)
    stay, go = log(1 - ratio, _BITS), log(ratio, _BITS)
    known = Interval(-(1 - power) * stay.hi - mean * go.hi, -(1 - power) * stay.lo - mean * go.lo)
    return Top(known, power, (1 - ratio) * ratio ** (k - 1), n - k)


def two_level(tail: Fraction, n: int, k: int) -> Top:
    """Return the top k of (1-r, r/(n-1), ...), r = ``tail``."""
    level = tail / (n - 1)
    known = _add(surprisal(1 - tail), _times(k - 1, surprisal(level)))
    return Top(known, (n - k) * level, level if k > 1 else 1 - tail, n - k)


def rounding_error(n: int, k: int) -> Fraction:
    """Bound, nats, on the rounding error of the float interval's ends from k probabilities at temperature 1.

    With D = ceil(log2 k) additions on the way of an entry and g_j = j u / (1 - j u), u = 2^-53: the point the code
    evaluates is within d = 5 g_(D+2) in total mass of the exact optimum, which moves the entropy by at most
    d ln(n / d); its evaluation (logarithms to 4 ulp) is off by at most g_(D+16) (1 + ln n).
    """
    depth = (k - 1).bit_length()
    moved = 5 * (depth + 2) * _U / (1 - (depth + 2) * _U)
    top = log(Fraction(n), _BITS).hi
    return moved * (top - log(moved, _BITS).lo) + (depth + 16) * _U / (1 - (depth + 16) * _U) * (1 + top)


def cut(ratio: Fraction, n: int, k: int) -> Interval | None:
    """Enclose the entropy of the geometric law of ``ratio`` r on n tokens, the last with all that is left, r^(n-1).

    What is left is distributed like the whole, so by grouping h = H (1 - r^(n-1)) with H that of the whole law. None
    where it disagrees with the top k: the last token must not be above the cap, r^(n-1) <= (1-r) r^(k-1).
    """
    go = log(ratio, _BITS)
    far = Fraction(-512)  # below it a power counts as at least 0 and at most e^-512
    if exp(max((n - k) * go.hi, far), _BITS).hi > 1 - ratio:
        return None
    left = exp(max((n - 1) * go.hi, far), _BITS).hi
    least = exp((n - 1) * go.lo, _BITS).lo if (n - 1) * go.lo > far else Fraction(0)
    whole = _add(surprisal(1 - ratio), surprisal(ratio))
    return Interval((1 - left) * whole.lo / (1 - ratio), (1 - least) * whole.hi / (1 - ratio))


def _instance(top: Top, k: int, witness: Interval | None) -> dict[str, Any]:
    """Decide one instance: the ends, whether the witness lies between them, and what a sum without a tail misses.

    ``witness`` encloses the entropy of a distribution over the n tokens that agrees; ``contained`` is False only if it
    surely lies outside, which would refute the theorem.
    """
    found = ends(top)
    if found is None:
        return {"k": k, "tail_mass_above": decimal(top.tail, up=False), "feasible": False}
    lower, upper = found
    return {
        "k": k,
        "tail_mass_above": decimal(top.tail, up=False),
        "feasible": True,
        "lower": decimal(lower.lo, up=False),
        "upper": decimal(upper.hi, up=True),
        "attained_below": decimal(lower.hi, up=True),
        "attained_above": decimal(upper.lo, up=False),
        "missed_without_tail": decimal(max(Fraction(0), lower.lo - top.known.hi), up=False),
        "witness": None if witness is None else decimal(witness.lo, up=False),
        "contained": None if witness is None else lower.lo <= witness.hi and witness.lo <= upper.hi,
    }


def _shapes(hints: Hints, n: int, target: Fraction) -> tuple[Fraction, Fraction] | None:
    """Verify the hint ``top_k``: ratio and tail mass of a geometric and a two-level law with the target's entropy."""
    found = hints.get("top_k")
    if found is None:
        return None
    if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(x, Fraction) for x in found):
        raise refuse("hints.top_k", "not a pair of rationals")
    ratio, tail = found
    if not 0 < ratio < 1 or not 0 < tail < Fraction(n - 1, n):
        raise refuse("hints.top_k", "outside (0, 1) or (0, (n-1)/n)", [str(ratio), str(tail)])
    whole = _add(surprisal(1 - ratio), surprisal(ratio))  # of the geometric law: this / (1 - r)
    for low, high in (_times(1 / (1 - ratio), whole), two_level_entropy(n, tail)):
        if not target - _NEAR <= low <= high <= target + _NEAR:
            raise refuse("hints.top_k", "not the target's entropy", [str(ratio), str(tail)])
    return ratio, tail


def claims(subject: Subject, hints: Hints) -> list[Claim]:
    """Decide `top-k` for distributions with the target's entropy, and the rounding of the float interval."""
    n, target = subject.vocab_size, getattr(subject.law, "target_nats", None)
    error, slack = rounding_error(n, n), SLACK * (1 + log(Fraction(n), _BITS).lo)
    status = "proved" if error < slack else "unknown"
    told = (
        f"from any number of top probabilities of {n:,} tokens the ends are off by at most {float(error):.2g} nats of "
        f"rounding, {'inside' if status == 'proved' else 'not inside'} the slack of {float(slack):.2g}"
    )
    granted = {
        "rounding_nats": decimal(error, up=True, digits=18),
        "slack_nats": decimal(slack, up=False, digits=18),
    }
    rounding = Claim("top-k-rounding", status, told, granted)
    if target is None:
        return [rounding, Claim("top-k", "not applicable", "the temperature law has no target to make examples of")]
    if target <= 0 or Fraction(target) >= log(Fraction(n), _BITS).lo:
        why = f"a target of {target!r} nats is at or beyond the ends of what {n:,} tokens can have"
        return [rounding, Claim("top-k", "not applicable", why)]
    shapes = _shapes(hints, n, Fraction(target))
    if shapes is None:
        return [rounding, Claim("top-k", "unknown", "no example was given")]
    sizes = sorted({min(k, n - 1) for k in SIZES})
    light = [_instance(geometric(shapes[0], n, k), k, cut(shapes[0], n, k)) for k in sizes]
    heavy = _instance(two_level(shapes[1], n, sizes[0]), sizes[0], two_level_entropy(n, shapes[1]))
    numbers = {"geometric": light, "two_level": heavy}
    if any(row["feasible"] and row["contained"] is False for row in (*light, heavy)):
        why = "the entropy of a distribution that agrees lies outside the interval: the theorem is false"
        return [rounding, Claim("top-k", "refuted", why, numbers)]
    missed = float(heavy["missed_without_tail"])
    interval = (
        f"[{float(light[0]['lower']):.6f}, {float(light[0]['upper']):.6f}] nats"
        if light[0]["feasible"]
        else "infeasible"
    )
    reason = (
        f"at the target of {target!r} nats the top {sizes[0]} of a geometric law leave {interval}, ends attained; of "
        f"two levels over {n:,} tokens a sum without tail term misses {missed:.4f} nats, the interval nothing"
    )
    return [rounding, Claim("top-k", "proved", reason, numbers)]
