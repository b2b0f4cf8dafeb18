"""The C++ kernels of the CPU: built on first use, called through ctypes on tensors' own memory."""

from __future__ import annotations

from backends.native.build import NativeUnavailableError, library, reason_unavailable
from backends.native.paged import MAX_HEAD_DIM, AttendResult, AttendRows, attend, seal, write
from backends.native.step import LayerRule, LayerRules, StepAttention

__all__ = [
    "MAX_HEAD_DIM",
    "AttendResult",
    "AttendRows",
    "LayerRule",
    "LayerRules",
    "NativeUnavailableError",
    "StepAttention",
    "attend",
    "library",
    "reason_unavailable",
    "seal",
    "write",
]
