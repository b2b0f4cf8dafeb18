"""Who goes first, and how a step's tokens are shared: pure functions of columns.

The order has three groups. *Protected* rows hold a seat they got by being overdue, for q steps and until they have
produced a token (so that every such turn is progress, even when it starts by recomputing). *Overdue* rows have
waited at least W iterations; the longest wait goes first. The rest is ordered by the policy's score. Ties break by
arrival. Longest wait first is arrival order among rows that have not run since they arrived; for rows that have, it
keeps a row that was just served from overtaking one that was not, which plain arrival order does when W is small.

Waiting bound (ours; proof in ``proofs/README.md``, section 11): with at most N live rows of which any F <= B fit the
pool together, no row stays unserved for more than W + floor((N - 1) h / F) iterations, whatever the scores;
h = max(q, P), P the longest (re)computation of known tokens in steps, at the share of the token budget it gets. With
q >= P and F = B that is less than W + ceil(N / B) q.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["draw_order", "share_tokens", "wait_bound"]


def wait_bound(live: int, batch: int, wait_limit_steps: int, quantum_steps: int) -> int:
    """Return W + ceil(N / B) q, the longest wait of any live request in iterations (for q >= P, see above).

    Parameters
    ----------
    live, batch : int
        N and B.
    wait_limit_steps, quantum_steps : int
        W and q.
    """
    return wait_limit_steps + -(-live // batch) * quantum_steps


def draw_order(
    step: int,
    *,
    last_run: IntArray,
    protected: npt.NDArray[np.bool_],
    protected_until: IntArray,
    arrival_order: IntArray,
    score: FloatArray,
    wait_limit_steps: int,
) -> tuple[IntArray, IntArray]:
    """Sort live rows.

    Parameters
    ----------
    step : int
        The iteration being planned.
    last_run : IntArray, shape (L,)
        Iteration in which each row last ran (the one before its admission if it never did).
    protected : bool array, shape (L,)
        Rows that hold a protected seat now.
    protected_until : IntArray, shape (L,)
        Orders the protected rows: the one that got its seat first goes first.
    arrival_order : IntArray, shape (L,)
    score : FloatArray, shape (L,)
        Higher first; infinities are allowed.
    wait_limit_steps : int
        W.

    Returns
    -------
    order : IntArray, shape (L,)
        Indices into the columns, first to last.
    group : IntArray, shape (L,)
        0 protected, 1 overdue, 2 rest, in the *returned order*.

    Raises
    ------
    BadInputError
        If a score is NaN or the policy returned a wrong shape.
    """
    if score.shape != last_run.shape:
        raise BadInputError(
            "wrong shape", where="scheduling policy", field="score", value=score.shape, allowed=str(last_run.shape)
        )
    if np.isnan(score).any():
        raise BadInputError("NaN score", where="scheduling policy", field="score", value=score.tolist())
    waited = step - 1 - last_run
    group = np.where(protected, 0, np.where(waited >= wait_limit_steps, 1, 2))
    key = np.where(group == 2, -score, np.where(protected, protected_until, -waited))
    order = np.lexsort((arrival_order, key, group))
    return order, group[order]


def share_tokens(need: IntArray, first: npt.NDArray[np.bool_], budget: int, chunk: int) -> IntArray:
    """Share the token budget of one step over rows in order.

    Rows marked ``first`` (decode rows, and rows with a waiting guarantee) get one token before anything else, so a
    long prefill never stalls a decode; what is left goes to prefill rows in order, at most ``chunk`` each.

    Parameters
    ----------
    need : IntArray, shape (R,)
        Known tokens not yet in the cache, >= 1.
    first : bool array, shape (R,)
    budget, chunk : int
        ``budget`` must be at least the number of ``first`` rows.

    Returns
    -------
    IntArray, shape (R,)
        Tokens per row, possibly 0; the sum is at most ``budget``.
    """
    base = first.astype(np.int64)
    extra = np.minimum(need, chunk) - base
    before = np.cumsum(extra) - extra
    share: IntArray = base + np.clip(budget - int(base.sum()) - before, 0, extra)
    return share
