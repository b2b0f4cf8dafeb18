"""Compare pruned with dense attention on the same step: KL of the next-token distributions, kept in a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from entropic_ctl.signals import FloatArray, IntArray, StepPlan

__all__ = ["AuditTable", "kl_nats"]

_COLUMNS = ("step", "id", "context", "theta_nats", "kl_nats", "entropy_dense", "entropy_pruned")


def kl_nats(pruned: Tensor, dense: Tensor) -> FloatArray:
    """Return KL(pruned || dense) of each row, nats.

    Parameters
    ----------
    pruned, dense : Tensor, any float dtype, shape (M, n)
        Raw logits of the same positions.

    Returns
    -------
    float64, shape (M,)
    """
    log_p, log_q = torch.log_softmax(pruned.double(), -1), torch.log_softmax(dense.double(), -1)
    terms = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0.0)
    return np.asarray(terms.sum(-1).clamp_min(0.0).cpu().numpy(), np.float64)


class AuditTable:
    """Rows of audited decode steps, as columns."""

    def __init__(self) -> None:
        self._parts: list[tuple[Any, ...]] = []

    def add(
        self, plan: StepPlan, rows: IntArray, kl: FloatArray, dense_entropy: FloatArray, pruned_entropy: FloatArray
    ) -> None:
        """Append the audited rows (``rows`` index the plan; the other arrays have one entry per row)."""
        step = np.full(rows.shape[0], plan.step)
        columns = (plan.ids[rows], plan.context[rows], plan.theta_nats[rows], kl, dense_entropy, pruned_entropy)
        self._parts.append((step, *columns))

    def table(self) -> dict[str, Any]:
        """Return the columns ``step, id, context, theta_nats, kl_nats, entropy_dense, entropy_pruned``."""
        if not self._parts:
            return {name: np.empty(0) for name in _COLUMNS}
        return {name: np.concatenate([part[i] for part in self._parts]) for i, name in enumerate(_COLUMNS)}
