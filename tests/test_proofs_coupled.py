from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from entropic_ctl import config
from entropic_ctl.errors import BadInputError
from entropic_ctl.policy import Policy
from entropic_ctl.pruning.laws import budget
from entropic_ctl.temperature import feedback
from proofs import check, phase, search
from proofs.check import Assumptions
from proofs.check import coupled as coupled_check
from proofs.check.base import Claim, format_hint
from proofs.check.coupled import falls, vertices
from proofs.check.small_gain import Coupling, least_share
from proofs.search import coupled, gain
from proofs.search.coupled import rounded, solve, verified
from proofs.vmax import maximum

N = 32_000
V_MAX = float(maximum(N).upper)
THEOREMS = ("coupled", "small-gain", "switching-theta", "pairing")


def make(temperature: dict[str, Any] | None = None, pruning: dict[str, Any] | None = None, **tables: Any) -> Any:
    loop = {"temperature": {"law": "feedback", **(temperature or {})}, "pruning": {"law": "budget", **(pruning or {})}}
    return config.from_mapping({"loop": loop, **tables})


def decide(run: Any, n: int = N, **assumed: float) -> dict[str, Claim]:
    """Search hints, write and read them as a certificate holds them, and decide the claims of this group."""
    subject = check.Subject(run, n, Assumptions(**assumed))
    found = {**gain.hints(subject), **coupled.hints(subject)}
    hints = check.Hints(json.loads(json.dumps({name: format_hint(value) for name, value in found.items()})))
    claims = check.coupled.claims(subject, hints)
    assert tuple(claim.theorem for claim in claims) == THEOREMS
    return {claim.theorem: claim for claim in claims}


def statuses(run: Any, **assumed: float) -> tuple[str, ...]:
    found = decide(run, **assumed)
    return tuple(found[name].status for name in THEOREMS)


STEEP = {"theta_nats": 0.5, "theta_wide_nats": 1.5, "entropy_low_nats": 1.0, "entropy_high_nats": 2.0}
"""A budget with slope 1 in the middle of its band, theta = 1 at a model entropy of 1.5."""


# -- the shipped laws in closed loop with a linear plant


@dataclasses.dataclass
class Plant:
    """Tempered entropy V x + rho y, model entropy s x(before) + r y about an equilibrium of the config."""

    run: Any
    v: float
    rho: float
    r: float
    s: float
    entropy: float = 1.5

    def __post_init__(self) -> None:
        law, meso, macro = self.run.loop.build()
        self.policy = Policy(law, meso, macro, slots=1)
        self.policy.start(np.array([0]))
        self.target = law.config.target_nats
        self.theta = float(meso.wanted(np.array([self.entropy]))[0])
        self.before = 0.0

    def place(self, x: float, before: float, y: float) -> None:
        self.policy.u[0], self.before, self.policy.theta[0] = x, before, self.theta + y

    def state(self) -> np.ndarray:
        return np.array([self.policy.u[0], self.s * self.before, self.policy.theta[0] - self.theta])

    def step(self) -> np.ndarray:
        x, _, y = self.state()
        model = self.entropy + self.s * self.before + self.r * y
        tempered = self.target + self.v * x + self.rho * y
        self.policy.observe(np.array([0]), np.array([model]), np.array([tempered]), np.array([False]))
        self.before = x
        return self.state()

    def run_from(self, x: float, before: float, y: float, steps: int) -> np.ndarray:
        self.place(x, before, y)
        return np.array([self.step() for _ in range(steps)])


def matrix(k: float, v: float, rho: float, r: float, s: float, g: float) -> np.ndarray:
    return np.array([[1 - k * v, 0, -k * rho], [s, 0, 0], [0, g, g * r]])


sizes = st.floats(-2.0, 2.0)


@settings(max_examples=40)
@given(st.floats(0.001, 0.2), st.floats(0.0, 20.0), sizes, sizes, sizes, st.tuples(*[st.floats(-0.05, 0.05)] * 3))
def test_the_model_is_what_policy_and_both_shipped_laws_do(
    k: float, v: float, rho: float, r: float, s: float, start: tuple[float, float, float]
) -> None:
    plant = Plant(make({"gain": k, "rate_limit": 0.0}, {**STEEP, "widen_after": 1}), v, rho, r, s)
    plant.place(*start)
    state = plant.state()
    assert plant.step() == pytest.approx(matrix(k, v, rho, r, s, -1.0) @ state, abs=1e-13)


