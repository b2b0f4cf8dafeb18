"""Hints for `target`, `wrong-sign` and `floor`: the two-level distributions with entropy H* and with half of it."""

from __future__ import annotations

from proofs.check import Subject
from proofs.check.two_level import idle
from proofs.enclosures import Interval
from proofs.search.gain import tail_interval

__all__ = ["floor_hints", "hints"]

_LAWS = ("feedback", "solve", "damped")


def hints(subject: Subject) -> dict[str, Interval]:
    """Return ``tail_mass``, the tail mass of the two-level distribution with entropy H*, where a theorem reads it."""
    return {} if idle(subject, *_LAWS, pinned=False) else _named("tail_mass", subject, subject.law.target_nats)


def floor_hints(subject: Subject) -> dict[str, Interval]:
    """Return ``floor_mass``, that of the one with entropy H*/2, where a theorem reads it."""
    return {} if idle(subject, *_LAWS) else _named("floor_mass", subject, subject.law.target_nats / 2)


def _named(name: str, subject: Subject, entropy_nats: float) -> dict[str, Interval]:
    found = tail_interval(subject.vocab_size, entropy_nats)
    return {} if found is None else {name: found}
