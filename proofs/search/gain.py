"""Hints for the gain: where varentropy is largest, and the two-level distribution with the target's entropy."""

from __future__ import annotations

import math
from fractions import Fraction

from proofs.check import Subject
from proofs.check.gain import at_target, is_sharp
from proofs.enclosures import Interval
from proofs.vmax import maximum, two_level

__all__ = ["equilibrium_tail_mass", "hints", "steepest", "tail_interval"]


def equilibrium_tail_mass(n: int, target_nats: float) -> float | None:
    """Return r with two-level entropy ``target_nats`` by bisection (entropy increases in r), None if there is none."""
    low, high = 0.0, (n - 1) / n
    if not 0.0 < target_nats < math.log(n):
        return None
    for _ in range(200):
        middle = (low + high) / 2
        if two_level(n, middle)[0] < target_nats:
            low = middle
        else:
            high = middle
    return low if 0.0 < low < (n - 1) / n else None


def steepest(vocab_size: int, target_nats: float) -> float | None:
    """Return V_max(n; H*), nats squared, the largest varentropy an equilibrium can have; None where it is not known.

    It is that of two-level logits wherever the checker can prove that.
    """
    r, tail = equilibrium_tail_mass(vocab_size, target_nats), tail_interval(vocab_size, target_nats)
    if r is None or tail is None:
        return None
    target = Fraction(target_nats)
    sharp = is_sharp(vocab_size, target, tail, at_target(vocab_size, target, tail))
    return two_level(vocab_size, r)[1] if sharp else None


def tail_interval(n: int, target_nats: float) -> Interval | None:
    """Return a narrow interval of tail masses around the one with that two-level entropy, None if there is none."""
    r = equilibrium_tail_mass(n, target_nats)
    if r is None:
        return None
    slack = max(Fraction(r) / 2**36, Fraction(1, 2**80))
    low, high = (Fraction(math.floor((Fraction(r) + d) * 2**96), 2**96) for d in (-slack, slack))
    return Interval(low, high) if low > 0 and high < Fraction(n - 1, n) else None


def hints(subject: Subject) -> dict[str, Interval]:
    """Return ``log_odds`` and, where the target can be met, ``tail_mass``; nothing for laws other than ``feedback``."""
    if subject.config.loop.temperature.name != "feedback":
        return {}
    found = {"log_odds": maximum(subject.vocab_size).bracket()}
    tail = tail_interval(subject.vocab_size, subject.law.target_nats)
    return found if tail is None else {**found, "tail_mass": tail}
