"""Theorems `small-gain`, `switching-theta` and `pairing`: temperature and budget act on each other through entropy.

Deviations x of u, w of the model entropy and y of theta from an equilibrium obey, with the shipped laws in their order,

    x+ = mu ((1 - k lambda V) x - k lambda rho y),   w = s x(t-1) + r y,   y+ = g w(t - delta),

mu, lambda in [0, 1] from clamps, rate limit and phi, V in [V_lo, V_max(n)], |rho|, |r|, |s| below their assumed
bounds, g in [-slope, 0], delta < widen_after: a budget that waits before it widens is the budget asked for at most
widen_after - 1 tokens ago. All of it may vary in time. Source: ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from proofs.check.base import Claim, Hints, Subject, decimal
from proofs.check.gain import SHAPES, bounds_of
from proofs.enclosures import exp, log, shown

__all__ = ["Coupling", "coupling", "least_share", "pairing", "small_gain", "switching_theta"]


@dataclass(frozen=True)
class Coupling:
    """Exact bounds on the coupled loop.

    Parameters
    ----------
    gain : Fraction
        k.
    share : Fraction
        Least lambda = (change of u without the clamps) / (-k e) for 0 < |e| <= error_nats, rounded down.
    v_min, v_max : Fraction
        V_lo, and an upper bound of V_max(n), nats squared.
    v_sure : Fraction
        A lower bound of the varentropy of two-level logits with entropy H*, an equilibrium of the target; 0 if none.
    rho, r, s : Fraction
        Assumed bounds of the effects.
    slope : Fraction
        Steepest fall of the budget over the model entropy.
    """

    gain: Fraction
    share: Fraction
    v_min: Fraction
    v_max: Fraction
    v_sure: Fraction
    rho: Fraction
    r: Fraction
    s: Fraction
    slope: Fraction

    def theta_to_u(self) -> Fraction | None:
        """Return sup k lambda rho / (1 - |1 - k lambda V|), rho / V_lo or k rho / (2 - k V_max); None if infinite."""
        if self.gain <= 0 or self.v_min == 0 or self.gain * self.v_max >= 2:
            return None
        return max(self.rho / self.v_min, self.gain * self.rho / (2 - self.gain * self.v_max))


def least_share(law: Any, error: Fraction) -> Fraction:
    """Bound phi(e)/e, rate limit included, below over 0 < e <= error: it falls with e, so the end decides."""
    share = Fraction(1)
    if law.phi == "tanh":  # tanh x = 1 - 2 / (e^2x + 1), increasing
        x = error / Fraction(law.phi_scale_nats)
        share = (1 - 2 / (exp(2 * min(x, Fraction(32))).lo + 1)) / x
    if law.rate_limit > 0 and law.gain > 0:
        share = min(share, Fraction(law.rate_limit) / (Fraction(law.gain) * error))
    return share


def _moves(subject: Subject) -> str:
    """Return the temperature law's name, ``fixed`` where clamps or greedy decoding hold the temperature."""
    law = subject.law
    return "fixed" if law.temperature == 0.0 or law.t_min == law.t_max else subject.config.loop.temperature.name


def uncovered(subject: Subject) -> str | None:
    """Return why no theorem about the coupled ``feedback`` loop covers this subject, or None."""
    lag, drafts = subject.config.engine.observation_lag, subject.config.speculation.draft_tokens
    if lag:
        return f"u sees entropies {lag} token late: the coupled model has no such delay"
    if drafts:
        return f"up to {drafts + 1} tokens a step are sampled under one temperature: not in the coupled model"
    return None if subject.law.phi in SHAPES else f"no theorem covers the error shape {subject.law.phi!r}"


def coupling(subject: Subject, hints: Hints) -> Coupling | None:
    """Return the bounds for a config with the ``feedback`` and ``budget`` laws; None without a bound on V_max(n)."""
    bounds = bounds_of(subject, hints)
    if bounds is None:
        return None
    law, assumed = subject.law, subject.assumptions
    rho, r, s, error, v_min = (
        Fraction(x) for x in (assumed.rho, assumed.r, assumed.s, assumed.error_nats, assumed.varentropy_min)
    )
    sure = Fraction(0) if bounds.here is None else bounds.here.lo
    share = least_share(law, error)
    return Coupling(Fraction(law.gain), share, v_min, bounds.v_max.hi, sure, rho, r, s, slope_of(subject))


def _too_steep(c: Coupling) -> str:
    """Say why k V_max(n) >= 2 decides nothing where the equilibria of this target are not that steep."""
    return (
        f"k V_max(n) = {shown(c.gain * c.v_max)} is not below 2, so the linear model at V_max(n) is unstable, but "
        f"no equilibrium of this target is known to have that varentropy (two-level logits: k V = "
        f"{shown(c.gain * c.v_sure)})"
    )


