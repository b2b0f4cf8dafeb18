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
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import simpy

from entropic_ctl.bank import Bank
from entropic_ctl.certificates import Verdict
from entropic_ctl.collectors import Collector, Tee
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError, NoProgressError
from entropic_ctl.loop import Loop
from entropic_ctl.perfetto import PerfettoFile
from entropic_ctl.signals import Finish, Request, StepPlan, StepResult
from sim.arrivals import Workload, make_workload
from sim.clock import Clock
from sim.cost import CostModel
from sim.maker import Maker
from sim.speculation import Speculation
from sim.step import StepModel
from sim.stretch import Stretch
from sim.trajectories import Trajectories, bank_of

__all__ = ["MAX_IDLE_PLANS", "MAX_REDONE_POOLS", "Replica", "SimulationResult", "Source", "simulate"]

MAX_IDLE_PLANS = 1000
MAX_REDONE_POOLS = 10
_PROGRESS_EVERY = 256

Progress = Callable[[int, int, float], None]
"""Called as ``progress(requests that left, requests in all, simulated seconds)``."""


@dataclass(frozen=True)
class SimulationResult:
    """Tables (columns by name) and summary of one run; see :mod:`entropic_ctl.metrics` for the columns and units.

    ``summary`` also has ``kl_nats_mean`` (recorded KL to dense attention, mean over decode tokens),
    ``trace_rows_skipped``, ``bank_context_beyond`` (decode rows with a budget that ran dense because they were longer
    than the recorded contexts, ``cost.beyond_bank = "dense"``), and the tokens drafted and accepted by speculative
    decoding (``draft_tokens``, ``draft_tokens_accepted``).
    """

    requests: dict[str, np.ndarray]
    steps: dict[str, np.ndarray]
    tokens: dict[str, np.ndarray] | None
    summary: dict[str, Any]
    replicas: tuple[dict[str, Any], ...] = ()
    """Of a cluster: the summary of each replica; the tables then have a column ``replica``."""


class Source(Protocol):
    """Where a replica gets its requests: a :class:`~sim.arrivals.Workload`, or a router's inbox."""

    def __len__(self) -> int:
        """Return the number of requests in all."""
        ...

    def next_s(self) -> float | None:
        """Return when the next request arrives, None while none is known."""
        ...

    def arrived(self, now_s: float) -> Iterable[Request]:
        """Remove and return what has arrived (something false when nothing has)."""
        ...

    def left(self, request_id: int, now_s: float) -> None:
        """Hear that a request left."""
        ...


