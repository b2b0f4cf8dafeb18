"""Theorems `bounded`, `incremental` and `variance`: what can be said while logits change."""

from __future__ import annotations

from fractions import Fraction
from math import isqrt
from typing import Any

from proofs.check import variance
from proofs.check.base import Claim, Hints, Subject, decimal, rounded
from proofs.check.gain import SHAPES, Bounds, bounds_of, loop_limit, varentropy_ceiling
from proofs.enclosures import Interval, exp, log

__all__ = ["claims", "tanh_bounds"]


def tanh_bounds(x: Fraction) -> Interval:
    """Enclose tanh x = 1 - 2 / (e^2x + 1) for x >= 0."""
    if x > 100:
        return Interval(1 - Fraction(1, 2**200), Fraction(1))
    grown = exp(2 * x)
    return Interval(1 - 2 / (grown.lo + 1), 1 - 2 / (grown.hi + 1))


class _Loop:
    """The numbers of one feedback loop that both theorems need, as exact bounds."""

    def __init__(self, subject: Subject, bounds: Bounds | None) -> None:
        law, n = subject.law, subject.vocab_size
        self.updates = subject.config.speculation.draft_tokens + 1  # of one step, all from one temperature
        self.lag = subject.config.engine.observation_lag
        self.gain, self.rate = Fraction(law.gain), Fraction(law.rate_limit)
        self.scale = None if law.phi == "linear" else Fraction(law.phi_scale_nats)
        self.v_max = varentropy_ceiling(n) if bounds is None else bounds.v_max.hi
        self.v_here = Fraction(0) if bounds is None or bounds.here is None else bounds.here.lo
        target, most = Fraction(law.target_nats), log(Fraction(n))
        self.error = max(target, most.hi - target)  # 0 <= H <= ln n
        self.least_error = max(log(Fraction(2)).hi, target - most.lo)  # some ln m, m <= n, is this near to H*
        self.width = Interval(
            log(Fraction(law.t_max)).lo - log(Fraction(law.t_min)).hi,
            log(Fraction(law.t_max)).hi - log(Fraction(law.t_min)).lo,
        )

    def push(self, error: Fraction) -> Fraction:
        """Bound |k phi(e)| for |e| <= error."""
        phi = error if self.scale is None else self.scale * tanh_bounds(error / self.scale).hi
        return abs(self.gain) * min(phi, error)

    def slope(self, error: Fraction) -> Fraction:
        """Bound phi' from below for |e| <= error: 1, or 1 - tanh^2."""
        return Fraction(1) if self.scale is None else 1 - tanh_bounds(error / self.scale).hi ** 2

    def cut(self, step: Fraction) -> Fraction:
        """Cut a step at the rate limit (0 is none)."""
        return min(step, self.rate) if self.rate else step

    @property
    def swing(self) -> Fraction:
        """Bound how far beyond each other two copies can throw one another, as a share of their distance."""
        most = abs(self.gain) * self.v_max
        if self.lag == 0:  # the last two: without a clamp, and with both at one clamp in the middle of a step
            return max(self.updates * most - 1, (self.updates - 1) * most)
        return most if self.updates == 1 else Fraction(2)

    @property
    def apart(self) -> str:
        """Whether two copies fed the same logits are never further apart than at the start."""
        if self.gain >= 0 and (self.swing <= 1 if self.lag == 0 else self.swing < 1):
            return "proved"
        if self.v_here > 0 and (self.gain < 0 or self.gain * self.v_here > loop_limit(self.lag)):
            return "refuted"
        return "unknown"


def claims(subject: Subject, hints: Hints) -> list[Claim]:
    """Decide `bounded`, `incremental` and `variance`."""
    law, name = subject.law, subject.config.loop.temperature.name
    bounds = bounds_of(subject, hints) if name == "feedback" else None
    last = variance.claim(subject, bounds)
    if name != "feedback" or law.t_min == law.t_max:
        if name != "feedback" and subject.integral_action:
            what = f"no theorem covers the law {name!r}"
            return [Claim("bounded", "unknown", what), Claim("incremental", "unknown", what), last]
        what = f"the law {name!r} carries no state" if name != "feedback" else "both clamps are equal: u never moves"
        return [Claim("bounded", "not applicable", what), Claim("incremental", "not applicable", what), last]
    if law.phi not in SHAPES:
        what = f"no theorem covers the error shape {law.phi!r}"
        return [Claim("bounded", "unknown", what), Claim("incremental", "unknown", what), last]
    loop = _Loop(subject, bounds)
    return [_bounded(subject, loop), _incremental(subject, loop), last]


