from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl import config
from entropic_ctl.entropy import ArrayLogitView, entropy_varentropy
from entropic_ctl.temperature import damped, feedback, solve
from proofs import search, theory
from proofs.check import Assumptions, Claim, Hints, Subject, changing, gain, variance
from proofs.vmax import maximum
from sim.frozen import LevelView, drive

N = 32_000


def make(law: str = "feedback", lag: int = 0, drafts: int = 0, **table: Any) -> config.RunConfig:
    return config.from_mapping(
        {
            "engine": {"observation_lag": lag},
            "speculation": {"draft_tokens": drafts},
            "loop": {"temperature": {"law": law, **table}},
        }
    )


def decide(run: config.RunConfig, n: int = N, **assumed: float) -> dict[str, Claim]:
    subject = Subject(run, n, Assumptions(**assumed))  # type: ignore[arg-type]
    hints = Hints(search._verified(subject, gain.claims, {}))
    return {claim.theorem: claim for claim in changing.claims(subject, hints)}


# bounded


@given(
    st.integers(2, 400),
    st.floats(0.0, 8.0),
    st.floats(-0.5, 0.5),
    st.sampled_from(["linear", "tanh"]),
    st.floats(0.0, 0.4),
)
def test_no_step_is_longer_than_the_bound(n: int, target: float, k: float, phi: str, rate: float) -> None:
    run = make(gain=k, phi=phi, target_nats=target, rate_limit=rate, phi_scale_nats=1.3)
    claim = decide(run, n)["bounded"]
    law = feedback.build(run.loop.temperature.config)
    rng = np.random.default_rng(n)
    u, H = rng.uniform(math.log(0.3), math.log(1.6), 200), rng.uniform(0, math.log(n), 200)
    H[:2] = 0.0, math.log(n)
    u[:2] = 0.2, 0.2
    after = law.update(u, H)
    assert np.abs(after - u).max() <= float(claim.numbers["step"]) + 1e-12
    assert after.min() >= math.log(0.3)
    assert after.max() <= math.log(1.6)


def test_the_largest_step_is_taken() -> None:
    claim = decide(make(target_nats=1.5))["bounded"]
    law = feedback.build(make(target_nats=1.5).loop.temperature.config)
    step = float(law.update(np.zeros(1), np.array([math.log(N)]))[0])
    assert abs(step) == pytest.approx(float(claim.numbers["step"]), rel=1e-9)


@pytest.mark.parametrize(("factor", "word"), [(0.999, "proved"), (1.001, "refuted")])
def test_two_copies_at_the_sharp_target(factor: float, word: str) -> None:
    """At 2 / V_max copies never separate; just above, two copies near the equilibrium do, on the shipped law."""
    sharp = maximum(N)
    k = factor * 2 / float(sharp.upper)
    run = make(gain=k, target_nats=sharp.entropy_nats, temperature=1.0, rate_limit=0.0)
    claims = decide(run)
    assert claims["bounded"].numbers["never_beyond_start"] == word
    assert claims["incremental"].status == word
    law, view = feedback.build(run.loop.temperature.config), LevelView([sharp.logit, 0.0], [1, N - 1], 2)
    u = np.array([-1e-6, 1e-6])
    grown = np.ptp(law.update(u, law.temper(u, view)[1])) / 2e-6
    assert (grown > 1) == (word == "refuted")


# incremental


def changing_views(rng: np.random.Generator, v_lo: float) -> Any:
    """Fresh random three-level logits for each token, with a varentropy of at least v_lo at every temperature."""
    low, high = 0.3, 1.6

    def views(_: int, rows: int) -> LevelView:
        while True:
            view = LevelView(rng.uniform(0, 9, 3), np.round(np.exp(rng.uniform(0, 9, 3))), 60)
            if view.at(np.geomspace(low, high, 60))[1].min() >= 1.05 * v_lo:
                view._rows = rows
                return view

    return views


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("k", "phi"), [(0.02, "linear"), (0.03, "tanh"), (0.06, "linear")])
def test_copies_on_changing_logits_come_together_at_least_at_the_stated_rate(k: float, phi: str, lag: int) -> None:
    run = make(gain=k, phi=phi, lag=lag, phi_scale_nats=6.0, rate_limit=0.0)
    claim = decide(run, varentropy_min=0.3, error_nats=9.0)["incremental"]
    if lag == 1 and k == 0.06:
        assert claim.status == "unknown"
        return
    assert claim.status == "proved"
    q, law = float(claim.numbers["q"]), feedback.build(run.loop.temperature.config)
    u, _ = drive(law, changing_views(np.random.default_rng(1), 0.3), np.array([-1.0, 0.3]), 120, lag)
    apart = np.abs(u[:, 1] - u[:, 0])
    assert (apart <= apart[0] * q ** (np.arange(120) - 2 * lag) + 1e-12).all()
    if lag == 0:
        assert (apart[1:] <= q * apart[:-1] + 1e-14).all()


