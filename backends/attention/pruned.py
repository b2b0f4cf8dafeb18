"""Pruned decode of one row in one layer: score pages from the shadow, choose, read the chosen ones, certify the rest.

1. Read the fixed pages (sinks, recent, not sealed) exactly: a partial state, and an interval on its log-mass.
2. Bound every candidate page's log-mass from 8-bit codes (:func:`page_bounds`).
3. Choose under the row's budget (``entropic_ctl.pruning.select``).
4. Read the chosen pages per KV head, merge with the fixed state.
5. Certify again with the real sum over what was read: m <= U / (U + Z_K), at most the selection's own bound.

Rounding. Let u = 2^-24, g_n = n u / (1 - n u). A float32 dot product of D terms is off by at most g_D sum |q_d k_d|
in any order of summation, fused or not. Hence, with the scale's own rounding and the product by it,

    |s - exact| <= scale g_{D+6} sum_d |q_d| M_d,    M_d = |minimum_d| + 255 step_d     (shadow scores)
    |s - exact| <= scale g_{D+6} |q|_2 max_i |k_i|_2                                     (real keys; Cauchy-Schwarz)

where the shadow's two extra roundings (product by the step, sum with the minimum) are inside the +6. A log-sum-exp of n
scores adds at most (n + 32) u (exp to 4 ulp, subtraction of the maximum at most u |d| e^d <= u / e per term, the sum
g_n) plus 4 u |lse|. A score cap is 1-Lipschitz and adds 8 u cap. Reduced-precision float32 products (TF32, bf16) would
break the first line and are refused.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from backends.attention.batch import LayerAudit, PagedBatch, Row
from backends.attention.reference import Scoring, State, attend, merge, scores, with_sink
from backends.kv_cache import PagedKVCache
from entropic_ctl.pruning.certificate import mass_bound, output_error
from entropic_ctl.pruning.select import select
from entropic_ctl.signals import FloatArray

__all__ = ["page_bounds", "pruned_decode", "true_page_mass"]

_U = 2.0**-24  # unit roundoff of float32


def _gamma(n: int) -> float:
    return n * _U / (1.0 - n * _U)


def _lse_slack(lse: FloatArray, terms: int) -> FloatArray:
    return (terms + 32) * _U + 4 * _U * np.abs(lse)


def page_bounds(
    cache: PagedKVCache,
    layer: int,
    pages: torch.Tensor,
    query: torch.Tensor,
    scoring: Scoring,
) -> tuple[FloatArray, FloatArray]:
    """Bound the log-mass of sealed pages from their shadow alone.

    Parameters
    ----------
    cache : PagedKVCache
    layer : int
    pages : int64 tensor, shape (S,)
        Ids of sealed pages.
    query : float32 tensor, shape (n_kv_heads, G, D)
        Exact values of the queries, grouped by KV head.
    scoring : Scoring

    Returns
    -------
    lower, upper : FloatArray, shape (n_kv_heads * G, S)
        ln(sum over the page's tokens of exp(score)) in exact arithmetic lies between, for each query head.
    """
    shadow, size = cache.shadow, cache.page_tokens
    step = shadow.step[layer].index_select(0, pages).float()  # (S, n_kv_heads, D)
    minimum = shadow.minimum[layer].index_select(0, pages).float()
    error = shadow.error[layer].index_select(0, pages).float()
    keys = torch.addcmul(
        minimum.unsqueeze(-2), shadow.codes[layer].index_select(0, pages).float(), step.unsqueeze(-2)
    )  # (S, n_kv_heads, page, D)
    heads, group, dim = query.shape
    s = scores(query, keys.transpose(0, 1).reshape(heads, -1, dim), scoring)
    lse = torch.logsumexp(s.reshape(heads, group, -1, size), dim=-1)
    gamma = _gamma(dim + 6)
    # |q| . (error + gamma M): all terms are non-negative, so float32 is off by a factor of at most 1 + g_{D+6}
    width = error + gamma * (minimum.abs() + 255.0 * step)
    reach = torch.matmul(query.abs(), width.permute(1, 2, 0)).reshape(heads * group, -1).cpu().numpy()
    centre = lse.reshape(heads * group, -1).cpu().numpy().astype(np.float64)
    delta = abs(scoring.scale) * reach.astype(np.float64) * (1.0 + 4.0 * gamma) + 1e-30
    delta += _lse_slack(centre, size) + (8 * _U * scoring.softcap if scoring.softcap is not None else 0.0)
    known = np.isfinite(delta) & np.isfinite(centre)  # an overflowing or NaN query: read everything
    centre, delta = np.where(known, centre, 0.0), np.where(known, delta, np.inf)
    return centre - delta, centre + delta


def _exact_slack(
    query: torch.Tensor, key_norm: torch.Tensor, lse: torch.Tensor, terms: int, scoring: Scoring
) -> FloatArray:
    """Bound |computed - exact| log-sum-exp over ``terms`` real keys of norm at most ``key_norm``, shape (H,)."""
    dim = query.shape[-1]
    reach = (query.norm(dim=-1) * key_norm.unsqueeze(-1)).reshape(-1).cpu().numpy().astype(np.float64)
    gamma = _gamma(dim + 6)
    slack = abs(scoring.scale) * gamma * reach * (1.0 + 8.0 * gamma)
    slack += _lse_slack(lse.reshape(-1).cpu().numpy().astype(np.float64), terms + 8)
    return slack + (8 * _U * scoring.softcap if scoring.softcap is not None else 0.0)


def pruned_decode(
    paged: PagedBatch,
    layer: int,
    index: int,
    query: torch.Tensor,
    scoring: Scoring,
    *,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend for one new token over the pages its budget requires; statistics go to ``paged``.

    Parameters
    ----------
    paged : PagedBatch
    layer, index : int
        Layer of the cache; row of the batch (its ``theta_nats`` is positive and it has candidates).
    query : tensor, shape (H, D)
    scoring : Scoring
    s_aux : tensor, shape (H,), optional
        Learned sink logit per query head.

    Returns
    -------
    tensor, shape (H, D), dtype of ``query``
    """
    row, cache = paged.rows[index], paged.cache
    size, heads = cache.page_tokens, cache.n_kv_heads
    n_heads, dim = query.shape
    q = query.float().reshape(heads, n_heads // heads, dim)

    fixed_tokens = int(row.fixed.shape[0] - 1) * size + (row.length - 1) % size + 1  # the page being written is last
    fixed = row.table[row.fixed]
    k = cache.k[layer].index_select(0, fixed).transpose(0, 1).reshape(heads, -1, dim)[:, :fixed_tokens].float()
    v = cache.v[layer].index_select(0, fixed).transpose(0, 1).reshape(heads, -1, dim)[:, :fixed_tokens]
    state = attend(q, k, v, scoring)
    fixed_norm = k.norm(dim=-1).amax(dim=-1)
    fixed_slack = _exact_slack(q, fixed_norm, state.lse, fixed_tokens, scoring)
    fixed_lse = state.lse.reshape(-1).cpu().numpy().astype(np.float64)

    candidates = row.table[row.candidates]
    lower, upper = page_bounds(cache, layer, candidates, q, scoring)
    free = lower.shape[1]
    lower = np.concatenate([lower, (fixed_lse - fixed_slack)[:, None]], axis=1)  # all fixed pages as one
    upper = np.concatenate([upper, (fixed_lse + fixed_slack)[:, None]], axis=1)
    broken = ~(lower <= upper)
    lower[broken], upper[broken] = -np.inf, np.inf
    chosen = select(
        lower,
        upper,
        np.arange(free + 1) == free,
        row.theta_nats,
        heads,
        selection=paged.pruning.selection,
    )
    read = [np.flatnonzero(chosen.kept[j, :free]) for j in range(heads)]
    state = merge(state, _read(cache, layer, candidates, q, read=read, scoring=scoring))

    key_norm = torch.maximum(fixed_norm, cache.shadow.key_norm[layer].index_select(0, candidates).amax(dim=0))
    slack = _exact_slack(q, key_norm, state.lse, row.length, scoring)
    log_kept = state.lse.reshape(-1).cpu().numpy().astype(np.float64) - slack
    mass = np.minimum(chosen.mass, mass_bound(chosen.log_pruned, log_kept))
    if s_aux is not None:  # one more kept term: the mass lost, as a share of the total, only shrinks
        state = with_sink(state, s_aux.reshape(heads, -1))

    kept = np.ones((heads, row.table.shape[0]), np.bool_)
    kept[:, row.candidates.cpu().numpy()] = chosen.kept[:, :free]
    error = (
        _output_error(cache, layer, candidates, state, kept=chosen.kept[:, :free], mass=mass)
        if paged.want_output_error
        else 0.0
    )
    paged.record_pruned(index, kept, mass, fixed_tokens + size * float(np.mean([i.size for i in read])), error)
    if paged.audit:
        true = true_page_mass(cache, layer, row, query, scoring)
        lost = np.where(np.repeat(~kept, n_heads // heads, axis=0), true, 0.0).sum(axis=1)
        paged.audits.append(LayerAudit(layer, index, lost, mass, kept))
    return state.out.reshape(n_heads, dim).to(query.dtype)


def _read(
    cache: PagedKVCache,
    layer: int,
    candidates: torch.Tensor,
    query: torch.Tensor,
    *,
    read: list[npt.NDArray[np.int64]],
    scoring: Scoring,
) -> State:
    """Attend over the chosen pages, each KV head over its own list (possibly empty)."""
    dim, parts = query.shape[-1], []
    for j, chosen in enumerate(read):
        pages = candidates[torch.from_numpy(chosen).to(candidates.device)]
        k = cache.k[layer][pages, j].reshape(-1, dim)
        v = cache.v[layer][pages, j].reshape(-1, dim)
        parts.append(attend(query[j], k, v, scoring))
    return State(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]))


def _output_error(
    cache: PagedKVCache,
    layer: int,
    candidates: torch.Tensor,
    state: State,
    *,
    kept: npt.NDArray[np.bool_],
    mass: FloatArray,
) -> float:
    """Bound the largest Euclidean output error over the query heads, from value centres and radii."""
    group, worst = state.out.shape[1], 0.0
    for j in range(cache.n_kv_heads):
        pages = candidates[torch.from_numpy(np.flatnonzero(~kept[j])).to(candidates.device)]
        centre = cache.shadow.value_centre[layer][pages, j].double()
        away = (state.out[j].double().unsqueeze(1) - centre).norm(dim=-1).cpu().numpy()  # (G, S)
        radius = cache.shadow.value_radius[layer][pages, j].double().cpu().numpy()
        worst = max(worst, float(output_error(mass[j * group : (j + 1) * group], away, radius).max(initial=0.0)))
    return worst


def true_page_mass(cache: PagedKVCache, layer: int, row: Row, query: torch.Tensor, scoring: Scoring) -> FloatArray:
    """Return the softmax mass of every page of a row from the real keys, in float64: dense, for audits and tests.

    Parameters
    ----------
    query : tensor, shape (H, D)

    Returns
    -------
    FloatArray, shape (H, P)
    """
    size, heads, pages = cache.page_tokens, cache.n_kv_heads, row.table.shape[0]
    n_heads, dim = query.shape
    k = cache.k[layer].index_select(0, row.table).transpose(0, 1).reshape(heads, -1, dim)[:, : row.length].double()
    s = torch.matmul(query.double().reshape(heads, -1, dim), k.transpose(-1, -2)).reshape(n_heads, -1) * scoring.scale
    if scoring.softcap is not None:
        s = scoring.softcap * torch.tanh(s / scoring.softcap)
    weight = torch.softmax(s, dim=-1)
    padded = torch.nn.functional.pad(weight, (0, pages * size - row.length))
    return np.asarray(padded.reshape(n_heads, pages, size).sum(dim=-1).cpu().numpy())
