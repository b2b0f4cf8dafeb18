"""The paged KV cache: fixed-size pages of keys and values, and a quantised shadow of the keys of every full page.

The shadow is what pruning reads instead of the keys. Per page, KV head and channel d it stores 8-bit codes c with

    k_d ~ minimum_d + step_d * c_d,   |k_d - (minimum_d + step_d c_d)| <= error_d      for every token of the page,

``minimum``, ``step`` and ``error`` in float16. The error is *measured* on the page against the step and minimum as
stored, and rounded up, so it holds whatever the rounding of the other two. (Here the minimum is rounded down, the step
up, and codes are taken from the stored values, so half a step would bound it too; with steps rounded to nearest it does
not. The measured error is about 6% smaller on pages of 16 tokens.) *(ours)*
A page with a value that is not finite, or beyond float16, is not sealed; it is then always read.

Slots that no token was written to hold whatever was in memory (NaN included); nothing here or in the attention reads
them. Pools are uninitialised memory, so a large pool costs only the pages used (on a CPU).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from entropic_ctl.errors import BadInputError

if TYPE_CHECKING:
    from backends.attention.batch import PagedBatch

__all__ = ["PagedKVCache", "Shadow", "quantise"]

_HALF_MAX = 65504.0


def _round_up(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round a non-negative float64 tensor up to ``dtype``."""
    near = x.to(dtype)
    return torch.where(near.double() < x, torch.nextafter(near, torch.full_like(near, torch.inf)), near)


class Shadow:
    """Quantised keys and value summaries, one entry per (layer, page, KV head); see the module docstring.

    ``pool`` is the shape of the key pool, (L, pages, n_kv_heads, page_tokens, head_dim).

    Attributes
    ----------
    codes : uint8, (L, pages, n_kv_heads, page_tokens, head_dim)
    step, minimum, error : float16, (L, pages, n_kv_heads, head_dim)
    key_norm : float32, (L, pages, n_kv_heads)
        Largest Euclidean norm of a key of the page, rounded up.
    value_centre : float16, (L, pages, n_kv_heads, head_dim)
    value_radius : float32, (L, pages, n_kv_heads)
        Largest Euclidean distance of a value of the page from the stored centre, rounded up.
    """

    def __init__(self, pool: tuple[int, ...], device: torch.device) -> None:
        head = pool[:3]
        self.codes = torch.empty(pool, dtype=torch.uint8, device=device)
        self.step = torch.empty(*head, pool[-1], dtype=torch.float16, device=device)
        self.minimum = torch.empty_like(self.step)
        self.error = torch.empty_like(self.step)
        self.value_centre = torch.empty_like(self.step)
        self.key_norm = torch.empty(head, dtype=torch.float32, device=device)
        self.value_radius = torch.empty_like(self.key_norm)


