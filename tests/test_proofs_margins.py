from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import control
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from entropic_ctl import config as configs
from entropic_ctl.errors import BadInputError
from entropic_ctl.policy import Policy
from entropic_ctl.pruning.laws import budget
from entropic_ctl.temperature import feedback
from proofs import linear_loop, margins, margins_coupled, margins_report, theory
from proofs.check import Assumptions
from proofs.check.coupled import vertices as corners_of
from proofs.check.small_gain import Coupling
from proofs.margins_coupled import Plant
from proofs.phase import two_level_plant


def make(gain: float = 0.1, lag: int = 0, **more: Any) -> configs.RunConfig:
    temperature = {"law": "feedback", "gain": gain, "rate_limit": 0.0, "t_min": 0.001, "t_max": 10.0, **more}
    pruning = {"law": "budget", "theta_nats": 0.02, "theta_wide_nats": 0.12, "widen_after": 1}
    return configs.from_mapping(
        {"engine": {"observation_lag": lag}, "loop": {"temperature": temperature, "pruning": pruning}}
    )


def radius(run: configs.RunConfig, v: float, **more: Any) -> float:
    _, T = linear_loop.closed(margins.loop(run, v, **more))
    return float(np.abs(T.poles()).max())


GAINS, SLOPES = st.floats(0.001, 2.5), st.floats(0.05, 40.0)


# -- one loop: closed forms --------------------------------------------------------------------------------------------


@given(GAINS, SLOPES, st.sampled_from([0, 1]))
@settings(max_examples=20, deadline=None)
def test_gain_phase_and_delay_margins_are_the_closed_forms(k: float, v: float, lag: int) -> None:
    found = margins.margins(make(k, lag), v)
    g = k * v
    assert found.gain_margin * g == pytest.approx(theory.delay_limit(lag), rel=1e-9)
    assert found.gain_limit * v == pytest.approx(theory.delay_limit(lag), rel=1e-9)
    if g < 2.0 * (1 - 1e-12):
        w = 2.0 * math.asin(g / 2.0)
        phase = math.pi / 2 - w * (lag + 0.5)
        assert found.crossover == pytest.approx(w, rel=1e-9)
        assert math.radians(found.phase_margin_deg or math.nan) == pytest.approx(phase, abs=1e-9)
        assert found.delay_margin == pytest.approx(phase / w, rel=1e-9, abs=1e-9)
    else:
        assert found.phase_margin_deg is None
    assume(abs(g - theory.delay_limit(lag)) > 1e-9)
    assert found.stable == (g < theory.delay_limit(lag)) == (found.spectral_radius < 1)
    total = found.delay_margin_steps + lag
    if total >= 0:
        assert g < theory.delay_limit(total) * (1 + 1e-8)
    assert g >= theory.delay_limit(total + 1) * (1 - 1e-8)