@pytest.mark.parametrize("lag", [0, 1])
def test_the_rate_is_attained_at_the_least_varentropy(lag: int) -> None:
    """Two-level logits whose varentropy at the equilibrium is V_lo: there the shipped loop shrinks by 1 - k V_lo."""
    view = LevelView([9.2, 0.0], [1, 50], 2)
    H, V = (float(x[0]) for x in view.at(np.ones(2)))
    run = make(gain=0.05, lag=lag, target_nats=H, temperature=1.0)
    claim = decide(run, 51, varentropy_min=V)["incremental"]
    assert claim.status == "proved"
    u, _ = drive(feedback.build(run.loop.temperature.config), lambda t, rows: view, np.array([0.0, 1e-5]), 60, lag)
    ratios = np.diff(u, axis=1)[41:, 0] / np.diff(u, axis=1)[40:-1, 0]
    assert (ratios <= float(claim.numbers["q"]) + 1e-9).all()  # at lag 1 the slow root is a little below 1 - k V
    assert ratios == pytest.approx(float(claim.numbers["q"]), abs=1e-3 if lag else 1e-5)
    halved = int(claim.numbers["halve"])
    assert float(claim.numbers["q"]) ** halved <= 0.5 < float(claim.numbers["q"]) ** (halved - 1 - 2 * lag)


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 0.99), st.floats(0.0, 1.0), st.booleans())
def test_lag_one_envelope_against_adversarial_slopes_and_clamps(
    seed: int, top: float, share: float, extreme: bool
) -> None:
    """d+ = c (d - s d_before) with any s in [a, K], c in [0, 1]: |d_t| <= q^(t-2) d_0, q = max(1 - a, K^(1/4))."""
    rng, a = np.random.default_rng(seed), top * share
    q = max(1 - a, float(changing._fourth_root(Fraction(top))))
    before = now = np.ones(300)
    for t in range(2, 60):
        s = rng.choice([a, top], 300) if extreme else rng.uniform(a, top, 300)
        c = np.where(rng.random(300) < 0.2, rng.random(300), 1.0)
        before, now = now, c * (now - s * before)
        assert np.abs(now).max() <= q ** (t - 2) + 1e-12


def test_worst_slopes_at_lag_one_by_exhaustion() -> None:
    a, top = 0.05, 0.9
    q = max(1 - a, float(changing._fourth_root(Fraction(top))))
    for slopes in itertools.product((a, top), repeat=12):
        before = now = 1.0
        for t, s in enumerate(slopes, 2):
            before, now = now, now - s * before
            assert abs(now) <= q ** (t - 2) + 1e-12


def test_without_varentropy_nothing_contracts() -> None:
    claim = decide(make(), varentropy_min=0.0)["incremental"]
    assert claim.status == "refuted"
    law = feedback.build(make().loop.temperature.config)
    for tied in (4, 5):  # ln 4 < 1.5 < ln 5: tokens like these keep both inside the clamps for ever
        u = np.array([-0.2, 0.3])
        H = law.temper(u, ArrayLogitView(np.zeros((2, tied))))[1]
        assert np.ptp(law.update(u, H)) == pytest.approx(0.5, abs=1e-15)


