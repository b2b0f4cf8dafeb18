"""Simulated time, summed with compensation (Neumaier, 1974)."""

from __future__ import annotations

import math

from entropic_ctl.errors import NoProgressError

__all__ = ["Clock"]


class Clock:
    """Simulated seconds, summed without drift; never runs backwards."""

    __slots__ = ("_low", "_sum", "now_s")

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = self._sum = start_s
        self._low = 0.0

    @property
    def parts(self) -> tuple[float, float]:
        """The sum and its compensation."""
        return self._sum, self._low

    def set(self, now_s: float, total_s: float, low_s: float) -> None:
        """Take over a time that was advanced elsewhere by the same rule."""
        self.now_s, self._sum, self._low = now_s, total_s, low_s

    def advance(self, seconds: float) -> float:
        """Add a duration and return the new time.

        Raises
        ------
        NoProgressError
            If the duration is negative or not finite.
        """
        if not (seconds >= 0.0 and math.isfinite(seconds)):
            raise NoProgressError(
                f"a step of {seconds!r} s at t = {self.now_s:.6f} s: durations must be >= 0 and finite"
            )
        total = self._sum + seconds
        big, small = (self._sum, seconds) if self._sum >= seconds else (seconds, self._sum)
        self._low += (big - total) + small
        self._sum = total
        self.now_s = max(self.now_s, total + self._low)
        return self.now_s

    def jump(self, at_s: float) -> float:
        """Move to an absolute time (ignored if it lies in the past) and return the time."""
        if at_s > self.now_s:
            self.now_s = self._sum = at_s
            self._low = 0.0
        return self.now_s