def slope_of(subject: Subject) -> Fraction:
    """Return the steepest fall of the wanted budget over the model entropies there are, those up to ln n.

    (wide - narrow) / (high - low); 0 where no entropy lies above ``low``: the wide budget is all that is asked for.
    """
    budget = subject.config.loop.pruning.config
    if Fraction(budget.entropy_low_nats) >= log(Fraction(subject.vocab_size)).hi:
        return Fraction(0)
    wide, narrow = Fraction(budget.theta_wide_nats), Fraction(budget.theta_nats)
    return (wide - narrow) / (Fraction(budget.entropy_high_nats) - Fraction(budget.entropy_low_nats))


def _stateless_gain(subject: Subject) -> Fraction | None:
    """Return the gain from theta to u of a law without integral action: f rho / V_lo (``solve``: f = 1), or 0."""
    name, assumed = _moves(subject), subject.assumptions
    if name == "fixed":
        return Fraction(0)
    if assumed.rho == 0.0:
        return Fraction(0)
    share = Fraction(1) if name == "solve" else Fraction(subject.law.fraction)
    return share * Fraction(assumed.rho) / Fraction(assumed.varentropy_min) if assumed.varentropy_min else None


def small_gain(subject: Subject, c: Coupling | None) -> Claim:
    """Decide whether every deviation dies out: (theta to u) s slope + slope r < 1, and the converse."""
    assumed, name, dwell = subject.assumptions, _moves(subject), subject.config.loop.pruning.config.widen_after
    s, slope = Fraction(assumed.s), slope_of(subject)
    own = slope * Fraction(assumed.r)  # theta on itself, through the model entropy
    if own >= 1:
        reason = f"theta alone feeds back to itself with gain {shown(own)}, not below 1: a deviation does not die out"
        return Claim("small-gain", "refuted", reason, {"theta_to_theta": str(own)})
    if name == "feedback":
        if (why := uncovered(subject)) is not None or c is None:
            return Claim("small-gain", "unknown", why or "no bound on the varentropy was given")
        if c.v_min > c.v_max:
            return Claim(
                "small-gain", "not applicable", "V_lo is above V_max(n): no distribution meets the assumptions"
            )
        if c.gain <= 0 or c.v_min == 0 or (c.gain * c.v_sure >= 2 and c.v_min <= c.v_sure):
            why = (
                f"the gain {subject.law.gain!r} does not pull u back"
                if c.gain <= 0
                else "V_lo = 0: at V = 0 u stays where it is"
                if c.v_min == 0
                else f"k V >= {shown(c.gain * c.v_sure, '.6g')} on two-level logits at H*: u alone does not settle"
            )
            return Claim("small-gain", "refuted", why)
        if c.gain * c.v_max >= 2:
            return Claim("small-gain", "unknown", _too_steep(c))
        first = c.theta_to_u()
    elif name in ("fixed", "solve", "damped"):
        first = _stateless_gain(subject)
    else:
        return Claim("small-gain", "unknown", f"no theorem covers the law {name!r}")
    room = 1 - own
    numbers = {
        "theta_to_u": None if first is None else decimal(first, up=True),
        "u_to_entropy": str(s),
        "entropy_to_theta": decimal(slope / room, up=True),
        "theta_to_theta": decimal(own, up=True),
        "loop": None if first is None else decimal(first * s * slope / room, up=True),
        "least_varentropy": decimal(Fraction(assumed.rho) * s * slope / room, up=True),
    }
    if first is not None and first * s * slope < room:
        reason = (
            f"theta to u {shown(first)}, u to entropy {shown(s)}, entropy to theta {shown(slope / room)}: "
            f"their product {shown(first * s * slope / room, '.3g')} is below 1, so every deviation dies out, also "
            f"while theta waits {dwell} tokens to widen"
        )
        return Claim("small-gain", "proved", reason, numbers)
    slow = c.rho / c.v_min if c is not None and name == "feedback" else first
    if s * slope > 0 and (slow is None or slow * s * slope >= room):
        reason = (
            "at V = V_lo the loop u, entropy, theta has a steady gain of at least 1: a deviation that narrows theta "
            "keeps itself up"
        )
        return Claim("small-gain", "refuted", reason, numbers)
    alternates = c is not None and c.v_min <= c.v_sure and c.gain * c.rho * s * slope >= (2 - c.gain * c.v_sure) * room
    if c is not None and alternates and dwell == 1:
        reason = f"at V = {shown(c.v_sure)}, that of two-level logits with entropy H*, u and theta alternate for ever"
        return Claim("small-gain", "refuted", reason, numbers)
    return Claim(
        "small-gain", "unknown", "the loop product is not below 1, yet no member is known to keep going", numbers
    )