@given(
    st.floats(0.001, 0.06),
    st.tuples(st.floats(0.1, 20.0), st.floats(0.0, 1.0)),
    st.tuples(sizes, sizes, sizes),
    st.tuples(*[st.floats(-6.0, 6.0)] * 3),
    st.sampled_from([("linear", 0.0), ("tanh", 0.0), ("linear", 0.03), ("tanh", 0.03)]),
)
@example(0.05, (0.1, 0.5), (-2.0, 1.0, 1.0), (0.0, 0.0, 0.5), ("linear", 0.0))  # each sign of rho is needed
@example(0.05, (0.1, 0.5), (2.0, 1.0, 1.0), (0.0, 0.0, 0.5), ("linear", 0.0))
@example(0.06, (20.0, 0.5), (0.0, 1.0, 1.0), (-6.0, 0.0, 0.0), ("linear", 0.0))  # a clamp stops short of every member
def test_every_step_of_the_shipped_laws_lies_in_the_hull_of_the_vertices(
    k: float,
    varentropies: tuple[float, float],
    effects: tuple[float, float, float],
    start: tuple[float, float, float],
    shape: tuple[str, float],
) -> None:
    """With clamps, rate limit, tanh and a band that saturates: no function that falls at the vertices ever rises."""
    rho, r, s = effects
    least, share_v = varentropies
    v = least + share_v * (V_MAX - least)
    law = {"gain": k, "phi": shape[0], "rate_limit": shape[1], "t_min": 0.05}
    run = make(law, {**STEEP, "widen_after": 1})
    plant = Plant(run, v, rho, r, s)
    x, before = np.clip(start[:2], math.log(0.05), math.log(1.6)).tolist()
    plant.place(x, before, min(max(start[2], -0.5), 0.5))
    state = plant.state()
    error = abs(v * state[0] + rho * state[2])
    share = least_share(run.loop.temperature.config, Fraction(max(error, 1e-9)))
    v_max = Fraction(maximum(N).upper)
    c = Coupling(Fraction(k), share, Fraction(least), v_max, v_max, *map(Fraction, (2.0, 2.0, 2.0, 1.0)))
    after = plant.step()
    corners = [[[float(x) for x in row] for row in a] for a in vertices(c)]
    assert len(corners) <= 42
    images = np.array(corners) @ state
    directions = [*np.eye(3), *-np.eye(3), *np.random.default_rng(0).normal(size=(20, 3))]
    for direction in directions:  # inside a hull: below the most in every direction
        assert direction @ after <= (images @ direction).max() + 1e-9 * (1.0 + np.abs(images).max())


@settings(max_examples=60)
@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=60), st.integers(1, 5), st.floats(0.0, 3.0))
def test_a_budget_that_waits_is_one_asked_for_at_most_widen_after_minus_1_tokens_ago(
    entropies: list[float], dwell: int, first: float
) -> None:
    law = budget.Budget(budget.Config(theta_nats=0.0, theta_wide_nats=1.0, entropy_high_nats=2.5, widen_after=dwell))
    theta, timer = np.array([float(law.wanted(np.array([first]))[0])]), np.array([0])
    wanted: list[float] = []
    for h in entropies:
        theta, timer = law.update(theta, timer, np.array([h]))
        wanted.append(float(law.wanted(np.array([h]))[0]))
        if len(wanted) >= dwell:
            assert float(theta[0]) in wanted[-dwell:]


# -- small gain: both sides

SHARP = {"varentropy_min": 0.25, "rho": 0.5, "r": 0.5, "error_nats": 2.0}
LIMIT_S = 0.25 * (1 - 0.5) / 0.5  # rho s slope = V_lo (1 - slope r) with slope 1


