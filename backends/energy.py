"""Energy counters of the machine: joules drawn so far by processor packages and by NVIDIA boards.

Linux shows Intel's running average power limit (RAPL) as ``/sys/class/powercap``; AMD processors appear in the same
tree. A package ``intel-rapl:0`` holds a count of microjoules that wraps at ``max_energy_range_uj``; its subdomains
``intel-rapl:0:1`` (cores, memory controller) are parts of it and are left out, except ``dram``, which is a domain of
its own on servers and lies beside the package, not in it. ``psys`` (the whole platform) would count packages twice.
``intel-rapl-mmio`` shows the same packages by another way. NVIDIA's library counts millijoules per board since the
driver was loaded. A counter is what the *machine* drew: other processes, and time when nothing ran, are in it.

Since kernel 5.10 the files are readable by root alone; many virtual machines have none. Then there is no reading, and
:func:`counters` says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Counters", "EnergyCounter", "EnergyMeter", "NvmlCounter", "RaplCounter", "counters", "nvml", "rapl"]

_POWERCAP = Path("/sys/class/powercap")


class EnergyCounter(Protocol):
    """Joules drawn since construction; never falls."""

    name: str

    def joules(self) -> float:
        """Return joules since construction."""
        ...


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii").strip())


class RaplCounter:
    """One RAPL domain.

    The count wraps: at 100 W after 44 minutes for the usual range of 262 kJ, after 11 for 66 kJ. A reading below the
    last one means that it wrapped once, so ``joules`` has to be called more often than that.

    Parameters
    ----------
    folder : Path
        With ``energy_uj`` and ``max_energy_range_uj``.
    name : str

    Raises
    ------
    OSError, ValueError
        If a file cannot be read, or holds no number.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self._file = name, folder / "energy_uj"
        self._range, self._last, self._total = _number(folder / "max_energy_range_uj"), _number(self._file), 0

    def joules(self) -> float:
        """Return joules since construction."""
        now = _number(self._file)
        self._total += now - self._last + (self._range + 1 if now < self._last else 0)
        self._last = now
        return self._total * 1e-6


class NvmlCounter:
    """One NVIDIA board (Volta or later): ``read()`` gives its millijoules since the driver was loaded."""

    def __init__(self, read: Callable[[], int], name: str) -> None:
        self.name, self._read, self._last, self._total = name, read, read(), 0

    def joules(self) -> float:
        """Return joules since construction; a driver that was reloaded starts at 0 again."""
        now = self._read()
        self._total += now - self._last if now >= self._last else now
        self._last = now
        return self._total * 1e-3


@dataclass(frozen=True)
class Counters:
    """What can be read here.

    Parameters
    ----------
    found : tuple of EnergyCounter
        Disjoint: their sum counts nothing twice.
    missing : tuple of str
        For each source that cannot be read, a sentence that says why.
    """

    found: tuple[EnergyCounter, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """Why there is no reading; empty if there is one."""
        return "" if self.found else "; ".join(self.missing) or "no source of energy readings was asked for"

    def joules(self) -> float:
        """Return the joules of all counters since they were made."""
        return sum(counter.joules() for counter in self.found)


def rapl(root: Path = _POWERCAP) -> Counters:
    """Return the counters of all processor packages, and of memory that is no part of one.

    Parameters
    ----------
    root : Path
        The powercap tree.
    """
    found: list[EnergyCounter] = []
    missing: list[str] = []
    if not root.is_dir():
        return Counters(missing=(f"RAPL: no {root} (not Linux, no kernel support, or a virtual machine)",))
    for folder in sorted(root.glob("intel-rapl:*")):
        package = folder.name.count(":") == 1
        try:
            label = (folder / "name").read_text(encoding="ascii").strip()
            if (package and label.startswith("package")) or (not package and label == "dram"):
                found.append(RaplCounter(folder, f"{folder.name} {label}"))
        except PermissionError as error:
            missing.append(
                f"RAPL: {error.filename} is readable by root only: run as root, or `chmod a+r` it (it lets every "
                "process watch what others compute)"
            )
        except (OSError, ValueError) as error:
            missing.append(f"RAPL: {folder.name}: {error}")
    if not found and not missing:
        missing.append(f"RAPL: {root} names no processor package")
    return Counters(tuple(found), tuple(missing))


def nvml(library: Any = None) -> Counters:
    """Return one counter per NVIDIA board.

    Parameters
    ----------
    library : module, optional
        Default: ``pynvml``, if it is installed.
    """
    if library is None:
        try:
            import pynvml as library  # type: ignore[import-not-found, import-untyped, no-redef, unused-ignore]
        except ImportError:
            return Counters(missing=("NVML: the Python package `nvidia-ml-py` (pynvml) is not installed",))
    found: list[EnergyCounter] = []
    missing: list[str] = []
    try:
        library.nvmlInit()
        boards = range(library.nvmlDeviceGetCount())
    except library.NVMLError as error:
        return Counters(missing=(f"NVML: {error}",))
    for i in boards:
        try:
            board = library.nvmlDeviceGetHandleByIndex(i)

            def read(board: Any = board) -> int:
                return int(library.nvmlDeviceGetTotalEnergyConsumption(board))

            found.append(NvmlCounter(read, f"nvml:{i}"))
        except library.NVMLError as error:  # boards before Volta count no energy
            missing.append(f"NVML: board {i}: {error}")
    if not found and not missing:
        missing.append("NVML: no board")
    return Counters(tuple(found), tuple(missing))


def counters() -> Counters:
    """Return everything this machine counts: processor packages, memory, NVIDIA boards."""
    parts = rapl(), nvml()
    return Counters(sum((part.found for part in parts), ()), sum((part.missing for part in parts), ()))


@dataclass
class EnergyMeter:
    """Joules between looks: ``lap`` returns what was drawn since the last one, 0 where nobody counts.

    Parameters
    ----------
    source : Counters
        Default: what this machine has.
    """

    source: Counters = field(default_factory=counters)
    _last: float = 0.0

    def lap(self) -> float:
        """Return joules since the last call, or since the counters were made."""
        if not self.source.found:
            return 0.0
        now = self.source.joules()
        drawn, self._last = now - self._last, now
        return drawn
