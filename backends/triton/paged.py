"""The paged cache through the Triton kernels: the same as :mod:`backends.native.paged` does in C++."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from backends.triton.cache import LayerShadow, seal_pages, write_tokens

if TYPE_CHECKING:
    from backends.kv_cache import PagedKVCache

__all__ = ["seal", "write"]


def write(
    cache: PagedKVCache,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    """Store K and V (n_kv_heads, T, D) of T packed tokens; see :meth:`backends.kv_cache.PagedKVCache.write`."""
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    write_tokens(key, value, cache.k[layer], cache.v[layer], page, offset)


def seal(cache: PagedKVCache, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Quantise full pages in every layer, in one launch; return which have a valid shadow, shape (len(pages),)."""
    layers, total = cache.n_layers, cache.n_pages
    ids = (total * np.arange(layers, dtype=np.int64)[:, None] + pages).reshape(-1)
    good = torch.ones(ids.shape[0], dtype=torch.uint8, device=cache.device)
    shadow = cache.shadow
    seal_pages(
        cache.k.flatten(0, 1),
        cache.v.flatten(0, 1),
        torch.from_numpy(ids).to(cache.device),
        LayerShadow(shadow.record.flatten(0, 1), shadow.low.flatten(0, 1)),
        shadow.value_centre.flatten(0, 1),
        shadow.value_radius.flatten(0, 1),
        good,
    )
    return np.asarray(good.reshape(layers, -1).cpu().numpy().all(axis=0), np.bool_)
