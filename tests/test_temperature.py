from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl import registry
from entropic_ctl.entropy import ArrayLogitView, entropy_varentropy
from entropic_ctl.errors import BadInputError
from entropic_ctl.temperature import damped, dynatemp, edt, feedback, fixed, mirostat2, solve

torch = pytest.importorskip("torch")


class CountingView:
    """Counts evaluations of a view."""

    def __init__(self, view: ArrayLogitView) -> None:
        self.view, self.calls = view, 0

    @property
    def model_entropy(self) -> Any:
        return self.view.model_entropy

    def at(self, temperature: Any) -> Any:
        self.calls += 1
        return self.view.at(temperature)


def drive(law: feedback.Feedback, u: float, entropies: list[float]) -> list[float]:
    """Temperatures exp(u) after each update of one request."""
    state = np.array([u])
    out = []
    for H in entropies:
        state = law.update(state, np.array([H]))
        out.append(float(law.temper(state, ArrayLogitView(np.zeros((1, 2))))[0][0]))
    return out


def test_laws_on_offer() -> None:
    on_offer = registry.names("entropic_ctl.temperature")
    actions = {
        name: registry.load("entropic_ctl.temperature", name)
        .build(registry.load("entropic_ctl.temperature", name).Config())
        .integral_action
        for name in on_offer
    }
    stateless = dict.fromkeys(("fixed", "solve", "damped", "edt", "dynatemp"), False)
    assert actions == {**stateless, "feedback": True, "mirostat2": True}


def test_e5_no_wind_up() -> None:
    """E5: after 1,000 steps in saturation the law leaves the clamp at once and crosses to the other in 15 updates."""
    config = feedback.Config(1.0, 0.1, 2.0, target_nats=2.0, gain=0.1, phi="linear", rate_limit=0.0)
    law = feedback.build(config)
    T = drive(law, law.start(), [0.0] * 1000 + [4.0] * 20)  # type: ignore[arg-type]
    assert T[999] == pytest.approx(2.0, abs=1e-12)
    assert T[1000] < 2.0
    assert T[1000] == pytest.approx(2.0 * math.exp(-0.2))
    assert T[1013] > 0.1
    assert T[1014] == pytest.approx(0.1, abs=1e-12)
    assert max(T) <= 2.0
    assert min(T) >= 0.1


SIGNS = st.sampled_from(["linear", "tanh"])


@given(SIGNS, st.floats(0.01, 1.0), st.floats(0.0, 12.0), st.floats(-1.0, 0.4), st.floats(0.0, 0.5))
def test_high_entropy_lowers_and_low_entropy_raises(phi: str, gain: float, H: float, u: float, limit: float) -> None:
    law = feedback.build(feedback.Config(target_nats=2.0, gain=gain, phi=phi, rate_limit=limit))
    after = float(law.update(np.array([u]), np.array([H]))[0])
    assert (after - u) * (H - 2.0) <= 0
    assert math.log(0.3) <= after <= math.log(1.6)
    if limit > 0:
        assert abs(after - u) <= limit + 1e-12
    assert abs(after - u) <= gain * abs(H - 2.0) + 1e-12


def test_phi_is_odd_monotone_with_slope_one_at_zero_and_at_most_one() -> None:
    e = np.linspace(-1.9, 1.9, 381)
    for phi in ("linear", "tanh"):
        config = feedback.Config(1.0, 1e-3, 10.0, target_nats=2.0, gain=0.01, phi=phi, phi_scale_nats=0.5, rate_limit=0)
        change = feedback.build(config).update(np.zeros_like(e), 2.0 + e) / -0.01
        np.testing.assert_allclose(change, -change[::-1], atol=1e-12)
        slope = np.diff(change) / np.diff(e)
        assert (slope >= 0).all()
        assert slope.max() <= 1 + 1e-9
        assert slope[190] == pytest.approx(1.0, abs=1e-3)
    assert np.abs(change).max() < 0.5


def test_two_temperatures_come_closer_on_any_frozen_logits() -> None:
    """The paper's loop contracts at a gain below 2 / V_max (27.8903 for n = 32,000), and 2-cycles just above it."""
    n, L, target, v_max = 32_000, 10.7499, 4.8975, 27.8903
    z = np.zeros((1, n))
    z[0, 0] = L
    for factor, cycles in ((0.999, False), (1.001, True)):
        config = feedback.Config(1.0, 0.1, 10.0, target_nats=target, gain=factor * 2 / v_max, rate_limit=0.0)
        law = feedback.build(config)
        view, u, trail = ArrayLogitView(z), np.array([0.1]), []
        for _ in range(600):
            u = law.update(u, law.temper(u, view)[1])
            trail.append(float(u[0]))
        width = abs(trail[-1] - trail[-2])
        assert (width > 0.01) if cycles else (width < 0.05 and width < abs(trail[1] - trail[0]))


