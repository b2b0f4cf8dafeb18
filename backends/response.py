"""Measure what a pruning budget does: share of pages read, certificate, true loss, KL to dense, shift of entropy.

Teacher-forced on real text. At each position the same token is decoded once per budget and at last dense, over one
and the same cache: every pass overwrites the new token's keys and values, and the dense ones stay. So a difference is
the effect of this step's pruning alone, not of earlier steps'.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backends.attention import PagedBatch, register
from backends.attention.audit import single_row_plan
from backends.audit import kl_nats
from backends.kv_cache import PagedKVCache
from backends.models import LoadedModel
from backends.sampling import TorchLogitView
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig
from entropic_ctl.signals import FloatArray

__all__ = ["Response", "measure_response"]


@dataclass(frozen=True)
class Response:
    """Measured tables, each float64 (C, A): contexts by budgets; see :class:`entropic_ctl.bank.Bank`."""

    kept: FloatArray
    certificate_mean: FloatArray
    certificate_max: FloatArray
    mass_mean: FloatArray
    kl: FloatArray
    entropy_shift: FloatArray


@torch.inference_mode()
def measure_response(
    model: LoadedModel,
    texts: Sequence[Sequence[int]],
    contexts: Sequence[int],
    thetas: Sequence[float],
    *,
    positions: int = 16,
    page_tokens: int = 16,
    pruning: PruningConfig | None = None,
    chunk: int = 512,
    progress: Callable[[int, int], None] | None = None,
) -> Response:
    """Measure the response of a model to the budget.

    Parameters
    ----------
    model : LoadedModel
    texts : sequences of token ids
        Each at least ``max(contexts) + positions`` long.
    contexts : increasing ints
        Context lengths, tokens.
    thetas : increasing floats
        Budgets in nats; the first is 0 (dense).
    positions : int
        Decode steps measured from each context length on, per text.
    page_tokens : int
    pruning : PruningConfig, optional
        Protected pages, dense layers, selection rule.
    chunk : int
        Tokens per prefill pass.
    progress : callable(done, total), optional

    Raises
    ------
    BadInputError
        If a text is too short or the contexts overlap.
    """
    rule = pruning or PruningConfig()
    longest = contexts[-1] + positions
    for text in texts:
        if len(text) < longest:
            raise BadInputError("text too short", field="texts", value=len(text), allowed=f">= {longest} tokens")
    if any(b - a < positions for a, b in itertools.pairwise(contexts)):
        raise BadInputError("contexts overlap", field="contexts", value=contexts, allowed=f"{positions} apart")
    model.model.set_attn_implementation(register())
    shape, n_pages = model.shape, -(-longest // page_tokens)
    sums = {name: np.zeros((len(contexts), len(thetas))) for name in Response.__dataclass_fields__}
    done, total = 0, len(texts) * len(contexts)
    for text in texts:
        cache = PagedKVCache(
            shape.layers, shape.kv_heads, shape.head_dim, n_pages, page_tokens, model.model.dtype, model.model.device
        )
        reader = _Reader(model, cache, rule, text)
        at = 0
        for row, context in enumerate(contexts):
            while at < context:
                step = min(chunk, context - at)
                reader.run(at, step)
                at += step
            for _ in range(positions):
                reader.measure(at, thetas, {name: table[row] for name, table in sums.items()})
                at += 1
            done += 1
            if progress is not None:
                progress(done, total)
    count = len(texts) * positions
    worst = sums.pop("certificate_max")
    return Response(certificate_max=worst, **{name: table / count for name, table in sums.items()})


@dataclass(frozen=True)
class _Reader:
    """One text being read by the model over one cache."""

    model: LoadedModel
    cache: PagedKVCache
    rule: PruningConfig
    text: Sequence[int]

    def run(self, context: int, n_tokens: int, theta: float = 0.0) -> tuple[Tensor, PagedBatch]:
        """Run tokens ``context .. context + n_tokens`` and return the last one's logits (1, n), and the batch."""
        plan = single_row_plan(context, n_tokens, range(self.cache.n_pages), theta_nats=theta)
        batch = PagedBatch.from_plan(plan, self.cache, self.rule)
        batch.audit = theta > 0
        network = self.model.model
        ids = torch.tensor(list(self.text[context : context + n_tokens]), dtype=torch.long, device=network.device)
        logits = batch.run(network, ids)
        if theta == 0.0:
            self.cache.seal(batch)
        return logits.float(), batch

    def measure(self, context: int, thetas: Sequence[float], into: dict[str, FloatArray]) -> None:
        """Decode the token at ``context`` under every budget, dense last, and add what was measured to the rows."""
        pruned = {a: self.run(context, 1, theta) for a, theta in enumerate(thetas) if theta > 0}
        dense, _ = self.run(context, 1)
        dense_entropy = float(TorchLogitView(dense).model_entropy[0])
        for a, theta in enumerate(thetas):
            if theta == 0.0:
                into["kept"][a] += 1.0
                continue
            logits, batch = pruned[a]
            statistics = batch.statistics()
            into["kept"][a] += statistics.kept_fraction[0]
            into["certificate_mean"][a] += statistics.pruned_mass_mean[0]
            into["certificate_max"][a] = max(into["certificate_max"][a], statistics.pruned_mass_max[0])
            if batch.audits:
                into["mass_mean"][a] += np.mean([audit.true_mass.mean() for audit in batch.audits])
            into["kl"][a] += kl_nats(logits, dense)[0]
            into["entropy_shift"][a] += float(TorchLogitView(logits).model_entropy[0]) - dense_entropy
