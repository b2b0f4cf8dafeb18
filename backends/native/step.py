"""The attention of every layer of a step in one piece, for the C++ decoder to call (``src/step.cpp``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from backends.native.build import library
from backends.native.paged import AttendResult, AttendRows, Pool, Work, layer_pool, work_of

if TYPE_CHECKING:
    from backends.kv_cache import PagedKVCache

__all__ = ["LayerRule", "LayerRules", "StepAttention"]


class LayerRule(NamedTuple):
    """What a layer asks of its attention.

    Parameters
    ----------
    scale : float
    softcap : float, optional
        Bound of the scores.
    window : int, optional
        Sliding window in tokens.
    sinks : float32 tensor, shape (H,), optional
        Learned sink logits.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None


class _Rule(ctypes.Structure):
    _fields_ = (
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int32),
    )


class LayerRules:
    """What the layers of a model ask of their attention, as C++ reads it.

    Parameters
    ----------
    rules : sequence of LayerRule
        One per layer.

    Attributes
    ----------
    windows : tuple of (int or None)
    """

    def __init__(self, rules: Sequence[LayerRule]) -> None:
        self.windows = tuple(rule.window for rule in rules)
        self._sinks = [rule.sinks for rule in rules]
        places = [None if sinks is None else sinks.data_ptr() for sinks in self._sinks]
        self._array = (_Rule * len(rules))(
            *(
                _Rule(place, rule.scale, rule.softcap or 0.0, rule.window or 0)
                for place, rule in zip(places, rules, strict=True)
            )
        )
        self.address = ctypes.addressof(self._array)

    def prunes(self, first: int) -> list[bool]:
        """Return which layers may prune: those without a window, from ``first`` on."""
        return [layer >= first and window is None for layer, window in enumerate(self.windows)]


class _Layers(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pools", "rules", "page", "offset", "nothing")),
        ("first", ctypes.c_int64),
        ("work", Work),
    )


_POOLS: WeakKeyDictionary[PagedKVCache, dict[bool, ctypes.Array[Pool]]] = WeakKeyDictionary()


def _pools(cache: PagedKVCache, *, shadow: bool) -> ctypes.Array[Pool]:
    """Return the descriptions of a cache's layers, made once."""
    made = _POOLS.setdefault(cache, {})
    if shadow not in made:
        made[shadow] = (Pool * cache.n_layers)(*(layer_pool(cache, i, shadow=shadow) for i in range(cache.n_layers)))
    return made[shadow]


class StepAttention:
    """The attention of one step, for :meth:`run` to do between the layers of a decoder.

    Parameters
    ----------
    cache : PagedKVCache
    query : tensor, shape (H, T, D), any strides with the last 1
        Where every layer's queries will be; keys and values lie (T, n_kv_heads, D), contiguous.
    out : tensor, shape (T, H, D), contiguous
        Where every layer's outputs go.
    rows : AttendRows
    rules : LayerRules
    first : int
        The first layer that may prune.
    page, offset : int64 tensor, shape (T,)
        Where keys and values of the packed tokens go.
    sink_tokens : int
        Leading tokens that layers with a window see besides it.

    Attributes
    ----------
    found : AttendResult, or None if no row is pruned
        Arrays with a leading axis of layers.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        query: torch.Tensor,
        out: torch.Tensor,
        rows: AttendRows,
        rules: LayerRules,
        first: int,
        page: torch.Tensor,
        offset: torch.Tensor,
        *,
        sink_tokens: int = 0,
    ) -> None:
        prunes = rows.prunes and any(rules.prunes(first))
        self.found = None
        if prunes:
            size = (len(rules.windows), rows.length.shape[0])
            read, fine = np.zeros((2, *size, cache.n_kv_heads), np.int32)
            self.found = AttendResult(np.zeros((*size, query.shape[0])), read, fine)
        pools = _pools(cache, shadow=prunes)
        self._alive = (query, out, rows, rules, page, offset, pools)
        self._layers = _Layers(
            ctypes.addressof(pools),
            rules.address,
            page.data_ptr(),
            offset.data_ptr(),
            rows.no_budget.ctypes.data,
            first,
            work_of(cache, query, out, rows, self.found, sink_tokens=sink_tokens, prunes=prunes),
        )

    def run(self, model: ctypes.Structure, step: ctypes.Structure) -> None:
        """Run a decoder (``decoder_abi.Model``, ``decoder_abi.Step``) over the step, attention included."""
        library().entropic_decoder_run(ctypes.byref(model), ctypes.byref(step), ctypes.byref(self._layers))
