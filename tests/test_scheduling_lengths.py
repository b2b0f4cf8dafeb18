"""``sjf``, ``srpt`` and the predicted lengths that both read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_view import view
from toy_driver import drive

from entropic_ctl import config as configs
from entropic_ctl.errors import BadInputError
from entropic_ctl.loop import Loop
from entropic_ctl.scheduling import sjf, srpt
from entropic_ctl.scheduling._lengths import LengthConfig, output_length
from entropic_ctl.signals import Request


@pytest.mark.parametrize(
    ("expected", "generated", "length"),
    [
        (10, 0, 10),
        (10, 9, 10),
        (10, 10, 20),
        (10, 19, 20),
        (10, 20, 40),
        (3, 6, 12),
        (1, 0, 1),
        (1, 1, 2),
        (10, 45, 60),
    ],
)
def test_an_outlived_prediction_doubles_up_to_the_limit(expected: int, generated: int, length: int) -> None:
    got = output_length(view(expected_tokens=expected, generated_tokens=generated, token_limit=60), LengthConfig())
    assert got.tolist() == [length]


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_a_length_is_the_least_doubling_of_the_prediction_ahead_of_what_was_generated(p: int, g: int) -> None:
    (length,) = output_length(view(expected_tokens=p, generated_tokens=g, token_limit=10**12), LengthConfig())
    assert length > g
    assert length == p or length / 2 <= g
    assert (length / p).is_integer()


def test_without_a_prediction_the_rest_is_memoryless() -> None:
    columns = {"expected_tokens": 0, "generated_tokens": [0, 7, 50], "token_limit": 60}
    assert output_length(view(3, **columns), LengthConfig(prior_tokens=20.0)).tolist() == [20, 27, 60]


def test_scores_are_minus_the_work_in_steps() -> None:
    columns = {
        "prompt_tokens": [65, 1], "known_tokens": [65, 5], "cached_tokens": [0, 4], "generated_tokens": [0, 4],
        "expected_tokens": [5, 10], "token_limit": 60, "token_budget": 64,
    }  # fmt: skip
    assert sjf.build(sjf.Config()).score(view(2, **columns)).tolist() == [-6.0, -10.0]
    assert srpt.build(srpt.Config()).score(view(2, **columns)).tolist() == [-6.0, -6.0]


def test_the_size_of_a_job_stays_while_it_runs_and_what_is_left_falls_by_one_a_step() -> None:
    columns = {"expected_tokens": 30, "generated_tokens": np.arange(20), "known_tokens": 10 + np.arange(20)}
    columns |= {"cached_tokens": np.maximum(10 + np.arange(20) - 1, 0) * (np.arange(20) > 0), "token_budget": 64}
    assert np.ptp(sjf.build(sjf.Config()).score(view(20, **columns))) == 0
    np.testing.assert_allclose(np.diff(srpt.build(srpt.Config()).score(view(20, **columns)))[1:], 1.0)


@pytest.mark.parametrize("module", [sjf, srpt])
def test_an_oracle_is_refused_where_nobody_knows(module: object) -> None:
    law = module.build(module.Config(lengths="oracle"))  # type: ignore[attr-defined]
    law.score(view(2, expected_tokens=[3, 4]))
    with pytest.raises(BadInputError, match=r"loop.scheduling.lengths.*predicted"):
        law.score(view(2, expected_tokens=[3, 0]))


def mean_time(policy: str, jobs: list[tuple[int, int]], expected: bool = True, **parameters: float) -> float:
    run = configs.from_mapping(
        {
            "engine": {"max_batch": 1, "max_batch_tokens": 8, "pages": 4000},
            "loop": {"scheduling": {"policy": policy, "quantum_steps": 1, "wait_limit_steps": 10**6, **parameters}},
        }
    )
    requests = [
        Request(i, float(at), 1, n, expected_tokens=n * expected)
        for i, (at, n) in enumerate(sorted(jobs, key=lambda j: j[0]))
    ]
    trace = drive(Loop(run.loop, run.engine, 100), requests)
    return float(np.mean([trace.token_times[r.id][-1] - r.arrival_s for r in requests]))


def least_mean_time(jobs: list[tuple[int, int]]) -> float:
    """Preemptive one-machine scheduling in unit steps: work conserving by the least work left, found job by job.

    The sum of completion times equals the time integral of the number in the system, and SRPT minimises that number at
    every moment; here it is counted directly.
    """
    left, now, total = [], 0, 0
    waiting = sorted(jobs)
    while waiting or left:
        while waiting and waiting[0][0] <= now:
            left.append(waiting.pop(0)[1])
        total += len(left)
        if left:
            k = left.index(min(left))
            left[k] -= 1
            left = [x for x in left if x]
        now += 1
    return total / len(jobs)


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 9)), min_size=1, max_size=9))
def test_srpt_with_true_lengths_has_the_least_mean_time_of_all_policies(jobs: list[tuple[int, int]]) -> None:
    best = mean_time("srpt", jobs)
    assert best == pytest.approx(least_mean_time(jobs))
    for other in ("fcfs", "sjf", "fair", "mlfq"):
        assert best <= mean_time(other, jobs) + 1e-9


def test_predictions_are_what_makes_the_difference() -> None:
    jobs = [(0, n) for n in (30, 1, 20, 2, 10)]
    blind = mean_time("srpt", jobs, expected=False, prior_tokens=1.0)
    assert blind == mean_time("fcfs", jobs)  # all alike: ties by arrival
    assert mean_time("srpt", jobs) < 0.6 * blind
    assert mean_time("sjf", jobs) == mean_time("srpt", jobs)  # all there from the start: the same order
