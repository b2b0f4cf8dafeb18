"""Workloads: who arrives when, with how long a prompt, and how many tokens they ask for.

Four kinds (``WorkloadConfig.kind``):

- ``burst``: everybody at time 0;
- ``poisson``: open arrivals at a mean rate. Arrival i is (E_1 + ... + E_i) / rate with unit exponentials E, so changing
  the rate rescales the same arrivals;
- ``closed``: ``users`` users; each issues its next request an exponential think time after the previous one left.
  Request i belongs to user i mod users, so who asks for what does not depend on the order in which requests finish;
- ``azure``: a recorded trace, its rate multiplied by ``rate_scale``.

Lengths are log-normal around the configured mean: 1 + floor(X + U) with U uniform on [0, 1) and X log-normal of mean
(mean - 1) and standard deviation cv * mean. The floor of X + U has the mean of X exactly, so the mean length is the
configured one, whatever the rounding, and no length is below 1. (A mean of 1 is the constant 1.)

Random numbers come from three named streams (``arrivals``, ``lengths``, ``entropy``) of one root seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from entropic_ctl.config import WorkloadConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, IntArray, Request
from sim.streams import stream
from sim.traces import read_azure

__all__ = ["Job", "Workload", "lognormal_lengths", "make_workload"]

_LATEST_S = 1e10


@dataclass(frozen=True, slots=True)
class Job:
    """A request with what the simulator, and only the simulator, knows about it.

    Parameters
    ----------
    request : Request
    output_tokens : int or None
        Tokens it will generate, or None when the recorded end of text decides.
    prompt : int
        Index of the recorded prompt whose entropies it follows.
    xi : float
        Uniform number in [0, 1): which of two neighbouring recordings it reads (see ``sim.trajectories``).
    """

    request: Request
    output_tokens: int | None
    prompt: int
    xi: float


def lognormal_lengths(rng: np.random.Generator, n: int, mean: float, cv: float) -> IntArray:
    """Draw ``n`` lengths >= 1 with exactly the given mean (see the module).

    Parameters
    ----------
    rng : Generator
    n : int
    mean : float
        At least 1.
    cv : float
        Standard deviation over mean, >= 0, before rounding (which adds at most 1/4 to the variance).
    """
    normal, uniform = rng.standard_normal(n), rng.random(n)  # drawn always, so that cv does not move other draws
    base = mean - 1.0
    if base <= 0.0:
        return np.ones(n, np.int64)
    sigma2 = np.log1p((cv * mean / base) ** 2)
    x = base * np.exp(np.sqrt(sigma2) * normal - sigma2 / 2) if sigma2 > 0 else np.full(n, base)
    return 1 + np.floor(x + uniform).astype(np.int64)


class Workload:
    """A source of jobs: pull those that have arrived, tell it who left, ask when the next one comes.

    Columns are indexed by request id (0, 1, ...); jobs are built when they arrive.

    Parameters
    ----------
    config : WorkloadConfig
    arrival_s : FloatArray, shape (N,)
        Arrival times, non-decreasing; for ``closed``, the think time before each request instead.
    prompt_tokens, limit_tokens, prompt : IntArray, shape (N,)
    xi : FloatArray, shape (N,)
    greedy : bool
    skipped_rows : int
        Trace rows left out.
    prefix_hashes : sequence of tuple of int, optional
        Per request, the chained hashes of its full prompt pages (prefix caching).
    """

    def __init__(
        self,
        config: WorkloadConfig,
        arrival_s: FloatArray,
        *,
        prompt_tokens: IntArray,
        limit_tokens: IntArray,
        prompt: IntArray,
        xi: FloatArray,
        greedy: bool = False,
        skipped_rows: int = 0,
        prefix_hashes: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        self.config = config
        self.arrival_s, self.prompt_tokens, self.limit_tokens = arrival_s, prompt_tokens, limit_tokens
        self.prompt, self.xi, self.greedy, self.skipped_rows = prompt, xi, greedy, skipped_rows
        self.prefix_hashes = prefix_hashes
        self._closed = config.kind == "closed"
        self._heap: list[tuple[float, int]] = []
        self._next = 0
        if not (np.abs(arrival_s) <= _LATEST_S).all():
            raise BadInputError(
                "arrivals too late for a clock in float64 seconds",
                where="workload",
                field="rate_per_s, rate_scale",
                value=float(np.max(arrival_s)),
                allowed=f"arrivals before {_LATEST_S:g} s",
                remedy="raise the rate",
            )
        if not self._closed and ((np.diff(arrival_s) < 0).any() or (len(self) and arrival_s[0] < 0)):
            raise BadInputError(
                "arrivals must be sorted and not negative", field="arrival_s", remedy="sort them stably"
            )
        if self._closed:
            for i in range(min(config.users, len(self))):
                heappush(self._heap, (float(arrival_s[i]), i))

    def __len__(self) -> int:
        return int(self.arrival_s.shape[0])

    def _job(self, i: int, at_s: float) -> Job:
        limit = int(self.limit_tokens[i])
        hashes = self.prefix_hashes[i] if self.prefix_hashes is not None else ()
        request = Request(i, at_s, int(self.prompt_tokens[i]), limit, self.greedy, hashes)
        known = limit if self.config.runs_to_limit else None
        return Job(request, known, int(self.prompt[i]), float(self.xi[i]))

    def longest_context(self) -> int:
        """Return the largest context a decode row can have, tokens: all but the last token of the longest request."""
        return int((self.prompt_tokens + self.limit_tokens).max()) - 2 if len(self) else 0

    def next_s(self) -> float | None:
        """Return the time of the next arrival that is known, or None (closed: until somebody leaves; else: the end)."""
        if self._closed:
            return self._heap[0][0] if self._heap else None
        return float(self.arrival_s[self._next]) if self._next < len(self) else None

    def arrived(self, now_s: float) -> deque[Job]:
        """Remove and return the jobs with arrival <= ``now_s``, in arrival order, ties by id."""
        jobs: deque[Job] = deque()
        if self._closed:
            while self._heap and self._heap[0][0] <= now_s:
                at_s, i = heappop(self._heap)
                jobs.append(self._job(i, at_s))
            return jobs
        while self._next < len(self) and self.arrival_s[self._next] <= now_s:
            jobs.append(self._job(self._next, float(self.arrival_s[self._next])))
            self._next += 1
        return jobs

    def left(self, request_id: int, now_s: float) -> None:
        """Tell the workload that a request left (served or refused): a closed-loop user starts to think."""
        if self._closed and (following := request_id + self.config.users) < len(self):
            heappush(self._heap, (now_s + float(self.arrival_s[following]), following))


def make_workload(config: WorkloadConfig, seed: int, prompts: int, *, greedy: bool = False) -> Workload:
    """Draw a workload.

    Parameters
    ----------
    config : WorkloadConfig
    seed : int
        Root seed of the run.
    prompts : int
        Number of recorded prompts to choose from.
    greedy : bool
        Every request is decoded at T = 0.

    Raises
    ------
    BadInputError
        If a trace cannot be read.
    """
    arrivals, lengths, entropy = (stream(seed, name) for name in ("arrivals", "lengths", "entropy"))
    skipped = 0
    if config.kind == "azure":
        trace = read_azure(config.trace, config.trace_rows or None)
        n, skipped = len(trace), int(trace.skipped.shape[0])
        with np.errstate(over="ignore"):  # what overflows is refused below
            at_s = trace.arrival_s / config.rate_scale
        prompt_tokens, limit_tokens = trace.prompt_tokens, trace.output_tokens
    else:
        n = config.n_requests
        unit = arrivals.standard_exponential(n)
        if config.kind == "poisson":
            with np.errstate(over="ignore"):
                at_s = (np.cumsum(unit, dtype=np.longdouble) / config.rate_per_s).astype(np.float64)
        else:
            at_s = unit * config.think_s if config.kind == "closed" else np.zeros(n)
        prompt_tokens = lognormal_lengths(lengths, n, config.prompt_tokens, config.prompt_cv)
        limit_tokens = lognormal_lengths(lengths, n, config.output_tokens, config.output_cv)
    prompt = entropy.integers(0, prompts, n)
    return Workload(
        config,
        at_s,
        prompt_tokens=prompt_tokens,
        limit_tokens=limit_tokens,
        prompt=prompt,
        xi=entropy.random(n),
        greedy=greedy,
        skipped_rows=skipped,
    )
