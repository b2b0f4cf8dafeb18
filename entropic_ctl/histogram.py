"""A streaming histogram of positive durations whose bins keep the relative error of a quantile bounded.

Each power of two is cut into 64 bins of equal width (the high bits of the float64 itself: no logarithm per value), so
a bin is at most 1/64 of its lower edge wide and its middle differs from any value in it by at most
:data:`RELATIVE_ERROR` = 1/128. The idea is that of HdrHistogram (Tene); the layout is ours.
"""

from __future__ import annotations

import numpy as np

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["FIRST_PLACE", "PLACES", "RELATIVE_ERROR", "SHIFT", "DurationHistogram"]

_BITS = 6
SHIFT = 52 - _BITS
"""Bits of a float64 below those that number its bin."""

_LOW, _HIGH = -20, 20  # powers of two: about 1 microsecond to 12 days
_FIRST = (1023 + _LOW) << _BITS
_BINS = (_HIGH - _LOW) << _BITS

FIRST_PLACE = _FIRST - 1
"""Bin number of place 0; place p counts the values with bits >> SHIFT = FIRST_PLACE + p, the ends whatever lies beyond."""

PLACES = _BINS + 2
"""Number of places."""

RELATIVE_ERROR = 2.0 ** -(_BITS + 1)
"""Largest relative error of a quantile between 2^-20 s and 2^20 s; shorter gaps count as 0, longer as the longest."""


class DurationHistogram:
    """Counts by duration, in constant memory (20 KiB).

    Attributes
    ----------
    counts : IntArray, shape (2562,)
        Below 2^-20 s (zero included), the bins, and 2^20 s or more.
    maximum_s : float
        Largest value so far, exact; 0 without any.
    """

    __slots__ = ("counts", "maximum_s")

    def __init__(self) -> None:
        self.counts: IntArray = np.zeros(PLACES, np.int64)
        self.maximum_s = 0.0

    @property
    def n(self) -> int:
        """Values counted."""
        return int(self.counts.sum())

    def add(self, values_s: FloatArray) -> None:
        """Count durations, shape (M,), seconds, >= 0 and not NaN (a negative one would count as the longest)."""
        if values_s.shape[0] == 0:
            return
        place = (np.ascontiguousarray(values_s, np.float64).view(np.int64) >> SHIFT) - FIRST_PLACE
        np.clip(place, 0, PLACES - 1, out=place)
        self.counts += np.bincount(place, minlength=PLACES)
        self.maximum_s = max(self.maximum_s, float(values_s.max()))

    def merge(self, other: DurationHistogram) -> None:
        """Add the counts of another histogram."""
        self.counts += other.counts
        self.maximum_s = max(self.maximum_s, other.maximum_s)

    def quantile(self, share: float) -> float | None:
        """Return the smallest value that at least ``share`` of the values do not exceed, to :data:`RELATIVE_ERROR`.

        Parameters
        ----------
        share : float
            In (0, 1]; 1 gives the exact maximum.

        Returns
        -------
        float or None
            Seconds; None without values.

        Raises
        ------
        BadInputError
            If ``share`` lies outside (0, 1].
        """
        if not 0.0 < share <= 1.0:
            raise BadInputError("not a share", field="share", value=share, allowed="(0, 1]")
        total = np.cumsum(self.counts)
        if total[-1] == 0:
            return None
        place = int(np.searchsorted(total, np.ceil(share * float(total[-1]))))
        if share == 1.0 or place > _BINS:
            return self.maximum_s
        if place == 0:
            return 0.0
        edges = (np.array([place, place + 1], np.int64) + FIRST_PLACE) << SHIFT
        return min(float(edges.view(np.float64).mean()), self.maximum_s)
