"""Theorems `v-max` and `gain`: for which gains the temperature loop settles, whatever the logits.

- ``gain-lag-0``: 0 < k V_max(n) < 2, for *every* logit vector and target: two temperatures never move apart;
- ``gain-at-target``: 0 < k V_max(n; H*) < 2 at lag 0: on frozen logits every start settles (no uniform contraction);
- ``gain-lag-1``: 0 < k V_max(n) < 1, when each update may see the entropy of the token before;
- ``gain-drafts``: a step that verifies d drafted tokens makes up to d + 1 updates from one state: 0 < k V_max(n) <
  2 / (d + 1) at lag 0 (V_max(n; H*) will do), 2 / (d + 2) at lag 1;
- ``stateless``: the law feeds back no past error; ``pinned``: both clamps are equal, u never moves.

V_max(n; H*) is the largest varentropy of a distribution with entropy H*. Where :func:`is_sharp` (H* < ln 2 + ln(n-1)/2,
and well beyond) that is the two-level one, which exists, so there the bound is sharp. Source: ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from proofs.check.base import Claim, Hints, Subject, decimal, refuse, rounded
from proofs.enclosures import Interval, exp, log

__all__ = [
    "LAGS",
    "Bounds",
    "at_target",
    "bounds_of",
    "claims",
    "decide",
    "gain_ceiling",
    "is_sharp",
    "loop_limit",
    "v_max_bounds",
]

SHAPES = ("linear", "tanh")
"""Error shapes phi the theorems cover: odd, non-decreasing, slope in (0, 1], slope 1 at 0."""

LAGS = (0, 1)
"""Observation lags, in tokens, the theorems cover."""

_WIDTH = Fraction(1, 2**40)


def loop_limit(lag: int, draft_tokens: int = 0) -> Fraction:
    """Return the supremum of k V_max(n) proved to settle: 2 and 1 at lags 0 and 1, less where tokens are drafted.

    Parameters
    ----------
    lag : int
        Observation lag, 0 or 1 tokens.
    draft_tokens : int
        d: a step makes 1 to d + 1 updates.
    """
    return Fraction(2, draft_tokens + 1 + lag)


def v_max_bounds(n: int, log_odds: Interval) -> Interval:
    """Verify that ``log_odds`` brackets the maximiser and return bounds on V_max(n), nats squared.

    g(x) = (x + c) tanh(x/2), c = ln(n-1), increases on x > 0; at g = 2 the derivative of
    f(x) = (x + c)^2 / (4 cosh^2(x/2)) vanishes and f = (x + c)^2/4 - 1. So g(a) < 2 < g(b) puts V_max between
    (a + c)^2/4 - 1 and (b + c)^2/4 - 1.

    Raises
    ------
    BadInputError
        If the interval is too wide (over 2^-40) or does not bracket the maximiser.
    """
    a, b = log_odds
    if not 0 < a < b or b - a > _WIDTH or b > 64:
        raise refuse("hints.log_odds", "not a narrow interval of positive numbers", [str(a), str(b)])
    c = log(Fraction(n - 1))
    # tanh(x/2) = 1 - 2 / (e^x + 1), increasing in e^x
    if not (a + c.hi) * (1 - 2 / (exp(a).hi + 1)) < 2 < (b + c.lo) * (1 - 2 / (exp(b).lo + 1)):
        raise refuse("hints.log_odds", "does not bracket the maximiser of varentropy", [str(a), str(b)])
    return Interval((a + c.lo) ** 2 / 4 - 1, (b + c.hi) ** 2 / 4 - 1)


def varentropy_ceiling(n: int) -> Fraction:
    """Return ln^2(n-1)/4 + 1, which no varentropy over n tokens exceeds, without a hint (proof book, section 2)."""
    return log(Fraction(n - 1)).hi ** 2 / 4 + 1


def two_level_entropy(n: int, r: Fraction) -> Interval:
    """Enclose the entropy of (1-r, r/(n-1), ...): -(1-r) ln(1-r) - r ln r + r ln(n-1), 0 < r < 1."""
    stay, leave, c = log(1 - r), log(r), log(Fraction(n - 1))
    return Interval(
        -(1 - r) * stay.hi - r * leave.hi + r * c.lo,
        -(1 - r) * stay.lo - r * leave.lo + r * c.hi,
    )


def at_target(n: int, target: Fraction, tail_mass: Interval, name: str = "tail_mass") -> Interval:
    """Verify that some r in ``tail_mass`` has entropy ``target``; enclose r (1-r) ln^2((1-r)(n-1)/r), its varentropy.

    Entropy increases in r, so lying below the target at one end and above at the other is enough. On r < 1/2 the
    logarithm falls and r (1-r) rises with r; elsewhere r (1-r) is bounded by its ends and 1/4. ``name`` is the hint's.

    Raises
    ------
    BadInputError
        If the interval is outside (0, (n-1)/n) or does not bracket the target.
    """
    low, high = tail_mass
    if not 0 < low < high < Fraction(n - 1, n):
        raise refuse(f"hints.{name}", "not an interval inside (0, (n-1)/n)", [str(low), str(high)])
    if not two_level_entropy(n, low).hi < target < two_level_entropy(n, high).lo:
        raise refuse(f"hints.{name}", "does not bracket the target entropy", [str(low), str(high)])
    ends = low * (1 - low), high * (1 - high)
    most = max(ends) if high <= Fraction(1, 2) or low >= Fraction(1, 2) else Fraction(1, 4)
    least = max(Fraction(0), log((1 - high) * (n - 1) / high).lo)
    return Interval(min(ends) * least**2, most * log((1 - low) * (n - 1) / low).hi ** 2)


def is_sharp(n: int, target: Fraction, tail_mass: Interval, here: Interval) -> bool:
    """Decide whether the two-level distribution with entropy ``target`` has the largest varentropy of all with it.

    With x* its log-odds, y = x* + c and g = y tanh(x*/2), the tangent V <= V* + lam (H - H*), lam = g - 2, holds if
    and only if the uniform distribution lies below it, V* + lam (ln n - H*) >= 0 (proof book, section 3); it does if
    x* > 0. In the tail mass r, tanh(x*/2) = 1 - 2 r.

    Parameters
    ----------
    n : int
    target : Fraction
        H*, nats.
    tail_mass, here : Interval
        Of that distribution, and of its varentropy, as verified by :func:`at_target`.
    """
    low, high = tail_mass
    if high < Fraction(1, 2):
        return True
    most = log((1 - low) * (n - 1) / low).hi  # of y, which falls in r
    lam = (1 - 2 * high) * most - 2  # the least: 1 - 2 r falls to below 0
    return here.lo + lam * (log(Fraction(n)).hi - target) >= 0


def _float_below(bound: Fraction) -> float:
    """The largest float strictly below ``bound``."""
    value = float(bound)
    return value if Fraction(value) < bound else math.nextafter(value, -math.inf)


def gain_ceiling(n: int, lag: int, log_odds: Interval) -> float:
    """Return the largest float gain certified for every logit vector and target: below 2/V_max (lag 0), 1/V_max (1).

    Parameters
    ----------
    n : int
        Vocabulary size.
    lag : int
        Observation lag, 0 or 1.
    log_odds : Interval
        Bracket of the maximiser, from the search; verified here.
    """
    return _float_below(loop_limit(lag) / v_max_bounds(n, log_odds).hi)


@dataclass(frozen=True)
class Bounds:
    """Verified enclosures for one subject with the ``feedback`` law.

    Parameters
    ----------
    v_max : Interval
        Of V_max(n).
    here : Interval or None
        Of the varentropy of the two-level distribution with the target's entropy.
    sharp : bool
        That varentropy is V_max(n; H*).
    """

    v_max: Interval
    here: Interval | None
    sharp: bool


def bounds_of(subject: Subject, hints: Hints) -> Bounds | None:
    """Verify the hints ``log_odds`` and ``tail_mass``; None without the first."""
    n = subject.vocab_size
    log_odds, tail = hints.interval("log_odds"), hints.interval("tail_mass")
    if log_odds is None:
        return None
    target = Fraction(subject.law.target_nats)
    here = None if tail is None else at_target(n, target, tail)
    sharp = tail is not None and here is not None and is_sharp(n, target, tail, here)
    return Bounds(v_max_bounds(n, log_odds), here, sharp)


def _cost(gain: Fraction, bounds: Bounds, lag: int, drafts: int) -> str:
    """Say what a gain within 10% of the limit costs: white entropy at V* varies 2 / (2 - g) times as much (lag 0)."""
    if lag or drafts or bounds.here is None:
        return ""
    g = gain * bounds.here.hi
    if not Fraction(9, 5) <= g < 2:
        return ""
    factor, v = rounded(2 / (2 - g), up=True, figures=3), rounded(bounds.here.hi, up=True)
    return f"; near the limit white entropy varies up to {factor} times as much (V <= {v})"


def claims(subject: Subject, hints: Hints) -> list[Claim]:
    """Decide `v-max` and `gain`."""
    if subject.config.loop.temperature.name != "feedback":
        return [decide(subject, None)]
    bounds = bounds_of(subject, hints)
    gain = decide(subject, bounds)
    if bounds is None:
        return [gain]
    low, high = bounds.v_max
    numbers = {"lower": decimal(low, up=False), "upper": decimal(high, up=True)}
    reason = (
        f"no distribution over {subject.vocab_size:,} tokens has a varentropy above {rounded(high, up=True)} nats^2"
    )
    return [Claim("v-max", "proved", reason, numbers), gain]


def decide(subject: Subject, bounds: Bounds | None) -> Claim:
    """Decide whether the temperature loop settles; with poor evidence this is ``unknown``, never a wrong answer.

    Parameters
    ----------
    subject : Subject
    bounds : Bounds or None
        Needed for ``feedback`` loops only.
    """
    config, n = subject.config, subject.vocab_size
    law, lag, drafts = config.loop.temperature, config.engine.observation_lag, config.speculation.draft_tokens
    if not subject.integral_action:
        return Claim("stateless", "proved", f"{law.name!r} feeds back no past error, so there is nothing to certify")
    theorem, parameters = "gain-drafts" if drafts else f"gain-lag-{lag}", law.config
    if law.name != "feedback":
        return Claim(theorem, "unknown", f"no theorem covers the law {law.name!r}")
    if lag not in LAGS:
        return Claim(theorem, "unknown", f"no theorem covers an observation lag of {lag}")
    if parameters.t_min == parameters.t_max:
        return Claim("pinned", "proved", "both clamps are equal: the temperature never moves")
    if parameters.phi not in SHAPES:
        return Claim(theorem, "unknown", f"no theorem covers the error shape {parameters.phi!r}")
    if bounds is None:
        return Claim(theorem, "unknown", "no evidence was given")
    gain, limit, here = Fraction(parameters.gain), loop_limit(lag, drafts), bounds.here
    anywhere = _float_below(limit / bounds.v_max.hi)
    local = _float_below(limit / here.hi) if here is not None and here.hi > 0 and bounds.sharp and lag == 0 else None
    numbers = {
        "gain": str(gain),
        "loop_limit": str(limit),
        "limit_every_target": anywhere,
        "limit_this_target": local,
        "limit": anywhere if local is None else max(anywhere, local),
    }
    each = f" with up to {drafts + 1} updates a step" if drafts else ""
    told = f"k = {parameters.gain!r}, V_max({n}) <= {rounded(bounds.v_max.hi, up=True)}"
    if gain <= 0:
        what = "pushes temperatures apart: high entropy must lower T" if gain < 0 else "does not act at all"
        return Claim(theorem, "refuted", f"gain {parameters.gain!r} {what}", numbers)
    if gain * bounds.v_max.hi < limit:
        reason = f"{told}, so k V < {limit}{each} for every logit vector{_cost(gain, bounds, lag, drafts)}"
        return Claim(theorem, "proved", reason, numbers)
    if here is not None:
        at = f"at the target {parameters.target_nats!r} nats"
        if local is not None and gain * here.hi < limit:
            reason = (
                f"{at} no distribution has a varentropy above {rounded(here.hi, up=True)}, so k V < {limit}{each} "
                "there: frozen logits settle; while they change, two temperatures may move apart"
                f"{_cost(gain, bounds, lag, drafts)}"
            )
            return Claim("gain-at-target", "proved", reason, numbers)
        repels, when = loop_limit(lag), ""  # no draft is accepted: one update a step
        if lag == 0 and gain * here.lo <= repels and subject.always_drafts:
            repels, when = limit, " if every draft is accepted"
        if gain * here.lo > repels:
            reason = (
                f"{at} two-level logits (L, 0, ..., 0) have varentropy V >= {rounded(here.lo, up=False)}, "
                f"k V >= {rounded(gain * here.lo, up=False)} > {repels}: their equilibrium repels{when}"
            )
            return Claim(theorem, "refuted", reason, numbers)
    return Claim(
        theorem,
        "unknown",
        f"{told}: k V_max is not below {limit}{each}, yet no counter-example at this target",
        numbers,
    )
