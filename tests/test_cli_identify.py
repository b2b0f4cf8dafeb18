"""The commands ``identify`` and ``stability``, end to end on small runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import entropic
from synthetic_bank import make_bank

from entropic_ctl import bank as banks
from entropic_ctl.results import read_table


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("identify")
    banks.save(make_bank(seed=3, prompts=4, lengths=(60, 90), ended=False)[0], folder / "bank.npz")
    path = folder / "run.toml"
    path.write_text(
        f'[cost]\nbank = "{folder / "bank.npz"}"\n[engine]\nmax_batch = 16\n'
        '[loop.temperature]\nlaw = "feedback"\ntarget_nats = 1.5\ngain = 0.1\nt_min = 0.45\n'
    )
    return path


def test_identify_writes_tables_models_and_a_figure(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    small = ("--requests", 24, "--tokens", 64, "--segment", 32, "--json", tmp_path / "i.json")
    status, shown, _ = entropic("identify", config, "--out", out, *small, "--loop", "output")
    assert status == 0
    assert "same step gain is V" in shown
    frequency, stamp = read_table(out / "frequency.parquet")
    assert set(frequency["output"]) == {"tempered_entropy", "model_entropy"}
    assert stamp["seed"] == 0
    models = json.loads((out / "models.json").read_text())["models"]
    assert set(models) == {"loop", "tempered_entropy", "model_entropy"}
    assert (out / "bode.png").stat().st_size > 10_000


@pytest.mark.parametrize("extra", [("--amplitude", "3"), ("--input", "theta"), ("--segment", "33")])
def test_identify_refuses_what_it_cannot_run(config: Path, tmp_path: Path, extra: tuple[str, ...]) -> None:
    status, _, error = entropic("identify", config, "--out", tmp_path / "out", "--requests", 8, "--tokens", 64, *extra)
    assert status == 2
    assert "allowed" in error
    assert not (tmp_path / "out").exists()


def test_stability_refuses_a_law_without_feedback(tmp_path: Path) -> None:
    path = tmp_path / "fixed.toml"
    path.write_text('[loop.temperature]\nlaw = "fixed"\n')
    status, _, error = entropic("stability", path, "--out", tmp_path / "out")
    assert status == 2
    assert "feeds back" in error
