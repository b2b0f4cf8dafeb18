"""The paged cache and its decode attention through the C++ kernels: same results as the PyTorch versions.

Every function works on the tensors' own memory; the structures mirror ``src/attention.h`` field by field.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from backends.native.build import library

if TYPE_CHECKING:
    from backends.kv_cache import PagedKVCache
    from entropic_ctl.signals import FloatArray, IntArray

__all__ = [
    "MAX_HEAD_DIM",
    "AttendResult",
    "AttendRows",
    "Pool",
    "Work",
    "attend",
    "layer_pool",
    "seal",
    "work_of",
    "write",
]

MAX_HEAD_DIM = 256
"""Widest head the kernels hold."""

_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_POINTERS = "out token length span table theta candidate sinks mass read fine kept lse"


class Pool(ctypes.Structure):
    """One layer of a cache."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("k", "v", "record", "low")),
        *((name, ctypes.c_int64) for name in ("record_bytes", "record_page", "record_head")),
        *((name, ctypes.c_int32) for name in ("heads", "page", "dim", "dtype")),
    )


class Work(ctypes.Structure):
    """The rows of one step in one layer, and where their results go."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("query_token", ctypes.c_int64),
        ("query_head", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _POINTERS.split()),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rows", "group", "query_dtype", "window", "sink_tokens", "threads")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


def _layer(pool: torch.Tensor, layer: int) -> int:
    place: int = pool.data_ptr() + layer * pool.stride(0) * pool.element_size()
    return place


def layer_pool(cache: PagedKVCache, layer: int, *, shadow: bool) -> Pool:
    """Describe one layer of a cache, with its shadow or without."""
    record = low = None
    size = page = head = 0
    if shadow:
        record, low = _layer(cache.shadow.record, layer), _layer(cache.shadow.low, layer)
        size = cache.shadow.record.shape[-1]
        _, page, head, _ = cache.shadow.record.stride()
    return Pool(
        _layer(cache.k, layer),
        _layer(cache.v, layer),
        record,
        low,
        size,
        page,
        head,
        cache.n_kv_heads,
        cache.page_tokens,
        cache.head_dim,
        _DTYPES[cache.dtype],
    )


@functools.cache
def _write() -> Any:
    function = library().entropic_write
    at, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    function.argtypes = [at, at, at, at, at, at, i64, i32, i32, i32, i32, i64, i64, i64, i64]
    function.restype = None
    return function


def write(
    cache: PagedKVCache,
    layer: int,
    key: torch.Tensor,
    value: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    """Store K and V (n_kv_heads, T, D) of T packed tokens; see :meth:`backends.kv_cache.PagedKVCache.write`."""
    if not key.dtype == value.dtype == cache.dtype or key.stride(2) != 1 or value.stride(2) != 1:
        key, value = key.to(cache.dtype).contiguous(), value.to(cache.dtype).contiguous()
    _write()(
        _layer(cache.k, layer),
        _layer(cache.v, layer),
        key.data_ptr(),
        value.data_ptr(),
        page.data_ptr(),
        offset.data_ptr(),
        page.shape[0],
        cache.n_kv_heads,
        cache.page_tokens,
        cache.head_dim,
        cache.k.element_size(),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
    )


def seal(cache: PagedKVCache, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Quantise full pages in every layer; return which have a valid shadow, shape (len(pages),)."""
    ids, good = np.ascontiguousarray(pages, np.int64), np.zeros(pages.shape[0], np.uint8)
    shadow, at = cache.shadow, ctypes.c_void_p
    library().entropic_seal(
        ctypes.byref(layer_pool(cache, 0, shadow=True)),
        ctypes.c_int64(cache.n_layers),
        ctypes.c_int64(cache.n_pages),
        at(ids.ctypes.data),
        ctypes.c_int64(ids.shape[0]),
        at(shadow.value_centre.data_ptr()),
        at(shadow.value_radius.data_ptr()),
        at(good.ctypes.data),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return good.astype(np.bool_)


@dataclass(frozen=True, eq=False)
class AttendRows:
    """The n rows of a step; row i runs ``span[i]`` tokens, each of which sees those up to itself.

    Parameters
    ----------
    token, length, span : int64 array, shape (n,)
        Place of the row's first query in the packed axis; tokens cached, its own included; query tokens.
    table : int64 array, shape (n, P)
        Page ids, any number past the row's last page.
    candidate : uint8 array, shape (n, P)
        1 where a page may be left out.
    theta_nats : FloatArray, shape (n,)
        Budgets; 0 where ``span`` is not 1.
    """

    token: IntArray
    length: IntArray
    span: IntArray
    table: IntArray
    candidate: npt.NDArray[np.uint8]
    theta_nats: FloatArray

    @functools.cached_property
    def prunes(self) -> bool:
        """True if a row has a budget."""
        return bool((self.theta_nats > 0).any())

    @functools.cached_property
    def no_budget(self) -> FloatArray:
        """Zeros in place of the budgets."""
        return np.zeros_like(self.theta_nats)

    @functools.cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where the arrays lie: token, length, span, table, budgets, no budgets, candidates."""
        arrays = self.token, self.length, self.span, self.table, self.theta_nats, self.no_budget, self.candidate
        return tuple(int(x.ctypes.data) for x in arrays)


@dataclass(frozen=True, slots=True)
class AttendResult:
    """What one layer read and lost, rows in the order of :class:`AttendRows`; entries of exact rows are 0.

    Of a whole step, the arrays have a leading axis of layers, and neither ``kept`` nor ``lse`` is there.

    Parameters
    ----------
    mass : FloatArray, shape (n, H)
        Certified softmax mass of the pages not read.
    read, fine : int32 array, shape (n, n_kv_heads)
        Pages whose K and V were read; pages whose low plane was.
    kept : uint8 array, shape (n, n_kv_heads, P), or None
    lse : float32 array, shape (n, H), or None
    """

    mass: FloatArray
    read: npt.NDArray[np.int32]
    fine: npt.NDArray[np.int32]
    kept: npt.NDArray[np.uint8] | None = None
    lse: npt.NDArray[np.float32] | None = None

    def addresses(self) -> tuple[int | None, ...]:
        """Where the arrays lie, in the order of the fields."""
        arrays = self.mass, self.read, self.fine, self.kept, self.lse
        return tuple(None if x is None else x.ctypes.data for x in arrays)


def attend(
    cache: PagedKVCache,
    layer: int,
    query: torch.Tensor,
    out: torch.Tensor,
    rows: AttendRows,
    scoring: Any,
    *,
    prunes: bool,
    window: int | None = None,
    sink_tokens: int = 0,
    sinks: torch.Tensor | None = None,
    want_kept: bool = False,
) -> AttendResult | None:
    """Attend for the new tokens of each row. What a token gets depends on neither the cut of its row nor other rows.

    Parameters
    ----------
    query : tensor, shape (H, T, D), any strides with the last 1
    out : tensor, shape (T, H, D), contiguous, dtype of ``query``
        Receives the rows' outputs.
    scoring : backends.attention.reference.Scoring
    prunes : bool
        False reads everything, whatever the budgets.
    window, sink_tokens : int, optional
        A sliding window in tokens and the leading tokens seen besides it; such a layer is never pruned.
    sinks : tensor, shape (H,), optional
        Learned sink logits.
    want_kept : bool
        Also return which pages were read.

    Returns
    -------
    AttendResult, or None if no row was pruned and ``want_kept`` is false
    """
    if query.stride(2) != 1:
        query = query.contiguous()
    n, heads = rows.length.shape[0], cache.n_kv_heads
    n_heads, pages = query.shape[0], rows.table.shape[1]
    prunes = prunes and rows.prunes
    found = None
    if prunes or want_kept:
        kept = np.zeros((n, heads, pages), np.uint8) if want_kept else None
        read, fine = np.zeros((2, n, heads), np.int32)
        found = AttendResult(np.zeros((n, n_heads)), read, fine, kept, np.empty((n, n_heads), np.float32))
    logits = None if sinks is None else sinks.detach().to("cpu", torch.float32).contiguous()
    work = work_of(cache, query, out, rows, found, sink_tokens=sink_tokens, prunes=prunes)
    work.sinks = None if logits is None else logits.data_ptr()
    work.window, work.scale, work.softcap = window or 0, scoring.scale, scoring.softcap or 0.0
    pool = layer_pool(cache, layer, shadow=prunes)
    library().entropic_attend(ctypes.byref(pool), ctypes.byref(work))
    return found


def work_of(
    cache: PagedKVCache,
    query: torch.Tensor,
    out: torch.Tensor,
    rows: AttendRows,
    found: AttendResult | None,
    *,
    sink_tokens: int,
    prunes: bool,
) -> Work:
    """Describe the work of one layer, its scale, window and sink logits left to set; arguments as :func:`attend`'s."""
    token, length, span, table, budget, nothing, candidate = rows.addresses
    return Work(
        query.data_ptr(),
        query.stride(1),
        query.stride(0),
        out.data_ptr(),
        token,
        length,
        span,
        table,
        budget if prunes else nothing,
        candidate,
        None,
        *((None,) * 5 if found is None else found.addresses()),
        rows.table.shape[1],
        rows.length.shape[0],
        query.shape[0] // cache.n_kv_heads,
        _DTYPES[query.dtype],
        0,
        sink_tokens,
        torch.get_num_threads(),
        0.0,
        0.0,
    )
