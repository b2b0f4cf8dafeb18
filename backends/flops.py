"""Floating-point operations of a step, by formula."""

from __future__ import annotations

import numpy as np

from backends.models import LoadedModel
from entropic_ctl.signals import FloatArray, IntArray, StepPlan

__all__ = ["step_flops"]


def step_flops(model: LoadedModel, plan: StepPlan, kept_fraction: FloatArray, pruned_layers: IntArray) -> float:
    """Return twice the multiply-adds: weights per token, output head per sampled position, attention per pair.

    2 P N + 2 d n M + 4 H D sum over rows and layers of attended (query, key) pairs *(ours)*. A pruned layer scores all
    keys from the shadow (q.k without the values: half of dense attention) and then attends to what it kept. P counts
    *active* weights: of a mixture its routers, shared experts and the k experts a token is sent to.

    Parameters
    ----------
    model : LoadedModel
    plan : StepPlan
    kept_fraction : float64, shape (R,)
        Share of pages read in the pruned layers.
    pruned_layers : int64, shape (R,)
        Layers that were pruned; 0 for dense rows.
    """
    shape = model.shape
    n, context = plan.n_tokens.astype(np.float64), plan.context.astype(np.float64)
    pairs = n * context + n * (n + 1) / 2
    layers = shape.layers - pruned_layers + pruned_layers * (0.5 + kept_fraction)
    body = 2.0 * shape.active_body_parameters * n.sum()
    head = 2.0 * shape.hidden * model.vocab_size * (np.count_nonzero(plan.samples) + int(plan.n_draft.sum()))
    return float(body + head + 4.0 * shape.heads * shape.head_dim * (layers * pairs).sum())