@pytest.mark.parametrize("dwell", [1, 4])
def test_small_gain_is_sharp_at_the_steady_end_on_the_shipped_laws(dwell: int) -> None:
    run = make({"gain": 0.05}, {**STEEP, "widen_after": dwell})
    assert decide(run, s=0.999 * LIMIT_S, **SHARP)["small-gain"].status == "proved"
    assert decide(run, s=1.001 * LIMIT_S, **SHARP)["small-gain"].status == "refuted"
    assert decide(run, s=LIMIT_S, **SHARP)["small-gain"].status == "refuted"
    ends = {}
    for factor in (0.8, 1.2):
        # theta narrower, u higher, entropy higher, theta narrower: every sign feeds the deviation
        path = Plant(run, 0.25, 0.5, -0.5, factor * LIMIT_S).run_from(0.002, 0.002, -0.001, 700)
        ends[factor] = np.abs(path[-1]).max() / 0.002
        if factor > 1:
            assert (np.diff(path[:200, 2]) < 0).all()
    assert ends[0.8] < 0.3
    assert ends[1.2] > 3.0


def test_small_gain_is_sharp_at_the_alternating_end_for_a_budget_that_follows_at_once() -> None:
    k, slope, r, rho = 1.9 / V_MAX, 1.0, 0.5, 0.5
    limit = (2 - k * V_MAX) * (1 - slope * r) / (k * rho * slope)
    for dwell, above in ((1, "refuted"), (4, "unknown")):
        sharpest = {"gain": k, "rate_limit": 0.0, "target_nats": maximum(N).entropy_nats}  # its V* is V_max(n)
        run = make(sharpest, {**STEEP, "widen_after": dwell})
        assumed = {**SHARP, "varentropy_min": 5.0}
        assert decide(run, s=0.999 * limit, **assumed)["small-gain"].status == "proved"
        assert decide(run, s=1.001 * limit, **assumed)["small-gain"].status == above
    run = make({"gain": k, "rate_limit": 0.0}, {**STEEP, "widen_after": 1})
    for factor, grows in ((0.9, False), (1.1, True)):
        s = factor * limit
        a = matrix(k, V_MAX, rho, -r, s, -1.0)
        alternating = max(
            (matrix(k, V_MAX, sign * rho, sr * r, s, -1.0) for sign in (-1, 1) for sr in (-1, 1)), key=radius
        )
        assert (radius(alternating) > 1) == grows
        assert radius(a) <= radius(alternating)
        sign, sr = -alternating[0, 2] / (k * rho), -alternating[2, 2] / r
        path = Plant(run, V_MAX, sign * rho, sr * r, s).run_from(1e-3, -1e-3, 1e-3, 300)
        assert (np.abs(path[-1, 0]) > 2e-3) == grows


def radius(a: np.ndarray) -> float:
    return float(np.abs(np.linalg.eigvals(a)).max())


couplings = st.builds(
    lambda k, v, width, rho, r, s, slope: Coupling(
        Fraction(k), Fraction(1), Fraction(v), Fraction(v + width), Fraction(v + width),
        Fraction(rho), Fraction(r), Fraction(s), Fraction(slope)
    ),
    st.floats(0.01, 1.0), st.floats(0.05, 2.0), st.floats(0.0, 2.0), st.floats(0.01, 3.0), st.floats(0.0, 1.0),
    st.floats(0.01, 3.0), st.floats(0.01, 2.0),
)  # fmt: skip


def product(c: Coupling) -> float:
    """The loop product, worked out again from its parts."""
    k, low, high, rho, r, s, g = (float(x) for x in (c.gain, c.v_min, c.v_max, c.rho, c.r, c.s, c.slope))
    if g * r >= 1 or k * high >= 2:
        return math.inf
    return max(rho / low, k * rho / (2 - k * high)) * s * g / (1 - g * r)


@given(couplings)
def test_small_gain_holds_exactly_where_every_member_is_stable(c: Coupling) -> None:
    if abs(product(c) - 1) < 1e-5:
        return
    worst = max(radius(np.array([[float(x) for x in row] for row in a])) for a in vertices(c))
    assert (worst < 1) == (product(c) < 1)


