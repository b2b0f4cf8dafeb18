"""Theorem `solve`: the safeguarded Newton iteration meets the target within a stated number of evaluations."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from entropic_ctl.temperature.solve import NEWTON_EVALUATIONS
from proofs.check.base import Claim, Hints, Subject, decimal, rounded
from proofs.check.gain import varentropy_ceiling
from proofs.enclosures import log

__all__ = ["Effort", "claims", "effort"]

_CUT = Fraction(1, 10**14)
"""Width, per unit of max(|u|, 1), below which the law takes a bracket for a point; covers rounding of u and T too."""


class Effort(NamedTuple):
    """How many evaluations of a distribution one step can take, whatever the logits.

    Parameters
    ----------
    evaluations : int or None
        N; None if the tolerance is finer than float64 temperatures can resolve.
    v_bound : Fraction
        No varentropy over the vocabulary is larger, nats squared: ln^2(n-1)/4 + 1.
    resolution : Fraction
        Entropy between the two ends of a bracket that counts as a point, at most, nats.
    """

    evaluations: int | None
    v_bound: Fraction
    resolution: Fraction


def effort(subject: Subject) -> Effort:
    """Bound the evaluations of `solve` and `damped`: 16 + 1 + the least m with V (W / 2^m + cut) <= tolerance."""
    law = subject.law
    v_bound = varentropy_ceiling(subject.vocab_size)
    low, high = log(Fraction(law.t_min)), log(Fraction(law.t_max))
    cut = _CUT * max(-low.lo, high.hi, Fraction(1))
    tolerance, width = Fraction(law.tolerance_nats), high.hi - low.lo
    if v_bound * cut >= tolerance:
        return Effort(None, v_bound, v_bound * cut)
    bisections = 0
    while v_bound * (width / 2**bisections + cut) > tolerance:
        bisections += 1
    evaluations = 1 if law.t_min == law.t_max else NEWTON_EVALUATIONS + 1 + bisections
    return Effort(evaluations, v_bound, v_bound * cut)


def claims(subject: Subject, hints: Hints) -> list[Claim]:  # noqa: ARG001
    """Decide `solve` for the laws that solve for the temperature."""
    name, law = subject.config.loop.temperature.name, subject.law
    if name not in ("solve", "damped"):
        return [Claim("solve", "not applicable", f"the law {name!r} solves for no temperature")]
    needed, v_bound, resolution = effort(subject)
    numbers = {
        "evaluations": needed,
        "max_iterations": law.max_iterations,
        "newton_evaluations": NEWTON_EVALUATIONS,
        "v_bound": decimal(v_bound, up=True),
        "resolution_nats": decimal(resolution, up=True, digits=30),
        "target_possible": Fraction(law.target_nats) < log(Fraction(subject.vocab_size)).lo,
    }
    what = f"tolerance_nats = {law.tolerance_nats!r}"
    if needed is None:
        reason = (
            f"{what} is finer than what neighbouring float64 temperatures can differ by, "
            f"{rounded(resolution, up=True)} nats at V = {rounded(v_bound, up=True)}: raise tolerance_nats above it"
        )
        return [Claim("solve", "unknown", reason, numbers)]
    if needed > law.max_iterations:
        reason = (
            f"the worst logits may need {needed} evaluations for {what}, and max_iterations = {law.max_iterations}: "
            f"raise max_iterations to {needed}, or tolerance_nats"
        )
        return [Claim("solve", "unknown", reason, numbers)]
    where = "" if numbers["target_possible"] else "; no distribution of this vocabulary reaches the target"
    reason = (
        f"from any start, for every logit vector, |H - H*| <= {law.tolerance_nats!r} nats, or T at the nearer clamp "
        f"when H* is out of reach, after {needed} evaluations at most ({NEWTON_EVALUATIONS} of Newton, then bisection)"
        f"{where}"
    )
    return [Claim("solve", "proved", reason, numbers)]
