"""Entropy, varentropy, temperature and the draw of a token in one kernel (the reference is ``backends.sampling``).

One program per row goes over the logits once for the maximum, once for the moments at temperature 1, once per step of
the temperature solve, and once for the draw; after the first pass they come from the device's second-level cache. The
draw is Gumbel-max with Philox4x32-10: key the request's seed, counter (token // 4, index, 0, 0), as specified with the
CPU's sampling, so a token is the same on both up to ties within rounding.

The solve holds H(T) = H*: Newton steps on ln H in u = ln T inside a bracket of the clamps, the middle of the bracket
where a step leaves it or the last one failed to halve the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from backends.triton.launch import launch

__all__ = ["Sampled", "Target", "choose", "sample_rows"]

_BLOCK = 2048


class Target(NamedTuple):
    """Entropy to hold (nats), clamps of the temperature, where the solve starts and stops."""

    entropy_nats: float
    t_min: float
    t_max: float
    t_start: float = 1.0
    tolerance_nats: float = 1e-5
    max_steps: int = 40


class Sampled(NamedTuple):
    """Per row: token (int64, -1 where the support is empty), float32 model entropy, temperature, tempered H and V."""

    token: torch.Tensor
    model_entropy: torch.Tensor
    temperature: torch.Tensor
    entropy: torch.Tensor
    varentropy: torch.Tensor


@triton.jit
def row_moments(z_ptr, top, inverse, n, BLOCK: tl.constexpr):
    """Return entropy and varentropy of softmax(z * inverse); ``top`` is the largest z."""
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.zeros([BLOCK], tl.float32)
    second = tl.zeros([BLOCK], tl.float32)
    for at in range(0, n, BLOCK):
        i = at + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + i, mask=i < n, other=float("-inf")).to(tl.float32)
        x = tl.maximum((z - top) * inverse, -1e4)
        e = tl.where(i < n, tl.exp(x), 0.0)
        total += e
        first += e * x
        second += e * x * x
    mass = tl.sum(total, axis=0)
    mean = tl.sum(first, axis=0) / mass
    return tl.log(mass) - mean, tl.maximum(tl.sum(second, axis=0) / mass - mean * mean, 0.0)


@triton.jit
def row_maximum(z_ptr, n, BLOCK: tl.constexpr):
    """Return the largest z of a row."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for at in range(0, n, BLOCK):
        i = at + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(z_ptr + i, mask=i < n, other=float("-inf")).to(tl.float32))
    return tl.max(best, axis=0)


