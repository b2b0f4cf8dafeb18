from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl import config
from entropic_ctl.temperature import solve
from proofs.check import Claim, Hints, Subject
from proofs.check.gain import varentropy_ceiling
from proofs.check.solver import claims, effort
from proofs.vmax import maximum

N = 32_000


def subject(law: str = "solve", n: int = N, **table: Any) -> Subject:
    return Subject(config.from_mapping({"loop": {"temperature": {"law": law, **table}}}), n)


def decide(law: str = "solve", n: int = N, **table: Any) -> Claim:
    (claim,) = claims(subject(law, n, **table), Hints({}))
    return claim


class Steps:
    """M rows with entropies that rise piecewise linearly between knots in u; the slope reported is a lie, if given."""

    def __init__(self, knots: Any, entropy: Any, lie: Any = None) -> None:
        self.knots, self.entropy, self.lie = np.asarray(knots), np.asarray(entropy), lie
        self.calls = 0

    @property
    def model_entropy(self) -> Any:
        raise NotImplementedError

    def at(self, temperature: Any) -> tuple[Any, Any]:
        self.calls += 1
        u = np.log(temperature)
        H = np.array([np.interp(x, k, h) for x, k, h in zip(u, self.knots, self.entropy, strict=True)])
        return H, (np.full_like(H, 1e-9) if self.lie is None else np.asarray(self.lie(self.calls)) + 0 * H)


class Levels:
    """M rows, each with its own few logits and how often each occurs: softmax over any vocabulary."""

    def __init__(self, logits: Any, count: Any) -> None:
        self.z, self.count, self.calls = logits - logits.max(1, keepdims=True), count, 0

    @property
    def model_entropy(self) -> Any:
        return self.at(np.ones(self.z.shape[0]))[0]

    def at(self, temperature: Any) -> tuple[Any, Any]:
        self.calls += 1
        x = self.z / temperature[:, None]
        q = self.count * np.exp(x)
        total = q.sum(1)
        mean = (q * x).sum(1) / total
        return np.log(total) - mean, (q * (x - mean[:, None]) ** 2).sum(1) / total


# the claim


def test_defaults_are_proved_for_every_vocabulary_and_the_bound_grows_with_the_vocabulary() -> None:
    needed = [decide(n=n).numbers["evaluations"] for n in (2, 300, N, 151_936, 2**20, 2**31 - 1)]
    assert all(decide(law, n).status == "proved" for law in ("solve", "damped") for n in (2, N, 2**20, 2**31 - 1))
    assert needed == sorted(needed)
    assert (needed[2], needed[4]) == (40, 40)
    assert max(needed) < 64


@given(st.integers(2, 2**20), st.floats(1e-9, 0.5), st.floats(0.05, 0.9), st.floats(1.0, 5.0))
def test_the_bound_is_the_formula(n: int, tolerance: float, t_min: float, t_max: float) -> None:
    found = effort(subject(n=n, tolerance_nats=tolerance, t_min=t_min, t_max=t_max, temperature=t_min))
    width = math.log(t_max / t_min)
    levels = math.log2((math.log(n - 1) ** 2 / 4 + 1) * width / tolerance)
    assert found.evaluations is not None
    assert abs(found.evaluations - (17 + max(0, math.ceil(levels)))) <= (abs(levels - round(levels)) < 1e-4)


def test_statuses_and_remedies() -> None:
    few = decide(max_iterations=39)
    assert few.status == "unknown"
    assert "max_iterations to 40" in few.reason
    assert decide(max_iterations=40).status == "proved"
    fine = decide(tolerance_nats=1e-12, t_min=1e-300, temperature=1.0)
    assert fine.status == "unknown"
    assert "float64" in fine.reason
    assert decide("fixed").status == decide("feedback").status == "not applicable"
    assert decide(t_min=0.8, t_max=0.8).numbers["evaluations"] == 1
    assert (decide(n=4, target_nats=1.4).numbers["target_possible"], decide(n=4).numbers["target_possible"]) == (
        False,
        False,
    )
    assert decide(n=5).numbers["target_possible"] is True


