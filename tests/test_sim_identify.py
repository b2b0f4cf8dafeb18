"""Identification of the simulated loop: the same-step gain is V, the model entropy ignores the token's own T."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from synthetic_bank import make_bank

from entropic_ctl.config import from_mapping
from entropic_ctl.errors import BadInputError
from sim.experiment import Experiment, Records, collect, run_simulation
from sim.frozen import LevelView
from sim.identify import analyse

BASE = {
    "workload": {"prompt_tokens": 64, "prompt_cv": 0},
    "engine": {"pages": 4096, "max_batch": 16, "max_live": 64},
    "loop": {"temperature": {"law": "feedback", "target_nats": 1.5, "gain": 0.05, "t_min": 0.45, "t_max": 1.5}},
}


@pytest.fixture(scope="module")
def bank():
    return make_bank(seed=3, prompts=8, lengths=(90, 140), ended=False)[0]


def test_the_plant_of_the_simulator(bank) -> None:
    config, experiment = from_mapping(BASE), Experiment(requests=48, tokens=128, segment=32, amplitude=0.2)
    records = run_simulation(config, experiment, bank=bank)
    assert len(records.input) == 48
    assert {a.shape[0] for a in records.input} == {128}
    for u, r in zip(records.input, records.excitation, strict=True):
        np.testing.assert_allclose(u, np.log(0.8) + r, atol=1e-9)
    found = analyse(records, experiment, config)
    compared = found.numbers["compared"]
    assert compared["same_step_gain_is_V"]["agrees"]
    assert compared["model_entropy_ignores_this_T"]["agrees"]
    wide = compared["same_step_gain_is_V"]
    assert wide["high"] - wide["low"] < 0.6 * wide["value"]  # the interval says something
    assert set(found.models) == {"tempered_entropy", "model_entropy"}
    assert found.frequency["frequency"].shape[0] == 2 * 15


@pytest.mark.parametrize("loop", ["output", "target"])
def test_the_closed_loop_of_the_simulator(bank, loop: str) -> None:
    law = {**BASE["loop"]["temperature"], "gain": 0.2}
    config = from_mapping({**BASE, "loop": {"temperature": law}})
    experiment = Experiment(requests=64, tokens=128, segment=32, loop=loop, amplitude=0.15 if loop == "output" else 1.0)
    found = analyse(run_simulation(config, experiment, bank=bank), experiment, config)
    assert found.numbers["compared"]["loop_gain_with_text"]["agrees"]
    assert 0.0 < found.numbers["loop_pole_modulus"] < 1.0
    assert "loop" in found.models


def level_records(rng: np.random.Generator) -> tuple[Records, float]:
    """Frozen levels excited by a PRBS-like input, with noise: the gain is the varentropy, known exactly."""
    view = LevelView([6.0, 0.0], [1, 400])
    columns: dict[str, list] = {name: [] for name in ("excitation", "input", "tempered", "model", "varentropy")}
    exact = float(view.at(np.ones(1))[1][0])
    for _ in range(40):
        r = rng.choice([-1.0, 1.0], 128) * 0.02
        h = LevelView([6.0, 0.0], [1, 400], 128).at(np.exp(r))[0] + 0.1 * rng.standard_normal(128)
        for name, values in (("excitation", r), ("input", r), ("tempered", h), ("varentropy", np.full(128, exact))):
            columns[name].append(values)
        columns["model"].append(rng.standard_normal(128))
    return Records(**columns), exact


def test_on_known_levels_the_static_gain_is_the_varentropy() -> None:
    records, exact = level_records(np.random.default_rng(0))
    tail = 400 / (400 + np.exp(6.0))
    assert exact == pytest.approx(tail * (1 - tail) * 6.0**2)  # two levels a logit gap of 6 apart
    experiment = Experiment(requests=40, tokens=128, segment=32)
    found = analyse(records, experiment, from_mapping(BASE))
    static = found.numbers["tempered_entropy"]["static_gain"]
    assert static["low"] <= exact <= static["high"]
    assert static["high"] - static["low"] < 0.2 * exact
    floor = found.numbers["model_entropy"]["coherence_floor"]
    mine = found.frequency["output"] == "model_entropy"
    assert (found.frequency["coherence"][mine] > floor).mean() < 0.3  # unrelated noise


def test_a_wrong_theory_is_noticed() -> None:
    records, _ = level_records(np.random.default_rng(0))
    wrong = dataclasses.replace(records, varentropy=[1.3 * v for v in records.varentropy])
    found = analyse(wrong, Experiment(requests=40, tokens=128, segment=32), from_mapping(BASE))
    assert not found.numbers["compared"]["same_step_gain_is_V"]["agrees"]


def test_theta_moves_and_its_records_leave_out_the_dense_first_token(bank) -> None:
    config = from_mapping({**BASE, "loop": {"pruning": {"law": "budget", "theta_nats": 0.05, "theta_wide_nats": 0.05}}})
    experiment = Experiment(input="theta", requests=16, tokens=64, segment=32)
    records = run_simulation(config, experiment, bank=bank)
    theta = np.concatenate(records.input)
    assert theta.min() == pytest.approx(0.025, abs=2e-3)
    assert theta.max() == pytest.approx(0.075, abs=2e-3)
    assert {a.shape[0] for a in records.input} == {63}
    assert "compared" not in analyse(records, experiment, config).numbers


@pytest.mark.parametrize(
    ("loop", "experiment", "match"),
    [
        ({"temperature": {"law": "solve"}}, {"loop": "output"}, "feedback law"),
        ({"temperature": {"law": "fixed", "temperature": 0.8, "t_min": 0.7}}, {"amplitude": 0.5}, "no room"),
        ({"temperature": {"law": "fixed", "temperature": 0.0}}, {}, "greedy"),
        ({}, {"input": "theta", "amplitude": 0.01}, "no budget"),
        ({"temperature": {"law": "fixed", "t_min": 0.01, "t_max": 9.0}}, {"amplitude": 2.0}, "entropy bank"),
    ],
)
def test_experiments_that_cannot_be_run_are_refused(bank, loop: dict, experiment: dict, match: str) -> None:
    with pytest.raises(BadInputError, match=match):
        run_simulation(from_mapping({"loop": loop}), Experiment(**experiment), bank=bank)


def test_too_little_data_is_refused() -> None:
    short = [np.zeros(8)] * 10
    with pytest.raises(BadInputError, match="as long as a segment"):
        analyse(Records(short, short, short, short, short), Experiment(), from_mapping(BASE))
    with pytest.raises(BadInputError, match="no tokens"):
        collect({}, None)
