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
from backends.triton.device import soft_cap
from backends.triton.launch import launch
from backends.triton.shapes import block_size, check_decode
from entropic_ctl.errors import BadInputError

__all__ = ["score_exactly", "score_shadow"]

_PAGES_PER_PROGRAM = 64


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


def _stretches(capacity: int) -> int:
    return -(-capacity // _PAGES_PER_PROGRAM)


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
        (n, heads, _stretches(capacity)),
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
        per_program=_PAGES_PER_PROGRAM,
        GROUP=n_heads // heads,
        D=dim,
        D8=groups,
        BLOCK_D8=block_size(groups),
        PAGE=page_tokens,
        PAGES=sub * 16 // page_tokens,
        RECORD=record_bytes(dim, page_tokens),
        SOFTCAP=scoring.softcap is not None,
    )


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
        (shape.n, shape.n_kv_heads, _stretches(capacity)),
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
        per_program=_PAGES_PER_PROGRAM,
        GROUP=shape.group,
        D=shape.dim,
        BLOCK_D=block_size(shape.dim),
        PAGE=shape.page_tokens,
        SOFTCAP=scoring.softcap is not None,
    )
