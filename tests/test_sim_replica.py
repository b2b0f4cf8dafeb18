"""The whole simulator: exact timelines for tiny workloads, conservation laws for random ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_bank import make_bank

from entropic_ctl import config as configs
from entropic_ctl.config import RunConfig, WorkloadConfig
from entropic_ctl.errors import BadInputError, NoProgressError, UncertifiedError
from entropic_ctl.loop import Loop
from entropic_ctl.metrics import Metrics
from entropic_ctl.ordering import wait_bound
from entropic_ctl.scheduling.base import ScheduleView, SchedulingConfig
from entropic_ctl.signals import Finish, FinishReason, Request, StepPlan, StepResult
from sim.arrivals import Workload
from sim.cost import LinearCost, shadow_shares
from sim.model_shapes import MODELS
from sim.replica import MAX_IDLE_PLANS, Replica, SimulationResult, simulate
from sim.trajectories import Trajectories

BANK, _ = make_bank()
NONE = np.empty(0, np.int64)


def jobs(
    prompts: Sequence[int],
    outputs: Sequence[int],
    arrivals: Sequence[float] | None = None,
    *,
    length: str = "limit",
    greedy: bool = False,
    prefix_hashes: Any = None,
) -> Workload:
    n = len(prompts)
    return Workload(
        WorkloadConfig(output_length=length),
        np.zeros(n) if arrivals is None else np.array(arrivals, float),
        prompt_tokens=np.array(prompts),
        limit_tokens=np.array(outputs),
        prompt=np.arange(n) % 4,
        xi=np.linspace(0, 0.9, n),
        greedy=greedy,
        prefix_hashes=prefix_hashes,
    )


def setup(loop: dict[str, Any] | None = None, **engine: int) -> RunConfig:
    return configs.from_mapping({"engine": engine, "loop": loop or {}})


def run(config: RunConfig, workload: Workload, cost: Any = None, **more: Any) -> SimulationResult:
    return simulate(config, bank=BANK, workload=workload, cost=cost or LinearCost(0.0, 1.0), **more)


def check_conservation(result: SimulationResult, engine_pages: int | None = None) -> None:
    requests, steps, summary = result.requests, result.steps, result.summary
    assert summary["requests_live"] == 0
    assert summary["requests_in"] == len(requests["id"])
    assert summary["requests_in"] == summary["requests_finished"] + summary["requests_refused"]
    served = requests["output_tokens"] > 0
    np.testing.assert_allclose((requests["ttft_s"] + requests["gap_sum_s"])[served], requests["e2e_s"][served])
    assert requests["output_tokens"].sum() == steps["output_tokens"].sum() == summary["output_tokens"]
    assert (steps["start_s"][1:] >= steps["end_s"][:-1]).all()
    assert (steps["end_s"] >= steps["start_s"]).all()
    if engine_pages is not None:
        assert (steps["pages_held"] <= engine_pages).all()


def test_one_request_has_an_exact_timeline() -> None:
    """Prompt 10 in chunks of 4, 4, 2 (the last one samples), then three decode steps of one token."""
    result = run(setup(prefill_chunk=4), jobs([10], [4], [2.5]))
    assert result.steps["end_s"].tolist() == [6.5, 10.5, 12.5, 13.5, 14.5, 15.5]
    assert result.requests["ttft_s"].tolist() == [10.0]
    assert result.requests["e2e_s"].tolist() == [13.0]
    assert result.requests["tpot_s"].tolist() == [1.0]
    assert result.requests["status"].tolist() == ["length"]


def test_s1_preemption_redoes_work_and_keeps_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: 4 pages of 4 tokens, two requests of prompt 4 and output 8."""
    loops = []
    monkeypatch.setattr("sim.maker.Loop", lambda *args, **kwargs: loops.append(Loop(*args, **kwargs)) or loops[0])
    result = run(setup(page_tokens=4, pages=4), jobs([4, 4], [8, 8]), keep_tokens=True)
    check_conservation(result, 4)
    assert result.summary["preemptions"] >= 1
    assert result.requests["output_tokens"].tolist() == [8, 8]
    assert result.summary["output_tokens"] == 16
    assert result.tokens is not None
    for request in (0, 1):
        times = result.tokens["time_s"][result.tokens["id"] == request]
        assert len(np.diff(times)) == 7
        np.testing.assert_allclose(np.diff(times).sum(), result.requests["gap_sum_s"][request])
    assert loops[0].batcher.pages.pool.used == 0
    assert not loops[0].policy.active.any()
    # work: every scheduled token takes one second here
    assert result.summary["makespan_s"] == result.summary["scheduled_tokens"] > 2 * (4 + 7)


