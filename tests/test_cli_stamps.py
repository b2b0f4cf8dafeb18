"""What a command measured is stamped with the settings that ran, not with defaults that did not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import entropic
from synthetic_bank import make_bank

from backends import models, record
from entropic_ctl import cli_run
from sim import bench


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_bench_sim_is_stamped_with_the_run_it_timed(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.0,20,3\n")
    cli_run.bench_sim(trace, loop=False, repeat=1, json_file=tmp_path / "b.json")
    stamp = read(tmp_path / "b.json")["stamp"]
    assert stamp["config"]["workload"]["kind"] == "azure"
    assert stamp["config"]["engine"]["max_batch"] == bench.bench_config(trace, loop=False).engine.max_batch
    assert {"seed", "version", "commit", "hardware", "versions", "config_digest"} <= stamp.keys()


def test_a_bank_is_recorded_in_float32_and_names_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load(path: str, dtype: str, device: str) -> None:
        asked.update(path=path, dtype=dtype, device=device)

    def fake(model: None, **settings: Any) -> Any:
        asked.update(settings)
        return make_bank()[0]

    monkeypatch.setattr(models, "load", load)
    monkeypatch.setattr(record, "record", fake)
    options = ("--model", "some/model", "--seed", 3, "--quick", "--json", tmp_path / "b.json")
    status, _, err = entropic("record", "--out", tmp_path / "b.npz", *options)
    assert status == 0, err
    assert asked["dtype"] == "float32"
    assert asked["command"] == "entropic record --model some/model --seed 3 --quick"
    assert read(tmp_path / "b.json")["stamp"]["config"]["model"]["dtype"] == "float32"
