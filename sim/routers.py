"""Routers: which replica of a cluster serves a new request. One class per rule; all are deterministic.

A router sees the request and, per replica, a :class:`Standing`: what is outstanding there, and the columns of its live
requests as the replica's own scheduler sees them. It never sees an output length or a recording.

Definitions. *Load* of a replica: tokens outstanding there, the prompts of all requests that were sent and have not left
plus what the live ones have generated so far. Ties go to the lowest index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from entropic_ctl.config import ClusterConfig
from entropic_ctl.scheduling.base import ScheduleView
from entropic_ctl.signals import Request

__all__ = ["ROUTERS", "Entropic", "LeastLoaded", "PrefixAffinity", "RoundRobin", "Router", "Standing", "make_router"]

_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Standing:
    """What a router may know of one replica.

    Parameters
    ----------
    outstanding : int
        Requests sent there that have not left.
    outstanding_prompt_tokens : int
        Their prompt tokens.
    look : callable
        Returns the columns of the replica's live requests, as its scheduler sees them.
    max_batch, page_tokens : int
        Rows of a step; tokens of a page.
    """

    outstanding: int
    outstanding_prompt_tokens: int
    look: Callable[[], ScheduleView]
    max_batch: int
    page_tokens: int

    @property
    def load(self) -> int:
        """Tokens outstanding (see the module)."""
        return self.outstanding_prompt_tokens + int(self.look().generated_tokens.sum()) if self.outstanding else 0


class Router(Protocol):
    """A rule."""

    def choose(self, request: Request, replicas: Sequence[Standing]) -> int:
        """Return the index of the replica that serves ``request``."""
        ...


class RoundRobin:
    """Each in turn."""

    def __init__(self, config: ClusterConfig) -> None:
        del config
        self._next = 0

    def choose(self, request: Request, replicas: Sequence[Standing]) -> int:
        """Return the next one."""
        del request
        chosen = self._next % len(replicas)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """The replica with the fewest tokens outstanding."""

    def __init__(self, config: ClusterConfig) -> None:
        del config

    def choose(self, request: Request, replicas: Sequence[Standing]) -> int:
        """Return the one with the least load."""
        del request
        return int(np.argmin([replica.load for replica in replicas]))


class PrefixAffinity:
    """Requests that begin alike go to the same replica, where their first pages are cached, unless it is overloaded.

    The chained hash of the first ``affinity_pages`` full pages (fewer if the prompt has fewer) names a replica by
    rendezvous hashing (Thaler and Ravishankar, 1998): the one with the largest mixed hash. If its load, with this
    prompt, would exceed ``load_guard`` times the mean load after placing it, the least loaded one is taken (bounded
    loads: Mirrokni, Thorup and Zadimoghaddam, 2018). Requests without hashes go to the least loaded one.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._pages, self._guard = config.affinity_pages, config.load_guard

    def choose(self, request: Request, replicas: Sequence[Standing]) -> int:
        """Return the named replica, or the least loaded."""
        loads = [replica.load for replica in replicas]
        least = int(np.argmin(loads))
        if not request.prefix_hashes:
            return least
        key = request.prefix_hashes[min(self._pages, len(request.prefix_hashes)) - 1]
        named = max(range(len(replicas)), key=lambda index: (_mix(key, index), -index))
        size = request.prompt_tokens
        return named if loads[named] + size <= self._guard * (sum(loads) + size) / len(loads) else least


class Entropic:
    """The replica where a newcomer meets the least competition under pi(s) *(ours)*.

    The scheduler serves by pi(s) = E[dH_s] / (C_s + M_s + L_s), so what stands before a newcomer on a replica is the
    sum over its requests of the shares they take, each weighted by how it compares in expected entropy reduction:

        R = sum over s of (C_s + M_s + S_s) * 2 e_s / (e_s + e_0)

    with C_s the tokens still to compute over the token budget of a step, M_s the pages its known tokens need over the
    pool, S_s = 1 / max_batch a seat, e_s the EWMA of the request's entropy reductions and e_0 the mean of e_s over the
    live requests of the cluster that have shown one (what a newcomer is expected to bring). A resolved request (e_s
    near 0) gives way and weighs little, one like the newcomer weighs 1, at most 2. Requests that have shown nothing,
    and those that wait outside, weigh 1. Without any reduction seen the rule is least-loaded in shares.
    """

    def __init__(self, config: ClusterConfig) -> None:
        del config

    def choose(self, request: Request, replicas: Sequence[Standing]) -> int:
        """Return the one with the least competition."""
        del request
        views = [replica.look() for replica in replicas]
        seen = np.concatenate([view.reduction_ewma[view.seen > 1] for view in views])
        typical = float(seen.mean()) if seen.shape[0] else 0.0
        return int(np.argmin([self.competition(*pair, typical) for pair in zip(replicas, views, strict=True)]))

    @staticmethod
    def competition(replica: Standing, view: ScheduleView, typical_nats: float) -> float:
        """Return R for one replica; ``typical_nats`` is e_0."""
        page, budget, pool = replica.page_tokens, view.token_budget, view.pool_pages
        known = view.known_tokens
        compute = np.maximum(known - view.cached_tokens, 1) / budget
        shares = compute + -(-known // page) / pool + 1.0 / replica.max_batch
        weight = np.ones(known.shape[0])
        if typical_nats > 0:
            reduction = view.reduction_ewma
            np.divide(2.0 * reduction, reduction + typical_nats, out=weight, where=view.seen > 1)
        outside = replica.outstanding - known.shape[0]
        prompts = replica.outstanding_prompt_tokens - int(view.prompt_tokens.sum())
        waiting = prompts / budget + prompts / (page * pool) + outside / replica.max_batch
        return float(np.dot(shares, weight)) + float(waiting)


def _mix(key: int, index: int) -> int:
    """Return a well-mixed 64-bit number of a key and a replica (the finaliser of SplitMix64, Steele et al., 2014)."""
    z = (key + 0x9E3779B97F4A7C15 * (index + 1)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


ROUTERS: dict[str, Callable[[ClusterConfig], Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_affinity": PrefixAffinity,
    "entropic": Entropic,
}
"""Values of ``cluster.router``."""


def make_router(config: ClusterConfig) -> Router:
    """Return the configured router."""
    return ROUTERS[config.router](config)
