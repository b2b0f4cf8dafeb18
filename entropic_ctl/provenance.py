"""Where a result comes from: settings, seed, version, commit, hardware and library versions.

Nothing here imports a library to ask its version, and nothing depends on the time of day.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entropic_ctl import __version__
from entropic_ctl.config import RunConfig, digest, resolve

__all__ = ["commit", "hardware", "stamp", "versions"]

_LIBRARIES = ("numpy", "torch", "transformers", "triton", "simpy", "scipy", "python-flint", "pyarrow", "optuna")


def stamp(config: RunConfig | Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return what identifies a run, JSON-able.

    Parameters
    ----------
    config : RunConfig or mapping
        A run, stamped with every default spelled out, or an already resolved mapping.
    seed : int
        The seed actually used (a repeat may override the config's).

    Returns
    -------
    dict
        config, config_digest, seed, version, commit, hardware, versions.
    """
    resolved = resolve(config) if isinstance(config, RunConfig) else dict(config)
    return {
        "config": resolved,
        "config_digest": digest(resolved),
        "seed": int(seed),
        "version": __version__,
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
    }


@functools.cache
def commit() -> str:
    """Return the git commit of the source tree, ``-dirty`` if tracked files changed, or ``unknown``.

    An installed package lies in no checkout of its own and is ``unknown``, whatever repository surrounds it.
    """
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return "unknown"

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


@functools.cache
def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("model name", "Hardware", "cpu model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def hardware() -> dict[str, Any]:
    """Return cpu (model), cores (usable by this process), memory_bytes (physical, None if unknown), machine, system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory: int | None = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = None
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "memory_bytes": memory,
        "machine": platform.machine(),
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that are installed, read from their metadata."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
