"""Theorem `target`: the temperature that meets H* exists and is unique, and which logits meet it inside the clamps.

H increases strictly in T unless all finite logits are equal, from ln m (m tied maxima) to ln n' (n' finite logits). So
some T > 0 meets H* iff m < e^H* < n', and it is the only one. ``target-in-clamps`` is about two classes of logits:

- (L, 0, ..., 0): met inside [T_min, T_max] iff T_min y* <= L <= T_max y*, y* their tempered gap at entropy H*;
- any logits whose top token leads by at least T_min y* and has j - 1 tokens within
  R = T_max ln((j-1)/(e^H* - 1)) of it: then H(T_min) <= H* <= H(T_max), because H >= -ln p_max.

Source: ours.
"""

from __future__ import annotations

from fractions import Fraction

from proofs.check import two_level
from proofs.check.base import Claim, Hints, Subject, decimal, rounded
from proofs.enclosures import Interval, exp, log

__all__ = ["claims"]

_MET, _INSIDE = "target", "target-in-clamps"
_LAWS = ("feedback", "solve", "damped")


def claims(subject: Subject, hints: Hints) -> list[Claim]:
    """Decide `target` and `target-in-clamps` for this config's target, clamps and vocabulary."""
    n = subject.vocab_size
    if why := two_level.idle(subject, *_LAWS, pinned=False):
        return [Claim(_MET, "not applicable", why), Claim(_INSIDE, "not applicable", why)]
    target = Fraction(subject.law.target_nats)
    power = _power(target)
    ties = power.lo.numerator // power.lo.denominator
    if target == 0 or ties >= n:
        lies = (
            "H* = 0 is met by no logits of which two are finite"
            if target == 0
            else (f"H* = {float(target)!r} is above ln {n:,}: no logits of this vocabulary meet it")
        )
        return [Claim(_MET, "refuted", f"{lies} at any finite T > 0"), Claim(_INSIDE, "refuted", lies)]
    reason = (
        f"a T with H(T) = {float(target)!r} exists, and only one, exactly for logits with at most {ties:,} tied maxima "
        f"and at least {ties + 1:,} finite entries (e^H* = {float(power.lo):.6g}, n = {n:,})"
    )
    numbers = {"tied_maxima_at_most": ties, "finite_at_least": ties + 1}
    return [Claim(_MET, "proved", reason, numbers), _inside(subject, hints, target, power)]


def _power(target: Fraction) -> Interval:
    """Enclose e^H* between two neighbouring integers; it is none itself unless H* = 0 (Lindemann)."""
    bits = 128
    while True:
        found = exp(target, bits)
        if target == 0 or found.lo // 1 == found.hi // 1 >= 1:
            return found
        bits *= 2


def _inside(subject: Subject, hints: Hints, target: Fraction, power: Interval) -> Claim:
    n, low, high = subject.vocab_size, Fraction(subject.law.t_min), Fraction(subject.law.t_max)
    tail = two_level.tail_mass(subject, hints, "tail_mass", target)
    if tail is None:
        return Claim(_INSIDE, "unknown", "no evidence was given")
    y = two_level.gap(n, tail)
    least, most = low * y.hi, high * y.lo
    if least > most:
        return Claim(_INSIDE, "not applicable", "the clamps are equal, or as good as equal: T cannot meet a target")
    within = [
        (j, decimal(reach, up=False))
        for j in sorted({10, 100, 1000, n})
        if power.hi < j <= n
        and (reach := high * log((j - 1) / (power.hi - 1)).lo) >= least  # else none has both the lead and the company
    ]
    more = (
        f"; so do any whose top token leads by {rounded(least, up=True)} with {within[-1][0] - 1:,} others within "
        f"{rounded(Fraction(within[-1][1]), up=False)}"
        if within
        else ""
    )
    reason = (
        f"logits (L, 0, ...), L > 0, meet H* inside the clamps from L = {rounded(least, up=True)} to "
        f"{rounded(most, up=False)} and nowhere else{more}"
    )
    numbers = {
        "tempered_gap": [decimal(y.lo, up=False), decimal(y.hi, up=True)],
        "two_level_from": decimal(least, up=True),
        "two_level_to": decimal(most, up=False),
        "never_below": decimal(low * y.lo, up=False),
        "never_above": decimal(high * y.hi, up=True),
        "within_of_top": [list(pair) for pair in within],
    }
    return Claim(_INSIDE, "proved", reason, numbers)
