from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import byte_tokenizer, tiny_llama

from backends import models, prompts, response
from backends.audit import kl_nats
from backends.record import record
from entropic_ctl import bank as banks
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig

PROMPTS = (prompts.Prompt("a", "one"), prompts.Prompt("b", "two two"), prompts.Prompt("a", "three"))
SMALL = {
    "prompts": PROMPTS,
    "temperatures": (0.5, 1.5),
    "max_new_tokens": 12,
    "grid": (0.5, 1.0, 1.5),
    "contexts": (64, 128),
    "thetas": (0.0, 0.05, 0.5),
    "texts": 1,
    "positions": 3,
    "page_tokens": 8,
    "pruning": PruningConfig(dense_layers=0, recent_pages=1),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> models.LoadedModel:
    return models.wrap(tiny_llama(), byte_tokenizer(), name="tiny")


@pytest.fixture(scope="module")
def bank(model: models.LoadedModel) -> banks.Bank:
    return record(model, **SMALL)


def test_trajectories_are_what_the_engine_saw(bank: banks.Bank) -> None:
    assert bank.meta["kinds"] == ["a", "b"]
    assert bank.temperature.tolist() == [0.5] * 3 + [1.5] * 3
    assert bank.prompt.tolist() == [0, 1, 2] * 2
    assert bank.prompt_kind.tolist() == [0, 1, 0] * 2
    lengths = np.diff(bank.offset)
    assert ((lengths == 12) | bank.ended).all()
    # the grid holds T = 1, where the tempered entropy is the model entropy
    np.testing.assert_allclose(bank.entropy_grid[:, 1], bank.model_entropy, atol=1e-5)
    assert (np.diff(bank.entropy_grid, axis=1) >= 0).all()  # entropy rises with T
    assert (bank.varentropy_grid >= 0).all()


def test_varentropy_is_the_slope_of_entropy_in_log_temperature(model: models.LoadedModel) -> None:
    grid = (0.99, 1.0, 1.01)
    fine = record(model, **(SMALL | {"grid": grid, "temperatures": (1.0,), "contexts": (16, 32), "thetas": (0.0, 0.1)}))
    slope = (fine.entropy_grid[:, 2] - fine.entropy_grid[:, 0]) / np.log(1.01 / 0.99)
    np.testing.assert_allclose(slope, fine.varentropy_grid[:, 1], rtol=0.02, atol=1e-3)


def test_response_is_dense_at_zero_and_certified_elsewhere(bank: banks.Bank) -> None:
    for name in ("certificate_mean", "certificate_max", "mass_mean", "kl", "entropy_shift"):
        assert (getattr(bank, name)[:, 0] == 0).all()
    assert (bank.kept[:, 0] == 1).all()
    assert (bank.kept[:, -1] < 1).all()
    assert (np.diff(bank.kept, axis=1) <= 0).all()  # a wider budget reads less
    assert (bank.mass_mean <= bank.certificate_mean + 1e-12).all()
    assert (bank.certificate_max <= 1 - np.exp(-bank.theta) + 1e-6).all()
    assert (bank.kl[:, 1:] >= 0).all()


def test_same_seed_same_bank_also_from_file(model: models.LoadedModel, bank: banks.Bank, tmp_path: Path) -> None:
    again, other = record(model, **SMALL), record(model, **SMALL, seed=1)
    for field in dataclasses.fields(banks.Bank):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(bank, field.name))
    assert not np.array_equal(other.model_entropy, bank.model_entropy)
    banks.save(bank, tmp_path / "bank.npz")
    loaded = banks.load(tmp_path / "bank.npz")
    np.testing.assert_allclose(loaded.entropy_grid, bank.entropy_grid, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(loaded.kl, bank.kl)


def test_recording_reports_its_progress(model: models.LoadedModel) -> None:
    seen: list[tuple[str, int, int]] = []
    record(model, **SMALL, progress=lambda *event: seen.append(event))
    assert seen[0] == ("trajectories", 0, 2)
    assert seen[-1] == ("response to theta", 2, 2)


def test_response_refuses_short_texts_and_overlapping_contexts(model: models.LoadedModel) -> None:
    text = list(range(100))
    with pytest.raises(BadInputError, match=r"too short.*100"):
        response.measure_response(model, [text], [64, 99], [0.0, 0.1], positions=4)
    with pytest.raises(BadInputError, match="overlap"):
        response.measure_response(model, [text], [64, 66], [0.0, 0.1], positions=4)


def test_kl_closed_form() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25, 0.0]]), torch.tensor([[0.25, 0.25, 0.25, 0.25]])
    assert kl_nats(p.log(), q.log())[0] == pytest.approx(0.5 * np.log(2), abs=1e-7)
    assert kl_nats(q.log(), p.log())[0] == np.inf
    assert kl_nats(p.log() + 3.0, p.log())[0] == pytest.approx(0.0, abs=1e-7)


def test_prompts_and_the_long_document(model: models.LoadedModel) -> None:
    assert len(prompts.PROMPTS) == 12
    assert set(prompts.KINDS) == {"question", "story", "code", "list", "arithmetic", "document"}
    ids = prompts.document_ids(model, 3000)
    assert prompts.document_ids(model, 1000, start=2000) == ids[2000:]
    assert prompts.document().startswith(model.decode(ids).rstrip("\ufffd"))


def test_the_shipped_bank_is_whole_small_and_sane() -> None:
    path = Path(__file__).resolve().parents[1] / "sim" / "data" / "smollm2-135m.npz"
    assert path.stat().st_size < 1_000_000
    bank = banks.load(path)
    assert bank.meta["model"] == models.DEFAULT
    assert bank.meta["dtype"] == "float32"
    assert bank.temperature.shape[0] == bank.meta["prompts"] * 5
    assert (bank.mass_mean <= bank.certificate_mean).all()
    assert (bank.certificate_mean[:, 1:] / bank.mass_mean[:, 1:]).max() < 1.25
    assert (bank.certificate_max <= 1 - np.exp(-bank.theta) + 1e-6).all()
    assert (np.diff(bank.kept, axis=0) < 0)[:, 1:].all()  # longer contexts need a smaller share