def test_nan_entropy_leaves_the_state_alone() -> None:
    law = feedback.build(feedback.Config())
    u = law.update(np.array([0.1, 0.1]), np.array([np.nan, 3.0]))
    assert u[0] == 0.1
    assert u[1] < 0.1


@st.composite
def logit_rows(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    z = rng.normal(size=(draw(st.integers(1, 5)), draw(st.integers(2, 60)))) * draw(st.floats(0.0, 40.0))
    if draw(st.booleans()):
        z = np.round(z)
    if draw(st.booleans()):
        z[:, 1:] = np.where(rng.random(z[:, 1:].shape) < 0.3, -np.inf, z[:, 1:])
    return np.asarray(z)


@given(logit_rows(), st.floats(0.0, 4.5), st.floats(0.0, 1.0), st.sampled_from([(0.3, 1.6), (0.01, 10.0)]))
def test_solve_hits_the_target_or_the_clamp_from_any_start(
    z: np.ndarray[Any, Any], target: float, where: float, clamps: tuple[float, float]
) -> None:
    low, high = clamps
    start = math.exp(math.log(low) + where * (math.log(high) - math.log(low)))
    config = solve.Config(min(max(start, low), high), low, high, target_nats=target, tolerance_nats=1e-9)
    law, view = solve.build(config), CountingView(ArrayLogitView(z))
    T, H, V = law.temper(np.full(z.shape[0], law.start()), view)
    at_low, at_high = (entropy_varentropy(z, t)[0] for t in (low, high))
    for row in range(z.shape[0]):
        if target <= at_low[row] - 1e-8:
            assert T[row] == pytest.approx(low, rel=1e-9)
        elif target >= at_high[row] + 1e-8:
            assert T[row] == pytest.approx(high, rel=1e-9)
        elif at_low[row] + 1e-8 < target < at_high[row] - 1e-8:
            steep = float(V[row]) if V[row] > 1e-3 else 1e9
            assert abs(H[row] - target) <= 1e-9 + 1e-12 * steep
        again = entropy_varentropy(z[row], T[row])
        assert (H[row], V[row]) == pytest.approx((float(again[0]), float(again[1])), abs=1e-9)
    assert view.calls <= 64


def test_solve_is_quick_on_typical_logits() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(32, 5000)) * rng.uniform(1, 6, (32, 1))
    view = CountingView(ArrayLogitView(z))
    _, H, _ = solve.build(solve.Config(target_nats=2.0, t_min=0.05, t_max=3.0)).temper(np.zeros(32), view)
    assert np.abs(H - 2.0).max() <= 1e-5
    assert view.calls <= 12


class RootLikeView:
    """H - 2 = |x|^0.55 with the sign of x = u - 0.1: plain Newton steps circle the root, shrinking by 0.82 each."""

    model_entropy = np.zeros(1)

    def __init__(self) -> None:
        self.calls = 0

    def at(self, temperature: Any) -> tuple[Any, Any]:
        self.calls += 1
        x = np.log(temperature) - 0.1
        size = np.maximum(np.abs(x), 1e-30)
        return 2.0 + np.sign(x) * size**0.55, 0.55 * size**-0.45


def test_solve_bisects_where_newton_circles() -> None:
    view = RootLikeView()
    config = solve.Config(target_nats=2.0, tolerance_nats=1e-5, t_min=0.05, t_max=5.0)
    u, H, _ = solve.solve_u(np.zeros(1), view, config)
    assert abs(H[0] - 2.0) <= 1e-5
    assert u[0] == pytest.approx(0.1, abs=1e-8)
    assert view.calls < 45


def test_solve_stops_at_its_iteration_bound() -> None:
    view = RootLikeView()
    u, H, V = solve.solve_u(np.zeros(1), view, solve.Config(target_nats=2.0, max_iterations=3))
    assert view.calls == 3
    np.testing.assert_allclose((H, V), view.at(np.exp(u)))


def test_a_row_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(1)
    z = rng.normal(size=(6, 200)) * rng.uniform(0.5, 8, (6, 1))
    z[3] = -np.inf
    law = solve.build(solve.Config(target_nats=1.0, t_min=0.05, t_max=5.0))
    together = law.temper(np.zeros(6), ArrayLogitView(z))
    for row in range(6):
        alone = law.temper(np.zeros(1), ArrayLogitView(z[row : row + 1]))
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_array_equal(a[0], b[row])
    assert np.isnan(together[1][3])
    assert np.isfinite(together[0]).all()


