"""What schedulers are told of a request's output length: the true one, seen through an error.

    predicted = max(1, round(true * exp(sigma Z))),   Z standard normal

so the median of predicted / true is 1 up to rounding and sigma (``WorkloadConfig.length_error``) is the standard
deviation of its logarithm. The Z come from the stream ``predictions`` of the root seed: errors move nothing else, and
two runs that differ in sigma scale the same errors. The true length is the output limit where only that ends a request,
and else the length of the recorded text at the base temperature: a law that moves the temperature makes even the exact
prediction a guess. The error model is ours.
"""

from __future__ import annotations

import numpy as np

from entropic_ctl.config import WorkloadConfig
from entropic_ctl.signals import IntArray
from sim.streams import stream

__all__ = ["predictions"]

_MOST = float(2**40)


def predictions(config: WorkloadConfig, seed: int, true_tokens: IntArray, *, oracle: bool = False) -> IntArray:
    """Return the predicted output length of each request, 0 where nothing is predicted.

    Parameters
    ----------
    config : WorkloadConfig
        Its ``length_prediction`` and ``length_error``.
    seed : int
        Root seed of the run.
    true_tokens : IntArray, shape (N,)
        At least 1.
    oracle : bool
        The policy asks for the true lengths, whatever the configuration of the workload.

    Returns
    -------
    IntArray, shape (N,), tokens
    """
    if oracle or config.length_prediction == "exact":
        return true_tokens.astype(np.int64)
    if config.length_prediction == "none":
        return np.zeros(true_tokens.shape[0], np.int64)
    factor = np.exp(config.length_error * stream(seed, "predictions").standard_normal(true_tokens.shape[0]))
    told: IntArray = np.clip(np.rint(true_tokens * factor), 1.0, _MOST).astype(np.int64)
    return told
