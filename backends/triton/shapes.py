"""Shapes the kernels take, checked once; sizes of blocks; the rounding the tensor cores are allowed."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.select import heads_per_group

__all__ = ["DecodeShape", "block_size", "check_decode", "compute_units"]

_ASSUMED_UNITS = 132  # multiprocessors of a Hopper; what ahead-of-time compilation assumes


class DecodeShape(NamedTuple):
    """Sizes of one decode step in one layer: rows, KV heads, query heads per KV head, head size, tokens per page."""

    n: int
    n_kv_heads: int
    group: int
    dim: int
    page_tokens: int

    @property
    def rounding_units(self) -> float:
        """Rounding of a product of ``dim`` terms, in units of 2^-24 per sum of |q_d k_d|.

        An fp32 dot product is off by at most dim + 6 units in any order. For tensor cores this is an assumption about
        hardware whose arithmetic the vendor does not document: that they add exact products of 16-bit numbers, cut
        partial sums off instead of rounding them (2 units per term), and align terms to the largest before adding
        with no more loss than that (2 more). Fasi et al. (Numerical behavior of NVIDIA tensor cores, PeerJ Computer
        Science 7:e330, 2021) describe experiments of this kind on V100, T4 and A100, not on Hopper.
        """
        return 4.0 * (self.dim + 6)


def block_size(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


@functools.cache
def compute_units(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _ASSUMED_UNITS


def check_decode(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    window: int | None,
    listed: bool,
) -> DecodeShape:
    """Return the sizes of a decode step.

    Raises
    ------
    BadInputError
        If shapes, dtypes or layouts are not what the kernels read.
    """
    n, n_heads, dim = query.shape
    heads, size = k_pool.shape[1:3]
    group = heads_per_group(n_heads, heads)
    if k_pool.shape[3] != dim or v_pool.shape != k_pool.shape:
        raise BadInputError(
            "keys or values do not fit the queries",
            field="k_pool, v_pool",
            value=(tuple(k_pool.shape), tuple(v_pool.shape)),
            allowed=f"(pages, n_kv_heads, page_tokens, {dim})",
        )
    if size & (size - 1):
        raise BadInputError(
            "the kernels need a power of two",
            field="page_tokens",
            value=size,
            allowed="16, 32, 64, ...",
            remedy="set engine.page_tokens",
        )
    if k_pool.stride(3) != 1 or v_pool.stride(3) != 1:
        raise BadInputError("the pools must be contiguous along the head size", field="k_pool, v_pool")
    if table.dtype != torch.int32 or lengths.dtype != torch.int32 or table.stride(1) != 1:
        raise BadInputError(
            "block table and lengths are int32 on the device",
            field="table, lengths",
            value=(table.dtype, lengths.dtype),
            allowed="torch.int32, rows contiguous",
        )
    if table.shape[0] != n or lengths.shape != (n,):
        raise BadInputError(
            "shapes disagree",
            field="table, lengths",
            value=(tuple(table.shape), tuple(lengths.shape)),
            allowed=f"({n}, P), ({n},)",
        )
    if listed and window is not None:
        raise BadInputError("a page list leaves no window to apply", field="window", value=window, allowed="None")
    return DecodeShape(n, heads, group, dim, size)
