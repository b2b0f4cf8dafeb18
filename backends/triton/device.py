"""Small functions that kernels share; they exist on the device only."""

from __future__ import annotations

import triton
import triton.language as tl

from backends.triton import interpreted

__all__ = ["dot", "page_is_fixed", "soft_cap"]

_INTERPRETED: tl.constexpr = tl.constexpr(interpreted())


@triton.jit
def dot(a, b, c):
    """Return a @ b + c in float32, never TF32. The interpreter has no bfloat16 product: there it widens (exactly)."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def soft_cap(s, cap):
    """Return cap * tanh(s / cap), by an exponential that cannot overflow."""
    e = tl.exp(-2.0 * tl.abs(s) / cap)
    t = cap * (1.0 - e) / (1.0 + e)
    return tl.where(s < 0, -t, t)


@triton.jit
def page_is_fixed(page, n_pages, sealed, sink_pages, recent_pages):
    """Return whether a page is read in any case: a sink, a recent page, or one without a valid shadow."""
    return (page < sink_pages) | (page >= n_pages - recent_pages) | (sealed == 0)
