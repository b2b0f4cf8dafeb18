"""Theorem `top-k`: the interval contains the entropy of every distribution that agrees with the top k."""

from __future__ import annotations

from proofs.check.base import Claim, Hints, Subject

__all__ = ["claims"]


def claims(subject: Subject, hints: Hints) -> list[Claim]:  # noqa: ARG001
    """Not written yet."""
    return []
