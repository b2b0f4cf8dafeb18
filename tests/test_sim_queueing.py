r"""The simulator against queueing theory.

With one seat and steps of constant length the replica is an M/G/1 queue. Its service time is a whole number of steps:

    S = ceil(prompt / chunk) - 1 + output

(the last prefill step yields the first token). An idle replica starts an arrival at once and a busy one is free exactly
at the end of a step, so nothing is lost to the grid: the identity with Lindley's recursion is exact, job by job. That
recursion, fed with the *shipped* arrivals, is then long enough to be compared sharply with Pollaczek and Khinchine.

Processor sharing has two incarnations here: a batch without a limit whose step takes time in proportion to its rows,
and the ``fair`` policy with one seat and a quantum of one step. Both serve in units of a token; job by job they stay
within a stated number of units of the fluid limit, and that is compared with 1 / (mu - lambda) and its insensitivity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queueing import interval, lindley, pollaczek_khinchine, processor_sharing
from synthetic_bank import make_bank

from entropic_ctl import config as configs
from entropic_ctl import registry
from entropic_ctl.config import WorkloadConfig
from sim.arrivals import Workload, make_workload
from sim.cost import LinearCost
from sim.replica import SimulationResult, simulate

BANK, _ = make_bank()
CHUNK = 8
Jobs = tuple[np.ndarray, np.ndarray]
"""(prompt tokens, output tokens)."""


def steps_of(jobs: Jobs) -> np.ndarray:
    """Service time in steps."""
    return -(-jobs[0] // CHUNK) - 1 + jobs[1]


def constant(rng: np.random.Generator, n: int) -> Jobs:
    return np.ones(n, int), np.full(n, 2)


def geometric(rng: np.random.Generator, n: int) -> Jobs:
    """The discrete memoryless law of mean 2: P(S = k) = 2^-k."""
    return np.ones(n, int), rng.geometric(0.5, n)


def prompts(rng: np.random.Generator, n: int) -> Jobs:
    """One output token behind 1 step of prefill in 3 of 4 cases, behind 5 steps in the others."""
    return np.where(rng.random(n) < 0.75, CHUNK, 5 * CHUNK - 3), np.ones(n, int)


MOMENTS = {constant: (2.0, 4.0), geometric: (2.0, 6.0), prompts: (2.0, 0.75 * 1 + 0.25 * 25)}
"""E[S] and E[S^2]; geometric: (2 - p) / p^2 = 6 for p = 1/2."""
RATE = 0.3
each_law = pytest.mark.parametrize("law", list(MOMENTS), ids=lambda law: law.__name__)


def arrivals(rate: float, n: int, seed: int) -> np.ndarray:
    """The shipped Poisson arrivals."""
    return make_workload(WorkloadConfig(kind="poisson", rate_per_s=rate, n_requests=n), seed, 1).arrival_s


def run(
    at_s: np.ndarray, jobs: Jobs, policy: str = "fcfs", *, batch: int = 1, cost: Any = None, **parameters: Any
) -> SimulationResult:
    """One replica with ample memory; ``wait_limit_steps`` is out of reach, so that only the policy orders."""
    n = len(at_s)
    config = configs.from_mapping(
        {
            "workload": {"output_length": "limit"},
            "engine": {
                "max_batch": batch, "max_live": 2048, "pages": 2**17, "max_context": 2048, "prefill_chunk": CHUNK,
                "max_batch_tokens": 2**14,
            },
            "loop": {"scheduling": {"policy": policy, "wait_limit_steps": 10**9, **parameters}},
        }
    )  # fmt: skip
    work = Workload(
        config.workload,
        at_s,
        prompt_tokens=jobs[0],
        limit_tokens=jobs[1],
        prompt=np.zeros(n, int),
        xi=np.zeros(n),
    )
    return simulate(config, bank=BANK, workload=work, cost=cost or LinearCost(1.0, 0.0))


@each_law
def test_one_seat_is_lindley_s_queue_job_by_job(law: Any) -> None:
    at_s, jobs = arrivals(RATE, 600, 3), law(np.random.default_rng(1), 600)
    service = steps_of(jobs).astype(float)
    waits = lindley(at_s, service)
    assert (waits > 0).mean() > 0.4
    table = run(at_s, jobs).requests
    np.testing.assert_allclose(table["e2e_s"], waits + service, rtol=0, atol=1e-8)
    np.testing.assert_allclose(table["ttft_s"], waits + service - jobs[1] + 1, rtol=0, atol=1e-8)


def mean_waits(law: Any, rate: float, *, replications: int = 20, n: int = 40_000) -> np.ndarray:
    """Mean wait of each replication, the first tenth left out."""
    out = []
    for seed in range(replications):
        service = steps_of(law(np.random.default_rng([seed, 5]), n)).astype(float)
        out.append(lindley(arrivals(rate, n, seed), service)[n // 10 :].mean())
    return np.array(out)


@each_law
def test_mean_waits_are_those_of_pollaczek_and_khinchine(law: Any) -> None:
    """Within the 99% interval of 20 replications, which is narrow enough to see arrivals 5% too fast or too slow."""
    exact = pollaczek_khinchine(RATE, *MOMENTS[law])
    low, high = interval(mean_waits(law, RATE))
    assert low <= exact <= high
    assert high - low < 0.05 * exact
    for wrong in (0.95, 1.05):
        low, high = interval(mean_waits(law, RATE * wrong))
        assert not low <= exact <= high


def test_mean_waits_of_the_replica_itself_m_m_1() -> None:
    """The same without the shortcut, at lower power: geometric output lengths, the wait taken from the tables."""
    rate, waits = 0.2, []
    for seed in range(12):
        jobs = geometric(np.random.default_rng([seed, 9]), 300)
        table = run(arrivals(rate, 300, seed), jobs).requests
        waits.append((table["e2e_s"] - jobs[1])[30:].mean())
    low, high = interval(np.array(waits))
    assert low <= pollaczek_khinchine(rate, *MOMENTS[geometric]) <= high
    for wrong in (0.13, 0.3):
        assert not low <= pollaczek_khinchine(wrong, *MOMENTS[geometric]) <= high


def outputs(kind: str, rng: np.random.Generator, n: int) -> np.ndarray:
    """Lengths of mean 20 tokens."""
    if kind == "constant":
        return np.full(n, 20)
    return rng.geometric(0.05, n) if kind == "geometric" else np.where(rng.random(n) < 0.9, 5, 155)


SQUARES = {"constant": 400.0, "geometric": (2 - 0.05) / 0.05**2, "two sizes": 0.9 * 5**2 + 0.1 * 155**2}
"""Their second moments."""
each_size = pytest.mark.parametrize("kind", ["constant", "geometric", "two sizes"])


@each_size
def test_fluid_processor_sharing_has_the_insensitive_mean(kind: str) -> None:
    """E[T] = E[S] / (1 - rho) = 1 / (mu - lambda) whatever the law of S; in order of arrival its variance matters."""
    rate, n, sojourns, served_in_order = 0.025, 15_000, [], []
    for seed in range(12):
        service = outputs(kind, np.random.default_rng([seed, 2]), n).astype(float)
        at_s = arrivals(rate, n, seed)
        sojourns.append(processor_sharing(at_s, service)[n // 10 :].mean())
        served_in_order.append((lindley(at_s, service) + service)[n // 10 :].mean())
    exact = 20 / (1 - rate * 20)
    low, high = interval(np.array(sojourns))
    assert low <= exact <= high
    assert high - low < 0.06 * exact
    low, high = interval(np.array(served_in_order))
    assert low <= 20 + pollaczek_khinchine(rate, 20, SQUARES[kind]) <= high
    assert kind == "geometric" or not low <= exact <= high  # memoryless: 39.5 and 40 s, the rest far apart


@each_size
@pytest.mark.parametrize("how", ["batch", "fair"])
def test_sharing_in_units_of_a_token_follows_fluid_processor_sharing(kind: str, how: str) -> None:
    """Each job leaves within 2 N units of the fluid limit, N the most present at once; the mean within 5%.

    In *batch*, a round gives every row one token and lasts one second per row: an arrival waits for the round under way
    (at most N seconds), and what it is late by, others are early by. In *fair*, a second goes to the client with the
    least service, so that services of those present differ by at most one token, and an arrival starts level with the
    least served: a token at its start, one at its end, each worth at most N seconds.
    """
    n, rate = 160, 0.03
    at_s, size = arrivals(rate, n, 4), outputs(kind, np.random.default_rng(8), n)
    jobs = np.ones(n, int), size
    if how == "batch":
        result = run(at_s, jobs, batch=2048, cost=LinearCost(0.0, 1.0))
    else:
        result = run(at_s, jobs, "fair", quantum_steps=1, prompt_weight=0.0, output_weight=1.0)
    fluid = processor_sharing(at_s, size.astype(float))
    error = result.requests["e2e_s"] - fluid
    most = int(result.steps["live"].max())
    assert np.abs(error).max() <= 2 * most
    assert abs(error.mean()) <= 0.05 * fluid.mean()
    in_order = run(at_s, jobs).requests["e2e_s"]
    assert np.abs(in_order - fluid).max() > 2 * most  # the check can fail


def little(result: SimulationResult) -> tuple[float, float]:
    """The integral of the number in the system from the steps, and the sum of the times in it from the requests.

    The steps say how many were in the system while each ran, counting who had been handed in when it began; an arrival
    during a step is handed in at the step's end, hence the second term.
    """
    steps, requests = result.steps, result.requests
    came = requests["status"] != "rejected"
    at_s, left_s = requests["arrival_s"][came], requests["left_s"][came]
    present = float((steps["live"] * (steps["end_s"] - steps["start_s"])).sum())
    handed_in = steps["start_s"][np.searchsorted(steps["start_s"], at_s)]
    return present + float((handed_in - at_s).sum()), float((left_s - at_s).sum())


@pytest.mark.parametrize("name", registry.names("entropic_ctl.scheduling"))
@settings(max_examples=6)
@given(st.integers(0, 2**32), st.sampled_from(["burst", "poisson", "closed"]), st.integers(1, 4), st.integers(2, 30))
def test_little_s_law_on_every_run(name: str, seed: int, kind: str, batch: int, live: int) -> None:
    """L = lambda W: both sides times the length of the run, from two records that are kept separately."""
    config = configs.from_mapping(
        {
            "seed": seed,
            "workload": {
                "kind": kind, "n_requests": 25, "rate_per_s": 3.0, "users": 5, "think_s": 0.4, "prompt_tokens": 30.0,
                "prompt_cv": 1.5, "output_tokens": 9.0, "output_cv": 1.0,
            },
            "engine": {"max_batch": batch, "pages": 30, "page_tokens": 4, "max_live": live},
            "loop": {"scheduling": {"policy": name}},
        }
    )  # fmt: skip
    result = simulate(config, bank=BANK)
    area, sojourn = little(result)
    assert area == pytest.approx(sojourn, rel=1e-9, abs=1e-9)
    result.requests["left_s"][int(np.argmax(result.requests["left_s"]))] += 1e-3 * sojourn  # one clock wrong
    area, sojourn = little(result)
    assert area != pytest.approx(sojourn, rel=1e-5, abs=1e-6)
