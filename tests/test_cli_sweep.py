"""The commands sweep, tune and capacity as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import entropic
from synthetic_bank import make_bank

from entropic_ctl import bank as banks
from entropic_ctl import config as configs
from entropic_ctl import results
from figures import pareto as figure

BODY = """seed = 2
[workload]
kind = "poisson"
n_requests = 4
rate_per_s = 2.0
prompt_tokens = 12.0
output_tokens = 6.0
[engine]
pages = 64
[cost]
bank = '{bank}'
[loop.temperature]
law = "feedback"
target_nats = 1.0
t_min = 0.5
t_max = 1.5
gain = 0.02
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    banks.save(make_bank()[0], tmp_path / "bank.npz")
    path = tmp_path / "run.toml"
    path.write_text(BODY.format(bank=tmp_path / "bank.npz"), encoding="utf-8")
    return path


def test_each_explains_itself_with_an_example() -> None:
    for command in ("sweep", "tune", "capacity"):
        status, out, _ = entropic(command, "--help")
        assert status == 0
        assert "Example:" in out
        assert f"entropic {command}" in " ".join(out.split())
        assert "--json" in out


def test_sweep_certifies_every_point_and_reports_the_ones_it_may_not_run(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("flint")
    out = tmp_path / "sweep"
    grid = ("--grid", "loop.temperature.gain=0.02,0.5", "--workers", 1, "--out", out)
    status, _, err = entropic("sweep", config, *grid, "--json", tmp_path / "s.json")
    assert status == 1
    assert "point 1 failed" in err
    assert "gain" in err
    table, _ = results.read_table(out / "results.parquet")
    assert table["status"].tolist() == ["ok", "failed"]
    assert json.loads((tmp_path / "s.json").read_text())["points_failed"] == 1
    assert entropic("sweep", config, *grid)[0] == 2
    assert entropic("sweep", config, *grid, "--resume")[0] == 1
    assert entropic("sweep", config, *grid, "--resume", "--seed", 3)[0] == 2
    status, _, err = entropic("sweep", config, "--grid", "loop.temprature.gain=1,2", "--out", tmp_path / "no")
    assert status == 2
    assert "did you mean 'loop.temperature.gain'" in err


def test_tune_writes_a_config_that_prove_simulate_and_the_engine_accept(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("flint")
    pytest.importorskip("optuna")
    out = tmp_path / "tune"
    options = ("--trials", 5, "--repeats", 2, "--workers", 1, "--out", out, "--choice", "loop.pruning.law=off")
    gain = ("--choice", "loop.temperature.law=feedback", "--objectives", "latency,tau_per_second,quality")
    status, shown, err = entropic("tune", config, *options, *gain, "--json", tmp_path / "t.json")
    assert status == 0, err
    assert "quality" in shown
    tuned = configs.load(out / "tuned.toml")
    trials, _ = results.read_table(out / "trials.parquet")
    best = int(np.argmin(trials["weighted"]))
    assert trials["chosen"].tolist() == [i == best for i in range(5)]
    assert tuned.loop.temperature.config.gain == trials["loop.temperature.gain"][best]
    said = json.loads((out / "pareto.json").read_text())
    assert said["chosen"]["trial"] == best
    assert said["held_out"]["repeats"] == 4
    for member in said["pareto"]:
        assert configs.load(out / member["file"]).loop.temperature.name == "feedback"
        assert bool(trials["pareto"][member["trial"]])
    assert (out / "pareto.png").stat().st_size > 10_000
    certificate = tmp_path / "cert.json"
    assert entropic("prove", out / "tuned.toml", "--out", certificate)[0] == 0
    assert entropic("check", certificate, out / "tuned.toml")[0] == 0
    status, _, err = entropic("simulate", out / "tuned.toml", "--certificate", certificate)
    assert status == 0, err
    before = (out / "trials.csv").read_bytes()
    assert entropic("tune", config, *options, *gain, "--resume")[0] == 0
    assert (out / "trials.csv").read_bytes() == before
    status, _, err = entropic("tune", config, *options, *gain, "--resume", "--batch", 1)
    assert status == 2
    assert "plan.batch" in err


def test_tune_refuses_gains_nothing_certifies(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("flint")
    wide = ("--range", "loop.temperature.gain=0.01:0.5", "--out", tmp_path / "t")
    status, _, err = entropic("tune", config, *wide)
    assert status == 2
    assert "range leaves the certified gains" in err
    for option in (("--choice", "loop.scheduling.policy=fcfs,zzz"), ("--range", "seed=1:2")):
        status, _, err = entropic("tune", config, "--out", tmp_path / "t", *option)
        assert (status, err.count("\n")) == (2, 1), err
    assert not (tmp_path / "t").exists()
    for bad in (("--objectives", "speed"), ("--law", "tempo"), ("--weight", "latency"), ("--sampler", "grid")):
        assert entropic("tune", config, "--trials", 2, "--workers", 1, "--out", tmp_path / bad[0], *bad)[0] == 2


def test_capacity_prints_an_interval_and_refuses_closed_loops(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("flint")
    file = tmp_path / "c.json"
    options = ("--slo-ttft", 1.0, "--percentile", 50, "--repeats", 4, "--tolerance", 0.3, "--workers", 1)
    status, out, err = entropic("capacity", config, *options, "--requests", 20, "--json", file)
    assert status == 0, err
    assert "shown_to_hold" in out
    found = json.loads(file.read_text())
    assert 0 < found["shown_to_hold"] <= found["rate"] <= found["shown_to_fail"]
    assert found["slo"] == {"ttft_s": 1.0, "tpot_s": None, "percentile": 50.0}
    verdicts = {trial["rate"]: trial["verdict"] for trial in found["trials"]}
    assert verdicts[found["shown_to_hold"]] == "holds"
    assert verdicts[found["shown_to_fail"]] == "fails"
    config.write_text(config.read_text().replace("poisson", "closed"))
    status, _, err = entropic("capacity", config, *options)
    assert status == 2
    assert "workload.kind" in err
    assert entropic("capacity", config)[0] == 2  # no objective


def test_the_figure_needs_its_columns(tmp_path: Path) -> None:
    table = {
        "trial": np.arange(2),
        "status": np.array(["ok", "ok"]),
        "pareto": np.array([True, False]),
        "chosen": np.array([True, False]),
    }
    with pytest.raises(ValueError, match="no objective"):
        figure.draw(table, tmp_path / "p.png")
    one = {f"cost.latency{end}": np.zeros(2) for end in ("", "_low", "_high")}
    with pytest.raises(ValueError, match="weighted"):
        figure.draw({**table, **one}, tmp_path / "p.png")
    weighted = {f"weighted{end}": np.zeros(2) for end in ("", "_low", "_high")}
    figure.draw({**table, **one, **weighted}, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5_000