def _bounded(subject: Subject, loop: _Loop) -> Claim:
    law = subject.law
    step = min(loop.cut(loop.push(loop.error)), loop.width.hi)
    numbers = {
        "step": decimal(step, up=True),
        "error_nats": decimal(loop.error, up=True),
        "width": decimal(loop.width.hi, up=True),
        "never_beyond_start": loop.apart,
    }
    copies = {
        "proved": "are never further apart than at the start" if loop.lag else "never move apart",
        "refuted": "can end up further apart than at the start",
        "unknown": "may end up further apart than at the start: not decided",
    }[loop.apart]
    reason = (
        f"whatever the logits, T stays in [{law.t_min!r}, {law.t_max!r}] and ln T moves by at most "
        f"{rounded(step, up=True)} per accepted token; two temperatures fed the same logits {copies}"
    )
    return Claim("bounded", "proved", reason, numbers)


def _incremental(subject: Subject, loop: _Loop) -> Claim:
    given, k, limit = subject.assumptions, loop.gain, loop_limit(loop.lag)
    v_lo, theorem = Fraction(given.varentropy_min), "incremental"
    error = loop.error
    assumed = ""
    if (loop.scale is not None or 0 < loop.rate < loop.push(error)) and Fraction(given.error_nats) < error:
        error, assumed = Fraction(given.error_nats), f" and |H - H*| <= {given.error_nats!r} nats"
    numbers: dict[str, Any] = {"varentropy_min": str(v_lo), "error_nats": decimal(error, up=True)}
    if k <= 0:
        does = "moves two temperatures apart until a clamp stops them" if k < 0 else "leaves every distance as it is"
        return Claim(theorem, "refuted", f"gain {subject.law.gain!r} {does}: no such rate", numbers)
    if loop.apart == "refuted" and v_lo <= loop.v_here:
        at = f"k V >= {rounded(k * loop.v_here, up=False)} > {limit} on two-level logits with the target's entropy"
        return Claim(theorem, "refuted", f"{at}: temperatures near their equilibrium move apart", numbers)
    if loop.swing >= 1:
        many = f" with {loop.updates} updates a step" if loop.updates > 1 else ""
        why = f"k V_max, up to {rounded(k * loop.v_max, up=True)}, is not small enough at lag {loop.lag}{many}"
        return Claim(theorem, "unknown", why, numbers)
    if v_lo > loop.v_max:
        return Claim(theorem, "unknown", f"no distribution has a varentropy of {given.varentropy_min!r}", numbers)
    if v_lo == 0:
        alike = loop.updates * loop.cut(loop.push(loop.least_error)) < loop.width.lo
        why = "equal finite logits have V = 0 and move two temperatures by the same step: no rate holds for every token"
        return Claim(theorem, "refuted" if alike else "unknown", why, numbers)
    slope = loop.slope(error)
    numbers["slope"] = decimal(slope, up=False)
    if loop.rate and loop.push(error) > loop.rate:
        numbers["error_unlimited_nats"] = decimal(loop.rate / k, up=False)
        why = (
            f"at errors above {rounded(loop.rate / k, up=True)} nats the rate limit moves both temperatures by the "
            "same step, so no rate holds for every token"
        )
        return Claim(theorem, "unknown", why, numbers)
    least = k * slope * v_lo
    if least < Fraction(1, 10**12):
        return Claim(theorem, "unknown", f"phi is flat at errors of {rounded(error, up=False)} nats", numbers)
    q = max(1 - least, loop.swing if loop.lag == 0 else _fourth_root(loop.swing))
    fade = -log(q).hi
    if fade <= 0:
        return Claim(theorem, "unknown", "q is too near to 1 for a rate: k V_max is at its limit", numbers)
    halve = -(-log(Fraction(2)).hi // fade) + 2 * loop.lag
    numbers |= {"q": decimal(q, up=True), "time_constant": decimal(1 / fade, up=True, digits=6), "halve": int(halve)}
    unit = "token" if loop.updates == 1 else "step"
    reason = (
        f"if V >= {given.varentropy_min!r} between the temperatures{assumed}, two copies fed the same logits come "
        f"together by q = {rounded(q, up=True)} per {unit}: time constant {rounded(1 / fade, up=True)} {unit}s, half "
        f"the distance in {int(halve)}"
    )
    return Claim(theorem, "proved", reason, numbers)


def _fourth_root(x: Fraction) -> Fraction:
    """Bound the fourth root of 0 <= x < 1 from above, below 1 wherever x < 1 - 10^-14."""
    scaled = -(-x.numerator * 10**64 // x.denominator)
    return Fraction(isqrt(isqrt(scaled) + 1) + 1, 10**16)
