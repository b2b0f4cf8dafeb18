"""The one numerical setting the pruning certificate depends on."""

from __future__ import annotations

import os
from typing import Any

import torch

from entropic_ctl.errors import BadInputError

__all__ = ["require_full_float32"]

_FULL = ("none", "ieee")


def _products(backend: Any) -> str:
    """Precision of a backend's float32 matrix products; ``none`` means the default, which is full."""
    return str(getattr(backend.matmul, "fp32_precision", "none"))


def require_full_float32() -> None:
    """Raise unless float32 matrix products are computed in float32.

    Raises
    ------
    BadInputError
        If torch or oneDNN is set to TF32 or bfloat16 products: the certificate's rounding bounds would be false.
    """
    found = {
        "torch.backends.mkldnn.matmul.fp32_precision": _products(torch.backends.mkldnn),
        "torch.backends.cuda.matmul.fp32_precision": _products(torch.backends.cuda),
    }
    name = next((key for key, value in found.items() if value not in _FULL), None)
    if name is None and os.environ.get("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT").upper() != "STRICT":
        name = "ONEDNN_DEFAULT_FPMATH_MODE"
        found[name] = os.environ[name]
    if name is not None:
        raise BadInputError(
            "reduced-precision float32 products break the pruning certificate",
            where=name,
            value=found[name],
            allowed="full float32 ('none', 'ieee'; for oneDNN 'STRICT')",
            remedy="call torch.set_float32_matmul_precision('highest'), or prune with theta 0",
        )
