"""Element-wise helpers that mean the same on every array-API library."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from entropic_ctl.signals import Array

__all__ = ["clip", "namespace"]


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
