"""Theorem `wrong-sign`: the opposite sign drives every start but the fixed point to a clamp.

With k < 0 an update moves u *away* from the temperature that meets the target, by min(rate, |k| phi(|e|)), and the
error e only grows on the way: u is monotone. The instance: two-level logits whose equilibrium is the middle of the
clamps, and a start half-way to each clamp. For k > 0 the claim is about the mirrored law, gain -k. Source: ours.
"""

from __future__ import annotations

from fractions import Fraction

from proofs.check import two_level
from proofs.check.base import Claim, Hints, Subject
from proofs.check.two_level import idle
from proofs.enclosures import Interval, shown

__all__ = ["claims"]

_THEOREM = "wrong-sign"


def claims(subject: Subject, hints: Hints) -> list[Claim]:
    """Decide `wrong-sign` with an instance of divergence on either side, each with its number of updates."""
    law, n = subject.law, subject.vocab_size
    if why := idle(subject, "feedback"):
        return [Claim(_THEOREM, "not applicable", why)]
    if law.gain == 0:
        return [Claim(_THEOREM, "not applicable", "gain 0 has no sign: u never moves")]
    target = Fraction(law.target_nats)
    tail = two_level.tail_mass(subject, hints, "tail_mass", target)
    y = two_level.gap(n, tail).lo if tail else Fraction(1)  # out of reach, both starts run to the same clamp
    low, high = Fraction(law.t_min), Fraction(law.t_max)
    middle = (low + high) / 2
    starts, told = [], []
    for start in ((low + middle) / 2, (middle + high) / 2):
        error = _error(n, y * middle / start, target)
        end = low if error.hi < 0 else high
        last = _error(n, y * middle / end, target)  # the largest on the way
        size, largest = (Interval(*sorted(map(abs, part))) for part in (error, last))
        if error.lo <= 0 <= error.hi or size.hi > largest.hi:
            return [Claim(_THEOREM, "unknown", "the clamps are too close together for an instance")]
        moved = Interval(two_level.push(law, size).lo, two_level.push(law, largest).hi)
        sure = two_level.felt(law, moved)
        if sure is None:
            return [Claim(_THEOREM, "unknown", two_level.lost(law, moved))]
        fewest, most = two_level.steps(start, end, sure)
        most += subject.config.engine.observation_lag
        starts.append(
            {"temperature": str(start), "ends_at": str(end), "at_least_updates": fewest, "at_most_updates": most}
        )
        told.append(f"from T = {shown(start)} it is at {shown(end)} for good within {two_level.count(most)}")
    numbers = {"gain": str(-abs(Fraction(law.gain))), "logit": str(y * middle), "starts": starts}
    whose = f"gain {law.gain!r} drives" if law.gain < 0 else f"the opposite sign, gain {-law.gain!r}, would drive"
    reason = (
        f"{whose} every start off the fixed point to a clamp; on logits (L, 0, ...), L = {shown(y * middle)}, "
        f"{' and '.join(told)} updates"
    )
    return [Claim(_THEOREM, "proved", reason, numbers)]


def _error(n: int, y: Fraction, target: Fraction) -> Interval:
    """Enclose H - H* at a tempered gap."""
    return Interval(*(end - target for end in two_level.entropy(n, y)))
