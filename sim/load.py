"""What one iteration asks of a machine, as a handful of sums: all that a cost model reads, and what is regressed on.

Three kinds of rows: *decode* rows compute one token and sample; of these the *pruned* ones have a budget and more
context than the pages that are always read; all others are *prefill* rows (chunks and recomputation).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from entropic_ctl.compiled import ENABLED, compiled
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["StepLoad", "measure", "total"]


class StepLoad(NamedTuple):
    """Sums over the rows of one iteration; c is a row's cached context, n its tokens, p the kept share of its pages.

    Parameters
    ----------
    rows, tokens, sampling : int
        Rows, tokens computed, rows that yield a token.
    decode_rows : int
    decode_context : float
        Sum of c over decode rows, pruned ones included.
    pruned_rows : int
    pruned_context, pruned_kept, pruned_kept_context : float
        Sums of c, p and p c over pruned rows.
    prefill_context, prefill_pairs : float
        Sums of c and of n c + n (n + 1) / 2 (query-key pairs) over prefill rows.
    """

    rows: int
    tokens: int
    sampling: int
    decode_rows: int
    decode_context: float
    pruned_rows: int = 0
    pruned_context: float = 0.0
    pruned_kept: float = 0.0
    pruned_kept_context: float = 0.0
    prefill_context: float = 0.0
    prefill_pairs: float = 0.0


def measure(
    context: IntArray,
    n_tokens: IntArray,
    samples: npt.NDArray[np.bool_],
    theta: FloatArray,
    kept: FloatArray,
    *,
    protected_tokens: int = 0,
    longest_tokens: float = np.inf,
) -> StepLoad:
    """Return the load of one iteration (all arrays of shape (R,), columns as in ``StepPlan``).

    Sums run from the first row to the last (not pairwise), so that the compiled twin gives the same bits.

    Parameters
    ----------
    context, n_tokens : IntArray
    samples : bool array
    theta : FloatArray
        Budget in nats; read only as "pruned or not".
    kept : FloatArray
        Share of KV pages read in the pruned layers.
    protected_tokens : int
        A row with less context has only pages that are always read: it counts as dense.
    longest_tokens : float
        A row with more context is not pruned either.
    """
    if ENABLED:
        return StepLoad(
            n_tokens.shape[0], *sums_loop(context, n_tokens, samples, theta, kept, protected_tokens, longest_tokens)
        )
    decode = samples & (n_tokens == 1)
    pruned = decode & (theta > 0) & (context >= protected_tokens) & (context <= longest_tokens)
    c, p = context[pruned].astype(np.float64), kept[pruned]
    rest = ~decode
    cached, new = context[rest].astype(np.float64), n_tokens[rest].astype(np.float64)
    return StepLoad(
        n_tokens.shape[0],
        int(n_tokens.sum()),
        int(np.count_nonzero(samples)),
        int(np.count_nonzero(decode)),
        float(context[decode].sum()),
        c.shape[0],
        total(c),
        total(p),
        total(c * p),
        total(cached),
        total(new * (cached + 0.5 * (new + 1.0))),
    )


def total(values: FloatArray) -> float:
    """Return the sum from the first entry to the last, as a loop adds it."""
    return float(np.cumsum(values)[-1]) if values.shape[0] else 0.0


@compiled
def sums_loop(
    context: IntArray,
    n_tokens: IntArray,
    samples: npt.NDArray[np.bool_],
    theta: FloatArray,
    kept: FloatArray,
    protected_tokens: int,
    longest_tokens: float,
) -> tuple[int, int, int, float, int, float, float, float, float, float]:
    """Twin of :func:`measure`."""
    tokens = sampling = decoding = pruned = 0
    decode_context = pruned_context = pruned_kept = pruned_kept_context = prefill_context = prefill_pairs = 0.0
    for i in range(n_tokens.shape[0]):
        n, c = n_tokens[i], float(context[i])
        tokens += n
        sampling += samples[i]
        if samples[i] and n == 1:
            decoding += 1
            decode_context += c
            if theta[i] > 0.0 and protected_tokens <= context[i] <= longest_tokens:
                pruned += 1
                pruned_context += c
                pruned_kept += kept[i]
                pruned_kept_context += c * kept[i]
        else:
            prefill_context += c
            prefill_pairs += n * (c + 0.5 * (n + 1.0))
    sums = pruned_context, pruned_kept, pruned_kept_context, prefill_context, prefill_pairs
    return tokens, sampling, decoding, decode_context, pruned, *sums
