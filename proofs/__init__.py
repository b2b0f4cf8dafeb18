"""Stability certificates: search proposes, check disposes. The theorems are in ``proofs/README.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from entropic_ctl.config import RunConfig

__all__ = ["prove"]


def prove(config: RunConfig, vocab_size: int) -> dict[str, Any]:
    """Make a certificate; see :func:`proofs.search.prove` (imported on use: it needs python-flint)."""
    from proofs.search import prove as search

    return search(config, vocab_size)
