"""Bounds on the log-mass of pages without reading their keys (the reference is ``backends.attention``).

Candidates are scored from their shadow: from the high nibbles alone (half the bytes), or from both planes. The other
pages (sinks, recent, not sealed) are read exactly as attention will read them; their interval is rounding alone.

All sums are float32. With u = 2^-24, g_n = n u / (1 - n u), N >= the norm over d of |m_d| + 128 w_d a (stored),

    |s - exact over the codes| <= scale g_{D+10} |q|_2 N                     (Cauchy-Schwarz; any order of summation)
    |exact over the codes - exact over the keys| <= scale (e + 7.5 a if the low nibble is unread) sum_d |q_d| w_d,

and a log-sum-exp of n scores adds (n + 12 ln n + 32) u + 8 u |lse|: a device exponential is good to 2^-22, its
argument's product by log2 e to one more rounding. A score cap is 1-Lipschitz and adds 32 u cap.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backends.attention.reference import Scoring
from backends.triton.attention import PageList
from backends.triton.cache import LayerShadow, record_bytes
from backends.triton.device import interval, soft_cap
from backends.triton.launch import launch
from backends.triton.shapes import block_size
from entropic_ctl.errors import BadInputError

__all__ = ["PAGES_PER_PROGRAM", "score_shadow"]

PAGES_PER_PROGRAM = 64


@triton.jit
def _score(
    q_ptr,  # (n, H, D)
    byte_ptr,  # uint8 (pages, n_kv_heads, R): the record, seen as bytes,
    half_ptr,  # float16 (pages, n_kv_heads, R / 2),
    word_ptr,  # int32 (pages, n_kv_heads, R / 4)
    float_ptr,  # and float32 (pages, n_kv_heads, R / 4)
    low_ptr,  # int32 (pages, n_kv_heads, B, D8, 16), or None: the high plane alone
    table_ptr,  # int32 (n, P)
    candidate_ptr,  # uint8 (n, P)
    length_ptr,  # int32 (n,)
    list_ptr,  # int32 (n, n_kv_heads, P), or None
    count_ptr,  # int32 (n, n_kv_heads), or None
    lower_ptr,  # float32 (n, H, P)
    upper_ptr,  # float32 (n, H, P)
    norm_ptr,  # float32 (n, n_kv_heads, P)
    scale,
    softcap,
    q_row,
    q_head,
    table_row,
    n_kv_heads,
    n_pages,
    per_program,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D8: tl.constexpr,
    BLOCK_D8: tl.constexpr,
    PAGE: tl.constexpr,
    PAGES: tl.constexpr,
    RECORD: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Bound the candidate pages of one stretch of one (row, KV head)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    both = row * n_kv_heads + head
    BLOCKS: tl.constexpr = PAGE // 16
    if list_ptr is not None:
        count = tl.load(count_ptr + both)
    else:
        count = (tl.load(length_ptr + row) + PAGE - 1) // PAGE
    start = tl.program_id(2) * per_program
    stop = tl.minimum(start + per_program, count)
    sub = tl.arange(0, PAGES * BLOCKS)  # sixteen tokens of a page each
    group = tl.arange(0, BLOCK_D8)
    lane = tl.arange(0, 16)
    j = tl.arange(0, 8)
    shift = 4 * ((j >> 1) + 4 * (j & 1))
    d = group[:, None] * 8 + j[None, :]
    for at in range(start, stop, PAGES):
        entry = at + sub // BLOCKS
        if list_ptr is not None:
            page = tl.load(list_ptr + both * n_pages + entry, mask=entry < stop, other=0)
        else:
            page = entry
        take = (entry < stop) & (tl.load(candidate_ptr + row * n_pages + page, mask=entry < stop, other=0) != 0)
        physical = tl.load(table_ptr + row * table_row + page, mask=take, other=0).to(tl.int64)
        cell = physical * n_kv_heads + head
        step = tl.load(float_ptr + cell * (RECORD // 4), mask=take, other=0.0)
        error = tl.load(float_ptr + cell * (RECORD // 4) + 1, mask=take, other=0.0)
        norm = tl.load(float_ptr + cell * (RECORD // 4) + 2, mask=take, other=0.0)
        some = take[:, None, None] & (group < D8)[None, :, None]
        w = tl.load(byte_ptr + (cell * RECORD + 16)[:, None, None] + d[None, :, :], mask=some, other=0).to(tl.float32)
        m = tl.load(
            half_ptr + (cell * (RECORD // 2) + (16 + 8 * D8) // 2)[:, None, None] + d[None, :, :], mask=some, other=0.0
        ).to(tl.float32)
        word = ((sub % BLOCKS)[:, None, None] * D8 + group[None, :, None]) * 16 + lane[None, None, :]
        plane = word_ptr + (cell * (RECORD // 4) + (16 + 24 * D8) // 4)[:, None, None]
        high = tl.load(plane + word, mask=some, other=0)
        code = ((high[:, :, :, None] >> shift[None, None, None, :]) & 15).to(tl.float32) * 16.0
        if low_ptr is not None:
            low = tl.load(low_ptr + (cell * (BLOCKS * D8 * 16))[:, None, None] + word, mask=some, other=0)
            code += ((low[:, :, :, None] >> shift[None, None, None, :]) & 15).to(tl.float32) - 128.0
        else:
            code -= 120.5
            error += 7.5 * step
        first = take & (sub % BLOCKS == 0)
        tl.store(norm_ptr + both * n_pages + page, norm, mask=first)
        for g in range(GROUP):
            q = tl.load(q_ptr + row * q_row + (head * GROUP + g) * q_head + d, mask=d < D, other=0.0).to(tl.float32)
            qw = q[None, :, :] * w
            s = tl.sum(tl.sum(code * qw[:, :, None, :], axis=3), axis=1)  # (sub, 16)
            centre = tl.sum(tl.sum(q[None, :, :] * m, axis=2), axis=1)
            s = scale * (centre[:, None] + step[:, None] * s)
            if SOFTCAP:
                s = soft_cap(s, softcap)
            size = tl.sqrt(tl.sum(tl.sum(q * q, axis=1), axis=0))
            delta = tl.abs(scale) * tl.sum(tl.sum(tl.abs(qw), axis=2), axis=1) * error
            delta += tl.abs(scale) * size * norm * ((D + 10) * 5.9604644775390625e-08)
            delta = delta * (1.0 + 4.0 * (D + 10) * 5.9604644775390625e-08) + 1e-30
            by_page = tl.reshape(s, [PAGES, PAGE])
            wide = tl.max(tl.reshape(delta, [PAGES, BLOCKS]), axis=1)
            lower, upper = interval(by_page, wide, softcap, PAGE)
            here = at + tl.arange(0, PAGES)
            if list_ptr is not None:
                to = tl.load(list_ptr + both * n_pages + here, mask=here < stop, other=0)
            else:
                to = here
            write = (here < stop) & (tl.load(candidate_ptr + row * n_pages + to, mask=here < stop, other=0) != 0)
            target = (both * GROUP + g) * n_pages + to
            tl.store(lower_ptr + target, lower, mask=write)
            tl.store(upper_ptr + target, upper, mask=write)


def score_shadow(
    query: torch.Tensor,
    shadow: LayerShadow,
    table: torch.Tensor,
    candidates: torch.Tensor,
    lengths: torch.Tensor,
    scoring: Scoring,
    bounds: tuple[torch.Tensor, torch.Tensor],
    norms: torch.Tensor,
    page_tokens: int,
    *,
    both_planes: bool = True,
    pages: PageList | None = None,
) -> None:
    """Bound the log-mass of candidate pages from their shadow.

    Parameters
    ----------
    query : tensor, shape (n, H, D)
    shadow : LayerShadow
    table : int32 tensor, shape (n, P)
    candidates : uint8 tensor, shape (n, P), contiguous
        1 where a page has a shadow and may be left out.
    lengths : int32 tensor, shape (n,)
    scoring : Scoring
    bounds : two float32 tensors, shape (n, H, P), contiguous
        Lower and upper; entries of candidates are written.
    norms : float32 tensor, shape (n, n_kv_heads, P), contiguous
        The record's norm is written.
    page_tokens : int
        A power of two, at least 16.
    both_planes : bool
        Read the low nibbles too.
    pages : PageList, optional
        Only these pages.

    Raises
    ------
    BadInputError
        If pages have no shadow format.
    """
    if page_tokens < 16 or page_tokens & (page_tokens - 1):
        raise BadInputError("pages without a shadow", field="page_tokens", value=page_tokens, allowed="16, 32, 64, ...")
    n, n_heads, dim = query.shape
    heads, capacity, groups = norms.shape[1], table.shape[1], -(-dim // 8)
    sub = max(page_tokens // 16, 2 if groups > 8 else 4)  # sixteen tokens each: 32 codes per thread
    launch(
        _score,
        (n, heads, -(-capacity // PAGES_PER_PROGRAM)),
        num_warps=8 if sub * block_size(groups) > 32 else 4,
        q_ptr=query,
        byte_ptr=shadow.record,
        half_ptr=shadow.record.view(torch.float16),
        word_ptr=shadow.record.view(torch.int32),
        float_ptr=shadow.record.view(torch.float32),
        low_ptr=shadow.low if both_planes else None,
        table_ptr=table,
        candidate_ptr=candidates,
        length_ptr=lengths,
        list_ptr=None if pages is None else pages.index,
        count_ptr=None if pages is None else pages.count,
        lower_ptr=bounds[0],
        upper_ptr=bounds[1],
        norm_ptr=norms,
        scale=float(scoring.scale),
        softcap=float(scoring.softcap or 0.0),
        q_row=query.stride(0),
        q_head=query.stride(1),
        table_row=table.stride(0),
        n_kv_heads=heads,
        n_pages=capacity,
        per_program=PAGES_PER_PROGRAM,
        GROUP=n_heads // heads,
        D=dim,
        D8=groups,
        BLOCK_D8=block_size(groups),
        PAGE=page_tokens,
        PAGES=sub * 16 // page_tokens,
        RECORD=record_bytes(dim, page_tokens),
        SOFTCAP=scoring.softcap is not None,
    )
