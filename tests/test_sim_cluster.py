"""Several replicas: one is none, nothing is lost between them, and closed loops go on across them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_bank import make_bank

from entropic_ctl import config as configs
from entropic_ctl.config import RunConfig, WorkloadConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import Request
from sim.arrivals import Workload, make_workload
from sim.cluster import simulate_cluster
from sim.cost import LinearCost
from sim.replica import SimulationResult, simulate
from sim.routers import ROUTERS
from sim.trajectories import Trajectories

BANK, _ = make_bank()


def random_config(seed: int, kind: str, replicas: int = 1, router: str = "round_robin", **work: Any) -> RunConfig:
    return configs.from_mapping(
        {
            "seed": seed,
            "workload": {
                "kind": kind, "n_requests": 24, "rate_per_s": 40.0, "users": 5, "think_s": 0.05, "prompt_tokens": 30.0,
                "output_tokens": 12.0, "output_cv": 0.5, **work,
            },
            "engine": {"pages": 30, "max_batch": 3, "max_batch_tokens": 64, "prefill_chunk": 32, "page_tokens": 4},
            "cluster": {"replicas": replicas, "router": router},
            "slo": {"ttft_s": 0.5},
        }
    )  # fmt: skip


def workload_of(config: RunConfig) -> Workload:
    return make_workload(config.workload, config.seed, Trajectories.count_prompts(BANK))


def jobs(arrivals: list[float], prompts: list[int], outputs: list[int], hashes: Any = None) -> Workload:
    n = len(arrivals)
    return Workload(
        WorkloadConfig(output_length="limit"),
        np.array(arrivals, float),
        prompt_tokens=np.array(prompts),
        limit_tokens=np.array(outputs),
        prompt=np.arange(n) % 4,
        xi=np.linspace(0, 0.9, n),
        prefix_hashes=hashes,
    )


def run(
    work: Workload, replicas: int, router: str = "round_robin", cost: Any = None, **engine: Any
) -> SimulationResult:
    config = configs.from_mapping({"engine": engine, "cluster": {"replicas": replicas, "router": router}})
    return simulate_cluster(config, bank=BANK, workload=work, cost=LinearCost(0.0, 1.0))


@settings(max_examples=12)
@given(st.integers(0, 2**32), st.sampled_from(["poisson", "burst", "closed"]), st.sampled_from(sorted(ROUTERS)))
def test_one_replica_behind_a_router_is_the_same_run_bit_for_bit(seed: int, kind: str, router: str) -> None:
    config = random_config(seed, kind, router=router)
    alone = simulate(config, bank=BANK, keep_tokens=True)
    behind = simulate_cluster(config, bank=BANK, workload=workload_of(config), keep_tokens=True)
    for a, b in ((alone.requests, behind.requests), (alone.steps, behind.steps), (alone.tokens, behind.tokens)):
        assert a is not None
        assert b is not None
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    assert alone.summary == behind.summary


def test_ties_of_arrivals_and_steps_are_also_the_same() -> None:
    """Arrivals at the very ends of steps (1 s per token) and at one instant."""
    arrivals, prompts, outputs = [0.0, 3.0, 3.0, 4.0, 20.0], [2, 1, 1, 3, 2], [2, 2, 1, 2, 2]
    config = configs.from_mapping({"engine": {"max_batch": 2}})
    alone = simulate(config, bank=BANK, workload=jobs(arrivals, prompts, outputs), cost=LinearCost(0.0, 1.0))
    behind = run(jobs(arrivals, prompts, outputs), 1, max_batch=2)
    assert alone.summary == behind.summary
    np.testing.assert_array_equal(alone.requests["ttft_s"], behind.requests["ttft_s"])


@settings(max_examples=25)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["poisson", "burst", "closed"]),
    st.sampled_from(sorted(ROUTERS)),
    st.integers(2, 5),
)
def test_conservation_across_replicas(seed: int, kind: str, router: str, replicas: int) -> None:
    config = random_config(seed, kind, replicas, router)
    result = simulate(config, bank=BANK)
    table, steps, summary = result.requests, result.steps, result.summary
    assert sorted(table["id"].tolist()) == list(range(24))
    assert summary["requests_in"] == 24 == summary["requests_finished"] + summary["requests_refused"]
    assert summary["requests_live"] == 0
    assert (np.diff(table["arrival_s"]) >= 0).all()
    served = table["output_tokens"] > 0
    np.testing.assert_allclose((table["ttft_s"] + table["gap_sum_s"])[served], table["e2e_s"][served])
    assert table["output_tokens"].sum() == steps["output_tokens"].sum() == summary["output_tokens"]
    for name in ("requests_in", "requests_finished", "output_tokens", "preemptions", "iterations", "scheduled_tokens"):
        assert summary[name] == sum(part[name] for part in result.replicas)
    for name in ("busy_s", "tau_nats", "kv_bytes", "flops"):
        assert summary[name] == pytest.approx(sum(part[name] for part in result.replicas))
    assert summary["itl_max_s"] == max(part["itl_max_s"] or 0.0 for part in result.replicas)
    assert len(result.replicas) == replicas
    for index in range(replicas):
        mine = steps["replica"] == index
        assert (steps["start_s"][mine][1:] >= steps["end_s"][mine][:-1]).all()
        assert (steps["pages_used"][mine] <= 30).all()
        first = table["arrival_s"][table["replica"] == index]
        if mine.any():
            assert steps["start_s"][mine][0] >= first.min()
    assert simulate(config, bank=BANK).summary == summary


def test_an_exact_timeline_of_two_replicas() -> None:
    """Round robin, one second a token: 0 and 2 share a replica, 1 and 3 the other; each sleeps and is woken."""
    work = jobs([0.0, 1.0, 2.0, 50.0], [2, 1, 1, 3], [3, 1, 1, 2])
    result = run(work, 2, max_batch=1)
    assert result.requests["replica"].tolist() == [0, 1, 0, 1]
    assert result.requests["ttft_s"].tolist() == [2.0, 1.0, 3.0, 3.0]
    assert result.requests["e2e_s"].tolist() == [4.0, 1.0, 3.0, 4.0]
    assert result.summary["makespan_s"] == 54.0
    assert result.summary["utilisation"] == pytest.approx((5 + 1 + 4) / 108)
    assert result.summary["queue_depth_mean"] == pytest.approx(2 / 108)  # request 2 waits from 2 to 4


def test_a_closed_loop_goes_on_wherever_its_requests_are_served() -> None:
    """One user, no think time, two replicas in turn: each request arrives when the one before left, elsewhere."""
    config = random_config(0, "closed", 2, users=1, think_s=0.0)
    result = simulate(config, bank=BANK, cost=LinearCost(0.0, 1.0))
    table = result.requests
    assert table["id"].tolist() == list(range(24))
    np.testing.assert_array_equal(table["arrival_s"][1:], table["left_s"][:-1])
    assert table["replica"].tolist() == [i % 2 for i in range(24)]
    assert result.summary["utilisation"] == pytest.approx(0.5)


def test_progress_counts_the_whole_cluster() -> None:
    calls: list[tuple[int, int, float]] = []
    work = {"n_requests": 8, "output_tokens": 600.0, "output_length": "limit", "prompt_tokens": 4.0}
    config = configs.from_mapping({"workload": work, "cluster": {"replicas": 2}})
    simulate(config, bank=BANK, progress=lambda *args: calls.append(args))
    assert len(calls) > 3
    assert calls[-1][:2] == (8, 8)
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)


def test_more_replicas_serve_a_burst_faster() -> None:
    spans = [simulate(random_config(5, "burst", n, "least_loaded"), bank=BANK).summary["makespan_s"] for n in (1, 2, 4)]
    assert spans[0] > 1.6 * spans[1] > 1.6 * 1.4 * spans[2]


def test_the_router_sees_the_state_at_the_arrival_and_nothing_later() -> None:
    """Request 1 arrives at 0.5 inside the step of request 0 that ends at 4 (and yields its first token)."""
    seen: list[tuple[float, list[tuple[int, int, int]]]] = []

    class Watch:
        def choose(self, request: Request, replicas: Any) -> int:
            seen.append((request.arrival_s, [(r.outstanding, r.outstanding_prompt_tokens, r.load) for r in replicas]))
            return 0

    config = configs.from_mapping({"cluster": {"replicas": 2}})
    work = jobs([0.0, 0.5, 4.5], [4, 2, 1], [2, 1, 1])
    simulate_cluster(config, bank=BANK, workload=work, cost=LinearCost(0.0, 1.0), router=Watch())
    assert seen == [(0.0, [(0, 0, 0)] * 2), (0.5, [(1, 4, 4), (0, 0, 0)]), (4.5, [(2, 6, 7), (0, 0, 0)])]


def test_a_wrong_cluster_is_refused() -> None:
    for table, text in (({"replicas": 0}, "cluster.replicas"), ({"router": "best"}, "round_robin, least_loaded")):
        with pytest.raises(BadInputError, match=text):
            configs.from_mapping({"cluster": table})


def test_memory_of_the_front_goes_with_the_requests_in_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """S16: an inbox forgets who left."""
    import sim.cluster

    made: list[sim.cluster.Inbox] = []
    init = sim.cluster.Inbox.__init__
    monkeypatch.setattr(sim.cluster.Inbox, "__init__", lambda self, *a: made.append(self) or init(self, *a))
    simulate(random_config(1, "poisson", 3), bank=BANK)
    assert len(made) == 3
    for inbox in made:
        assert not inbox._jobs
        assert not inbox._prompts
        assert inbox._prompt_tokens == 0
