"""The metadata of one packed forward pass, and what its attention layers measured.

Rows of a step (prefill chunks and decode tokens of different requests) are packed along one axis without padding: the
model sees input ids of shape (1, T), and each attention layer finds here which tokens belong to which request, where
their pages are, and how much each may lose.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from backends.attention.precision import require_full_float32
from backends.attention.rows import PrunedRows, Row
from backends.kv_cache import PagedKVCache
from backends.native import AttendRows
from entropic_ctl.errors import BadInputError, EntropicError
from entropic_ctl.pruning.base import PruningConfig
from entropic_ctl.pruning.certificate import kl_nats
from entropic_ctl.signals import FloatArray, IntArray, StepPlan

__all__ = ["AttentionStatistics", "LayerAudit", "LayerMeasure", "PagedBatch"]


@dataclass(frozen=True, slots=True)
class AttentionStatistics:
    """What the attention of one forward pass read and lost.

    Parameters
    ----------
    kept_fraction : FloatArray, shape (R,)
        Share of (KV head, page) pairs read, mean over the pruned layers; 1 for rows that were not pruned.
    pruned_mass_mean, pruned_mass_max : FloatArray, shape (R,)
        Certified upper bounds on the softmax mass lost: mean and maximum over (pruned layer, query head).
    certificate_max : FloatArray, shape (R,)
        Largest certified -ln(1 - m) over pruned layers and query heads, nats.
    kv_bytes : float
        KV-cache bytes read, all rows and layers: K and V in full where dense; codes, metadata and kept pages where
        pruned.
    output_error_max : FloatArray, shape (R,)
        Largest certified Euclidean error of a head's output; 0 unless ``PagedBatch.want_output_error``.
    pruned_layers : IntArray, shape (R,)
        Layers in which the row was pruned.
    pruned_bytes : FloatArray, shape (R,)
        The part of ``kv_bytes`` that the row read in those layers.
    """

    kept_fraction: FloatArray
    pruned_mass_mean: FloatArray
    pruned_mass_max: FloatArray
    certificate_max: FloatArray
    kv_bytes: float
    output_error_max: FloatArray
    pruned_layers: IntArray
    pruned_bytes: FloatArray


@dataclass(frozen=True, slots=True)
class LayerAudit:
    """True (dense, float64, same cache) against certified, one row and pruned layer.

    ``true_mass`` and ``certified_mass`` have shape (H,), ``kept`` is the bool mask (n_kv_heads, P) of the pages read.
    """

    layer: int
    row: int
    true_mass: FloatArray
    certified_mass: FloatArray
    kept: npt.NDArray[np.bool_]


class LayerMeasure(NamedTuple):
    """What one pruned layer read and lost, left on the device, n pruned rows in order.

    ``tensors``: mass (n, H), pages read and low planes read, both (n, n_kv_heads); ``output_error`` (n,) on the host.
    """

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    output_error: FloatArray | None


@dataclass
class PagedBatch:
    """Metadata of one packed forward pass; make it with :meth:`from_plan`.

    Parameters
    ----------
    cache : PagedKVCache
    pruning : PruningConfig
    packed : AttendRows
        All rows, on the host. A row may be pruned if its budget is positive; then ``candidate`` marks its full, sealed,
        unprotected pages.
    page, offset : int64 tensor, shape (T,)
        Where the K and V of each packed token go.
    positions : int64 tensor, shape (T,)
        Position of each token in its own sequence (``position_ids`` of the model).
    last_index : int64 tensor, shape (M,)
        Packed index of the last token of each sampling row, and of the ``n_draft`` before it where the row verifies
        drafted tokens (``logits_to_keep`` of the model).
    sink_tokens : int
        Leading tokens that sliding-window layers see besides their window.
    audit, want_output_error : bool
        Also record the true pruned masses (slow; tests and audits); also bound the output error.
    audits : list of LayerAudit
        What ``audit`` recorded.
    pending : list of LayerMeasure
        What layers left on the device and :meth:`statistics` has not read.
    on_device : dict
        The decode rows as the Triton kernels take them, kept by ``backends.attention.decoding``.
    layer_calls : int
        Attention layers that ran on the batch so far.
    """

    cache: PagedKVCache
    pruning: PruningConfig
    packed: AttendRows
    page: torch.Tensor
    offset: torch.Tensor
    positions: torch.Tensor
    last_index: torch.Tensor
    sink_tokens: int = 0
    audit: bool = False
    want_output_error: bool = False
    audits: list[LayerAudit] = field(default_factory=list)
    pending: list[LayerMeasure] = field(default_factory=list)
    on_device: dict[str, Any] = field(default_factory=dict)
    layer_calls: int = 0

    def __post_init__(self) -> None:
        self._dense_bytes = 0
        n = self.packed.length.shape[0]
        self._kept, self._pruned_bytes = np.zeros(n), np.zeros(n)
        self._mass_sum, self._mass_max, self._error_max = np.zeros(n), np.zeros(n), np.zeros(n)
        self._layers = np.zeros(n, np.int64)
        self._dense: dict[tuple[int | None, bool], int] = {}

    @classmethod
    def from_plan(cls, plan: StepPlan, cache: PagedKVCache, pruning: PruningConfig) -> PagedBatch:
        """Build the metadata of the plan's rows, in plan order.

        Pruning applies to decode rows (one token, sampled) with ``theta_nats`` > 0. Sink pages, recent pages, and pages
        without a valid shadow are protected.

        Raises
        ------
        BadInputError
            If a row's pages lie outside the cache, a row has no tokens, or pruning is asked for while torch computes
            float32 products in reduced precision.
        """
        if (plan.theta_nats > 0).any():
            require_full_float32()
        size, device = cache.page_tokens, cache.device
        span, lengths = plan.n_tokens, plan.context + plan.n_tokens
        n_pages = -(-lengths // size)
        table = _page_table(plan, n_pages, cache)
        column = np.arange(table.shape[1])
        stops = np.cumsum(span)
        positions = np.arange(span.sum()) + np.repeat(lengths - stops, span)
        page = table[np.repeat(np.arange(plan.n_rows), span), positions // size]
        cache.sealed[page] = False  # they are being written
        theta = np.where((span == 1) & plan.samples, plan.theta_nats, 0.0)
        candidate = np.zeros(table.shape, np.bool_)
        if theta.any():
            candidate = cache.sealed[table] & (column < (n_pages - pruning.recent_pages)[:, None])
            candidate[:, : pruning.sink_pages] = False
            candidate[theta <= 0.0] = False
            theta[~candidate.any(axis=1)] = 0.0
        shown = plan.n_draft[plan.samples] + 1
        ahead = np.arange(shown.sum()) - np.repeat(np.cumsum(shown), shown)  # -1 at a row's last position
        last = np.repeat(stops[plan.samples], shown) + ahead
        rows = AttendRows(stops - span, lengths, span, table, candidate.view(np.uint8), theta)
        places = (torch.from_numpy(part).to(device) for part in (page, positions % size, positions, last))
        return cls(cache, pruning, rows, *places)

    @cached_property
    def rows(self) -> list[Row]:
        """The rows one by one, for what does not take them all at once."""
        packed, size = self.packed, self.cache.page_tokens
        spans = zip(packed.token.tolist(), packed.span.tolist(), packed.length.tolist(), strict=True)
        return [
            Row(
                start,
                start + n,
                length - n,
                length,
                packed.table[r, : -(-length // size)],
                float(packed.theta_nats[r]),
                np.flatnonzero(packed.candidate[r]),
                self.cache.device,
            )
            for r, (start, n, length) in enumerate(spans)
        ]

    @cached_property
    def pruned(self) -> PrunedRows:
        """The rows that are pruned, laid out for one pass over all of them."""
        return PrunedRows.of(self.rows, self.cache.page_tokens)

    @cached_property
    def decoding(self) -> AttendRows | None:
        """The rows that run one token, on the host; None if there are none."""
        rows, one = self.packed, self.packed.span == 1
        if not one.any():
            return None
        width = -(-int(rows.length[one].max()) // self.cache.page_tokens)
        table, candidate = (np.ascontiguousarray(part[one, :width]) for part in (rows.table, rows.candidate))
        return AttendRows(rows.token[one], rows.length[one], rows.span[one], table, candidate, rows.theta_nats[one])

    def dense_tokens(self, rows: AttendRows, window: int | None, prunes: bool) -> int:
        """Return the tokens that the rows without a budget read in one layer; all rows unless it ``prunes``."""
        key = window, prunes and rows.prunes
        if key not in self._dense:
            tokens = rows.length
            if window is not None:
                tokens = np.minimum(tokens, rows.span - 1 + window + self.sink_tokens)
            self._dense[key] = int((tokens[rows.theta_nats <= 0] if key[1] else tokens).sum())
        return self._dense[key]

    @property
    def n_tokens(self) -> int:
        """Packed tokens T."""
        return int(self.page.shape[0])

    @property
    def cu_tokens(self) -> IntArray:
        """Row boundaries in the packed axis, shape (R + 1,)."""
        return np.concatenate([[0], np.cumsum(self.packed.span)])

    def run(self, network: Any, tokens: torch.Tensor) -> torch.Tensor:
        """Run a model over this pass: every caller's one way to do it.

        Parameters
        ----------
        network : transformers decoder
            With the paged attention set (:func:`backends.attention.register`).
        tokens : int64 tensor of T elements
            Packed tokens of all rows.

        Returns
        -------
        tensor, shape (M, n), dtype of the model
            Raw logits at ``last_index``: of the sampling rows, in row order.

        Raises
        ------
        EntropicError
            If a layer did not go through the paged cache: the logits would be wrong.
        """
        running = RUNNING.set(self)
        try:
            logits: torch.Tensor = network(
                input_ids=tokens.reshape(1, -1),
                position_ids=self.positions[None],
                use_cache=False,
                logits_to_keep=self.last_index,
                paged=self,
            ).logits
        finally:
            RUNNING.reset(running)
        layers = self.cache.n_layers
        if self.layer_calls == 0:
            raise EntropicError("the model's attention was switched away from the paged one while an engine used it")
        if self.layer_calls != layers:
            raise EntropicError(
                f"{self.layer_calls} of {layers} layers of the model used the paged cache: its outputs would be wrong"
            )
        return logits[0]

    def filled_pages(self, lengths: IntArray | None = None) -> IntArray:
        """Return the ids of pages whose last slot this pass wrote.

        Parameters
        ----------
        lengths : IntArray, shape (R,), optional
            Tokens of each row that stay in the cache, where drafts were rejected: pages past them are not full.
        """
        size, rows = self.cache.page_tokens, self.packed
        ends = rows.length if lengths is None else np.minimum(rows.length, lengths)
        column = np.arange(rows.table.shape[1])
        return rows.table[(column >= ((rows.length - rows.span) // size)[:, None]) & (column < (ends // size)[:, None])]

    @property
    def kv_bytes(self) -> float:
        """KV-cache bytes read so far."""
        self._settle()
        return float(self._dense_bytes + self._pruned_bytes.sum())

    def record_dense(self, tokens: int) -> None:
        """Account for reading K and V of ``tokens`` tokens in one layer."""
        self._dense_bytes += tokens * self.cache.token_bytes

    def record_pages(
        self, mass: FloatArray, pages: FloatArray, low_planes: IntArray, output_error: FloatArray | None
    ) -> None:
        """Account for pruned layers by pages: as :meth:`record_pruned`, ``pages`` (L, n) read, mean over KV heads."""
        length, size = self.packed.length[self.packed.theta_nats > 0.0], self.cache.page_tokens
        total = -(-length // size)
        read = length - size * (total - pages)
        self.record_pruned(pages / total, mass, read, low_planes, output_error)

    def _settle(self) -> None:
        """Bring what the layers left on the device to the host, in one copy, and account for it."""
        if not self.pending:
            return
        layers, self.pending = self.pending, []
        parts = [torch.stack(part).double() for part in zip(*(layer.tensors for layer in layers), strict=True)]
        host = torch.cat([part.flatten(1) for part in parts], dim=1).cpu().numpy()
        widths = np.cumsum([part[0].numel() for part in parts])[:-1]
        mass, read, fine = (
            flat.reshape(part.shape) for flat, part in zip(np.split(host, widths, axis=1), parts, strict=True)
        )
        errors = [layer.output_error for layer in layers if layer.output_error is not None]
        self.record_pages(
            mass, read.mean(axis=2), fine.sum(axis=2).astype(np.int64), np.stack(errors) if errors else None
        )

    def record_pruned(
        self,
        kept: FloatArray,
        mass: FloatArray,
        read_tokens: FloatArray,
        low_planes: IntArray,
        output_error: FloatArray | None,
    ) -> None:
        """Account for L pruned layers of all n rows in :attr:`pruned`.

        ``kept`` (L, n) share of (KV head, page) pairs read, ``mass`` (L, n, H), ``read_tokens`` (L, n) tokens whose K
        and V were read, mean over KV heads, ``low_planes`` (L, n) read, all KV heads, ``output_error`` (L, n).
        """
        index = np.flatnonzero(self.packed.theta_nats > 0.0)
        candidates = self.packed.candidate[index].sum(axis=1, dtype=np.int64)
        per_page = self.cache.score_page_bytes + (self.cache.value_page_bytes if output_error is not None else 0)
        looked = candidates * per_page + low_planes * self.cache.low_page_bytes
        self._pruned_bytes[index] += (read_tokens * self.cache.token_bytes + looked).sum(axis=0)
        self._kept[index] += kept.sum(axis=0)
        self._layers[index] += mass.shape[0]
        self._mass_sum[index] += mass.mean(axis=2).sum(axis=0)
        self._mass_max[index] = np.maximum(self._mass_max[index], mass.max(axis=(0, 2)))
        if output_error is not None:
            self._error_max[index] = np.maximum(self._error_max[index], output_error.max(axis=0))

    def statistics(self) -> AttentionStatistics:
        """Return what has been recorded since construction; call it after the forward pass.

        Layers on a GPU leave what they measured there: this is the one place where the host waits for it.
        """
        self._settle()
        layers = np.maximum(self._layers, 1)
        return AttentionStatistics(
            kept_fraction=np.where(self._layers > 0, self._kept / layers, 1.0),
            pruned_mass_mean=self._mass_sum / layers,
            pruned_mass_max=self._mass_max.copy(),
            certificate_max=kl_nats(self._mass_max),
            kv_bytes=self.kv_bytes,
            output_error_max=self._error_max.copy(),
            pruned_layers=self._layers.copy(),
            pruned_bytes=self._pruned_bytes.copy(),
        )


RUNNING: ContextVar[PagedBatch | None] = ContextVar("RUNNING", default=None)
"""The batch of the pass that runs, for decoders whose layers drop the keyword on its way to the attention."""


def _page_table(plan: StepPlan, n_pages: IntArray, cache: PagedKVCache) -> IntArray:
    """Return the page ids of all rows, int64 (R, P), 0 past a row's last page; refuse rows that cannot run."""
    if (plan.n_tokens < 1).any():
        r = int(np.argmax(plan.n_tokens < 1))
        raise BadInputError(
            "a row without tokens",
            where=f"request {plan.ids[r]}",
            field="n_tokens",
            value=int(plan.n_tokens[r]),
            allowed=">= 1",
        )
    width, most = plan.block_table.shape[1], int(n_pages.max(initial=0))
    if most > width:
        r = int(np.argmax(n_pages > width))
        raise BadInputError(
            "block table too short",
            where=f"request {plan.ids[r]}",
            field="block_table",
            value=f"{width} pages",
            allowed=f"{n_pages[r]} pages for {plan.context[r] + plan.n_tokens[r]} tokens",
        )
    used = np.arange(most) < n_pages[:, None]
    table = np.zeros(used.shape, np.int64)
    table[used] = plan.block_table[plan.slots, :most][used]
    if table.min(initial=0) < 0 or table.max(initial=0) >= cache.n_pages:
        r = int(np.argmax(((table < 0) | (table >= cache.n_pages)).any(axis=1)))
        raise BadInputError(
            "page id outside the cache",
            where=f"request {plan.ids[r]}",
            field="block_table",
            value=(int(table[r].min()), int(table[r].max())),
            allowed=f"[0, {cache.n_pages - 1}]",
        )
    return table
