"""What a replica is made of: control plane, recordings and metrics, the same for one replica and for many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from entropic_ctl.bank import Bank
from entropic_ctl.certificates import Verdict
from entropic_ctl.config import RunConfig
from entropic_ctl.loop import Loop
from entropic_ctl.metrics import Metrics
from entropic_ctl.metrics_summary import Measured, summarise
from sim import calibrated
from sim import cost as costs
from sim.arrivals import Workload
from sim.predictions import predictions
from sim.speculation import Speculation
from sim.step import StepModel
from sim.trajectories import Trajectories

__all__ = ["Maker", "Parts"]


@dataclass(frozen=True)
class Parts:
    """What belongs to one replica alone."""

    loop: Loop
    trajectories: Trajectories
    metrics: Metrics
    speculation: Speculation | None


class Maker:
    """Makes the parts of the replicas of one configuration.

    Parameters
    ----------
    config : RunConfig
    bank : Bank
    workload : Workload
        The requests of the whole run; only their columns are read.
    cost : CostModel, optional
        In place of the configured preset.
    verdict, uncertified
        As in :func:`sim.replica.simulate`.
    keep_tokens : bool
    laws : tuple, optional
        Passed to :class:`entropic_ctl.loop.Loop`.

    Attributes
    ----------
    cost : CostModel
    pool_tokens : int
        Tokens a KV pool holds.
    protected_tokens : int
        Context whose pages are always read.

    Raises
    ------
    BadInputError
        If the preset cannot be used, a law can leave the recorded range, or pages are pruned by another rule than the
        recorded one.
    """

    def __init__(
        self,
        config: RunConfig,
        bank: Bank,
        workload: Workload,
        cost: costs.CostModel | None = None,
        *,
        verdict: Verdict | None = None,
        uncertified: bool = False,
        keep_tokens: bool = False,
        laws: tuple[Any, Any, Any] | None = None,
    ) -> None:
        self._laws = laws
        self.config, self.bank, self.workload, self._keep_tokens = config, bank, workload, keep_tokens
        self._verdict, self._uncertified = verdict, uncertified
        page, pruning = config.engine.page_tokens, config.loop.pruning.config
        self._spare: Trajectories | None = self._trajectories()
        self._spare.require_range(config.loop)
        if workload.expected_tokens is None:
            oracle = getattr(config.loop.scheduling.config, "lengths", "") == "oracle"
            true_tokens = self._spare.lengths(workload.limit_tokens)
            workload.expected_tokens = predictions(config.workload, config.seed, true_tokens, oracle=oracle)
        self._spare.response.require_rule(config.loop.pruning, page)
        held = min(config.engine.max_context, config.engine.pages * page) - 1  # the pool bounds a context too
        longest = min(workload.longest_context(), held)
        self._spare.response.require_contexts(config.loop.pruning, longest, config.cost.beyond_bank)
        self._may_leave = self._spare.response.may_leave
        if cost is None:
            cost = costs.cost_model(config.cost, page, pruning)
            if config.cost.calibrated:
                cost = calibrated.load(config, cost)
        self.cost = cost
        self.pool_tokens = config.engine.pages * page
        self.protected_tokens = (pruning.sink_pages + pruning.recent_pages) * page

    def _trajectories(self) -> Trajectories:
        work = self.workload
        return Trajectories(
            self.bank,
            work.prompt,
            work.xi,
            base_temperature=self.config.loop.temperature.config.temperature,
            ends=not work.config.runs_to_limit,
        )

    def parts(self) -> Parts:
        """Return the parts of one more replica.

        Raises
        ------
        UncertifiedError
            If the micro law needs a certificate and has none.
        """
        config, vocab_size = self.config, int(self.bank.meta["vocab_size"])
        loop = Loop(
            config.loop,
            config.engine,
            vocab_size,
            verdict=self._verdict,
            uncertified=self._uncertified,
            speculation=config.speculation,
            laws=self._laws,
        )
        metrics = Metrics(
            config.engine.page_tokens,
            keep_tokens=self._keep_tokens,
            target_nats=getattr(config.loop.temperature.config, "target_nats", None),
            pool_pages=config.engine.pages,
            slo=config.slo,
            idle_w=costs.idle_power_w(self.cost),
        )
        trajectories = self._spare if self._spare is not None else self._trajectories()
        trajectories.response.may_leave = self._may_leave
        self._spare = None
        return Parts(loop, trajectories, metrics, Speculation.of(config, config.engine.page_tokens))

    def summary(self, measured: Measured, models: Sequence[StepModel]) -> dict[str, Any]:
        """Return the summary of replicas that ran on these models, with the simulator's own keys."""
        speculations = [model.speculation for model in models if model.speculation is not None]
        decoded = sum(model.decode_tokens for model in models)
        return {
            **summarise(measured),
            "kl_nats_mean": sum(model.kl_sum for model in models) / decoded if decoded else 0.0,
            "trace_rows_skipped": self.workload.skipped_rows,
            "bank_context_beyond": sum(model.trajectories.response.beyond_context for model in models),
            "draft_tokens": sum(drafts.drafted for drafts in speculations),
            "draft_tokens_accepted": sum(drafts.accepted for drafts in speculations),
        }
