"""Student intervals over repeats: of a mean, and of a paired ratio on the log scale.

Repeats are independent (one root seed each); runs of two arms with the same repeat share their random numbers, so
their log ratio is taken within the pair. Source: textbook.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entropic_ctl.errors import BadInputError

__all__ = ["Effect", "Interval", "mean_interval", "paired"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its interval over ``n`` repeats; ``low`` and ``high`` are NaN below two, all NaN for none."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Effect:
    """A ratio to baseline with its 95% interval; ``low`` and ``high`` are NaN for a single pair, all NaN for none."""

    ratio: float
    low: float
    high: float
    pairs: int
    identical: bool
    """True if every pair was equal to the last bit: the arm did not touch this metric."""


def mean_interval(values: npt.ArrayLike, *, level: float = 0.95) -> Interval:
    """Return mean +- t_{n-1} s / sqrt(n) over the finite entries.

    Parameters
    ----------
    values : array_like, shape (n,)
        One number per repeat; entries that are not finite are left out.
    level : float
        Coverage, in (0, 1).
    """
    x = np.asarray(values, float)
    x = x[np.isfinite(x)]
    n = int(x.shape[0])
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = float(x.mean())
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    from scipy.special import stdtrit  # the quantile of Student's t

    half = float(stdtrit(n - 1, 0.5 + level / 2)) * float(x.std(ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def paired(arm: npt.ArrayLike, baseline: npt.ArrayLike, *, level: float = 0.95) -> Effect:
    """Return the ratio arm / baseline with its paired Student interval on the log scale.

    With d_i = ln(x_i / y_i): exp(mean(d) +- t_{n-1} s_d / sqrt(n)). Log ratios, because every metric is positive and
    the claims are ratios.

    Parameters
    ----------
    arm, baseline : array_like, shape (n,)
        Positive measurements; entry i of both comes from the same seed. Pairs with a value that is not finite and
        positive are left out.
    level : float
        Coverage of the interval.

    Raises
    ------
    BadInputError
        If the shapes differ.
    """
    x, y = np.asarray(arm, float), np.asarray(baseline, float)
    if x.shape != y.shape or x.ndim != 1:
        raise BadInputError("pairs need two vectors of equal length", value=(x.shape, y.shape))
    usable = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
    x, y = x[usable], y[usable]
    found = mean_interval(np.log(x) - np.log(y), level=level)
    identical = bool(found.n > 0 and np.array_equal(x, y))
    return Effect(math.exp(found.mean), math.exp(found.low), math.exp(found.high), found.n, identical=identical)