@pytest.mark.parametrize("b", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("g", [0.01, 0.7, 1.9, 3.0])
def test_a_filter_moves_the_limit_at_lag_0_and_leaves_it_at_lag_1(b: float, g: float) -> None:
    """4/b - 2 at lag 0; exactly 1 at lag 1 whatever the weight: the determinant is 1 - b + g b."""
    for lag, limit in ((0, theory.ema_limit(b)), (1, 1.0)):
        found = margins.margins(make(g, lag), 1.0, ema=b)
        assert found.gain_margin * g == pytest.approx(limit, rel=1e-9)
        for factor, stable in ((0.999, True), (1.001, False)):
            assert (radius(make(g, lag), 1.0, ema=b, gain=factor * limit) < 1) == stable


@given(st.floats(0.01, 1.99))
@settings(max_examples=15, deadline=None)
def test_peak_modulus_and_disk_margin_at_lag_0(g: float) -> None:
    """|S| peaks at pi: 2 / (2 - g); alpha = 2 (2 - g) / (2 + g); the disk's gains are g/2 and 2/g."""
    found = margins.margins(make(g), 1.0)
    assert found.sensitivity_peak == pytest.approx(2 / (2 - g), rel=1e-9)
    assert found.modulus_margin == pytest.approx((2 - g) / 2, rel=1e-9)
    assert found.disk_margin == pytest.approx(2 * (2 - g) / (2 + g), rel=1e-9)
    assert found.disk_gain_low == pytest.approx(g / 2, rel=1e-8)
    assert found.disk_gain_high == pytest.approx(found.gain_margin, rel=1e-8)
    assert found.spectral_radius == pytest.approx(abs(1 - g), abs=1e-12)


@given(st.floats(0.02, 0.95), st.sampled_from([0, 1]), st.sampled_from([1.0, 0.4]))
@settings(max_examples=8, deadline=None)
def test_disk_and_delay_margins_hold_on_the_poles(g: float, lag: int, b: float) -> None:
    """Any real gain in the disk keeps the loop stable; the whole tokens of delay do, one more does not."""
    run = make(g, lag)
    found = margins.margins(run, 1.0, ema=b)
    assert found.disk_gain_low is not None
    assert found.disk_gain_high is not None
    for factor in np.linspace(found.disk_gain_low * 1.001, min(found.disk_gain_high, 1e3) * 0.999, 7):
        assert radius(run, 1.0, ema=b, gain=g * float(factor)) < 1
    last = lag + found.delay_margin_steps
    if last < 40 and abs((found.delay_margin or 0) - round(found.delay_margin or 0)) > 1e-6:
        assert radius(run, 1.0, ema=b, lag=last) < 1 < radius(run, 1.0, ema=b, lag=last + 1)


def test_the_library_misses_the_crossing_at_nyquist() -> None:
    """Why gain margins are bracketed here: python-control answers infinity where the truth is 2 / (k V)."""
    L = margins.loop(make(0.5), 1.0)
    with np.errstate(all="ignore"), pytest.warns():
        library = control.stability_margins(L)[0]
    assert margins.margins(make(0.5), 1.0).gain_margin == pytest.approx(4.0, rel=1e-12)
    if math.isfinite(library):
        assert library == pytest.approx(4.0)  # it has been mended: margins.py can use it


@pytest.mark.parametrize(("g", "lag"), [(0.3, 0), (1.5, 0), (0.4, 1), (0.9, 1), (0.002, 0)])
def test_step_response_and_settling_are_those_of_the_shipped_law(g: float, lag: int) -> None:
    """Shipped ``Feedback.update`` on y = V u: the entropy's approach to a new target is T's step response."""
    v, tokens = 0.5, 4000
    law = feedback.build(make(g / v, lag, target_nats=0.25, temperature=1.0).loop.temperature.config)
    u, seen = np.zeros(1), []
    for t in range(tokens):
        seen.append(v * u)
        if t >= lag:
            u = np.asarray(law.update(u, seen[t - lag]))
    entropy = np.array(seen)[:, 0] / 0.25
    run = make(g / v, lag)
    _, T = linear_loop.closed(margins.loop(run, v))
    np.testing.assert_allclose(entropy[lag:], linear_loop.step(T, tokens)[lag:], atol=1e-11)
    np.testing.assert_allclose(linear_loop.step(T, 1500), linear_loop.step(T, tokens)[:1500], atol=1e-11)
    found = margins.margins(run, v)
    outside = np.flatnonzero(np.abs(entropy - 1) > 0.02)
    assert found.settling_tokens == outside[-1] + 1
    assert found.overshoot == pytest.approx(max(0.0, entropy.max() - 1), abs=1e-11)


def test_bandwidths_are_where_the_power_halves() -> None:
    found = margins.margins(make(0.3), 1.0)
    S, T = linear_loop.closed(margins.loop(make(0.3), 1.0))
    assert found.bandwidth is not None
    assert found.rejection is not None
    assert abs(linear_loop.response(T, found.bandwidth)[0]) == pytest.approx(math.sqrt(0.5))
    assert abs(linear_loop.response(S, found.rejection)[0]) == pytest.approx(math.sqrt(0.5))
    assert margins.margins(make(1.5), 1.0).bandwidth is None  # |T| >= |T(pi)| = g / (2 - g) > 0.71


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: margins.margins(make(-0.1), 1.0), "gain"),
        (lambda: margins.margins(make(0.0), 1.0), "gain"),
        (lambda: margins.margins(make(), 0.0), "varentropy"),
        (lambda: margins.margins(make(), math.nan), "varentropy"),
        (lambda: margins.margins(make(), 1.0, ema=0.0), "ema"),
        (lambda: margins.loop(make(), 1.0, lag=-1), "lag"),
        (lambda: margins.margins(configs.RunConfig(), 1.0), "law"),
        (lambda: margins_coupled.coupled(make(), Plant(1, 0, 0, 0, 0), at="nowhere"), "at"),
        (lambda: margins_report.study(make(), 64, given=[-1.0]), "varentropy"),
        (lambda: margins_report.study(make(), 1), "vocab_size"),
    ],
)
def test_bad_input(call: Any, field: str) -> None:
    with pytest.raises(BadInputError, match=field):
        call()


