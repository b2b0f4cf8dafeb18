"""Readable attention: one state, one merge, exact causal attention over gathered pages; float32 inside.

A partial softmax is the pair (out, lse): the normalised output over some tokens, and the natural log of the sum of
exp(score) over them. Over no tokens it is (0, -inf). Two partial states over disjoint tokens merge exactly:

    lse = ln(e^lse_1 + e^lse_2),    out = e^(lse_1 - lse) out_1 + e^(lse_2 - lse) out_2.

Minus infinity is handled as such (no large finite stand-in), so scores of -1e5 keep their softmax.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Scoring", "State", "attend", "empty_state", "merge", "scores", "visible", "window_pages", "with_sink"]


class Scoring(NamedTuple):
    """score = scale * q.k, then mapped to c tanh(score / c) where a ``softcap`` c is given."""

    scale: float
    softcap: float | None = None


class State(NamedTuple):
    """A partial softmax: ``out`` float32 (..., D), ``lse`` float32 (...), nats."""

    out: torch.Tensor
    lse: torch.Tensor


def empty_state(like: State) -> State:
    """Return the state over no tokens, with the shapes of ``like``."""
    return State(torch.zeros_like(like.out), torch.full_like(like.lse, -torch.inf))


def scores(query: torch.Tensor, key: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Return the scores in float32, shape (..., Q, T), of query (..., Q, D) and key (..., T, D)."""
    s = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scoring.scale
    return s if scoring.softcap is None else scoring.softcap * torch.tanh(s / scoring.softcap)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    mask: torch.Tensor | None = None,
) -> State:
    """Softmax attention with its log-sum-exp.

    Parameters
    ----------
    query : tensor, shape (..., Q, D)
    key, value : tensor, shape (..., T, D); T may be 0
        Only valid tokens: a masked slot must still hold finite values.
    scoring : Scoring
    mask : bool tensor broadcastable to (..., Q, T), optional
        True where the query sees the token.

    Returns
    -------
    State
        ``out`` (..., Q, D), ``lse`` (..., Q); a query that sees nothing has (0, -inf).
    """
    s = scores(query, key, scoring)
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    if s.shape[-1] == 0:
        out = query.new_zeros((*s.shape[:-1], value.shape[-1]), dtype=torch.float32)
        return State(out, s.new_full(s.shape[:-1], -torch.inf))
    top = s.amax(dim=-1, keepdim=True)
    top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weight = torch.exp(s - top)
    total = weight.sum(dim=-1, keepdim=True)
    out = torch.matmul(weight, value.float()) / torch.where(total == 0, torch.ones_like(total), total)
    return State(out, (top + torch.log(total)).squeeze(-1))


def merge(first: State, second: State) -> State:
    """Merge two partial states over disjoint tokens; (-inf, -inf) gives (0, -inf), never NaN."""
    top = torch.maximum(first.lse, second.lse)
    safe = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    a, b = torch.exp(first.lse - safe), torch.exp(second.lse - safe)
    total = a + b
    share = torch.where(total == 0, torch.ones_like(total), total)
    out = (a / share).unsqueeze(-1) * first.out + (b / share).unsqueeze(-1) * second.out
    return State(out, safe + torch.log(total))


def with_sink(state: State, sink_logit: torch.Tensor) -> State:
    """Add a learned sink: one more term e^sink in the softmax denominator that carries no value.

    ``sink_logit`` broadcasts to ``state.lse``.
    """
    lse = torch.logaddexp(state.lse, sink_logit.float().expand_as(state.lse))
    return State(state.out * torch.exp(state.lse - lse).unsqueeze(-1), lse)


def visible(
    context: int, n_tokens: int, device: torch.device, window: int | None = None, sink_tokens: int = 0
) -> torch.Tensor:
    """Return the causal mask of a chunk, bool (n_tokens, context + n_tokens).

    The query at position i sees key j <= i; with a sliding window w, only j > i - w or j < ``sink_tokens``.
    """
    i = torch.arange(context, context + n_tokens, device=device).unsqueeze(1)
    j = torch.arange(context + n_tokens, device=device).unsqueeze(0)
    mask = j <= i
    if window is not None:
        mask &= (j > i - window) | (j < sink_tokens)
    return mask


def window_pages(length: int, window: int, page_tokens: int, sink_tokens: int = 0) -> list[int]:
    """Return the pages that the query at position ``length - 1`` sees: those of the sinks, then those of its window.

    Page p holds positions p * page_tokens .. (p + 1) * page_tokens - 1; the window is the last ``window`` positions.
    """
    first = max(0, length - window) // page_tokens
    last = (length - 1) // page_tokens
    sinks = min(-(-min(sink_tokens, length) // page_tokens), first)
    return [*range(sinks), *range(first, last + 1)]
