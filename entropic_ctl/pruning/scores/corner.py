"""Page score from the box around a page's keys: minimum and maximum per channel (Tang et al. 2024, "Quest").

For a query q and keys with min_d <= k_d <= max_d in every channel d,

    sum_d min(q_d min_d, q_d max_d)  <=  q.k  <=  sum_d max(q_d min_d, q_d max_d).

Quest ranks pages by the upper corner and reads a fixed number of them. Both corners together bound every score of the
page, so with c tokens its log-mass lies in [ln c + lower, ln c + upper] *(ours)*: a valid interval for
:func:`entropic_ctl.pruning.select.select`, as wide as the box. The corner is no key of the page: the widths of all
channels add up. Two rows of channels per page are 1/8 of the keys' bytes at page 16. What certifies tightly is
:mod:`entropic_ctl.pruning.scores.mass` on 8-bit keys.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray

__all__ = ["bounds", "interval"]

_EPS = float(np.finfo(np.float64).eps)


def bounds(query: npt.ArrayLike, low: npt.ArrayLike, high: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Return (lower, upper) bounds on every score q.k of a page, rounded outward.

    Parameters
    ----------
    query : array, shape (..., D)
        With the attention's scale in it.
    low, high : array, shape (..., D)
        Least and largest key of the page per channel, exact (of the stored keys), finite.

    Returns
    -------
    FloatArrays, shape (...)

    Raises
    ------
    BadInputError
        If a minimum is above its maximum, or not a number.
    """
    q, lo, hi = (np.asarray(part, np.float64) for part in (query, low, high))
    if not (lo <= hi).all():
        raise BadInputError("an empty box", field="low, high", allowed="low <= high in every channel")
    one, other = q * lo, q * hi
    slack = (q.shape[-1] + 2) * _EPS * np.maximum(np.abs(one), np.abs(other)).sum(axis=-1)
    lower, upper = np.minimum(one, other).sum(axis=-1), np.maximum(one, other).sum(axis=-1)
    return np.asarray(lower - slack), np.asarray(upper + slack)


def interval(
    query: npt.ArrayLike, low: npt.ArrayLike, high: npt.ArrayLike, count: npt.ArrayLike
) -> tuple[FloatArray, FloatArray]:
    """Return (lower, upper) bounds on the pages' log-mass ln(sum exp(q.k)), nats.

    Parameters
    ----------
    query, low, high
        See :func:`bounds`.
    count : integer array, broadcastable to (...,)
        Tokens in the page; an empty one has log-mass ``-inf``.

    Raises
    ------
    BadInputError
        See :func:`bounds`; or if a count is negative.
    """
    tokens = np.asarray(count, np.float64)
    if not (tokens >= 0).all():
        raise BadInputError("not a number of tokens", field="count", value=count, allowed=">= 0")
    lower, upper = bounds(query, low, high)
    with np.errstate(divide="ignore"):
        size = np.log(tokens)
    return size + lower - 4 * _EPS * np.abs(lower) - 8 * _EPS, size + upper + 4 * _EPS * np.abs(upper) + 8 * _EPS