# -- files -------------------------------------------------------------------------------------------------------------


def test_python_control_reads_back_what_was_exported(tmp_path: Path) -> None:
    study = margins_report.study(make(0.02, 1), 64)
    path = tmp_path / "loops.json"
    margins.save(path, study.systems)
    for name, system in study.systems.items():
        again = margins.load(path, name)
        for matrix in "ABCD":
            np.testing.assert_array_equal(getattr(again, matrix), getattr(system, matrix))
        assert (again.dt, again.state_labels, again.input_labels) == (1, system.state_labels, system.input_labels)
    first = margins.load(path)
    assert first.name == "v_max_L"
    closed = control.feedback(first, 1)
    assert np.abs(closed.poles()).max() == pytest.approx(study.loops[0].margins.spectral_radius)
    margins.save(tmp_path / "loops.mat", study.systems)
    from scipy.io import loadmat

    read = loadmat(tmp_path / "loops.mat", simplify_cells=True)["v_max_L"]
    np.testing.assert_array_equal(read["A"], first.A)
    assert list(read["states"]) == first.state_labels


def test_files_that_are_no_systems_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("{", "[]", '{"systems": {}}', '{"systems": {"a": {"A": 1}}}', '{"systems": 3}'):
        path.write_text(text)
        with pytest.raises(BadInputError):
            margins.load(path)
    margins.save(path, {"L": margins.loop(make(), 1.0)})
    with pytest.raises(BadInputError, match="no such system"):
        margins.load(path, "T")
    with pytest.raises(BadInputError, match="cannot read"):
        margins.load(tmp_path / "absent.json")
    with pytest.raises(BadInputError, match="export"):
        margins.save(tmp_path / "x.toml", {})


# -- the coupled loop --------------------------------------------------------------------------------------------------

EFFECT = st.floats(-2.0, 2.0)