@given(couplings, st.floats(0.01, 0.99), st.sampled_from([2**3, 2**30]))
def test_every_extreme_member_lies_in_the_hull_of_the_rounded_rows(c: Coupling, share: float, grid: int) -> None:
    """Exactly, row by row: above (a falling to the left) for row 1, below the rounded slope for row 3."""
    c = dataclasses.replace(c, share=Fraction(share))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coupled_check, "_GRID", grid)  # a coarse grid shows the rounding
        rows = vertices(c)
    firsts = {(1 - a[0][0], a[0][2]) for a in rows if any(a[0])}
    for pull, push in ((c.share * c.v_min, c.share * c.rho), (c.v_min, c.rho)):
        for sign in (-1, 1):  # a hull that reaches further left and further out holds it
            assert any(a <= c.gain * pull and sign * b >= c.gain * push for a, b in firsts)
    assert any(a >= c.gain * c.v_max and b >= c.gain * c.rho for a, b in firsts)
    thirds = {(-a[2][1], a[2][2]) for a in rows if any(a[2])}
    for sign in (-1, 1):  # (G, sign G r) lies in the triangle of (0, 0) and the two (g, -+ own)
        assert any(g >= c.slope and sign * own >= g * c.r for g, own in thirds)
    assert max(a[1][0] for a in rows) >= c.s


def test_a_vocabulary_whose_entropies_all_lie_below_the_band_has_no_slope() -> None:
    """At n = 2 no entropy is above ln 2 < 1 = low: the wide budget is all that is asked for, so theta never moves."""
    band = {"theta_wide_nats": 0.5, "entropy_low_nats": 1.0, "entropy_high_nats": 3.0}
    for law in ("fixed", "feedback"):
        run = make({"law": law, **({"target_nats": 0.3} if law == "feedback" else {})}, band)
        assert decide(run, 32_000, r=10.0)["small-gain"].status == "refuted"
        assert decide(run, 2, r=10.0)["small-gain"].status == "proved"
        assert float(decide(run, 2, r=10.0)["small-gain"].numbers["entropy_to_theta"]) == 0.0
        assert decide(run, 3, r=10.0)["small-gain"].status == "refuted"  # ln 3 = 1.0986
    wanted = budget.Budget(run.loop.pruning.config).wanted(np.linspace(0, math.log(2), 50))
    assert (wanted == 0.5).all()


@settings(max_examples=40, deadline=None)
@given(couplings)
def test_a_diagonal_function_exists_exactly_where_small_gain_holds(c: Coupling) -> None:
    """lambda = 1: P_i = left_i / right_i of the Perron vectors of the largest absolute matrix."""
    value = product(c)
    corners = vertices(c)
    if value < 0.999:
        most = np.array([[[abs(float(x)) for x in row] for row in a] for a in corners]).max(axis=0) + 1e-13
        right, left = (np.abs(perron(m)) for m in (most, most.T))
        p = np.diag(left / right)
        assert verified(p, Fraction(1), corners) is not None
    elif value > 1.001:
        p = solve(np.array([[[float(x) for x in row] for row in a] for a in corners]))
        assert p is None or verified(p, Fraction(1), corners) is None


