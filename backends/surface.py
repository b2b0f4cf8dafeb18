"""What every budget would cost at every position of a text: a response surface, measured once, teacher-forced.

The text is prefilled exactly. Then positions are decoded under each budget of a ladder and dense, all in one pass of
the engine's own attention over the same cached pages; only the position's own key and value are each row's own, on a
copy of the page they fall in. So a difference between rows is the effect of this step's pruning alone, and any rule
that picks budgets from the ladder is afterwards a choice from the table: the policies compared see the same positions,
the same cache and the same noise *(ours)*.

The cache is bfloat16 as in an engine, whatever the dtype of the model, and bytes are what its attention counts: both
looks at the shadow, and the pages kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from backends.attention import PagedBatch, register
from backends.attention.rows import rows_plan
from backends.audit import kl_nats
from backends.kv_cache import PagedKVCache
from backends.models import LoadedModel
from backends.pieces import Arrays
from backends.sampling import TorchLogitView, to_host
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["SurfaceReader"]

_CHUNK, _ROWS = 512, 64
"""Tokens of a prefill pass, rows of a decode pass."""


class SurfaceReader:
    """One text, prefilled exactly, whose positions can be measured under any budgets.

    Parameters
    ----------
    model : LoadedModel
        Its attention implementation is switched to the paged one, and stays so.
    text : sequence of int
    page_tokens : int
    pruning : PruningConfig, optional
        Protected pages, dense layers, selection.

    Raises
    ------
    BadInputError
        If the text is longer than the model's context, or shorter than 2 tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        text: Sequence[int],
        *,
        page_tokens: int = 16,
        pruning: PruningConfig | None = None,
    ) -> None:
        if not 2 <= len(text) <= model.max_context:
            raise BadInputError(
                "text of an impossible length", field="text", value=len(text), allowed=f"[2, {model.max_context}]"
            )
        model.model.set_attn_implementation(register())
        self._model, self._page, self._rule = model, page_tokens, pruning or PruningConfig()
        self._ids = torch.tensor(list(text), dtype=torch.long, device=model.model.device)
        self._text_pages = -(-len(text) // page_tokens)
        shape, pages = model.shape, self._text_pages + _ROWS
        self._cache = PagedKVCache(
            shape.layers, shape.kv_heads, shape.head_dim, pages, page_tokens, torch.bfloat16, self._ids.device
        )

    @torch.inference_mode()
    def prefill(self, first: int) -> Arrays:
        """Read the whole text; return the dense model's signals from position ``first`` on, each float64 (N - first,).

        ``entropy``, ``varentropy`` of the decode step at the position, ``top`` (its largest probability) and
        ``surprise``, the negative log-likelihood of the token that follows (NaN at the end of the text).
        """
        n, pages = self._ids.shape[0], np.arange(self._text_pages, dtype=np.int32)[None]
        found: dict[str, list[FloatArray]] = {"entropy": [], "varentropy": [], "top": [], "surprise": []}
        for start in range(0, n, _CHUNK):
            stop = min(start + _CHUNK, n)
            shown = stop - min(max(first, start), stop - 1)
            plan = rows_plan(np.array([start]), pages, n_tokens=stop - start, shown=shown)
            batch = PagedBatch.from_plan(plan, self._cache, self._rule)
            logits = batch.run(self._model.model, self._ids[start:stop]).float()
            self._cache.seal(batch)
            if stop > first:
                entropy, varentropy = TorchLogitView(logits).at(np.ones(logits.shape[0]))
                found["entropy"].append(np.asarray(entropy, np.float64))
                found["varentropy"].append(np.asarray(varentropy, np.float64))
                log_p = torch.log_softmax(logits, -1)
                found["top"].append(to_host(log_p.amax(-1).exp()))
                following = self._ids[stop - logits.shape[0] + 1 : stop + 1]
                lost = torch.full((logits.shape[0],), torch.nan, device=logits.device)
                lost[: following.shape[0]] = -log_p[torch.arange(following.shape[0]), following]
                found["surprise"].append(to_host(lost))
        return {name: np.concatenate(parts) for name, parts in found.items()}

    @torch.inference_mode()
    def measure(self, start: int, count: int, thetas: Sequence[float]) -> Arrays:
        """Decode the tokens at ``start .. start + count`` under every budget; :meth:`prefill` comes first.

        Parameters
        ----------
        start, count : int
            Positions, the next token of the last one inside the text.
        thetas : sequence of A floats
            Budgets > 0, nats.

        Returns
        -------
        dict of float64 (count, A)
            ``kl`` of the next token's distribution from the dense one, ``nll`` change of the next token's negative
            log-likelihood (nats), ``kept`` share of pages read in the pruned layers, ``bytes`` KV bytes read as a share
            of dense.

        Raises
        ------
        BadInputError
            If the positions lie outside the text.
        """
        stop, total = start + count, self._ids.shape[0]
        if count < 1 or start < 1 or stop >= total:
            raise BadInputError(
                "positions outside the text", field="start, count", value=(start, count), allowed=f"[1, {total - 2}]"
            )
        arms = 1 + len(thetas)
        position, theta = np.repeat(np.arange(start, stop), arms), np.tile([0.0, *thetas], count)
        parts = np.array_split(np.arange(position.shape[0]), -(-position.shape[0] // _ROWS))
        passes = [self._decode(position[part], theta[part]) for part in parts]
        logits = torch.cat([found[0] for found in passes]).reshape(count, arms, -1)
        kept, share = (np.concatenate([found[i] for found in passes]).reshape(count, arms)[:, 1:] for i in (1, 2))
        kl, nll = np.empty_like(kept), np.empty_like(kept)
        for i in range(count):
            pruned, dense = logits[i, 1:], logits[i, :1]
            kl[i] = kl_nats(pruned, dense.expand_as(pruned))
            lost = torch.log_softmax(logits[i].double(), -1)[:, self._ids[start + i + 1]]
            nll[i] = to_host(lost[:1] - lost[1:])
        return {"kl": kl, "nll": nll, "kept": kept, "bytes": share}

    def _decode(self, position: IntArray, theta: FloatArray) -> tuple[Tensor, FloatArray, FloatArray]:
        """Decode R rows, each on its own copy of the page it is in; return logits, shares of pages and of bytes."""
        cache, page, rows = self._cache, position // self._page, np.arange(position.shape[0])
        own, source = self._text_pages + rows, torch.from_numpy(page).to(cache.device)
        for pool in (cache.k, cache.v):
            pool[:, own[0] : own[-1] + 1] = pool.index_select(1, source)
        table = np.tile(np.arange(self._text_pages, dtype=np.int32), (rows.shape[0], 1))
        table[rows, page] = own
        batch = PagedBatch.from_plan(rows_plan(position, table, theta_nats=theta), cache, self._rule)
        logits = batch.run(self._model.model, self._ids[torch.from_numpy(position)]).float()
        found, layers = batch.statistics(), cache.n_layers
        dense = (position + 1) * cache.token_bytes
        share = (found.pruned_bytes / dense + layers - found.pruned_layers) / layers
        return logits, found.kept_fraction, share
