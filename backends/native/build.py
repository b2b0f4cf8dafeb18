"""Compile the C++ kernels once per machine, and load them.

The library is built from ``src/*.cpp`` with the compiler of the machine, for its own processor, and kept in the user's
cache under a name that depends on the sources, the flags, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from backends.fetch import cache_dir
from entropic_ctl.errors import EntropicError

__all__ = ["NativeUnavailableError", "library", "reason_unavailable"]

_SOURCES = Path(__file__).parent / "src"
_FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fPIC", "-pthread", "-Wall"),
)
_KEPT = 3  # earlier builds that stay in the cache


class NativeUnavailableError(EntropicError):
    """The C++ kernels cannot be built here; the message says why and what to do."""


def _compiler() -> list[str]:
    """Return the command that compiles: the full path, then the arguments that ``CXX`` may bring."""
    asked = os.environ.get("CXX", "")
    try:
        words = shlex.split(asked)
    except ValueError as error:
        raise NativeUnavailableError(f"CXX is not a command: {asked!r} ({error})") from None
    for name, *arguments in [words] if words else [["c++"], ["g++"], ["clang++"]]:
        found = shutil.which(name)
        if found:
            return [found, *arguments]
    raise NativeUnavailableError(
        f"no C++ compiler{f' named {words[0]!r} (CXX)' if words else ''} on the path: install one "
        "(Debian: apt install g++), or run the PyTorch attention with engine.kernels = 'torch'"
    )


def _processor() -> str:
    """Return what ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NativeUnavailableError(
            f"{' '.join(command[:1])} could not compile the kernels: {said[0] if said else done.returncode}; "
            "run the PyTorch attention with engine.kernels = 'torch'"
        )


def _build(target: Path, compiler: list[str]) -> None:
    target.parent.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent.parent) as staging:
        sources = sorted(_SOURCES.glob("*.cpp"))
        objects = [Path(staging, f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(
                pool.map(
                    lambda pair: _run([*compiler, *_FLAGS, "-c", str(pair[0]), "-o", str(pair[1])]),
                    zip(sources, objects, strict=True),
                )
            )
        finished = Path(staging, target.name)
        _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(finished)])
        target.parent.mkdir(parents=True, exist_ok=True)
        finished.replace(target)  # whole, or not there
    builds = sorted(target.parent.parent.glob("*/"), key=lambda folder: folder.stat().st_mtime)
    for old in [folder for folder in builds if folder != target.parent][:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def _load() -> ctypes.CDLL:
    compiler = _compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256("\0".join([*_FLAGS, *compiler, version, _processor()]).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    target = cache_dir() / "native" / digest.hexdigest()[:16] / "libentropic.so"
    if not target.exists():
        _build(target, compiler)
    return ctypes.CDLL(str(target))


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled kernels, building them on first use (some seconds).

    Raises
    ------
    NativeUnavailableError
        Without a C++ compiler, where it fails, or where the cache cannot hold what it made.
    """
    try:
        return _load()
    except OSError as error:
        raise NativeUnavailableError(
            f"the C++ kernels cannot be built or loaded: {error} (cache folder {cache_dir()}): set CXX to a C++ "
            "compiler and ENTROPIC_CACHE to a folder that can be written, or run the PyTorch attention with "
            "engine.kernels = 'torch'"
        ) from None


def reason_unavailable() -> str | None:
    """Return why the kernels cannot be used here, or None if they can."""
    try:
        library()
    except NativeUnavailableError as error:
        return str(error)
    return None
