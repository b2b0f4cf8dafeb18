"""Bounds on the log-mass of the pages that are read in any case, from their real keys: an interval of rounding alone.

The rounding is that of :mod:`backends.triton.scoring` with the largest norm of a key in place of the record's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backends.attention.reference import Scoring
from backends.triton.device import interval, soft_cap
from backends.triton.launch import launch
from backends.triton.scoring import PAGES_PER_PROGRAM
from backends.triton.shapes import block_size, check_decode

__all__ = ["score_exactly"]


@triton.jit
def _score_keys(
    q_ptr,  # (n, H, D)
    k_ptr,  # (pages, n_kv_heads, PAGE, D)
    table_ptr,  # int32 (n, P)
    candidate_ptr,  # uint8 (n, P)
    length_ptr,  # int32 (n,)
    lower_ptr,  # float32 (n, H, P)
    upper_ptr,  # float32 (n, H, P)
    norm_ptr,  # float32 (n, n_kv_heads, P)
    scale,
    softcap,
    q_row,
    q_head,
    k_page,
    k_head,
    k_slot,
    table_row,
    n_kv_heads,
    n_pages,
    per_program,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Bound the pages that are no candidates, from their real keys, in one stretch of one (row, KV head)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    both = row * n_kv_heads + head
    length = tl.load(length_ptr + row)
    start = tl.program_id(2) * per_program
    stop = tl.minimum(start + per_program, (length + PAGE - 1) // PAGE)
    slot = tl.arange(0, PAGE)
    d = tl.arange(0, BLOCK_D)
    one = tl.arange(0, 1)
    for page in range(start, stop):
        if tl.load(candidate_ptr + row * n_pages + page) == 0:
            physical = tl.load(table_ptr + row * table_row + page).to(tl.int64)
            seen = page * PAGE + slot < length
            k = tl.load(
                k_ptr + physical * k_page + head * k_head + slot[:, None] * k_slot + d[None, :],
                mask=seen[:, None] & (d < D)[None, :],
                other=0.0,
            ).to(tl.float32)
            norm = tl.sqrt(tl.max(tl.sum(k * k, axis=1), axis=0)) * (1.0 + (D + 8) * 5.9604644775390625e-08)
            tl.store(norm_ptr + both * n_pages + page, norm)
            for g in range(GROUP):
                q = tl.load(q_ptr + row * q_row + (head * GROUP + g) * q_head + d, mask=d < D, other=0.0)
                q = q.to(tl.float32)
                s = scale * tl.sum(k * q[None, :], axis=1)
                if SOFTCAP:
                    s = soft_cap(s, softcap)
                s = tl.where(seen, s, float("-inf"))
                size = tl.sqrt(tl.sum(q * q, axis=0))
                delta = tl.abs(scale) * size * norm * ((D + 10) * 5.9604644775390625e-08 * 1.01)
                lower, upper = interval(s[None, :], delta + one * 0.0, softcap, PAGE)
                target = (both * GROUP + g) * n_pages + page
                tl.store(lower_ptr + target + one, lower)
                tl.store(upper_ptr + target + one, upper)


def score_exactly(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    table: torch.Tensor,
    candidates: torch.Tensor,
    lengths: torch.Tensor,
    scoring: Scoring,
    bounds: tuple[torch.Tensor, torch.Tensor],
    norms: torch.Tensor,
) -> None:
    """Bound the log-mass of the pages that are no candidates, from their real keys.

    Parameters
    ----------
    query : tensor, shape (n, H, D)
    k_pool : tensor, shape (pages, n_kv_heads, page_tokens, D)
    table : int32 tensor, shape (n, P)
    candidates : uint8 tensor, shape (n, P), contiguous
    lengths : int32 tensor, shape (n,)
    scoring : Scoring
    bounds : two float32 tensors, shape (n, H, P), contiguous
        Lower and upper; entries of other pages are written.
    norms : float32 tensor, shape (n, n_kv_heads, P), contiguous
        The largest key norm of those pages is written.
    """
    shape = check_decode(query, k_pool, k_pool, table, lengths, window=None, listed=True)
    capacity = table.shape[1]
    launch(
        _score_keys,
        (shape.n, shape.n_kv_heads, -(-capacity // PAGES_PER_PROGRAM)),
        num_warps=4,
        q_ptr=query,
        k_ptr=k_pool,
        table_ptr=table,
        candidate_ptr=candidates,
        length_ptr=lengths,
        lower_ptr=bounds[0],
        upper_ptr=bounds[1],
        norm_ptr=norms,
        scale=float(scoring.scale),
        softcap=float(scoring.softcap or 0.0),
        q_row=query.stride(0),
        q_head=query.stride(1),
        k_page=k_pool.stride(0),
        k_head=k_pool.stride(1),
        k_slot=k_pool.stride(2),
        table_row=table.stride(0),
        n_kv_heads=shape.n_kv_heads,
        n_pages=capacity,
        per_program=PAGES_PER_PROGRAM,
        GROUP=shape.group,
        D=shape.dim,
        BLOCK_D=block_size(shape.dim),
        PAGE=shape.page_tokens,
        SOFTCAP=scoring.softcap is not None,
    )