def test_s2_impossible_work_is_refused_and_the_rest_served() -> None:
    """S2: a prompt of 900 in a pool of 800 tokens."""
    result = run(setup(page_tokens=16, pages=50), jobs([900, 10], [5, 5]))
    check_conservation(result, 50)
    assert result.requests["status"].tolist() == ["rejected", "length"]
    assert result.summary["iterations"] == 5


def test_s3_a_request_that_outgrows_the_pool_ends_by_the_capacity_policy() -> None:
    """S3: prompt 790, output 100 in 800 tokens: 11 tokens (the last one needs no page)."""
    result = run(setup(page_tokens=16, pages=50, prefill_chunk=512), jobs([790], [100]))
    check_conservation(result, 50)
    assert result.requests["status"].tolist() == ["kv_capacity"]
    assert result.requests["output_tokens"].tolist() == [11]
    assert result.summary["preemptions"] == 0


def test_s4_validation_and_admission_agree() -> None:
    """S4: capacity 800; up to a prompt of 800 one token can be sampled."""
    prompts = [783, 784, 785, 799, 800, 801, 10]
    result = run(setup(page_tokens=16, pages=50), jobs(prompts, [1] * 7))
    check_conservation(result, 50)
    assert result.requests["status"].tolist() == ["length"] * 5 + ["rejected", "length"]


def test_s8_time_advances_through_preemption_with_a_cost_of_nothing_but_tokens() -> None:
    """S8, first half: step time = 1e-4 * tokens, and still every step of S1 moves the clock."""
    result = run(setup(page_tokens=4, pages=4), jobs([4, 4], [8, 8]), LinearCost(0.0, 1e-4))
    assert result.summary["preemptions"] >= 1
    assert (result.steps["end_s"] > result.steps["start_s"]).all()
    assert result.summary["iterations"] < 100


