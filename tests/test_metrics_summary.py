"""The summary: exact timelines, an independent recount, and a document that names every number."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics_doc import summary_part
from synthetic_bank import make_bank
from test_metrics import plan_of, random_run, result_of

from entropic_ctl import config as configs
from entropic_ctl.config import SloConfig, WorkloadConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.histogram import RELATIVE_ERROR
from entropic_ctl.metrics import Metrics
from entropic_ctl.metrics_summary import GROUPS, grouped, merge
from entropic_ctl.signals import Finish, FinishReason, Request
from sim.arrivals import Workload
from sim.cost import LinearCost, StepCost
from sim.load import StepLoad
from sim.replica import SimulationResult, simulate

BANK, _ = make_bank()


def run(
    prompts: list[int], outputs: list[int], arrivals: list[float], cost: Any = None, **tables: Any
) -> SimulationResult:
    n = len(prompts)
    work = Workload(
        WorkloadConfig(output_length="limit"),
        np.array(arrivals, float),
        prompt_tokens=np.array(prompts),
        limit_tokens=np.array(outputs),
        prompt=np.arange(n) % 4,
        xi=np.linspace(0, 0.9, n),
    )
    return simulate(configs.from_mapping(tables), bank=BANK, workload=work, cost=cost or LinearCost(0.0, 1.0))


def random_result(seed: int, kind: str = "poisson", **engine: int) -> SimulationResult:
    limits = {"pages": 24, "max_batch": 3, "max_batch_tokens": 64, "prefill_chunk": 32, "page_tokens": 4} | engine
    work = {
        "kind": kind,
        "n_requests": 14,
        "rate_per_s": 25.0,
        "users": 5,
        "prompt_tokens": 30.0,
        "output_tokens": 15.0,
    }
    return simulate(configs.from_mapping({"seed": seed, "workload": work, "engine": limits}), bank=BANK)


def test_kv_use_on_an_exact_timeline() -> None:
    """Prompt 10 in chunks of 4, 4, 2 and three more tokens, pages of 4, one second a token.

    Pages 1, 2, 3, 3, 3, 4 (after 4, 8, 10, 11, 12, 13 tokens) for 4, 4, 2, 1, 1, 1 seconds: 28 page-seconds.
    """
    engine = {"pages": 8, "page_tokens": 4, "prefill_chunk": 4}
    summary = run([10], [4], [2.5], engine=engine).summary
    assert summary["makespan_s"] == 13.0
    assert summary["kv_use_mean"] == pytest.approx(28 / (13 * 8))
    assert summary["kv_use_max"] == 0.5
    assert summary["itl_mean_s"] == summary["itl_max_s"] == 1.0
    assert summary["queue_depth_mean"] == 0.0
    assert summary["utilisation"] == 1.0


def test_queue_depth_on_an_exact_timeline() -> None:
    """One seat, one second a token: request 1 arrives at 1 and waits until 3, while request 0 runs."""
    summary = run([1, 1], [3, 1], [0.0, 1.0], engine={"max_batch": 1}).summary
    assert summary["makespan_s"] == 4.0
    assert summary["queue_depth_mean"] == pytest.approx(2 / 4)
    assert summary["queue_depth_max"] == 1


@settings(max_examples=12)
@given(st.integers(0, 2**32), st.sampled_from(["poisson", "burst", "closed"]))
def test_queue_depth_is_the_time_average_of_a_recount(seed: int, kind: str) -> None:
    """Integrate (in the system) - (running) over the run, piece by piece."""
    result = random_result(seed, kind)
    requests, steps = result.requests, result.steps
    times = np.unique(np.concatenate([requests["arrival_s"], requests["left_s"], steps["start_s"], steps["end_s"]]))
    middle, width = (times[1:] + times[:-1]) / 2, np.diff(times)
    inside = (requests["arrival_s"] <= middle[:, None]) & (middle[:, None] < requests["left_s"])
    running = (steps["start_s"] <= middle[:, None]) & (middle[:, None] < steps["end_s"])
    waiting = inside.sum(1) - (running * steps["rows"]).sum(1)
    assert (waiting >= 0).all()
    assert result.summary["queue_depth_mean"] == pytest.approx(waiting @ width / width.sum(), abs=1e-9)
    assert result.summary["queue_depth_max"] <= waiting.max()


class Powered:
    """Two seconds and ten joules a step, three watts when idle."""

    idle_power_w = 3.0

    def step(self, load: StepLoad) -> StepCost:
        return StepCost(2.0, 100.0, 50.0, 10.0)


def test_energy_counts_steps_and_idle_time() -> None:
    """Two requests of two steps each, at 0 and at 10: 8 s busy, 6 s idle between."""
    summary = run([1, 1], [2, 2], [0.0, 10.0], Powered()).summary
    assert summary["makespan_s"] == 14.0
    assert summary["energy_idle_j"] == 18.0
    assert summary["energy_j"] == 58.0
    assert summary["energy_per_token_j"] == 14.5
    assert summary["tau_per_joule"] == pytest.approx(summary["tau_nats"] / 40.0)
    silent = run([1], [2], [0.0]).summary
    assert [silent[key] for key in ("energy_j", "energy_idle_j", "energy_per_token_j", "tau_per_joule")] == [None] * 4


def served(slo: SloConfig | None = None) -> Metrics:
    """Three finished requests (TTFT 1, 2, 1; TPOT 1, none, none), the last without a token, and a refused one."""
    m = Metrics(16, slo=slo)
    for i, limit in enumerate((2, 1, 1)):
        m.submitted(Request(i, 0.0, 4, limit))
    m.refused(Finish(9, FinishReason.REJECTED), 0.0)
    m.step(plan_of(0, [0], [0]), result_of(0, 0.0, 1.0, [0], [1.0], 1), ())
    left = (Finish(0, FinishReason.LENGTH), Finish(1, FinishReason.LENGTH), Finish(2, FinishReason.EMPTY_SUPPORT))
    m.step(plan_of(1, [0, 1, 2], [0, 1, 2]), result_of(1, 1.0, 2.0, [0, 1], [1.0, 1.0], 3), left)
    return m


@pytest.mark.parametrize(
    ("limits", "met"),
    [({"ttft_s": 1.5}, 1), ({"ttft_s": 2.0}, 2), ({"tpot_s": 0.5}, 1), ({"tpot_s": 1.0}, 2), ({"e2e_s": 0.5}, 0)],
)
def test_goodput_counts_requests_that_meet_every_limit(limits: dict[str, float], met: int) -> None:
    summary = served(SloConfig(**limits)).summary()
    assert summary["goodput_requests_per_s"] == met / 2
    assert summary["slo_share"] == met / 4  # the refused one is a miss
    assert served().summary()["goodput_requests_per_s"] is None
    assert served(SloConfig()).summary()["slo_share"] is None


def test_one_token_has_no_tpot_and_no_gap() -> None:
    """A request of one token and one of none: null, never 0 or NaN."""
    summary = run([4, 900], [1, 5], [0.0, 0.0], engine={"pages": 50}).summary
    assert summary["requests_refused"] == 1
    for name in ("tpot", "itl"):
        assert [summary[f"{name}_{what}_s"] for what in ("mean", "p50", "p90", "p99", "max")] == [None] * 5
    assert summary["ttft_mean_s"] == summary["e2e_mean_s"] == 4.0
    assert json.dumps(summary, allow_nan=False)
    assert json.dumps(Metrics(16, pool_pages=8, slo=SloConfig(ttft_s=1.0)).summary(), allow_nan=False)


@given(st.integers(0, 10**6))
def test_inter_token_latency_against_every_gap(seed: int) -> None:
    m = Metrics(4)
    tokens = random_run(seed, 40, m)
    summary = m.summary()
    gaps = np.sort(np.concatenate([np.diff([time for time, _ in seen]) for seen in tokens.values()]))
    assert m.measured().gaps.n == gaps.shape[0]
    assert summary["itl_mean_s"] == pytest.approx(gaps.mean())
    assert summary["itl_max_s"] == gaps[-1]
    for q in (50, 90, 99):
        exact = gaps[int(np.ceil(q / 100 * gaps.shape[0])) - 1]
        assert summary[f"itl_p{q}_s"] == pytest.approx(exact, rel=RELATIVE_ERROR * (1 + 1e-9), abs=2.0**-20)


def shared(rates: list[tuple[int, int]]) -> float | None:
    """Jain's index for one request per entry (client, tokens), all in the system for the same time."""
    m = Metrics(16)
    longest = max(tokens for _, tokens in rates)
    for i, (client, _) in enumerate(rates):
        m.submitted(Request(i, 0.0, 4, 100, client=client))
    for step in range(longest):
        ids = [i for i, (_, tokens) in enumerate(rates) if tokens > step]
        gone = tuple(Finish(i, FinishReason.LENGTH) for i in range(len(rates))) if step == longest - 1 else ()
        m.step(plan_of(step, ids, ids), result_of(step, step, step + 1.0, ids, [1.0] * len(ids), len(ids)), gone)
    found = m.summary()["fairness_jain"]
    assert found is None or isinstance(found, float)
    return found


