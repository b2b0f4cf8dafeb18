"""Theorem `delay`: how much further delay, and which smoothing, the *linear* loop u+ = u - k V u(t-d) survives.

It is stable iff 0 < k V < 2 sin(pi/(4d+2)); the checker needs no sine: it decides in exact arithmetic whether the
roots of z^d (z-1) + k V lie in the unit circle (Schur-Cohn), for the largest varentropy V an equilibrium can have. The
stable k V are an interval from 0, so smaller V are covered. An entropy filtered by an EMA of weight b: k V < 4/b - 2
(lag 0). With D drafted tokens a step that accepts them all updates D + 1 times on one u: k V (D + 1) < 2 at lag 0.
Linear means near an equilibrium; nothing is said about the nonlinear loop. Source: ours.
"""

from __future__ import annotations

from fractions import Fraction

from proofs.check.base import Claim, Hints, Subject, decimal, rounded
from proofs.check.gain import bounds_of
from proofs.check.two_level import idle
from proofs.enclosures import Interval
from proofs.exact import schur_stable

__all__ = ["claims"]

_THEOREM, _MOST = "delay", 12
_GRID = 2**72
"""Loop gains are rounded outward to this, which keeps the exact test short; finer than a float gain is from a limit."""


def claims(subject: Subject, hints: Hints) -> list[Claim]:
    """Decide `delay` for this config's gain, lag, drafts and target."""
    return [_decide(subject, hints)]


def _decide(subject: Subject, hints: Hints) -> Claim:
    if why := idle(subject, "feedback"):
        return Claim(_THEOREM, "not applicable", why)
    lag, drafts = subject.config.engine.observation_lag, subject.config.speculation.draft_tokens
    gain = Fraction(subject.law.gain) * (1 + drafts)
    if gain <= 0:
        return Claim(_THEOREM, "refuted", f"gain {subject.law.gain!r}: a root z >= 1 at every delay")
    bounds = bounds_of(subject, hints)
    if bounds is None:
        return Claim(_THEOREM, "unknown", "no evidence was given")
    if lag and drafts:
        return Claim(_THEOREM, "unknown", "no theorem covers a lag together with drafted tokens")
    here = bounds.here
    loop = _scaled(gain, here if here is not None and bounds.sharp else bounds.v_max)
    told = (
        f"k V {f'({drafts} + 1) ' if drafts else ''}<= {rounded(loop.hi, up=True)} at any equilibrium with this target"
    )
    weight = min(Fraction(1), 4 / (2 + loop.hi))
    numbers: dict[str, object] = {"loop_gain_at_most": decimal(loop.hi, up=True)}
    if lag == 0 and not drafts:
        numbers["ema_weight_below"] = decimal(weight, up=False)
    smooth = (
        f"; an EMA of weight below {rounded(weight, up=False)} keeps it stable" if weight < 1 and not drafts else ""
    )
    if not _stable(loop.hi, lag):
        one, surely = gain / (1 + drafts), subject.always_drafts
        if here is None or _stable(_scaled(gain if surely else one, here).lo, lag):
            return Claim(_THEOREM, "unknown", told, numbers)
        factor = f" times {drafts + 1} updates on one u" if surely else ""
        reason = (
            f"k V >= {rounded(one * here.lo, up=False)}{factor} at two-level logits with entropy H*: "
            f"the linear loop is unstable at delay {lag}"
        )
        return Claim(_THEOREM, "refuted", reason + (smooth if lag == 0 else ""), numbers)
    if drafts:
        return Claim(_THEOREM, "proved", f"{told}: stable even when every draft is accepted", numbers)
    most, anywhere = _most(loop.hi, lag), _most(_scaled(gain, bounds.v_max).hi, lag)
    first = None if here is None else _most(_scaled(gain, here).lo, lag) + 1  # two-level logits have at least this V
    first = None if first is None or first > lag + _MOST else first
    everywhere = None if anywhere < lag else anywhere
    numbers |= {"stable_to_delay": most, "unstable_from_delay": first, "stable_to_delay_every_target": everywhere}
    more = f"{'at least ' if most == lag + _MOST else ''}{most - lag}"
    instead = ", or an EMA of any weight instead of them" if lag == 0 else ""
    reason = f"{told}: the linear loop survives {more} further steps of delay{instead}"
    return Claim(_THEOREM, "proved", reason, numbers)


def _scaled(gain: Fraction, v: Interval) -> Interval:
    """Return gain * v, rounded outward."""
    return Interval(Fraction(gain * v.lo * _GRID // 1, _GRID), Fraction(-(-gain * v.hi * _GRID // 1), _GRID))


def _stable(loop_gain: Fraction, delay: int) -> bool:
    """Decide whether every root of z^d (z-1) + g lies in the unit circle."""
    if delay == 0:
        return schur_stable([loop_gain - 1, 1])
    return schur_stable([loop_gain, *[0] * (delay - 1), -1, 1])


def _most(loop_gain: Fraction, lag: int) -> int:
    """Return the largest stable delay from ``lag`` on, at most 12 more; lag - 1 if there is none."""
    delay = lag
    while delay <= lag + _MOST and _stable(loop_gain, delay):
        delay += 1
    return delay - 1
