"""Floating-point operations of a step, by formula."""

from __future__ import annotations

import numpy as np

from backends.models import LoadedModel
from entropic_ctl.signals import FloatArray, StepPlan

__all__ = ["step_flops"]


def step_flops(model: LoadedModel, plan: StepPlan, kept_fraction: FloatArray, dense_layers: int) -> float:
    """Return twice the multiply-adds: weights per token, output head per sampling row, attention per pair.

    2 P N + 2 d n M + 4 H D sum over rows and layers of attended (query, key) pairs *(ours)*. All experts of a
    mixture count as run.

    Parameters
    ----------
    model : LoadedModel
    plan : StepPlan
    kept_fraction : float64, shape (R,)
        Share of pages read in the pruned layers; 1 for dense rows.
    dense_layers : int
        Leading layers that are never pruned.
    """
    shape = model.shape
    n, context = plan.n_tokens.astype(np.float64), plan.context.astype(np.float64)
    pairs = n * context + n * (n + 1) / 2
    dense = min(dense_layers, shape.layers)
    layers = dense + (shape.layers - dense) * kept_fraction
    body = 2.0 * shape.body_parameters * n.sum()
    head = 2.0 * shape.hidden * model.vocab_size * np.count_nonzero(plan.samples)
    return float(body + head + 4.0 * shape.heads * shape.head_dim * (layers * pairs).sum())
