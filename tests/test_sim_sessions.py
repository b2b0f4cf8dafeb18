"""Sessions: growing contexts, think times after departures, shared prefixes, documented means."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_bank import make_bank

from entropic_ctl import config as configs
from entropic_ctl.config import WorkloadConfig
from sim.arrivals import make_workload
from sim.cost import LinearCost
from sim.lengths import turn_counts
from sim.replica import simulate
from sim.sessions import draw_sessions

BANK, _ = make_bank()


def sessions(**more: Any) -> WorkloadConfig:
    return WorkloadConfig(kind="sessions", **{"n_requests": 40, "turns": 3.0, "think_s": 2.0, **more})


@pytest.mark.parametrize("mean", [1.0, 1.5, 8.0])
def test_geometric_turns_have_the_documented_mean_and_law(mean: float) -> None:
    n = 100_000
    x = turn_counts(np.random.default_rng(2), n, mean, "geometric")
    assert x.min() == 1
    assert abs(x.mean() - mean) <= 4 * x.std() / math.sqrt(n)
    p = 1 / mean
    assert abs((x == 1).mean() - p) <= 4 * math.sqrt(p * (1 - p) / n)
    assert (turn_counts(np.random.default_rng(2), n, mean + 1, "geometric") >= x).all()


@given(st.integers(0, 2**32), st.floats(1.0, 9.0), st.integers(1, 60), st.integers(0, 50))
def test_a_prompt_is_the_conversation_so_far_and_a_message(seed: int, turns: float, n: int, shared: int) -> None:
    config = sessions(turns=turns, n_requests=n, shared_tokens=shared, output_cv=0.5)
    drawn = draw_sessions(config, seed)
    assert drawn.session.shape == (n,)
    first = drawn.follows == -1
    assert first[0]
    assert first.sum() == drawn.session[-1] + 1
    later = np.flatnonzero(~first)
    np.testing.assert_array_equal(drawn.follows[later], later - 1)
    np.testing.assert_array_equal(drawn.session[later], drawn.session[later - 1])
    assert (drawn.prompt_tokens[first] > shared).all()
    grown = drawn.prompt_tokens[later] - drawn.prompt_tokens[later - 1] - drawn.limit_tokens[later - 1]
    assert (grown >= 1).all()  # at least one new token is said
    assert (np.diff(drawn.arrival_s[first]) >= 0).all()


def test_means_of_messages_and_think_times() -> None:
    n = 50_000
    drawn = draw_sessions(sessions(n_requests=n, message_tokens=20.0, prompt_tokens=50.0, shared_tokens=7), 1)
    first, later = drawn.follows == -1, np.flatnonzero(drawn.follows >= 0)
    grown = drawn.prompt_tokens[later] - drawn.prompt_tokens[later - 1] - drawn.limit_tokens[later - 1]
    for values, mean in ((grown, 20.0), (drawn.prompt_tokens[first], 57.0), (drawn.arrival_s[later], 2.0)):
        assert abs(values.mean() - mean) < 4 * values.std() / math.sqrt(len(values))
    assert abs(first.sum() * 3 / n - 1) < 4 * math.sqrt(6 / first.sum()) / 3


def test_changing_one_thing_moves_nothing_else() -> None:
    base, other = (draw_sessions(c, 5) for c in (sessions(), sessions(think_s=9.0, rate_per_s=4.0, message_tokens=90)))
    np.testing.assert_array_equal(base.session, other.session)
    np.testing.assert_array_equal(base.limit_tokens, other.limit_tokens)
    first = base.follows == -1
    np.testing.assert_array_equal(base.prompt_tokens[first], other.prompt_tokens[first])
    np.testing.assert_allclose(base.arrival_s[first], 4 * other.arrival_s[first], rtol=1e-12)
    np.testing.assert_allclose(base.arrival_s[~first] * 4.5, other.arrival_s[~first], rtol=1e-12)


def test_next_turn_comes_a_think_time_after_the_previous_one_left() -> None:
    config = sessions(n_requests=6, turns=3.0, turns_law="fixed", session_arrivals="burst")
    work = make_workload(config, 0, 1)
    think = work.arrival_s
    first = work.arrived(0.0)
    assert [(r.id, r.client) for r in first] == [(0, 0), (3, 1)]
    assert work.next_s() is None
    work.left(3, 10.0)
    assert work.next_s() == 10.0 + think[4]
    work.left(0, 10.0)
    assert work.next_s() == 10.0 + min(think[4], think[1])
    assert {r.id for r in work.arrived(1e6)} == {1, 4}
    work.left(4, 1e6)
    work.left(1, 1e6)
    assert {(r.id, r.client) for r in work.arrived(2e6)} == {(2, 0), (5, 1)}
    work.left(2, 2e6)
    work.left(5, 2e6)
    assert work.next_s() is None


def test_hashes_of_one_session_grow_and_sessions_share_only_the_system_prompt() -> None:
    config = sessions(n_requests=60, shared_tokens=50)
    work = make_workload(config, 3, 1, page_tokens=16)
    assert work.prefix_hashes is not None
    drawn = draw_sessions(config, 3)
    for i in range(60):
        mine = work.prefix_hashes[i]
        assert len(mine) == drawn.prompt_tokens[i] // 16
        assert len(set(mine)) == len(mine)
        if drawn.follows[i] >= 0:
            before = work.prefix_hashes[i - 1]
            assert mine[: len(before)] == before
        elif i:
            other = work.prefix_hashes[0]
            assert mine[:3] == other[:3]  # 50 shared tokens: three full pages of 16
            assert not set(mine[3:]) & set(other[3:])


def test_prefix_caching_saves_the_previous_prompt_of_each_session() -> None:
    """One seat, constant sizes: turn k computes its prompt minus the full pages of the prompt of turn k - 1."""
    work = {
        "kind": "sessions", "n_requests": 3, "turns": 3.0, "turns_law": "fixed", "prompt_tokens": 40.0,
        "prompt_cv": 0.0, "message_tokens": 10.0, "output_tokens": 5.0,
    }  # fmt: skip
    base = {"workload": work, "engine": {"pages": 64, "max_batch": 1, "max_batch_tokens": 512}}
    seconds = {}
    for caching in (False, True):
        config = configs.from_mapping({**base, "engine": {**base["engine"], "prefix_caching": caching}})
        result = simulate(config, bank=BANK, cost=LinearCost(0.0, 1.0))  # a second per token computed
        assert result.requests["prompt_tokens"].tolist() == [40, 55, 70]
        assert result.requests["output_tokens"].tolist() == [5, 5, 5]
        assert (
            result.requests["arrival_s"].tolist()[1:]
            == ((result.requests["arrival_s"] + result.requests["e2e_s"]).tolist()[:-1])
        )
        seconds[caching] = result.requests["ttft_s"].tolist()
    assert seconds[False] == pytest.approx([40, 55, 70])
    assert seconds[True] == pytest.approx([40, 55 - 32, 70 - 48])  # two, then three full pages are found
