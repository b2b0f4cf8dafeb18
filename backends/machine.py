"""What else the machine does while something is timed: CPU seconds of everybody but this process.

A timed run on a shared machine is a measurement only if the machine was free. Linux counts busy time over all cores
(``/proc/stat``, ticks of 10 ms); this process's own CPU time is known exactly; the difference is what others took,
time stolen by the hypervisor included. What that cannot show is a core made slower by its sibling thread, or by memory
that others use: for that, :class:`SpeedProbe` times the same small product again and again. And
:func:`read_bandwidth` measures what bounds every decode step: how fast memory can be read.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from backends.native import library

__all__ = ["ForeignLoad", "SpeedProbe", "busy_s", "process_s", "read_bandwidth"]

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


def process_s(pid: int) -> float:
    """Return the CPU seconds a process has used so far, all its threads together; NaN where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return math.nan


def read_bandwidth(*, megabytes: int = 512, threads: int | None = None, repeats: int = 5) -> float:
    """Return the bytes per second at which this machine reads memory (best of ``repeats``, and of one and all threads).

    Reading alone: a copy also writes, and so moves the same bytes more slowly. The block must be far larger than the
    last cache.

    Parameters
    ----------
    megabytes : int
        Size of the block, MiB.
    threads : int, optional
        Most threads; default: as many as torch uses.
    repeats : int

    Raises
    ------
    NativeUnavailableError
        Without a C++ compiler.
    """
    kernel = library().entropic_read_seconds
    kernel.restype = ctypes.c_double
    block = torch.ones(megabytes << 17, dtype=torch.int64)
    total = ctypes.c_uint64()
    arguments = (ctypes.c_void_p(block.data_ptr()), ctypes.c_int64(block.numel()))
    most = threads or torch.get_num_threads()  # one thread alone fills some machines' memory channels better
    tried = [n for n in {1, most} for _ in range(repeats + 1)]
    best = min(kernel(*arguments, ctypes.c_int(n), ctypes.byref(total)) for n in tried)
    if total.value != block.numel():
        raise ArithmeticError(f"read {total.value} of {block.numel()} words")
    return block.numel() * 8 / best


class ForeignLoad:
    """Measures from its construction: ``cores()`` is the mean number of cores others kept busy.

    Parameters
    ----------
    ours : sequence of int
        Processes that do not count as others, besides this one.
    """

    def __init__(self, ours: Sequence[int] = ()) -> None:
        self._ours = tuple(ours)
        self._busy, self._own, self._start = busy_s(), self._used(), time.perf_counter()

    def _used(self) -> float:
        return time.process_time() + sum(process_s(pid) for pid in self._ours)

    def cores(self) -> float:
        """Return the mean number of cores that other processes used since construction, NaN if unknown."""
        seconds = time.perf_counter() - self._start
        others = (busy_s() - self._busy) - (self._used() - self._own)
        return max(0.0, others) / seconds if seconds > 0 else 0.0


class SpeedProbe:
    """Times one fixed piece of what a decode step is made of, now and then.

    A sample is a product in bfloat16 (4 x 576 by 576 x 49,152: 57 MB of weights) and as long again in the interpreter.

    Parameters
    ----------
    every_s : float
        Seconds between samples; a sample takes about 4 ms on two cores, so it costs the run under one percent.
    """

    def __init__(self, *, every_s: float = 0.5) -> None:
        self._every_s = every_s
        self._weight = torch.ones((49_152, 576), dtype=torch.bfloat16)
        self._rows = torch.ones((4, 576), dtype=torch.bfloat16)
        self._due, self._seconds, self._samples = 0.0, 0.0, 0
        self.last_s = math.nan  # duration of the latest sample
        self._work()

    def _work(self) -> None:
        torch.nn.functional.linear(self._rows, self._weight)
        sum(i * i for i in range(30_000))

    def sample(self) -> None:
        """Take a sample if one is due; call it between steps."""
        start = time.perf_counter()
        if start < self._due:
            return
        self._work()
        end = time.perf_counter()
        self._due, self.last_s = end + self._every_s, end - start
        self._seconds, self._samples = self._seconds + (end - start), self._samples + 1

    @property
    def mean_s(self) -> float:
        """Mean duration of the samples, seconds; NaN if there are none."""
        return self._seconds / self._samples if self._samples else math.nan
