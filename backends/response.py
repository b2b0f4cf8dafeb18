"""Measure what a pruning budget does: share of pages read, certificate, true loss, KL to dense, shift of entropy.

Teacher-forced on real text. At each position the same token is decoded once per budget and at last dense, over one
and the same cache: every pass overwrites the new token's keys and values, and the dense ones stay. So a difference is
the effect of this step's pruning alone, not of earlier steps'.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backends.attention import PagedBatch, register
from backends.attention.rows import single_row_plan
from backends.audit import kl_nats
from backends.kv_cache import PagedKVCache
from backends.models import LoadedModel
from backends.pieces import Arrays
from backends.sampling import TorchLogitView
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig
from entropic_ctl.signals import FloatArray

__all__ = ["Response", "measure_response"]

Keep = Callable[[str, Callable[[], Arrays]], Arrays]


@dataclass(frozen=True)
class Response:
    """Measured tables, each float64 (C, A): contexts by budgets; see :class:`entropic_ctl.bank.Bank`."""

    kept: FloatArray
    certificate_mean: FloatArray
    certificate_max: FloatArray
    mass_mean: FloatArray
    kl: FloatArray
    entropy_shift: FloatArray


def measure_response(
    model: LoadedModel,
    texts: Sequence[Sequence[int]],
    contexts: Sequence[int],
    thetas: Sequence[float],
    *,
    positions: int | Sequence[int] = 16,
    page_tokens: int = 16,
    pruning: PruningConfig | None = None,
    chunk: int = 512,
    progress: Callable[[int, int], None] | None = None,
    keep: Keep | None = None,
) -> Response:
    """Measure the response of a model to the budget.

    Parameters
    ----------
    model : LoadedModel
    texts : sequences of token ids
        Each at least ``contexts[-1] + positions`` long.
    contexts : increasing ints
        Context lengths, tokens.
    thetas : increasing floats
        Budgets in nats; the first is 0 (dense).
    positions : int, or one int per context
        Decode steps measured from each context length on, per text.
    page_tokens : int
    pruning : PruningConfig, optional
        Protected pages, dense layers, selection rule.
    chunk : int
        Tokens per prefill pass.
    progress : callable(done, total), optional
    keep : callable(name, make), optional
        Returns what ``make()`` returns, or what it returned in an earlier run (:meth:`backends.pieces.Pieces.get`);
        one call per text and context.

    Raises
    ------
    BadInputError
        If a text is too short, the contexts overlap, or the budgets do not begin with 0 and increase.
    """
    rule = pruning or PruningConfig()
    counts = [positions] * len(contexts) if isinstance(positions, int) else list(positions)
    if len(counts) != len(contexts) or min(counts, default=0) < 1:
        raise BadInputError(
            "one count per context", field="positions", value=counts, allowed=f"{len(contexts)} above 0"
        )
    longest = contexts[-1] + counts[-1]
    for text in texts:
        if len(text) < longest:
            raise BadInputError("text too short", field="texts", value=len(text), allowed=f">= {longest} tokens")
    if any(b - a < count for (a, b), count in zip(itertools.pairwise(contexts), counts, strict=False)):
        raise BadInputError("contexts overlap", field="contexts", value=list(contexts), allowed=f"{counts} apart")
    if len(thetas) < 2 or thetas[0] != 0.0 or any(b <= a for a, b in itertools.pairwise(thetas)):
        raise BadInputError("not budgets", field="thetas", value=list(thetas), allowed="0 and then increasing, nats")
    model.model.set_attn_implementation(register())
    parts: list[list[Arrays]] = []
    for number, text in enumerate(texts):
        reader = _Reader(model, rule, text, page_tokens, chunk)
        rows: list[Arrays] = []
        for context, count in zip(contexts, counts, strict=True):
            make = functools.partial(reader.at_context, context, count, thetas)
            rows.append(keep(f"response-{number}-{context}", make) if keep is not None else make())
            if progress is not None:
                progress(number * len(contexts) + len(rows), len(texts) * len(contexts))
        parts.append(rows)
    names = [field.name for field in dataclasses.fields(Response)]
    stacked = {name: np.array([[row[name] for row in rows] for rows in parts]) for name in names}  # (texts, C, A)
    worst = stacked.pop("certificate_max").max(axis=0)
    return Response(certificate_max=worst, **{name: values.mean(axis=0) for name, values in stacked.items()})


class _Reader:
    """One text being read by the model over one cache, from its start to the last context asked for."""

    def __init__(
        self, model: LoadedModel, rule: PruningConfig, text: Sequence[int], page_tokens: int, chunk: int
    ) -> None:
        self._model, self._rule, self._text, self._chunk = model, rule, text, chunk
        self._page_tokens, self._done = page_tokens, 0
        self._cache: PagedKVCache | None = None

    @property
    def cache(self) -> PagedKVCache:
        """The cache, made on first use (a text whose parts are all kept needs none)."""
        if self._cache is None:
            shape, network = self._model.shape, self._model.model
            n_pages, page = -(-len(self._text) // self._page_tokens), self._page_tokens
            self._cache = PagedKVCache(
                shape.layers, shape.kv_heads, shape.head_dim, n_pages, page, network.dtype, network.device
            )
        return self._cache

    @torch.inference_mode()
    def at_context(self, context: int, count: int, thetas: Sequence[float]) -> Arrays:
        """Return each quantity (A,): mean (certificate_max: maximum) of ``count`` decode steps from ``context`` on."""
        while self._done < context:
            step = min(self._chunk, context - self._done)
            self.run(self._done, step)
            self._done += step
        sums = {field.name: np.zeros(len(thetas)) for field in dataclasses.fields(Response)}
        for _ in range(count):
            self.measure(self._done, thetas, sums)
            self._done += 1
        return {name: total if name == "certificate_max" else total / count for name, total in sums.items()}

    def run(self, context: int, n_tokens: int, theta: float = 0.0) -> tuple[Tensor, PagedBatch]:
        """Run tokens ``context .. context + n_tokens`` and return the last one's logits (1, n), and the batch."""
        plan = single_row_plan(context, n_tokens, range(self.cache.n_pages), theta_nats=theta)
        batch = PagedBatch.from_plan(plan, self.cache, self._rule)
        batch.audit = theta > 0
        network = self._model.model
        ids = torch.tensor(list(self._text[context : context + n_tokens]), dtype=torch.long, device=network.device)
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
