"""Watches a run for the promises the loop makes, whatever the paper's claims come to.

A collector like :class:`entropic_ctl.metrics.Metrics`, fed with the same events. Promise: in every step, for every row,
the certified information loss -ln(1 - m) of its worst query head does not exceed the row's budget theta.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entropic_ctl.collectors import Collector
from entropic_ctl.signals import Finish, StepPlan, StepResult

__all__ = ["Guarantee"]

SLACK = 1e-9
"""Relative slack for the float64 logarithm that turns a mass bound into nats."""


@dataclass
class Guarantee(Collector):
    """Counts pruned decode rows and those whose certificate exceeds their budget."""

    rows: int = 0
    violations: int = 0
    worst_share: float = 0.0
    """Largest certificate / budget seen."""
    mass_max: float = 0.0
    certificate_max: float = 0.0

    def step(self, plan: StepPlan, result: StepResult, finished: tuple[Finish, ...]) -> None:  # noqa: ARG002
        """Check one iteration."""
        if not plan.n_rows or not result.certificate_max.size:
            return
        pruned = plan.samples & (plan.n_tokens == 1) & (plan.theta_nats > 0)
        n = int(pruned.sum())
        if not n:
            return
        theta, nats = plan.theta_nats[pruned], result.certificate_max[pruned]
        self.rows += n
        self.violations += int((~(nats <= theta * (1 + SLACK))).sum())  # NaN counts as a violation
        self.worst_share = max(self.worst_share, float(np.max(nats / theta)))
        self.certificate_max = max(self.certificate_max, float(nats.max()))
        self.mass_max = max(self.mass_max, float(result.pruned_mass_max[pruned].max()))
