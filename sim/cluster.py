"""Several equal replicas behind a router, on one clock.

A request is routed when it arrives, knowing what every replica knows then, and stays with its replica. The front takes
arrivals from the workload (one SimPy event each at most), asks the router, and puts the job into the replica's inbox; a
sleeping replica is woken. A replica looks into its inbox where a single one would look into the workload, so one
replica behind a router is the same run, bit for bit, as none. Who leaves anywhere is told to the workload: closed loops
and sessions go on, on whichever replica the router then picks. An arrival at the very instant at which a step ends is
routed by the state after that step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import simpy

from entropic_ctl.bank import Bank
from entropic_ctl.certificates import Verdict
from entropic_ctl.collectors import Tee
from entropic_ctl.config import EngineConfig, RunConfig
from entropic_ctl.loop import Loop
from entropic_ctl.metrics_summary import merge
from entropic_ctl.perfetto import PerfettoFile
from entropic_ctl.scheduling.base import ScheduleView
from entropic_ctl.signals import Request
from sim.arrivals import Workload
from sim.cost import CostModel
from sim.maker import Maker
from sim.replica import Progress, Replica, SimulationResult
from sim.routers import Router, Standing, make_router

__all__ = ["Front", "Inbox", "simulate_cluster"]


class Inbox:
    """What the router sent to one replica: the source that replica takes its requests from.

    Parameters
    ----------
    front : Front
    env : simpy.Environment
    loop : Loop
        Of the replica; looked at when the router asks.
    engine : EngineConfig
    """

    def __init__(self, front: Front, env: simpy.Environment, loop: Loop, engine: EngineConfig) -> None:
        self._front, self._env, self._loop, self._engine = front, env, loop, engine
        self._jobs: deque[Request] = deque()
        self._prompts: dict[int, int] = {}  # prompt tokens of requests that have not left
        self._prompt_tokens = 0
        self._wake: simpy.Event | None = None

    def __len__(self) -> int:
        return len(self._front.workload)

    def next_s(self) -> float | None:
        """Return the arrival of the first waiting job, or None."""
        return self._jobs[0].arrival_s if self._jobs else None

    def arrived(self, now_s: float) -> list[Request]:
        """Remove and return the jobs with arrival <= ``now_s``, in the order they were sent."""
        self._front.route(now_s)
        out = []
        while self._jobs and self._jobs[0].arrival_s <= now_s:
            out.append(self._jobs.popleft())
        return out

    def left(self, request_id: int, now_s: float) -> None:
        """Pass on that a request left."""
        self._prompt_tokens -= self._prompts.pop(request_id)
        self._front.left(request_id, now_s)

    def put(self, job: Request) -> None:
        """Take a job, and wake the replica if it sleeps."""
        self._jobs.append(job)
        self._prompts[job.id] = job.prompt_tokens
        self._prompt_tokens += job.prompt_tokens
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def idle(self) -> simpy.Event:
        """Return the event of the next job."""
        self._wake = self._env.event()
        return self._wake

    def standing(self, now_s: float) -> Standing:
        """Return what the router may know of this replica."""

        def look() -> ScheduleView:
            slots = self._loop.batcher.slots.live
            return self._loop.batcher.view(now_s, slots, self._loop.policy.signals(slots))

        engine = self._engine
        return Standing(len(self._prompts), self._prompt_tokens, look, engine.max_batch, engine.page_tokens)


class Front:
    """Takes arrivals and sends each to a replica.

    Parameters
    ----------
    env : simpy.Environment
    workload : Workload
    router : Router

    Attributes
    ----------
    inboxes : list of Inbox
        One per replica, in order; filled by the caller before the run.
    sent : int
        Requests routed so far.
    gone : int
        Requests that left.
    """

    def __init__(self, env: simpy.Environment, workload: Workload, router: Router) -> None:
        self.workload, self._env, self._router = workload, env, router
        self.inboxes: list[Inbox] = []
        self.sent = self.gone = 0
        self._timer_s = math.inf

    def start(self) -> None:
        """Wait for the first arrival."""
        self._wait()

    def route(self, now_s: float) -> None:
        """Send off what has arrived by ``now_s``."""
        while jobs := self.workload.arrived(now_s):
            for job in jobs:
                standings = [inbox.standing(job.arrival_s) for inbox in self.inboxes]
                self.inboxes[self._router.choose(job, standings)].put(job)
                self.sent += 1

    def left(self, request_id: int, now_s: float) -> None:
        """Tell the workload who left; its next request may come sooner than the one waited for."""
        self.gone += 1
        self.workload.left(request_id, now_s)
        self._wait()

    def _wait(self) -> None:
        at_s = self.workload.next_s()
        if at_s is None or at_s >= self._timer_s:
            return
        self._timer_s = at_s
        event = self._env.timeout(max(0.0, at_s - self._env.now))
        event.callbacks.append(lambda _: self._ring(at_s))

    def _ring(self, at_s: float) -> None:
        if at_s == self._timer_s:
            self._timer_s = math.inf
        self.route(at_s)
        self._wait()


def simulate_cluster(
    config: RunConfig,
    *,
    bank: Bank,
    workload: Workload,
    verdict: Verdict | None = None,
    uncertified: bool = False,
    progress: Progress | None = None,
    keep_tokens: bool = False,
    cost: CostModel | None = None,
    trace: PerfettoFile | None = None,
    router: Router | None = None,
) -> SimulationResult:
    """Run ``config.cluster.replicas`` replicas behind a router to the end of the workload.

    Parameters
    ----------
    config : RunConfig
    bank, workload, verdict, uncertified, progress, keep_tokens, cost, trace
        As in :func:`sim.replica.simulate`, which calls this for more than one replica.
    router : Router, optional
        In place of the configured one.

    Returns
    -------
    SimulationResult
        Tables and summary of the whole, and the summary of each replica; queue depth and KV use are means over time and
        replicas, their maxima those of the worst replica.
    """
    env = simpy.Environment()
    front = Front(env, workload, make_router(config.cluster) if router is None else router)
    maker = Maker(config, bank, workload, cost, verdict=verdict, uncertified=uncertified, keep_tokens=keep_tokens)
    tell: Progress | None = None
    if progress is not None:
        report: Callable[[int, int, float], None] = progress

        def tell(_left: int, total: int, now_s: float) -> None:
            report(front.gone, total, now_s)

    replicas, metrics = [], []
    for index in range(config.cluster.replicas):
        parts = maker.parts()
        inbox = Inbox(front, env, parts.loop, config.engine)
        front.inboxes.append(inbox)
        metrics.append(parts.metrics)
        replica = Replica(
            env,
            parts.loop,
            cost=maker.cost,
            trajectories=parts.trajectories,
            workload=inbox,
            metrics=parts.metrics if trace is None else Tee(parts.metrics, trace.replica(index)),
            pool_tokens=maker.pool_tokens,
            protected_tokens=maker.protected_tokens,
            progress=tell,
            idle=inbox.idle,
            speculation=parts.speculation,
        )
        replicas.append(replica)
        env.process(replica.run())
    front.start()
    env.run()
    if progress is not None:
        progress(front.gone, len(workload), max(replica.clock.now_s for replica in replicas))
    parts_measured = [each.measured() for each in metrics]
    measured = merge(parts_measured)
    return SimulationResult(
        measured.requests,
        measured.steps,
        _tokens([each.tokens_table() for each in metrics]) if keep_tokens else None,
        maker.summary(measured, [replica.model for replica in replicas]),
        tuple(maker.summary(part, [replica.model]) for part, replica in zip(parts_measured, replicas, strict=True)),
    )


def _tokens(tables: list[dict[str, np.ndarray[Any, Any]]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tokens of all replicas in order of time."""
    if len(tables) == 1:
        return tables[0]
    out = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    out["replica"] = np.repeat(np.arange(len(tables)), [table["id"].shape[0] for table in tables])
    order = np.lexsort((out["replica"], out["time_s"]))
    return {name: column[order] for name, column in out.items()}