@triton.jit
def gumbel_noise(seed, group, index):
    """Return the noise of tokens 4 group .. 4 group + 3 in order, float32 (4 * groups,)."""
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(seed, group, zero + index, zero, zero)
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [4 * group.shape[0]])
    v = tl.minimum((word.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    near = v * (1.0 + v * (0.5 + v * 0.33333334))
    return -tl.log(tl.where(v < 0.00390625, near, -tl.log(1.0 - v)))


@triton.jit
def _sample(
    raw_ptr,  # (M, n): the model's logits
    z_ptr,  # (M, n): after penalties and masks
    seed_ptr,  # int64 (M,)
    index_ptr,  # int64 (M,)
    given_ptr,  # float64 (M,): temperatures, or None to solve
    token_ptr,  # int64 (M,)
    model_ptr,  # float32 (M,)
    t_ptr,  # float32 (M,)
    h_ptr,  # float32 (M,)
    v_ptr,  # float32 (M,)
    n,
    raw_row,
    z_row,
    target,
    log_t_min,
    log_t_max,
    log_t_start,
    tolerance,
    max_steps,
    SAME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Measure, temper and draw one row."""
    row = tl.program_id(0).to(tl.int64)
    z = z_ptr + row * z_row
    top = row_maximum(z, n, BLOCK)
    raw = raw_ptr + row * raw_row
    raw_top = top
    if not SAME:
        raw_top = row_maximum(raw, n, BLOCK)
    model, _ = row_moments(raw, raw_top, 1.0, n, BLOCK)
    tl.store(model_ptr + row, model)
    if given_ptr is not None:
        t64 = tl.load(given_ptr + row)
        inverse = (1.0 / tl.maximum(t64, 1.1754943508222875e-38)).to(tl.float32)
        t = t64.to(tl.float32)
        h, v = row_moments(z, top, inverse, n, BLOCK)
    else:
        u = log_t_start
        low = log_t_min
        high = log_t_max
        low_seen = 0
        high_seen = 0
        previous = float("inf")
        t = tl.exp(u)
        h, v = row_moments(z, top, 1.0 / t, n, BLOCK)
        steps = 1
        while (tl.abs(h - target) > tolerance) & (high - low > 1e-7) & (steps < max_steps):
            error = h - target
            low = tl.where(error < 0, u, low)
            high = tl.where(error > 0, u, high)
            low_seen = tl.where(error < 0, 1, low_seen)
            high_seen = tl.where(error > 0, 1, high_seen)
            middle = 0.5 * (low + high)
            newton = u - tl.log(tl.maximum(h, 1e-30) / target) * h / tl.maximum(v, 1e-30)
            slow = tl.abs(error) > 0.5 * previous
            step = tl.where(slow, middle, newton)
            step = tl.where(step >= high, tl.where(high_seen == 1, middle, high), step)
            step = tl.where(step <= low, tl.where(low_seen == 1, middle, low), step)
            previous = tl.where(slow, float("inf"), tl.abs(error))
            u = step
            t = tl.exp(u)
            h, v = row_moments(z, top, 1.0 / t, n, BLOCK)
            steps += 1
        inverse = (1.0 / t.to(tl.float64)).to(tl.float32)
    seed = tl.load(seed_ptr + row)
    index = tl.load(index_ptr + row).to(tl.int32)
    best = float("-inf")
    token = -1
    for at in range(0, n, BLOCK):
        i = at + tl.arange(0, BLOCK)
        x = tl.load(z + i, mask=i < n, other=float("-inf")).to(tl.float32)
        noise = gumbel_noise(seed, at // 4 + tl.arange(0, BLOCK // 4), index)
        y = (x - top) * inverse + tl.where(t > 0, noise, 0.0)
        y = tl.where((i < n) & (x > float("-inf")), y, float("-inf"))
        most = tl.max(y, axis=0)
        first = tl.min(tl.where((y == most) & (i < n), i, n), axis=0)
        token = tl.where(most > best, first, token)
        best = tl.maximum(most, best)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(t_ptr + row, t)
    tl.store(h_ptr + row, h)
    tl.store(v_ptr + row, v)


def sample_rows(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    index: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    target: Target | None = None,
    raw: torch.Tensor | None = None,
) -> Sampled:
    """Draw one token per row.

    Parameters
    ----------
    logits : tensor, float32 or 16-bit, shape (M, n), contiguous along n
        After penalties and masks; ``-inf`` is never drawn.
    seeds, index : int64 tensor, shape (M,)
        Request seed in [0, 2^63) and number of the new token.
    temperature : float64 tensor, shape (M,), optional
        0 takes the most likely token, of equal ones the lowest.
    target : Target, optional
        In place of ``temperature``: solve for it.
    raw : tensor, shape (M, n), optional
        The model's own logits, where they differ: the model entropy is taken from these.

    Raises
    ------
    ValueError
        Unless exactly one of ``temperature`` and ``target`` is given.
    """
    if (temperature is None) == (target is None):
        raise ValueError("give either temperature or target")
    rows, n = logits.shape
    device = logits.device
    token = torch.empty(rows, dtype=torch.int64, device=device)
    model, t, h, v = torch.empty((4, rows), dtype=torch.float32, device=device)
    wanted = target or Target(1.0, 1.0, 1.0)
    edges = torch.tensor([wanted.t_min, wanted.t_max, wanted.t_start], dtype=torch.float64).log().tolist()
    launch(
        _sample,
        (rows,),
        num_warps=4,
        raw_ptr=logits if raw is None else raw,
        z_ptr=logits,
        seed_ptr=seeds,
        index_ptr=index,
        given_ptr=temperature,
        token_ptr=token,
        model_ptr=model,
        t_ptr=t,
        h_ptr=h,
        v_ptr=v,
        n=n,
        raw_row=(logits if raw is None else raw).stride(0),
        z_row=logits.stride(0),
        target=max(float(wanted.entropy_nats), 1e-30),
        log_t_min=edges[0],
        log_t_max=edges[1],
        log_t_start=min(max(edges[2], edges[0]), edges[1]),
        tolerance=float(wanted.tolerance_nats),
        max_steps=wanted.max_steps,
        SAME=raw is None,
        BLOCK=_BLOCK,
    )
    return Sampled(token, model, t, h, v)


def choose(logits: torch.Tensor, temperature: torch.Tensor, seed: Sequence[int], index: Sequence[int]) -> torch.Tensor:
    """Draw one token per row at given temperatures; as :func:`backends.gumbel.choose`, the specification."""
    words = torch.tensor([list(seed), list(index)], dtype=torch.int64).to(logits.device)
    return sample_rows(logits, words[0], words[1], temperature=temperature).token
