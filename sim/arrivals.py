"""Workloads: who arrives when, with how long a prompt, and how many tokens they ask for.

Kinds (``WorkloadConfig.kind``):

- ``burst``, ``poisson``, ``gamma``, ``mmpp``, ``diurnal``: open arrivals (:mod:`sim.arrival_processes`);
- ``closed``: ``users`` users; each issues its next request an exponential think time after the previous one left.
  Request i belongs to user i mod users, so who asks for what does not depend on the order in which requests finish;
- ``sessions``: conversations with a growing context (:mod:`sim.sessions`);
- ``azure``, ``burstgpt``, ``mooncake``, ``vidur``, ``parquet``, or ``trace`` (the format is detected): a recorded trace
  (:mod:`sim.traces`). First the window is cut out (``window_start_s``, ``window_s``, in recorded time; times then count
  from its start), then the first ``trace_rows`` rows are kept, then they are repeated ``trace_repeat`` times with the
  window (without one: the time of the last row) as period, and at last time is divided by ``rate_scale``.

Lengths that are drawn are log-normal with exactly the configured mean (:mod:`sim.lengths`).

Random numbers come from named streams of one root seed (``arrivals``, ``lengths``, ``entropy``; those of sessions and
states are named in their modules): a key that changes how one of them is used does not move the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np

from entropic_ctl.config import WorkloadConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, IntArray, Request
from sim.arrival_processes import arrival_times
from sim.lengths import lognormal_lengths
from sim.prefixes import BlockHashes, SessionHashes
from sim.sessions import draw_sessions
from sim.streams import stream
from sim.traces import Trace, read_trace

__all__ = ["PrefixHashes", "Workload", "make_workload"]

_LATEST_S = 1e10
_NEVER = float("inf")


class PrefixHashes(Protocol):
    """The chained hashes of the full prompt pages of request ``i`` (a list of tuples will do)."""

    def __getitem__(self, i: int, /) -> tuple[int, ...]: ...


class Workload:
    """A source of requests: pull those that have arrived, tell it who left, ask when the next one comes.

    Columns are indexed by request id (0, 1, ...); requests are built when they arrive.

    Parameters
    ----------
    config : WorkloadConfig
    arrival_s : FloatArray, shape (N,)
        Arrival times, non-decreasing; where ``follows`` is not -1, seconds after that request left.
    prompt_tokens, limit_tokens, prompt : IntArray, shape (N,)
        ``prompt`` is the index of the recorded prompt whose entropies a request follows.
    xi : FloatArray, shape (N,)
        Uniform numbers: which of two neighbouring recordings a request reads (see ``sim.trajectories``).
    greedy : bool
    skipped_rows : int
        Trace rows left out.
    prefix_hashes : PrefixHashes, optional
    follows : IntArray, shape (N,), optional
        The request that has to leave first, or -1; at most one request follows another. Default: all -1.
    client : IntArray, shape (N,), optional
        ``Request.client``; default -1.
    expected_tokens : IntArray, shape (N,), optional
        ``Request.expected_tokens``; default 0 (unknown).

    Raises
    ------
    BadInputError
        If times are negative, not finite, beyond the clock's range, or (without ``follows``) not sorted.
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
        prefix_hashes: PrefixHashes | None = None,
        follows: IntArray | None = None,
        client: IntArray | None = None,
        expected_tokens: IntArray | None = None,
    ) -> None:
        self.config = config
        self.arrival_s, self.prompt_tokens, self.limit_tokens = arrival_s, prompt_tokens, limit_tokens
        self.prompt, self.xi, self.greedy, self.skipped_rows = prompt, xi, greedy, skipped_rows
        self.prefix_hashes, self.client, self.expected_tokens = prefix_hashes, client, expected_tokens
        self.follows = follows
        _check_times(arrival_s, ordered=follows is None)
        self._heap: list[tuple[float, int]] = []
        self._follower: IntArray | None = None
        self._next = 0
        if follows is not None:
            self._follower = np.full(len(self), -1, np.int64)
            self._follower[follows[follows >= 0]] = np.flatnonzero(follows >= 0)
            first = np.flatnonzero(follows < 0)
            self._heap = list(zip(arrival_s[first].tolist(), first.tolist(), strict=True))
            heapify(self._heap)
        self._next_s = _NEVER
        self._advance()

    def __len__(self) -> int:
        return int(self.arrival_s.shape[0])

    def _advance(self) -> None:
        """Look up when the next request comes."""
        if self._follower is not None:
            self._next_s = self._heap[0][0] if self._heap else _NEVER
        else:
            self._next_s = float(self.arrival_s[self._next]) if self._next < len(self) else _NEVER

    def _request(self, i: int, at_s: float) -> Request:
        return Request(
            i,
            at_s,
            int(self.prompt_tokens[i]),
            int(self.limit_tokens[i]),
            self.greedy,
            self.prefix_hashes[i] if self.prefix_hashes is not None else (),
            int(self.client[i]) if self.client is not None else -1,
            int(self.expected_tokens[i]) if self.expected_tokens is not None else 0,
        )

    def longest_context(self) -> int:
        """Return the largest context a decode row can have, tokens: all but the last token of the longest request."""
        return int((self.prompt_tokens + self.limit_tokens).max()) - 2 if len(self) else 0

    def next_s(self) -> float | None:
        """Return the time of the next arrival that is known, or None (closed: until somebody leaves; else: the end)."""
        return self._next_s if self._next_s < _NEVER else None

    def arrived(self, now_s: float) -> Sequence[Request]:
        """Remove and return the requests with arrival <= ``now_s``, in arrival order, ties by id."""
        if now_s < self._next_s:
            return ()
        requests = []
        while self._next_s <= now_s:
            if self._follower is not None:
                at_s, i = heappop(self._heap)
            else:
                at_s, i = self._next_s, self._next
                self._next += 1
            requests.append(self._request(i, at_s))
            self._advance()
        return requests

    def left(self, request_id: int, now_s: float) -> None:
        """Tell the workload that a request left (served or refused): whoever follows it starts to think."""
        if self._follower is not None and (following := int(self._follower[request_id])) >= 0:
            heappush(self._heap, (now_s + float(self.arrival_s[following]), following))
            self._advance()