@given(st.floats(0.05, 4.0), EFFECT, EFFECT, EFFECT, st.floats(0.1, 1.0), st.floats(0.1, 1.0), st.sampled_from([0, 1]))
@settings(max_examples=30, deadline=None)
def test_both_cuts_close_to_the_coupled_loop_and_have_one_margin(
    v: float, rho: float, r: float, s: float, b: float, c: float, lag: int
) -> None:
    run, g, k = make(0.3, lag), -0.4, 0.3
    plant = Plant(v, rho, r, s, g)
    closed = margins_coupled.coupled(run, plant, b=b, c=c)
    if lag == 0:
        rows = [
            [1 - k * v, 0, -k * rho, 0],
            [0, 1 - b, b * r, b],
            [0, c * g * (1 - b), 1 - c + c * g * b * r, c * g * b],
            [s, 0, 0, 0],
        ]
        np.testing.assert_allclose(closed.A, rows, atol=1e-14)
    w = np.array([0.01, 0.4, 2.0, math.pi])
    z = np.exp(1j * w)
    filtered = b * z / (z - 1 + b)
    laws = np.stack([k / (z - 1), -g * c * z / (z - 1 + c) * filtered / z], axis=-1)[:, :, None] * np.eye(2)
    through = np.stack([np.array([[v, rho], [s / x, r]]) for x in z])
    late = z[:, None, None] ** -lag
    for cut, expected in (("sensors", through @ laws * late), ("actuators", laws @ through * late)):
        L = margins_coupled.coupled(run, plant, at=cut, b=b, c=c)
        np.testing.assert_allclose(linear_loop.response(L, w), expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(L.A - L.B @ L.C, closed.A, atol=1e-13)
    both = [
        margins_coupled.disk_margin(margins_coupled.coupled(run, plant, at=cut), w) for cut in ("sensors", "actuators")
    ]
    np.testing.assert_allclose(both[0], both[1], rtol=1e-6)


@pytest.mark.parametrize("b", [1.0, 0.6])
def test_the_closed_loop_answers_added_entropies_as_its_two_cuts_say(b: float) -> None:
    """Entropies S d and actuators -K S d for entropies d added where they are read, at either lag."""
    w = np.array([0.02, 0.5, 2.5, math.pi])
    for lag in (0, 1):
        run, plant = make(0.2, lag), Plant(1.3, 0.6, 0.5, 0.3, -0.4)
        L = linear_loop.response(margins_coupled.coupled(run, plant, at="sensors", b=b), w)
        whole = linear_loop.response(margins_coupled.coupled(run, plant, b=b), w)
        S = np.linalg.inv(np.eye(2) + L)
        np.testing.assert_allclose(whole[:, :2], S, rtol=1e-9, atol=1e-12)
        through = np.stack([np.array([[1.3, 0.6], [0.3 / x, 0.5]]) for x in np.exp(1j * w)])
        np.testing.assert_allclose(whole[:, 2:], -np.linalg.solve(through, L @ S), rtol=1e-8, atol=1e-12)


def test_poles_are_those_of_the_checkers_matrix_at_every_corner() -> None:
    """The corners of :mod:`proofs.check.coupled`, without its zero rows: the same matrix, and a 0 for the filter."""
    run = make(0.05)
    k, slope = Fraction(run.loop.temperature.config.gain), Fraction(1, 2)
    lowest, highest = Fraction(1, 10), Fraction(28)
    rho, r, s = Fraction(3), Fraction(3, 4), Fraction(2)
    bounds = Coupling(k, Fraction(1), lowest, highest, highest, rho, r, s, slope)
    seen = 0
    for corner in corners_of(bounds):
        A = np.array(corner, float)
        if not A[0].any():
            continue  # a clamp
        g = A[2, 1]
        effects = (1 - A[0, 0]) / 0.05, -A[0, 2] / 0.05, A[2, 2] / g if g else 0.7, A[1, 0]
        loop = margins_coupled.coupled(run, Plant(*effects, g))
        wanted, found = np.poly(A), np.poly(loop.A)
        np.testing.assert_allclose(found, [*wanted, 0.0], atol=1e-12)
        radius = float(np.abs(np.linalg.eigvals(A)).max())
        assert float(np.abs(loop.poles()).max()) == pytest.approx(radius, abs=1e-6)
        seen += 1
    assert seen == 24


@pytest.mark.parametrize("lag", [0, 1])
def test_the_coupled_loop_is_the_linearisation_of_the_shipped_policy(lag: int) -> None:
    """``Policy`` with both laws on logits and a text that bend: central differences of one token are the state space.

    Signs and sizes of the effects are all different, so that no two entries can be taken for one another.
    """
    run = make(0.2, lag, target_nats=1.0, temperature=1.0)
    temperature, pruning, scheduling = run.loop.build()
    at, entropies = 0.0, two_level_plant(64, 4.9)
    middle, level = 0.07, 1.75
    varentropy = float(np.diff(entropies(np.array([at - 1e-5, at + 1e-5])))[0]) / 2e-5
    plant = Plant(varentropy, 0.6, 0.5, -0.3, margins_coupled.slope_of(run))
    shift = float(entropies(np.array([at]))[0]) - run.loop.temperature.config.target_nats
    assert pruning.wanted(np.array([level]))[0] == pytest.approx(middle)

    def token(state: np.ndarray) -> np.ndarray:
        """Let one token be accepted: (u, theta, u before, late tempered, late model) -> the same after it."""
        policy = Policy(temperature, pruning, scheduling, slots=1, observation_lag=lag)
        slot, sampled = np.array([0]), np.array([False])
        policy.start(slot)
        for late in state[3:].reshape(-1, 2):
            policy.observe(slot, late[1:] + level, late[:1] + 1.0, sampled)
        policy.u[0], policy.theta[0] = state[0], middle + state[1]
        tempered = entropies(state[:1]) - shift + 0.6 * state[1] * (1 + state[0])
        model = level - 0.3 * np.tanh(state[2:3]) + 0.5 * np.sin(state[1])
        policy.observe(slot, model, tempered, sampled)
        fresh = [tempered[0] - 1.0, model[0] - level] if lag else []
        return np.array([policy.u[0], policy.theta[0] - middle, state[0], *fresh])

    size = 3 + 2 * lag
    np.testing.assert_allclose(token(np.zeros(size)), 0.0, atol=1e-12)
    step = 1e-5
    jacobian = np.stack([(token(x) - token(-x)) / (2 * step) for x in step * np.eye(size)], axis=1)
    A = margins_coupled.coupled(run, plant).A
    keep = [0, 2, 3, *range(4, 4 + 2 * lag)]  # f only copies what was read
    np.testing.assert_array_equal(A[keep, 1], 0.0)
    units = np.diag([1.0, 1.0, plant.s, *[1.0] * (2 * lag)])  # text = s times the u before
    np.testing.assert_allclose(units @ jacobian, A[np.ix_(keep, keep)] @ units, atol=1e-8)


@pytest.mark.parametrize("lag", [0, 1])
def test_the_coupled_loop_runs_as_the_shipped_laws_do(lag: int) -> None:
    """Shipped laws (widen_after = 1) on the linear plant for 60 tokens: the same u and theta as the state space."""
    run = make(0.2, lag)
    c = run.loop.pruning.config
    plant = Plant(1.3, 0.6, 0.5, 0.3, margins_coupled.slope_of(run))
    theta0, h0, target = 0.07, 1.75, run.loop.temperature.config.target_nats
    assert budget.Budget(c).wanted(np.array([h0]))[0] == pytest.approx(theta0)
    policy = Policy(*run.loop.build(), slots=1, observation_lag=lag)
    policy.start(np.array([0]))
    policy.u[0], policy.theta[0], before = 0.2, theta0 + 0.01, -0.1
    shipped = []
    for _ in range(60):
        u, dt = policy.u.copy(), policy.theta - theta0
        shipped.append((u[0], dt[0]))
        tempered, model = target + plant.varentropy * u + plant.rho * dt, h0 + plant.s * before + plant.r * dt
        policy.observe(np.array([0]), model, tempered, np.array([False]))
        before = u[0]
    system = margins_coupled.coupled(run, plant)
    x = np.zeros(4 + 2 * lag)
    x[0], x[2], x[3] = 0.2, 0.01, 0.3 * (-0.1 if lag == 0 else 0.2)
    if lag:  # nothing is updated before the first late entropy arrives
        x[4:6] = [1.3 * 0.2 + 0.6 * 0.01, 0.3 * -0.1 + 0.5 * 0.01]
    linear = []
    for _ in range(60 - lag):
        linear.append((x[0], x[2]))
        x = system.A @ x
    np.testing.assert_allclose(np.array(shipped)[lag:], linear, atol=1e-12)


def test_structured_singular_value_is_the_worst_phase() -> None:
    """For two scalar blocks mu is the largest spectral radius over diagonal unitary matrices: scanned here."""
    rng = np.random.default_rng(7)
    M = rng.normal(size=(20, 2, 2)) + 1j * rng.normal(size=(20, 2, 2))
    M[0, 0, 1] = M[1, 1, 0] = 0.0
    phases = np.exp(1j * np.linspace(0, 2 * np.pi, 2001))
    turned = np.stack([np.array([[1, 1], [p, p]]) for p in phases])[None] * M[:, None]
    scanned = np.abs(np.linalg.eigvals(turned)).max(axis=(1, 2))
    np.testing.assert_allclose(margins_coupled.structured(M), scanned, rtol=1e-5)


def test_multi_loop_disk_margin_holds_for_gains_and_breaks_somewhere_past_it() -> None:
    run, plant = make(0.4), Plant(1.5, 3.0, 0.8, 1.2, -0.4)
    w = linear_loop.frequencies(0.6, 400)
    alpha = float(margins_coupled.disk_margin(margins_coupled.coupled(run, plant, at="sensors"), w).min())
    one = margins.margins(run, 1.5).disk_margin
    assert one is not None
    assert 0 < alpha < one  # both at once is harder than one alone
    L = margins_coupled.coupled(run, plant, at="sensors")

    def worst(size: float) -> float:
        """Largest pole over complex gains on the rim of the disk of this size, both channels."""
        turn = np.exp(1j * np.linspace(0, 2 * np.pi, 73))
        rim = (1 + size / 2 * turn) / (1 - size / 2 * turn)
        pairs = itertools.product(rim, rim)
        return max(float(np.abs(np.linalg.eigvals(L.A - L.B @ np.diag(pair) @ L.C)).max()) for pair in pairs)

    assert worst(0.97 * alpha) < 1 < worst(1.03 * alpha)


def test_relative_gain_and_effective_varentropy() -> None:
    plant = Plant(2.0, 0.5, 0.4, 0.3, -0.2)
    G = np.array([[2.0, 0.5], [0.3, 0.4]])
    assert plant.relative_gain() == pytest.approx((G * np.linalg.inv(G).T)[0, 0])
    closed = 1 / np.linalg.inv(np.array([[2.0, 0.5], [0.2 * 0.3, 1 + 0.2 * 0.4]]))[0, 0]
    assert plant.effective() == pytest.approx(closed)
    assert math.isnan(Plant(1.0, 1.0, 1.0, 1.0, -0.1).relative_gain())


# -- the figures read tables -------------------------------------------------------------------------------------------


def test_a_figure_without_a_column_is_refused(tmp_path: Path) -> None:
    from figures import margins as drawing
    from figures import phase_coupled

    study = margins_report.study(make(0.02), 64)
    names = ("loops", "frequency", "locus", "poles", "step")
    tables = [study.tables[name] for name in names]
    for i, column in enumerate(("crossover", "phase_deg", "branch", "re", "entropy")):
        cut = [{k: v for k, v in t.items() if k != column} if j == i else t for j, t in enumerate(tables)]
        with pytest.raises(BadInputError, match=f"{column}: column missing"):
            drawing.draw(*cut, tmp_path / "x.png", title="")
    both = [study.tables[name] for name in ("coupled", "coupled_poles", "coupled_frequency")]
    with pytest.raises(BadInputError, match="alpha: column missing"):
        drawing.draw_coupled(both[0], both[1], {"w": both[2]["w"]}, tmp_path / "x.png", title="")
    with pytest.raises(BadInputError, match="column missing"):
        phase_coupled.draw({"start": [0]}, {}, {}, tmp_path / "x.png", title="")
    assert not (tmp_path / "x.png").exists()


# -- the report --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
def test_study_of_a_config(lag: int) -> None:
    study = margins_report.study(make(0.02, lag, target_nats=1.0), 49_152, given=[3.0])
    assert [each.name for each in study.loops] == ["v_max", "target", "v_min", "given1"]
    steepest = study.loops[0].margins
    assert steepest.varentropy == pytest.approx(30.163347, abs=1e-6)
    assert study.certified is not None
    k, loop_gain = study.certified
    assert loop_gain == pytest.approx(theory.delay_limit(lag), rel=1e-9)
    assert k >= steepest.gain_limit * (1 - 1e-12)
    assert study.coupled["corners"] == study.coupled["stable"] == 32
    locus = study.tables["locus"]
    mine = locus["lag"] == lag
    size = np.hypot(locus["re"], locus["im"])
    assert (size[mine & (locus["loop_gain"] < 0.999 * theory.delay_limit(lag))] <= 1 + 1e-9).all()
    past = mine & (locus["loop_gain"] > 1.01 * theory.delay_limit(lag))
    assert size[past].max() > 1
    assert {len(column) for column in study.tables["frequency"].values()} == {len(study.tables["frequency"]["w"])}
    json.dumps(study.coupled, allow_nan=False)


def test_what_a_study_leaves_out_is_said() -> None:
    high = margins_report.study(make(0.02, target_nats=9.0), 64, Assumptions(varentropy_min=0.0))
    assert [each.name for each in high.loops] == ["v_max"]
    assert any("target entropy 9" in note for note in high.notes)
    assert any("V = 0" in note for note in high.notes)
    assert high.coupled["stable"] < high.coupled["corners"]
    assert high.coupled["disk_margin"] is None
    assert margins_report.study(make(0.02), 64, ema=0.5).certified is None
    tiny = margins_report.study(make(0.02, target_nats=0.5), 2)
    assert tiny.loops[0].margins.stable


@pytest.mark.parametrize(
    ("law", "share"), [("fixed", 1.0), ("solve", 0.0), ("damped", 0.5), ("edt", None), ("mirostat2", None)]
)
def test_other_laws_say_what_they_have_instead(law: str, share: float | None) -> None:
    found = margins_report.static(configs.from_mapping({"loop": {"temperature": {"law": law}}}))
    assert found is not None
    assert found["sensitivity"] == share
    assert margins_report.static(make()) is None
