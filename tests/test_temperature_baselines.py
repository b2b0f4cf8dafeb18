"""The baseline laws from the literature: edt, dynatemp, mirostat2."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from certified import judge, make
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl import config as configs
from entropic_ctl.certificates import UncertifiedError
from entropic_ctl.entropy import ArrayLogitView, entropy_varentropy
from entropic_ctl.errors import BadInputError
from entropic_ctl.loop import Loop
from entropic_ctl.temperature import dynatemp, edt, mirostat2
from sim.frozen import LevelView
from sim.trajectories import BankView


def rows(seed: int, m: int = 4, n: int = 50, spread: float = 3.0) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(m, n)) * spread
    z[:, 1:] = np.where(rng.random((m, n - 1)) < 0.3, -np.inf, z[:, 1:])
    return z


@given(st.integers(0, 10**6), st.floats(0.1, 1.0), st.floats(0.0, 5.0))
def test_edt_is_its_formula_on_the_raw_entropy_inside_the_clamps(seed: int, base: float, theta: float) -> None:
    z = rows(seed)
    masked = np.where(np.arange(50) < 40, z, -np.inf)
    law = edt.build(edt.Config(1.2, 0.1, 3.0, base=base, theta_nats=theta))
    T, H, V = law.temper(np.full(4, law.start()), ArrayLogitView(z, masked))
    raw = entropy_varentropy(z)[0]
    np.testing.assert_allclose(T, np.clip(1.2 * base ** (theta / raw), 0.1, 3.0), rtol=1e-9)
    np.testing.assert_allclose((H, V), entropy_varentropy(masked, T), atol=1e-12)


def test_edt_where_entropy_is_zero_and_where_theta_is() -> None:
    certain = np.array([[0.0, -np.inf], [np.nan, 0.0]])
    u = np.zeros(2)
    with np.errstate(over="ignore"):
        assert edt.build(edt.Config(1.0, 0.2)).temper(u, ArrayLogitView(certain))[0][0] == 0.2
    assert edt.build(edt.Config(1.0, 0.2, theta_nats=0.0)).temper(u, ArrayLogitView(certain))[0][0] == 1.0
    assert np.isnan(edt.build(edt.Config(1.0, 0.2)).temper(u, ArrayLogitView(certain))[1][1])


@pytest.mark.parametrize("law", [edt.build(edt.Config(0.8)), dynatemp.build(dynatemp.Config(0.8))])
def test_both_raise_temperature_with_entropy(law: Any) -> None:
    """The opposite sign of the paper's feedback, as documented."""
    z = np.linspace(0.0, 90.0, 40)[:, None] * np.linspace(1.0, 0.0, 30)[None, :]  # entropy falls with the row
    T = law.temper(np.full(40, law.start()), ArrayLogitView(z))[0]
    assert (np.diff(T) <= 1e-12).all()
    assert T[0] > T[-1] + 0.05


@given(st.integers(0, 10**6), st.floats(0.2, 4.0))
def test_dynatemp_is_its_formula_on_the_masked_support(seed: int, exponent: float) -> None:
    z = rows(seed)
    masked = np.where(np.arange(50) < 40, z, -np.inf)
    law = dynatemp.build(dynatemp.Config(0.5, 0.1, 3.0, exponent=exponent))
    T = law.temper(np.full(4, law.start()), ArrayLogitView(z, masked))[0]
    share = entropy_varentropy(masked)[0] / np.log(np.isfinite(masked).sum(axis=1))
    np.testing.assert_allclose(T, 0.1 + 2.9 * share**exponent, rtol=1e-9)


def test_dynatemp_at_its_ends() -> None:
    law = dynatemp.build(dynatemp.Config(0.5, 0.1, 3.0))
    z = np.array([[0.0, 0.0, 0.0], [5.0, -np.inf, -np.inf], [2.0, 2.0, -np.inf]])
    np.testing.assert_allclose(law.temper(np.zeros(3), ArrayLogitView(z))[0], [3.0, 0.1, 3.0])


def test_infinite_temperature_asks_for_the_support() -> None:
    torch = pytest.importorskip("torch")
    from backends.sampling import TorchLogitView

    z = np.array([[3.0, -1.0, -np.inf, 0.0], [-np.inf, -np.inf, 2.0, -np.inf]])
    for view in (ArrayLogitView(z), TorchLogitView(torch.tensor(z)), TorchLogitView(torch.tensor(z).float())):
        H, V = view.at(np.array([math.inf, math.inf]))
        np.testing.assert_allclose(H, [math.log(3), 0.0], atol=1e-6)
        np.testing.assert_allclose(V, 0.0, atol=1e-12)
    assert LevelView([1.0, 0.0], [1, 6]).at(np.array([math.inf]))[0] == pytest.approx(math.log(7))
    table = np.ones((1, 2), np.float32)
    grid, at = np.log([0.5, 2.0]), np.zeros(3, np.int64)
    known = BankView(np.ones(3), table, table, grid, at, vocab_size=100)
    np.testing.assert_allclose(known.at(np.full(3, math.inf))[0], math.log(100))
    with pytest.raises(BadInputError, match="outside the recorded grid"):
        BankView(np.ones(3), table, table, grid, at).at(np.full(3, math.inf))


