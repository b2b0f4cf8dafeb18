from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.laws import budget

entropies = st.lists(
    st.one_of(st.floats(0, 12), st.sampled_from([0.0, 0.5, 3.0, float("nan")])), min_size=1, max_size=60
)


def law(**changes: float) -> budget.Budget:
    return budget.Budget(budget.Config(**changes))  # type: ignore[arg-type]


def run(a: budget.Budget, trace: list[float]) -> list[float]:
    theta, timer = (np.array([x]) for x in a.start())
    out = [float(theta[0])]
    for h in trace:
        theta, timer = a.update(theta, timer, np.array([h]))
        out.append(float(theta[0]))
    return out


@given(entropies, st.integers(1, 6))
def test_two_widenings_are_at_least_d_steps_apart_and_narrowing_is_immediate(trace: list[float], d: int) -> None:
    a = law(theta_nats=0.01, theta_wide_nats=0.1, widen_after=d)
    theta = run(a, trace)
    widened = [t for t in range(1, len(theta)) if theta[t] > theta[t - 1]]
    assert all(later - earlier >= d for earlier, later in itertools.pairwise(widened))
    assert all(t >= d for t in widened)
    for t, h in enumerate(trace, start=1):
        assert theta[t] <= max(float(a.wanted(np.array([h]))[0]), theta[t - 1])
        if t not in widened:
            assert theta[t] <= float(a.wanted(np.array([h]))[0]) or theta[t] == theta[t - 1]
        if float(a.wanted(np.array([h]))[0]) < theta[t - 1]:
            assert theta[t] == float(a.wanted(np.array([h]))[0])
        assert 0.01 <= theta[t] <= 0.1


def test_exact_timeline() -> None:
    a = law(theta_nats=0.02, theta_wide_nats=0.06, entropy_low_nats=1.0, entropy_high_nats=3.0, widen_after=2)
    #            wide? wide!  mid: at once  asks  interrupted  asks  asks: widens
    trace = [0.0, 0.0, 2.0, 0.5, 5.0, 0.0, 1.0]
    expected = [0.02, 0.02, 0.06, 0.04, 0.04, 0.02, 0.02, 0.06]
    np.testing.assert_allclose(run(a, trace), expected, rtol=1e-12)


@given(entropies)
def test_equal_budgets_are_constant(trace: list[float]) -> None:
    assert set(run(law(theta_nats=0.03, theta_wide_nats=0.03), trace)) == {0.03}


@given(st.lists(st.floats(0, 10), min_size=2, max_size=20))
def test_wanted_is_monotone_decreasing_and_bounded(levels: list[float]) -> None:
    want = law(theta_nats=0.0, theta_wide_nats=0.7).wanted(np.sort(np.array(levels)))
    assert (np.diff(want) <= 0).all()
    assert want.min() >= 0.0
    assert want.max() <= 0.7


def test_no_observation_asks_for_the_narrow_budget() -> None:
    a = law()
    assert a.start() == (a.config.theta_nats, 0)
    assert a.wanted(np.array([np.nan]))[0] == a.config.theta_nats


def test_torch_agrees_with_numpy() -> None:
    torch = pytest.importorskip("torch")
    a, rng = law(widen_after=2), np.random.default_rng(0)
    theta, timer = np.full(50, a.config.theta_nats), np.zeros(50, np.int64)
    theta_t, timer_t = torch.from_numpy(theta.copy()), torch.from_numpy(timer.copy())
    for _ in range(20):
        h = rng.uniform(0, 5, 50)
        theta, timer = a.update(theta, timer, h)
        theta_t, timer_t = a.update(theta_t, timer_t, torch.from_numpy(h))
        np.testing.assert_allclose(theta_t.numpy(), theta, rtol=1e-15)
        assert (timer_t.numpy() == timer).all()


@pytest.mark.parametrize(
    ("changes", "needles"),
    [
        ({"theta_nats": 0.2, "theta_wide_nats": 0.1}, ["theta_wide_nats", "0.1", ">= theta_nats = 0.2"]),
        ({"entropy_low_nats": 3.0, "entropy_high_nats": 3.0}, ["entropy_high_nats", "> entropy_low_nats = 3"]),
        ({"widen_after": 0}, ["widen_after", "[1, "]),
        ({"theta_nats": -0.1}, ["theta_nats", "-0.1", "[0, 10]"]),
    ],
)
def test_bad_parameters_name_field_and_range(changes: dict[str, float], needles: list[str]) -> None:
    with pytest.raises(BadInputError) as caught:
        law(**changes)
    for needle in needles:
        assert needle in str(caught.value)
