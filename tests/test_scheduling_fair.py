from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_view import view
from toy_driver import Trace, check_invariants, step

from entropic_ctl import config as configs
from entropic_ctl.loop import Loop
from entropic_ctl.scheduling.base import Departures
from entropic_ctl.scheduling.fair import Config, Fair, build
from entropic_ctl.signals import Request

NOBODY = Departures(*np.empty((4, 0), np.int64))


def left(order: int, client: int, computed: int, generated: int) -> Departures:
    return Departures(*(np.array([x]) for x in (order, client, computed, generated)))


def counters(policy: Fair, rows: list[tuple[int, int, int, int]], departed: Departures = NOBODY) -> list[float]:
    """Rows of (arrival order, client, prompt tokens computed, generated)."""
    order, client, computed, generated = np.array(rows, np.int64).reshape(-1, 4).T
    columns = {
        "arrival_order": order, "client": client, "prompt_computed": computed, "generated_tokens": generated,
        "departed": departed,
    }  # fmt: skip
    return [float(x) for x in -policy.score(view(len(rows), **columns))]


def test_service_is_the_weighted_sum_over_a_client_s_requests() -> None:
    policy = Fair(Config(prompt_weight=1.0, output_weight=2.0))
    counters(policy, [(0, 7, 0, 0), (1, 7, 0, 0), (2, 8, 0, 0), (3, -1, 0, 0), (4, -1, 0, 0)])
    rows = [(0, 7, 10, 3), (1, 7, 0, 0), (2, 8, 4, 1), (3, -1, 5, 0), (4, -1, 6, 0)]
    assert counters(policy, rows) == [16.0, 16.0, 6.0, 5.0, 6.0]


def test_departed_requests_stay_on_their_client_s_account() -> None:
    policy = Fair(Config())
    counters(policy, [(0, 7, 0, 0), (1, 7, 0, 0), (2, 8, 0, 0)])
    assert counters(policy, [(1, 7, 1, 0), (2, 8, 0, 0)], left(0, 7, 10, 5)) == [21.0, 0.0]


@pytest.mark.parametrize(("away_with", "back_at"), [(10, 40.0), (300, 300.0)])
def test_a_returning_client_is_lifted_to_the_least_active_counter_and_never_lowered(
    away_with: int, back_at: float
) -> None:
    policy = Fair(Config(prompt_weight=1.0, output_weight=2.0))
    counters(policy, [(0, 1, 0, 0), (1, 2, 0, 0), (2, 3, 0, 0)])
    counters(policy, [(1, 2, 0, 5), (2, 3, 0, 0)], left(0, 1, away_with, 0))
    assert counters(policy, [(1, 2, 0, 30), (2, 3, 0, 20), (3, 1, 0, 0)]) == [60.0, 40.0, back_at]


def test_after_an_idle_time_everybody_starts_level_with_who_was_last() -> None:
    policy = Fair(Config(output_weight=1.0))
    counters(policy, [(0, 1, 0, 0), (1, 2, 0, 0)])
    counters(policy, [(1, 2, 0, 9)], left(0, 1, 0, 3))
    assert counters(policy, [], left(1, 2, 0, 20)) == []
    assert counters(policy, [(2, 1, 0, 0), (3, 5, 0, 0), (4, 2, 0, 0)]) == [20.0, 20.0, 20.0]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 50)), max_size=60), st.integers(0, 3))
def test_memory_is_bounded_whatever_the_clients(visits: list[tuple[int, int]], most: int) -> None:
    """Client 99 is never served and holds the floor at 0, so that nobody can be forgotten for free."""
    policy = Fair(Config(clients=most))
    counters(policy, [(0, 99, 0, 0)])
    for i, (client, tokens) in enumerate(visits, start=1):
        counters(policy, [(0, 99, 0, 0), (i, client, 0, 0)])
        counters(policy, [(0, 99, 0, 0)], left(i, client, 0, tokens))
        assert policy.remembered <= 1 + most


def test_anonymous_requests_and_level_clients_leave_nothing_behind() -> None:
    """One visitor at a time (the lifts raise the floor), then one anonymous request at a time."""
    policy = Fair(Config(clients=10**6))
    for client in (3, -1):
        for i in range(200):
            order = i + 1000 * (client < 0)
            counters(policy, [(order, client + i if client > 0 else -1, 0, 0)])
            counters(policy, [], left(order, client + i if client > 0 else -1, 5, 5))
        assert policy.remembered <= 1


def shares(policy: str, steps: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Cumulated weighted service of two clients with work at all times: one floods with 12 requests, one has 2."""
    run = configs.from_mapping(
        {
            "engine": {"max_batch": 2, "max_batch_tokens": 32, "pages": 4000, "page_tokens": 4, "max_live": 64},
            "loop": {"scheduling": {"policy": policy, "quantum_steps": 2, "wait_limit_steps": 10**6}},
        }
    )
    loop, trace, number = Loop(run.loop, run.engine, 100), Trace(), 0
    client_of: dict[int, int] = {}
    service, out = np.zeros(2), []

    def keep(client: int, most: int, prompt: int, output: int) -> None:
        nonlocal number
        live = [i for i in loop.batcher.slots.slot_of if client_of[i] == client] if client_of else []
        for _ in range(most - len(live)):
            loop.submit(Request(number, 0.0, prompt, output, client=client))
            client_of[number] = client
            number += 1

    for now in range(steps):
        keep(0, 12, 3, 5)
        keep(1, 2, 16, 40)
        step(loop, float(now), trace, check_invariants)
        plan: Any = trace.plans[-1]
        for i, n, context, samples in zip(plan.ids, plan.n_tokens, plan.context, plan.samples, strict=True):
            prompt = 3 if client_of[int(i)] == 0 else 16
            service[client_of[int(i)]] += max(0, min(context + n, prompt) - context) + 2 * samples
        out.append(service.copy())
    first, second = np.array(out).T
    return first, second


def test_two_clients_with_work_at_all_times_get_the_same_service_whatever_they_ask_for() -> None:
    """The difference over *any* interval is at most 2 B (w_in L + w_out q), see the module; FCFS has no such bound."""
    most = 2 * (1.0 * 16 + 2.0 * 2)  # B = 2 seats, prompts of at most L = 16, q = 2
    first, second = shares("fair")
    assert first[-1] > 20 * most
    assert np.abs(first - second).max() <= most
    first, second = shares("fcfs")
    assert np.abs(first - second).max() > 4 * most


def test_build() -> None:
    assert isinstance(build(Config()), Fair)
