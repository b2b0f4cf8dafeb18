"""One decode step of one layer on the GPU: score, choose, read, certify, with nothing looked at by the host.

    state = decode(query, k_pool, v_pool, table, lengths, scoring, pruning=Pruning(shadow, ratio, candidates))

Launches depend on shapes alone, so the whole can be captured in a CUDA graph: nine kernels per pruned layer, two per
dense one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from backends.attention.pruned import COARSE_SHARE
from backends.attention.reference import Scoring
from backends.triton.attention import PageList, attend_pages
from backends.triton.cache import LayerShadow
from backends.triton.merging import Certify
from backends.triton.scoring import score_shadow
from backends.triton.scoring_keys import score_exactly
from backends.triton.selection import budget_ratio, choose_pages

__all__ = ["Decoded", "Pruning", "budget_ratio", "decode"]


class Pruning(NamedTuple):
    """What pruning a layer takes.

    Parameters
    ----------
    shadow : LayerShadow
    ratio : float32 tensor, shape (n,)
        :func:`budget_ratio` of each row's theta; 0 reads everything.
    candidates : uint8 tensor, shape (n, P), contiguous
        1 where a page is full, sealed and unprotected. At least one page of each row is not.
    two_stage : bool
        Score the high nibbles of all pages first, the low ones of undecided pages only.
    """

    shadow: LayerShadow
    ratio: torch.Tensor
    candidates: torch.Tensor
    two_stage: bool = True


class Decoded(NamedTuple):
    """Attention of one step and layer.

    Parameters
    ----------
    out : tensor, shape (n, H, D), dtype of the query
    lse : float32 tensor, shape (n, H)
        Over the tokens read, learned sinks left out, nats.
    mass : float32 tensor, shape (n, H), or None
        Certified bound on the pruned softmax mass; None without pruning.
    pages : PageList or None
        What each (row, KV head) read.
    refined : int32 tensor, shape (n, n_kv_heads), or None
        Pages whose low nibbles were read (fixed ones counted); None if all were, or none.
    log_mass : float32 tensor, shape (n, H, P), or None
        ln of each read page's sum of exp(score), ``-inf`` where not read.
    """

    out: torch.Tensor
    lse: torch.Tensor
    mass: torch.Tensor | None = None
    pages: PageList | None = None
    refined: torch.Tensor | None = None
    log_mass: torch.Tensor | None = None


def decode(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scoring: Scoring,
    *,
    window: int | None = None,
    sink_tokens: int = 0,
    s_aux: torch.Tensor | None = None,
    pruning: Pruning | None = None,
    page_log_mass: bool = False,
) -> Decoded:
    """Attend for one new token per row.

    Parameters
    ----------
    query : tensor, shape (n, H, D)
    k_pool, v_pool : tensor, shape (pages, n_kv_heads, page_tokens, D)
        One layer of the cache.
    table : int32 tensor, shape (n, P)
        Page ids, padded with anything.
    lengths : int32 tensor, shape (n,)
        Tokens cached, the new one included.
    scoring : Scoring
    window : int, optional
        Sliding window in tokens; such a layer is never pruned.
    sink_tokens : int
        Leading tokens seen besides the window.
    s_aux : float32 tensor, shape (H,), optional
        Learned sink logits.
    pruning : Pruning, optional
        Dense without.
    page_log_mass : bool
        Also return the log-mass of every page read.

    Raises
    ------
    BadInputError
        On shapes the kernels do not take, or pruning together with a window.
    """
    if pruning is None:
        out, lse, log_mass = attend_pages(
            query,
            k_pool,
            v_pool,
            table,
            lengths,
            scoring,
            window=window,
            sink_tokens=sink_tokens,
            s_aux=s_aux,
            page_log_mass=page_log_mass,
        )
        return Decoded(out, lse, log_mass=log_mass)
    n, n_heads = query.shape[:2]
    heads, size, capacity = k_pool.shape[1], k_pool.shape[2], table.shape[1]
    bounds = torch.empty((2, n, n_heads, capacity), dtype=torch.float32, device=query.device)
    both = (bounds[0], bounds[1])
    norms = torch.empty((n, heads, capacity), dtype=torch.float32, device=query.device)
    shadow, ratio, candidates, two_stage = pruning
    score_exactly(query, k_pool, table, candidates, lengths, scoring, both, norms)
    undecided = None
    score_shadow(query, shadow, table, candidates, lengths, scoring, both, norms, size, both_planes=not two_stage)
    if two_stage:
        undecided, *_ = choose_pages(*both, ratio * COARSE_SHARE, candidates, lengths, heads, size)
        score_shadow(query, shadow, table, candidates, lengths, scoring, both, norms, size, pages=undecided)
    pages, mass, log_pruned, key_norm = choose_pages(*both, ratio, candidates, lengths, heads, size, norms=norms)
    certify = Certify(log_pruned, mass, key_norm)
    out, lse, log_mass = attend_pages(
        query,
        k_pool,
        v_pool,
        table,
        lengths,
        scoring,
        window=window,
        s_aux=s_aux,
        pages=pages,
        certify=certify,
        page_log_mass=page_log_mass,
    )
    return Decoded(out, lse, mass, pages, None if undecided is None else undecided.count, log_mass)
