"""All decode rows of a step through kernels, one call per layer: in C++ on a CPU, in Triton on a GPU.

The readable version of both is ``backends.attention.pruned``. On a GPU nothing is looked at between layers: what a
layer measured stays on the device until ``PagedBatch.statistics`` asks for it.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from backends.attention.batch import LayerMeasure, PagedBatch
from backends.attention.pruned import audit_rows, output_errors
from backends.attention.reference import Scoring
from backends.native import AttendRows, LayerRules, StepAttention, attend
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["decode_rows", "decodes_together", "run_layers", "runs_at_once"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def decodes_together(paged: PagedBatch, dtype: torch.dtype) -> bool:
    """Return whether the decode rows of a batch go through kernels; if not, row by row through PyTorch."""
    if paged.cache.kernels == "torch" or paged.pruning.selection != "union" or dtype not in _DTYPES:
        return False
    if paged.cache.kernels == "triton" and paged.decoding is not None:
        from backends.triton.selection import MAX_PAGES

        return paged.decoding.table.shape[1] <= MAX_PAGES or not paged.decoding.candidate.any()
    return True


def decode_rows(
    paged: PagedBatch,
    layer: int,
    query: torch.Tensor,
    out: torch.Tensor,
    scoring: Scoring,
    *,
    prunes: bool,
    window: int | None,
    s_aux: torch.Tensor | None,
) -> None:
    """Attend for all rows of one token, in C++ for those of several too; statistics go to ``paged``.

    Parameters
    ----------
    query : tensor, shape (H, T, D)
    out : tensor, shape (T, H, D)
        Receives the rows' outputs.
    prunes : bool
        False reads everything, whatever the budgets.
    window, s_aux
        As :func:`backends.attention.forward.paged_attention` takes them.
    """
    rows = paged.packed if paged.cache.kernels == "native" else paged.decoding
    if rows is None:
        return
    pruned = prunes & (rows.theta_nats > 0)
    paged.record_dense(paged.dense_tokens(rows, window, prunes))
    run = _native if paged.cache.kernels == "native" else _triton
    run(paged, layer, query, out, rows, scoring, pruned, window, s_aux)


def _native(
    paged: PagedBatch,
    layer: int,
    query: torch.Tensor,
    out: torch.Tensor,
    rows: AttendRows,
    scoring: Scoring,
    pruned: npt.NDArray[np.bool_],
    window: int | None,
    s_aux: torch.Tensor | None,
) -> None:
    result = attend(
        paged.cache,
        layer,
        query,
        out,
        rows,
        scoring,
        prunes=bool(pruned.any()),
        window=window,
        sink_tokens=paged.sink_tokens,
        sinks=s_aux,
        want_kept=paged.audit or paged.want_output_error,
    )
    if result is not None and pruned.any():
        mass, error = result.mass[pruned], None
        if result.kept is not None:
            error = _details(paged, layer, query, out, scoring, kept=result.kept[pruned] != 0, mass=mass)
        read, fine = result.read[pruned].mean(axis=1), result.fine[pruned].sum(axis=1)
        paged.record_pages(mass[None], read[None], fine[None], None if error is None else error[None])


def runs_at_once(paged: PagedBatch, dtype: torch.dtype) -> bool:
    """Return whether the C++ decoder may attend by itself in all layers: nothing is asked that only Python does."""
    cache = paged.cache
    plain = not (paged.audit or paged.want_output_error)
    return plain and cache.kernels == "native" and cache.dtype == dtype and decodes_together(paged, dtype)


def run_layers(
    paged: PagedBatch,
    rules: LayerRules,
    query: torch.Tensor,
    out: torch.Tensor,
    model: ctypes.Structure,
    step: ctypes.Structure,
) -> None:
    """Run a whole pass in C++, attention included; statistics go to ``paged``.

    Parameters
    ----------
    rules : LayerRules
    query, out, model, step
        As :class:`backends.native.StepAttention` takes them.
    """
    rows, first = paged.packed, paged.pruning.dense_layers
    attention = StepAttention(
        paged.cache, query, out, rows, rules, first, paged.page, paged.offset, sink_tokens=paged.sink_tokens
    )
    attention.run(model, step)
    pruned = rules.prunes(first)
    kinds = Counter(zip(rules.windows, pruned, strict=True))
    paged.record_dense(sum(n * paged.dense_tokens(rows, *kind) for kind, n in kinds.items()))
    if attention.found is not None:
        at = np.ix_(pruned, rows.theta_nats > 0)
        mass, read, fine = (x[at] for x in (attention.found.mass, attention.found.read, attention.found.fine))
        paged.record_pages(mass, read.mean(axis=2), fine.sum(axis=2), None)


class _DeviceRows(NamedTuple):
    """Some decode rows as ``backends.triton.dispatch.decode`` takes them, and how many pages of each are fixed."""

    token: torch.Tensor
    table: torch.Tensor
    length: torch.Tensor
    candidate: torch.Tensor
    ratio: torch.Tensor
    fixed: torch.Tensor


def _on_device(rows: AttendRows, which: npt.NDArray[np.bool_], paged: PagedBatch) -> _DeviceRows:
    """Copy the rows ``which`` to the device; widths are whole sixteens, so that few kernels are compiled."""
    from backends.triton.dispatch import budget_ratio

    table, candidate = rows.table[which].astype(np.int32), rows.candidate[which]
    used = -(-rows.length[which] // paged.cache.page_tokens)
    fill = ((0, 0), (0, -table.shape[1] % 16))

    def there(x: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(x).to(paged.cache.device)

    return _DeviceRows(
        token=there(rows.token[which]),
        table=there(np.pad(table, fill)),
        length=there(rows.length[which].astype(np.int32)),
        candidate=there(np.pad(candidate, fill)),
        ratio=budget_ratio(torch.from_numpy(rows.theta_nats[which])).to(paged.cache.device),
        fixed=there((used - candidate.sum(axis=1, dtype=np.int64)).astype(np.int32)[:, None]),
    )


def _triton(
    paged: PagedBatch,
    layer: int,
    query: torch.Tensor,
    out: torch.Tensor,
    rows: AttendRows,
    scoring: Scoring,
    pruned: npt.NDArray[np.bool_],
    window: int | None,
    s_aux: torch.Tensor | None,
) -> None:
    """Attend for the pruned rows and for the others, each with one call; rows are laid out once per step."""
    from backends.triton.cache import LayerShadow
    from backends.triton.dispatch import Pruning
    from backends.triton.dispatch import decode as decode_layer

    cache = paged.cache
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    for prunes, which in ((True, pruned), (False, ~pruned)):
        if not which.any():
            continue
        key = "pruned" if prunes else "all" if which.all() else "exact"
        if key not in paged.on_device:
            paged.on_device[key] = _on_device(rows, which, paged)
        mine: _DeviceRows = paged.on_device[key]
        budget = None
        if prunes:
            shadow = LayerShadow(cache.shadow.record[layer], cache.shadow.low[layer])
            budget = Pruning(shadow, mine.ratio, mine.candidate)
        q = query.transpose(0, 1)[mine.token]
        got = decode_layer(
            q,
            cache.k[layer],
            cache.v[layer],
            mine.table,
            mine.length,
            scoring,
            window=window,
            sink_tokens=paged.sink_tokens if window is not None else 0,
            s_aux=sinks,
            pruning=budget,
        )
        out[mine.token] = got.out
        if got.mass is None or got.pages is None or got.refined is None:
            continue
        error = None
        if paged.audit or paged.want_output_error:
            kept = _kept(got.pages.index, got.pages.count)
            mass = got.mass.double().cpu().numpy()
            error = _details(paged, layer, query, out, scoring, kept=kept, mass=mass)
        paged.pending.append(LayerMeasure((got.mass, got.pages.count, got.refined - mine.fixed), error))


def _kept(index: torch.Tensor, count: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Return the lists of pages as a mask (n, n_kv_heads, P)."""
    lists, counts = index.cpu().numpy(), count.cpu().numpy()
    kept = np.zeros(lists.shape, np.bool_)
    for at in np.ndindex(counts.shape):
        kept[at][lists[at][: counts[at]]] = True
    return kept


def _details(
    paged: PagedBatch,
    layer: int,
    query: torch.Tensor,
    out: torch.Tensor,
    scoring: Scoring,
    *,
    kept: npt.NDArray[np.bool_],
    mass: FloatArray,
) -> FloatArray | None:
    """Audit a layer, bound its output errors: (n,), or None; ``kept`` (n, n_kv_heads, P) of the pruned rows."""
    layout = paged.pruned
    columns = np.zeros((*kept.shape[:2], layout.padded.shape[1]), np.bool_)
    pages: IntArray = np.concatenate([paged.rows[r].free for r in layout.rows])
    columns[layout.candidate_row, :, layout.candidate_at] = kept[layout.candidate_row, :, pages]
    if paged.audit:
        audit_rows(paged, layer, query[:, layout.tokens].transpose(0, 1), scoring, kept=columns, mass=mass)
    if paged.want_output_error:
        return output_errors(paged, layer, out[layout.tokens], kept=columns, mass=mass)
    return None