def test_the_rate_limit_stops_contraction_where_it_says() -> None:
    claim = decide(make(gain=0.05, rate_limit=0.1))["incremental"]
    assert claim.status == "unknown"
    edge = float(claim.numbers["error_unlimited_nats"])
    assert edge == pytest.approx(2.0, abs=1e-9)
    law = feedback.build(make(gain=0.05, rate_limit=0.1).loop.temperature.config)
    past, within = (law.update(np.zeros(2), 1.5 + edge * f * np.array([1.0, 1.01])) for f in (1.05, 0.95))
    assert np.ptp(past) == 0
    assert np.ptp(within) > 0


def test_every_status_of_incremental() -> None:
    assert decide(make())["incremental"].status == "proved"
    assert decide(make(gain=-0.02))["incremental"].status == "refuted"
    assert decide(make(gain=0.0))["incremental"].status == "refuted"
    assert decide(make(gain=0.08, target_nats=1.5))["incremental"].status == "unknown"  # above 2/V_max, below 2/V*
    assert decide(make(), varentropy_min=30.0)["incremental"].status == "unknown"
    assert decide(make(phi="tanh", phi_scale_nats=0.01))["incremental"].status == "unknown"
    assert (
        decide(make(gain=0.02, target_nats=20.0, t_min=0.9, t_max=0.91, temperature=0.9), varentropy_min=0.0)[
            "incremental"
        ].status
        == "unknown"
    )
    for run in (make("solve"), make("fixed"), make(t_min=0.8, t_max=0.8)):
        assert {decide(run)[name].status for name in ("bounded", "incremental")} == {"not applicable"}


def test_drafted_tokens_update_several_times_from_one_temperature() -> None:
    """d + 1 updates from one state: slopes in [a, K], a clamp between: the copies end within the stated swing."""
    found = decide(make(gain=0.02, drafts=3))
    assert found["incremental"].status == "unknown"  # 4 * 0.02 * 27.89 - 1 > 1
    assert found["variance"].status == "unknown"
    found = decide(make(gain=0.01, drafts=3))
    assert (found["incremental"].status, found["bounded"].numbers["never_beyond_start"]) == ("proved", "proved")
    assert "step" in found["incremental"].reason
    q, k = float(found["incremental"].numbers["q"]), 0.01 * 27.8904
    rng = np.random.default_rng(0)
    d = np.ones(5000)
    for _ in range(4):
        c = np.where(rng.random(5000) < 0.5, rng.choice([0.0, 0.5], 5000), 1.0)
        d = c * (d - rng.choice([0.001, k], 5000))
        assert np.abs(d).max() <= q + 1e-12
    assert decide(make(gain=0.005, drafts=1, lag=1))["incremental"].status == "unknown"


@given(st.fractions(0, 1), st.fractions(0, 200))
def test_helpers_bound_what_they_say(x: Fraction, y: Fraction) -> None:
    assert changing._fourth_root(x) ** 4 >= x
    low, high = changing.tanh_bounds(y)
    assert low <= high
    assert float(low) - 1e-15 <= math.tanh(y) <= float(high) + 1e-15


# variance


def simulated(lag: int, g: float, phi: float, steps: int = 20_000) -> float:
    """Sum of squares of the loop's response to an AR(1) impulse, through the shipped update with V = 1."""
    w = phi ** np.arange(400.0) if lag == 0 or g < 0.5 else phi ** np.arange(float(steps))
    u, y = 0.0, np.empty(w.shape[0])
    for t in range(w.shape[0]):
        y[t] = w[t] + u
        u -= g * (y[t - lag] if t >= lag else 0.0)
    return float((y**2).sum() / (w**2).sum())


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("phi", [-0.6, 0.0, 0.45, 0.9])
def test_the_closed_form_is_the_loop(lag: int, phi: float) -> None:
    for g in (0.15, 0.4):
        above, below = variance.ar1_form(lag, Fraction(g), Fraction(phi))
        assert float(above / below) == pytest.approx(simulated(lag, g, phi), rel=1e-6)
        assert variance.lyapunov_ratio(lag, Fraction(g), Fraction(phi)) == above / below
    if lag == 0:
        assert theory.ar1_ratio(phi, 0.4) == pytest.approx(simulated(0, 0.4, phi), rel=1e-6)


