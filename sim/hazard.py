"""When a text ends: a logistic hazard in the number of its tokens and the sampling temperature.

After token t at temperature T, with u = ln T, it ends with probability 1 / (1 + exp(-(a + b ln t + c u + d u^2))). A
choice of ours among discrete-time hazards.
"""

from __future__ import annotations

import numpy as np

from entropic_ctl.bank import Bank
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["fit_hazard", "hazard"]


def hazard(coefficients: FloatArray, token: IntArray, temperature: float) -> FloatArray:
    """Return the probability that a text ends after each token, given that it got there.

    Parameters
    ----------
    coefficients : FloatArray, shape (4,)
        (a, b, c, d).
    token : IntArray, any shape
        From 1.
    temperature : float
    """
    u = np.log(temperature)
    level = coefficients[0] + coefficients[2] * u + coefficients[3] * u * u
    chance: FloatArray = 1.0 / (1.0 + np.exp(-level - coefficients[1] * np.log(token)))
    return chance


def fit_hazard(bank: Bank) -> FloatArray | None:
    """Fit the hazard of the end by Newton's method.

    Returns (a, b, c, d), or None if no text ended. Texts cut off by the recording limit count as going on. A small
    ridge keeps temperatures at which no text ended finite.
    """
    if not bank.ended.any():
        return None
    length = np.diff(bank.offset)
    token = np.concatenate([np.arange(1, n + 1) for n in length])
    u = np.log(np.repeat(bank.temperature, length))
    event = np.zeros(token.shape[0])
    event[bank.offset[1:][bank.ended] - 1] = 1.0
    design = np.stack((np.ones_like(u), np.log(token), u, u * u), axis=1)
    beta, ridge = np.array([np.log(event.mean()), 0.0, 0.0, 0.0]), np.diag([0.0, 0.1, 0.1, 0.1])
    for _ in range(50):
        p = 1.0 / (1.0 + np.exp(-design @ beta))
        step = np.linalg.solve((design.T * (p * (1 - p))) @ design + ridge, design.T @ (event - p) - ridge @ beta)
        beta = beta + np.clip(step, -2.0, 2.0)
        if np.abs(step).max() < 1e-9:
            break
    return beta
