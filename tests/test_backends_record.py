from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import entropic
from tiny_model import byte_tokenizer, save_tiny, tiny_llama

from backends import models, prompts, response
from backends import record as record_module
from backends.audit import kl_nats
from backends.record import CONTEXTS, TEMPERATURES, record
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
    assert bank.temperature.shape[0] == bank.meta["prompts"] * len(TEMPERATURES)
    assert np.unique(bank.temperature).tolist() == list(TEMPERATURES)
    assert bank.context.tolist() == list(CONTEXTS)
    assert len(bank.meta["kinds"]) >= 5
    assert {"page_tokens", "dense_layers", "sink_pages", "recent_pages", "selection", "command"} <= bank.meta.keys()
    assert (bank.mass_mean <= bank.certificate_mean).all()
    assert (bank.certificate_mean[:, 1:] / bank.mass_mean[:, 1:]).max() < 1.25
    assert (bank.certificate_max <= 1 - np.exp(-bank.theta) + 1e-6).all()
    # longer contexts need a smaller share; two texts do not tell 512 from 1,024 tokens apart
    assert (bank.kept[2:, 1:] < bank.kept[:-2, 1:]).all()
    assert (np.diff(bank.kept[1:], axis=0) < 0)[:, 1:].all()


class StoppedError(Exception):
    pass


def stop_after(parts: int) -> Any:
    """A progress function that breaks the recording off after so many reports."""
    seen = []

    def progress(*event: object) -> None:
        seen.append(event)
        if len(seen) > parts:
            raise StoppedError

    return progress


def test_an_interrupted_recording_resumes_and_gives_the_same_bank(
    model: models.LoadedModel, bank: banks.Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "parts"
    for parts in (1, 3):  # after the first temperature, then after the first context
        with pytest.raises(StoppedError):
            record(model, **SMALL, checkpoint=folder, progress=stop_after(parts))
    kept = {path.name for path in folder.iterdir()}
    assert kept == {"settings.json", "trajectories-0.npz", "trajectories-1.npz", "response-0-64.npz"}
    monkeypatch.setattr(
        record_module, "_generate", lambda *_, **__: pytest.fail("made again")
    )  # what is kept is not made again
    resumed = record(model, **SMALL, checkpoint=folder)
    for field in dataclasses.fields(banks.Bank):  # tokens read again in other chunks round differently
        if field.name == "meta":
            assert resumed.meta == bank.meta
        else:
            np.testing.assert_allclose(getattr(resumed, field.name), getattr(bank, field.name), rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(resumed.entropy_grid, bank.entropy_grid)


def test_parts_of_another_recording_are_refused(model: models.LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        record(model, **SMALL, checkpoint=tmp_path / "parts", progress=stop_after(1))
    with pytest.raises(BadInputError, match=r"parts: seed: holds parts of another"):
        record(model, **SMALL, seed=1, checkpoint=tmp_path / "parts")
    (tmp_path / "parts" / "trajectories-0.npz").write_bytes(b"PK")
    with pytest.raises(BadInputError, match=r"trajectories-0\.npz.*delete this file"):
        record(model, **SMALL, checkpoint=tmp_path / "parts")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis").write_text("years", encoding="utf-8")
    with pytest.raises(BadInputError, match="not a folder of finished parts"):
        record(model, **SMALL, checkpoint=tmp_path / "foreign")


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"temperatures": (0.8, 0.4)}, "temperatures"),
        ({"temperatures": (0.0, 0.4)}, "temperatures"),
        ({"contexts": (128, 64)}, "contexts"),
        ({"contexts": (64, 9000)}, "too short for these contexts"),
        ({"thetas": (0.01, 0.1)}, "thetas"),
        ({"thetas": (0.0, 0.1, 0.1)}, "thetas"),
        ({"positions": (3,)}, "positions"),
    ],
)
def test_lists_that_cannot_be_recorded_are_refused(
    model: models.LoadedModel, changes: dict[str, Any], needle: str
) -> None:
    with pytest.raises(BadInputError, match=needle):
        record(model, **(SMALL | {"max_new_tokens": 1, "prompts": PROMPTS[:1]} | changes))


def test_own_prompts_are_read(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\ntwo\n")
    assert prompts.read_prompts(tmp_path / "p.txt") == (prompts.Prompt("own", "one"), prompts.Prompt("own", "two"))
    (tmp_path / "p.jsonl").write_text('{"text": "a\\nb", "kind": "code", "chat": false}\n{"text": "c"}\n')
    assert prompts.read_prompts(tmp_path / "p.jsonl") == (
        prompts.Prompt("code", "a\nb", chat=False),
        prompts.Prompt("own", "c"),
    )


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        (b"", "no prompts"),
        (b"\xff", "not UTF-8"),
        (b'{"text": "a"}\nb\n', r"p\.jsonl:2"),
        (b'{"text": "a", "temperature": 1}', r"p\.jsonl:1"),
        (b'{"text": 3}', "text"),
        (b'{"text": "a", "chat": 1}', "chat"),
        (b'{"text": ""}', "text"),
        (b"[" * 100_000, r"p\.jsonl:1"),
    ],
)
def test_bad_prompts_are_one_error(tmp_path: Path, text: bytes, needle: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(text)
    with pytest.raises(BadInputError, match=needle):
        prompts.read_prompts(tmp_path / "p.jsonl")


def test_the_command_records_under_the_rule_of_a_config(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    (tmp_path / "run.toml").write_text("engine.page_tokens = 8\n[loop.pruning]\nrecent_pages = 1\ndense_layers = 0\n")
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    options = ("--config", tmp_path / "run.toml", "--model", tmp_path / "model", "--prompts", tmp_path / "p.txt")
    lists = ("--temperatures", "0.5,1.5", "--contexts", "64,128", "--thetas", "0,0.1", "--max-tokens", 6, "--quick")
    status, out, err = entropic("record", "--out", tmp_path / "b.npz", *options, *lists)
    assert status == 0, err
    assert "trajectories" in out
    bank = banks.load(tmp_path / "b.npz")
    assert (bank.meta["page_tokens"], bank.meta["recent_pages"], bank.meta["dense_layers"]) == (8, 1, 0)
    assert bank.meta["command"].startswith("entropic record --config ")
    assert bank.temperature.tolist() == [0.5, 0.5, 1.5, 1.5]
    assert not (tmp_path / "b.npz.parts").exists()
    status, _, err = entropic("record", "--out", tmp_path / "b.npz", *options, "--temperatures", "0.5;1.5")
    assert status == 2
    assert "--temperatures" in err