class Replica:
    """The process that iterates one engine.

    Parameters
    ----------
    env : simpy.Environment
    loop : Loop
        The control plane.
    cost : CostModel
    trajectories : Trajectories
    workload : Source
        Source of requests; told who left.
    metrics : Collector
        Hears every submission, refusal and step.
    pool_tokens : int
        Tokens the KV pool holds (bounds the work that can be outstanding).
    protected_tokens : int
        Context whose pages are always read.
    progress : callable, optional
    idle : callable, optional
        Returns the event that wakes a replica whose source knows of no further request; without it the replica ends.
    speculation : Speculation, optional
        Needed if the loop drafts.
    """

    def __init__(
        self,
        env: simpy.Environment,
        loop: Loop,
        *,
        cost: CostModel,
        trajectories: Trajectories,
        workload: Source,
        metrics: Collector,
        pool_tokens: int,
        protected_tokens: int = 0,
        progress: Progress | None = None,
        idle: Callable[[], simpy.Event] | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.env, self.loop, self.model = env, loop, StepModel(cost, trajectories, protected_tokens, speculation)
        self.workload, self.metrics, self.progress, self._idle_event = workload, metrics, progress, idle
        self.clock = Clock(float(env.now))
        self.iterations = self.stretched = self.submitted = self.left = 0
        self._idle, self._redone, self._redone_limit = 0, 0, MAX_REDONE_POOLS * pool_tokens

    def run(self) -> Iterator[simpy.Event]:
        """The SimPy process; returns when the workload is served."""
        loop, work, clock = self.loop, self.workload, self.clock
        stretch = Stretch.of(loop, self.model, self.metrics, clock) if self._idle_event is None else None
        while True:
            self._take_in()
            if stretch is not None and (loop.live or loop.backlog):
                upcoming = work.next_s()
                steps, gone = stretch.run(math.inf if upcoming is None else upcoming)
                if steps:
                    yield self._until(clock.now_s)
                    for finish in gone:
                        self._leave(finish)
                    self.iterations += steps
                    self.stretched += steps
                    self._idle = self._redone = 0
                    self._tell(steps)
                    continue
            if not (loop.live or loop.backlog):
                upcoming = work.next_s()
                if upcoming is None:
                    if self._idle_event is None:
                        return
                    yield self._idle_event()
                    continue
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
            self._tell(1)

    def _tell(self, steps: int) -> None:
        """Report progress when the iterations passed a multiple of ``_PROGRESS_EVERY``."""
        if self.progress is not None and self.iterations % _PROGRESS_EVERY < steps:
            self.progress(self.left, len(self.workload), self.clock.now_s)

    def _until(self, at_s: float) -> simpy.Event:
        return self.env.timeout(max(0.0, at_s - self.env.now))

    def _take_in(self) -> None:
        """Submit what has arrived. A refusal may release the next request of the same user, hence the loop."""
        now_s, upcoming = self.clock.now_s, self.workload.next_s()
        if self._idle_event is None and (upcoming is None or upcoming > now_s):
            return  # an inbox is always asked: a request may arrive at this very instant and not be routed yet
        while requests := self.workload.arrived(now_s):
            for request in requests:
                self.submitted += 1
                self.metrics.submitted(request)
                refusal = self.loop.submit(request)
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


class _Laps:
    """Notes the wall seconds between calls."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds, self._last = seconds, time.perf_counter()

    def __call__(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[name], self._last = now - self._last, now


def simulate(
    config: RunConfig,
    *,
    verdict: Verdict | None = None,
    uncertified: bool = False,
    progress: Progress | None = None,
    keep_tokens: bool = False,
    bank: Bank | None = None,
    cost: CostModel | None = None,
    workload: Workload | None = None,
    trace: PerfettoFile | None = None,
    laws: tuple[Any, Any, Any] | None = None,
    timing: dict[str, float] | None = None,
) -> SimulationResult:
    """Run one simulation to its end; of several replicas if the configuration says so (:mod:`sim.cluster`).

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
    trace : PerfettoFile, optional
        An open trace file that every replica writes into.
    laws : tuple, optional
        Passed to :class:`entropic_ctl.loop.Loop`.
    timing : dict, optional
        Filled with wall seconds by stage (``read_s``: bank and workload, ``build_s``, ``run_s``, ``tables_s``) and
        ``iterations_in_stretches``, of a single replica.

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
    lap = _Laps({} if timing is None else timing)
    bank = bank_of(config) if bank is None else bank
    law = config.loop.temperature.config
    if workload is None:
        greedy = law.temperature == 0.0
        engine = config.engine
        workload = make_workload(
            config.workload,
            config.seed,
            Trajectories.count_prompts(bank),
            greedy=greedy,
            page_tokens=engine.page_tokens if engine.prefix_caching else None,
        )
    if config.cluster.replicas > 1:
        from sim.cluster import simulate_cluster

        if laws is not None:
            raise BadInputError("law objects serve one replica", where="simulate", field="laws", allowed="None")

        return simulate_cluster(
            config,
            verdict=verdict,
            uncertified=uncertified,
            progress=progress,
            keep_tokens=keep_tokens,
            bank=bank,
            cost=cost,
            workload=workload,
            trace=trace,
        )
    lap("read_s")
    env = simpy.Environment()
    collector = trace.replica(0) if trace is not None else None
    maker = Maker(
        config, bank, workload, cost, verdict=verdict, uncertified=uncertified, keep_tokens=keep_tokens, laws=laws
    )
    parts = maker.parts()
    metrics = parts.metrics
    replica = Replica(
        env,
        parts.loop,
        cost=maker.cost,
        trajectories=parts.trajectories,
        workload=workload,
        metrics=metrics if collector is None else Tee(metrics, collector),
        pool_tokens=maker.pool_tokens,
        protected_tokens=maker.protected_tokens,
        progress=progress,
        speculation=parts.speculation,
    )
    env.process(replica.run())
    lap("build_s")
    env.run()
    lap("run_s")
    if progress is not None:
        progress(replica.left, len(workload), replica.clock.now_s)
    measured = metrics.measured()
    tokens = metrics.tokens_table() if keep_tokens else None
    result = SimulationResult(measured.requests, measured.steps, tokens, maker.summary(measured, [replica.model]))
    lap("tables_s")
    if timing is not None:
        timing["iterations_in_stretches"] = replica.stretched
    return result
