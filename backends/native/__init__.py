"""The C++ kernels of the CPU: built on first use, called through ctypes on tensors' own memory."""

from __future__ import annotations

from backends.native.build import NativeUnavailableError, library, reason_unavailable

__all__ = ["NativeUnavailableError", "library", "reason_unavailable"]
