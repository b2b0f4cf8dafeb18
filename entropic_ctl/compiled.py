"""Compiled twins of hot host functions (numba, optional).

A twin is a plain Python loop over scalars that does what its NumPy reference does, to the last bit: only additions,
products, divisions and comparisons, in the reference's order. Exponentials and logarithms go through
:mod:`entropic_ctl.arrays`. Tests hold each twin to its reference.

The machine code is cached under a name that depends on every source file of the packages with twins: numba itself would
not notice that a function called from another file has changed.

``ENTROPIC_COMPILED=0`` in the environment turns the twins off.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

__all__ = ["ENABLED", "compiled", "faster"]

try:
    import numba
except ImportError:
    numba = None

_KEPT = 7  # earlier versions whose machine code is kept

ENABLED = numba is not None and os.environ.get("ENTROPIC_COMPILED", "1") != "0"
"""Whether :func:`compiled` compiles."""

Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def _cache_folder() -> str:
    """Return the folder for machine code made of these sources, and drop those of sources that are gone."""
    package = Path(__file__).parent
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted([*package.rglob("*.py"), *package.parent.joinpath("sim").glob("*.py")]):
        stat = path.stat()
        digest.update(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "entropic-ctl" / "compiled"
    folder = root / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    others = sorted((other for other in root.iterdir() if other != folder), key=lambda other: other.stat().st_mtime)
    for other in others[:-_KEPT]:
        shutil.rmtree(other, ignore_errors=True)
    return str(folder)


def compiled(loop: Function) -> Function:
    """Return ``loop`` compiled (the machine code is cached), or as it is where twins are off."""
    if not ENABLED:
        return loop
    before = numba.config.CACHE_DIR
    fast: Any
    try:
        numba.config.CACHE_DIR = _cache_folder()
        fast = numba.njit(cache=True, error_model="numpy")(loop)
    except OSError:  # no place to write: compile in every process
        fast = numba.njit(error_model="numpy")(loop)
    finally:
        numba.config.CACHE_DIR = before
    return cast("Function", fast)


def faster(loop: Function, reference: Function) -> Function:
    """Return the compiled ``loop``, or its NumPy ``reference`` where twins are off."""
    return loop if ENABLED else reference