@pytest.mark.parametrize("lag", [0, 1])
def test_the_identity_is_proved_and_a_wrong_form_is_not(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert variance.closed_form_holds(lag)
    right = variance.ar1_form
    monkeypatch.setattr(
        variance, "ar1_form", lambda d, g, phi: (right(d, g, phi)[0] + g * phi * (1 - g) / 10**6, right(d, g, phi)[1])
    )
    assert not variance.closed_form_holds.__wrapped__(lag)


def test_degrees_of_the_identity_are_not_understated() -> None:
    """Along each variable, differences of one order more than the stated degree vanish; so the grid is enough."""
    for lag, (in_g, in_phi) in variance._DEGREES.items():
        for axis, degree in ((0, in_g), (1, in_phi)):
            values = []
            for i in range(degree + 3):
                at = [Fraction(1, 3), Fraction(-2, 7)]
                at[axis] = Fraction(i + 1, 3 * degree + 9)
                A, B = determinant_numerators(lag, *at)
                above, below = variance.ar1_form(lag, *at)
                values.append((A * below, B * above))
            for side in zip(*values, strict=True):
                row = list(side)
                for _ in range(degree + 1):
                    row = [b - a for a, b in itertools.pairwise(row)]
                assert set(row) == {0}


def determinant_numerators(lag: int, g: Fraction, phi: Fraction) -> tuple[Fraction, Fraction]:
    """var y and var w times the determinant of the Lyapunov system, by sympy's exact determinant."""
    sympy = pytest.importorskip("sympy")
    A = sympy.Matrix([[phi, 0], [-g, 1 - g]] if lag == 0 else [[phi, 0, 0], [0, 1, -g], [1, 1, 0]])
    n = A.shape[0]
    pairs = [(i, j) for i in range(n) for j in range(i, n)]
    M = sympy.zeros(len(pairs))
    for row, (i, j) in enumerate(pairs):
        M[row, row] += 1
        for a in range(n):
            for b in range(n):
                M[row, pairs.index((min(a, b), max(a, b)))] -= A[i, a] * A[j, b]
    right = sympy.zeros(len(pairs), 1)
    right[0] = 1
    S = [M.copy() for _ in pairs]
    for m, copy in enumerate(S):
        copy[:, m] = right
    N_ = [Fraction(int(d.p), int(d.q)) for d in (copy.det() for copy in S)]
    at = {pair: N_[m] for m, pair in enumerate(pairs)}
    return at[0, 0] + 2 * at[0, 1] + at[1, 1], at[0, 0]


@pytest.mark.parametrize("lag", [0, 1])
def test_any_stationary_entropy_by_its_autocorrelations(lag: int) -> None:
    """Lag 0: 1 + g/(2-g) (1 - 2 sum rho_m (1-g)^(m-1)); small gains at lag 1: 1 + g (1/2 + rho_1 - sum from 2 on)."""
    rng = np.random.default_rng(4)
    for _ in range(20):
        b, g = rng.normal(size=5), (0.7 if lag == 0 else 1e-4)
        rho = np.correlate(b, b, "full")[5:] / (b @ b)
        h, u = np.zeros(4000 if lag == 0 else 200_000 // 2), 0.0
        size = h.shape[0]
        # impulse response of the loop, then convolved with b
        y = [0.0] * (lag + 1)
        for t in range(min(size, 400)):
            now = (1.0 if t == 0 else 0.0) + u
            h[t] = now
            y.append(now)
            u -= g * y[-1 - lag]
        if lag == 1:  # the slow mode goes on as a geometric series
            root = (1 + math.sqrt(1 - 4 * g)) / 2
            h[400:] = h[399] * root ** np.arange(1, size - 399)
        ratio = float((np.convolve(h, b) ** 2).sum() / (b @ b))
        if lag == 0:
            expected = 1 + g / (2 - g) * (1 - 2 * float(rho @ (1 - g) ** np.arange(4)))
            assert ratio == pytest.approx(expected, rel=1e-9)
        else:
            slope = 0.5 + rho[0] - float(rho[1:].sum())
            assert (ratio - 1) / g == pytest.approx(slope, abs=0.01)


@given(st.sampled_from([0, 1]), st.floats(0.001, 0.999), st.sampled_from([1.0, 0.85, 0.8]))
def test_the_phi_needed_is_where_the_ratio_is_met(lag: int, share: float, ratio: float) -> None:
    g = Fraction(share) * gain.loop_limit(lag)
    found = variance.phi_needed(lag, g, Fraction(ratio))
    for end, sign in (("lower", 1), ("upper", -1)):
        above, below = variance.ar1_form(lag, g, Fraction(found[end]))
        assert sign * (above / below - Fraction(ratio)) >= -Fraction(1, 10**12)
    if lag == 0 and ratio == 1.0:
        assert Fraction(found["lower"]) <= 1 / (3 - g) <= Fraction(found["upper"])


def test_the_papers_cuts() -> None:
    found = decide(make())["variance"].numbers["any_gain"]
    for cut, name, printed in ((0.15, "phi_cut_15", "0.5309"), (0.20, "phi_cut_20", "0.5669")):
        assert found[name]["lower"].startswith(printed)
        assert float(found[name]["lower"]) <= theory.phi_for_cut(cut) <= float(found[name]["upper"])


def test_variance_of_the_default_loop() -> None:
    claims = {lag: decide(make(lag=lag))["variance"] for lag in (0, 1)}
    for lag, claim in claims.items():
        assert claim.status == "proved"
        for place in ("v_lo", "target", "v_max"):
            g, told = 0.02 * float(Fraction(claim.numbers[place]["varentropy"])), claim.numbers[place]["white_ratio"]
            white = 2 / (2 - g) if lag == 0 else 2 / ((1 - g) * (2 + g))
            assert float(told) == pytest.approx(white, rel=1e-9)
    assert (
        float(claims[1].numbers["target"]["phi_same"]["lower"])
        > 0.64
        > float(claims[0].numbers["target"]["phi_same"]["lower"])
    )
    alternating = claims[1].numbers["target"]["phi_alternating"]
    assert (
        simulated(1, 0.3061, float(alternating["lower"]) - 0.01)
        < 1
        < simulated(1, 0.3061, float(alternating["upper"]) + 0.01)
    )


def test_every_status_of_variance() -> None:
    assert decide(make(gain=-0.1))["variance"].status == "refuted"
    assert decide(make(gain=0.2))["variance"].status == "refuted"  # at the target k V = 3.06
    assert decide(make(gain=0.1))["variance"].numbers["v_max"]["white_ratio"] is None
    assert decide(make("fixed"))["variance"].status == "not applicable"
    assert decide(make("solve"))["variance"].numbers["error_ratio"] == "0"
    assert decide(make("damped", fraction=0.25))["variance"].numbers["error_ratio"] == "3/4"
    assert decide(make("solve", max_iterations=8))["variance"].status == "unknown"
    assert decide(make(gain=0.2), 4)["variance"].status == "proved"
    assert decide(make(gain=5.0, target_nats=9.0), 4)["variance"].status == "unknown"


@given(st.integers(0, 2**32 - 1), st.floats(0.05, 1.0))
def test_same_step_laws_on_random_logits(seed: int, f: float) -> None:
    """`solve` meets H*; `damped` leaves at most the stated share of each error, on tokens within the assumptions."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(30, 60)) * rng.uniform(0.5, 5, (30, 1))
    run = make("damped", fraction=f, target_nats=2.0, tolerance_nats=1e-9)
    part, full = (
        damped.build(run.loop.temperature.config),
        solve.build(solve.Config(target_nats=2.0, tolerance_nats=1e-9)),
    )
    view, u = ArrayLogitView(z), np.full(30, part.start())
    reached = np.abs(full.temper(u, view)[1] - 2.0) <= 1e-9
    lowest = np.min([entropy_varentropy(z, t)[1] for t in np.geomspace(0.3, 1.6, 40)], axis=0)
    worst = float(decide(run, 60, varentropy_min=0.3)["variance"].numbers["error_ratio_worst"])
    base, after = (np.abs(x - 2.0) for x in (entropy_varentropy(z, 0.8)[0], part.temper(u, view)[1]))
    inside = reached & (lowest >= 0.31)
    assert (after[inside] <= worst * base[inside] + 1e-8).all()
    assert (after <= base + 1e-8).all()
