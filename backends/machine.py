"""What else the machine does while something is timed: CPU seconds of everybody but this process.

A timed run on a shared machine is a measurement only if the machine was free. Linux counts busy time over all cores
(``/proc/stat``, ticks of 10 ms); this process's own CPU time is known exactly; the difference is what others took,
time stolen by the hypervisor included.
"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

__all__ = ["ForeignLoad", "busy_s"]

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle, iowait; guest times (8, 9) are inside user times already


def busy_s(stat: Path = _STAT) -> float:
    """Return the CPU seconds all cores have been busy since boot; NaN where the system does not say."""
    try:
        fields = stat.read_text(encoding="ascii").split("\n", 1)[0].split()
        ticks = [int(x) for x in fields[1:9]]
        return sum(t for i, t in enumerate(ticks) if i not in _IDLE) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return math.nan


class ForeignLoad:
    """Measures from its construction: ``cores()`` is the mean number of cores others kept busy."""

    def __init__(self) -> None:
        self._busy, self._own, self._start = busy_s(), time.process_time(), time.perf_counter()

    def cores(self) -> float:
        """Return the mean number of cores that other processes used since construction, NaN if unknown."""
        seconds = time.perf_counter() - self._start
        others = (busy_s() - self._busy) - (time.process_time() - self._own)
        return max(0.0, others) / seconds if seconds > 0 else 0.0
