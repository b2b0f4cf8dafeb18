"""Page score from the mean of a page's keys (block-sparse attention: InfLLM, MoBA and others; bounds *ours*).

Scores are linear in the key, so q.mean is the mean s of the page's scores, and by Jensen's inequality a page of c
tokens has log-mass at least ln c + s: a **lower bound**, and that is all the mean can promise. The mean of a key that
holds all the attention and of c - 1 keys that point away is small: the page with the largest mass can rank last.
Without a bound on the spread the upper end is infinity, and a budget then keeps every page.

With a radius R >= |k_i - mean| the scores lie within r = |q| R of s, and since their mean is s (Hoeffding's lemma)

    ln c + s  <=  log-mass  <=  ln c + s + min(r, r^2 / 2).

One row per page (1/16 of the keys' bytes at page 16) and one radius.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray

__all__ = ["interval"]

_EPS = float(np.finfo(np.float64).eps)


def interval(
    query: npt.ArrayLike,
    mean: npt.ArrayLike,
    count: npt.ArrayLike,
    radius: npt.ArrayLike = np.inf,
    error: npt.ArrayLike = 0.0,
) -> tuple[FloatArray, FloatArray]:
    """Return (lower, upper) bounds on the pages' log-mass ln(sum exp(q.k)), nats.

    Parameters
    ----------
    query : array, shape (..., D)
        With the attention's scale in it.
    mean : array, shape (..., D)
        Stored mean of the page's keys.
    count : integer array, broadcastable to (...,)
        Tokens in the page, >= 0; an empty one has log-mass ``-inf``.
    radius : array, broadcastable to (...,)
        Largest distance of a key from the true mean, rounded up; infinity (default): unknown.
    error : array, broadcastable to (..., D)
        Bound on |stored mean - true mean| in each channel (rounding to 16 bits is far above float64's).

    Raises
    ------
    BadInputError
        If a count, radius or error is negative or NaN.
    """
    q, centre, tokens = (np.asarray(part, np.float64) for part in (query, mean, count))
    spread, off = np.asarray(radius, np.float64), np.asarray(error, np.float64)
    for name, value in (("count", tokens), ("radius", spread), ("error", off)):
        if not (value >= 0).all():
            raise BadInputError("negative or NaN", field=name, allowed=">= 0")
    score = (q * centre).sum(axis=-1)
    slack = (q.shape[-1] + 8) * _EPS * (np.abs(q * centre).sum(axis=-1) + 1.0) + (np.abs(q) * off).sum(axis=-1)
    top = np.abs(q).max(axis=-1, initial=0.0)
    unit = q / np.where(top > 0, top, 1.0)[..., None]  # squares of tiny numbers would vanish
    length = top * np.sqrt((unit * unit).sum(axis=-1)) * (1 + (q.shape[-1] + 4) * _EPS)
    with np.errstate(divide="ignore", invalid="ignore"):
        reach = np.where(length > 0, length * spread, 0.0)  # 0 * inf: a query of zeros has equal scores
        size = np.log(tokens)
    rise = np.minimum(reach, 0.5 * reach * reach) * (1 + 8 * _EPS)
    size = size + np.zeros_like(score)
    lower, upper = size + score - slack, size + score + rise + slack
    return np.where(tokens > 0, lower, -np.inf), np.where(tokens > 0, upper, -np.inf)
