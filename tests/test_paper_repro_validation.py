"""`entropic validate` end to end on a tiny model: interrupted, taken up again, judged, drawn, reported."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from command import entropic
from metrics_doc import undefined
from synthetic_bank import make_bank
from tiny_model import save_tiny

from backends import models, trials
from backends.machine import ForeignLoad, SpeedProbe, busy_s
from entropic_ctl.config import from_mapping
from entropic_ctl.errors import BadInputError
from entropic_ctl.results import read_table
from paper_repro import validation, validation_report
from sim import calibrated, validate
from sim.validation_plan import Scale
from sim.validation_run import cells, runs

SCALE = Scale(
    requests=5,
    repeats=1,
    blocks=8,
    block_requests=6,
    prompt_mean=60,
    prompt_max=150,
    output_range=(3, 8),
    calibration_prompt_max=300,
    block_gap_s=0.005,
    tries=1,
)
CONFIG = from_mapping({"engine": {"pages": 300, "max_batch": 6}, "loop": {"temperature": {"temperature": 0.8}}})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> models.LoadedModel:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return models.load(str(folder), "float32")


@pytest.fixture(scope="module")
def done(
    model: models.LoadedModel, tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> tuple[validation.Validation, validation.Findings]:
    folder = tmp_path_factory.mktemp("validation") / "v"
    bank, _ = make_bank(prompts=6)
    begun = validation.Validation(folder, CONFIG, model, scale=SCALE, bank=bank)
    assert not begun.measure(minutes=0.0)  # time is up at once
    with pytest.raises(BadInputError, match="--resume"):
        validation.Validation(folder, CONFIG, model, scale=SCALE, bank=bank)
    work = validation.Validation(folder, CONFIG, model, scale=SCALE, bank=bank, resume=True)
    said: list[str] = []
    assert work.measure(progress=lambda what, share: said.append(what))
    assert said
    findings = work.judge()
    work.write(findings)
    return work, findings


def test_every_cell_is_compared_and_both_worlds_made_the_same_tokens(
    done: tuple[validation.Validation, validation.Findings],
) -> None:
    work, findings = done
    errors = findings.errors
    assert set(zip(errors["setting"].tolist(), errors["utilisation"].tolist(), strict=True)) == set(cells())
    assert np.isfinite(errors["error"]).all()
    wanted = int(work.load.output_tokens.sum())
    trials_ = findings.runs["setting"] != "block"
    np.testing.assert_array_equal(findings.runs["output_tokens"][trials_], wanted)
    for world in ("engine", "simulator"):
        mine = findings.requests["world"] == world
        assert np.isfinite(findings.requests["ttft_s"][mine]).all()
    assert (errors["simulated"] > 0).all()
    assert {r.metric for r in findings.rankings} == set(validate.RANKED)


def test_calibration_saw_the_blocks_only(done: tuple[validation.Validation, validation.Findings]) -> None:
    work, findings = done
    assert findings.calibration.source
    assert all(name.startswith("block-") for name in findings.calibration.source)
    assert {path.stem.split("-")[0] for path in work.folder.glob("*.jsonl")} == {"block", "journal"}
    assert calibrated.read(work.folder / "calibration.json").iterations == findings.calibration.iterations


def test_the_folder_holds_tables_picture_and_report(done: tuple[validation.Validation, validation.Findings]) -> None:
    work, findings = done
    table, stamp = read_table(work.folder / "errors.csv")
    np.testing.assert_allclose(table["error"], findings.errors["error"])
    assert stamp["seed"] == CONFIG.seed
    assert (work.folder / "validation.png").stat().st_size > 20_000
    text = (work.folder / "report.html").read_text()
    for words in ("Repeat noise", "full loop", "Separated pairs ranked alike", "dense_context"):
        assert words in text or words.lower() in text
    first, rest = runs(CONFIG.seed, SCALE)
    assert findings.runs["setting"].shape[0] >= len(first) + len(rest)
    numbers = validation_report.numbers(findings)
    assert numbers["ok"] in (True, False)
    assert not undefined("validate", {"validation": numbers})


def test_an_error_beyond_its_target_is_a_negative_verdict(
    done: tuple[validation.Validation, validation.Findings],
) -> None:
    _, findings = done
    good = {**findings.errors, "ok": np.ones_like(findings.errors["ok"])}
    ranked = [validate.Ranking("tpot_mean_s", 66, 40, 39, (), np.zeros((0, 0), np.int64))]
    fine = dataclasses.replace(findings, errors=good, rankings=ranked)
    assert fine.ok
    assert not dataclasses.replace(fine, rankings=[ranked[0]._replace(alike=37)]).ok
    broken = good["ok"].copy()
    broken[int(np.flatnonzero((good["setting"] == "base") & np.isfinite(good["target"]))[0])] = False
    assert not dataclasses.replace(fine, errors={**good, "ok": broken}).ok


def test_a_trial_keeps_lengths_arrivals_and_order(model: models.LoadedModel, one_thread: None) -> None:
    lengths, outputs = np.array([20, 40, 30]), np.array([4, 1, 6])
    pieces = trials.prompts(model, lengths, np.array([0, 5, 9]))
    assert [len(piece) for piece in pieces] == lengths.tolist()
    arrival = np.array([0.0, 0.05, 0.3])
    trial = trials.run_trial(CONFIG, model, pieces, arrival, outputs)
    np.testing.assert_array_equal(trial.requests["output_tokens"], outputs)
    np.testing.assert_array_equal(trial.requests["prompt_tokens"], lengths)
    np.testing.assert_allclose(trial.requests["arrival_s"], arrival, atol=1e-9)
    assert (trial.steps["start_s"] >= 0).all()
    assert np.isnan(trial.requests["tpot_s"][1])  # one token has no TPOT
    assert trial.reference_s > 0
    assert trial.probe_s > 0


def test_foreign_load_is_what_others_used(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 5000 40 1 2 7 9 0\ncpu0 1 2\n")
    assert busy_s(stat) * 100 == pytest.approx(100 + 20 + 30 + 1 + 2 + 7)  # idle, iowait and guests left out
    assert np.isnan(busy_s(tmp_path / "none"))
    assert ForeignLoad().cores() >= 0 or np.isnan(ForeignLoad().cores())


def test_a_probe_samples_only_when_it_is_due() -> None:
    probe = SpeedProbe(every_s=1e6)
    assert np.isnan(probe.mean_s)
    probe.sample()
    first = probe.mean_s
    probe.sample()
    assert probe.mean_s == first > 0


def test_the_command_stops_in_time_and_goes_on(model: models.LoadedModel, tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny")
    arguments = ("validate", "--quick", "--model", tmp_path / "tiny", "--out", tmp_path / "out", "--minutes", 0)
    status, _, err = entropic(*arguments)
    assert status == 0
    assert "not finished: 0 runs" in err
    status, _, err = entropic(*arguments)
    assert status == 2
    assert "--resume" in err
    assert entropic(*arguments, "--resume")[0] == 0
