"""Requests that start with a full cache: a text is prefilled once, and its pages are copied to every request.

Timing decode steps at 8 x 8,000 tokens should not cost eight prefills. The copies are real: each request has its own
pages, in its own memory, so a step reads as many bytes as if each had been prefilled. Measurements decode one given
text over the cache instead, each token under several budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from backends.attention import PagedBatch
from backends.attention.rows import single_row_plan
from backends.decoder import paged
from backends.engine import Engine
from backends.jobs import OnText
from backends.kv_cache import PagedKVCache
from backends.models import LoadedModel
from backends.sampling import SamplingParams
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError, EntropicError
from entropic_ctl.pruning.base import PruningConfig
from entropic_ctl.signals import IntArray, StepPlan, StepResult

__all__ = ["FilledCache", "FilledEngine", "Pass", "copy_pages"]


def _pools(cache: PagedKVCache, *, shadow: bool) -> list[tuple[str, torch.Tensor]]:
    """Return everything the cache keeps per page, by name: tensors (layers, pages, ...)."""
    found = [("k", cache.k), ("v", cache.v)]
    if shadow:
        found += [(name, pool) for name, pool in sorted(vars(cache.shadow).items()) if isinstance(pool, torch.Tensor)]
    for name, pool in found:
        if pool.shape[:2] != (cache.n_layers, cache.n_pages):
            raise EntropicError(f"cannot copy pages: {name} is {tuple(pool.shape)}, not (layers, pages, ...)")
    return found


def copy_pages(source: PagedKVCache, pages: IntArray, target: PagedKVCache, into: IntArray, *, shadow: bool) -> None:
    """Copy whole pages from one cache to another.

    Parameters
    ----------
    source, target : PagedKVCache
        Of the same model and page size.
    pages, into : int64 array, shape (n,)
        Page ids in ``source`` and, one for one, in ``target``.
    shadow : bool
        Copy the quantised keys too; without, the copies count as not sealed.
    """
    here, there = torch.from_numpy(pages).to(source.device), torch.from_numpy(into).to(target.device)
    for (_, a), (_, b) in zip(_pools(source, shadow=shadow), _pools(target, shadow=shadow), strict=True):
        b[:, there] = a[:, here].to(target.device)
    target.sealed[into] = source.sealed[pages] if shadow else False


class Pass(NamedTuple):
    """One decoded position under one budget: raw logits (1, n), what its attention recorded."""

    logits: torch.Tensor
    batch: PagedBatch


class FilledCache:
    """A text in a cache of its own.

    Parameters
    ----------
    model : LoadedModel
        Its attention is switched to the paged one.
    tokens : sequence of int
        The text.
    page_tokens : int
    shadow : bool
        Also quantise the keys, for engines that prune.
    chunk : int
        Tokens per forward pass.
    room : int
        Tokens the cache has pages for, if more than the text's.
    progress : callable(done, total), optional
    """

    def __init__(
        self,
        model: LoadedModel,
        tokens: Sequence[int],
        *,
        page_tokens: int,
        shadow: bool = True,
        chunk: int = 512,
        room: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.tokens, self.shadow = list(tokens), shadow
        pages = range(-(-max(len(tokens), room) // page_tokens))
        self.cache, self.run = paged(model, len(pages), page_tokens)
        ids = torch.tensor(self.tokens, dtype=torch.long, device=self.cache.device)
        with torch.inference_mode():
            for start in range(0, len(tokens), chunk):
                n = min(chunk, len(tokens) - start)
                batch = PagedBatch.from_plan(single_row_plan(start, n, pages), self.cache, PruningConfig())
                self.run(batch, ids[start : start + n])
                if shadow:
                    self.cache.seal(batch)
                if progress is not None:
                    progress(start + n, len(tokens))

    @torch.inference_mode()
    def decode(
        self, tokens: Sequence[int], thetas: Sequence[float], pruning: PruningConfig, *, audit_every: int = 0
    ) -> Iterator[dict[float, Pass]]:
        """Decode a given continuation of the text, each token under every budget in turn, from the same cache.

        Every pass overwrites the token's K and V: later tokens see those of the last budget.

        Parameters
        ----------
        tokens : sequence of int
            At most as many as the cache has room for.
        thetas : sequence of float
            Budgets, nats; 0 is dense.
        pruning : PruningConfig
        audit_every : int
            Compute the true pruned masses in float64 at every so many tokens, from the first on; 0: never.

        Yields
        ------
        dict
            The passes of one token, by budget.
        """
        ids = torch.tensor(list(tokens), dtype=torch.long, device=self.cache.device)
        pages = range(self.cache.n_pages)
        for at in range(len(tokens)):
            passes = {}
            for theta in thetas:
                plan = single_row_plan(len(self.tokens) + at, 1, pages, theta_nats=theta)
                batch = PagedBatch.from_plan(plan, self.cache, pruning)
                batch.audit = theta > 0 and audit_every > 0 and at % audit_every == 0
                logits = self.run(batch, ids[at : at + 1])
                passes[theta] = Pass(logits, batch)
            self.cache.seal(batch)
            yield passes


class FilledEngine(Engine):
    """An engine in which every request is the same text, already in the cache.

    The first step of a request copies the text's pages in place of its prefill and runs its last token; from there on
    everything is :class:`~backends.engine.Engine`.

    Parameters
    ----------
    config : RunConfig
        ``engine`` must let a whole prompt through in one step (``prefill_chunk``, ``max_batch_tokens``).
    model : LoadedModel
    filled : FilledCache
    **options
        As for the engine.
    """

    def __init__(self, config: RunConfig, model: LoadedModel, filled: FilledCache, **options: Any) -> None:
        super().__init__(config, model, **options)
        if self._prunes and not filled.shadow:
            raise BadInputError("the filled cache has no quantised keys", where="FilledEngine", field="filled.shadow")
        self._filled = filled

    def admit(self, rows: int, *, max_new_tokens: int, seed: int = 0) -> list[int]:
        """Submit the text ``rows`` times and return the ids; each samples with a seed of its own."""
        tokens = self._filled.tokens
        return [
            self.submit(tokens, SamplingParams(max_new_tokens=max_new_tokens, seed=seed + row)) for row in range(rows)
        ]

    def _execute(self, plan: StepPlan, on_text: OnText | None) -> StepResult:
        fresh = plan.context == 0
        size, length = self.cache.page_tokens, len(self._filled.tokens)
        if (plan.n_tokens[fresh] != length).any():
            raise BadInputError(
                "a prompt must run in one step",
                where="FilledEngine",
                field="engine.prefill_chunk",
                value=self.config.engine.prefill_chunk,
                allowed=f">= {length}, with engine.max_batch_tokens for every row",
            )
        pages = np.arange(-(-length // size))
        for row in np.flatnonzero(fresh):
            into = np.asarray(plan.pages(row, size), np.int64)
            copy_pages(self._filled.cache, pages, self.cache, into, shadow=self._prunes)
        last = plan._replace(
            context=np.where(fresh, length - 1, plan.context), n_tokens=np.where(fresh, 1, plan.n_tokens)
        )
        return super()._execute(last, on_text)
