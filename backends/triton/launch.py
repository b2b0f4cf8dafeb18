"""The one place that starts kernels: on the device, or recorded for the compiler.

Entry points describe a launch; :func:`recording` collects the descriptions instead of running them. Run on tensors of
the device "meta" an entry point then tells the compiler exactly what it would launch, and proves by the way that it
never looks at a value on the host (a meta tensor has none).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Launch", "launch", "recording"]

_recorded: list[list[Launch]] = []


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch.

    Parameters
    ----------
    kernel : triton.JITFunction
    grid : tuple of int
    arguments : dict
        Every parameter of the kernel by name: tensors, numbers, None, constants.
    num_warps, num_stages : int
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int


def launch(kernel: Any, grid: tuple[int, ...], *, num_warps: int = 4, num_stages: int = 2, **arguments: Any) -> None:
    """Start a kernel over a grid, unless a recording is in progress: then remember it.

    Parameters
    ----------
    kernel : triton.JITFunction
    grid : tuple of int
        Nothing happens if it is empty.
    num_warps, num_stages : int
    **arguments
        The kernel's parameters by name.
    """
    if _recorded:
        _recorded[-1].append(Launch(kernel, grid, arguments, num_warps, num_stages))
    elif all(grid):
        kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages)


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches instead of running them."""
    _recorded.append([])
    try:
        yield _recorded[-1]
    finally:
        _recorded.pop()
