"""Who proposes the tokens that a step verifies: prompt lookup, or a second, smaller model.

Drafts are proposals only. Whatever a drafter says, the text is the one that plain decoding gives
(:mod:`backends.verification`); a bad drafter costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from backends.attention import PagedBatch
from backends.decoder import paged
from backends.flops import step_flops
from backends.jobs import Job
from backends.models import LoadedModel
from backends.sampling import process, sample
from entropic_ctl.config import EngineConfig, SpeculationConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig
from entropic_ctl.signals import IntArray, StepPlan

__all__ = ["NGRAMS", "DraftModel", "Drafted", "Drafter", "PromptLookup", "TokenIndex", "drafter_of", "lookup"]

NGRAMS = (3, 2)


class Drafted(NamedTuple):
    """What a drafter proposes: tokens per plan row, and what the proposing cost (KV bytes read, operations)."""

    tokens: list[list[int]]
    kv_bytes: float = 0.0
    flops: float = 0.0


class Drafter(Protocol):
    """Proposes tokens."""

    def propose(self, plan: StepPlan, jobs: Sequence[Job]) -> Drafted:
        """Return at most ``plan.n_draft[r]`` tokens to follow ``jobs[r].known``, for every row r of the plan."""
        ...

    def leave(self, request_id: int) -> None:
        """Forget a request."""
        ...


def drafter_of(
    config: SpeculationConfig, target: LoadedModel, limits: EngineConfig, draft_model: LoadedModel | None
) -> Drafter | None:
    """Return the drafter that a configuration names, or None without drafts.

    Parameters
    ----------
    config : SpeculationConfig
    target : LoadedModel
        Whose tokens are drafted.
    limits : EngineConfig
        Of the engine: the drafter's cache has the same pages.
    draft_model : LoadedModel, optional
        The loaded drafter; ``config.draft_model`` is loaded if absent.
    """
    if not config.draft_tokens:
        return None
    if config.drafter == "prompt_lookup":
        return PromptLookup()
    if draft_model is None:
        from backends.models import load

        network = target.model
        draft_model = load(config.draft_model, str(network.dtype).removeprefix("torch."), str(network.device))
    return DraftModel(draft_model, target, limits)


# -- prompt lookup ----------------------------------------------------------------------------------------------------


class TokenIndex:
    """Where each n-gram of a growing text occurred last; a token costs one dictionary entry per n.

    Parameters
    ----------
    ngrams : sequence of int
        Lengths tried, in this order.
    """

    def __init__(self, ngrams: Sequence[int] = NGRAMS) -> None:
        self._ends: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in ngrams}
        self._seen = 0

    def draft(self, text: Sequence[int], length: int) -> list[int]:
        """Return up to ``length`` tokens that followed the latest earlier occurrence of the text's last n-gram.

        Parameters
        ----------
        text : sequence of int
            All of the text; it may only have grown since the last call.
        length : int
        """
        size = len(text)
        for end in range(self._seen + 1, size):  # n-grams that end before the text does
            for n, ends in self._ends.items():
                if end >= n:
                    ends[tuple(text[end - n : end])] = end
        self._seen = max(self._seen, size - 1)
        for n, ends in self._ends.items():
            at = ends.get(tuple(text[size - n : size])) if size > n else None
            if at is not None:
                # an occurrence that overlaps the end repeats itself (a text of period p drafts the period on)
                return [int(text[at + i % (size - at)]) for i in range(length)]
        return []


def lookup(tokens: Sequence[int], length: int, ngrams: Sequence[int] = NGRAMS) -> list[int]:
    """Return the draft of prompt lookup for one text: :meth:`TokenIndex.draft` without a past.

    Parameters
    ----------
    tokens : sequence of int
        The text so far.
    length : int
    ngrams : sequence of int
        Lengths tried, in this order.
    """
    return TokenIndex(ngrams).draft(tokens, length)


class PromptLookup:
    """Drafts what followed the last tokens where they occurred before in the request's own text (Saxena, 2023).

    A pure function of the known tokens: chunks, company, preemption and pauses change nothing.

    Parameters
    ----------
    ngrams : sequence of int
        Lengths tried, in this order.
    """

    def __init__(self, ngrams: Sequence[int] = NGRAMS) -> None:
        self._ngrams = tuple(ngrams)
        self._texts: dict[int, TokenIndex] = {}

    def propose(self, plan: StepPlan, jobs: Sequence[Job]) -> Drafted:
        """Return the drafts, at no cost."""
        return Drafted(
            [self._one(job, most) if most else [] for job, most in zip(jobs, plan.n_draft.tolist(), strict=True)]
        )

    def _one(self, job: Job, most: int) -> list[int]:
        index = self._texts.get(job.request.id)
        if index is None:
            index = self._texts[job.request.id] = TokenIndex(self._ngrams)
        return index.draft(job.known, most)

    def leave(self, request_id: int) -> None:
        """Forget a request's text."""
        self._texts.pop(request_id, None)


# -- a second model ---------------------------------------------------------------------------------------------------


