"""Theorem `wrong-sign`: the opposite sign drives every start but the fixed point to a clamp."""

from __future__ import annotations

from proofs.check.base import Claim, Hints, Subject

__all__ = ["claims"]


def claims(subject: Subject, hints: Hints) -> list[Claim]:  # noqa: ARG001
    """Not written yet."""
    return []
