"""Theorem `floor`: no premature collapse. How long tempered entropy can stay below h = H*/2 while logits change.

- ``feedback``, k > 0: a token with H < h raises u by at least s = min(rate, k phi(H* - h)). So of consecutive tokens
  below h all but the first ceil(ln(T_max/T_min)/s) + lag + drafts are sampled at T_max. Any other h: the same formula.
- ``solve``: H >= min(H*, H(T_max)) - tolerance at each token; ``damped``: H >= min(H*, H(T0)) - tolerance; both if the
  iteration has evaluations enough (theorem `solve`).
- The clamp makes it impossible: logits whose top token leads by T y or more, y the two-level gap with entropy h and T
  the highest temperature the law reaches, lie below h whatever the law does.

Source: ours.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from proofs.check import two_level
from proofs.check.base import Claim, Hints, Subject, decimal, rounded
from proofs.check.solver import effort
from proofs.enclosures import Interval, exp, log, shown

__all__ = ["claims"]

_THEOREM = "floor"


def claims(subject: Subject, hints: Hints) -> list[Claim]:
    """Decide `floor` for h = H*/2."""
    law = subject.law
    if why := two_level.idle(subject, "feedback", "solve", "damped"):
        return [Claim(_THEOREM, "not applicable", why)]
    target, n = Fraction(law.target_nats), subject.vocab_size
    floor = target / 2
    if target == 0:
        return [Claim(_THEOREM, "not applicable", "H* = 0: there is no floor below it")]
    tail = two_level.tail_mass(subject, hints, "floor_mass", floor)
    y = two_level.gap(n, tail) if tail else None
    numbers: dict[str, Any] = {"floor_nats": str(floor)}
    if subject.config.loop.temperature.name == "feedback":
        return [_feedback(subject, floor, y, numbers)]
    return [_same_step(subject, floor, y, numbers)]


def _feedback(subject: Subject, floor: Fraction, y: Interval | None, numbers: dict[str, Any]) -> Claim:
    law, h = subject.law, shown(floor)
    if law.gain <= 0:
        start = Fraction(law.temperature)
        if law.gain == 0 and law.temperature == law.t_max:
            return Claim(_THEOREM, "not applicable", "gain 0: T stays at T_max")
        if y is None:
            return Claim(_THEOREM, "unknown", "no evidence was given")
        numbers |= {"temperature": str(start), "logit": str(start * y.hi)}
        reason = (
            f"gain {law.gain!r} never raises T when entropy is low: frozen logits (L, 0, ...), "
            f"L = {rounded(start * y.hi, up=True)}, lie below {h} nats at T = {law.temperature:g} and for ever "
            "after"
        )
        return Claim(_THEOREM, "refuted", reason, numbers)
    moved = two_level.push(law, Interval(floor, floor))  # H* - h = h
    sure = two_level.felt(law, moved)
    if sure is None:
        return Claim(_THEOREM, "unknown", two_level.lost(law, moved), numbers)
    tokens = two_level.steps(Fraction(law.t_min), Fraction(law.t_max), sure)[1]
    tokens += subject.config.engine.observation_lag + subject.config.speculation.draft_tokens
    numbers |= {"push": decimal(moved.lo, up=False), "tokens": tokens, **_lost(y, Fraction(law.t_max))}
    reason = (
        f"whatever the logits, tempered entropy stays below {h} nats for at most {two_level.count(tokens)} tokens "
        f"in a row before T sits at T_max = {law.t_max:g}{_told(numbers)}"
    )
    return Claim(_THEOREM, "proved", reason, numbers)


def _same_step(subject: Subject, floor: Fraction, y: Interval | None, numbers: dict[str, Any]) -> Claim:
    law, n, tolerance = subject.law, subject.vocab_size, Fraction(subject.law.tolerance_nats)
    damped = subject.config.loop.temperature.name == "damped"
    what = f"min(H*, H({'T0' if damped else 'T_max'})) - {law.tolerance_nats:g} nats at each token"
    if floor < tolerance:  # H* - tolerance is below h = H*/2
        if damped or y is None or two_level.entropy(n, y.hi).lo <= 2 * floor - tolerance:
            return Claim(_THEOREM, "unknown", f"the tolerance is wide: entropy is at least {what}", numbers)
        start = Fraction(law.temperature)
        numbers |= {"temperature": str(start), "logit": str(start * y.hi)}
        reason = (
            f"the tolerance {law.tolerance_nats:g} accepts an entropy below {shown(floor)} nats at T0, as of "
            f"logits (L, 0, ...), L = {rounded(start * y.hi, up=True)}"
        )
        return Claim(_THEOREM, "refuted", reason, numbers)
    needed = effort(subject).evaluations
    if needed is None or needed > law.max_iterations:
        return Claim(_THEOREM, "unknown", "the iteration may end short of its tolerance (theorem `solve`)", numbers)
    base, highest = Fraction(law.temperature), Fraction(law.t_max)
    if damped:
        highest = min(highest, base * exp(Fraction(law.fraction) * log(highest / base).hi).hi)
    numbers |= _lost(y, highest)
    reason = f"tempered entropy is at least {what}{_told(numbers)}"
    return Claim(_THEOREM, "proved", reason, numbers)


def _lost(y: Interval | None, highest: Fraction) -> dict[str, str]:
    """Bound the lead of the top token from which no temperature up to ``highest`` lifts entropy above the floor."""
    return {} if y is None else {"lost_from_lead": decimal(highest * y.hi, up=True)}


def _told(numbers: dict[str, Any]) -> str:
    lead = numbers.get("lost_from_lead")
    if lead is None:
        return ""
    return f"; a top token that leads by {rounded(Fraction(lead), up=True)} keeps it below {_h(numbers)} anyway"


def _h(numbers: dict[str, Any]) -> str:
    return shown(Fraction(numbers["floor_nats"]))
