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

import math
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
from entropic_ctl.signals import Finish, FinishReason, FloatArray, IntArray, StepPlan, StepResult
from sim import cost as costs
from sim.arrivals import Workload, make_workload
from sim.trajectories import Trajectories, load_bank

__all__ = ["MAX_IDLE_PLANS", "MAX_REDONE_POOLS", "Clock", "Replica", "SimulationResult", "simulate"]

MAX_IDLE_PLANS = 1000
MAX_REDONE_POOLS = 10
_PROGRESS_EVERY = 256

Progress = Callable[[int, int, float], None]
"""Called as ``progress(requests that left, requests in all, simulated seconds)``."""


class Clock:
    """Simulated seconds, summed without drift; never runs backwards."""

    __slots__ = ("_low", "_sum", "now_s")

    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = self._sum = start_s
        self._low = 0.0

    def advance(self, seconds: float) -> float:
        """Add a duration and return the new time.

        Raises
        ------
        NoProgressError
            If the duration is negative or not finite.
        """
        if not (seconds >= 0.0 and math.isfinite(seconds)):
            raise NoProgressError(
                f"a step of {seconds!r} s at t = {self.now_s:.6f} s: durations must be >= 0 and finite"
            )
        total = self._sum + seconds
        big, small = (self._sum, seconds) if self._sum >= seconds else (seconds, self._sum)
        self._low += (big - total) + small
        self._sum = total
        self.now_s = max(self.now_s, total + self._low)
        return self.now_s

    def jump(self, at_s: float) -> float:
        """Move to an absolute time (ignored if it lies in the past) and return the time."""
        if at_s > self.now_s:
            self.now_s = self._sum = at_s
            self._low = 0.0
        return self.now_s


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
        progress: Progress | None = None,
    ) -> None:
        self.env, self.loop, self.cost, self.trajectories = env, loop, cost, trajectories
        self.workload, self.metrics, self.progress = workload, metrics, progress
        self.clock = Clock(float(env.now))
        self.iterations = self.submitted = self.left = 0
        self.kl_sum, self.decode_tokens = 0.0, 0
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
            result = self._execute(plan)
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

    def _execute(self, plan: StepPlan) -> StepResult:
        """Cost and outcome of one plan; moves the clock to the end of the step."""
        samples = plan.samples
        ids = plan.ids[samples]
        kept, mean, worst, nats, theta, shift = self._prune(plan)
        charge = self.cost.step(plan.context, plan.n_tokens, samples, theta, kept)
        start_s = self.clock.now_s
        end_s = self.clock.advance(charge.seconds)
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
            )
        at, last = self.trajectories.select(ids)
        view = self.trajectories.view(at, None if shift is None else shift[samples])
        tempered = self.loop.temper(view)
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
        )

    def _prune(
        self, plan: StepPlan
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray, FloatArray | None]:
        """Return per row: kept share, mass bounds (mean, max), certificate in nats, effective theta, entropy shift."""
        rows, theta = plan.n_rows, plan.theta_nats
        kept, mean, worst, nats = np.ones(rows), np.zeros(rows), np.zeros(rows), np.zeros(rows)
        decode = plan.samples & (plan.n_tokens == 1)
        self.decode_tokens += int(np.count_nonzero(decode))
        if not theta.any():
            return kept, mean, worst, nats, theta, None
        theta = np.where(decode, theta, 0.0)
        pruned: IntArray = np.flatnonzero(theta)
        if not pruned.shape[0]:
            return kept, mean, worst, nats, theta, None
        response = self.trajectories.response(plan.context[pruned], theta[pruned])
        shift = np.zeros(rows)
        kept[pruned], mean[pruned], worst[pruned] = response.kept, response.certificate_mean, response.certificate_max
        nats[pruned] = -np.log1p(-np.minimum(response.certificate_max, 1.0 - 1e-12))
        shift[pruned] = response.entropy_shift
        self.kl_sum += float(response.kl.sum())
        return kept, mean, worst, nats, theta, shift


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
        If trace, bank or preset cannot be used, or a law can leave the recorded range.
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
        ends=workload.config.output_length == "bank",
    )
    trajectories.require_range(config.loop)
    page = config.engine.page_tokens
    if cost is None:
        cost = costs.preset(config.cost.preset, page, config.loop.pruning.config.dense_layers)
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
        kl_nats_mean=replica.kl_sum / replica.decode_tokens if replica.decode_tokens else 0.0,
        trace_rows_skipped=workload.skipped_rows,
        bank_context_beyond=trajectories.response.beyond_context,
        bank_temperature_beyond=trajectories.clamped_tokens,
    )
    tokens = metrics.tokens_table() if keep_tokens else None
    return SimulationResult(metrics.requests_table(), metrics.steps_table(), tokens, summary)