def test_targets_below_the_tied_maxima_end_at_the_lower_clamp() -> None:
    z = np.array([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    T, H, _ = solve.build(solve.Config(target_nats=0.5, t_min=0.05, t_max=5.0)).temper(np.zeros(2), ArrayLogitView(z))
    np.testing.assert_allclose(T, 0.05)
    np.testing.assert_allclose(H, [math.log(3), math.log(4)], atol=1e-6)


@given(logit_rows(), st.floats(0.05, 1.0))
def test_damped_goes_the_stated_fraction_of_the_way(z: np.ndarray[Any, Any], f: float) -> None:
    clamps = {"temperature": 0.9, "t_min": 0.05, "t_max": 5.0, "target_nats": 1.0, "tolerance_nats": 1e-9}
    full = solve.build(solve.Config(**clamps))  # type: ignore[arg-type]
    part = damped.build(damped.Config(**clamps, fraction=f))  # type: ignore[arg-type]
    u = np.full(z.shape[0], part.start())
    view = ArrayLogitView(z)
    expected = u + f * (np.log(full.temper(u, view)[0]) - u)
    T, H, _ = part.temper(u, view)
    np.testing.assert_allclose(np.log(T), expected, atol=1e-9)
    np.testing.assert_allclose(H, entropy_varentropy(z, T)[0], atol=1e-12)
    assert (part.update(u, H) == u).all()


def test_damping_scales_the_spread_of_entropy_by_about_one_minus_f() -> None:
    rng = np.random.default_rng(2)  # to first order, so: small differences between the rows
    z = 2.2 * rng.normal(size=200) + 0.05 * rng.normal(size=(400, 200))
    base = entropy_varentropy(z, 0.8)[0]
    for f in (0.25, 0.5, 0.75):
        config = damped.Config(0.8, 0.05, 5.0, target_nats=float(base.mean()), fraction=f)
        law = damped.build(config)
        H = law.temper(np.full(400, law.start()), ArrayLogitView(z))[1]
        assert np.var(H) / np.var(base) == pytest.approx((1 - f) ** 2, abs=0.01)


LAWS: list[tuple[Any, Callable[[], Any]]] = [
    (fixed, lambda: fixed.Config(0.7)),
    (feedback, lambda: feedback.Config(0.7, target_nats=2.0, phi="tanh")),
    (solve, lambda: solve.Config(0.7, 0.05, 5.0, target_nats=2.0)),
    (damped, lambda: damped.Config(0.7, 0.05, 5.0, target_nats=2.0)),
    (edt, lambda: edt.Config(0.7, 0.05, 5.0, theta_nats=3.0)),
    (dynatemp, lambda: dynatemp.Config(0.7, 0.05, 5.0, exponent=1.5)),
    (mirostat2, lambda: mirostat2.Config(0.7, 0.05, 5.0, target_nats=2.0, learning_rate=0.5)),
]


@pytest.mark.parametrize(("module", "config"), LAWS)
def test_numpy_and_torch_agree(module: Any, config: Callable[[], Any]) -> None:
    """The same law on NumPy and torch: T within 1e-4 relative (float32 logits), 1e-10 (float64), over 20 steps."""
    rng = np.random.default_rng(3)
    law = module.build(config())
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        u = np.full(4, law.start())
        v = torch.tensor(u)
        for _ in range(20):
            z = rng.normal(size=(4, 500)).astype(np.float32) * 3
            T, H, V = law.temper(u, ArrayLogitView(z))
            T2, H2, V2 = law.temper(v, ArrayLogitView(torch.tensor(z, dtype=dtype)))
            assert isinstance(T2, torch.Tensor)
            np.testing.assert_allclose(T2.numpy(), T, rtol=tolerance)
            np.testing.assert_allclose(H2.numpy(), H, atol=20 * tolerance)
            np.testing.assert_allclose(V2.numpy(), V, atol=100 * tolerance)
            u, v = law.update(u, H), law.update(v, H2)
            assert v.dtype == torch.float64


@pytest.mark.parametrize("module", [module for module, _ in LAWS])
def test_greedy_configurations_start_at_a_number(module: Any) -> None:
    law = module.build(module.Config(temperature=0.0))
    assert math.isfinite(law.start())
    T, H, V = law.temper(np.array([law.start()]), ArrayLogitView(np.array([[2.0, 1.0]])))
    assert np.isfinite([T, H, V]).all()


def test_bad_parameters_are_named() -> None:
    for build in (
        lambda: feedback.Config(gain=math.nan),
        lambda: feedback.Config(phi="cubic"),
        lambda: feedback.Config(phi_scale_nats=0.0),
        lambda: feedback.Config(rate_limit=-0.1),
        lambda: solve.Config(target_nats=-1.0),
        lambda: solve.Config(max_iterations=0),
        lambda: damped.Config(fraction=0.0),
        lambda: damped.Config(fraction=1.5),
    ):
        with pytest.raises(BadInputError, match="allowed"):
            build()
