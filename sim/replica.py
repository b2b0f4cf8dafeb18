"""One simulated replica: the real control plane, driven by modelled costs and recorded entropies, on a SimPy clock.

One SimPy event per engine iteration, whatever the batch size. An iteration takes in the requests that have arrived,
asks the loop for a plan, charges it with the cost model, shows the loop the recorded distributions (``temper``), lets
time pass, and reports what happened (``observe``). Requests that arrive during an iteration wait for the next plan, as
in a real engine. Between iterations without work the replica sleeps until the next arrival.

Time is summed with compensation (Neumaier): ten steps of 0.1 s end at 1.0 s exactly, and it never runs backwards.
A replica that makes no progress raises :class:`~entropic_ctl.errors.NoProgressError` after a bounded number of events:

- ``MAX_IDLE_PLANS`` consecutive plans that run nothing although requests are waiting, or
- more than ``MAX_REDONE_POOLS`` times the tokens of the KV pool computed without one token sampled (everything that is
  live fits in the pool, so that much work without a token has been redone again and again).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from entropic_ctl.bank import Bank
from entropic_ctl.certificates import Verdict
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import NoProgressError
from entropic_ctl.loop import Loop
from entropic_ctl.metrics import Metrics
from entropic_ctl.signals import Finish, StepPlan, StepResult
from sim import calibrated
from sim import cost as costs
from sim.arrivals import Workload, make_workload
from sim.clock import Clock
from sim.step import StepModel
from sim.trajectories import Trajectories, load_bank

__all__ = ["MAX_IDLE_PLANS", "MAX_REDONE_POOLS", "Replica", "SimulationResult", "simulate"]

MAX_IDLE_PLANS = 1000
MAX_REDONE_POOLS = 10
_PROGRESS_EVERY = 256

Progress = Callable[[int, int, float], None]
"""Called as ``progress(requests that left, requests in all, simulated seconds)``."""


@dataclass(frozen=True)
class SimulationResult:
    """Tables (columns by name) and summary of one run; see :mod:`entropic_ctl.metrics` for the columns and units.

    ``summary`` also has ``kl_nats_mean`` (recorded KL to dense attention, mean over decode tokens), ``iterations``,
    ``requests_in`` (submitted), ``requests_out`` (left, refused ones included), ``trace_rows_skipped``, and two counts
    of tokens for which the bank was read at its edge: ``bank_context_beyond`` and ``bank_temperature_beyond``.
    """

    requests: dict[str, np.ndarray]
    steps: dict[str, np.ndarray]
    tokens: dict[str, np.ndarray] | None
    summary: dict[str, Any]


class Replica:
    """The process that iterates one engine.

    Parameters
    ----------
    env : simpy.Environment
    loop : Loop
        The control plane.
    cost : CostModel
    trajectories : Trajectories
    workload : Workload
        Source of jobs; told who left.
    metrics : Metrics
    pool_tokens : int
        Tokens the KV pool holds (bounds the work that can be outstanding).
    protected_tokens : int
        Context whose pages are always read.
    progress : callable, optional
    """

    def __init__(
        self,
        env: simpy.Environment,
        loop: Loop,
        *,
        cost: costs.CostModel,
        trajectories: Trajectories,
        workload: Workload,
        metrics: Metrics,
        pool_tokens: int,
        protected_tokens: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.env, self.loop, self.model = env, loop, StepModel(cost, trajectories, protected_tokens)
        self.workload, self.metrics, self.progress = workload, metrics, progress
        self.clock = Clock(float(env.now))
        self.iterations = self.submitted = self.left = 0
        self._idle, self._redone, self._redone_limit = 0, 0, MAX_REDONE_POOLS * pool_tokens

    def run(self) -> Iterator[simpy.Event]:
        """The SimPy process; returns when the workload is served."""
        loop, work, clock = self.loop, self.workload, self.clock
        while True:
            self._take_in()
            if not (loop.live or loop.backlog):
                upcoming = work.next_s()
                if upcoming is None:
                    return
                yield self._until(clock.jump(upcoming))
                continue
            start_s = clock.now_s
            plan = loop.plan(start_s)
            for finish in plan.rejected:
                self._leave(finish)
            result = self.model.run(plan, loop.temper, clock)
            yield self._until(result.end_s)
            finished = loop.observe(result)
            self.metrics.step(plan, result, finished)
            for finish in finished:
                self._leave(finish)
            self.iterations += 1
            self._guard(plan, result)
            if self.progress is not None and self.iterations % _PROGRESS_EVERY == 0:
                self.progress(self.left, len(work), clock.now_s)

    def _until(self, at_s: float) -> simpy.Event:
        return self.env.timeout(max(0.0, at_s - self.env.now))

    def _take_in(self) -> None:
        """Submit what has arrived. A refusal may release the next request of the same user, hence the loop."""
        now_s = self.clock.now_s
        while jobs := self.workload.arrived(now_s):
            for job in jobs:
                self.submitted += 1
                self.metrics.submitted(job.request)
                refusal = self.loop.submit(job.request)
                if refusal is not None:
                    self.metrics.refused(refusal)
                    self._leave(refusal)

    def _leave(self, finish: Finish) -> None:
        self.left += 1
        self.workload.left(finish.id, self.clock.now_s)

    def _guard(self, plan: StepPlan, result: StepResult) -> None:
        if result.token_ids.shape[0] or result.finished or plan.rejected:
            self._idle = self._redone = 0
            return
        rows = plan.n_rows
        self._idle = 0 if rows else self._idle + 1
        self._redone += int(plan.n_tokens.sum())
        if self._idle < MAX_IDLE_PLANS and self._redone <= self._redone_limit:
            return
        what = (
            f"{self._idle} plans in a row ran nothing"
            if self._idle
            else f"{self._redone} tokens computed, none sampled"
        )
        raise NoProgressError(
            f"no progress at step {plan.step}, t = {self.clock.now_s:.6f} s: {what} with {self.loop.live} live and "
            f"{self.loop.backlog} waiting requests; enlarge engine.pages or check the scheduling policy"
        )


def simulate(
    config: RunConfig,
    *,
    verdict: Verdict | None = None,
    uncertified: bool = False,
    progress: Progress | None = None,
    keep_tokens: bool = False,
    bank: Bank | None = None,
    cost: costs.CostModel | None = None,
    workload: Workload | None = None,
) -> SimulationResult:
    """Run one simulation to its end.

    Parameters
    ----------
    config : RunConfig
    verdict : Verdict, optional
        Checked certificate of the micro law's gain; needed by laws with integral action unless ``uncertified``.
    uncertified : bool
        Run a gain no certificate covers.
    progress : callable, optional
        ``progress(requests that left, requests in all, simulated seconds)``, now and then.
    keep_tokens : bool
        Also return a table with one row per token.
    bank, cost, workload : optional
        In place of those named by the configuration.

    Returns
    -------
    SimulationResult

    Raises
    ------
    BadInputError
        If trace, bank or preset cannot be used, a law can leave the recorded range, or pages are pruned by another
        rule than the recorded one.
    UncertifiedError
        If the micro law needs a certificate and has none.
    NoProgressError
        If the replica stalls (see the module).
    """
    bank = load_bank(config.cost.bank) if bank is None else bank
    law = config.loop.temperature.config
    if workload is None:
        greedy = law.temperature == 0.0
        workload = make_workload(config.workload, config.seed, Trajectories.count_prompts(bank), greedy=greedy)
    trajectories = Trajectories(
        bank,
        workload.prompt,
        workload.xi,
        base_temperature=law.temperature,
        ends=not workload.config.runs_to_limit,
    )
    trajectories.require_range(config.loop)
    page, pruning = config.engine.page_tokens, config.loop.pruning.config
    trajectories.response.require_rule(config.loop.pruning, page)
    if cost is None:
        cost = costs.preset(config.cost.preset, page, pruning.dense_layers)
        if config.cost.calibrated:
            cost = calibrated.load(config, cost)
    loop = Loop(config.loop, config.engine, int(bank.meta["vocab_size"]), verdict=verdict, uncertified=uncertified)
    metrics = Metrics(page, keep_tokens=keep_tokens, target_nats=getattr(law, "target_nats", None))
    env = simpy.Environment()
    replica = Replica(
        env,
        loop,
        cost=cost,
        trajectories=trajectories,
        workload=workload,
        metrics=metrics,
        pool_tokens=config.engine.pages * page,
        protected_tokens=(pruning.sink_pages + pruning.recent_pages) * page,
        progress=progress,
    )
    env.process(replica.run())
    env.run()
    if progress is not None:
        progress(replica.left, len(workload), replica.clock.now_s)
    summary: dict[str, Any] = dict(metrics.summary())
    summary.update(
        iterations=replica.iterations,
        requests_in=replica.submitted,
        requests_out=replica.left,
        kl_nats_mean=replica.model.kl_sum / replica.model.decode_tokens if replica.model.decode_tokens else 0.0,
        trace_rows_skipped=workload.skipped_rows,
        bank_context_beyond=trajectories.response.beyond_context,
        bank_temperature_beyond=trajectories.clamped_tokens,
    )
    tokens = metrics.tokens_table() if keep_tokens else None
    return SimulationResult(metrics.requests_table(), metrics.steps_table(), tokens, summary)