def _check_times(arrival_s: FloatArray, *, ordered: bool) -> None:
    if not (np.abs(arrival_s) <= _LATEST_S).all():
        raise BadInputError(
            "arrivals too late for a clock in float64 seconds",
            where="workload",
            field="rate_per_s, rate_scale",
            value=float(np.max(arrival_s)),
            allowed=f"arrivals before {_LATEST_S:g} s",
            remedy="raise the rate",
        )
    if (arrival_s < 0).any() or (ordered and (np.diff(arrival_s) < 0).any()):
        raise BadInputError("arrivals must be sorted and not negative", field="arrival_s", remedy="sort them stably")


def make_workload(
    config: WorkloadConfig, seed: int, prompts: int, *, greedy: bool = False, page_tokens: int | None = None
) -> Workload:
    """Draw a workload, or read it.

    Parameters
    ----------
    config : WorkloadConfig
    seed : int
        Root seed of the run.
    prompts : int
        Number of recorded prompts to choose from.
    greedy : bool
        Every request is decoded at T = 0.
    page_tokens : int, optional
        Tokens per KV page, if prefixes are to be shared; otherwise requests carry no hashes.

    Raises
    ------
    BadInputError
        If a trace cannot be read or its window is empty, a block of its hashes is not a whole number of pages, or
        times leave the clock's range.
    """
    build = _replayed if config.replays else _conversations if config.kind == "sessions" else _drawn
    return build(config, seed, prompts, greedy, page_tokens)


def _entropy(seed: int, prompts: int, n: int) -> tuple[IntArray, FloatArray]:
    """Draw which recorded prompt each request follows, and its number xi."""
    rng = stream(seed, "entropy")
    return rng.integers(0, prompts, n), rng.random(n)


