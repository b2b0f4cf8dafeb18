"""The attention of every layer of a step in one piece, for the C++ decoder to call (``src/step.cpp``)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from backends.native.build import library
from backends.native.paged import AttendResult, AttendRows, Pool, Work, layer_pool, work_of

if TYPE_CHECKING:
    from backends.kv_cache import PagedKVCache

__all__ = ["LayerRule", "StepAttention"]


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
    prunes : bool
        False reads everything, whatever the budgets.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None
    prunes: bool = False


class _Rule(ctypes.Structure):
    _fields_ = (
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int32),
        ("prunes", ctypes.c_int32),
    )


@functools.lru_cache(maxsize=16)
def _rules(rules: tuple[LayerRule, ...]) -> ctypes.Array[_Rule]:
    return (_Rule * len(rules))(
        *(
            _Rule(
                None if rule.sinks is None else rule.sinks.data_ptr(),
                rule.scale,
                rule.softcap or 0.0,
                rule.window or 0,
                rule.prunes,
            )
            for rule in rules
        )
    )


class _Layers(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pools", "rules", "page", "offset", "nothing")),
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
    rules : sequence of LayerRule
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
        rules: Sequence[LayerRule],
        page: torch.Tensor,
        offset: torch.Tensor,
        *,
        sink_tokens: int = 0,
    ) -> None:
        prunes = rows.prunes and any(rule.prunes for rule in rules)
        self.found = None
        if prunes:
            size = (len(rules), rows.length.shape[0])
            read, fine = np.zeros((2, *size, cache.n_kv_heads), np.int32)
            self.found = AttendResult(np.zeros((*size, query.shape[0])), read, fine)
        self._alive = (query, out, rows, rules, page, offset, _rules(tuple(rules)), _pools(cache, shadow=prunes))
        self._layers = _Layers(
            ctypes.addressof(self._alive[-1]),
            ctypes.addressof(self._alive[-2]),
            page.data_ptr(),
            offset.data_ptr(),
            rows.no_budget.ctypes.data,
            work_of(cache, query, out, rows, self.found, sink_tokens=sink_tokens, prunes=prunes),
        )

    def run(self, model: ctypes.Structure, step: ctypes.Structure) -> None:
        """Run a decoder (``decoder_abi.Model``, ``decoder_abi.Step``) over the step, attention included."""
        library().entropic_decoder_run(ctypes.byref(model), ctypes.byref(step), ctypes.byref(self._layers))