def switching_theta(subject: Subject, c: Coupling | None) -> Claim:
    """Bound what a budget that moves in any way within its band does to u and to the tempered entropy."""
    theorem = "switching-theta"
    if (name := _moves(subject)) not in ("feedback", "fixed") and subject.integral_action:
        return Claim(theorem, "unknown", f"no theorem covers the law {name!r}")
    if name != "feedback":
        return Claim(theorem, "not applicable", f"the temperature law ({name}) keeps no state that theta could disturb")
    if (why := uncovered(subject)) is not None or c is None:
        return Claim(theorem, "unknown", why or "no bound on the varentropy was given")
    budget = subject.config.loop.pruning.config
    span = Fraction(budget.theta_wide_nats) - Fraction(budget.theta_nats)
    disturbance, first = c.rho * span, c.theta_to_u() if c.v_min <= c.v_max else None
    monotone = c.gain > 0 and c.gain * c.v_max <= 1
    numbers = {
        "span_nats": decimal(span, up=True),
        "entropy_bound_nats": decimal(disturbance, up=True) if monotone else None,
        "u_bound": None if first is None else decimal(first * span, up=True),
    }
    if c.gain <= 0 or (c.gain * c.v_sure > 2 and c.v_min <= c.v_sure):
        why = (
            "does not pull u back" if c.gain <= 0 else f"has k V >= {shown(c.gain * c.v_sure, '.6g')} > 2 at the target"
        )
        return Claim(theorem, "refuted", f"the gain {subject.law.gain!r} {why}: no bound holds", numbers)
    if monotone:
        reason = (
            f"k V_max(n) <= 1: on any frozen logits within reach |H(u) - H*| ends within {shown(disturbance)} "
            f"nats, however theta moves within its {shown(span)} nats"
        )
        return Claim(theorem, "proved", reason, numbers)
    if first is not None:
        reason = (
            f"for V >= {shown(c.v_min)}, u ends within {shown(first * span)} of its equilibrium, however theta "
            "moves within its band; k V_max(n) > 1, so nothing is said of smaller V"
        )
        return Claim(theorem, "proved", reason, numbers)
    why = "k V_max(n) is above 1, and no least varentropy V_lo <= V_max(n) helps"
    return Claim(theorem, "unknown", _too_steep(c) if c.gain * c.v_max >= 2 else why, numbers)


def _above(bound: Fraction) -> float:
    """Return the least float of four digits above ``bound`` > 0 (more, where four do not tell them apart)."""
    step = Fraction(10) ** (math.floor(math.log10(bound)) - 3)
    value = float((bound // step + 1) * step)
    return value if Fraction(value) > bound else math.nextafter(float(bound), math.inf)


def pairing(subject: Subject) -> Claim:
    """Decide whether the relative gain array pairs u with the tempered and theta with the model entropy.

    For effects of exactly the assumed size and any signs the relative gain of that pairing is 1 / (1 - kappa) with
    |kappa| = rho s / (V r), so it is above 1/2 and positive for all of them exactly if |kappa| < 1.
    """
    theorem = "pairing"
    if (name := _moves(subject)) == "fixed":
        return Claim(theorem, "not applicable", "the temperature never moves: one input is left")
    assumed = subject.assumptions
    rho, r, s, v_min = (Fraction(x) for x in (assumed.rho, assumed.r, assumed.s, assumed.varentropy_min))
    if r == 0 or v_min == 0:
        return Claim(theorem, "unknown", f"{name}: with r = 0 or V = 0 the plant has no relative gain array")
    critical, kappa = rho * s / r, rho * s / (r * v_min)
    numbers = {"critical_varentropy": decimal(critical, up=True), "kappa": decimal(kappa, up=True)}
    if kappa >= 1:
        reason = (
            f"below V = rho s / r = {shown(critical)} nats^2 the relative gain is negative or below 1/2: there "
            "theta moves the tempered entropy as surely as u does"
        )
        if Fraction(1, 10**300) < critical < 1000:  # what can be assumed
            reason += f"; proved from `--assume varentropy_min={_above(critical)!r}` on"
        return Claim(theorem, "unknown", reason, numbers)
    numbers |= {
        "relative_gain_low": decimal(1 / (1 + kappa), up=False),
        "relative_gain_high": decimal(1 / (1 - kappa), up=True),
    }
    reason = (
        f"relative gain in [{shown(1 / (1 + kappa))}, {shown(1 / (1 - kappa))}] for V >= {shown(v_min)}: u "
        "belongs to the tempered, theta to the model entropy"
    )
    return Claim(theorem, "proved", reason, numbers)
