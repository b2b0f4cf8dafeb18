"""The default page score: softmax mass, known as an interval on its unnormalised logarithm *(ours)*.

The information lost by dropping pages of total mass m is -ln(1 - m), so mass is importance. Pages must be ranked before
their keys are read, from approximate scores s~ with |s - s~| <= error. Log-sum-exp is 1-Lipschitz in the largest change
of its arguments, so the page's log-mass lies within ``error`` of that of s~.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray

__all__ = ["importance", "interval", "log_mass"]


def importance(weights: npt.ArrayLike) -> FloatArray:
    """Return the mass of each page.

    Parameters
    ----------
    weights : array, shape (..., P, page_tokens)
        Attention weights of one query, >= 0; empty slots 0.

    Returns
    -------
    FloatArray, shape (..., P)
    """
    return np.asarray(np.asarray(weights, np.float64).sum(axis=-1), np.float64)


def log_mass(scores: npt.ArrayLike) -> FloatArray:
    """Return ln(sum exp(score)) over the last axis, nats; ``-inf`` scores are empty slots (all empty: ``-inf``).

    Parameters
    ----------
    scores : array, shape (..., page_tokens)
    """
    s = np.asarray(scores, np.float64)
    top = s.max(axis=-1, keepdims=True, initial=-np.inf)
    safe = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(safe[..., 0] + np.log(np.exp(s - safe).sum(axis=-1)))


def interval(scores: npt.ArrayLike, error: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Return (lower, upper) bounds on the pages' log-mass, nats.

    Parameters
    ----------
    scores : array, shape (..., page_tokens)
        Approximate scores.
    error : array, broadcastable to (...,)
        Bound on every |score - exact score| of the page, >= 0; infinity says nothing is known.

    Raises
    ------
    BadInputError
        If an error bound is negative or NaN.
    """
    bound = np.asarray(error, np.float64)
    if not (bound >= 0).all():
        raise BadInputError("not an error bound", field="error", value=bound, allowed="[0, inf]")
    centre = log_mass(scores)
    slack = bound + 8 * np.finfo(np.float64).eps * (1.0 + np.where(np.isfinite(centre), np.abs(centre), 0.0))
    empty = centre == -np.inf
    return np.where(empty, -np.inf, centre - slack), np.where(empty, -np.inf, centre + slack)
