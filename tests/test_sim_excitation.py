"""Excitation signals and the laws that carry them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from entropic_ctl.policy import Policy
from entropic_ctl.pruning.laws import budget, off
from entropic_ctl.scheduling import fcfs
from entropic_ctl.temperature import feedback, fixed
from sim.excitation import KINDS, Excited, ExcitedBudget, make_signal
from sim.frozen import LevelView


@given(st.sampled_from(KINDS), st.integers(15, 600), st.floats(1e-3, 2.0))
def test_signals_have_zero_mean_and_the_stated_amplitude(kind: str, period: int, amplitude: float) -> None:
    wave = make_signal(kind, period, amplitude, np.random.default_rng(0))
    assert abs(wave.mean()) < 1e-9 * max(1.0, amplitude)
    assert np.abs(wave).max() == pytest.approx(amplitude)
    assert wave.shape[0] >= period


def test_prbs_and_multisine_excite_every_frequency_equally() -> None:
    for kind in ("prbs", "multisine"):
        wave = make_signal(kind, 127, 1.0, np.random.default_rng(1))
        power = np.abs(np.fft.rfft(wave))[1:64] ** 2
        assert power.max() / power.min() < 1.1
    chirp = make_signal("chirp", 256, 1.0, np.random.default_rng(1))
    crossings = np.flatnonzero(np.diff(np.sign(chirp)))
    assert np.diff(crossings[:4]).mean() > 4 * np.diff(crossings[-4:]).mean()  # frequency rises


@pytest.mark.parametrize(("kind", "period", "amplitude"), [("square", 64, 1.0), ("prbs", 3, 1.0), ("prbs", 64, 0.0)])
def test_bad_signals_are_refused(kind: str, period: int, amplitude: float) -> None:
    with pytest.raises(BadInputError, match=r"allowed"):
        make_signal(kind, period, amplitude, np.random.default_rng(0))


def drive(law: Excited, rows: int, steps: int, lag: int = 0) -> tuple[np.ndarray, np.ndarray]:
    policy = Policy(law, off.build(off.Config()), fcfs.build(fcfs.Config()), slots=rows, observation_lag=lag)
    slots, greedy = np.arange(rows), np.zeros(rows, np.bool_)
    policy.start(slots)
    temperatures = []
    for _ in range(steps):
        tempered = policy.temper(slots, greedy, LevelView([3.0, 1.0, 0.0], [1, 5, 200], rows))
        temperatures.append(tempered.temperature)
        policy.observe(slots, tempered.model_entropy, tempered.tempered_entropy, greedy, distinct=True)
    return np.log(np.array(temperatures)), np.array(law.applied)


def test_an_open_loop_applies_the_signal_and_nothing_else() -> None:
    wave = make_signal("prbs", 31, 0.2, np.random.default_rng(2))
    law = Excited(fixed.build(fixed.Config(temperature=0.8)), wave, np.random.default_rng(3))
    u, r = drive(law, rows=5, steps=70)
    np.testing.assert_allclose(u, math.log(0.8) + r, atol=1e-10)
    np.testing.assert_array_equal(r[31:62], r[:31])
    assert len({tuple(column) for column in r.T}) > 1  # requests enter at different places


@pytest.mark.parametrize("lag", [0, 1])
def test_a_closed_loop_is_the_shipped_law_with_the_signal_added(lag: int) -> None:
    """Against the recursion written out: output excitation, then target excitation."""
    config = feedback.Config(target_nats=4.0, gain=0.02, rate_limit=0.0, temperature=0.8)
    for at in ("output", "target"):
        wave = make_signal("multisine", 40, 0.1, np.random.default_rng(4))
        law = Excited(feedback.build(config), wave, np.random.default_rng(5), at=at)
        u, r = drive(law, rows=1, steps=60, lag=lag)
        plain, seen, expected = math.log(0.8), [], []
        view = LevelView([3.0, 1.0, 0.0], [1, 5, 200])
        for t in range(60):
            applied = plain + (r[t, 0] if at == "output" else 0.0)
            expected.append(applied)
            seen.append(float(view.at(np.exp([applied]))[0][0]))
            if t >= lag:
                error = seen[t - lag] - 4.0 - (r[t, 0] if at == "target" else 0.0)
                plain -= 0.02 * error
        np.testing.assert_allclose(u[:, 0], expected, atol=1e-9)


def test_the_budget_follows_its_signal_and_may_not_become_negative() -> None:
    wave = make_signal("prbs", 15, 0.01, np.random.default_rng(0))
    law = ExcitedBudget(budget.Config(), 0.02, wave, np.random.default_rng(1))
    theta, place = law.starts(6)
    for _ in range(20):
        np.testing.assert_allclose(theta, 0.02 + wave[place])
        theta, place = law.update(theta, place, np.zeros(6))
    with pytest.raises(BadInputError, match="negative"):
        ExcitedBudget(budget.Config(), 0.005, wave, np.random.default_rng(1))


def test_a_target_needs_a_law_that_has_one() -> None:
    with pytest.raises(BadInputError, match="cannot enter"):
        Excited(fixed.build(fixed.Config()), np.zeros(16), np.random.default_rng(0), at="target")
