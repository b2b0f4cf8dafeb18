"""Theorems `dwell` and `theta-cycle`: how often the pruning budget can move, and whether the loop through it cycles.

Tokens are accepted ones: with drafts several of a step update theta one after the other, under one theta in force.

``dwell`` (any entropies): a lower want is followed at once; two widenings are at least d accepted tokens apart. So n
tokens see at most floor(n/d) widenings, twice as many changes of direction, and a total variation of at most
2 floor(n/d) (wide - narrow): all that falls has risen before, since the law starts at narrow.

``theta-cycle`` (model entropy b + f(theta), b constant, f of slope at most r): what is asked for is a map w(theta) of
slope at most r (wide - narrow) / (high - low), and theta jumps to w(theta), at once or after d tokens. Slope below 1:
w contracts, theta settles. Otherwise an effect of (high - low) / (wide - narrow) <= r and a baseline that gives the
entropy ``low`` under the narrow budget give ``high`` under the wide one: w swaps the two. Source: ours.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

from proofs.budget_moves import fault
from proofs.check.base import Claim, Hints, Subject
from proofs.enclosures import log, shown

__all__ = ["Band", "claims"]

_TOKENS = 1000


class Band(NamedTuple):
    """The law's parameters as exact rationals, nats; ``after`` is d, accepted tokens."""

    narrow: Fraction
    wide: Fraction
    low: Fraction
    high: Fraction
    after: int


def claims(subject: Subject, hints: Hints) -> list[Claim]:  # noqa: ARG001
    """Decide `dwell` and `theta-cycle`."""
    spec = subject.config.loop.pruning
    if spec.name != "budget":
        why = f"the law {spec.name!r} has no timer and no state that moves"
        return [Claim(name, "not applicable", why) for name in ("dwell", "theta-cycle")]
    c = spec.config
    law = Band(
        narrow=Fraction(c.theta_nats),
        wide=Fraction(c.theta_wide_nats),
        low=Fraction(c.entropy_low_nats),
        high=Fraction(c.entropy_high_nats),
        after=c.widen_after,
    )
    return [_dwell(law, c), _theta_cycle(subject, law)]


def _dwell(law: Band, config: Any) -> Claim:
    if wrong := fault(config):
        return Claim("dwell", "refuted", f"the law's own update breaks it: {wrong}")
    width, d = law.wide - law.narrow, law.after
    widenings = 0 if width == 0 else _TOKENS // d
    numbers: dict[str, Any] = {
        "dwell_tokens": d,
        "tokens": _TOKENS,
        "widenings": widenings,
        "turns": 2 * widenings,
        "total_variation_nats": str(2 * widenings * width),
    }
    if width == 0:
        return Claim("dwell", "proved", f"both budgets are {shown(law.wide, 'g')} nats: theta never moves", numbers)
    reason = (
        f"theta narrows at once, and widens at most once in {d} accepted tokens of a request, whatever its entropy "
        f"does: at most {widenings} widenings in {_TOKENS} tokens"
    )
    return Claim("dwell", "proved", reason, numbers)


def _theta_cycle(subject: Subject, law: Band) -> Claim:
    r, lag = Fraction(subject.assumptions.r), subject.config.engine.observation_lag
    width, band = law.wide - law.narrow, law.high - law.low
    slope = r * width / band
    numbers: dict[str, Any] = {"slope": str(slope), "r_limit": str(band / width) if width else None}
    most = log(Fraction(subject.vocab_size))
    if width and law.low >= most.hi:
        reason = f"no entropy lies above {shown(law.low, 'g')} nats: the wide budget is all that is asked for"
        return Claim("theta-cycle", "proved", reason, numbers)
    if width and (drafts := subject.config.speculation.draft_tokens):
        reason = (
            f"up to {drafts + 1} tokens a step are computed under one theta and update it one after the other: the "
            "proof takes each token's entropy to come from the theta before it"
        )
        return Claim("theta-cycle", "unknown", reason, numbers)
    if slope < 1:  # m moves leave at most slope^m <= exp(-m (1 - slope)) of the width, and ln 100 < 5
        moves = 1 if slope <= Fraction(1, 100) else -(-5 // (1 - slope))
        numbers["settles_tokens"] = moves * (law.after + lag)
        reason = (
            f"a move of theta changes what is asked for by at most {shown(slope, '.3g')} < 1 of itself "
            f"(r = {subject.assumptions.r:g}, band {shown(band, 'g')} nats, budgets {shown(width, 'g')} nats apart): "
            "at a constant baseline entropy theta settles, no cycle exists"
        )
        return Claim("theta-cycle", "proved", reason, numbers)
    if law.high > most.lo:
        reason = (
            f"slope {shown(slope, '.3g')} >= 1, but the counter-example needs {shown(law.high, 'g')} nats, above ln n"
        )
        return Claim("theta-cycle", "unknown", reason, numbers)
    period = law.after + 1 + 2 * lag
    numbers |= {
        "effect": str(band / width),
        "entropy_nats": [str(law.low), str(law.high)],
        "theta_nats": [str(law.narrow), str(law.wide)],
        "period_tokens": period,
    }
    reason = (
        f"slope {shown(slope, '.3g')} >= 1: where the wide budget lifts the entropy from {shown(law.low, 'g')} to "
        f"{shown(law.high, 'g')} nats, theta cycles with period {period}; widen the band or bring the budgets closer"
    )
    return Claim("theta-cycle", "refuted", reason, numbers)
