"""Random lengths whose mean is exactly the configured one, whatever the rounding."""

from __future__ import annotations

import numpy as np

from entropic_ctl.signals import IntArray

__all__ = ["lognormal_lengths", "turn_counts"]


def lognormal_lengths(rng: np.random.Generator, n: int, mean: float, cv: float) -> IntArray:
    """Draw ``n`` log-normal lengths >= 1 with exactly the given mean.

    A length is 1 + floor(X + U) with U uniform on [0, 1) and X log-normal of mean (mean - 1) and standard deviation
    cv * mean. The floor of X + U has the mean of X exactly. A mean of 1 is the constant 1.

    Parameters
    ----------
    rng : Generator
    n : int
    mean : float
        At least 1.
    cv : float
        Standard deviation over mean, >= 0, before rounding (which adds at most 1/4 to the variance).
    """
    normal, uniform = rng.standard_normal(n), rng.random(n)  # drawn always, so that cv does not move other draws
    base = mean - 1.0
    if base <= 0.0:
        return np.ones(n, np.int64)
    sigma2 = np.log1p((cv * mean / base) ** 2)
    x = base * np.exp(np.sqrt(sigma2) * normal - sigma2 / 2) if sigma2 > 0 else np.full(n, base)
    return 1 + np.floor(x + uniform).astype(np.int64)


def turn_counts(rng: np.random.Generator, n: int, mean: float, law: str) -> IntArray:
    """Draw how many requests each of ``n`` sessions makes.

    Parameters
    ----------
    rng : Generator
    n : int
    mean : float
        At least 1; whole if ``law`` is ``fixed``.
    law : {"geometric", "fixed"}
        Geometric on 1, 2, ... with that mean: 1 + floor(E / -ln(1 - 1/mean)) with E a unit exponential, so a larger
        mean never shortens a session.
    """
    unit = rng.standard_exponential(n)
    if law == "fixed" or mean == 1.0:
        return np.full(n, int(mean), np.int64)
    counts: IntArray = 1 + np.floor(unit / -np.log1p(-1.0 / mean)).astype(np.int64)
    return counts
