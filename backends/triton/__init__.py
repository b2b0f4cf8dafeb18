"""The kernels of the GPU, in Triton: each has a PyTorch reference and a test that holds the two together.

Importing this package imports neither Triton nor anything that needs it; ask :func:`reason_unavailable` first.
"""

from __future__ import annotations

import importlib.util
import os
import sys

__all__ = ["exit_without", "interpreted", "reason_unavailable"]


def interpreted() -> bool:
    """Return whether kernels run under Triton's interpreter on the CPU (``TRITON_INTERPRET=1``, read at import)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def exit_without(program: str, *packages: str) -> None:
    """End with status 2 and one line if this Python lacks a package; for a program, before its imports."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        sys.stderr.write(
            f"{program}: {sys.executable} has no {', '.join(absent)}; another Python: make {program} PYTHON=...\n"
        )
        raise SystemExit(2)


def reason_unavailable() -> str | None:
    """Return why the kernels cannot run here, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'entropic-ctl[kernels]' (Linux), or keep to the PyTorch kernels"
    if interpreted():
        return None
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device is visible to PyTorch"
    return None