class StuckLoop:
    """A control plane that never gets anywhere: it runs nothing, or redoes the same prefill for ever."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.plans, self.live, self.backlog = tokens, 0, 0, 0

    def submit(self, request: Request) -> Finish | None:
        self.live, self.id = 1, request.id
        return None

    def plan(self, now_s: float) -> StepPlan:
        self.plans += 1
        column = np.zeros(1 if self.tokens else 0, np.int64)
        return StepPlan(
            self.plans - 1, now_s, column + self.id, column, column, column + self.tokens, column > 0, column > 0,
            column * 0.0, column, NONE, column + self.id, (), np.zeros((1, 1), np.int32), np.empty((0, 3), np.int32),
        )  # fmt: skip

    def temper(self, view: object) -> None:
        raise AssertionError("nothing samples here")

    def observe(self, result: StepResult) -> tuple[Finish, ...]:
        return ()


class ById:
    """The request with the lowest id has the worst priority, for ever."""

    def __init__(self, config: SchedulingConfig) -> None:
        self.config = config

    def score(self, view: ScheduleView) -> np.ndarray:
        return view.arrival_order.astype(float)


def test_s13_the_worst_priority_starts_within_the_waiting_bound() -> None:
    """S13: one seat, a one-second job of better priority every second; both sides of the bound."""
    waits = {}
    for limit in (7, 10**6):
        scheduling = SchedulingConfig(wait_limit_steps=limit, quantum_steps=1)
        config = setup(max_batch=1, max_live=4)
        temperature, pruning, _ = config.loop.build()
        loop = Loop(config.loop, config.engine, 64, laws=(temperature, pruning, ById(scheduling)))
        work = jobs([1] * 80, [1] * 80, [0.0, *np.arange(79.0)])
        trajectories = Trajectories(BANK, work.prompt, work.xi, base_temperature=0.8, ends=False)
        env, metrics = simpy.Environment(), Metrics(16)
        replica = Replica(
            env,
            loop,
            cost=LinearCost(1.0, 0.0),
            trajectories=trajectories,
            workload=work,
            metrics=metrics,
            pool_tokens=10**6,
        )
        env.process(replica.run())
        env.run()
        waits[limit] = int(metrics.requests_table()["longest_wait_steps"][0])
    assert 7 <= waits[7] <= wait_bound(4, 1, 7, 1)
    assert waits[10**6] > 70  # without the bound it starves until the others stop coming


def test_s14_a_third_request_does_not_thrash() -> None:
    """S14: S1 and a third request of equal priority (held back at first: `test_batching`)."""
    for batch in (1, 2, 3):
        result = run(setup(page_tokens=4, pages=4, max_batch=batch), jobs([4] * 3, [8] * 3))
        check_conservation(result, 4)
        assert result.requests["output_tokens"].tolist() == [8, 8, 8]
        assert result.requests["preemptions"].max() <= 2


def test_s15_a_cached_prefix_leaves_one_chunk_of_eight() -> None:
    """S15: chunk 512, prompt 600 of which 37 pages of 16 are cached."""
    work = jobs([600, 600], [1, 1], [0.0, 1e4], prefix_hashes=[tuple(range(37))] * 2)
    result = run(configs.from_mapping({"engine": {"prefill_chunk": 512, "prefix_caching": True}}), work)
    assert result.steps["scheduled_tokens"].tolist() == [512, 88, 8]
    assert result.requests["ttft_s"].tolist() == [600.0, 8.0]


@pytest.mark.parametrize(("tokens", "most"), [(0, MAX_IDLE_PLANS), (4, 10 * 64 // 4 + 1)])
@pytest.mark.parametrize("base_s", [0.0, 0.5])
def test_s8_no_progress_is_a_clear_error_within_a_bounded_number_of_events(
    tokens: int, most: int, base_s: float
) -> None:
    loop, work = StuckLoop(tokens), jobs([4], [1])
    trajectories = Trajectories(BANK, work.prompt, work.xi, base_temperature=0.8, ends=True)
    env = simpy.Environment()
    replica = Replica(
        env,
        loop,  # type: ignore[arg-type]
        cost=LinearCost(base_s, 0.0),
        trajectories=trajectories,
        workload=work,
        metrics=Metrics(4),
        pool_tokens=64,
    )
    env.process(replica.run())
    with pytest.raises(NoProgressError, match=r"no progress at step \d+.*1 live and 0 waiting"):
        env.run()
    assert loop.plans == most


def test_s9_arrivals_out_of_order_in_the_file_are_served_in_stable_order(tmp_path: Path) -> None:
    """S9: arrivals at 0, 5, 3, 5."""
    rows = [f"2023-11-16 18:17:{s:02d}.0,{p},1" for s, p in ((0, 1), (5, 2), (3, 3), (5, 4))]
    (tmp_path / "t.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    config = configs.from_mapping(
        {
            "workload": {"kind": "azure", "trace": str(tmp_path / "t.csv"), "output_length": "limit"},
            "engine": {"max_batch": 1},
        }
    )
    result = simulate(config, bank=BANK, cost=LinearCost(0.1, 0.0))
    assert result.requests["arrival_s"].tolist() == [0, 3, 5, 5]
    assert result.requests["prompt_tokens"].tolist() == [1, 3, 2, 4]
    np.testing.assert_allclose(result.steps["end_s"], [0.1, 3.1, 5.1, 5.2])


def test_s9_ten_steps_of_a_tenth_end_at_one_second_exactly() -> None:
    result = run(setup(), jobs([1], [10]), LinearCost(0.1, 0.0))
    assert result.steps["end_s"][-1] == 1.0
    naive = 0.0
    for _ in range(10):  # not sum(): it is compensated from Python 3.12 on
        naive += 0.1
    assert naive != 1.0


@settings(max_examples=15)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["burst", "poisson", "closed"]),
    st.sampled_from(["bank", "limit"]),
    st.integers(12, 60),
    st.integers(1, 6),
)
def test_conservation_on_random_workloads(seed: int, kind: str, length: str, pages: int, batch: int) -> None:
    config = configs.from_mapping(
        {
            "seed": seed,
            "workload": {
                "kind": kind, "n_requests": 12, "rate_per_s": 20.0, "users": 4, "think_s": 0.05, "prompt_tokens": 40.0,
                "output_tokens": 20.0, "output_cv": 0.5, "output_length": length,
            },
            "engine": {
                "pages": pages, "max_batch": batch, "max_batch_tokens": 64, "prefill_chunk": 32, "page_tokens": 4
            },
        }
    )  # fmt: skip
    result = simulate(config, bank=BANK)
    check_conservation(result, pages)
    if length == "limit":
        done = result.requests["status"] == "length"
        assert (result.requests["output_tokens"][done] == result.requests["max_new_tokens"][done]).all()
    again = simulate(config, bank=BANK)
    assert again.summary == result.summary  # a run is a function of its config


def test_a_closed_loop_user_waits_for_its_answer_even_if_it_is_a_refusal() -> None:
    config = configs.from_mapping(
        {
            "workload": {
                "kind": "closed", "n_requests": 6, "users": 1, "prompt_tokens": 3.0, "prompt_cv": 0.0,
                "output_tokens": 2.0, "output_length": "limit",
            },
            "engine": {"pages": 1, "page_tokens": 2},
        }
    )  # fmt: skip
    result = simulate(config, bank=BANK, cost=LinearCost(1.0, 0.0))
    assert result.requests["status"].tolist() == ["rejected"] * 6
    roomy = configs.from_mapping({**configs.resolve(config), "engine": {"pages": 8}})
    result = simulate(roomy, bank=BANK, cost=LinearCost(1.0, 0.0))
    assert result.requests["arrival_s"].tolist() == [0, 2, 4, 6, 8, 10]


def test_mean_time_in_the_system_is_that_of_an_m_d_1_queue() -> None:
    """Poisson arrivals at load r, one seat, one second each: the mean time in the system is 1 + r / (2 (1 - r))."""
    load = 0.5
    config = configs.from_mapping(
        {
            "workload": {
                "kind": "poisson", "rate_per_s": load, "n_requests": 5000, "prompt_tokens": 1.0, "output_tokens": 1.0
            },
            "engine": {"max_batch": 1},
        }
    )  # fmt: skip
    result = simulate(config, bank=BANK, cost=LinearCost(1.0, 0.0))
    assert result.summary["e2e_mean_s"] == pytest.approx(1 + load / (2 * (1 - load)), rel=0.05)


def test_recorded_ends_of_text_finish_requests() -> None:
    result = run(setup(), jobs([8] * 4, [500] * 4, length="bank"))
    for prompt in range(4):
        k = int(np.flatnonzero((BANK.prompt == prompt) & (BANK.temperature == 0.8))[0])
        expected = np.diff(BANK.offset)[k] if BANK.ended[k] else 500
        assert result.requests["output_tokens"][prompt] == expected
        assert result.requests["status"][prompt] == ("eos" if BANK.ended[k] else "length")
    assert {"eos", "length"} == set(result.requests["status"])


def test_greedy_requests_read_the_lowest_recorded_temperature() -> None:
    config = setup({"temperature": {"law": "fixed", "temperature": 0.0}})
    result = run(config, jobs([8], [500], length="bank", greedy=True), keep_tokens=True)
    assert result.requests["output_tokens"][0] == np.diff(BANK.offset)[0]  # prompt 0 at T = 0.4
    assert result.tokens is not None
    assert not result.tokens["temperature"].any()
    np.testing.assert_allclose(result.tokens["model_entropy"], BANK.model_entropy[: BANK.offset[1]], rtol=1e-6)


def test_an_uncertified_gain_is_refused() -> None:
    config = setup({"temperature": {"law": "feedback", "gain": 0.03}})
    with pytest.raises(UncertifiedError):
        run(config, jobs([8], [5]))
    check_conservation(run(config, jobs([8], [5]), uncertified=True))


def test_a_law_that_can_leave_the_bank_is_refused() -> None:
    config = setup({"temperature": {"law": "solve", "t_max": 9.0}})
    with pytest.raises(BadInputError, match=r"loop.temperature.t_max.*0.3, 1.6"):
        run(config, jobs([8], [5]))


def test_feedback_holds_the_target_better_than_a_fixed_temperature_and_changes_lengths() -> None:
    """The micro law is in the loop: the same random numbers, other temperatures, other texts."""
    work = {"output_tokens": 400.0, "n_requests": 8}
    base = configs.from_mapping({"workload": work})
    closed = configs.from_mapping(
        {"workload": work, "loop": {"temperature": {"law": "solve", "target_nats": 2.0, "t_min": 0.3, "t_max": 1.6}}}
    )
    a, b = (simulate(c, bank=BANK, keep_tokens=True) for c in (base, closed))
    assert a.tokens is not None
    assert b.tokens is not None
    error_a, error_b = (np.abs(r.tokens["tempered_entropy"] - 2.0).mean() for r in (a, b) if r.tokens is not None)
    assert error_b < 0.5 * error_a
    assert a.requests["prompt_tokens"].tolist() == b.requests["prompt_tokens"].tolist()
    assert a.requests["output_tokens"].tolist() != b.requests["output_tokens"].tolist()


def test_pruned_steps_carry_the_recorded_response() -> None:
    """One request of a known context under a constant theta: kept share, certificate, KL and bytes by hand."""
    loop = {"pruning": {"law": "budget", "theta_nats": 0.1, "theta_wide_nats": 0.1}}
    from sim.cost import preset

    config = setup(loop, pages=1000, max_batch_tokens=4096, prefill_chunk=4096)
    result = run(config, jobs([1024], [2]), preset("cpu2-smollm2-135m"), keep_tokens=True)
    assert result.steps["kept_fraction"].tolist()[1:] == [pytest.approx(0.4)]
    assert result.steps["certificate_max"].tolist() == [0.0, pytest.approx(0.1)]
    assert result.steps["pruned_mass_mean"][1] == pytest.approx(0.6 * (1 - np.exp(-0.1)))
    first, again = shadow_shares(MODELS["smollm2-135m"], 16)
    looks = (first + again * 1.2 * np.sqrt(0.4) * 0.6) * (1024 - 80) / 1024  # 5 pages are always read
    dense = 1024 * 23_040
    assert result.steps["kv_bytes"].tolist() == [0.0, pytest.approx(dense * (2 + 28 * (looks + 0.4)) / 30)]
    assert result.summary["kl_nats_mean"] == pytest.approx(0.37 * 0.01)
    assert result.tokens is not None
    start = BANK.offset[1]  # prompt 0 at T = 0.8; the entropy of the pruned token is shifted by 0.1 theta
    expected = BANK.model_entropy[start : start + 2] + np.array([0.0, 0.01])
    np.testing.assert_allclose(result.tokens["model_entropy"], expected, rtol=1e-6)


def test_a_pruned_row_beside_a_prefill_row_keeps_its_own_response() -> None:
    """Row 0 is still in its prompt (no token, never pruned) while row 1 decodes under theta."""
    loop = {"pruning": {"law": "budget", "theta_nats": 0.1, "theta_wide_nats": 0.1}}
    config = setup(loop, pages=1000, max_batch_tokens=1024, prefill_chunk=300)
    result = run(config, jobs([3000, 256], [1, 3]), keep_tokens=True)
    assert result.tokens is not None
    mine = result.tokens["id"] == 1
    assert result.tokens["index"][mine].tolist() == [0, 1, 2]
    assert result.tokens["kept_fraction"][mine][1] == pytest.approx(0.8)
    start = BANK.offset[5]  # prompt 1 at T = 0.8
    expected = BANK.model_entropy[start : start + 3] + np.array([0.0, 0.01, 0.01])
    np.testing.assert_allclose(result.tokens["model_entropy"][mine], expected, rtol=1e-6)
    assert (result.steps["end_s"][:3] < result.requests["ttft_s"][0]).all()  # the prompt was still being read


def test_progress_is_reported_and_ends_at_the_total() -> None:
    calls: list[tuple[int, int, float]] = []
    run(setup(), jobs([4] * 3, [300] * 3), progress=lambda *args: calls.append(args))
    assert len(calls) >= 2
    assert calls[-1][:2] == (3, 3)
    assert [call[2] for call in calls] == sorted(call[2] for call in calls)


def azure(path: Path, n: int) -> RunConfig:
    return configs.from_mapping(
        {
            "workload": {"kind": "azure", "trace": str(path), "trace_rows": n},
            "engine": {"pages": 29_205, "max_batch": 128, "max_batch_tokens": 2048, "prefill_chunk": 512},
            "cost": {"preset": "a100-80-llama-3-8b"},
        }
    )


def test_azure_slice_is_served_in_full(azure_trace: Path) -> None:
    result = simulate(azure(azure_trace, 300), bank=BANK)
    check_conservation(result, 29_205)
    assert result.summary["requests_finished"] == 300
    np.testing.assert_array_equal(result.requests["output_tokens"], result.requests["max_new_tokens"])


def test_whole_simulation_module_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, sim.replica, sim.tune, sim.bench; sys.exit('torch' in sys.modules or 'optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_finish_reasons_of_the_simulator_are_the_shared_ones() -> None:
    result = run(setup(page_tokens=16, pages=50), jobs([900, 790, 10], [5, 100, 5]))
    assert set(result.requests["status"]) <= {str(reason) for reason in FinishReason}
