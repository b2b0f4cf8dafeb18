"""Which KV pages to read, from intervals on their unnormalised log-mass, under an information-loss budget.

For one query head let page b have ln(mass) in [lower_b, upper_b]. Dropping a set S loses at most

    m(S) = U / (U + Z),   U = sum over S of exp(upper),   Z = sum over the kept pages of exp(lower),

and -ln(1 - m) <= theta must hold *for every query head* *(ours)*. Pages are dropped in ascending order of their upper
bound while the budget lasts: one order for all budgets, so the kept sets are nested in theta. A KV head reads the union
of what its query heads need, which only lowers each one's m. Query head h reads KV head h // (H / n_kv_heads).

``group_mean`` applies the budget to the mean of m over the G query heads of a KV head: fewer pages, but a single head
may lose G times the mass the budget allows, which in nats is more than G times the budget (without limit where G times
the mass reaches 1). The certificate returned is per query head in both cases, and true in both.

This module is the float64 reference; a device version is tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.certificate import kl_nats
from entropic_ctl.signals import FloatArray

__all__ = ["Selection", "heads_per_group", "select"]

_EPS = float(np.finfo(np.float64).eps)
_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, slots=True)
class Selection:
    """Pages to read and what dropping the others can cost.

    Parameters
    ----------
    kept : bool array, shape (n_kv_heads, P)
    mass : FloatArray, shape (H,)
        Upper bound on each query head's pruned softmax mass.
    log_pruned : FloatArray, shape (H,)
        ln U, upper bound on the unnormalised mass of the dropped pages (``-inf`` if none): with the real sum over the
        kept pages it gives the tighter, final certificate.
    """

    kept: npt.NDArray[np.bool_]
    mass: FloatArray
    log_pruned: FloatArray


def heads_per_group(n_heads: int, n_kv_heads: int) -> int:
    """Return how many query heads share a KV head.

    Raises
    ------
    BadInputError
        If the number of KV heads does not divide the number of query heads.
    """
    if n_kv_heads < 1 or n_heads < 1 or n_heads % n_kv_heads:
        raise BadInputError(
            "query heads cannot be shared out evenly over KV heads",
            field="n_kv_heads",
            value=(n_heads, n_kv_heads),
            allowed=f"a divisor of {n_heads} query heads",
        )
    return n_heads // n_kv_heads


def _validated(
    lower: npt.ArrayLike, upper: npt.ArrayLike, protected: npt.ArrayLike, theta: FloatArray
) -> tuple[FloatArray, FloatArray, npt.NDArray[np.bool_]]:
    lo, up = np.asarray(lower, np.float64), np.asarray(upper, np.float64)
    fixed = np.asarray(protected, np.bool_)
    if lo.ndim != 2 or lo.shape != up.shape or fixed.shape != lo.shape[1:] or lo.shape[1] < 1:
        raise BadInputError(
            "shapes disagree",
            field="lower, upper, protected",
            value=(lo.shape, up.shape, fixed.shape),
            allowed="(H, P), (H, P), (P,) with P >= 1",
        )
    if not (lo <= up).all():  # also false for NaN
        raise BadInputError(
            "an interval is empty or NaN",
            field="lower, upper",
            allowed="lower <= upper",
            remedy="give an unknown page the interval (-inf, inf): it is then kept",
        )
    if not (theta >= 0.0).all():
        raise BadInputError("not a budget", field="theta_nats", value=theta.tolist(), allowed="[0, inf)")
    return lo, up, fixed


def _mass(pruned: FloatArray, kept: FloatArray, terms: int) -> FloatArray:
    """U / (U + Z) rounded up, for sums of at most ``terms`` terms exp(x - c), -745 <= x - c <= 0.

    Each exp is off by under 4 ulp plus 745 ulp for the rounding of x - c, each sum by at most ``terms`` ulp; a lower
    bound that underflows only shrinks Z.
    """
    slack = (2 * terms + 800) * _EPS
    u = pruned * (1 + slack)
    z = np.maximum(kept * (1 - slack) - terms * _TINY, 0.0)
    with np.errstate(invalid="ignore"):
        mass = np.minimum(u / (u + z) * (1 + 4 * _EPS), 1.0)
    return np.where(u == 0, 0.0, np.where(np.isfinite(u), mass, 1.0))


def select(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    protected: npt.ArrayLike,
    theta_nats: float | FloatArray,
    n_kv_heads: int,
    *,
    selection: str = "union",
    log_spent: FloatArray | None = None,
) -> Selection:
    """Return the pages each KV head must read and the certificate of each query head.

    Parameters
    ----------
    lower, upper : array, shape (H, P)
        Bounds on ln(sum over the page's tokens of exp(score)), nats, per query head. ``upper = inf`` means unknown (the
        page is kept), ``upper = -inf`` an empty page. ``lower = inf`` counts as no information.
    protected : bool array, shape (P,)
        Pages that are read in any case.
    theta_nats : float or array, shape (n_kv_heads,)
        Budget >= 0, one per KV head if several requests are stacked along the head axes. At 0 every page is kept. An
        infinite budget keeps the protected pages, or the best of each head where there are none: attention is never
        empty.
    n_kv_heads : int
        Divides H.
    selection : {"union", "group_mean"}
    log_spent : FloatArray, shape (H,), optional
        ln of the upper bound on the mass of pages dropped before, which are not among these: it is charged to the same
        budget. ``mass`` and ``log_pruned`` include it.

    Raises
    ------
    BadInputError
        On shapes that disagree, an empty or NaN interval, a negative or NaN budget, a NaN in ``log_spent``, or an
        unknown selection.
    """
    theta = np.asarray(theta_nats, np.float64)
    lo, up, fixed = _validated(lower, upper, protected, theta)
    n_heads, pages = up.shape
    if theta.shape not in ((), (n_kv_heads,)):
        raise BadInputError("shapes disagree", field="theta_nats", value=theta.shape, allowed="() or (n_kv_heads,)")
    group = heads_per_group(n_heads, n_kv_heads)
    if selection not in ("union", "group_mean"):
        raise BadInputError("no such selection", field="selection", value=selection, allowed="union, group_mean")
    if log_spent is not None:
        log_spent = np.asarray(log_spent, np.float64)
        if log_spent.shape != (n_heads,) or np.isnan(log_spent).any():
            raise BadInputError(
                "not the log-masses of what was dropped before",
                field="log_spent",
                value=log_spent.tolist(),
                allowed=f"({n_heads},) numbers, -inf for none",
            )
        log_spent = None if (log_spent == -np.inf).all() else log_spent
    if log_spent is None and (not theta.any() or fixed.all()):
        nothing = np.zeros(n_heads)
        return Selection(np.ones((n_kv_heads, pages), np.bool_), nothing, np.full(n_heads, -np.inf))
    lo = np.where(lo == np.inf, -np.inf, lo)
    top = np.maximum(np.where(up == np.inf, -np.inf, up).max(axis=1), lo.max(axis=1))  # finite reference per head
    if log_spent is not None:
        top = np.maximum(top, log_spent)
    known = np.isfinite(top)
    top = np.where(known, top, 0.0)[:, None]
    weight_up, weight_lo = np.exp(up - top), np.exp(lo - top)
    weight_up = np.where(up > -np.inf, np.maximum(weight_up, _TINY), 0.0)  # an underflow is not an empty page
    spent = np.zeros((n_heads, 1))
    if log_spent is not None:
        was = log_spent[:, None]
        spent = np.where(was > -np.inf, np.maximum(np.exp(was - top), _TINY), 0.0)

    if selection == "union":
        rank = up
        families, heads = n_heads, 1  # each query head decides, then the union over its group
    else:
        total = weight_up.sum(axis=1, keepdims=True)
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(np.isfinite(weight_up), weight_up / total, np.inf)
        share = np.where(np.isnan(share), np.inf, share)
        rank = share.reshape(n_kv_heads, group, pages).mean(axis=1)
        families, heads = n_kv_heads, group  # the query heads of a group decide together
    order = np.lexsort((rank, np.broadcast_to(fixed, rank.shape)), axis=1)  # protected pages last, unknown ones too
    position = np.repeat(order, heads, axis=0)
    sorted_up = np.take_along_axis(weight_up, position, axis=1)
    sorted_lo = np.take_along_axis(weight_lo, position, axis=1)
    # column k: the first k + 1 pages of the order are dropped, the rest are kept (suffix sums: no cancellation)
    dropped = spent + np.cumsum(sorted_up, axis=1)
    rest = np.zeros_like(dropped)
    rest[:, :-1] = np.cumsum(sorted_lo[:, :0:-1], axis=1)[:, ::-1]
    mass = _mass(dropped, rest, pages + 1)
    loss = kl_nats(mass.reshape(families, heads, pages).mean(axis=1) * (1 + heads * _EPS if heads > 1 else 1.0))
    each = np.repeat(np.broadcast_to(theta, n_kv_heads), families // n_kv_heads)[:, None]
    allowed = (loss <= each) & (each > 0)
    allowed[:, pages - max(int(fixed.sum()), 1) :] = False  # protected pages come last; never drop everything
    if not known.all():
        allowed &= known.reshape(families, heads).all(axis=1)[:, None]
    count = np.logical_and.accumulate(allowed, axis=1).sum(axis=1)  # pages each family may drop

    place = np.empty_like(order)
    np.put_along_axis(place, order, np.arange(pages)[None, :], axis=1)
    needed = place >= count[:, None]  # (families, P)
    kept = needed.reshape(n_kv_heads, -1, pages).any(axis=1)
    pruned = np.repeat(~kept, group, axis=0)
    lost = spent[:, 0] + np.where(pruned, weight_up, 0.0).sum(axis=1)
    final = _mass(lost, np.where(pruned, 0.0, weight_lo).sum(axis=1), pages + 1)
    if heads == 1:  # the head's own prefix holds all that was dropped: its bound is valid too (rounding aside, larger)
        own = np.where(count > 0, mass[np.arange(n_heads), np.maximum(count, 1) - 1], final)
        final = np.minimum(final, own)
    slack = (2 * (pages + 1) + 800) * _EPS
    with np.errstate(divide="ignore"):
        log_pruned = np.log(lost * (1 + slack))
    # log to 4 ulp of at most 745, and two sums: under 10 * 2^-53 per unit of what is multiplied here
    log_pruned = log_pruned + top[:, 0] + 8 * _EPS * (np.abs(top[:, 0]) + 745.0)
    return Selection(kept, final, np.where(lost > 0, log_pruned, -np.inf))