def quantise(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise keys to 8 bits per channel over the tokens of a page.

    Parameters
    ----------
    keys : tensor, shape (..., page_tokens, head_dim), any float dtype, finite and within float16's range

    Returns
    -------
    codes : uint8, shape of ``keys``
    step, minimum, error : float16, shape (..., head_dim)
        Error bounds |key - (minimum + step * code)| in exact arithmetic, for every token.
    """
    exact = keys.double()
    low, high = exact.amin(dim=-2), exact.amax(dim=-2)
    minimum = low.to(torch.float16)
    minimum = torch.where(
        minimum.double() > low, torch.nextafter(minimum, torch.full_like(minimum, -torch.inf)), minimum
    )
    span = high - minimum.double()
    step = _round_up(span / 255.0, torch.float16)
    safe = torch.where(step > 0, step, torch.ones_like(step)).double().unsqueeze(-2)
    offset = minimum.double().unsqueeze(-2)
    codes = ((exact - offset) / safe).round().clamp(0.0, 255.0)
    # 24-bit keys against a 19-bit product: float64 leaves at most 2^-52 of the magnitudes, which the factor covers
    residue = (exact - (offset + step.double().unsqueeze(-2) * codes)).abs().amax(dim=-2)
    magnitude = torch.maximum(low.abs(), high.abs()) + span
    error = _round_up(residue + magnitude * 2.0**-50 * (residue > 0), torch.float16)
    return codes.to(torch.uint8), step, minimum, error


class PagedKVCache:
    """Keys and values of all layers in pages of ``page_tokens`` tokens.

    Parameters
    ----------
    n_layers, n_kv_heads, head_dim, pages, page_tokens : int
        All at least 1.
    dtype : torch.dtype
        bfloat16, float16 or float32.
    device : torch.device or str

    Attributes
    ----------
    k, v : tensor, (n_layers, pages, n_kv_heads, page_tokens, head_dim)
    sealed : bool NumPy array, (pages,)
        True for pages that are full and have a valid shadow.

    Raises
    ------
    BadInputError
        If a size is below 1 or the dtype is not supported.
    """

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = {
            "n_layers": n_layers,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "pages": pages,
            "page_tokens": page_tokens,
        }
        for name, size in sizes.items():
            if size < 1:
                raise BadInputError("not a size", where="PagedKVCache", field=name, value=size, allowed=">= 1")
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise BadInputError(
                "unsupported dtype",
                where="PagedKVCache",
                field="dtype",
                value=dtype,
                allowed="bfloat16, float16, float32",
            )
        self.n_layers, self.n_kv_heads, self.head_dim = n_layers, n_kv_heads, head_dim
        self.n_pages, self.page_tokens = pages, page_tokens
        self.dtype, self.device = dtype, torch.device(device)
        shape = (n_layers, pages, n_kv_heads, page_tokens, head_dim)
        try:
            self.k = torch.empty(shape, dtype=dtype, device=self.device)
            self.v = torch.empty(shape, dtype=dtype, device=self.device)
        except (RuntimeError, TypeError, MemoryError):  # torch: out of memory, or more bytes than it can count
            raise BadInputError(
                f"no memory for a KV cache of {2 * math.prod(shape) * dtype.itemsize / 2**30:,.1f} GiB",
                where="PagedKVCache",
                field="pages",
                value=pages,
                remedy="lower engine.pages or engine.page_tokens",
            ) from None
        self.sealed: npt.NDArray[np.bool_] = np.zeros(pages, np.bool_)
        self._shadow: Shadow | None = None

    @property
    def shadow(self) -> Shadow:
        """The shadow, allocated on first use."""
        if self._shadow is None:
            self._shadow = Shadow(tuple(self.k.shape), self.device)
        return self._shadow

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer (all KV heads)."""
        return 2 * self.n_kv_heads * self.head_dim * self.k.element_size()

    @property
    def score_page_bytes(self) -> int:
        """Bytes read to score one sealed page in one layer: codes, step, minimum, error and key norm (all KV heads)."""
        return self.n_kv_heads * (self.page_tokens * self.head_dim + 3 * 2 * self.head_dim + 4)

    @property
    def value_page_bytes(self) -> int:
        """Bytes read to bound the output error of one pruned page in one layer: value centre and radius."""
        return self.n_kv_heads * (2 * self.head_dim + 4)

    @property
    def shadow_overhead(self) -> float:
        """Bytes of shadow per byte of K and V."""
        return (self.score_page_bytes + self.value_page_bytes) / (self.token_bytes * self.page_tokens)

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, page: torch.Tensor, offset: torch.Tensor
    ) -> None:
        """Store K and V of T packed tokens.

        Parameters
        ----------
        layer : int
        key, value : tensor, shape (n_kv_heads, T, head_dim)
        page, offset : int64, shape (T,)
            Page id and slot within the page of each token.
        """
        self.k[layer][page, :, offset] = key.transpose(0, 1).to(self.dtype)
        self.v[layer][page, :, offset] = value.transpose(0, 1).to(self.dtype)

    def seal(self, batch: PagedBatch) -> None:
        """Quantise the pages that the batch's forward pass filled, all layers at once.

        Call it after each forward pass of a loop that prunes. A page that was never sealed is merely read in full.
        """
        self.seal_pages(batch.filled_pages())

    def seal_pages(self, pages: npt.NDArray[np.int64]) -> None:
        """Quantise full pages by id (all ``page_tokens`` slots written in every layer)."""
        for start in range(0, pages.shape[0], 4):  # the float64 workspace stays in cache
            self._seal_some(pages[start : start + 4])

    def _seal_some(self, pages: npt.NDArray[np.int64]) -> None:
        index = torch.from_numpy(np.ascontiguousarray(pages)).to(self.device)
        keys, values, shadow = self.k[:, index], self.v[:, index], self.shadow
        within = (keys.abs() <= _HALF_MAX).all(dim=-1) & (values.abs() <= _HALF_MAX).all(dim=-1)  # False for NaN
        good = within.all(dim=-1).all(dim=-1).all(dim=0)
        if not bool(good.all()):
            index, keys, values = index[good], keys[:, good], values[:, good]
        if index.shape[0] == 0:
            return
        shadow.codes[:, index], shadow.step[:, index], shadow.minimum[:, index], shadow.error[:, index] = quantise(keys)
        grow = 1.0 + (self.head_dim + 8) * 2.0**-52
        shadow.key_norm[:, index] = _round_up(keys.double().norm(dim=-1).amax(dim=-1) * grow, torch.float32)
        exact = values.double()
        centre = exact.mean(dim=-2).to(torch.float16)
        away = (exact - centre.double().unsqueeze(-2)).norm(dim=-1).amax(dim=-1)
        shadow.value_centre[:, index] = centre
        shadow.value_radius[:, index] = _round_up(away * grow, torch.float32)
        self.sealed[index.cpu().numpy()] = True
