"""Decode attention over the paged cache: split over pages, then merged (the reference is ``backends.attention``).

A program attends for the G query heads of one KV head of one row over one split of its pages and leaves a partial
softmax (out, lse); a second kernel merges the splits. The pages are all pages of the row, those a sliding window sees,
or a list made on the device. How many there are is read by the kernel: the launch depends on shapes alone.

Slots that hold no token are neither loaded as keys nor as values, so what they hold never enters arithmetic. Page
offsets are 64-bit. Minus infinity is handled as such, as in the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from backends.attention.reference import Scoring
from backends.triton.device import dot, soft_cap
from backends.triton.launch import launch
from backends.triton.merging import Certify, merge_splits
from backends.triton.shapes import block_size, check_decode, compute_units

__all__ = ["PageList", "attend_pages", "split_count"]

_SPLIT_TOKENS = 256  # a split smaller than this costs more to merge than it brings


class PageList(NamedTuple):
    """Which pages each (row, KV head) reads: places in the row's block table, and how many of them.

    ``index`` int32 (n, n_kv_heads, C), ``count`` int32 (n, n_kv_heads).
    """

    index: torch.Tensor
    count: torch.Tensor


@triton.jit
def _attend(
    q_ptr,  # (n, H, D)
    k_ptr,  # (pages, n_kv_heads, PAGE, D)
    v_ptr,  # (pages, n_kv_heads, PAGE, D)
    table_ptr,  # int32 (n, P)
    length_ptr,  # int32 (n,)
    list_ptr,  # int32 (n, n_kv_heads, C), or None
    count_ptr,  # int32 (n, n_kv_heads), or None
    out_ptr,  # float32 (n, H, splits, D)
    lse_ptr,  # float32 (n, H, splits)
    mass_ptr,  # float32 (n, H, P), or None: log of the sum over each page read
    scale,
    softcap,
    q_row,
    q_head,
    k_page,
    k_head,
    k_slot,
    v_page,
    v_head,
    v_slot,
    table_row,
    list_row,
    n_kv_heads,
    splits,
    n_pages,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attend over one split of the pages of one (row, KV head): leave out and lse."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(length_ptr + row)
    last_page = (length + PAGE - 1) // PAGE
    sink_pages = 0
    skipped = 0  # pages between the sinks and the window
    if list_ptr is not None:
        count = tl.load(count_ptr + row * n_kv_heads + head)
    elif WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // PAGE
        sink_pages = tl.minimum((SINKS + PAGE - 1) // PAGE, first)
        skipped = first - sink_pages
        count = last_page - skipped
    else:
        count = last_page
    per_split = tl.cdiv(tl.cdiv(count * PAGE, splits), TOKENS) * TOKENS
    start = split * per_split
    stop = tl.minimum(start + per_split, count * PAGE)

    g = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    real = (g < GROUP)[:, None]
    q = tl.load(
        q_ptr + row * q_row + (head * GROUP + g)[:, None] * q_head + d[None, :],
        mask=real & (d < D)[None, :],
        other=0.0,
    )
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for at in range(start, stop, TOKENS):
        token = at + tl.arange(0, TOKENS)
        place = token // PAGE
        inside = token < stop
        if list_ptr is not None:
            page = tl.load(list_ptr + row * list_row + head * n_pages + place, mask=inside, other=0)
        else:
            page = tl.where(place < sink_pages, place, place + skipped)
        slot = token % PAGE
        position = page * PAGE + slot
        seen = inside & (position < length)
        if WINDOW > 0:
            seen = seen & ((position >= length - WINDOW) | (position < SINKS))
        physical = tl.load(table_ptr + row * table_row + page, mask=inside, other=0).to(tl.int64)
        take = seen[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + (physical * k_page + head * k_head + slot * k_slot)[:, None] + d[None, :], take, 0.0)
        s = dot(q, tl.trans(k.to(q.dtype)), tl.zeros([ROWS, TOKENS], tl.float32)) * scale
        if SOFTCAP:
            s = soft_cap(s, softcap)
        s = tl.where(seen[None, :], s, float("-inf"))
        if mass_ptr is not None:
            by_page = tl.reshape(s, [ROWS, TOKENS // PAGE, PAGE])
            page_top = tl.max(by_page, axis=2)
            page_safe = tl.where(page_top == float("-inf"), 0.0, page_top)
            log_mass = page_safe + tl.log(tl.sum(tl.exp(by_page - page_safe[:, :, None]), axis=2))
            entry = at // PAGE + tl.arange(0, TOKENS // PAGE)
            if list_ptr is not None:
                entry_page = tl.load(
                    list_ptr + row * list_row + head * n_pages + entry, mask=entry * PAGE < stop, other=0
                )
            else:
                entry_page = tl.where(entry < sink_pages, entry, entry + skipped)
            tl.store(
                mass_ptr + ((row * n_kv_heads + head) * GROUP + g)[:, None] * n_pages + entry_page[None, :],
                log_mass,
                mask=real & (entry * PAGE < stop)[None, :],
            )
        new_top = tl.maximum(top, tl.max(s, axis=1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp(top - safe)
        p = tl.exp(s - safe[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        v = tl.load(v_ptr + (physical * v_page + head * v_head + slot * v_slot)[:, None] + d[None, :], take, 0.0)
        v = v.to(q.dtype)
        out = dot(p.to(v.dtype), v, out * shrink[:, None])
        top = new_top
    target = ((row * n_kv_heads + head) * GROUP + g) * splits + split
    out = out / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out_ptr + target[:, None] * D + d[None, :], out, mask=real & (d < D)[None, :])
    tl.store(lse_ptr + target, top + tl.log(total), mask=g < GROUP)


def split_count(rows: int, n_kv_heads: int, tokens: int, device: torch.device) -> int:
    """Return into how many splits the longest possible row is cut: enough programs to fill the device twice."""
    units = compute_units(device)
    return max(1, min(-(-2 * units // max(rows * n_kv_heads, 1)), -(-tokens // _SPLIT_TOKENS), 128))


def attend_pages(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scoring: Scoring,
    *,
    window: int | None = None,
    sink_tokens: int = 0,
    s_aux: torch.Tensor | None = None,
    pages: PageList | None = None,
    certify: Certify | None = None,
    page_log_mass: bool = False,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Attend for one new token per row.

    Parameters
    ----------
    query : tensor, shape (n, H, D)
    k_pool, v_pool : tensor, shape (pages, n_kv_heads, page_tokens, D)
        One layer of the cache, contiguous along D.
    table : int32 tensor, shape (n, P)
        Page ids of each row; entries past its length are not read.
    lengths : int32 tensor, shape (n,)
        Tokens cached, the new one included; 0 gives (0, -inf).
    scoring : Scoring
        Scale and score cap.
    window : int, optional
        Only the last ``window`` positions are seen, and the first ``sink_tokens``.
    sink_tokens : int
    s_aux : float32 tensor, shape (H,), optional
        Learned sink logit per query head.
    pages : PageList, optional
        Read these pages only. Not together with a window.
    certify : Certify, optional
        Tighten ``certify.mass`` in place with the real sum over the pages read.
    page_log_mass : bool
        Also return ln(sum of exp(score)) of every page read.
    splits : int, optional
        Splits per (row, KV head); default: :func:`split_count`.

    Returns
    -------
    out : tensor, shape (n, H, D), dtype of ``query``
    lse : float32 tensor, shape (n, H)
        Log-sum-exp over the tokens read, the learned sink left out, nats.
    log_mass : float32 tensor, shape (n, H, P), or None
        Minus infinity for pages not read.

    Raises
    ------
    BadInputError
        If shapes disagree or the page size is no power of two.
    """
    shape = check_decode(query, k_pool, v_pool, table, lengths, window=window, listed=pages is not None)
    n, heads, dim, device = shape.n, shape.n_kv_heads, shape.dim, query.device
    group, size = shape.group, shape.page_tokens
    n_heads, capacity = heads * group, table.shape[1]
    q = query if query.dtype == k_pool.dtype else query.float()
    q = q if q.stride(-1) == 1 else q.contiguous()
    count = splits or split_count(n, heads, capacity * size, device)
    part = torch.empty((n, n_heads, count, dim), dtype=torch.float32, device=device)
    part_lse = torch.empty((n, n_heads, count), dtype=torch.float32, device=device)
    log_mass = None
    if page_log_mass:
        log_mass = torch.full((n, n_heads, capacity), -torch.inf, dtype=torch.float32, device=device)
    scale, softcap = float(scoring.scale), float(scoring.softcap or 0.0)
    wide = q.dtype == torch.float32
    launch(
        _attend,
        (n, heads, count),
        num_warps=4,
        num_stages=1 if wide else 3,
        q_ptr=q,
        k_ptr=k_pool,
        v_ptr=v_pool,
        table_ptr=table,
        length_ptr=lengths,
        list_ptr=None if pages is None else pages.index,
        count_ptr=None if pages is None else pages.count,
        out_ptr=part,
        lse_ptr=part_lse,
        mass_ptr=log_mass,
        scale=scale,
        softcap=softcap,
        q_row=q.stride(0),
        q_head=q.stride(1),
        k_page=k_pool.stride(0),
        k_head=k_pool.stride(1),
        k_slot=k_pool.stride(2),
        v_page=v_pool.stride(0),
        v_head=v_pool.stride(1),
        v_slot=v_pool.stride(2),
        table_row=table.stride(0),
        list_row=heads * capacity,
        n_kv_heads=heads,
        splits=count,
        n_pages=capacity,
        GROUP=group,
        ROWS=max(16, block_size(group)),
        D=dim,
        BLOCK_D=max(16, block_size(dim)),
        PAGE=size,
        TOKENS=max(size, 32 if wide else 64),
        WINDOW=window or 0,
        SINKS=sink_tokens,
        SOFTCAP=scoring.softcap is not None,
    )
    out, lse = merge_splits(
        part, part_lse, q, scoring, lengths, shape, out_dtype=query.dtype, s_aux=s_aux, certify=certify
    )
    return out, lse, log_mass
