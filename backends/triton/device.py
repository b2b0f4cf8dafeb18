"""Small functions that kernels share; they exist on the device only."""

from __future__ import annotations

import triton
import triton.language as tl

from backends.triton import interpreted

__all__ = ["dot", "interval", "round_up", "soft_cap"]

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
def round_up(x):
    """Return a non-negative float64 as float32, rounded up."""
    near = x.to(tl.float32)
    above = (near.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)
    return tl.where(near.to(tl.float64) < x, above, near)


@triton.jit
def interval(s, delta, softcap, PAGE: tl.constexpr):
    """Return (lower, upper) of the log-sum-exp along the last axis of scores off by at most delta each."""
    unit = 5.9604644775390625e-08
    top = tl.max(s, axis=1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    lse = safe + tl.log(tl.sum(tl.exp(s - safe[:, None]), axis=1))
    width = delta + (PAGE + 12.0 * tl.log(PAGE * 1.0) + 32.0) * unit + 8.0 * unit * tl.abs(lse) + 32.0 * unit * softcap
    known = (width < float("inf")) & (tl.abs(lse) < float("inf"))
    return tl.where(known, lse - width, float("-inf")), tl.where(known, lse + width, float("inf"))
