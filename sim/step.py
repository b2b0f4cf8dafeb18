"""One simulated iteration: a plan goes in, its cost and its outcome come out.

The cost model charges for the rows, the recordings say what they would have shown the controllers, and the recorded
response says what pruning kept, what it lost and how it shifted the entropies. Only decode rows are pruned.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from entropic_ctl.signals import Finish, FinishReason, FloatArray, IntArray, LogitView, StepPlan, StepResult, Tempered
from sim.clock import Clock
from sim.cost import CostModel
from sim.load import measure
from sim.trajectories import Trajectories

__all__ = ["StepModel"]

Temper = Callable[[LogitView], Tempered]


class StepModel:
    """Executes plans on paper.

    Parameters
    ----------
    cost : CostModel
    trajectories : Trajectories
    protected_tokens : int
        Context below which a row has only pages that are always read, so that pruning changes nothing.

    Attributes
    ----------
    kl_sum : float
        Recorded KL to dense attention, summed over decode tokens, nats.
    decode_tokens : int
    """

    def __init__(self, cost: CostModel, trajectories: Trajectories, protected_tokens: int = 0) -> None:
        self._protected_tokens = protected_tokens
        self.cost, self.trajectories = cost, trajectories
        self.kl_sum, self.decode_tokens = 0.0, 0
        self._last: StepPlan | None = None
        self._ids, self._decoding = np.empty(0, np.int64), 0
        self._decode, self._dense = np.empty(0, np.bool_), (np.empty(0), np.empty(0))

    def run(self, plan: StepPlan, temper: Temper, clock: Clock) -> StepResult:
        """Return what a plan costs and yields, and move the clock to the end of the step.

        Parameters
        ----------
        plan : StepPlan
        temper : callable
            The loop's ``temper``; called if a row samples.
        clock : Clock
        """
        old = self._last
        if not (old and plan.ids is old.ids and plan.samples is old.samples and plan.n_tokens is old.n_tokens):
            self._ids = plan.ids[plan.samples]  # a repeated plan shares its row columns
            self._decode = plan.samples & (plan.n_tokens == 1)
            self._decoding = int(np.count_nonzero(self._decode))
            self._dense = np.ones(plan.n_rows), np.zeros(plan.n_rows)
        self._last = plan
        samples, ids = plan.samples, self._ids
        kept, mean, worst, nats, theta, shift = self._prune(plan)
        load = measure(plan.context, plan.n_tokens, samples, theta, kept, protected_tokens=self._protected_tokens)
        charge = self.cost.step(load)
        start_s = clock.now_s
        end_s = clock.advance(charge.seconds)
        if not ids.shape[0]:
            return StepResult(
                plan.step,
                start_s,
                end_s,
                kept_fraction=kept,
                pruned_mass_mean=mean,
                pruned_mass_max=worst,
                certificate_max=nats,
                kv_bytes=charge.kv_bytes,
                flops=charge.flops,
                energy_j=charge.energy_j,
            )
        at, last = self.trajectories.select(ids)
        if shift is not None and ids.shape[0] < shift.shape[0]:
            shift = shift[samples]
        view = self.trajectories.view(at, shift)
        tempered = temper(view)
        self.trajectories.advance(ids, tempered.temperature)
        finished = tuple(Finish(int(i), FinishReason.EOS) for i in ids[last]) if last.any() else ()
        return StepResult(
            plan.step,
            start_s,
            end_s,
            ids,
            np.full(ids.shape[0], -1, np.int64),
            tempered.temperature,
            tempered.model_entropy,
            tempered.tempered_entropy,
            tempered.varentropy,
            kept,
            mean,
            worst,
            nats,
            charge.kv_bytes,
            charge.flops,
            finished,
            charge.energy_j,
        )

    def _prune(
        self, plan: StepPlan
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray | None]:
        """Return per row: kept share, mass bounds (mean, max), certificate in nats, effective theta, entropy shift."""
        theta, (ones, zeros) = plan.theta_nats, self._dense
        self.decode_tokens += self._decoding
        if not theta.any():
            return ones, zeros, zeros, zeros, theta, None
        recorded = self.trajectories.response
        if (
            not recorded.may_leave and self._decoding == theta.shape[0] and theta.all()
        ):  # the steady state: every row is pruned
            response = recorded(plan.context, theta)
            kept, mean, worst, shift = (
                response.kept,
                response.certificate_mean,
                response.certificate_max,
                response.entropy_shift,
            )
        else:
            theta = np.where(self._decode, theta, 0.0)
            if recorded.may_leave:
                theta = recorded.dense_beyond(plan.context, theta)
            pruned: IntArray = np.flatnonzero(theta)
            response = recorded(plan.context[pruned], theta[pruned])
            kept, mean, worst, shift = ones.copy(), zeros.copy(), zeros.copy(), zeros.copy()
            kept[pruned], mean[pruned] = response.kept, response.certificate_mean
            worst[pruned], shift[pruned] = response.certificate_max, response.entropy_shift
        self.kl_sum += float(response.kl.sum())
        return kept, mean, worst, -np.log1p(-np.minimum(worst, 1.0 - 1e-12)), theta, shift