def test_fairness_by_hand() -> None:
    assert shared([(0, 5), (1, 5)]) == pytest.approx(1.0)
    assert shared([(0, 6), (1, 2)]) == pytest.approx((6 + 2) ** 2 / (2 * (36 + 4)))
    assert shared([(0, 6), (0, 2), (1, 4)]) == pytest.approx(1.0)  # client 0: 8 tokens in twice the time
    assert shared([(-1, 6), (-1, 2)]) == pytest.approx(0.8)  # each a client of its own
    assert shared([(0, 5), (1, 0)]) == pytest.approx(0.5)  # one client starves


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 6)), min_size=1, max_size=6), st.integers(2, 4))
def test_fairness_is_bounded_and_free_of_scale(rates: list[tuple[int, int]], factor: int) -> None:
    if not any(tokens for _, tokens in rates):
        rates = [*rates, (0, 1)]
    clients = len({client if client >= 0 else -1 - i for i, (client, _) in enumerate(rates)})
    index = shared(rates)
    assert index is not None
    assert 1 / clients - 1e-12 <= index <= 1 + 1e-12
    assert shared([(client, factor * tokens) for client, tokens in rates]) == pytest.approx(index)


def test_merging_one_part_is_that_part_and_two_add_up() -> None:
    m = served().measured()
    assert merge([m]) is m
    both = merge([m, m])
    assert both.replicas == 2
    assert both.ledger.seconds == 2 * m.ledger.seconds
    assert both.requests["replica"].tolist().count(1) == m.requests["id"].shape[0]


def documented() -> dict[str, list[str]]:
    """Keys by section of METRICS.md, in order."""
    out: dict[str, list[str]] = {}
    for section in summary_part().split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        rows = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
        out[title.strip()] = [key for row in rows for key in re.findall(r"`(\w+)`", row)]
    return out


def test_every_number_is_documented_and_every_documented_number_exists() -> None:
    assert documented() == {group: list(keys) for group, keys in GROUPS.items()}
    summary = random_result(0).summary
    assert list(grouped(summary)) == list(GROUPS)  # nothing is left for "more"
    assert set(summary) == {key for keys in GROUPS.values() for key in keys}
    own = {"kl_nats_mean", *GROUPS["simulation"]}
    assert set(Metrics(16).summary()) == set(summary) - own  # what the engine reports
    assert grouped({"tau_nats": 1.0, "other": 2}) == {"entropic time": {"tau_nats": 1.0}, "more": {"other": 2}}


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"slo\.ttft_s.*-1"):
        configs.from_mapping({"slo": {"ttft_s": -1.0}})
