"""How much entropy the next token is expected to remove: E[max(0, H_t - H_{t+1})], nats, per request (ours)."""

from __future__ import annotations

import math

import numpy as np

from entropic_ctl.scheduling.base import ScheduleView
from entropic_ctl.signals import FloatArray

__all__ = ["ar1", "ar1_reduction", "ewma", "normal_cdf", "with_prior"]

_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
_PHI_LIMIT = 0.99


def normal_cdf(x: FloatArray) -> FloatArray:
    """Return the standard normal distribution function, absolute error below 7.6e-8 (Abramowitz and Stegun 7.1.26)."""
    z = np.abs(x) * math.sqrt(0.5)
    t = 1.0 / (1.0 + 0.3275911 * z)
    series = t * (_ERF[0] + t * (_ERF[1] + t * (_ERF[2] + t * (_ERF[3] + t * _ERF[4]))))
    tail = 0.5 * series * np.exp(-z * z)
    return np.where(x < 0, tail, 1.0 - tail)


def ar1_reduction(h: FloatArray, mean: FloatArray, deviation: FloatArray, phi: FloatArray) -> FloatArray:
    """Return E[max(0, h - H')] for H' = mean + phi (h - mean) + noise, a stationary Gaussian AR(1).

    With D = (1 - phi)(h - mean) and s' = s sqrt(1 - phi^2): D Phi(D/s') + s' pdf(D/s');
    max(D, 0) where s' is 0 (below 1e-12).

    Parameters
    ----------
    h, mean, deviation, phi : FloatArray, broadcastable
        Last entropy, stationary mean and standard deviation (nats), lag-1 autocorrelation in [-1, 1].

    Returns
    -------
    FloatArray
        Non-negative; absolute error below 8e-8 |D|.
    """
    drift = (1.0 - phi) * (h - mean)
    noise = deviation * np.sqrt(np.maximum(1.0 - phi * phi, 0.0))
    noisy = noise > 1e-12
    scaled = np.clip(drift / np.where(noisy, noise, 1.0), -40.0, 40.0)
    pdf = np.exp(-0.5 * scaled * scaled) / math.sqrt(2 * math.pi)
    smooth = drift * normal_cdf(scaled) + noise * pdf
    floor = np.maximum(drift, 0.0)
    return np.where(noisy, np.maximum(smooth, floor), floor)


def ewma(view: ScheduleView) -> FloatArray:
    """Return the exponentially weighted mean of past reductions (0 while fewer than two entropies are known)."""
    return view.reduction_ewma


def ar1(view: ScheduleView) -> FloatArray:
    """Return the AR(1) expectation from running mean, variance and autocovariance (0 while nothing is known).

    The estimated phi is held in [-0.99, 0.99].
    """
    variance = view.entropy_var
    known = view.seen > 0
    phi = np.divide(view.entropy_cov1, variance, out=np.zeros_like(variance), where=variance > 1e-12)
    h, mean = np.where(known, view.entropy, 0.0), np.where(known, view.entropy_mean, 0.0)
    return ar1_reduction(h, mean, np.sqrt(variance), np.clip(phi, -_PHI_LIMIT, _PHI_LIMIT))


def with_prior(expected: FloatArray, view: ScheduleView, prior_nats: float, prior_weight: float) -> FloatArray:
    """Return the average of a prior, worth ``prior_weight`` reductions, and ``expected``, worth those observed.

    A request that has shown nothing gets the prior exactly; one reduction needs two entropies.

    Parameters
    ----------
    expected : FloatArray, shape (L,), nats
    view : ScheduleView
    prior_nats, prior_weight : float
    """
    shown = np.maximum(view.seen - 1, 0)
    return (prior_weight * prior_nats + shown * expected) / (prior_weight + shown)
