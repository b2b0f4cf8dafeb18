"""Demonstration and reproduction from end to end, on a tiny random model and a synthetic bank."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("flint")
pytest.importorskip("optuna")

from metrics_doc import undefined
from synthetic_bank import make_bank
from tiny_model import byte_tokenizer, tiny_llama

from backends import models
from entropic_ctl import replay, results
from entropic_ctl.cli import app
from entropic_ctl.signals import StepPlan, StepResult
from paper_repro import demo, repro, setup
from paper_repro.claims import ARMS
from paper_repro.guarantee import Guarantee

TINY = setup.Size(sim_requests=6, sim_repeats=2, engine_repeats=2, max_new_tokens=5, tune_trials=2, long_tokens=400)


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    bank, _ = make_bank(prompts=6, temperatures=(0.3, 0.9, 1.6), grid=np.array([0.2, 0.5, 0.9, 1.4, 2.0]))
    model = models.wrap(tiny_llama(num_hidden_layers=4), byte_tokenizer(), name="tiny")
    return {"model": model, "bank": bank}


@pytest.fixture(scope="module")
def shown(tiny: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, list[float]]:
    work = tmp_path_factory.mktemp("demo")
    shares: list[float] = []
    outcome = demo.run(work, seed=3, size=TINY, progress=lambda _, share: shares.append(share), **tiny)
    return work, outcome, shares


def test_demo_writes_tables_figures_and_report(shown: tuple[Path, Any, list[float]]) -> None:
    work, outcome, shares = shown
    assert outcome.violations == []
    runs, stamp = results.read_table(work / "runs.parquet")
    assert stamp["seed"] == 3
    assert stamp["engine_config"]["engine"]["audit_every"] == 4  # the engine rows ran under their own limits
    counts = {w: int((runs["world"] == w).sum()) for w in ("simulation", "engine")}
    assert counts == {"simulation": (len(ARMS) + 1) * 2, "engine": 2 * 2}  # and the control
    for name in ("ablation", "generation", "phase", "pruning_cost"):
        assert (work / f"{name}.png").stat().st_size > 10_000
    page = (work / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 4
    assert "What got worse" in page
    for part in ("Summary", "2603.03310", "Words used below", "must not be compared", "p99 latency", "token limit"):
        assert part in page
    assert page.count("&quot;prefill_chunk&quot;") == 2  # the configuration stands there once, and in the certificate
    assert "What causes the seasons on Earth?" in page
    assert "How to reproduce" in page
    assert "Control, simulation" in page
    assert shares == sorted(shares)
    said, measured = (results.read_table(work / f"{name}.parquet")[0]["metric"] for name in ("paper_claims", "effects"))
    assert set(said.tolist()) <= set(measured.tolist())  # the figure finds a claim by our metric's name
    assert {"latency", "throughput", "dτ/d second", "dτ/d FLOP", "dτ/d KV byte"} <= set(said.tolist())
    json.dumps(outcome.numbers, allow_nan=False)
    assert not undefined("repro", outcome.numbers)


def test_the_same_tuned_loop_ran_in_both_worlds_and_was_certified(shown: tuple[Path, Any, list[float]]) -> None:
    work, outcome, _ = shown
    full = outcome.numbers["loop"]["full loop"]
    with (work / "engine-full-loop.jsonl").open() as log:
        header = json.loads(log.readline())
    assert header["loop"] == full
    certificate = json.loads((work / "certificate.json").read_text())
    gain = next(claim for claim in certificate["claims"] if claim["theorem"] == "gain-lag-0")
    assert gain["status"] == "proved"
    assert certificate["about"]["loop"]["temperature"]["gain"] == full["temperature"]["gain"]
    assert full["temperature"]["gain"] < gain["numbers"]["limit_every_target"]


def test_engine_runs_of_all_arms_saw_the_same_prompts_and_count_alike(shown: tuple[Path, Any, list[float]]) -> None:
    work, _, _ = shown
    runs, _ = results.read_table(work / "runs.parquet")
    engine = runs["world"] == "engine"
    assert (runs["requests_finished"][engine] == 8).all()
    assert (runs["kl_nats"][engine & (runs["arm"] == "baseline")] == 0).all()
    full = engine & (runs["arm"] == "full loop")
    assert (runs["pruned_rows"][full] > 0).all()
    assert (runs["violations"][full] == 0).all()
    assert (runs["kl_nats"][full] >= 0).all()


def test_the_log_of_the_demo_replays(shown: tuple[Path, Any, list[float]]) -> None:
    work, outcome, _ = shown
    assert replay.replay(work / "engine-full-loop.jsonl").equal
    assert "every host decision equal" in " ".join(outcome.numbers["guarantees"])


def test_a_tampered_log_is_a_violated_guarantee(shown: tuple[Path, Any, list[float]], tmp_path: Path) -> None:
    work, outcome, _ = shown
    log = tmp_path / "log.jsonl"
    lines = (work / "engine-full-loop.jsonl").read_text().splitlines()
    at = max(i for i, line in enumerate(lines) if json.loads(line)["event"] == "plan")
    event = json.loads(lines[at])
    event["theta_nats"] = [0.5 for _ in event["theta_nats"]]
    lines[at] = json.dumps(event)
    log.write_text("\n".join(lines) + "\n")
    study = demo.Study(tmp_path, "t", outcome.config, {}, "c")
    demo.verify_replay(study, {"full loop": log})
    assert len(study.violations) == 1
    assert "theta" in study.violations[0]


def test_repro_judges_every_claim_in_both_worlds(tiny: dict[str, Any], tmp_path: Path) -> None:
    outcome = repro.run(tmp_path, quick=True, seed=1, repeats=2, size=TINY, **tiny)
    effects, _ = results.read_table(tmp_path / "effects.csv")
    claimed = effects["verdict"] != ""
    judged = set(zip(effects["world"][claimed].tolist(), effects["arm"][claimed].tolist(), strict=True))
    assert judged == {(world, arm) for world in ("simulation", "engine") for arm in ARMS[1:]}
    allowed = {"reproduced", "partly", "not reproduced", "refuted", "not identifiable"}
    assert set(effects["verdict"][claimed].tolist()) <= allowed
    quality = effects["metric"] == "quality"
    assert set(effects["verdict"][quality].tolist()) == {"not identifiable"}
    assert outcome.violations == []
    synergy, _ = results.read_table(tmp_path / "synergy.parquet")
    assert {"simulation", "engine"} == set(synergy["world"].tolist())


@pytest.mark.parametrize(("violations", "status"), [([], 0), (["certificate exceeded"], 1)])
def test_exit_status_of_the_demo(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shown: tuple[Path, Any, list[float]],
    violations: list[str],
    status: int,
) -> None:
    outcome = dataclasses.replace(shown[1], violations=violations)
    monkeypatch.setattr(demo, "run", lambda *_, **__: outcome)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "d"), "--json", str(tmp_path / "d.json")])
    assert result.exit_code == status
    assert "What got worse" in result.stdout
    assert json.loads((tmp_path / "d.json").read_text())["stamp"]["seed"] == 3


def one_step(theta: list[float], certificate: list[float]) -> tuple[StepPlan, StepResult]:
    n = len(theta)
    ints, none = np.arange(n), np.empty(0, np.int64)
    plan = StepPlan(
        0, 0.0, ints, ints, ints + 9, np.ones(n, np.int64), np.ones(n, bool), np.zeros(n, bool), np.array(theta),
        np.zeros(n, np.int64), none, none, (), np.zeros((n, 1), np.int32), np.zeros((0, 3), np.int32),
    )  # fmt: skip
    mass = 1 - np.exp(-np.array(certificate))
    result = StepResult(
        0, 0.0, 1.0, kept_fraction=np.full(n, 0.5), pruned_mass_mean=mass / 2, pruned_mass_max=mass,
        certificate_max=np.array(certificate),
    )  # fmt: skip
    return plan, result


@pytest.mark.parametrize(
    ("theta", "certificate", "rows", "violations"),
    [
        ([0.02, 0.0], [0.019, 0.0], 1, 0),
        ([0.02, 0.02], [0.02, 0.0201], 2, 1),
        ([0.02], [float("nan")], 1, 1),
        ([0.0], [0.0], 0, 0),
    ],
)
def test_guarantee_counts_rows_over_budget(
    theta: list[float], certificate: list[float], rows: int, violations: int
) -> None:
    watch = Guarantee()
    watch.step(*one_step(theta, certificate), ())
    assert (watch.rows, watch.violations) == (rows, violations)