@pytest.mark.parametrize("n", [2, 3, 50, N, 2**20])
def test_the_ceiling_is_above_the_largest_varentropy(n: int) -> None:
    assert maximum(n).upper <= varentropy_ceiling(n) < maximum(n).upper + Fraction(3, 5)


# the shipped function


@st.composite
def problems(draw: st.DrawFn) -> tuple[Steps, solve.Config, int, Any]:
    """Any entropy that rises in u with slopes in [0, V]; any lie about the slope, a new one at every evaluation."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    low, high = draw(st.sampled_from([(0.3, 1.6), (0.01, 10.0), (0.7, 0.71)]))
    rows, parts = 40, draw(st.integers(1, 6))
    law = subject(
        tolerance_nats=draw(st.sampled_from([1e-5, 1e-9, 1e-2])),
        t_min=low,
        t_max=high,
        temperature=low,
        max_iterations=1000,
        target_nats=1.5,
    )
    needed, v, _ = effort(law)
    assert needed is not None
    a, b = math.log(low), math.log(high)
    knots = np.sort(rng.uniform(a, b, (rows, parts + 1)), 1)
    knots[:, 0], knots[:, -1] = a, b
    slopes = float(v) * rng.choice([0.0, 1e-6, 0.03, 1.0], (rows, parts)) * rng.uniform(0.5, 1.0, (rows, parts))
    entropy = np.concatenate([np.zeros((rows, 1)), np.cumsum(slopes * np.diff(knots, axis=1), 1)], 1)
    root = rng.uniform(a - 0.2, b + 0.2, rows)
    entropy += (1.5 - np.array([np.interp(x, k, h) for x, k, h in zip(root, knots, entropy, strict=True)]))[:, None]
    scale = 10.0 ** rng.uniform(-6, 3)
    return Steps(knots, entropy, lambda _: rng.exponential(scale, rows)), law.law, needed, rng.uniform(a, b, rows)


@given(problems())
def test_no_entropy_curve_and_no_lie_about_its_slope_takes_more_than_the_bound(problem: Any) -> None:
    view, law, needed, start = problem
    u, H, _ = solve.solve_u(start, view, law)
    assert view.calls <= needed
    for row in range(start.shape[0]):
        low, high = view.entropy[row][0], view.entropy[row][-1]
        if low > 1.5 + law.tolerance_nats * 1.001:
            assert u[row] == pytest.approx(math.log(law.t_min), abs=1e-12)
        elif high < 1.5 - law.tolerance_nats * 1.001:
            assert u[row] == pytest.approx(math.log(law.t_max), abs=1e-12)
        else:
            assert abs(H[row] - 1.5) <= law.tolerance_nats * 1.001


class Crawl:
    """An adversary: a true entropy curve, slopes 0 or V, told with slopes that keep Newton busy but on one side.

    From an error of -1 the curve rises with slope V to -2.2e-5, and the slope told makes each Newton step leave 0.49
    of the error; so 16 evaluations pass and the bracket is as wide as ever. Then it is flat but for a rise at the root.
    """

    model_entropy = np.zeros(1)

    def __init__(self, root: float, v: float, start: float = math.log(0.3)) -> None:
        self.root, self.v, self.start, self.calls = root, v, start, 0

    def at(self, temperature: Any) -> tuple[Any, Any]:
        self.calls += 1
        u = math.log(float(temperature[0]))
        rise, jump = -1.0 + self.v * (u - self.start), self.v * (u - self.root)
        error = min(rise, -2.2e-5) if jump < -2.2e-5 else min(jump, 2.2e-5)
        H = 1.5 + error
        told = math.log(H / 1.5) * H * self.v / (0.51 * error) if error else 1.0
        return 0.0 * temperature + H, 0.0 * temperature + told


def test_the_bound_is_attained_and_one_less_would_not_do() -> None:
    case = subject(tolerance_nats=1e-5)
    needed, v = effort(case).evaluations, float(effort(case).v_bound)
    assert needed is not None
    low, high = math.log(0.3), math.log(1.6)
    worst, at = 0, 0.0
    for root in np.random.default_rng(5).uniform(low + 0.1, high, 300):
        view = Crawl(float(root), v)
        _, H, _ = solve.solve_u(np.full(1, low), view, case.law)
        assert abs(H[0] - 1.5) <= 1e-5
        worst, at = max((worst, at), (view.calls, float(root)))
    assert needed - 1 <= worst <= needed
    short = subject(tolerance_nats=1e-5, max_iterations=worst - 1)
    _, H, _ = solve.solve_u(np.full(1, low), Crawl(at, v), short.law)
    assert abs(H[0] - 1.5) > 1e-5
    assert claims(short, Hints({}))[0].status == "unknown"


def test_softmax_never_exceeds_the_bound_and_seldom_leaves_newton() -> None:
    """2 to 6 levels, gaps over six decades, ties, roots at the clamps: the search for bad cases, on real softmax."""
    rng, rows, worst = np.random.default_rng(3), 1500, 0
    for target in (1e-3, 0.3, math.log(2) + 1e-3, 1.5, math.log(16) + 1e-4, 5.0):
        z = -np.cumsum(10 ** rng.uniform(-3, 3, (rows, 5)), 1)
        count = np.round(np.exp(rng.uniform(0, math.log(N / 5), (rows, 5))))
        count[:, 0] = rng.choice([1, 2, math.floor(math.exp(target))], rows)
        low, high = np.full(rows, -12.0), np.full(rows, 12.0)
        view = Levels(z, count)
        for _ in range(60):
            middle = (low + high) / 2
            below = view.at(np.exp(middle))[0] < target
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        wanted = rng.choice([math.log(0.3) + 1e-3, 0.0, math.log(1.6) - 1e-3], rows)
        view = Levels(z * np.exp(wanted - low)[:, None], count)
        case = subject(target_nats=target)
        _, H, _ = solve.solve_u(rng.uniform(math.log(0.3), math.log(1.6), rows), view, case.law)
        worst = max(worst, view.calls)
        reached = np.abs(low) < 11.9
        assert np.abs(H - target)[reached].max() <= 1e-5
    assert worst <= effort(case).evaluations  # type: ignore[operator]
    assert worst <= 17


def test_a_peaked_token_out_of_reach_no_longer_uses_up_the_iterations() -> None:
    """V below 1e-40 everywhere: halving towards the clamp took 88 evaluations; now the clamp itself is the 17th."""
    view = Levels(np.array([[251.0, 0.0, 53.0]]), np.array([[1.0, 4000.0, 15_000.0]]))
    u, _, _ = solve.solve_u(np.full(1, -0.53), view, solve.Config(target_nats=3.0, max_iterations=200))
    assert u[0] == math.log(1.6)
    assert view.calls <= solve.NEWTON_EVALUATIONS + 1


def test_newton_is_bounded_by_the_same_count_in_torch() -> None:
    torch = pytest.importorskip("torch")

    low = math.log(0.3)
    ours, theirs = Crawl(0.123, 27.0), Crawl(0.123, 27.0)
    u, _, _ = solve.solve_u(np.full(1, low), ours, solve.Config())
    w, _, _ = solve.solve_u(torch.full((1,), low, dtype=torch.float64), theirs, solve.Config())
    assert ours.calls == theirs.calls > solve.NEWTON_EVALUATIONS
    assert float(w[0]) == pytest.approx(float(u[0]), abs=1e-12)


def test_bounds_are_exact_rationals() -> None:
    assert isinstance(varentropy_ceiling(7), Fraction)
