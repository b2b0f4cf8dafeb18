"""Pruned decode in one layer: score pages from the shadow, choose, read the chosen ones, certify the rest.

All pruned rows of a step go through at once; their page lists are padded, padding is masked and never read as a value.

1. Read the fixed pages (sinks, recent, not sealed) exactly: a partial state, and an interval on its log-mass.
2. Bound every candidate page's log-mass from the high half of its codes (:func:`page_bounds`), and drop what all query
   heads of a group would drop within ``COARSE_SHARE`` of the budget.
3. Of the others, read at once what the whole budget would not drop if masses were as the first look has them: a second
   look would nearly always keep it, and its mass is then known, which leaves more to spend.
4. Bound the rest from all of their codes, and choose under the whole budget (``entropic_ctl.pruning.select``).
5. Read the chosen pages per KV head, merge with what was read before.
6. Certify again with the real sum over what was read: m <= U / (U + Z_K).

This is the readable version; the C++ one (``backends/native/src/pruned.cpp``) and the Triton one are held to it by
tests. The Triton one leaves out step 3 and looks twice at those pages too: reading them apart would take three more
launches a layer.

Rounding. Let u = 2^-24, g_n = n u / (1 - n u). A float32 dot product of D terms is off by at most g_D sum |q_d k_d|
in any order of summation, fused or not. Hence, with the scale's own rounding and the product by it,

    |s - exact| <= scale g_{D+32} |q|_2 N    (shadow scores: N bounds | |m| + 128 w a |_2, Cauchy-Schwarz)
    |s - exact| <= scale g_{D+6}  |q|_2 max_i |k_i|_2                        (real keys)

Integer products instead of float32 ones (C++) replace q_d w_d by whole multiples of 256 alpha, alpha = max |q| / 32767,
off by at most 1.02 of them: 256 alpha a 1.02 * 128 D more, and 1.02 D more in sum |q_d| w_d.
A log-sum-exp of n scores adds at most (n + 5 ln n + 16) u + 4 u |lse|: n u for the sum of positive terms; 4 u for exp
to 2 ulp; for subtracting the maximum u times the softmax mean of |d| = max - score, which is the entropy less
ln sum e^-d and so at most ln n; 4 u ln n for the logarithm to 2 ulp. Merging two partial states is inside the +8 of
:func:`_exact_slack`. The constants are checked in exact rationals (theorem 9 of the proof book). A score cap is
1-Lipschitz and adds 8 u cap. Reduced-precision float32 products (TF32, bf16) would break the first line and are
refused.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from backends.attention.batch import LayerAudit, PagedBatch
from backends.attention.reference import Scoring, State, attend, merge, with_sink
from backends.attention.rows import PrunedRows, Row
from backends.kv_cache import PagedKVCache, unpack
from entropic_ctl.pruning.certificate import mass_bound, output_error
from entropic_ctl.pruning.select import Selection, select
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["COARSE_SHARE", "audit_rows", "output_errors", "page_bounds", "pruned_decode", "true_page_mass"]

COARSE_SHARE = 0.25
"""Share of the budget (of e^theta - 1) that pages may be charged on the bounds of their high half."""

_U = 2.0**-24  # unit roundoff of float32


def _gamma(n: int) -> float:
    return n * _U / (1.0 - n * _U)


def _lse_slack(lse: FloatArray, terms: int | npt.NDArray[np.int64]) -> FloatArray:
    return (terms + 5.0 * np.log(terms) + 16.0) * _U + 4 * _U * np.abs(lse)


def page_bounds(
    cache: PagedKVCache,
    layer: int,
    pages: torch.Tensor,
    query: torch.Tensor,
    scoring: Scoring,
    *,
    coarse: bool = False,
) -> tuple[FloatArray, FloatArray]:
    """Bound the log-mass of sealed pages from their shadow alone.

    Parameters
    ----------
    cache : PagedKVCache
    layer : int
    pages : int64 tensor, shape (S,)
        Ids of sealed pages.
    query : float32 tensor, shape (S or 1, n_kv_heads, G, D)
        Exact values of the queries, grouped by KV head, one set per page or one for all.
    scoring : Scoring
    coarse : bool
        Read the high half of the codes only.

    Returns
    -------
    lower, upper : FloatArray, shape (S, n_kv_heads * G)
        ln(sum over the page's tokens of exp(score)) in exact arithmetic lies between, for each query head.
    """
    shadow, size, dim = cache.shadow, cache.page_tokens, query.shape[-1]
    low = None if coarse else shadow.low[layer].index_select(0, pages)
    keys = unpack(shadow.record[layer].index_select(0, pages), low, size, dim)
    unread = 7.5 if coarse else 0.0
    weight, step = keys.weight.float().unsqueeze(-2), keys.step[..., None, None]
    # scale (q.m + a sum_d (q_d w_d) (c_d - 128)): the weight goes into the query, not into every key
    s = torch.matmul(query * weight, (keys.codes.float() + (unread - 128.0)).transpose(-1, -2)) * step
    s = (s + torch.matmul(query, keys.centre.float().unsqueeze(-1))) * scoring.scale
    if scoring.softcap is not None:
        s = scoring.softcap * torch.tanh(s / scoring.softcap)
    centre = _host(torch.logsumexp(s, dim=-1).flatten(1))
    # |q| . w: all terms are non-negative, so float32 is off by a factor of at most 1 + g_{D+6}
    reach = torch.matmul(query.abs(), weight.transpose(-1, -2)).squeeze(-1).double()  # (S, n_kv_heads, G)
    error = (keys.error.double() + unread * keys.step.double()).unsqueeze(-1)
    rounding = query.double().norm(dim=-1) * keys.norm.double().unsqueeze(-1) * (_gamma(dim + 32) * (1.0 + 1e-9))
    delta = _host((reach * error * (1.0 + 2.0 * _gamma(dim + 6)) + rounding).flatten(1)) * abs(scoring.scale) + 1e-30
    delta += _lse_slack(centre, size) + (8 * _U * scoring.softcap if scoring.softcap is not None else 0.0)
    known = np.isfinite(delta) & np.isfinite(centre)  # an overflowing or NaN query: read everything
    centre, delta = np.where(known, centre, 0.0), np.where(known, delta, np.inf)
    return centre - delta, centre + delta


def _host(x: torch.Tensor) -> FloatArray:
    return np.asarray(x.cpu().numpy(), np.float64)


def _exact_slack(
    query_norm: FloatArray, key_norm: FloatArray, lse: FloatArray, terms: npt.NDArray[np.int64], dim: int
) -> FloatArray:
    """Bound |computed - exact| log-sum-exp over ``terms`` (n,) real keys; (n, H), the scale is in the query's norm."""
    gamma = _gamma(dim + 6)
    return query_norm * key_norm * gamma * (1.0 + 8.0 * gamma) + _lse_slack(lse, terms[:, None] + 8)


def pruned_decode(
    paged: PagedBatch,
    layer: int,
    query: torch.Tensor,
    scoring: Scoring,
    *,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend for one new token of every pruned row over the pages its budget requires; statistics go to ``paged``.

    Parameters
    ----------
    paged : PagedBatch
        At least one of its rows has a positive budget.
    layer : int
    query : tensor, shape (n, H, D)
        Queries of the rows in ``paged.pruned``, in order.
    scoring : Scoring
    s_aux : tensor, shape (H,), optional
        Learned sink logit per query head.

    Returns
    -------
    tensor, shape (n, H, D), dtype of ``query``
    """
    cache, rows = paged.cache, paged.pruned
    heads = cache.n_kv_heads
    n, n_heads, dim = query.shape
    q = query.float().reshape(n, heads, n_heads // heads, dim)
    q_norm = abs(scoring.scale) * _host(q.norm(dim=-1).flatten(1))  # (n, H)
    cap = 8 * _U * scoring.softcap if scoring.softcap is not None else 0.0

    state, fixed_norm = _attend_fixed(cache, layer, rows, q, scoring)
    sealed_norm = _key_norms(cache, layer, rows.padded).amax(dim=1)  # (n, n_kv_heads)
    norm = np.repeat(_host(torch.maximum(fixed_norm, sealed_norm)), n_heads // heads, axis=1)

    def ends(read: State) -> tuple[FloatArray, FloatArray]:  # the log-mass of what was read lies between
        lse = _host(read.lse.flatten(1))
        slack = _exact_slack(q_norm, norm, lse, rows.length, dim) + cap
        known = np.isfinite(lse) & np.isfinite(slack)
        return np.where(known, lse - slack, -np.inf), np.where(known, lse + slack, np.inf)

    looks = _Looks(paged, layer, q, scoring)
    sure = looks.first(*ends(state))
    state = _attend_kept(cache, layer, rows, q, state, kept=sure, scoring=scoring)
    chosen, fine, found = looks.second(*ends(state))
    state = _attend_kept(cache, layer, rows, q, state, kept=chosen, scoring=scoring)
    kept = sure | chosen
    mass = np.minimum(found.mass, mass_bound(found.log_pruned, ends(state)[0].reshape(-1))).reshape(n, n_heads)
    if s_aux is not None:  # one more kept term: the mass lost, as a share of the total, only shrinks
        state = with_sink(state, s_aux.reshape(heads, -1))

    n_fixed = rows.n_pages - rows.n_candidates
    share = (n_fixed + kept.sum(axis=2).mean(axis=1)) / rows.n_pages
    read = rows.fixed_tokens + cache.page_tokens * kept.sum(axis=2).mean(axis=1)
    error = (
        output_errors(paged, layer, state.out.flatten(1, 2), kept=kept, mass=mass) if paged.want_output_error else None
    )
    paged.record_pruned(share[None], mass[None], read[None], fine[None], None if error is None else error[None])
    if paged.audit:
        audit_rows(paged, layer, query, scoring, kept=kept, mass=mass)
    return state.out.reshape(n, n_heads, dim).to(query.dtype)


class _Looks:
    """The candidates of all pruned rows of a step, looked at twice; masks of pages are (n, n_kv_heads, C)."""

    def __init__(self, paged: PagedBatch, layer: int, query: torch.Tensor, scoring: Scoring) -> None:
        self.paged, self.layer, self.scoring = paged, layer, scoring
        rows, (n, heads, group) = paged.pruned, query.shape[:3]
        self.heads, self.group, self.width = heads, group, rows.padded.shape[1]
        self.query = query[torch.from_numpy(rows.candidate_row).to(query.device)] if n > 1 else query
        self.real = np.arange(self.width) < rows.n_candidates[:, None, None]
        # padding: empty pages; the last column: all that was read
        self.lower, self.upper = np.full((2, n, heads * group, self.width + 1), -np.inf)

    def bound(self, *, coarse: bool) -> None:
        cache, rows = self.paged.cache, self.paged.pruned
        lower, upper = page_bounds(cache, self.layer, rows.candidates, self.query, self.scoring, coarse=coarse)
        self.lower[rows.candidate_row, :, rows.candidate_at] = lower
        self.upper[rows.candidate_row, :, rows.candidate_at] = upper

    def leave_out(self, pages: npt.NDArray[np.bool_]) -> None:
        """Empty these pages: they were dropped and charged, or read."""
        out = np.repeat(pages, self.group, axis=1)
        self.lower[..., :-1][out] = self.upper[..., :-1][out] = -np.inf

    def select(
        self, lower: FloatArray, upper: FloatArray, share: float, spent: FloatArray | None
    ) -> tuple[npt.NDArray[np.bool_], Selection]:
        """Choose under a share of the budget; return the pages kept of those that are not empty, and the selection."""
        n, width = lower.shape[0], self.width
        found = select(
            lower.reshape(-1, width + 1),
            upper.reshape(-1, width + 1),
            np.arange(width + 1) == width,
            np.repeat(np.log1p(share * np.expm1(self.paged.pruned.theta_nats)), self.heads),
            n * self.heads,
            selection=self.paged.pruning.selection,
            log_spent=spent,
        )
        there = (upper[..., :-1] > -np.inf).reshape(n, self.heads, self.group, width).any(axis=2)
        return found.kept.reshape(n, self.heads, width + 1)[..., :-1] & there & self.real, found

    def first(self, low: FloatArray, high: FloatArray) -> npt.NDArray[np.bool_]:
        """Drop by the high halves; return what to read without a second look. ``low``, ``high``: the fixed pages'."""
        self.lower[:, :, -1], self.upper[:, :, -1] = low, high
        self.bound(coarse=True)
        unsure, found = self.select(self.lower, self.upper, COARSE_SHARE, None)
        self.spent = found.log_pruned
        self.leave_out(~unsure)
        with np.errstate(invalid="ignore"):
            middle = 0.5 * (self.lower + self.upper)  # NaN: unknown, kept
        known = np.isfinite(middle)
        empty = self.upper == -np.inf
        lower = np.where(known, middle, -np.inf)
        sure, _ = self.select(lower, np.where(known, middle, np.where(empty, -np.inf, np.inf)), 1.0, self.spent)
        self.unsure = unsure & ~sure
        return sure

    def second(self, low: FloatArray, high: FloatArray) -> tuple[npt.NDArray[np.bool_], IntArray, Selection]:
        """Choose among the rest by all of their codes; ``low``, ``high``: of what was read so far.

        Returns the pages to read, how many low planes were read (n,), summed over KV heads, and the selection.
        """
        self.lower[:, :, -1], self.upper[:, :, -1] = low, high
        self.bound(coarse=False)
        self.leave_out(~self.unsure)
        kept, found = self.select(self.lower, self.upper, 1.0, self.spent)
        return kept, self.unsure.sum(axis=(1, 2)), found


def _key_norms(cache: PagedKVCache, layer: int, pages: torch.Tensor) -> torch.Tensor:
    """Return the largest key norm of sealed pages: (..., n_kv_heads) for page ids (...)."""
    return cache.shadow.record[layer][pages][..., :16].contiguous().view(torch.float32)[..., 2]


def _attend_fixed(
    cache: PagedKVCache, layer: int, rows: PrunedRows, query: torch.Tensor, scoring: Scoring
) -> tuple[State, torch.Tensor]:
    """Attend over the fixed pages; also the largest key norm (n, n_kv_heads). Slots never written are zeroed first."""
    valid = rows.fixed_valid[:, None, :, None]

    def tokens(pool: torch.Tensor) -> torch.Tensor:
        pages = pool[rows.fixed].transpose(1, 2)  # (n, n_kv_heads, F, page, D)
        flat = pages.reshape(*pages.shape[:2], -1, pages.shape[-1]).float()
        return torch.where(valid, flat, torch.zeros_like(flat))

    k = tokens(cache.k[layer])
    state = attend(query, k, tokens(cache.v[layer]), scoring, rows.fixed_valid[:, None, None])
    return state, k.norm(dim=-1).amax(dim=-1)


def _attend_kept(
    cache: PagedKVCache,
    layer: int,
    rows: PrunedRows,
    query: torch.Tensor,
    before: State,
    *,
    kept: npt.NDArray[np.bool_],
    scoring: Scoring,
) -> State:
    """Attend over these candidates too, each (row, KV head) over its own list, padded with one of its own pages."""
    if not kept.any():
        return before
    count = kept.sum(axis=2)
    most, size, dim = int(count.max()), cache.page_tokens, query.shape[-1]
    column = np.argsort(~kept, axis=2, kind="stable")[:, :, :most]
    real = np.arange(most) < count[:, :, None]
    column = np.where(real, column, column[:, :, :1])
    device = query.device
    index = torch.from_numpy(column).to(device)
    pages = rows.padded[torch.arange(kept.shape[0], device=device)[:, None, None], index]  # (n, n_kv_heads, most)
    head = torch.arange(kept.shape[1], device=device)[None, :, None]
    k = cache.k[layer][pages, head].reshape(*kept.shape[:2], most * size, dim)
    v = cache.v[layer][pages, head].reshape(*kept.shape[:2], most * size, dim)
    if real.all():
        return merge(before, attend(query, k, v, scoring))
    mask = torch.from_numpy(np.repeat(real, size, axis=2)).to(device).unsqueeze(2)  # (n, n_kv_heads, 1, tokens)
    if not count.all():  # a list without pages has nothing of its own to pad with: what it gathered must not be a value
        v = torch.where(mask.transpose(2, 3), v, torch.zeros_like(v))
    return merge(before, attend(query, k, v, scoring, mask))


def output_errors(
    paged: PagedBatch, layer: int, out: torch.Tensor, *, kept: npt.NDArray[np.bool_], mass: FloatArray
) -> FloatArray:
    """Bound the largest Euclidean output error of each pruned row over its query heads, from value centres and radii.

    Parameters
    ----------
    out : tensor, shape (n, H, D)
        Pruned outputs.
    kept : bool array, shape (n, n_kv_heads, C)
        Candidates that were read, in the columns of ``paged.pruned.padded``.
    mass : FloatArray, shape (n, H)
    """
    cache, rows = paged.cache, paged.pruned
    group, worst = out.shape[1] // cache.n_kv_heads, np.zeros(kept.shape[0])
    for r, j in np.ndindex(kept.shape[:2]):
        dropped = np.flatnonzero(~kept[r, j, : rows.n_candidates[r]])
        pages = rows.padded[r, torch.from_numpy(dropped).to(out.device)]
        heads = slice(j * group, (j + 1) * group)
        centre = cache.shadow.value_centre[layer][pages, j].double()
        away = _host((out[r, heads].double().unsqueeze(1) - centre).norm(dim=-1))  # (G, S)
        radius = _host(cache.shadow.value_radius[layer][pages, j])
        worst[r] = max(worst[r], float(output_error(mass[r, heads], away, radius).max(initial=0.0)))
    return worst


def audit_rows(
    paged: PagedBatch,
    layer: int,
    query: torch.Tensor,
    scoring: Scoring,
    *,
    kept: npt.NDArray[np.bool_],
    mass: FloatArray,
) -> None:
    """Record the true pruned masses of every pruned row; ``query`` (n, H, D), ``kept`` as in :func:`output_errors`."""
    for i, r in enumerate(paged.pruned.rows):
        row = paged.rows[r]
        mask = np.ones((kept.shape[1], row.table.shape[0]), np.bool_)
        mask[:, row.candidates.cpu().numpy()] = kept[i, :, : row.candidates.shape[0]]
        true = true_page_mass(paged.cache, layer, row, query[i], scoring)
        lost = np.where(np.repeat(~mask, query.shape[1] // kept.shape[1], axis=0), true, 0.0).sum(axis=1).clip(max=1.0)
        paged.audits.append(LayerAudit(layer, int(r), lost, mass[i], mask))


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
