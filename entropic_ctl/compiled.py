"""Compiled twins of hot host functions (numba, optional).

A twin is a plain Python loop over scalars that does what its NumPy reference does, to the last bit: only additions,
products, divisions and comparisons, in the reference's order. Transcendental functions stay in NumPy, whose vectorised
versions differ from the C library's in the last place. So a run gives the same tables with and without numba, and tests
hold each twin to its reference.

``ENTROPIC_COMPILED=0`` in the environment turns the twins off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["ENABLED", "compiled"]

try:
    import numba
except ImportError:
    numba = None

ENABLED = numba is not None and os.environ.get("ENTROPIC_COMPILED", "1") != "0"
"""Whether :func:`compiled` compiles."""

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(loop: Function) -> Function | None:
    """Return ``loop`` compiled (the machine code is cached beside the source), or None where twins are off."""
    return numba.njit(cache=True, error_model="numpy")(loop) if ENABLED else None
