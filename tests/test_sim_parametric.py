"""The fitted entropy model: what it generates, its file, and the simulator on it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_bank import make_bank

from entropic_ctl import bank as banks
from entropic_ctl import config as configs
from entropic_ctl.errors import BadInputError
from sim import parametric
from sim.hazard import fit_hazard
from sim.model_file import read_model, write_model
from sim.replica import simulate
from sim.trajectories import load_bank

BANK, _ = make_bank(prompts=6, lengths=(40, 80))
MODEL = parametric.fit_model(BANK, 2)


@given(st.floats(0, 11))
def test_the_transform_is_inverted(h: float) -> None:
    assert parametric.from_x(parametric.to_x(np.array([h])))[0] == pytest.approx(h, abs=1e-9)


def test_a_generated_bank_is_a_bank_like_the_recorded_one() -> None:
    bank = parametric.generate(MODEL, prompts=5)  # construction validates it
    assert np.unique(bank.temperature).tolist() == np.unique(BANK.temperature).tolist()
    assert bank.prompt.tolist() == list(range(5)) * 4
    assert np.diff(bank.offset).max() <= np.diff(BANK.offset).max()  # nothing beyond the recording limit
    assert ((np.diff(bank.offset) == MODEL.limit) | bank.ended).all()
    assert (np.diff(bank.entropy_grid, axis=1) >= -1e-6).all()
    assert bank.meta["synthetic"] is True
    for name in parametric.RESPONSE:
        np.testing.assert_array_equal(getattr(bank, name), getattr(BANK, name))


def test_same_seed_same_bank_other_seed_another() -> None:
    a, b, c = (parametric.generate(MODEL, seed=seed, prompts=3) for seed in (1, 1, 2))
    for field in dataclasses.fields(banks.Bank):
        if field.name != "meta":
            np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))
    assert a.model_entropy[:20].tolist() != c.model_entropy[:20].tolist()


def test_texts_end_with_the_fitted_hazard() -> None:
    """A hazard of 5% whatever token and temperature: lengths are geometric, cut off at the limit."""
    model = dataclasses.replace(MODEL, hazard=np.array([np.log(0.05 / 0.95), 0.0, 0.0, 0.0]), limit=60)
    bank = parametric.generate(model, prompts=400)
    length = np.diff(bank.offset)
    share = 0.95**60
    mean, n = (1 - share) / 0.05, length.shape[0]
    assert abs(length.mean() - mean) < 4 * length.std() / np.sqrt(n)
    assert abs((~bank.ended).mean() - share) < 4 * np.sqrt(share / n)


def test_the_hazard_is_found_again() -> None:
    """Ends follow ln T: fit the hazard of a bank generated with a known one."""
    truth = np.array([-4.0, 0.0, -1.5, 0.0])
    bank = parametric.generate(dataclasses.replace(MODEL, hazard=truth, limit=80), prompts=300)
    found = fit_hazard(bank)
    assert found is not None
    u = np.log(bank.temperature)
    for token in (5.0, 40.0):
        logit = found[0] + found[1] * np.log(token) + found[2] * u + found[3] * u * u
        np.testing.assert_allclose(logit, truth[0] + truth[2] * u, atol=0.25)


def test_no_recorded_end_means_no_generated_end() -> None:
    bank, _ = make_bank(prompts=3, lengths=(60, 80), ended=False)
    model = parametric.fit_model(bank, 1)
    assert model.hazard is None
    assert not parametric.generate(model, prompts=3).ended.any()


def test_the_file_gives_the_same_bank(tmp_path: Path) -> None:
    write_model(tmp_path / "m.json", MODEL)
    a, b = parametric.generate(MODEL, seed=3, prompts=4), load_bank(str(tmp_path / "m.json"), seed=3, prompts=4)
    np.testing.assert_array_equal(a.model_entropy, b.model_entropy)
    np.testing.assert_array_equal(a.varentropy_grid, b.varentropy_grid)


def _set(path: str, value: object) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        *way, last = path.split(".")
        for key in way:
            values = values[int(key) if key.isdigit() else key]
        if value is None:
            del values[last]
        else:
            values[int(last) if last.isdigit() else last] = value

    return change


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        (_set("schema", 2), "another version"),
        (_set("kind", "x"), "not an entropy model"),
        (_set("limit", 0), "limit"),
        (_set("limit", True), "limit"),
        (_set("prompt_share", 1.5), "prompt_share"),
        (_set("temperature", [0.8, 0.3, 1.2, 1.6]), "temperature"),
        (_set("regimes", []), "regimes"),
        (_set("regimes.0.phi.0", 1.0), "phi"),
        (_set("regimes.0.sigma.0", -1.0), "sigma"),
        (_set("regimes.0.transition.0.0", 0.999), "transition"),
        (_set("regimes.0.level", None), "level"),
        (_set("regimes.1.level.0", float("nan")), "level"),
        (_set("curves.mean", [[1.0]]), "mean"),
        (_set("curves.rest.0.0", -1.0), "rest"),
        (_set("hazard", [1.0]), "hazard"),
        (_set("meta.vocab_size", "many"), "vocab_size"),
        (_set("response.kept", None), "kept"),
        (_set("response.kept.0.0", 2.0), "kept"),
        (_set("theta.0", 0.001), "theta"),
        (_set("first.0.1", -1.0), "first"),
        (_set("grid", 3), "grid"),
    ],
)
def test_a_damaged_model_is_one_clear_error(tmp_path: Path, change: Callable[[Any], None], needle: str) -> None:
    write_model(tmp_path / "m.json", MODEL)
    values = json.loads((tmp_path / "m.json").read_text())
    change(values)
    (tmp_path / "m.json").write_text(json.dumps(values))
    with pytest.raises(BadInputError, match=rf"m\.json.*{needle}"):
        read_model(tmp_path / "m.json")


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "3"])
def test_what_is_no_model_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(BadInputError, match=r"m\.json"):
        read_model(tmp_path / "m.json")


def test_the_simulator_reads_a_model_like_a_bank(tmp_path: Path) -> None:
    write_model(tmp_path / "m.json", MODEL)

    def run(seed: int) -> Any:
        tables = {
            "seed": seed,
            "workload": {"n_requests": 12, "prompt_tokens": 300, "output_tokens": 50},
            "cost": {"bank": str(tmp_path / "m.json"), "bank_prompts": 7},
            "loop": {"temperature": {"law": "solve", "target_nats": 1.0}, "pruning": {"law": "budget"}},
        }
        return simulate(configs.from_mapping(tables))

    a, b, other = run(1), run(1), run(2)
    assert a.summary["requests_finished"] == 12
    np.testing.assert_array_equal(a.requests["tau_nats"], b.requests["tau_nats"])
    assert a.summary["tau_nats"] != other.summary["tau_nats"]  # the run's seed draws the texts, too


def test_a_bank_too_small_to_fit_is_refused() -> None:
    small, _ = make_bank(prompts=1, lengths=(20, 30))
    with pytest.raises(BadInputError, match="too few tokens"):
        parametric.fit_model(small, 3)
    with pytest.raises(BadInputError, match="too few prompts"):
        parametric.held_out(small, (1,))
