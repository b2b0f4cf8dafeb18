"""Bootstrap intervals of means and of any statistic of items, seeded.

Positions of a text resemble their neighbours, so they are resampled in blocks (moving-block bootstrap, Kuensch, 1989):
blocks of consecutive positions are drawn from all stretches, every block start equally likely. Prompts and needles are
resampled one by one (Efron and Tibshirani, 1993). All intervals are percentile intervals: they say how far a number
depends on which positions, prompts or needles of these kinds were looked at, and nothing about other kinds of text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["LEVEL", "Interval", "block_statistic", "item_statistic", "mean_of"]

LEVEL = 0.95


class Interval(NamedTuple):
    """A value with the ends of its interval; both ends are NaN where there is nothing to resample."""

    value: float
    low: float
    high: float


def _ends(value: float, drawn: FloatArray, level: float) -> Interval:
    drawn = drawn[np.isfinite(drawn)]
    if drawn.size == 0:
        return Interval(value, float("nan"), float("nan"))
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def block_statistic(
    statistic: Callable[[FloatArray], FloatArray],
    values: FloatArray,
    *,
    block: int = 16,
    draws: int = 2000,
    seed: int = 0,
    level: float = LEVEL,
) -> Interval:
    """Return a statistic of positions, with a moving-block bootstrap interval.

    Parameters
    ----------
    statistic : callable((..., n) array) -> (...) array
        Along the last axis.
    values : FloatArray, shape (R, N)
        One row per stretch of consecutive positions.
    block : int
        Positions per block, at most N.
    draws : int
        Bootstrap samples.
    seed : int
    level : float
        Of the interval.

    Raises
    ------
    BadInputError
        If there is no value, or ``block`` is below 1.
    """
    values = np.atleast_2d(np.asarray(values, np.float64))
    if values.size == 0:
        raise BadInputError("nothing to summarise", field="values", value=values.shape)
    if block < 1:
        raise BadInputError("not a block", field="block", value=block, allowed=">= 1")
    value = float(statistic(values.reshape(-1)))
    block = min(block, values.shape[1])
    blocks = np.lib.stride_tricks.sliding_window_view(values, block, axis=1).reshape(-1, block)
    if blocks.shape[0] == 1:
        return Interval(value, float("nan"), float("nan"))
    rng, each = np.random.default_rng([seed, 1]), max(1, round(values.size / block))
    drawn = []
    for first in range(0, draws, 200):  # a few megabytes at a time
        picks = rng.integers(blocks.shape[0], size=(min(200, draws - first), each))
        drawn.append(statistic(blocks[picks].reshape(picks.shape[0], -1)))
    return _ends(value, np.concatenate(drawn), level)


def item_statistic(
    statistic: Callable[[IntArray], FloatArray], items: int, *, draws: int = 2000, seed: int = 0, level: float = LEVEL
) -> Interval:
    """Return a statistic of all items, with an interval from resampling items.

    Parameters
    ----------
    statistic : callable((..., items) index) -> (...) array
        Of the items at ``index`` (with repetitions); NaN where it is undefined, such draws are left out.
    items : int
        How many there are, at least 1.
    draws : int
    seed : int
    level : float

    Raises
    ------
    BadInputError
        If there are no items.
    """
    if items < 1:
        raise BadInputError("no items", field="items", value=items, allowed=">= 1")
    value = float(statistic(np.arange(items)))
    if items == 1:
        return Interval(value, float("nan"), float("nan"))
    picks = np.random.default_rng([seed, 2]).integers(items, size=(draws, items))
    return _ends(value, statistic(picks), level)


def mean_of(values: FloatArray) -> Callable[[IntArray], FloatArray]:
    """Return a function from indices (..., n) to the means (...) of the values there, NaN left out.

    Parameters
    ----------
    values : FloatArray, shape (n,)
    """
    known = np.isfinite(values)
    filled = np.where(known, values, 0.0)

    def mean(index: IntArray) -> FloatArray:
        count = known[index].sum(axis=-1)
        total = filled[index].sum(axis=-1)
        return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan))

    return mean
