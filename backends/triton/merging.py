"""Merging the splits of one query head, and the final certificate (the reference is ``backends.attention``).

With the merged log-sum-exp ln Z over what was read and ln U over what was not, the pruned mass is at most U / (U + Z);
ln Z is lowered by the rounding it may carry, the quotient rounded up. A learned sink comes last: one more kept term.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from backends.attention.reference import Scoring
from backends.triton.launch import launch
from backends.triton.shapes import DecodeShape, block_size

__all__ = ["Certify", "merge_splits"]


class Certify(NamedTuple):
    """What the merge needs to certify the pruned mass again with the real sum over what was read.

    ``log_pruned`` and ``mass`` float32 (n, H) from the selection, ``key_norm`` float32 (n, n_kv_heads) at least the
    norm of every key read.
    """

    log_pruned: torch.Tensor
    mass: torch.Tensor
    key_norm: torch.Tensor


@triton.jit
def _merge(
    part_ptr,  # float32 (n, H, splits, D)
    lse_ptr,  # float32 (n, H, splits)
    sink_ptr,  # float32 (H,), or None
    out_ptr,  # (n, H, D)
    total_ptr,  # float32 (n, H): the merged lse, learned sink left out
    q_ptr,  # (n, H, D), or None
    log_pruned_ptr,  # float32 (n, H), or None
    mass_ptr,  # float32 (n, H), or None: read and tightened
    norm_ptr,  # float32 (n, n_kv_heads), or None
    length_ptr,  # int32 (n,)
    scale,
    softcap,
    units,
    q_row,
    q_head,
    n_heads,
    splits,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge the partial softmaxes of one query head; certify its pruned mass with the real sum."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    at = row * n_heads + h
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + at * splits + s, mask=s < splits, other=float("-inf"))
    top = tl.max(lse, axis=0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(lse - safe)
    total = tl.sum(weight, axis=0)
    part = tl.load(
        part_ptr + (at * splits + s)[:, None] * D + d[None, :],
        mask=(weight > 0)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    out = tl.sum(part * weight[:, None], axis=0) / tl.where(total == 0, 1.0, total)
    merged = safe + tl.log(total)
    tl.store(total_ptr + at, merged)
    if log_pruned_ptr is not None:
        q = tl.load(q_ptr + row * q_row + h * q_head + d, mask=d < D, other=0.0).to(tl.float32)
        reach = scale * tl.sqrt(tl.sum(q * q, axis=0)) * tl.load(norm_ptr + row * (n_heads // GROUP) + h // GROUP)
        terms = tl.load(length_ptr + row) + 16.0 * splits
        unit = 5.9604644775390625e-08
        slack = reach * units * unit * 1.01 + (terms + 16.0 * tl.log(terms) + 32.0) * unit
        slack += 8.0 * unit * tl.abs(merged) + 32.0 * unit * softcap
        pruned = tl.load(log_pruned_ptr + at)
        gap = merged - slack - pruned
        gap = gap - 8.0 * unit * (tl.abs(merged) + tl.abs(pruned) + tl.abs(gap)) - 16.0 * unit
        mass = 1.0 / (1.0 + tl.exp(gap)) * (1.0 + 16.0 * unit) + 1e-37
        mass = tl.where(mass <= 1.0, mass, 1.0)  # also where it is NaN
        mass = tl.where(pruned == float("-inf"), 0.0, mass)
        tl.store(mass_ptr + at, tl.minimum(mass, tl.load(mass_ptr + at)))
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + h)
        high = tl.maximum(merged, sink)
        high = tl.where(high == float("-inf"), 0.0, high)
        both = tl.exp(merged - high) + tl.exp(sink - high)
        out = out * tl.exp(merged - high) / tl.where(both == 0, 1.0, both)
    tl.store(out_ptr + at * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


def merge_splits(
    part: torch.Tensor,
    part_lse: torch.Tensor,
    query: torch.Tensor,
    scoring: Scoring,
    lengths: torch.Tensor,
    shape: DecodeShape,
    *,
    out_dtype: torch.dtype,
    s_aux: torch.Tensor | None = None,
    certify: Certify | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge partial softmaxes over disjoint tokens.

    Parameters
    ----------
    part : float32 tensor, shape (n, H, splits, D)
        Normalised outputs; not read where the log-sum-exp is minus infinity.
    part_lse : float32 tensor, shape (n, H, splits)
    query : tensor, shape (n, H, D)
        Read only for the certificate.
    scoring : Scoring
    lengths : int32 tensor, shape (n,)
    shape : DecodeShape
    out_dtype : torch.dtype
    s_aux : float32 tensor, shape (H,), optional
        Learned sink logits.
    certify : Certify, optional
        Its ``mass`` is tightened in place.

    Returns
    -------
    out : tensor, shape (n, H, D)
    lse : float32 tensor, shape (n, H)
        The learned sink left out.
    """
    n, n_heads, count, dim = part.shape
    device = part.device
    out = torch.empty((n, n_heads, dim), dtype=out_dtype, device=device)
    lse = torch.empty((n, n_heads), dtype=torch.float32, device=device)
    launch(
        _merge,
        (n, n_heads),
        num_warps=4,
        part_ptr=part,
        lse_ptr=part_lse,
        sink_ptr=s_aux,
        out_ptr=out,
        total_ptr=lse,
        q_ptr=None if certify is None else query,
        log_pruned_ptr=None if certify is None else certify.log_pruned,
        mass_ptr=None if certify is None else certify.mass,
        norm_ptr=None if certify is None else certify.key_norm,
        length_ptr=lengths,
        scale=abs(float(scoring.scale)),
        softcap=float(scoring.softcap or 0.0),
        units=shape.rounding_units,
        q_row=query.stride(0),
        q_head=query.stride(1),
        n_heads=n_heads,
        splits=count,
        GROUP=shape.group,
        D=dim,
        BLOCK_D=block_size(dim),
        SPLITS=block_size(count),
    )
    return out, lse
