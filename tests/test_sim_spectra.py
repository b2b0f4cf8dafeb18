"""Frequency response: known systems lie inside their own bounds as often as the bounds say; noise has no coherence."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import signal as signals

from entropic_ctl.errors import BadInputError
from sim.spectra import frequency_response
from sim.transfer import fit, impulse_response, load

NUM, DEN = np.array([1.5, 0.4]), np.array([1.0, -0.6])


def truth(frequency: np.ndarray) -> np.ndarray:
    z = np.exp(-2j * np.pi * frequency)
    return (NUM[0] + NUM[1] * z) / (DEN[0] + DEN[1] * z)


def plant(rng: np.random.Generator, requests: int, tokens: int, noise: float = 1.0) -> tuple[list, list]:
    """An open loop: white binary input, coloured noise."""
    u = [rng.choice([-1.0, 1.0], tokens) for _ in range(requests)]
    colour = [signals.lfilter([noise], [1.0, -0.7], rng.standard_normal(tokens + 50))[50:] for _ in range(requests)]
    return u, [signals.lfilter(NUM, DEN, a) + v for a, v in zip(u, colour, strict=True)]


def closed(rng: np.random.Generator, requests: int, tokens: int, *, gain: float, V: float) -> tuple:
    """The micro loop of a static plant, written out: y = V u + noise, law output excited by r."""
    out: tuple[list, list, list] = ([], [], [])
    for _ in range(requests):
        r, v = 0.5 * rng.choice([-1.0, 1.0], tokens), rng.standard_normal(tokens)
        v = signals.lfilter([1.0], [1.0, -0.5], v)
        u, y, law = np.empty(tokens), np.empty(tokens), 0.0
        for t in range(tokens):
            u[t] = law + r[t]
            y[t] = V * u[t] + v[t]
            law -= gain * y[t]
        for series, values in zip(out, (r, u, y), strict=True):
            series.append(values)
    return out


def test_bounds_cover_the_truth_as_often_as_they_say() -> None:
    hits, total = 0, 0
    for seed in range(60):
        u, y = plant(np.random.default_rng(seed), 12, 192)
        found = frequency_response(u, u, y, segment=64, level=0.9)
        inside = np.abs(found.response - truth(found.frequency)) <= found.radius
        hits, total = hits + int(inside.sum()), total + inside.shape[0]
    assert 0.87 < hits / total < 0.95


def test_closed_loop_bounds_cover_the_plant_where_the_open_loop_formula_fails() -> None:
    hits, naive, total = 0, 0, 0
    for seed in range(40):
        r, u, y = closed(np.random.default_rng(seed), 12, 192, gain=0.5, V=1.2)
        joint = frequency_response(r, u, y, level=0.9)
        direct = frequency_response(u, u, y, level=0.9)
        hits += int((np.abs(joint.response - 1.2) <= joint.radius).sum())
        naive += int((np.abs(direct.response - 1.2) <= direct.radius).sum())
        total += joint.frequency.shape[0]
    assert 0.83 < hits / total < 0.96  # the ratio is linearised: a little below the nominal 0.9
    assert naive / total < 0.8  # H1 without an external excitation is biased in closed loop


def test_unrelated_noise_exceeds_the_coherence_floor_at_its_nominal_rate() -> None:
    above, total = 0, 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        u = [rng.choice([-1.0, 1.0], 192) for _ in range(8)]
        y = [np.cumsum(rng.standard_normal(192)) * 0.1 + rng.standard_normal(192) for _ in range(8)]
        found = frequency_response(u, u, y, level=0.95)
        above, total = above + int((found.coherence > found.coherence_floor).sum()), total + found.frequency.shape[0]
    assert 0.02 < above / total < 0.09


def test_a_noise_free_system_has_coherence_near_1_and_the_exact_gain() -> None:
    rng = np.random.default_rng(0)
    u = [rng.standard_normal(256) for _ in range(4)]
    found = frequency_response(u, u, [2.5 * a for a in u])
    np.testing.assert_allclose(found.response, 2.5, atol=1e-9)
    np.testing.assert_allclose(found.coherence, 1.0, atol=1e-9)


@pytest.mark.parametrize(
    ("segment", "u", "match"),
    [(7, np.ones(64), "segment"), (64, np.ones(64), "too little"), (16, np.ones(256), "no power")],
)
def test_bad_records_are_refused(segment: int, u: np.ndarray, match: str) -> None:
    with pytest.raises(BadInputError, match=match):
        frequency_response([u], [u], [u], segment=segment)


def test_a_known_transfer_function_is_recovered_within_its_standard_errors() -> None:
    """Coverage of the same-step gain and of the static gain over many data sets; the order is chosen each time."""
    direct, static = [], []
    for seed in range(20):
        u, y = plant(np.random.default_rng(100 + seed), 18, 96)
        model = fit(u, y, orders=((1, 0), (2, 0), (2, 1), (3, 1)))
        value, error = model.direct()
        direct.append((value - 1.5) / error)
        value, error = model.static_gain()
        static.append((value - 1.9 / 0.4) / error)
    assert np.mean(np.abs(direct) < 1.96) > 0.8
    assert np.std(direct) < 1.5
    assert np.mean(np.abs(static) < 1.96) > 0.7
    assert model.denominator.shape[0] > 1
    assert float(model.poles.real.max()) == pytest.approx(0.6, abs=0.1)


def test_the_order_of_a_static_plant_is_one_coefficient() -> None:
    rng = np.random.default_rng(5)
    u = [rng.standard_normal(128) for _ in range(30)]
    model = fit(u, [2.0 * a + rng.standard_normal(128) for a in u])
    assert model.numerator.shape[0] + model.denominator.shape[0] <= 4
    assert model.direct()[0] == pytest.approx(2.0, abs=4 * model.direct()[1])


def test_the_pole_of_the_closed_loop_is_one_minus_kv() -> None:
    r, u, _ = closed(np.random.default_rng(8), 40, 192, gain=0.25, V=1.2)
    model = fit(r, u, orders=((2, 1),))
    pole, error = model.first_pole()
    assert pole == pytest.approx(1 - 0.25 * 1.2, abs=4 * error)
    assert error < 0.05


def test_the_impulse_response_finds_the_effect_through_the_text() -> None:
    rng = np.random.default_rng(9)
    u = [rng.choice([-0.2, 0.2], 200) for _ in range(40)]
    y = [2.0 * a + 0.7 * np.concatenate(([0.0], a[:-1])) + rng.standard_normal(200) for a in u]
    found = impulse_response(u, y, lags=5)
    assert (np.abs(found.value - [2.0, 0.7, 0, 0, 0, 0]) < 4 * found.error).all()
    assert (found.error < 0.1).all()


def test_models_read_back_as_control_objects(tmp_path) -> None:
    import control

    from entropic_ctl.results import write_json

    u, y = plant(np.random.default_rng(3), 12, 128)
    model = fit(u, y, orders=((2, 1),))
    write_json(tmp_path / "models.json", {"models": {"plant": model.document()}})
    frequency = np.array([0.05, 0.2, 0.4])
    for form in ("transfer", "state_space"):
        system = load(tmp_path / "models.json", "plant", form=form)
        assert system.dt == 1
        answer = control.frequency_response(system, 2 * np.pi * frequency).complex.ravel()
        np.testing.assert_allclose(answer, model.response(frequency), rtol=1e-9)
    np.testing.assert_allclose(
        control.frequency_response(model.to_control(), 2 * np.pi * frequency).complex.ravel(), model.response(frequency)
    )
    with pytest.raises(BadInputError, match="no such model"):
        load(tmp_path / "models.json", "nothing")
    with pytest.raises(BadInputError, match="cannot read"):
        load(tmp_path / "absent.json", "plant")
