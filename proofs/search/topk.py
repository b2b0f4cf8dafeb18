"""Hints for the top-k interval: a geometric and a two-level law with the target's entropy."""

from __future__ import annotations

import math
from fractions import Fraction

from proofs.check import Subject
from proofs.search.gain import equilibrium_tail_mass

__all__ = ["hints"]


def _short(x: float) -> Fraction:
    """Round to 22 significant bits: short rationals keep their powers short."""
    mantissa, exponent = math.frexp(x)
    return Fraction(round(mantissa * 2**22), 2**22) * Fraction(2) ** exponent


def _stop(target_nats: float) -> float:
    """Return q = 1 - ratio with (-q ln q - (1-q) ln(1-q)) / q equal to the target, by bisection (it falls with q)."""
    low, high = -80.0, 0.0  # ln q
    for _ in range(100):
        middle = (low + high) / 2
        q = math.exp(middle)
        entropy = -middle - (1 - q) * math.log1p(-q) / q if q < 1 else 0.0
        low, high = (middle, high) if entropy > target_nats else (low, middle)
    return math.exp(low)


def hints(subject: Subject) -> dict[str, tuple[Fraction, Fraction]]:
    """Return ``top_k``, (ratio, tail mass), where the law has a target within reach."""
    target = getattr(subject.law, "target_nats", None)
    tail = None if target is None else equilibrium_tail_mass(subject.vocab_size, target)
    if target is None or tail is None:
        return {}
    q = _stop(target)
    return {"top_k": (1 - _short(q) if q < 0.5 else _short(1 - q), _short(tail))}
