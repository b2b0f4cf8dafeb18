"""Verify drafted tokens: which of a row's positions become tokens of its text.

A row with d drafted tokens shows d + 1 distributions in one forward pass, those that plain decoding would show one
step after the other while it follows the draft. At each position the *target's own* token is drawn, with the request's
own noise at that index (:func:`backends.sampling.sample` is a function of seed, index and logits). As long as it equals
the draft, the next position is the one plain decoding would have come to; the first that differs is itself the next
token. So the text is plain decoding's by construction, greedy or sampled: bit for bit in dense decoding with the C++
kernels, whose sums have one order; elsewhere up to the rounding of logits computed for several tokens at once.

Leviathan et al. (2023) and Chen et al. (2023) accept a draft x of the drafter's distribution q with probability
min(1, p(x) / q(x)) and else draw from max(0, p - q). For a draft without randomness (q = 1 at x) that is: accept with
probability p(x), else draw from p without x. Drawing from p and comparing does the same: P(accept) = p(x), and given a
mismatch the token is distributed as p without x. The acceptance is the same, one draw serves both purposes, and the
noise is a function of the index, which makes the outcome a property of the seed and not of the drafts. With a drafter
that draws from q with the *same* noise, Gumbel-max coupling accepts with probability at least
(1 - tv) / (1 + tv), tv the total variation between p and q (Daliri et al., 2024), where rejection sampling accepts with
1 - tv: it accepts more, but loses the identity with plain decoding.

What changes under a temperature law with state (``feedback``): the d + 1 positions of a step are tempered with one u,
which the accepted tokens then update one after another. Plain decoding updates u between any two tokens, so its text
may differ; the distribution is preserved given the temperatures used. ``fixed`` and ``solve`` have no state.

A drafting row reads its KV cache dense: pruning acts on rows of one token.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np

from backends.drafting import Drafted
from backends.jobs import Job, OnText
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import Finish, FinishReason, FloatArray, IntArray, StepPlan

__all__ = ["Positions", "Verified", "drafted_plan", "settled", "verify"]


class Positions(NamedTuple):
    """The K distributions of a step: the sampling row (0 .. M-1) each belongs to, and its distance to the row's first.

    Parameters
    ----------
    count : IntArray, shape (M,)
        Positions per sampling row: 1 + its drafted tokens.
    first : IntArray, shape (M,)
        Index of each row's first position.
    owner, ahead : IntArray, shape (K,)
    """

    count: IntArray
    first: IntArray
    owner: IntArray
    ahead: IntArray

    @classmethod
    def of(cls, count: IntArray) -> Positions:
        """Lay out ``count`` positions per sampling row."""
        first = np.cumsum(count) - count
        owner = np.repeat(np.arange(count.shape[0]), count)
        return cls(count, first, owner, np.arange(owner.shape[0]) - first[owner])


def drafted_plan(plan: StepPlan, drafted: Drafted, jobs: Sequence[Job], vocab_size: int) -> StepPlan:
    """Give each job its draft, and return the plan of what really runs.

    Parameters
    ----------
    plan : StepPlan
        ``n_draft`` is the most tokens.
    drafted : Drafted
    jobs : sequence of Job
    vocab_size : int

    Raises
    ------
    BadInputError
        If the drafter proposed more tokens than asked for, or one outside the vocabulary.
    """
    if len(drafted.tokens) != plan.n_rows:
        raise BadInputError(
            "not one draft per row", where="drafter", field="tokens", value=len(drafted.tokens), allowed=plan.n_rows
        )
    for job, tokens, most in zip(jobs, drafted.tokens, plan.n_draft.tolist(), strict=True):
        if len(tokens) > most:
            raise BadInputError(
                "more tokens drafted than asked for", where="drafter", field="tokens", value=len(tokens), allowed=most
            )
        bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise BadInputError(
                "drafted token outside the vocabulary",
                where=f"drafter, request {job.request.id}",
                field="tokens",
                value=bad,
                allowed=f"[0, {vocab_size - 1}]",
            )
        job.draft = list(tokens)
    count = np.array([len(tokens) for tokens in drafted.tokens], np.int64)
    return plan._replace(n_draft=count, n_tokens=plan.n_tokens - plan.n_draft + count)


class Verified(NamedTuple):
    """What became of a step's positions.

    Parameters
    ----------
    used : list of int
        Positions that became tokens.
    drafted, accepted : int
        Tokens that were drafted, and those of them that became text.
    finished : list of Finish
        Texts that ended.
    """

    used: list[int]
    drafted: int
    accepted: int
    finished: list[Finish]


def verify(
    jobs: Sequence[Job],
    at: Positions,
    drawn: IntArray,
    temperature: FloatArray,
    now_s: float,
    eos_ids: frozenset[int],
    ending: Container[int],
    on_text: OnText | None,
) -> Verified:
    """Extend each text by the target's tokens while they follow its draft, and by one more.

    Parameters
    ----------
    jobs : sequence of M Job
        Of the sampling rows.
    at : Positions
    drawn : IntArray, shape (K,)
        The target's token at each position; -1: none could be drawn.
    temperature : FloatArray, shape (K,)
    now_s : float
    eos_ids : frozenset of int
    ending : container of int
        Requests cancelled meanwhile (``on_text`` may add to it): they take no more tokens.
    on_text : callable(id, text), optional
    """
    used: list[int] = []
    finished: list[Finish] = []
    drafted = accepted = 0
    for job, first in zip(jobs, at.first.tolist(), strict=True):
        number, draft = job.request.id, job.draft
        if number in ending:  # by the text of a row before it
            continue
        drafted += len(draft)
        for ahead, token in enumerate(drawn[first : first + 1 + len(draft)].tolist()):
            if token < 0:
                why = "no finite logit, or one that is NaN or +inf"
                finished.append(Finish(number, FinishReason.EMPTY_SUPPORT, why))
                break
            reason = job.accept(token, now_s, eos_ids, on_text)
            follows = ahead < len(draft) and token == draft[ahead]
            accepted += follows
            used.append(first + ahead)
            job.temperature = float(temperature[first + ahead])
            if reason is not None:
                finished.append(Finish(number, reason))
            if reason is not None or not follows or number in ending:
                break
    return Verified(used, drafted, accepted, finished)


def settled(plan: StepPlan, jobs: Sequence[Job]) -> IntArray:
    """Return how many tokens of each row's cache stay after the step, shape (R,): not those of rejected drafts."""
    computed = np.array([len(job.known) - 1 for job in jobs], np.int64)  # the newest token is not
    return np.where(plan.n_draft > 0, computed, plan.context + plan.n_tokens)
