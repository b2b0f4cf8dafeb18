"""Every run of the shipped batcher on a pool so small that all of them can be gone through.

A *run* is fixed by what the batcher does not decide: when each request arrives (any number before a plan, in any
order), in which order the policy wants the live rows whenever it is asked, and which sampled rows end their text. All
combinations are followed on the shipped :class:`~entropic_ctl.batching.Batcher`; nothing is modelled. Cancellation is
not explored. Two states count as one if every later decision is the same: request by request in arrival order, with
times relative to the step and without page and slot numbers, which no decision reads. Part of the trusted code;
integers only. Source: ours.
"""
# ruff: noqa: SLF001 - what is explored is the private state of the batcher

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from entropic_ctl.batching import Batcher
from entropic_ctl.config import EngineConfig
from entropic_ctl.errors import EntropicError, NoProgressError
from entropic_ctl.scheduling.base import SchedulingConfig
from entropic_ctl.signals import Finish, FinishReason, IntArray, Request, StepPlan, StepResult

__all__ = ["Explored", "Pool", "explore", "fork", "idle_though_admissible", "key", "leak", "successors"]

State = tuple[Batcher, frozenset[int]]
"""A batcher between two iterations, and the requests still to come."""


class Pool(NamedTuple):
    """What is explored; a key of the cache.

    Parameters
    ----------
    page_tokens, pages, max_batch, max_batch_tokens, prefill_chunk, max_live : int
        Engine limits.
    wait_limit_steps, quantum_steps : int
        W and q.
    stateful : bool
        The policy wants to see every change of the live set.
    requests : tuple of (int, int)
        Prompt and largest output of each.
    """

    page_tokens: int
    pages: int
    max_batch: int
    max_batch_tokens: int
    prefill_chunk: int
    max_live: int
    wait_limit_steps: int
    quantum_steps: int
    stateful: bool
    requests: tuple[tuple[int, int], ...]

    @property
    def engine(self) -> EngineConfig:
        """The engine limits."""
        return EngineConfig(
            page_tokens=self.page_tokens,
            pages=self.pages,
            max_batch=self.max_batch,
            max_batch_tokens=self.max_batch_tokens,
            prefill_chunk=self.prefill_chunk,
            max_live=self.max_live,
        )

    def batcher(self) -> Batcher:
        """Return an empty shipped batcher with these limits."""
        scheduling = SchedulingConfig(wait_limit_steps=self.wait_limit_steps, quantum_steps=self.quantum_steps)
        return Batcher(self.engine, scheduling, stateful=self.stateful)


@dataclass(frozen=True)
class Explored:
    """What the exploration found.

    Parameters
    ----------
    states, steps : int
        Distinct states, and iterations run from them.
    longest : int
        Iterations of the longest run without an idle one: no run is longer, so every request ends.
    longest_wait : int
        Most iterations in a row that a live request was left out.
    preemptions : int
        Iterations that took pages away.
    fault : str
        The first deadlock, livelock, leak or idle seat met; empty if there is none.
    """

    states: int
    steps: int
    longest: int
    longest_wait: int
    preemptions: int
    fault: str


_CONTAINERS = (np.ndarray, list, dict)


def _copied(thing: Any) -> Any:
    """Copy an object of the batcher with the containers in its attributes."""
    new = object.__new__(type(thing))
    new.__dict__.update({k: v.copy() if isinstance(v, _CONTAINERS) else v for k, v in thing.__dict__.items()})
    return new


def fork(batcher: Batcher) -> Batcher:
    """Return an independent copy of a batcher between two iterations (open plans are shared, they are read-only)."""
    new = _copied(batcher)
    new.slots, new.pages = _copied(batcher.slots), _copied(batcher.pages)
    new.pages.pool = _copied(batcher.pages.pool)
    new.pages.view = new.pages._table.view()
    new.pages.view.flags.writeable = False
    copied: Batcher = new
    return copied


