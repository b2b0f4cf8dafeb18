"""Element-wise helpers that mean the same on every array-API library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from entropic_ctl.compiled import ENABLED, compiled
from entropic_ctl.signals import Array, FloatArray

__all__ = ["clip", "exp", "log", "namespace"]


def namespace(x: Array) -> Any:
    """Return the array-API namespace of ``x``; the look-up costs a NumPy array nothing."""
    return np if type(x) is np.ndarray else array_namespace(x)


def clip(x: Array, low: float, high: float) -> Array:
    """Clamp ``x`` to [low, high]; NaN stays NaN.

    NumPy arrays take two ufuncs: the compatibility layer's ``clip`` costs ten times that.

    Parameters
    ----------
    x : array
    low, high : float
        low <= high.
    """
    if isinstance(x, np.ndarray):
        return np.minimum(np.maximum(x, low), high)
    return array_namespace(x).clip(x, low, high)


@compiled
def exp_loop(x: FloatArray) -> FloatArray:
    out = np.empty_like(x)
    for i in range(x.shape[0]):
        out[i] = math.exp(x[i])
    return out


@compiled
def log_loop(x: FloatArray) -> FloatArray:
    out = np.empty_like(x)
    for i in range(x.shape[0]):
        out[i] = math.log(x[i])
    return out


def exp(x: Array) -> Array:
    """Return e^x element-wise; one-dimensional NumPy arrays by the C library where twins are compiled.

    The only place, with :func:`log`, where runs with and without numba may differ, in the last bit: inside a compiled
    loop only the scalar function is at hand, and a loop must give what the same steps taken one by one give.
    """
    if ENABLED and type(x) is np.ndarray and x.ndim == 1:
        return exp_loop(x)
    return namespace(x).exp(x)


def log(x: FloatArray) -> FloatArray:
    """Return ln x of a one-dimensional array of positive numbers; see :func:`exp`."""
    return log_loop(x) if ENABLED else np.log(x)
