from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_view import view
from toy_driver import drive

from entropic_ctl import config
from entropic_ctl.errors import BadInputError
from entropic_ctl.loop import Loop
from entropic_ctl.scheduling._predictors import ar1, ar1_reduction, ewma, normal_cdf, with_prior
from entropic_ctl.scheduling.entropic import Config, build
from entropic_ctl.signals import Request


def test_normal_cdf_within_its_stated_error() -> None:
    x = np.linspace(-9, 9, 20001)
    exact = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    assert np.abs(normal_cdf(x) - exact).max() < 7.6e-8


@pytest.mark.parametrize("phi", [-0.5, 0.0, 0.4, 0.9])
@pytest.mark.parametrize("h", [0.1, 1.0, 2.5])
def test_ar1_closed_form_against_quadrature_and_monte_carlo(phi: float, h: float) -> None:
    mean, deviation = 1.2, 0.7
    closed = ar1_reduction(np.array([h]), np.array([mean]), np.array([deviation]), np.array([phi]))[0]
    centre, spread = mean + phi * (h - mean), deviation * math.sqrt(1 - phi**2)
    grid = np.linspace(-9, 9, 40001)
    weight = np.exp(-0.5 * grid**2) / math.sqrt(2 * math.pi)
    quadrature = np.trapezoid(weight * np.maximum(0.0, h - centre - spread * grid), grid)
    assert closed == pytest.approx(quadrature, abs=1e-6)
    draws = np.maximum(0.0, h - centre - spread * np.random.default_rng(1).normal(size=200_000))
    assert abs(closed - draws.mean()) < 5 * draws.std() / math.sqrt(draws.shape[0])


def test_white_noise_averages_to_the_ratchet() -> None:
    """Averaged over h ~ N(mu, s^2) with phi = 0, the expected reduction is s / sqrt(pi) per step."""
    s = 0.8
    h = np.random.default_rng(2).normal(3.0, s, 200_000)
    mean = ar1_reduction(h, np.array(3.0), np.array(s), np.array(0.0)).mean()
    assert mean == pytest.approx(s / math.sqrt(math.pi), rel=5e-3)


values = st.floats(0, 12)


@given(values, values, values, st.floats(0, 5), st.floats(-0.99, 0.99))
def test_ar1_properties(a: float, b: float, mean: float, deviation: float, phi: float) -> None:
    low, high = ar1_reduction(np.array([min(a, b), max(a, b)]), np.array(mean), np.array(deviation), np.array(phi))
    slack = 1e-7 * (1 + 2 * abs(max(a, b) - mean) + 2 * abs(min(a, b) - mean))
    assert low <= high + slack  # a higher entropy has more to lose
    assert low >= max(0.0, (1 - phi) * (min(a, b) - mean))  # Jensen
    spread = deviation * math.sqrt(1 - phi**2)
    assert low <= max(0.0, (1 - phi) * (min(a, b) - mean)) + spread / math.sqrt(2 * math.pi) + slack


def test_no_noise_means_the_drift_itself() -> None:
    out = ar1_reduction(np.array([3.0, 1.0]), np.array(2.0), np.array(0.0), np.array(0.25))
    assert out.tolist() == [0.75, 0.0]


def test_predictors_read_the_view() -> None:
    assert ewma(view(reduction_ewma=0.3)).tolist() == [0.3]
    expected = ar1_reduction(np.array([2.0]), np.array([1.5]), np.array([math.sqrt(0.5)]), np.array([0.2]))
    assert ar1(view()) == pytest.approx(expected)
    blank = view(2, entropy=np.nan, entropy_mean=np.nan, entropy_var=0.0, entropy_cov1=0.0, seen=0)
    assert ar1(blank).tolist() == [0.0, 0.0]


def test_the_prior_is_exact_for_new_requests_and_fades() -> None:
    for seen, expected in ((0, 2.0), (1, 2.0), (3, 1.0), (10**9, 0.0)):
        assert with_prior(np.zeros(1), view(seen=seen), 2.0, 2.0) == pytest.approx(expected, abs=1e-6)


def test_score_by_hand() -> None:
    policy = build(Config(alpha=2.0, beta=3.0, gamma=0.5, latency_objective_s=5.0, prior_nats=1.0, prior_weight=1.0))
    reduction = (1.0 + 19 * 0.4) / 20
    cost = 2.0 * 1 / 64 + 3.0 * 4 / 100 + 0.5 * (40 * 0.02) / 5.0
    assert policy.score(view()) == pytest.approx(reduction / cost)
    long_prefill = build(Config(prior_nats=2.0)).score(
        view(cached_tokens=0, known_tokens=640, token_limit=10, generated_tokens=0, seen=0)
    )
    assert long_prefill == pytest.approx(2.0 / (1.0 + 0.04 + (9 + 10) * 0.02 / 10.0))


@given(
    predictor=st.sampled_from(["ewma", "ar1"]),
    seen=st.integers(0, 5),
    pages=st.integers(0, 100),
    reduction=st.floats(0, 10),
    beta=st.floats(0, 10),
    gamma=st.floats(0, 10),
)
def test_scores_are_finite_and_fall_with_every_cost(
    *, predictor: str, seen: int, pages: int, reduction: float, beta: float, gamma: float
) -> None:
    policy = build(Config(predictor=predictor, beta=beta, gamma=gamma))
    known = {"entropy": np.nan if seen == 0 else 2.0, "entropy_mean": np.nan if seen == 0 else 1.5}
    base = policy.score(view(seen=seen, pages=pages, reduction_ewma=reduction, **known))
    assert np.isfinite(base).all()
    assert (base > 0).all()
    for dearer in ({"pages": pages + 5}, {"cached_tokens": 10}, {"step_s": 0.2}, {"token_limit": 70}):
        more = policy.score(view(**({"seen": seen, "pages": pages, "reduction_ewma": reduction, **known} | dearer)))
        assert (more <= base).all()
    assert (policy.score(view(seen=seen, pages=pages, reduction_ewma=reduction + 1, **known)) >= base).all()


@pytest.mark.parametrize(
    ("key", "value"), [("alpha", 0.0), ("beta", -1.0), ("predictor", "oracle"), ("prior_weight", 0.0), ("gama", 1.0)]
)
def test_bad_parameters(key: str, value: object) -> None:
    with pytest.raises(BadInputError, match=f"loop.scheduling.{key}"):
        config.from_mapping({"loop": {"scheduling": {"policy": "entropic", key: value}}})


@pytest.mark.parametrize("predictor", ["ewma", "ar1"])
def test_it_drives_a_loop(predictor: str) -> None:
    run = config.from_mapping(
        {
            "engine": {"max_batch": 2, "max_batch_tokens": 32, "pages": 60, "page_tokens": 4, "max_live": 6},
            "loop": {"scheduling": {"policy": "entropic", "predictor": predictor, "quantum_steps": 3}},
        }
    )
    trace = drive(Loop(run.loop, run.engine, 100), [Request(i, float(i), 6, 12) for i in range(8)])
    assert all(len(trace.token_times[i]) == 12 for i in range(8))
    first = [min(times) for times in trace.token_times.values()]
    assert first != sorted(first) or sum(plan.paused.shape[0] for plan in trace.plans) > 0  # it does reorder
