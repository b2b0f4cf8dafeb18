"""Theorems `target` and `floor`: the temperature that meets H* exists and is unique; no premature collapse."""

from __future__ import annotations

from proofs.check.base import Claim, Hints, Subject

__all__ = ["claims"]


def claims(subject: Subject, hints: Hints) -> list[Claim]:  # noqa: ARG001
    """Not written yet."""
    return []