def perron(a: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eig(a)
    return np.real(vectors[:, np.argmax(np.abs(values))])


# -- one quadratic function

AT_ONCE = {"widen_after": 1}


def test_a_function_is_found_checked_and_falls_along_shipped_trajectories() -> None:
    run = make({"gain": 0.05}, {**STEEP, **AT_ONCE})
    assumed = {"varentropy_min": 0.1, "rho": 0.1, "r": 0.1, "s": 0.2, "error_nats": 4.0}
    certificate = search.prove(run, N, Assumptions(**assumed))
    claim = next(c for c in certificate["claims"] if c["theorem"] == "coupled")
    assert claim["status"] == "proved"
    decay = float(Fraction(claim["numbers"]["decay_squared"]))
    assert (1 - 0.05 * 0.1) ** 2 <= decay < 1 - 0.5 * 0.05 * 0.1 * 2  # no faster than u alone, at least half as fast
    p = np.array([[float(Fraction(x)) for x in row] for row in certificate["hints"]["lyapunov"]])
    rng = np.random.default_rng(1)
    for _ in range(40):
        v, signs = rng.uniform(0.1, V_MAX), rng.uniform(-1, 1, 3)
        plant = Plant(run, v, 0.1 * signs[0], 0.1 * signs[1], 0.2 * signs[2])
        x, before = rng.uniform(-1.2, 0.4, 2) * min(1.0, 3.9 / v)
        plant.place(x, before, rng.uniform(-0.5, 0.5) * 0.1)
        for _ in range(20):
            state = plant.state()
            after = plant.step()
            assert after @ p @ after <= decay * (state @ p @ state) + 1e-15


def test_two_histories_fed_the_same_changing_text_come_together_at_the_certified_rate() -> None:
    """Number `incremental`: effects and offsets change at every token, the same for both copies of the shipped laws."""
    run = make({"gain": 0.05}, {**STEEP, **AT_ONCE})
    certificate = search.prove(run, N, Assumptions(rho=0.1, r=0.1, s=0.2))
    numbers = next(c["numbers"] for c in certificate["claims"] if c["theorem"] == "coupled")
    assert numbers["incremental"] is True
    decay = float(Fraction(numbers["decay_squared"]))
    p = np.array([[float(Fraction(x)) for x in row] for row in certificate["hints"]["lyapunov"]])
    rng = np.random.default_rng(3)
    law, meso, _ = run.loop.build()
    u, theta, timer = rng.uniform(-1.2, 0.45, 64), rng.uniform(0.5, 1.5, 64), np.zeros(64, np.int64)
    before, s = u.copy(), 0.0
    for _ in range(200):
        v, rho, r = rng.uniform(0.1, V_MAX), rng.uniform(-0.1, 0.1), rng.uniform(-0.1, 0.1)
        state = np.array([u[::2] - u[1::2], s * (before[::2] - before[1::2]), theta[::2] - theta[1::2]])
        tempered = law.config.target_nats + v * (u - u.mean()) + rho * theta + rng.normal(0, 0.3)
        tempered = np.clip(
            tempered, law.config.target_nats - 4, law.config.target_nats + 4
        )  # chord slopes below V only
        clipped = np.abs(tempered - law.config.target_nats) == 4
        model = 1.5 + s * before + r * theta + rng.normal(0, 0.3)
        before, s = u, rng.uniform(-0.2, 0.2)
        u = law.update(u, tempered)
        theta, timer = meso.update(theta, timer, model)
        after = np.array([u[::2] - u[1::2], s * (before[::2] - before[1::2]), theta[::2] - theta[1::2]])
        free = ~(clipped[::2] | clipped[1::2])
        grown = np.einsum("in,ij,jn->n", after, p, after) / (np.einsum("in,ij,jn->n", state, p, state) + 1e-300)
        assert (grown[free] <= decay + 1e-9).all()
    tanh = make({"phi": "tanh"}, {**STEEP, **AT_ONCE})
    assert decide(tanh)["coupled"].numbers["incremental"] is False


def test_at_zero_varentropy_there_is_none_and_u_stays_on_the_shipped_laws() -> None:
    run = make({}, {**STEEP, **AT_ONCE})
    found = decide(run, varentropy_min=0.0)
    assert (found["coupled"].status, found["small-gain"].status) == ("refuted", "refuted")
    assert "V = 0" in found["coupled"].reason
    path = Plant(run, 0.0, 0.0, 0.0, 0.1).run_from(0.2, 0.2, 0.0, 50)
    assert (path[:, 0] == 0.2).all()
    least = decide(run, varentropy_min=5e-324)  # the smallest V > 0 there is: true, but no P on the grid shows it
    assert least["coupled"].status in ("unknown", "refuted")


def test_where_tanh_takes_little_of_the_error_stable_loops_are_left_without_a_function() -> None:
    pruning = {**STEEP, **AT_ONCE}
    assumed = {"varentropy_min": 0.1, "rho": 0.05, "r": 0.01, "s": 1.8}
    found = {
        scale: decide(make({"phi": "tanh", "phi_scale_nats": scale}, pruning), **assumed) for scale in (50.0, 0.02)
    }
    assert [f["small-gain"].status for f in found.values()] == ["proved", "proved"]
    assert [f["coupled"].status for f in found.values()] == ["proved", "unknown"]


def test_least_share_is_least() -> None:
    for phi, scale, rate, error in (("tanh", 2.0, 0.25, 4.0), ("tanh", 0.5, 0.01, 3.0), ("linear", 2.0, 0.01, 4.0)):
        law = feedback.Config(phi=phi, phi_scale_nats=scale, rate_limit=rate, gain=0.05, t_min=0.01, t_max=10.0)
        errors = np.linspace(1e-3, error, 400)
        moved = -feedback.Feedback(law).update(np.zeros(400), law.target_nats + errors)
        shares = moved / (0.05 * errors)
        assert float(least_share(law, Fraction(error))) == pytest.approx(shares.min(), rel=1e-9)
        assert shares.max() <= 1 + 1e-9


BAD_P = {
    "indefinite": [["1", "0", "0"], ["0", "-1", "0"], ["0", "0", "1"]],
    "nearly singular": [["1", "0", "0"], ["0", "-1/2000000000", "0"], ["0", "0", "1"]],
    "singular": [["1", "0", "0"], ["0", "0", "0"], ["0", "0", "1"]],
    "not symmetric": [["1", "1/2", "0"], ["0", "1", "0"], ["0", "0", "1"]],
    "too small": [["1", "0"], ["0", "1"]],
    "NaN": [["NaN", "0", "0"], ["0", "1", "0"], ["0", "0", "1"]],
    "identity, which does not fall": [["1", "0", "0"], ["0", "1", "0"], ["0", "0", "1"]],
}


@pytest.mark.parametrize("p", BAD_P.values(), ids=BAD_P)
def test_a_matrix_that_proves_nothing_is_refused(p: list[list[str]]) -> None:
    run = make({}, {**STEEP, **AT_ONCE})
    certificate = search.prove(run, N, Assumptions(s=1.5))
    assert check.check(certificate, run, N)
    certificate["hints"]["lyapunov"] = p
    with pytest.raises(BadInputError, match="lyapunov"):
        check.check(certificate, run, N)


def test_a_rate_that_is_too_fast_or_a_missing_matrix_is_refused() -> None:
    run = make({}, {**STEEP, **AT_ONCE})
    certificate = search.prove(run, N)
    for rate in ("1/2", "1", "-1/2", "0"):
        edited = json.loads(json.dumps(certificate))
        edited["hints"]["lyapunov_decay"] = rate
        with pytest.raises(BadInputError, match="lyapunov"):
            check.check(edited, run, N)
    del certificate["hints"]["lyapunov"]
    with pytest.raises(BadInputError, match="claims"):
        check.check(certificate, run, N)


def test_solver_status_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that always answers 'identity' gets nothing past the exact check."""
    monkeypatch.setattr(coupled, "solve", lambda matrices, decay=1.0: np.eye(3))
    found = decide(make({}, {**STEEP, **AT_ONCE}), s=1.5)
    assert (found["coupled"].status, found["small-gain"].status) == ("unknown", "proved")


@settings(max_examples=40)
@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.floats(-0.9, 0.9))
def test_rounding_keeps_a_matrix_close_and_symmetric(a: float, b: float, correlation: float) -> None:
    p = np.array([[a, correlation * math.sqrt(a * b), 0], [correlation * math.sqrt(a * b), b, 0], [0, 0, 1.0]])
    q = np.array([[float(x) for x in row] for row in rounded(p, 24)])
    assert (q == q.T).all()
    ratio = q[0, 0] / p[0, 0]
    size = np.sqrt(np.diag(p))
    assert np.abs((q / ratio - p) / np.outer(size, size)).max() < 1e-6


def test_falls_decides_exactly() -> None:
    """Case P1 in two dimensions: a contraction by 1 - 1e-9 is seen, one by 1 + 1e-9 is never accepted."""
    one = [[Fraction(1), Fraction(0)], [Fraction(0), Fraction(1)]]
    for error, expected in ((Fraction(-1, 10**9), True), (Fraction(0), False), (Fraction(1, 10**9), False)):
        a = [[1 + error, Fraction(0)], [Fraction(0), Fraction(1, 2)]]
        assert falls(one, Fraction(1), [a]) is expected


# -- theta as a bounded input


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.3, 1.0), st.sampled_from(["linear", "tanh"]), st.sampled_from([0.0, 0.05]))
def test_whatever_theta_does_the_entropy_ends_within_its_bound(seed: int, factor: float, phi: str, rate: float) -> None:
    """k V_max(n) <= 1: random and worst-case disturbances on random logits, with the shipped law."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(3, 40))
    plant = phase.logits_plant(rng.normal(0, 3, n))
    target = float(plant(np.array([rng.uniform(-0.3, 0.3)]))[0])
    gain = min(factor / float(maximum(n).upper), 10.0)
    law = feedback.Feedback(
        feedback.Config(target_nats=target, gain=gain, phi=phi, rate_limit=rate, t_min=0.2, t_max=5.0)
    )
    delta = rng.uniform(0.0, 0.1)
    u = np.array([math.log(0.2), math.log(5.0), 0.1])
    excess = np.maximum(np.abs(plant(u) - target) - delta, 0.0)
    for step in range(1000):
        away = np.sign(plant(u) - target) if step % 3 else rng.uniform(-1, 1, 3)
        u = law.update(u, plant(u) - delta * away)  # mostly pushes away from the target
        before, excess = excess, np.maximum(np.abs(plant(u) - target) - delta, 0.0)
        assert (excess <= before + 1e-12).all()  # never further from the band: so what is inside stays inside
    assert excess.max() < 1e-3


def test_the_entropy_bound_is_attained_and_fails_just_past_gain_1_over_v_max() -> None:
    sharp = maximum(N)
    plant = phase.two_level_plant(N, sharp.logit)
    delta = 1e-3

    def worst(factor: float) -> float:
        law = feedback.Feedback(
            feedback.Config(
                target_nats=sharp.entropy_nats, gain=factor / float(sharp.upper), t_min=0.2, t_max=5.0, rate_limit=0.0
            )
        )
        u, most = np.array([0.01]), 0.0
        for step in range(600):
            error = float(plant(u)[0]) - sharp.entropy_nats
            u = law.update(u, plant(u) + delta * math.copysign(1.0, error if factor > 1 else 1.0))
            if step > 500:
                most = max(most, abs(float(plant(u)[0]) - sharp.entropy_nats))
        return most

    assert worst(1.0) == pytest.approx(delta, rel=1e-6)
    assert worst(1.05) > 1.04 * delta
    run = {f: make({"gain": f / float(sharp.upper)}) for f in (0.999, 1.001)}
    numbers = {f: decide(r)["switching-theta"].numbers for f, r in run.items()}
    assert float(numbers[0.999]["entropy_bound_nats"]) == pytest.approx(0.05 * 0.01)
    assert numbers[1.001]["entropy_bound_nats"] is None


@pytest.mark.parametrize("v", [0.25, V_MAX])
@pytest.mark.parametrize("k", [0.02, 1.9 / V_MAX])
def test_the_bound_on_u_holds_and_is_attained_by_the_shipped_laws(v: float, k: float) -> None:
    run = make({"gain": k, "rate_limit": 0.0}, STEEP)
    bound = float(decide(run, varentropy_min=0.25, rho=0.05)["switching-theta"].numbers["u_bound"])
    law, span, rho = run.loop.build()[0], 1.0, 0.05
    u, most = np.zeros(1), 0.0
    for step in range(3000):
        theta = span if k * v < 1 or step % 2 else -span
        u = law.update(u, law.config.target_nats + v * u + rho * theta)
        most = max(most, abs(float(u[0])))
    assert most <= bound * (1 + 1e-9)
    if (v == V_MAX) == (k > 0.02):  # steady push at V_lo, alternating push at V_max: the larger one is attained
        own = max(rho / 0.25, k * rho / (2 - k * V_MAX))
        expected = rho / v if k * v < 1 else k * rho / (2 - k * v)
        assert most == pytest.approx(expected, rel=1e-3)
        assert bound == pytest.approx(own, rel=1e-9)


# -- what each status needs


@pytest.mark.parametrize(
    ("temperature", "pruning", "tables", "assumed", "expected"),
    [
        ({}, {}, {}, {}, ("not applicable", "proved", "proved", "unknown")),
        ({}, AT_ONCE, {}, {"r": 0.2}, ("proved", "proved", "proved", "proved")),
        ({}, {"law": "off"}, {}, {}, ("not applicable",) * 4),
        ({"gain": -0.02}, AT_ONCE, {}, {}, ("refuted", "refuted", "refuted", "unknown")),
        ({"gain": 0.1}, AT_ONCE, {}, {}, ("unknown", "unknown", "unknown", "unknown")),  # k V_max > 2 > k V*
        ({"gain": 0.2}, AT_ONCE, {}, {}, ("refuted", "refuted", "refuted", "unknown")),  # k V* > 2
        ({"gain": 0.05}, AT_ONCE, {}, {"varentropy_min": 0.0}, ("refuted", "refuted", "unknown", "unknown")),
        ({}, AT_ONCE, {"engine": {"observation_lag": 1}}, {}, ("unknown", "unknown", "unknown", "unknown")),
        ({}, AT_ONCE, {"speculation": {"draft_tokens": 2}}, {}, ("unknown", "unknown", "unknown", "unknown")),
        ({}, AT_ONCE, {}, {"varentropy_min": 40.0}, ("not applicable", "not applicable", "proved", "proved")),
        ({"temperature": 0.0}, {}, {}, {}, ("not applicable", "proved", "not applicable", "not applicable")),
        ({"t_min": 0.8, "t_max": 0.8}, {}, {}, {}, ("not applicable", "proved", "not applicable", "not applicable")),
    ],
)  # fmt: skip
def test_statuses(temperature: Any, pruning: Any, tables: Any, assumed: Any, expected: Any) -> None:
    assert statuses(make(temperature, pruning, **tables), **assumed) == expected


@pytest.mark.parametrize(
    ("law", "s", "assumed", "expected"),
    [
        ("fixed", 100.0, {}, "proved"),
        ("fixed", 0.0, {"r": 1.0}, "refuted"),
        ("solve", 0.99 * LIMIT_S, {}, "proved"),
        ("solve", 1.01 * LIMIT_S, {}, "refuted"),
        ("damped", 1.98 * LIMIT_S, {}, "proved"),
        ("damped", 2.02 * LIMIT_S, {}, "refuted"),
        ("solve", 0.1, {"varentropy_min": 0.0}, "refuted"),
        ("solve", 0.1, {"varentropy_min": 0.0, "rho": 0.0}, "proved"),
        ("solve", 0.0, {"varentropy_min": 0.0}, "unknown"),
    ],
)
def test_laws_without_state_couple_too(law: str, s: float, assumed: dict[str, float], expected: str) -> None:
    loop = {"temperature": {"law": law}, "pruning": {"law": "budget", **STEEP}}
    found = decide(config.from_mapping({"loop": loop}), s=s, **{**SHARP, **assumed})
    assert found["small-gain"].status == expected
    assert found["coupled"].status == found["switching-theta"].status == "not applicable"


@given(st.floats(0.01, 2.0), st.floats(0.01, 2.0), st.floats(0.01, 2.0), st.floats(0.01, 5.0))
def test_the_relative_gain_is_inverse_times_transpose_for_every_sign(rho: float, r: float, s: float, v: float) -> None:
    from proofs.check.base import Subject
    from proofs.check.small_gain import pairing

    claim = pairing(Subject(make(), N, Assumptions(varentropy_min=v, rho=rho, r=r, s=s)))
    gains = []
    for signs in np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, -1).T:
        for varentropy in (v, 2 * v, 30 * v):
            plant = np.array([[varentropy, signs[0] * rho], [signs[1] * s, signs[2] * r]])
            if abs(np.linalg.det(plant)) > 1e-9:
                gains.append((plant * np.linalg.inv(plant).T)[0, 0])
    if claim.status == "proved":
        low, high = (float(claim.numbers[f"relative_gain_{end}"]) for end in ("low", "high"))
        assert low <= min(gains) * (1 + 1e-6)
        assert max(gains) <= high * (1 + 1e-6)
        assert low >= 0.5
    else:
        assert min(gains) <= 0.5 + 1e-6


@pytest.mark.parametrize(
    ("run", "used"),
    [
        (make({"gain": 0.1}, {"widen_after": 1}), False),  # refuted: the solver is not asked
        (make({"gain": 0.02}, {"widen_after": 1}), True),
        (make({"gain": 0.02}, {"widen_after": 2}), False),
        (make(pruning={"law": "off"}), False),
    ],
)
def test_a_certificate_names_the_solver_only_where_it_was_asked(
    run: Any, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(coupled, "solve", lambda *given: asked.append(given))
    subject = check.Subject(run, N, Assumptions())
    coupled.hints(subject)
    assert bool(asked) is used
    named = search.tools(subject)
    assert named.get("cvxpy") == (importlib.metadata.version("cvxpy") if used else None)
    assert named["python-flint"]
