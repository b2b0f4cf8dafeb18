"""Exact entropy and varentropy of softmax distributions, from logits.

With x = (z - max z) / T, e = exp x, S = sum e and mu = sum(e x) / S,

    H = ln S - mu,        V = sum(e (x - mu)^2) / S,

so both are sums of terms of one sign: no cancellation, H >= 0 and V >= 0 by construction. dH/du = V for u = ln T.

Two measuring points, never mixed up: the *model entropy* is that of the raw logits at T = 1 (it feeds the clock, the
scheduler and the pruning budget); the *tempered entropy* is that of the logits after penalties and masks, divided by T
(it feeds the micro law, and nothing else). :class:`ArrayLogitView` keeps them apart.

Precision. NumPy arrays are computed in float64 (the host reference: float32 sums over 150,000 tokens would cost 1e-6
nats and the host is never the bottleneck); other libraries in float32 (float64 if the logits are float64), because
accelerators pay dearly for doubles and the error stays below 1e-5 nats at every vocabulary in use. 16-bit logits are
upcast first. Written against the array-API standard: the same code runs on NumPy and torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_numpy_namespace
from array_api_compat import device as device_of

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import Array

__all__ = ["ArrayLogitView", "entropy_varentropy", "moments", "shifted"]

_HOT = 1.0e30
"""Temperatures above it, infinity included, count as this one: every finite logit then has the same weight."""

_CUT = 1.0e4
"""Exponents below -_CUT are raised to it: exp is exactly 0 in float32 and float64, and 0 * x stays 0 (not NaN)."""


def _compute_dtype(xp: Any, logits: Array) -> Any:
    return xp.float64 if is_numpy_namespace(xp) or logits.dtype == xp.float64 else xp.float32


def shifted(logits: Array) -> Array:
    """Return ``logits - max(logits)`` along the last axis, upcast to the compute dtype.

    Parameters
    ----------
    logits : array, shape (..., n), any float dtype
        ``-inf`` marks a forbidden token. n must be at least 1.

    Returns
    -------
    array, shape (..., n), float64 (NumPy) or float32 / float64 (other libraries)
        At most 0; a row that is all ``-inf``, or holds a NaN or ``+inf``, is NaN where it matters.

    Raises
    ------
    BadInputError
        If there is no last axis or it is empty.
    """
    xp = array_namespace(logits)
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise BadInputError(
            "no vocabulary axis",
            field="logits",
            value=tuple(logits.shape),
            allowed="shape (..., n), n >= 1",
        )
    z = xp.astype(logits, _compute_dtype(xp, logits), copy=False)
    frozen = z.detach() if hasattr(z, "detach") else z  # H is shift-invariant: no gradient through the maximum
    with np.errstate(invalid="ignore", over="ignore"):
        return z - xp.max(frozen, axis=-1, keepdims=True)


def moments(shift: Array, temperature: Array | float | None = None) -> tuple[Array, Array]:
    """Return entropy (nats) and varentropy (nats squared) of softmax(shift / T) for logits already shifted.

    Parameters
    ----------
    shift : array, shape (..., n)
        Output of :func:`shifted`.
    temperature : float or array broadcastable to shape (...), optional
        T >= 0; None is 1. The shift happens before the division and exponents are cut at -1e4, so no T, however
        small, overflows. T below the smallest normal number of the compute dtype (0 included) is the greedy limit:
        H = ln(number of tied maxima), V = 0. T = infinity: H = ln(number of finite logits), V = 0. A negative or NaN
        temperature gives NaN.

    Returns
    -------
    H, V : arrays, shape (...)
        NaN for a row with empty support or a NaN, so that the caller can flag it.
    """
    xp = array_namespace(shift)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        if temperature is None:
            x = xp.maximum(shift, xp.asarray(-_CUT, dtype=shift.dtype, device=device_of(shift)))
        else:
            floor = float(xp.finfo(shift.dtype).smallest_normal)
            T = xp.asarray(temperature, dtype=shift.dtype, device=device_of(shift))
            T = xp.where(T >= 0.0, xp.clip(T, floor, _HOT), xp.nan * T)
            T = xp.broadcast_to(T, shift.shape[:-1])[..., None]
            x = xp.maximum(shift, -_CUT * T) / T
        e = xp.exp(x)
        total = xp.sum(e, axis=-1)
        mean = xp.sum(e * x, axis=-1) / total
        deviation = x - mean[..., None]
        return xp.log(total) - mean, xp.sum(e * deviation * deviation, axis=-1) / total


def entropy_varentropy(logits: Array, temperature: Array | float | None = None) -> tuple[Array, Array]:
    """Return entropy H (nats) and varentropy V (nats squared) of softmax(logits / T).

    Parameters
    ----------
    logits : array, shape (..., n), any float dtype
        NumPy or any array-API library; ``-inf`` allowed. Gradients (torch) are finite on every valid row.
    temperature : float or array broadcastable to shape (...), optional
        T >= 0, default 1; 0 is the greedy limit, see :func:`moments`.

    Returns
    -------
    H, V : arrays, shape (...)
        float64 for NumPy; else float32, or float64 for float64 logits. NaN marks empty support or a NaN logit.

    Raises
    ------
    BadInputError
        If the vocabulary axis is missing or empty.

    Examples
    --------
    >>> import numpy as np
    >>> H, V = entropy_varentropy(np.array([2.0, 1.0, 0.0]), 0.5)
    >>> round(float(H), 6)
    0.441057
    """
    return moments(shifted(logits), temperature)


class ArrayLogitView:
    """A :class:`~entropic_ctl.signals.LogitView` over arrays of logits held in memory.

    Parameters
    ----------
    logits : array, shape (M, n)
        Raw logits: what the clock and the scheduler read, at T = 1.
    processed : array, shape (M, n), optional
        The same after penalties and masks: what the micro law tempers. Default: the raw ones.
    """

    def __init__(self, logits: Array, processed: Array | None = None) -> None:
        raw = shifted(logits)
        self._processed = raw if processed is None else shifted(processed)
        self._model_entropy = moments(raw)[0]

    @property
    def model_entropy(self) -> Array:
        """Entropy of the raw logits at temperature 1, shape (M,), nats."""
        return self._model_entropy

    def at(self, temperature: Array) -> tuple[Array, Array]:
        """Tempered entropy (nats) and varentropy (nats squared) of the processed logits, each (M,)."""
        return moments(self._processed, temperature)
