"""The literal "entropic share" of a page, kept as a documented counter-example *(ours)*.

With page mass m_b and page entropy H_b (of the weights inside the page, renormalised),

    I_b = -m_b ln m_b + m_b H_b,      sum over b of I_b = the entropy of the attention weights.

It splits the attention entropy over the pages, but it measures *spread*, not importance. A page that holds almost all
the mass on one token has I_b near 0: with mass 0.99 on one token and nine diffuse pages sharing the rest it ranks last,
and with mass 1 - 1e-6 an absolute threshold of 1e-5 drops it. Use :mod:`entropic_ctl.pruning.scores.mass`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from entropic_ctl.signals import FloatArray

__all__ = ["importance"]


def importance(weights: npt.ArrayLike) -> FloatArray:
    """Return I_b of each page, nats.

    Computed as -sum over the page's tokens of a ln a, which equals -m ln m + m H for every page.

    Parameters
    ----------
    weights : array, shape (..., P, page_tokens)
        Attention weights of one query, >= 0, sum 1 over both axes; empty slots 0.

    Returns
    -------
    FloatArray, shape (..., P)
    """
    a = np.asarray(weights, np.float64)
    return np.asarray(-(a * np.log(np.where(a > 0, a, 1.0))).sum(axis=-1), np.float64)
