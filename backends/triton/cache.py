"""Writing tokens into pages, and the quantised shadow of full pages (the format: ``Shadow`` in ``backends.kv_cache``).

Per page and KV head, with m half-precision centres, w channel weights in 1..255, a the page's step and e its error,

    |k[t,d] - (m[d] + w[d] a (c[t,d] - 128))| <= w[d] e,      c = 16 h + l,

the high nibbles h in the record and the low ones l apart. Everything is measured in float64 against what is stored and
rounded up, as in the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from backends.triton.device import round_up
from backends.triton.launch import launch
from backends.triton.shapes import block_size
from entropic_ctl.errors import BadInputError

__all__ = ["LayerShadow", "record_bytes", "seal_pages", "write_tokens"]


class LayerShadow(NamedTuple):
    """One layer's shadow: ``record`` uint8 (pages, n_kv_heads, R), ``low`` int32 (pages, n_kv_heads, B, D8, 16)."""

    record: torch.Tensor
    low: torch.Tensor


def record_bytes(head_dim: int, page_tokens: int) -> int:
    """Return R: 16 bytes of scalars, then weights, centres and the high plane, channels padded to eights."""
    groups = -(-head_dim // 8)
    return 16 + 24 * groups + 64 * -(-page_tokens // 16) * groups


@triton.jit
def _write(
    key_ptr,  # (n_kv_heads, T, D), any strides
    value_ptr,  # (n_kv_heads, T, D)
    k_ptr,  # (pages, n_kv_heads, PAGE, D)
    v_ptr,  # (pages, n_kv_heads, PAGE, D)
    page_ptr,  # int64 (T,): page of each token, negative for none
    slot_ptr,  # int64 (T,)
    key_head,
    key_token,
    value_head,
    value_token,
    k_page,
    k_head,
    k_slot,
    v_page,
    v_head,
    v_slot,
    n_kv_heads,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store K and V of one token."""
    token = tl.program_id(0).to(tl.int64)
    page = tl.load(page_ptr + token)
    slot = tl.load(slot_ptr + token)
    h = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (h < n_kv_heads) & (d < D) & (h + page >= h)
    k = tl.load(key_ptr + h * key_head + token * key_token + d, mask=mask, other=0.0)
    v = tl.load(value_ptr + h * value_head + token * value_token + d, mask=mask, other=0.0)
    tl.store(k_ptr + page * k_page + h * k_head + slot * k_slot + d, k.to(k_ptr.dtype.element_ty), mask=mask)
    tl.store(v_ptr + page * v_page + h * v_head + slot * v_slot + d, v.to(v_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _seal(
    k_ptr,  # (pages, n_kv_heads, PAGE, D)
    v_ptr,  # (pages, n_kv_heads, PAGE, D)
    id_ptr,  # int64 (S,): pages to seal, negative for none
    byte_ptr,  # uint8 (pages, n_kv_heads, R): the record, seen as bytes,
    half_ptr,  # float16 (pages, n_kv_heads, R / 2),
    word_ptr,  # int32 (pages, n_kv_heads, R / 4)
    float_ptr,  # and float32 (pages, n_kv_heads, R / 4)
    low_ptr,  # int32 (pages, n_kv_heads, B, D8, 16)
    centre_ptr,  # float16 (pages, n_kv_heads, D): value centres
    radius_ptr,  # float32 (pages, n_kv_heads): value radii
    sealed_ptr,  # uint8 (S,): set to 0 where a value cannot be sealed
    k_page,
    k_head,
    v_page,
    v_head,
    n_kv_heads,
    D: tl.constexpr,
    D8: tl.constexpr,
    BLOCK_D8: tl.constexpr,
    PAGE: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Quantise the keys of one (page, KV head) and bound its values."""
    place = tl.program_id(0)
    head = tl.program_id(1)
    page = tl.load(id_ptr + place)
    if page < 0:
        return
    cell = page * n_kv_heads + head
    d = tl.arange(0, BLOCK_D8 * 8)
    inside = d < D
    lane = tl.arange(0, 16)
    some = (lane >= 0)[:, None] & inside[None, :]
    from_key = k_ptr + page * k_page + head * k_head + lane[:, None] * D + d[None, :]
    from_value = v_ptr + page * v_page + head * v_head + lane[:, None] * D + d[None, :]

    # sixteen tokens at a time: their float64 values fit into registers
    bad = 0
    lowest = tl.full([BLOCK_D8 * 8], float("inf"), tl.float64)
    highest = tl.full([BLOCK_D8 * 8], float("-inf"), tl.float64)
    longest = tl.zeros([16], tl.float64)
    mean = tl.zeros([BLOCK_D8 * 8], tl.float64)
    for block in range(PAGE // 16):
        k = tl.load(from_key + block * 16 * D, mask=some, other=0.0).to(tl.float64)
        bad += tl.sum(tl.sum(tl.where(tl.abs(k) <= 65504.0, 0, 1), axis=1), axis=0)
        k = tl.where(tl.abs(k) <= 65504.0, k, 0.0)
        lowest = tl.minimum(lowest, tl.min(k, axis=0))
        highest = tl.maximum(highest, tl.max(k, axis=0))
        longest = tl.maximum(longest, tl.sum(k * k, axis=1))
        v = tl.load(from_value + block * 16 * D, mask=some, other=0.0).to(tl.float64)
        bad += tl.sum(tl.sum(tl.where(tl.abs(v) <= 65504.0, 0, 1), axis=1), axis=0)
        mean += tl.sum(tl.where(tl.abs(v) <= 65504.0, v, 0.0), axis=0)
    if bad > 0:
        tl.store(sealed_ptr + place, 0)

    m = (0.5 * (lowest + highest)).to(tl.float32).to(tl.float16)
    m64 = m.to(tl.float64)
    spread = tl.maximum(highest - m64, m64 - lowest)
    widest = tl.max(spread, axis=0)
    step = round_up(widest / 32512.5)  # 255 * 127.5
    w = tl.where(widest > 0, tl.ceil(spread / tl.where(widest > 0, widest, 1.0) * 255.0), 1.0)
    w = tl.minimum(tl.maximum(w, 1.0), 255.0)
    unit = w * step.to(tl.float64)
    centre = (mean / PAGE).to(tl.float32).to(tl.float16)
    j = tl.arange(0, 8)
    shift = (4 * ((j >> 1) + 4 * (j & 1)))[None, None, :]
    group = tl.arange(0, BLOCK_D8)[None, :]
    error = tl.zeros([16], tl.float64)
    farthest = tl.zeros([16], tl.float64)
    for block in range(PAGE // 16):
        k = tl.load(from_key + block * 16 * D, mask=some, other=0.0).to(tl.float64)
        k = tl.where(tl.abs(k) <= 65504.0, k, 0.0)
        scaled = (k - m64[None, :]) / tl.where(unit > 0, unit, 1.0)[None, :]
        nearest = (scaled + 6755399441055744.0) - 6755399441055744.0  # 1.5 * 2^52: round half to even
        code = tl.minimum(tl.maximum(tl.where(unit[None, :] > 0, nearest, 0.0) + 128.0, 0.0), 255.0)
        off = tl.abs(k - (m64[None, :] + unit[None, :] * (code - 128.0))) / w[None, :]
        error = tl.maximum(error, tl.max(tl.where(inside[None, :], off, 0.0), axis=1))
        c = tl.reshape(tl.where(inside[None, :], code, 0.0).to(tl.int32), [16, BLOCK_D8, 8])
        at = (block * D8 + group) * 16 + lane[:, None]
        write = (group < D8) & (lane >= 0)[:, None]
        high = tl.sum((c >> 4) << shift, axis=2)
        tl.store(word_ptr + cell * (RECORD // 4) + (16 + 24 * D8) // 4 + at, high, mask=write)
        tl.store(low_ptr + cell * (PAGE * D8) + at, tl.sum((c & 15) << shift, axis=2), mask=write)
        v = tl.load(from_value + block * 16 * D, mask=some, other=0.0).to(tl.float64)
        away = tl.where(inside[None, :] & (tl.abs(v) <= 65504.0), v - centre.to(tl.float64)[None, :], 0.0)
        farthest = tl.maximum(farthest, tl.sum(away * away, axis=1))
    worst = tl.max(error, axis=0)
    reach = tl.where(inside, tl.abs(m64) + 128.0 * unit, 0.0)
    worst += tl.where(worst > 0, tl.max(reach, axis=0) * 3.552713678800501e-15, 0.0)  # 2^-48
    square = tl.maximum(tl.sum(reach * reach, axis=0), tl.max(longest, axis=0))
    padded = d < D8 * 8
    tl.store(byte_ptr + cell * RECORD + 16 + d, tl.where(inside, w, 0.0).to(tl.int32).to(tl.uint8), mask=padded)
    tl.store(half_ptr + cell * (RECORD // 2) + (16 + 8 * D8) // 2 + d, tl.where(inside, m, m * 0.0), mask=padded)
    scalars = float_ptr + cell * (RECORD // 4)
    tl.store(scalars, step)
    tl.store(scalars + 1, round_up(worst))
    tl.store(scalars + 2, round_up(tl.sqrt(square) * (1.0 + 1e-12)))
    tl.store(scalars + 3, 0.0)
    tl.store(centre_ptr + cell * D + d, centre, mask=inside)
    tl.store(radius_ptr + cell, round_up(tl.sqrt(tl.max(farthest, axis=0)) * (1.0 + 1e-12)))


def write_tokens(
    key: torch.Tensor,
    value: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page: torch.Tensor,
    slot: torch.Tensor,
) -> None:
    """Store K and V of T tokens in one layer.

    Parameters
    ----------
    key, value : tensor, shape (n_kv_heads, T, D), contiguous along D
    k_pool, v_pool : tensor, shape (pages, n_kv_heads, page_tokens, D)
        Written in place; 64-bit offsets.
    page, slot : int64 tensor, shape (T,)
        Where each token goes; a negative page writes nothing (padding under CUDA graphs).
    """
    heads, tokens, dim = key.shape
    launch(
        _write,
        (tokens,),
        num_warps=4,
        key_ptr=key,
        value_ptr=value,
        k_ptr=k_pool,
        v_ptr=v_pool,
        page_ptr=page,
        slot_ptr=slot,
        key_head=key.stride(0),
        key_token=key.stride(1),
        value_head=value.stride(0),
        value_token=value.stride(1),
        k_page=k_pool.stride(0),
        k_head=k_pool.stride(1),
        k_slot=k_pool.stride(2),
        v_page=v_pool.stride(0),
        v_head=v_pool.stride(1),
        v_slot=v_pool.stride(2),
        n_kv_heads=heads,
        D=dim,
        BLOCK_H=block_size(heads),
        BLOCK_D=block_size(dim),
    )


def seal_pages(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    ids: torch.Tensor,
    shadow: LayerShadow,
    value_centre: torch.Tensor,
    value_radius: torch.Tensor,
    sealed: torch.Tensor,
) -> None:
    """Quantise full pages of one layer.

    Parameters
    ----------
    k_pool, v_pool : tensor, shape (pages, n_kv_heads, page_tokens, D)
        Pages contiguous within a head; ``page_tokens`` a multiple of 16 and a power of two.
    ids : int64 tensor, shape (S,)
        Pages to seal; negative for none.
    shadow : LayerShadow
        Written in place.
    value_centre : float16 tensor, shape (pages, n_kv_heads, D)
    value_radius : float32 tensor, shape (pages, n_kv_heads)
    sealed : uint8 tensor, shape (S,)
        Set to 0 where a value is not finite or beyond float16; otherwise left as it is, so one tensor of ones serves
        all layers.

    Raises
    ------
    BadInputError
        If the page size or the layout does not fit.
    """
    _, heads, size, dim = k_pool.shape
    if size < 16 or size & (size - 1):
        raise BadInputError("pages without a shadow", field="page_tokens", value=size, allowed="16, 32, 64, ...")
    if k_pool.stride(2) != dim or v_pool.stride(2) != dim:
        raise BadInputError("the tokens of a page must be contiguous", field="k_pool, v_pool", value=k_pool.stride())
    groups = -(-dim // 8)
    launch(
        _seal,
        (ids.shape[0], heads),
        num_warps=4,
        k_ptr=k_pool,
        v_ptr=v_pool,
        id_ptr=ids,
        byte_ptr=shadow.record,
        half_ptr=shadow.record.view(torch.float16),
        word_ptr=shadow.record.view(torch.int32),
        float_ptr=shadow.record.view(torch.float32),
        low_ptr=shadow.low,
        centre_ptr=value_centre,
        radius_ptr=value_radius,
        sealed_ptr=sealed,
        k_page=k_pool.stride(0),
        k_head=k_pool.stride(1),
        v_page=v_pool.stride(0),
        v_head=v_pool.stride(1),
        n_kv_heads=heads,
        D=dim,
        D8=groups,
        BLOCK_D8=block_size(groups),
        PAGE=size,
        RECORD=record_bytes(dim, size),
    )
