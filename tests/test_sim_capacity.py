"""Capacity where it is known: an M/D/1 queue, whose waiting time has a closed form, and a server at utilisation 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from synthetic_bank import make_bank

from entropic_ctl import config as configs
from entropic_ctl.errors import BadInputError
from sim import capacity_runs
from sim.capacity import Capacity, Level, Sample, capacity, judge
from sim.cost import StepCost
from sim.replica import simulate
from sim.streams import repeat_seeds, stream

SERVICE_S = 0.1


def served(rate: float, seed: int, n: int, service_s: float = SERVICE_S) -> dict[str, np.ndarray]:
    """Requests of an M/D/1 queue by Lindley's recursion; the same exponentials at every rate."""
    arrival = np.cumsum(stream(seed, "arrivals").standard_exponential(n)) / rate
    free, first = 0.0, np.empty(n)
    for i, at in enumerate(arrival.tolist()):
        free = max(free, at) + service_s
        first[i] = free - at
    return {"arrival_s": arrival, "ttft_s": first, "tpot_s": np.full(n, np.nan), "status": np.full(n, "length")}


def wait_below(rate: float, wait_s: float) -> float:
    """P(W <= t) in M/D/1 (Erlang 1909): (1-rho) sum_k e^(rho(t/D-k)) (-rho(t/D-k))^k / k!, k <= t/D, in exact sums."""
    from fractions import Fraction

    rho, x = rate * SERVICE_S, wait_s / SERVICE_S
    total = math.fsum(
        math.exp(rho * (x - k)) * float((-Fraction(rho) * (Fraction(x) - k)) ** k / math.factorial(k))
        for k in range(math.floor(x) + 1)
    )
    return (1 - rho) * total


def exact_capacity(level: Level) -> float:
    low, high = 0.01, 0.999 / SERVICE_S
    for _ in range(60):
        middle = (low + high) / 2
        if wait_below(middle, level.ttft_s - SERVICE_S) >= level.percentile / 100:
            low = middle
        else:
            high = middle
    return low


def searched(level: Level, n: int, root: int = 5, start: float = 1.0, **options: float) -> Capacity:
    def evaluate(rate: float, repeats: Sequence[int]) -> list[Sample]:
        seeds = repeat_seeds(root, max(repeats) + 1)
        return [capacity_runs.sample(served(rate, seeds[r], n), level) for r in repeats]

    return capacity(evaluate, level, start, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("root", [5, 6, 7])
def test_the_interval_holds_the_capacity_of_an_m_d_1_queue(root: int) -> None:
    level = Level(ttft_s=0.5, percentile=90.0)
    exact = exact_capacity(level)
    assert 6.0 < exact < 9.0
    found = searched(level, 3000, root, tolerance=0.01)
    assert found.low <= exact <= found.high
    assert found.low <= found.rate <= found.high
    assert found.rate == pytest.approx(exact, rel=0.03)
    assert found.high / found.low < 1.15
    verdicts = [trial.verdict for trial in found.trials]
    assert verdicts == sorted(verdicts, key=["holds", "undecided", "fails"].index)


def test_a_loose_objective_is_limited_by_the_drift_at_utilisation_one() -> None:
    found = searched(Level(ttft_s=1e6, percentile=50.0), 3000, tolerance=0.01)
    assert found.high >= 1 / SERVICE_S
    assert found.rate == pytest.approx(1 / SERVICE_S, rel=0.04)


def test_where_it_starts_does_not_matter() -> None:
    level = Level(ttft_s=0.5, percentile=90.0)
    rates = [searched(level, 1000, start=start, tolerance=0.01).rate for start in (0.05, 7.0, 300.0)]
    assert max(rates) / min(rates) < 1.02


class Constant:
    """Every step takes the same time."""

    def step(self, *_: object, **__: object) -> StepCost:
        return StepCost(SERVICE_S, 1.0, 1.0)


def test_the_simulator_with_one_seat_and_a_constant_step_is_that_queue() -> None:
    bank = make_bank()[0]
    run = configs.from_mapping(
        {
            "workload": {
                "kind": "poisson",
                "rate_per_s": 5.0,
                "n_requests": 300,
                "prompt_tokens": 4.0,
                "output_tokens": 1.0,
                "output_length": "limit",
            },
            "engine": {"max_batch": 1, "max_batch_tokens": 64, "pages": 64},
            "loop": {"temperature": {"t_min": 0.5, "t_max": 1.5}},
        }
    )
    level = Level(ttft_s=0.3)
    simulated = simulate(run, bank=bank, cost=Constant()).requests  # type: ignore[arg-type]
    expected = served(5.0, run.seed, 300)
    np.testing.assert_allclose(simulated["arrival_s"], expected["arrival_s"], rtol=1e-12)
    np.testing.assert_allclose(simulated["ttft_s"], expected["ttft_s"], rtol=1e-9, atol=1e-9)
    assert capacity_runs.sample(simulated, level).ttft == capacity_runs.sample(expected, level).ttft


def test_samples_count_refusals_as_misses_and_short_outputs_as_met() -> None:
    table = {
        "arrival_s": np.arange(12.0),
        "ttft_s": np.array([9.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, np.nan, 0.9]),
        "tpot_s": np.array([9.0, 0.1, 0.1, 0.1, np.nan, 0.1, 0.1, 0.1, 0.1, 0.1, np.nan, 0.9]),
        "status": np.array(["length"] * 10 + ["rejected", "length"]),
    }
    found = capacity_runs.sample(table, Level(ttft_s=0.5, tpot_s=0.5))
    assert found.n == 10  # the first tenth of the time is left out
    assert (found.ttft, found.tpot) == (0.8, 0.8)


def test_a_rate_needs_enough_requests_to_be_shown_to_hold() -> None:
    def perfect(n: int) -> str:
        return judge(1.0, lambda _, repeats: [Sample(1.0, 1.0, 0.0, n)] * len(repeats), Level(1.0), most=4).verdict

    assert perfect(10) == "undecided"  # 40 requests cannot show a miss rate below 1%
    assert perfect(100) == "holds"


def test_errors() -> None:
    level = Level(ttft_s=0.05, percentile=90.0)  # below the service time: no rate holds
    with pytest.raises(BadInputError, match="no rate holds"):
        searched(level, 50)
    for kind in ("closed", "burst"):
        with pytest.raises(BadInputError, match=r"workload\.kind"):
            capacity_runs.rate_field(configs.from_mapping({"workload": {"kind": kind}}))
    assert capacity_runs.rate_field(configs.from_mapping({"workload": {"kind": "poisson"}})) == "workload.rate_per_s"
    trace = configs.from_mapping({"workload": {"kind": "azure", "trace": "a.csv"}})
    assert capacity_runs.rate_field(trace) == "workload.rate_scale"
    for bad in ({}, {"ttft_s": 0.0}, {"ttft_s": math.nan}, {"ttft_s": 1.0, "percentile": 100.0}):
        with pytest.raises(BadInputError):
            Level(**bad)
    for options in ({"start": 0.0}, {"tolerance": 0.0}, {"least": 1}, {"least": 5, "most": 4}):
        with pytest.raises(BadInputError):
            searched(Level(ttft_s=1.0), 50, **options)  # type: ignore[arg-type]
