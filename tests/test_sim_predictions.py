from __future__ import annotations

import numpy as np
import pytest
from synthetic_bank import make_bank

from entropic_ctl import config as configs
from entropic_ctl.config import WorkloadConfig
from sim.cost import LinearCost
from sim.predictions import predictions
from sim.replica import simulate
from sim.trajectories import Trajectories

BANK, _ = make_bank()
TRUE = np.random.default_rng(0).integers(1, 900, 40_000)


def test_exact_none_and_oracle() -> None:
    assert predictions(WorkloadConfig(length_prediction="exact"), 0, TRUE).tolist() == TRUE.tolist()
    assert not predictions(WorkloadConfig(length_prediction="none"), 0, TRUE).any()
    assert predictions(WorkloadConfig(length_prediction="none"), 0, TRUE, oracle=True).tolist() == TRUE.tolist()


@pytest.mark.parametrize("sigma", [0.2, 0.5, 1.0])
def test_noisy_predictions_have_the_stated_error(sigma: float) -> None:
    """Median ratio 1 and sigma of its logarithm, within 4 standard errors, where rounding does not matter."""
    true = 10_000 + TRUE
    error = np.log(predictions(WorkloadConfig(length_error=sigma), 3, true) / true)
    n = true.shape[0]
    assert abs(error.mean()) < 4 * sigma / np.sqrt(n)
    assert abs(error.std() - sigma) < 4 * sigma / np.sqrt(2 * n)


def test_no_error_is_exact_and_a_larger_one_scales_the_same_errors() -> None:
    assert predictions(WorkloadConfig(length_error=0.0), 1, TRUE).tolist() == TRUE.tolist()
    true = TRUE + 10**6
    one, two = (np.log(predictions(WorkloadConfig(length_error=s), 1, true) / true) for s in (0.3, 0.6))
    np.testing.assert_allclose(two, 2 * one, atol=1e-5)
    assert predictions(WorkloadConfig(length_error=10.0), 1, TRUE).min() >= 1


def test_bank_mode_predicts_the_recorded_length_at_the_base_temperature() -> None:
    n, limit = 400, 45
    rng = np.random.default_rng(2)
    prompt, xi = rng.integers(0, 4, n), rng.random(n)
    seen = Trajectories(BANK, prompt, xi, base_temperature=0.9, ends=True)
    lengths = seen.lengths(np.full(n, limit))
    assert 1 < len(set(lengths.tolist())) <= 9
    going, count, ids = np.ones(n, bool), np.zeros(n, np.int64), np.arange(n)
    for _ in range(limit):  # play them all at that temperature
        alive = ids[going]
        _, last = seen.select(alive)
        seen.advance(alive, np.full(alive.shape[0], 0.9))
        count[alive] += 1
        going[alive[last]] = False
    assert count.tolist() == lengths.tolist()


def workload(**values: object) -> dict[str, object]:
    return {
        "kind": "poisson",
        "n_requests": 60,
        "rate_per_s": 0.9,
        "prompt_tokens": 4.0,
        "output_tokens": 12.0,
    } | values


def mean_e2e(policy: str, work: dict[str, object], **parameters: object) -> float:
    run = configs.from_mapping(
        {
            "workload": work,
            "engine": {"max_batch": 1, "pages": 4000},
            "loop": {"scheduling": {"policy": policy, "quantum_steps": 1, "wait_limit_steps": 10**6, **parameters}},
        }
    )
    return float(simulate(run, bank=BANK, cost=LinearCost(0.08, 0.0)).summary["e2e_mean_s"])


def test_srpt_loses_by_prediction_error_and_the_oracle_does_not_depend_on_the_workload_s_predictor() -> None:
    """Sizes differ a lot and nothing else does; a limit of 12 tokens on average ends every request."""
    work = workload(output_length="limit", output_cv=1.5)
    exact = mean_e2e("srpt", work | {"length_prediction": "exact"})
    poor = mean_e2e("srpt", work | {"length_error": 3.0})
    oracle = mean_e2e("srpt", work | {"length_error": 3.0}, lengths="oracle")
    assert exact < poor
    assert exact == oracle
    assert exact < mean_e2e("fcfs", work)


def test_predictions_move_no_other_draw() -> None:
    one, two = (mean_e2e("fcfs", workload(length_prediction=kind)) for kind in ("none", "noisy"))
    assert one == two
