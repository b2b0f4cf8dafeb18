"""The one numerical setting the pruning certificate depends on."""

from __future__ import annotations

import torch

from entropic_ctl.errors import BadInputError

__all__ = ["require_full_float32"]


def require_full_float32() -> None:
    """Raise unless float32 matrix products are computed in float32.

    Raises
    ------
    BadInputError
        If torch is set to TF32 or bfloat16 products: the certificate's rounding bounds would be false.
    """
    if torch.get_float32_matmul_precision() != "highest":
        raise BadInputError(
            "reduced-precision float32 products break the pruning certificate",
            where="torch.get_float32_matmul_precision()",
            value=torch.get_float32_matmul_precision(),
            allowed="'highest'",
            remedy="call torch.set_float32_matmul_precision('highest'), or prune with theta 0",
        )