def key(state: State) -> tuple[Any, ...]:
    """Return what later decisions depend on."""
    b, to_come = state
    s, step = b.slots, b.step
    live = s.live
    rank = {slot: i for i, slot in enumerate(live.tolist())}
    rows = tuple(
        zip(
            *(c[live].tolist() for c in (s.prompt, s.known, s.cached, s.stop_at, b.pages.count, s.owed)),
            (step - s.last_run[live]).tolist(),
            np.maximum(s.protected_until[live] - step, 0).tolist(),
            strict=True,
        )
    )
    waiting = tuple(request_id for request_id in b._backlog)
    drawn: tuple[Any, ...] = ()
    if b._drawn and not b._changed:
        order = tuple(rank[slot] for slot in b._order.tolist())
        drawn = (order, tuple(b._group.tolist()), tuple(b._protected.tolist()), step - b._drawn_at)
    steady: tuple[Any, ...] = ()
    if b._steady and not b._changed and b._last is not None:
        steady = tuple(rank[slot] for slot in b._last.slots.tolist())
    event = min(b._next_event - step, 2**20) if drawn or steady else 0
    return tuple(sorted(to_come)), waiting, rows, drawn, steady, event


def leak(batcher: Batcher) -> str:
    """Return what is wrong with the accounts of slots and pages; empty if nothing is."""
    pages, pool, live = batcher.pages, batcher.pages.pool, batcher.slots.live.tolist()
    held = [page for slot in live for page in pages._table[slot, : pages.count[slot]].tolist()]
    if len(set(held)) != len(held):
        return "a page has two owners"
    if pool.used != len(held) or pool.used + pool.available != pool.pages or int(pages.count.sum()) != len(held):
        return f"{pool.used} pages are used, {len(held)} are held"
    if len(live) + batcher.slots.room != batcher.engine.max_live:
        return "a slot is lost"
    return ""


