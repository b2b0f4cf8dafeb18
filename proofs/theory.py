"""Closed forms for the *linear* loop: gain and delay limits, and what feedback does to the variance of entropy.

Model: tempered entropy y_t = w_t + V u_t, where w is the entropy the text would have at u = 0 about its mean, and
u_{t+1} = u_t - k y_t. With g = k V: y_{t+1} = (1 - g) y_t + w_{t+1} - w_t, integral action on the previous error.
Here w is exogenous and V constant; in a real generation sampling changes the text. All ratios are var(y) / var(w).
Derivations are in ``proofs/README.md``; source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from entropic_ctl.errors import BadInputError

__all__ = [
    "ar1_best",
    "ar1_ratio",
    "ar1_threshold",
    "delay_limit",
    "ema_limit",
    "phi_for_cut",
    "small_gain_slope",
    "stationary_ratio",
    "white_ratio",
]


def _within(name: str, value: float, low: float, high: float) -> float:
    """Refuse a value outside the open interval (low, high), NaN included."""
    if not low < value < high:
        raise BadInputError("out of range", field=name, value=value, allowed=f"({low:g}, {high:g})")
    return value


def delay_limit(delay: int) -> float:
    """Return the supremum of k V for u+ = u - k V u(t - d) to be stable: 2 sin(pi / (4 d + 2)).

    >>> [round(delay_limit(d), 3) for d in (0, 1, 2)]
    [2.0, 1.0, 0.618]
    """
    if delay < 0:
        raise BadInputError("negative delay", field="delay", value=delay, allowed=">= 0 steps")
    return 2.0 * math.sin(math.pi / (4 * delay + 2))


def ema_limit(weight: float) -> float:
    """Return the supremum of k V when the error is filtered, f+ = (1-b) f + b y: 4/b - 2."""
    if not 0.0 < weight <= 1.0:
        raise BadInputError("out of range", field="weight", value=weight, allowed="(0, 1]")
    return 4.0 / weight - 2.0


def white_ratio(g: float) -> float:
    """Variance ratio for white entropy: 2 / (2 - g) > 1, Deming's funnel. For i.i.d. V use g = k E[V^2] / E[V]."""
    return 2.0 / (2.0 - _within("g", g, 0.0, 2.0))


def ar1_ratio(phi: float, g: float) -> float:
    """Variance ratio for AR(1) entropy with coefficient phi: 2 (1-phi) / ((2-g) (1 - (1-g) phi))."""
    _within("phi", phi, -1.0, 1.0)
    _within("g", g, 0.0, 2.0)
    return 2.0 * (1.0 - phi) / ((2.0 - g) * (1.0 - (1.0 - g) * phi))


def ar1_threshold(g: float) -> float:
    """Return the phi above which a gain g lowers the variance of AR(1) entropy: 1 / (3 - g)."""
    return 1.0 / (3.0 - _within("g", g, 0.0, 2.0))


def ar1_best(phi: float) -> tuple[float, float]:
    """Return (best g, ratio there): g = (3 phi - 1) / (2 phi), 8 phi (1-phi) / (1+phi)^2; (0, 1) for phi <= 1/3."""
    _within("phi", phi, -1.0, 1.0)
    if phi <= 1.0 / 3.0:
        return 0.0, 1.0
    return (3.0 * phi - 1.0) / (2.0 * phi), 8.0 * phi * (1.0 - phi) / (1.0 + phi) ** 2


def phi_for_cut(cut: float) -> float:
    """Return the least AR(1) coefficient at which the best gain cuts the variance by ``cut`` (0.15 is 15%).

    The larger root of (8 + q) phi^2 - (8 - 2 q) phi + q = 0 with q = 1 - cut.

    >>> round(phi_for_cut(0.15), 3), round(phi_for_cut(0.20), 3)
    (0.531, 0.567)
    """
    q = 1.0 - _within("cut", cut, 0.0, 1.0)
    half = 4.0 - q
    return (half + math.sqrt(half * half - q * (8.0 + q))) / (8.0 + q)


def small_gain_slope(autocorrelations: Sequence[float]) -> float:
    """Return d(ratio)/dg at g = 0 for stationary entropy: 1/2 - sum of autocorrelations at lags 1, 2, ...

    Negative, so that a small gain helps, exactly when they sum to more than 1/2.
    """
    return 0.5 - math.fsum(autocorrelations)


def stationary_ratio(autocorrelations: Sequence[float], g: float, noise_gain: float | None = None) -> float:
    r"""Return the variance ratio for any stationary entropy, from its autocorrelations r_1, r_2, ...

    With constant V the loop answers an impulse of w with 1, -g, -g q, -g q^2, ..., q = 1 - g, so

        ratio = 2 / (2 - g) * (1 - g A),    A = sum over m >= 1 of q^(m-1) r_m,

    below 1 exactly when the discounted sum A exceeds 1/2 (at g -> 0 the plain sum: :func:`small_gain_slope`).
    If V is drawn anew each token, independently of w, with g = k E[V] and G = k E[V^2] / E[V],

        ratio = 1 + G (1 + 2 q A) / (2 - G) - 2 g A,

    1 + g (c / 2 - (2 - c) A) for small g, c = E[V^2] / E[V]^2: from c = 2 on no positive A helps.

    Parameters
    ----------
    autocorrelations : sequence of float
        r_1, r_2, ...; those not given count as 0.
    g : float
        Mean loop gain k E[V], in (0, 2).
    noise_gain : float, optional
        G, in (0, 2); g for constant V.

    >>> round(stationary_ratio([0.6**m for m in range(1, 99)], 0.4), 12) == round(ar1_ratio(0.6, 0.4), 12)
    True
    """
    _within("g", g, 0.0, 2.0)
    noisy = g if noise_gain is None else _within("noise_gain", noise_gain, 0.0, 2.0)
    decay = 1.0 - g
    discounted = math.fsum(decay**m * r for m, r in enumerate(autocorrelations))
    return 1.0 + noisy * (1.0 + 2.0 * decay * discounted) / (2.0 - noisy) - 2.0 * g * discounted
