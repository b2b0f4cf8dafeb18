"""Each router's rule, by hand and by property."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
import schedule_view
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.config import ClusterConfig
from entropic_ctl.scheduling.base import ScheduleView
from entropic_ctl.signals import Request
from sim.routers import ROUTERS, Entropic, LeastLoaded, PrefixAffinity, RoundRobin, Standing, make_router


def view(
    known: list[int], generated: list[int], reduction: list[float] | None = None, cached: list[int] | None = None
) -> ScheduleView:
    n = len(known)
    counts, new = np.array(known, np.int64), np.array(generated, np.int64)
    return schedule_view.view(
        n,
        prompt_tokens=counts - new,
        known_tokens=counts,
        cached_tokens=counts - 1 if cached is None else np.array(cached, np.int64),
        generated_tokens=new,
        pages=-(-counts // 16),
        reduction_ewma=0.0 if reduction is None else np.array(reduction),
        seen=0 if reduction is None else 5,
        token_budget=512,
    )


def standing(known: list[int], generated: list[int], waiting: tuple[int, ...] = (), **more: Any) -> Standing:
    columns = view(known, generated, **more)
    prompts = int(columns.prompt_tokens.sum()) + sum(waiting)
    return Standing(len(known) + len(waiting), prompts, lambda: columns, 8, 16)


def request(prompt: int = 10, hashes: tuple[int, ...] = ()) -> Request:
    return Request(0, 0.0, prompt, 5, prefix_hashes=hashes)


IDLE = standing([], [])


def test_round_robin_takes_each_in_turn() -> None:
    router = RoundRobin(ClusterConfig())
    assert [router.choose(request(), [IDLE] * 3) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_load_is_prompts_outstanding_and_tokens_generated() -> None:
    assert standing([30, 12], [10, 2], waiting=(40,)).load == 20 + 10 + 40 + 10 + 2
    assert IDLE.load == 0
    busy, light = standing([30, 12], [10, 2]), standing([41], [1])
    assert LeastLoaded(ClusterConfig()).choose(request(), [busy, light]) == 1
    assert LeastLoaded(ClusterConfig()).choose(request(), [light, busy, light]) == 0  # ties: the lowest index


def test_like_prefixes_meet_and_others_spread() -> None:
    router = PrefixAffinity(ClusterConfig(affinity_pages=2, load_guard=1e6))
    replicas = [IDLE] * 4
    names = Counter(router.choose(request(64, (seed, seed + 1)), replicas) for seed in range(0, 4000, 2))
    assert sorted(names) == [0, 1, 2, 3]
    assert min(names.values()) > 400  # 500 expected; a standard deviation is 19
    for seed in range(20):
        chosen = {router.choose(request(64, (seed, 99 + seed, tail)), replicas) for tail in range(50)}
        assert len(chosen) == 1  # pages beyond the second do not matter
        shorter = router.choose(request(20, (seed,)), replicas)
        assert shorter == router.choose(request(20, (seed,)), replicas)


@given(st.integers(0, 2**63 - 1), st.integers(1, 8))
def test_a_new_replica_only_takes_requests_to_itself(key: int, n: int) -> None:
    """Rendezvous hashing: with one more replica a prefix stays where it was, or moves to the new one."""
    router = PrefixAffinity(ClusterConfig(load_guard=1e6))
    before = router.choose(request(16, (key,)), [IDLE] * n)
    assert router.choose(request(16, (key,)), [IDLE] * (n + 1)) in (before, n)


def test_the_load_guard_sends_a_crowd_elsewhere() -> None:
    router = PrefixAffinity(ClusterConfig(load_guard=1.5))
    even = [standing([100], [0])] * 2
    named = router.choose(request(10, (5,)), even)
    full = list(even)
    full[named] = standing([400], [0])
    assert router.choose(request(10, (5,)), full) == 1 - named
    assert router.choose(request(10), full) == 1 - named  # without hashes: the least loaded


def test_entropic_without_signals_counts_shares() -> None:
    one = standing([160], [0], cached=[0])
    competition = Entropic.competition(one, one.look(), 0.0)
    assert competition == pytest.approx(160 / 512 + 10 / 100 + 1 / 8)
    waiting = standing([], [], waiting=(160,))
    assert Entropic.competition(waiting, waiting.look(), 0.0) == pytest.approx(160 / 512 + 10 / 100 + 1 / 8)


def test_entropic_prefers_the_replica_whose_requests_are_resolved() -> None:
    router = Entropic(ClusterConfig())
    open_ended = standing([50, 50], [10, 10], reduction=[0.8, 0.6])
    resolved = standing([50, 50], [10, 10], reduction=[0.01, 0.02])
    assert router.choose(request(), [open_ended, resolved]) == 1
    assert router.choose(request(), [resolved, open_ended]) == 0
    crowded = standing([50] * 20, [10] * 20, reduction=[0.3] * 20)
    assert router.choose(request(), [crowded, open_ended]) == 1


@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=6), st.floats(0.01, 3.0))
def test_competition_grows_with_reduction_and_is_bounded(reduction: list[float], typical: float) -> None:
    n = len(reduction)
    base = standing([40] * n, [5] * n)
    plain = Entropic.competition(base, base.look(), 0.0)
    some = dataclasses.replace(base, look=lambda: view([40] * n, [5] * n, reduction))
    more = dataclasses.replace(base, look=lambda: view([40] * n, [5] * n, [2 * r for r in reduction]))
    low, high = (Entropic.competition(each, each.look(), typical) for each in (some, more))
    assert 0 <= low <= high <= 2 * plain + 1e-12
    same = dataclasses.replace(base, look=lambda: view([40] * n, [5] * n, [typical] * n))
    assert Entropic.competition(same, same.look(), typical) == pytest.approx(plain)


def test_every_router_of_the_config_exists() -> None:
    allowed = ClusterConfig.__dataclass_fields__["router"].metadata["options"]
    assert set(allowed) == set(ROUTERS)
    for name in allowed:
        assert isinstance(make_router(ClusterConfig(router=name)), ROUTERS[name])  # type: ignore[arg-type]