class DraftModel:
    """A second model that shares the tokenizer and the block tables; it has K and V pages of its own.

    It decodes with the request's own noise: the same (seed, index) draws the draft and, from the target's logits, the
    token, so where both models agree on the distribution they agree on the token. Greedy requests draft greedily. The
    temperature is that of the request's last token. Its cache holds page p of a row where the target's does, and is
    filled along with the target's prefill; what a rejected draft left there is overwritten before it is read.

    Parameters
    ----------
    model : LoadedModel
        The drafter; its attention implementation is switched to the paged one.
    target : LoadedModel
    limits : EngineConfig

    Raises
    ------
    BadInputError
        If the two have different tokenizers.
    """

    def __init__(self, model: LoadedModel, target: LoadedModel, limits: EngineConfig) -> None:
        _same_tokens(model, target)
        self.model, self._vocabulary = model, min(model.vocab_size, target.vocab_size)
        self.cache, self._forward = paged(model, limits.pages, limits.page_tokens, limits.kernels)
        self._cached: dict[int, int] = {}  # request -> its known tokens whose K and V are here

    def leave(self, request_id: int) -> None:
        """Forget a request."""
        self._cached.pop(request_id, None)

    def propose(self, plan: StepPlan, jobs: Sequence[Job]) -> Drafted:
        """Run the prefill of the plan's chunks and of what drafting rows lack, then draft one token after another."""
        for request_id in plan.preempted.tolist():
            self.leave(request_id)
        known = plan.n_tokens - plan.n_draft  # of the row's tokens this step, those that are no drafts
        end = plan.context + known
        start = np.array([self._cached.get(i, 0) for i in plan.ids.tolist()], np.int64)
        start = np.minimum(start, plan.context)  # at most up to the last accepted draft
        self._cached.update(zip(plan.ids.tolist(), start.tolist(), strict=True))
        most = np.where(end + plan.n_draft <= self.model.max_context, plan.n_draft, 0)
        chunk = (known > 1) | ~plan.samples
        runs = np.flatnonzero(((most > 0) | chunk) & (end <= self.model.max_context) & (start < end))
        tokens: list[list[int]] = [[] for _ in jobs]
        cost = np.zeros(2)
        step = 0
        while runs.size:
            part = plan._replace(
                ids=plan.ids[runs],
                slots=plan.slots[runs],
                context=start[runs],
                n_tokens=(end - start)[runs],
                samples=most[runs] > step,
                greedy=plan.greedy[runs],
                theta_nats=np.zeros(runs.size),
                n_draft=np.zeros(runs.size, np.int64),
            )
            texts = [(jobs[r].known + tokens[r])[start[r] : end[r]] for r in runs.tolist()]
            logits, paid = self._run(part, [t for text in texts for t in text])
            cost += paid
            for i in runs.tolist():
                self._cached[jobs[i].request.id] = int(end[i])
            runs = runs[part.samples]
            for r, token in zip(runs.tolist(), self._draw(logits, plan, runs, jobs, tokens), strict=True):
                tokens[r].append(int(token))
            step += 1
            runs = runs[most[runs] > step]
            start[runs], end[runs] = end[runs], end[runs] + 1
        return Drafted(tokens, float(cost[0]), float(cost[1]))

    @torch.inference_mode()
    def _run(self, part: StepPlan, tokens: list[int]) -> tuple[torch.Tensor, tuple[float, float]]:
        """Return the logits of the sampling rows, and the KV bytes read and operations of the pass."""
        batch = PagedBatch.from_plan(part, self.cache, PruningConfig())
        inputs = torch.tensor(tokens, dtype=torch.long, device=self.cache.device)
        logits = self._forward(batch, inputs).float()[:, : self._vocabulary]
        rows = part.n_rows
        return logits, (batch.kv_bytes, step_flops(self.model, part, np.ones(rows), np.zeros(rows, np.int64)))

    def _draw(
        self, logits: torch.Tensor, plan: StepPlan, rows: IntArray, jobs: Sequence[Job], drafted: list[list[int]]
    ) -> IntArray:
        """Choose one token for each of these plan rows."""
        if not rows.size:
            return np.empty(0, np.int64)
        picked = [jobs[r] for r in rows.tolist()]
        params = [job.params for job in picked]
        ahead = [drafted[r] for r in rows.tolist()]
        sane = logits.masked_fill(~torch.isfinite(logits), 0.0)  # a proposal only: verification meets real trouble
        return sample(
            process(sane, params, [job.known + new for job, new in zip(picked, ahead, strict=True)]),
            np.array([job.temperature for job in picked]),
            plan.greedy[rows],
            params,
            [len(job.output.token_ids) + len(new) for job, new in zip(picked, ahead, strict=True)],
        )


def _same_tokens(model: LoadedModel, target: LoadedModel) -> None:
    """Refuse a pair of models whose token ids mean different things."""
    mine, theirs = model.tokenizer, target.tokenizer
    if mine is None or theirs is None:
        same = mine is theirs and model.vocab_size == target.vocab_size
    else:
        same = mine is theirs or mine.get_vocab() == theirs.get_vocab()
    if not same:
        raise BadInputError(
            f"its tokens are not those of {target.name}",
            where=model.name,
            field="speculation.draft_model",
            value=model.name,
            allowed="a model with the same tokenizer",
            remedy="name a smaller model of the same family, or set speculation.drafter = 'prompt_lookup'",
        )