def _drawn(config: WorkloadConfig, seed: int, prompts: int, greedy: bool, page_tokens: int | None) -> Workload:  # noqa: ARG001 - drawn prompts share nothing
    n, lengths = config.n_requests, stream(seed, "lengths")
    follows = client = None
    if config.kind == "closed":
        at_s = stream(seed, "arrivals").standard_exponential(n) * config.think_s
        follows = np.maximum(np.arange(n) - config.users, -1)
        client = np.arange(n) % config.users
    else:
        at_s = arrival_times(config, n, seed)
    prompt_tokens = lognormal_lengths(lengths, n, config.prompt_tokens, config.prompt_cv)
    limit_tokens = lognormal_lengths(lengths, n, config.output_tokens, config.output_cv)
    prompt, xi = _entropy(seed, prompts, n)
    return Workload(
        config,
        at_s,
        prompt_tokens=prompt_tokens,
        limit_tokens=limit_tokens,
        prompt=prompt,
        xi=xi,
        greedy=greedy,
        follows=follows,
        client=client,
    )


def _conversations(config: WorkloadConfig, seed: int, prompts: int, greedy: bool, page_tokens: int | None) -> Workload:
    drawn = draw_sessions(config, seed)
    prompt, xi = _entropy(seed, prompts, config.n_requests)
    hashes = (
        SessionHashes(drawn.session, drawn.prompt_tokens, page_tokens, config.shared_tokens) if page_tokens else None
    )
    return Workload(
        config,
        drawn.arrival_s,
        prompt_tokens=drawn.prompt_tokens,
        limit_tokens=drawn.limit_tokens,
        prompt=prompt,
        xi=xi,
        greedy=greedy,
        prefix_hashes=hashes,
        follows=drawn.follows,
        client=drawn.session,
    )


def _replayed(config: WorkloadConfig, seed: int, prompts: int, greedy: bool, page_tokens: int | None) -> Workload:
    trace = read_trace(config.trace, config.kind)
    trace, period_s = _part(trace, config)
    times = config.trace_repeat
    at_s = trace.arrival_s
    if times > 1:
        at_s = (np.arange(times)[:, None] * period_s + at_s).ravel()
    with np.errstate(over="ignore"):  # what overflows is refused
        at_s = at_s / config.rate_scale
    hashes = (
        BlockHashes(trace.blocks, trace.prompt_tokens, page_tokens, where=config.trace)
        if page_tokens and trace.blocks is not None
        else None
    )
    client = trace.client
    if client is not None and times > 1:
        known = int(client.max()) + 1  # those of another repetition are other people
        client = np.where(client < 0, -1, client + np.arange(times)[:, None] * known).ravel()
    prompt, xi = _entropy(seed, prompts, at_s.shape[0])
    return Workload(
        config,
        at_s,
        prompt_tokens=np.tile(trace.prompt_tokens, times),
        limit_tokens=np.tile(trace.output_tokens, times),
        prompt=prompt,
        xi=xi,
        greedy=greedy,
        skipped_rows=trace.skipped_rows,
        prefix_hashes=hashes,
        client=client,
    )


def _part(trace: Trace, config: WorkloadConfig) -> tuple[Trace, float]:
    """Return the rows of the window, at most ``trace_rows``, and the period of their repetition."""
    start_s, length_s, last_s = config.window_start_s, config.window_s, float(trace.arrival_s[-1])
    if start_s > 0 or length_s > 0:
        end_s = start_s + length_s if length_s > 0 else _NEVER
        first, after = np.searchsorted(trace.arrival_s, [start_s, end_s]).tolist()
        if first == after:
            raise BadInputError(
                "no row lies in the window",
                where=config.trace,
                field="window_start_s, window_s",
                value=(start_s, length_s),
                allowed=f"the rows span {last_s:g} s",
            )
        trace = trace.take(np.arange(first, after), start_s)
    if config.trace_rows:
        trace = trace.take(np.arange(min(config.trace_rows, len(trace))))
    return trace, length_s if length_s > 0 else float(trace.arrival_s[-1])
