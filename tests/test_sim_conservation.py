"""Conservation laws of the whole simulator, for random workloads and every macro policy on offer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_bank import make_bank
from toy_driver import check_invariants

from entropic_ctl import config as configs
from entropic_ctl import registry
from entropic_ctl.config import RunConfig
from entropic_ctl.loop import Loop
from entropic_ctl.metrics import Metrics
from entropic_ctl.ordering import wait_bound
from entropic_ctl.signals import Finish, FinishReason, StepPlan
from sim.arrivals import make_workload
from sim.cost import LinearCost
from sim.predictions import predictions
from sim.replica import Replica
from sim.trajectories import Trajectories

BANK, _ = make_bank()
PAGE, LARGEST = 4, 96  # tokens; a pool of LARGEST / PAGE pages holds the largest request that is accepted


class CheckedLoop(Loop):
    """Checks each plan, and who waited how long."""

    longest_wait = 0

    def plan(self, now_s: float) -> StepPlan:
        plan = super().plan(now_s)
        check_invariants(self, plan)  # seats, tokens, no request twice, pages held = pages in tables
        slots = self.batcher.slots
        self.longest_wait = max(self.longest_wait, int((plan.step - slots.last_run[slots.live]).max(initial=0)))
        return plan


class Impatient(Replica):
    """Some users give up between two steps."""

    cancelled = 0

    def _take_in(self) -> None:
        super()._take_in()
        if self.iterations % 7 == 3 and self.loop.live:
            live = sorted(self.loop.batcher.slots.slot_of)
            gone = live[self.iterations % len(live)]
            assert self.loop.cancel(gone)
            self.metrics.cancelled(gone, self.clock.now_s)
            self._leave(Finish(gone, FinishReason.CANCELLED))
            self.cancelled += 1


def run(config: RunConfig, *, impatient: bool, until: int | None = None) -> tuple[Replica, CheckedLoop, Metrics]:
    """One run with tokens kept; stop after ``until`` iterations."""
    work = make_workload(config.workload, config.seed, 4)
    ends = not work.config.runs_to_limit
    trajectories = Trajectories(BANK, work.prompt, work.xi, base_temperature=0.8, ends=ends)
    work.expected_tokens = predictions(config.workload, config.seed, trajectories.lengths(work.limit_tokens))
    loop, metrics, env = (
        CheckedLoop(config.loop, config.engine, 64),
        Metrics(PAGE, keep_tokens=True),
        simpy.Environment(),
    )
    replica = (Impatient if impatient else Replica)(
        env,
        loop,
        cost=LinearCost(0.01, 0.001),
        trajectories=trajectories,
        workload=work,
        metrics=metrics,
        pool_tokens=config.engine.pages * PAGE,
    )
    env.process(replica.run())
    while env.peek() < float("inf") and (until is None or replica.iterations < until):
        env.step()
    return replica, loop, metrics


def check_books(replica: Replica, loop: CheckedLoop, metrics: Metrics) -> None:
    requests, steps, tokens, summary = (
        metrics.requests_table(), metrics.steps_table(), metrics.tokens_table(), metrics.summary(),
    )  # fmt: skip
    status = requests["status"]
    counted = {reason: int((status == reason).sum()) for reason in set(status.tolist())}
    assert summary["requests_in"] == replica.submitted == len(status) == sum(counted.values())
    left = summary["requests_finished"] + summary["requests_refused"] + summary["requests_cancelled"]
    assert summary["requests_in"] == left + summary["requests_live"]
    assert summary["requests_live"] == loop.live + loop.backlog == replica.submitted - replica.left
    assert summary["requests_cancelled"] == getattr(replica, "cancelled", 0)
    assert summary["output_tokens"] == steps["output_tokens"].sum() == len(tokens["id"])
    got = Counter(tokens["id"].tolist())
    assert requests["output_tokens"].tolist() == [got[i] for i in requests["id"].tolist()]
    for i in range(len(status)):  # TTFT + gaps = E2E, from the tokens themselves
        times = tokens["time_s"][tokens["id"] == requests["id"][i]]
        assert (np.diff(times) > 0).all()
        if times.shape[0]:
            arrival = requests["arrival_s"][i]
            assert requests["ttft_s"][i] == pytest.approx(times[0] - arrival)
            assert requests["gap_sum_s"][i] == pytest.approx(np.diff(times).sum(), abs=1e-9)
            assert requests["ttft_s"][i] + requests["gap_sum_s"][i] == pytest.approx(requests["e2e_s"][i])
            assert requests["e2e_s"][i] == pytest.approx(times[-1] - arrival)
    assert (steps["end_s"] > steps["start_s"]).all()
    assert (steps["start_s"][1:] >= steps["end_s"][:-1]).all()


@pytest.mark.parametrize("name", registry.names("entropic_ctl.scheduling"))
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(["burst", "poisson", "closed"]),
    length=st.sampled_from(["bank", "limit"]),
    roomy=st.booleans(),
    batch=st.integers(1, 5),
    live=st.integers(2, 12),
    quantum=st.integers(1, 6),
    limit=st.integers(1, 30),
    impatient=st.booleans(),
)
def test_conservation_for_every_policy(
    name: str,
    *,
    seed: int,
    kind: str,
    length: str,
    roomy: bool,
    batch: int,
    live: int,
    quantum: int,
    limit: int,
    impatient: bool,
) -> None:
    """S1, S16: requests, tokens and pages are conserved; waits are bounded; the same run again is the same."""
    pages = LARGEST // PAGE * (live if roomy else 1)
    config = configs.from_mapping(
        {
            "seed": seed,
            "workload": {
                "kind": kind, "n_requests": 14, "rate_per_s": 15.0, "users": 4, "think_s": 0.05, "prompt_tokens": 20.0,
                "prompt_cv": 1.0, "output_tokens": 12.0, "output_cv": 0.7, "output_length": length,
            },
            "engine": {
                "pages": pages, "page_tokens": PAGE, "max_context": LARGEST, "max_batch": batch, "max_live": live,
                "max_batch_tokens": LARGEST * batch, "prefill_chunk": LARGEST,
            },
            "loop": {"scheduling": {"policy": name, "quantum_steps": quantum, "wait_limit_steps": limit}},
        }
    )  # fmt: skip
    replica, loop, metrics = run(config, impatient=impatient)
    check_books(replica, loop, metrics)
    assert loop.live == loop.backlog == 0
    assert loop.batcher.pages.pool.used == 0
    assert not loop.batcher.pages.count.any()
    assert not loop.policy.active.any()
    assert loop.longest_wait <= wait_bound(live, batch if roomy else 1, limit, quantum)
    again = run(config, impatient=impatient)[2]
    for table in ("requests_table", "steps_table", "tokens_table"):
        for column, values in getattr(metrics, table)().items():
            np.testing.assert_array_equal(getattr(again, table)()[column], values)
    half = run(config, impatient=impatient, until=max(1, replica.iterations // 2))
    check_books(*half)  # also with requests under way


def test_the_checks_see_a_lost_token_and_a_lost_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that vanishes, and one whose last token is not written down, break the books."""
    config = configs.from_mapping({"workload": {"n_requests": 5, "output_tokens": 8.0}})
    replica, loop, metrics = run(config, impatient=False)
    check_books(replica, loop, metrics)
    replica.left -= 1
    with pytest.raises(AssertionError):
        check_books(replica, loop, metrics)
    replica.left += 1
    table: dict[str, Any] = metrics.tokens_table()
    monkeypatch.setattr(metrics, "tokens_table", lambda: {k: v[:-1] for k, v in table.items()})
    with pytest.raises(AssertionError):
        check_books(replica, loop, metrics)