@given(st.integers(0, 10**6), st.floats(0.2, 3.0), st.floats(0.05, 1.9))
def test_mirostat2_reaches_mu_or_a_clamp_and_moves_mu_by_its_formula(seed: int, tau: float, eta: float) -> None:
    z = rows(seed)
    config = mirostat2.Config(0.8, 0.1, 3.0, target_nats=tau, learning_rate=eta, tolerance_nats=1e-9, mu_max_nats=4.0)
    law = mirostat2.build(config)
    mu = np.linspace(0.0, 4.0, 4)
    T, H, _ = law.temper(mu, ArrayLogitView(z))
    low, high = (entropy_varentropy(z, t)[0] for t in (0.1, 3.0))
    np.testing.assert_allclose(H, np.clip(mu, low, high), atol=1e-8)
    np.testing.assert_allclose(H, entropy_varentropy(z, T)[0], atol=1e-9)
    np.testing.assert_allclose(law.update(mu, H), np.clip(mu - eta * (H - tau), 0.0, 4.0))
    assert law.update(mu[:1], np.array([np.nan]))[0] == mu[0]
    assert law.start() == min(2 * tau, 4.0)


def test_mirostat2_holds_the_average_over_a_text_where_solve_holds_only_the_steps() -> None:
    """A fifth of the steps are certain (H = 0 at every T): the others pay their missing surprise back."""
    rng = np.random.default_rng(0)
    flat, certain = rng.normal(size=(1, 400)) * 2, np.array([[0.0] + [-np.inf] * 399])
    config = mirostat2.Config(0.8, 0.05, 10.0, target_nats=1.5)
    law, seen = mirostat2.build(config), []
    mu = np.array([law.start()])
    for t in range(2000):
        _, H, _ = law.temper(mu, ArrayLogitView(certain if t % 5 == 0 else flat))
        mu = law.update(mu, H)
        seen.append(float(H[0]))
    assert np.mean(seen[200:]) == pytest.approx(1.5, abs=0.01)
    assert np.mean(np.array(seen[200:])[np.arange(200, 2000) % 5 != 0]) == pytest.approx(1.5 / 0.8, abs=0.02)


def test_mirostat2_does_not_wind_up_beyond_its_limit() -> None:
    law = mirostat2.build(mirostat2.Config(target_nats=1.0, mu_max_nats=5.0))
    mu = np.array([law.start()])
    for _ in range(1000):
        mu = law.update(mu, np.zeros(1))
    assert mu[0] == 5.0
    assert law.update(mu, np.array([3.0]))[0] < 5.0


def test_mirostat2_needs_uncertified_said_out_loud() -> None:
    run = make(law="mirostat2")
    verdict = judge(run)
    assert verdict.status == "unknown"
    with pytest.raises(UncertifiedError):
        Loop(run.loop, run.engine, 32_000, verdict=verdict)
    Loop(run.loop, run.engine, 32_000, uncertified=True)


@pytest.mark.parametrize("law", ["edt", "dynatemp", "mirostat2"])
def test_the_checker_claims_nothing_it_cannot_prove_of_them(law: str) -> None:
    """Besides "no past error is fed back" (true of the stateless two), no theorem about the micro loop covers them."""
    import proofs
    from proofs import check

    run = configs.from_mapping({"loop": {"temperature": {"law": law}, "pruning": {"law": "budget", "widen_after": 1}}})
    found = check.check(proofs.prove(run, 1000), run, 1000)
    said = {claim.theorem: claim for claim in found.claims}
    assert said["variance"].status == "unknown"
    if law == "mirostat2":
        assert not any("no state" in claim.reason or "never moves" in claim.reason for claim in found.claims)
        assert {said[name].status for name in ("bounded", "incremental", "coupled", "small-gain")} == {"unknown"}


def test_bad_parameters_are_named() -> None:
    for build in (
        lambda: edt.Config(base=0.0),
        lambda: edt.Config(base=1.1),
        lambda: edt.Config(theta_nats=-1.0),
        lambda: dynatemp.Config(exponent=0.0),
        lambda: mirostat2.Config(learning_rate=0.0),
        lambda: mirostat2.Config(mu_max_nats=-1.0),
    ):
        with pytest.raises(BadInputError, match="allowed"):
            build()
