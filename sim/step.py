"""One simulated iteration: a plan goes in, its cost and its outcome come out.

The cost model charges for the rows, the recordings say what they would have shown the controllers, and the recorded
response says what pruning kept, what it lost and how it shifted the entropies. Only decode rows are pruned.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from entropic_ctl.signals import Finish, FinishReason, FloatArray, IntArray, LogitView, StepPlan, StepResult, Tempered
from sim.clock import Clock
from sim.cost import CostModel, StepCost
from sim.load import StepLoad, measure, total
from sim.speculation import Speculation
from sim.trajectories import Trajectories

__all__ = ["StepModel"]

Temper = Callable[[LogitView], Tempered]
_Pruned = tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray | None]


class StepModel:
    """Executes plans on paper.

    Parameters
    ----------
    cost : CostModel
    trajectories : Trajectories
    protected_tokens : int
        Context below which a row has only pages that are always read, so that pruning changes nothing.
    speculation : Speculation, optional
        Needed for plans with drafts.

    Attributes
    ----------
    kl_sum : float
        Recorded KL to dense attention, summed over decode tokens, nats.
    decode_tokens : int
    """

    def __init__(
        self,
        cost: CostModel,
        trajectories: Trajectories,
        protected_tokens: int = 0,
        speculation: Speculation | None = None,
    ) -> None:
        self.speculation = speculation
        self.protected_tokens = protected_tokens
        self.cost, self.trajectories = cost, trajectories
        self._longest_tokens = trajectories.response.last_context
        self.kl_sum, self.decode_tokens = 0.0, 0
        self._last: StepPlan | None = None
        self._ids, self._decoding = np.empty(0, np.int64), 0
        self._decode, self._tokens = np.empty(0, np.bool_), np.empty(0, np.int64)
        self._dense: FloatArray = np.empty((2, 0))

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
            self._dense = np.stack([np.ones(plan.n_rows), np.zeros(plan.n_rows)])
            self._tokens = np.full(self._ids.shape[0], -1, np.int64)
        self._last = plan
        samples, ids = plan.samples, self._ids
        kept, mean, worst, nats, shift = pruned = self._prune(plan)
        drafts = self.speculation
        if drafts is not None and (drafts.drafter is not None or plan.n_draft.any()):  # a drafter has its own prefill
            return self._verify(plan, temper, clock, pruned, drafts)
        load = self._load(plan, plan.n_tokens, kept)
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
        finished: tuple[Finish, ...] = ()
        if np.count_nonzero(last):
            finished = tuple(Finish(int(i), FinishReason.EOS) for i in ids[last])
        return StepResult(
            plan.step,
            start_s,
            end_s,
            ids,
            self._tokens,
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

    def _verify(
        self, plan: StepPlan, temper: Temper, clock: Clock, pruned: _Pruned, speculation: Speculation
    ) -> StepResult:
        """Run a plan with drafts: every sampling row shows ``1 + n_draft`` positions and yields those accepted."""
        kept, mean, worst, nats, shift = pruned
        samples, n_draft = plan.samples, plan.n_draft[plan.samples]
        count = n_draft + 1
        ids = self._ids.repeat(count)
        ahead = np.arange(ids.shape[0]) - np.repeat(np.cumsum(count) - count, count)
        at, last = self.trajectories.select(ids, ahead)
        view = self.trajectories.view(at, None if shift is None else shift[samples].repeat(count))
        tempered = temper(view)
        outcome = speculation.verify(
            ids,
            self.trajectories.token(ids) + ahead,
            n_draft,
            greedy=plan.greedy[samples].repeat(count),
            model_entropy=tempered.model_entropy,
            tempered_entropy=tempered.tempered_entropy,
            last=last,
        )
        drafted = np.zeros(plan.n_rows, np.int64)
        drafted[samples] = outcome.drafted
        tokens = plan.n_tokens - plan.n_draft + drafted
        load = self._load(plan, tokens, kept)
        charge = self.cost.step(load._replace(sampling=load.sampling + int(drafted.sum())))
        charge = StepCost(*(a + b for a, b in zip(charge, speculation.cost(plan, drafted), strict=True)))
        start_s, yes = clock.now_s, outcome.accepted
        self.decode_tokens += int(np.count_nonzero(yes & (n_draft > 0).repeat(count)))
        self.trajectories.advance_all(ids[yes], tempered.temperature[yes])
        return StepResult(
            plan.step,
            start_s,
            clock.advance(charge.seconds),
            ids[yes],
            np.full(int(np.count_nonzero(yes)), -1, np.int64),
            tempered.temperature[yes],
            tempered.model_entropy[yes],
            tempered.tempered_entropy[yes],
            tempered.varentropy[yes],
            kept,
            mean,
            worst,
            nats,
            charge.kv_bytes,
            charge.flops,
            tuple(Finish(int(i), FinishReason.EOS) for i in ids[yes & last]),
            charge.energy_j,
            drafted,
        )

    def _load(self, plan: StepPlan, tokens: IntArray, kept: FloatArray) -> StepLoad:
        """Return what a plan that computes ``tokens`` per row asks of the machine."""
        return measure(
            plan.context, tokens, plan.samples, plan.theta_nats, kept, protected_tokens=self.protected_tokens,
            longest_tokens=self._longest_tokens,
        )  # fmt: skip

    def _prune(self, plan: StepPlan) -> _Pruned:
        """Return per row: kept share, mass bounds (mean, max), certificate in nats, entropy shift (None: nobody's)."""
        self.decode_tokens += self._decoding
        if not np.count_nonzero(plan.theta_nats):
            ones, zeros = self._dense
            return ones, zeros, zeros, zeros, None
        response = self.trajectories.response(plan.context, plan.theta_nats, self._decode)
        self.kl_sum += total(response.kl)
        kept, mean, worst, nats, _, _, shift = response
        return kept, mean, worst, nats, shift
