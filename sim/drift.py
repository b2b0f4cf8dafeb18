r"""Is a queue stable at this load? An empirical Foster-Lyapunov test on the number of requests in the system.

The time up to the last arrival, warm-up left out, is cut into B equal blocks; D_b is the change of the number in
system over block b.

- **unstable**: the mean of D_b is above 0. For a queue that grows, the D_b are changes of a random walk with drift,
  nearly independent, so the t interval holds; for a stable queue they are negatively correlated (what came in goes
  out), the mean is (last - first) / B, and the interval is wider than it need be: no false alarm for that reason.
- **stable**: over the blocks that begin with more than the median of the numbers in system *so far*, the mean of D_b is
  below 0. This is Foster's criterion read off the data: above a level, the queue drifts down. For a random walk without
  drift that mean is 0, because the level does not know the future (the median of the whole path does, and selects
  falls), so it passes with the chosen error probability only.
- **undecided**: neither. At a load close to capacity nothing else can honestly be said.

The criterion is Foster's (1953); the block test is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray
from sim.intervals import mean_interval

__all__ = ["Drift", "in_system", "queue_drift"]


@dataclass(frozen=True)
class Drift:
    """Outcome of the test; rates in requests per second.

    Parameters
    ----------
    verdict : str
        ``stable``, ``unstable`` or ``undecided``.
    rate, low, high : float
        Mean drift of the number in system, with its interval.
    busy_rate, busy_low, busy_high : float
        The same over the blocks that began above the median so far.
    blocks : int
    """

    verdict: str
    rate: float
    low: float
    high: float
    busy_rate: float
    busy_low: float
    busy_high: float
    blocks: int


def in_system(arrival_s: npt.ArrayLike, left_s: npt.ArrayLike, at_s: npt.ArrayLike) -> FloatArray:
    """Return the number in system just after each of the times ``at_s``.

    Parameters
    ----------
    arrival_s, left_s : array_like, shape (N,)
        When each request came and left; NaN has not left.
    at_s : array_like, shape (K,)
    """
    came = np.sort(np.asarray(arrival_s, np.float64))
    gone = np.asarray(left_s, np.float64)
    gone = np.sort(gone[~np.isnan(gone)])
    at = np.asarray(at_s, np.float64)
    return (np.searchsorted(came, at, "right") - np.searchsorted(gone, at, "right")).astype(np.float64)


def queue_drift(
    arrival_s: npt.ArrayLike, left_s: npt.ArrayLike, *, blocks: int = 0, level: float = 0.99, warm_up: float = 0.2
) -> Drift:
    """Test whether the number in system drifts.

    Parameters
    ----------
    arrival_s, left_s : array_like, shape (N,)
        When each request came and left, seconds; NaN has not left.
    blocks : int
        B >= 8; 0 is one per 8 arrivals, between 8 and 256.
    level : float
        Confidence of both intervals.
    warm_up : float
        Share of the time left out at the start, where an empty system fills.

    Raises
    ------
    BadInputError
        With fewer than 4 arrivals per block, or when all arrive at once.
    """
    came = np.asarray(arrival_s, np.float64)
    blocks = blocks or min(256, max(8, came.shape[0] // 8))
    if blocks < 8 or came.shape[0] < 4 * blocks:
        raise BadInputError(
            "too few arrivals to tell a drift",
            field="requests",
            value=came.shape[0],
            allowed=f">= {4 * max(8, blocks)}",
        )
    begin, end = float(came.min()), float(came.max())
    if not end > begin:
        raise BadInputError("everybody arrives at once", field="arrival_s", value=begin, allowed="arrivals over time")
    begin += warm_up * (end - begin)
    number = in_system(came, left_s, np.linspace(begin, end, blocks + 1))
    change, width = np.diff(number), (end - begin) / blocks
    rate, low, high = (x / width for x in _bounds(change, level))
    middle = np.array([np.median(number[: i + 1]) for i in range(blocks)])  # of the past: the future would select falls
    above = number[:-1] > middle
    busy, busy_low, busy_high = (x / width for x in _bounds(change[above], level))
    verdict = "unstable" if low > 0 else "stable" if busy_high < 0 or number.max() <= 1 else "undecided"
    return Drift(verdict, rate, low, high, busy, busy_low, busy_high, blocks)


def _bounds(x: FloatArray, level: float) -> tuple[float, float, float]:
    """Return (mean, low, high) by Student's t; infinitely wide below 3 values."""
    found = mean_interval(x, level=level)
    return (found.mean, found.low, found.high) if found.n > 2 else (found.mean if found.n else 0.0, -np.inf, np.inf)
