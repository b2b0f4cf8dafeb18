"""The exhaustive runs of the shipped batcher: what they visit, that states are told apart, and that faults are seen."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from entropic_ctl import config
from entropic_ctl.batching import Batcher
from entropic_ctl.config import RunConfig
from entropic_ctl.ordering import wait_bound
from entropic_ctl.seating import Seating
from entropic_ctl.signals import Request
from proofs import small_pool
from proofs.check import Claim, Hints, Subject
from proofs.check.interleavings import claims, scaled
from proofs.check.scheduling import seats, wait_steps
from proofs.small_pool import Pool, explore, fork, key, leak, successors

SMALL = Pool(2, 4, 2, 8, 8, 3, 3, 2, False, ((3, 2), (2, 3), (4, 2)))


@pytest.fixture
def fresh() -> Iterator[None]:
    """An empty cache, before and after: the code explored is not the shipped one."""
    explore.cache_clear()
    yield
    explore.cache_clear()


def judge(**tables: Any) -> Claim:
    (claim,) = claims(Subject(config.from_mapping(tables), 32_000), Hints({}))
    return claim


def test_the_default_config_is_proved_and_the_small_pool_follows_the_config() -> None:
    claim = judge()
    assert claim.status == "proved"
    assert claim.numbers["states"] > 500
    assert claim.numbers["longest_wait"] <= claim.numbers["wait_bound"]
    tables = {
        "engine": {"max_batch": 1, "max_batch_tokens": 24, "prefill_chunk": 16, "max_live": 2},
        "loop": {"scheduling": {"policy": "fair", "wait_limit_steps": 2, "quantum_steps": 1}},
    }
    pool = scaled(Subject(config.from_mapping(tables), 300))
    assert pool[2:9] == (1, 3, 2, 2, 2, 1, True)
    assert judge(**tables).numbers["states"] != claim.numbers["states"]


def test_what_is_not_explored_is_unknown() -> None:
    assert judge(engine={"prefix_caching": True}).status == "unknown"
    assert judge(speculation={"draft_tokens": 2}).status == "unknown"
    assert explore(SMALL._replace(quantum_steps=3), 20).fault.startswith("given up")


@pytest.mark.parametrize(("batch", "chunk", "tokens"), [(1, 8, 8), (2, 2, 3), (2, 8, 8), (3, 1, 3), (3, 3, 5)])
def test_every_small_engine_is_free_of_faults(batch: int, chunk: int, tokens: int) -> None:
    pool = SMALL._replace(max_batch=batch, max_batch_tokens=tokens, prefill_chunk=chunk)
    found = explore(pool)
    assert found.fault == ""
    assert found.preemptions > 0
    assert found.longest_wait <= wait_steps(pool.engine, seats(pool.engine, 6), 3, 2)


def test_a_deeper_pool_with_pages_of_four_tokens() -> None:
    pool = Pool(4, 4, 2, 16, 16, 3, 4, 3, False, ((7, 5), (10, 3), (4, 6)))
    found = explore(pool)
    assert (found.fault, found.states > 3000) == ("", True)


def test_the_wait_found_can_pass_the_bound_for_rows_that_fit_together() -> None:
    """Three seats, but the pool holds one of the requests: W + ceil(N/B) q alone is not a bound."""
    pool = SMALL._replace(max_batch=3, max_batch_tokens=3, prefill_chunk=1, wait_limit_steps=2, quantum_steps=1)
    pool = pool._replace(requests=((5, 3), (5, 3), (5, 3)))
    found = explore(pool)
    assert found.fault == ""
    assert wait_bound(3, 3, 2, 1) < found.longest_wait <= wait_steps(pool.engine, seats(pool.engine, 8), 2, 1)


def histories(pool: Pool, depth: int) -> dict[Any, set[tuple[Any, ...]]]:
    """Keys of all successors of every state, without merging states: one entry per history."""
    found: dict[Any, set[tuple[Any, ...]]] = {}
    level = [(pool.batcher(), frozenset(range(len(pool.requests))))]
    for _ in range(depth):
        following = []
        for state in level:
            after = [new for new, _, _ in successors(pool, state)]
            found.setdefault(key(state), set()).add(tuple(sorted({repr(key(new)) for new in after})))
            following.extend(after)
        level = following[:: max(1, len(following) // 400)]
    return found


@pytest.mark.parametrize("batch", [1, 2])
def test_states_counted_as_one_have_the_same_successors(batch: int) -> None:
    found = histories(SMALL._replace(max_batch=batch), 9)
    assert len(found) > 80
    assert {key_ for key_, ways in found.items() if len(ways) > 1} == set()


def test_random_long_runs_stay_among_the_states_explored() -> None:
    """A driver of its own, with random scores: every state it meets was visited."""
    pool, rng, visited = SMALL, np.random.default_rng(5), set()
    todo = [(pool.batcher(), frozenset(range(3)))]
    visited.add(key(todo[0]))
    while todo:
        for new, _, _ in successors(pool, todo.pop()):
            if key(new) not in visited:
                visited.add(key(new))
                todo.append(new)
    assert len(visited) == explore(pool).states
    for _ in range(150):
        b, left = pool.batcher(), set(range(3))
        while left or b.live or b.backlog:
            for i in rng.permutation(sorted(left)).tolist():
                if rng.random() < 0.4:
                    b.submit(Request(i, 0.0, *pool.requests[i]))
                    left.discard(i)
            b.admit()
            if not b.live:
                continue
            plan = b.plan(0.0, lambda slots: rng.normal(size=slots.shape[0]), np.zeros(3))
            sampled = plan.ids[plan.samples]
            ended = tuple(
                small_pool.Finish(i, small_pool.FinishReason.EOS) for i in sampled.tolist() if rng.random() < 0.2
            )
            b.observe(small_pool.StepResult(plan.step, 0.0, 1.0, token_ids=sampled, finished=ended))
            assert key((b, frozenset(left))) in visited


def test_a_fork_is_independent() -> None:
    batcher = SMALL.batcher()
    for i, (prompt, output) in enumerate(SMALL.requests):
        batcher.submit(Request(i, 0.0, prompt, output))
    batcher.admit()
    before, other = key((batcher, frozenset())), fork(batcher)
    plan = other.plan(0.0, lambda slots: np.zeros(slots.shape[0]), np.zeros(3))
    other.observe(small_pool.StepResult(plan.step, 0.0, 1.0, token_ids=plan.ids[plan.samples]))
    assert key((batcher, frozenset())) == before != key((other, frozenset()))
    assert batcher.pages.pool.used == 0 < other.pages.pool.used
    assert leak(batcher) == leak(other) == ""


def two_live() -> Batcher:
    """Two requests with pages, between two iterations."""
    batcher = SMALL.batcher()
    for i in (0, 1):
        batcher.submit(Request(i, 0.0, 3, 2))
    batcher.admit()
    plan = batcher.plan(0.0, lambda slots: np.zeros(slots.shape[0]), np.zeros(3))
    batcher.observe(small_pool.StepResult(plan.step, 0.0, 1.0, token_ids=plan.ids[plan.samples]))
    assert batcher.live == 2
    return batcher


@pytest.mark.parametrize("column", ["prompt", "known", "cached", "stop_at", "owed", "last_run", "count"])
def test_whatever_a_decision_reads_tells_states_apart(column: str) -> None:
    one = two_live()
    other = fork(one)
    table = other.pages if column == "count" else other.slots
    values = getattr(table, column)
    slot = other.slots.live[0]
    values[slot] = not values[slot] if values.dtype == np.bool_ else values[slot] + 1
    assert key((one, frozenset())) != key((other, frozenset()))


def test_a_seat_protected_for_longer_tells_states_apart() -> None:
    one = two_live()
    other = fork(one)
    other.slots.protected_until[other.slots.live[0]] = other.step + 1
    one.slots.protected_until[one.slots.live[0]] = one.step
    assert key((one, frozenset())) != key((other, frozenset()))


def test_every_broken_account_is_named() -> None:
    batcher = two_live()
    assert leak(batcher) == ""
    first, second = batcher.slots.live.tolist()
    shared = fork(batcher)
    shared.pages._table[second, 0] = shared.pages._table[first, 0]
    assert "two owners" in leak(shared)
    lost = fork(batcher)
    lost.slots._free.pop()
    assert "slot is lost" in leak(lost)
    dropped = fork(batcher)
    dropped.pages.count[first] -= 1
    assert "are used" in leak(dropped)


# every fault is seen


def broken(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "leak":

        def drop(self: Any, slot: int) -> None:  # forgets the last page
            self.pool.release(self._table[slot, : max(0, self.count[slot] - 1)].copy())
            self.count[slot] = 0

        monkeypatch.setattr("entropic_ctl.slots.PageTable.drop", drop)
    elif kind == "livelock":  # the last row in order takes from the first, and the other way round

        def take(self: Any, slot: int) -> None:
            self._pages.drop(slot)
            self._slots.known[slot] = self._slots.prompt[slot]  # what was generated is thrown away
            self._slots.cached[slot] = self._slots.protected_until[slot] = 0
            self._slots.owed[slot] = False
            self.preempted.append(slot)

        monkeypatch.setattr(Seating, "_take", take)
    elif kind == "idle":
        honest = Seating.able

        def able(self: Any, order: Any, group: Any) -> Any:  # never more than one row
            found = honest(self, order, group)
            found[np.flatnonzero(found)[1:]] = False
            return found

        monkeypatch.setattr(Seating, "able", able)
        monkeypatch.setattr(Batcher, "plain", property(lambda self: False))
    else:  # nobody gives way
        monkeypatch.setattr(Seating, "_take", lambda self, slot: None)
        monkeypatch.setattr(Batcher, "plain", property(lambda self: False))


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("kind", ["leak", "livelock", "idle", "deadlock"])
def test_a_broken_batcher_is_refuted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, kind)
    claim = judge()
    assert claim.status == "refuted"
    needle = {"leak": "pages are used", "idle": "was", "deadlock": "deadlock", "livelock": "livelock"}[kind]
    assert needle in claim.reason


def test_every_order_of_arrival_is_among_the_successors() -> None:
    pool = SMALL._replace(prefill_chunk=1)  # so that nobody ends in the first iteration
    found = successors(pool, (pool.batcher(), frozenset(range(3))))
    asked = {tuple(state[0].slots.id[state[0].slots.live].tolist()) for state, _, _ in found}
    assert len(asked) == 3 + 6 + 6  # one, two or three requests, in every order
    assert set(itertools.permutations(range(3))) <= asked


def test_pool_and_config_agree_on_what_is_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim reads the exploration: a fault or a wait beyond the bound turns it."""
    good = explore(scaled(Subject(RunConfig(), 300)))
    module = "proofs.check.interleavings.explore"
    bound = judge().numbers["wait_bound"]
    for wait, status in ((bound, "proved"), (bound + 1, "refuted")):
        monkeypatch.setattr(module, lambda pool, wait=wait: dataclasses.replace(good, longest_wait=wait))
        assert judge().status == status
    monkeypatch.setattr(module, lambda pool: dataclasses.replace(good, longest_wait=99))
    assert judge().status == "refuted"
    assert "99" in judge().reason
    monkeypatch.setattr(module, lambda pool: dataclasses.replace(good, fault="given up after 7 states"))
    assert judge().status == "unknown"