def idle_though_admissible(batcher: Batcher, plan: StepPlan) -> str:
    """Return which row the plan left out although it was admissible; empty if it is work-conserving.

    With a seat and a token of the budget left, a row left out is admissible if

    - it holds pages, did not just lose them, and has a place for its next token in them or in a free page;
    - it holds none, is the first such row left out, nobody lost pages in this plan (those are offered from the next
      plan on), and its known tokens fit in the pages that are neither used nor still needed by a holder for the
      tokens it knows.
    """
    s, table, engine = batcher.slots, batcher.pages, batcher.engine
    page, free = engine.page_tokens, batcher.pages.pool.available
    if plan.n_rows >= engine.max_batch or int(plan.n_tokens.sum()) >= engine.max_batch_tokens:
        return ""
    running, lost = set(plan.ids.tolist()), set(plan.preempted.tolist())
    order = batcher._order.tolist() if batcher._drawn else s.live.tolist()
    promised = sum(max(0, -(-int(s.known[i]) // page) - int(table.count[i])) for i in order if table.count[i] > 0)
    starters = [i for i in order if table.count[i] == 0 and int(s.id[i]) not in lost]
    for slot in order:
        row = int(s.id[slot])
        if row in running or row in lost:
            continue
        held = int(table.count[slot])
        if held and (held * page > s.cached[slot] or free):
            return f"request {row} holds pages, could go on and was left out"
        if not held and not lost and slot == starters[0] and -(-int(s.known[slot]) // page) <= free - promised:
            return f"request {row} fits and was not started"
    return ""


def _subsets(rows: list[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(rows) + 1):
        yield from itertools.combinations(rows, count)


def _plans(batcher: Batcher) -> Iterator[tuple[Batcher, StepPlan]]:
    """Yield the plan for every order in which a policy could want the rows that are neither protected nor overdue.

    ``batcher`` itself makes the last one.
    """
    live, s = batcher.slots.live, batcher.slots
    step, limit = batcher.step, batcher.scheduling.wait_limit_steps
    bound = s.protected(live, step) | (step - 1 - s.last_run[live] >= limit)
    rest = np.flatnonzero(~bound).tolist()
    asked = False

    def scored(order: tuple[int, ...]) -> Callable[[IntArray], Any]:
        def score(slots: IntArray) -> Any:
            nonlocal asked
            asked = True
            values = np.zeros(slots.shape[0])
            values[list(order)] = -np.arange(len(order))
            return values

        return score

    theta = np.zeros(batcher.engine.max_live)
    orders = list(itertools.permutations(rest))
    for order in orders:
        one = batcher if order is orders[-1] else fork(batcher)
        yield one, one.plan(0.0, scored(order), theta)
        if not asked:
            return


def successors(pool: Pool, state: State) -> Iterator[tuple[State, StepPlan | None, str]]:
    """Run one iteration in every possible way.

    Yields
    ------
    state : tuple
        After the iteration.
    plan : StepPlan or None
        None where nothing is in the system and nothing arrives.
    fault : str
        A leak, or a row left out for no reason.
    """
    batcher, to_come = state
    nothing = not (batcher.live or batcher.backlog)
    for arriving in itertools.chain.from_iterable(map(itertools.permutations, _subsets(sorted(to_come)))):
        if nothing and not arriving:  # time passes; no decision depends on how much
            continue
        start = fork(batcher)
        for i in arriving:
            start.submit(Request(i, 0.0, *pool.requests[i]))
        start.admit()
        for planned, plan in _plans(start):
            wrong = idle_though_admissible(planned, plan)
            sampled = plan.ids[plan.samples]
            ends = list(_subsets(sampled.tolist()))
            for ended in ends:
                after = planned if ended is ends[-1] else fork(planned)
                finished = tuple(Finish(i, FinishReason.EOS) for i in ended)
                after.observe(StepResult(plan.step, 0.0, 1.0, token_ids=sampled, finished=finished))
                yield (after, to_come - set(arriving)), plan, wrong or leak(after)


@functools.cache
def explore(pool: Pool, most: int = 10**6) -> Explored:
    """Follow every run, depth first, and look for a deadlock, a livelock, a leak and a seat left empty.

    A state met again on its own path closes a cycle: a run that never ends (a livelock). Without one the longest run
    is finite, and it is what is returned.

    Parameters
    ----------
    pool : Pool
    most : int
        Give up beyond so many states (``fault`` says so).
    """
    root: State = (pool.batcher(), frozenset(range(len(pool.requests))))
    left: dict[Any, int] = {}  # state -> iterations of the longest run from it; -1 while on the path
    steps = longest_wait = preemptions = 0
    path: list[tuple[Any, Iterator[tuple[State, StepPlan | None, str]], int]] = []

    def enter(state: State, name: Any) -> None:
        left[name] = -1
        path.append((name, successors(pool, state), 0))

    def result(fault: str) -> Explored:
        return Explored(len(left), steps, max(left.values()), longest_wait, preemptions, fault)

    enter(root, key(root))
    while path:
        name, following, longest = path.pop()
        try:
            found = next(following, None)
        except EntropicError as error:
            return result(f"{'deadlock' if isinstance(error, NoProgressError) else 'the batcher fails'}: {error}")
        if found is None:
            left[name] = longest
            if path:
                above, rest, most_above = path.pop()
                path.append((above, rest, max(most_above, longest + 1)))
            continue
        state, plan, wrong = found
        steps += 1
        slots = state[0].slots
        if slots.live.shape[0]:
            longest_wait = max(longest_wait, int((state[0].step - 1 - slots.last_run[slots.live]).max()))
        preemptions += plan is not None and plan.preempted.shape[0] > 0
        if wrong:
            return result(wrong)
        new = key(state)
        seen = left.get(new)
        if seen == -1:
            return result("livelock: a state comes back without anybody having left")
        path.append((name, following, longest if seen is None else max(longest, seen + 1)))
        if seen is None:
            if len(left) >= most:
                return result(f"given up after {most} states")
            enter(state, new)
    return result("")
