"""Entropy-aware scheduling: expected entropy reduction per unit of cost.

    pi(s) = E[dH_s] / (alpha C_s + beta M_s + gamma L_s)

The ratio is the paper's; the shares, the predictors and the prior are ours. All three costs are shares, so that
gains transfer between machines: C_s the tokens the request needs in its next step over the token budget of a step,
M_s the pages it holds over the pool, L_s its expected remaining time over the latency objective. C_s > 0 and
alpha > 0 keep the denominator positive. Remaining output is taken as memoryless: ``expected_output_tokens`` more
tokens, or what is left to the limit if that is less. A request that has shown no entropy yet has the prior
``prior_nats``, by default the mean reduction per token of the shipped bank (0.57 to 0.72 nats by temperature). Holding
no pages, it is then still ahead of a started request of average entropy, so new requests start and reveal themselves;
a prior three times as large starts everything at once, and near saturation pays for it in preemptions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entropic_ctl import fields
from entropic_ctl.scheduling import _predictors
from entropic_ctl.scheduling.base import ScheduleView, SchedulingConfig, SchedulingPolicy
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["Config", "Entropic", "build"]

_PREDICTORS = {"ewma": _predictors.ewma, "ar1": _predictors.ar1}


@dataclass(frozen=True)
class Config(SchedulingConfig):
    """Weights of the three costs, the predictor, and the prior."""

    predictor: str = fields.choice("ewma", ("ewma", "ar1"), "how E[dH] is predicted")
    alpha: float = fields.number(
        1.0, 0.0, 1e6, "weight of compute: tokens of the next step / token budget", open_lo=True
    )
    beta: float = fields.number(1.0, 0.0, 1e6, "weight of memory: pages held / pool")
    gamma: float = fields.number(1.0, 0.0, 1e6, "weight of latency: expected remaining time / latency objective")
    latency_objective_s: float = fields.number(10.0, 0.0, 1e9, "latency objective, seconds", open_lo=True)
    expected_output_tokens: float = fields.number(128.0, 1.0, 1e9, "tokens a request is expected to go on for")
    prior_nats: float = fields.number(0.65, 0.0, 100.0, "E[dH] of a request that has shown nothing yet, nats")
    prior_weight: float = fields.number(2.0, 0.0, 1e6, "observed reductions the prior is worth", open_lo=True)


class Entropic:
    """The ratio above, evaluated over the live requests."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._predict = _PREDICTORS[config.predictor]

    def expected_reduction(self, view: ScheduleView) -> FloatArray:
        """Return E[dH_s] in nats, shape (L,)."""
        return _predictors.with_prior(self._predict(view), view, self.config.prior_nats, self.config.prior_weight)

    def cost(self, view: ScheduleView) -> FloatArray:
        """Return alpha C + beta M + gamma L, shape (L,), positive and without unit."""
        c = self.config
        pending: IntArray = np.maximum(view.known_tokens - view.cached_tokens, 1)
        compute = np.minimum(pending / view.token_budget, 1.0)
        memory = view.pages / view.pool_pages
        prefill_steps = np.maximum(pending / view.token_budget, 1.0) - 1.0  # steps before the one that samples
        output = np.minimum(view.token_limit - view.generated_tokens, c.expected_output_tokens)
        latency = (prefill_steps + output) * view.step_s / c.latency_objective_s
        return np.asarray(c.alpha * compute + c.beta * memory + c.gamma * latency)

    def score(self, view: ScheduleView) -> FloatArray:
        """Return pi(s), shape (L,)."""
        return self.expected_reduction(view) / self.cost(view)


def build(config: Config) -> SchedulingPolicy:
    """Return the policy."""
    return Entropic(config)
