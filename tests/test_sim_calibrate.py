"""Calibration recovers a known machine within its standard errors, and a machine of another kind shows as misfit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from command import entropic
from engine_log_maker import PRUNED, config, write_log

from entropic_ctl.errors import BadInputError
from entropic_ctl.results import write_json
from sim import calibrate, calibrated
from sim.calibrated import TERMS, CalibratedCost
from sim.cost import LinearCost
from sim.engine_log import read_logs
from sim.load import StepLoad

TRUE = {
    "sampling_row": 1.2e-3,
    "dense_row": 0.6e-3,
    "dense_context": 4e-6,
    "prefill_row": 3e-3,
    "prefill_context": 2.5e-5,
    "prefill_pair": 4e-7,
    "pruning_step": 30e-3,
    "pruned_row": 2e-3,
    "pruned_context": 9e-6,
    "kept_context": 6e-6,
    "sealed_page": 1.2e-3,
}


def table(tokens: float) -> float:
    return 0.020 + 2.7e-4 * tokens


def rule(load: StepLoad, *, prunes: bool = False, law_s: float = 0.0) -> float:
    x = dict(zip(TERMS, calibrated.terms(load, prunes, 16), strict=True))
    return table(load.tokens) + sum(TRUE[name] * x[name] for name in TERMS) + law_s * load.sampling


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("logs")
    write_log(folder / "dense.jsonl", rule, steps=900, seed=1, noise=0.02)
    write_log(folder / "pruned.jsonl", lambda x: rule(x, prunes=True), steps=900, seed=2, noise=0.02, loop=PRUNED)
    solve = {"temperature": {"law": "solve", "target_nats": 1.0}}
    write_log(folder / "solve.jsonl", lambda x: rule(x, law_s=7e-4), steps=500, seed=3, noise=0.02, loop=solve)
    return [folder / f"{name}.jsonl" for name in ("dense", "pruned", "solve")]


@pytest.fixture(scope="module")
def found(logs: list[Path]) -> calibrated.Calibration:
    return calibrate.calibrate(logs)


def test_known_coefficients_are_recovered_within_standard_errors(found: calibrated.Calibration) -> None:
    for name, value in TRUE.items():
        error = found.terms_se[name]
        assert math.isfinite(error), name
        assert abs(found.terms_s[name] - value) <= 4.0 * error, name
    assert abs(found.laws_s["solve"] - 7e-4) <= 4.0 * found.laws_se["solve"]
    assert found.r2 > 0.99
    assert found.between_s == pytest.approx(0.0005, rel=1e-6)


def test_what_matters_is_known_well_enough_to_mean_something(found: calibrated.Calibration) -> None:
    for name in ("dense_context", "prefill_context", "prefill_pair", "pruning_step", "pruned_context"):
        assert found.terms_se[name] < 0.1 * TRUE[name], name


def test_fitted_durations_are_the_machines(found: calibrated.Calibration, logs: list[Path]) -> None:
    cost = CalibratedCost(found, config(PRUNED), LinearCost(), noise=False)
    data = read_logs(logs[1:2])
    for i in range(0, len(data), 7):
        load = StepLoad(*(float(data.load[name][i]) for name in StepLoad._fields))  # type: ignore[arg-type]
        assert cost.step(load).seconds == pytest.approx(rule(load, prunes=True), rel=0.06)


def test_disturbed_steps_do_not_move_the_fit(logs: list[Path], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    hit = iter(rng.random(10_000) < 0.15)
    write_log(tmp_path / "bad.jsonl", lambda x: rule(x) * (1.6 if next(hit) else 1.0), steps=900, seed=1, noise=0.02)
    found = calibrate.calibrate([tmp_path / "bad.jsonl"])
    cost = CalibratedCost(found, config(), LinearCost(), noise=False)
    load = StepLoad(4, 4, 4, 4, 4000.0)
    assert cost.fitted_s(load) == pytest.approx(rule(load), rel=0.02)  # 15% times 0.6 would be 9%
    assert found.outliers >= 90
    assert cost.step(load).seconds > 1.05 * cost.fitted_s(load)  # but the mean charge has them


def test_a_machine_of_another_kind_shows_as_misfit(tmp_path: Path, found: calibrated.Calibration) -> None:
    # time goes with the square of the batch's context: no term of ours
    write_log(tmp_path / "odd.jsonl", lambda x: 0.01 + 1e-9 * x.decode_context**2, steps=900, noise=0.02)
    odd = calibrate.calibrate([tmp_path / "odd.jsonl"])

    def spread(c: calibrated.Calibration) -> float:
        q = c.residuals["decode"].quantiles
        return float(np.interp(0.95, np.linspace(0, 1, len(q)), q) - np.interp(0.05, np.linspace(0, 1, len(q)), q))

    assert spread(odd) > 3.0 * spread(found)


def test_too_short_a_log_and_one_without_the_reference_law_are_refused(tmp_path: Path, logs: list[Path]) -> None:
    write_log(tmp_path / "short.jsonl", rule, steps=10)
    with pytest.raises(BadInputError, match="too few iterations"):
        calibrate.calibrate([tmp_path / "short.jsonl"])
    with pytest.raises(BadInputError, match="fixed temperature law"):
        calibrate.calibrate([logs[2]])


def test_the_command_writes_what_the_simulator_reads(logs: list[Path], tmp_path: Path) -> None:
    status, out, err = entropic("calibrate", *logs, "--out", tmp_path / "c.json", "--json", tmp_path / "n.json")
    assert status == 0, err  # a slow machine shows progress there
    assert "dense_context" in out
    assert calibrated.read(tmp_path / "c.json").iterations == 2300
    assert json.loads((tmp_path / "n.json").read_text())["calibration"]["iterations"] == 2300
    (tmp_path / "run.toml").write_text(
        "[workload]\nn_requests = 6\nprompt_tokens = 60\noutput_tokens = 8\n"
        f'[cost]\ncalibrated = "{tmp_path / "c.json"}"\n'
    )
    status, _, err = entropic("simulate", tmp_path / "run.toml", "--json", tmp_path / "s.json")
    assert status == 0, err  # a slow machine shows progress there
    assert json.loads((tmp_path / "s.json").read_text())["summary"]["tpot_mean_s"] > 0.02


def test_files_read_back_and_broken_ones_name_the_field(found: calibrated.Calibration, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write_json(path, calibrated.to_json(found))
    back = calibrated.read(path)
    assert (back.terms_s, back.knots, back.ranges) == (found.terms_s, found.knots, found.ranges)
    values = json.loads(path.read_text())
    for change, words in (
        ({"format": 2}, ["format", "2"]),
        ({"knots": [1.0, 1.0]}, ["knots"]),
        ({"terms_s": {"sampling_row": 1.0}}, ["terms_s"]),
        ({"table_s": [-1.0] * len(values["table_s"])}, ["table_s[0]", "-1"]),
        ({"residuals": {}}, ["residuals"]),
        ({"ranges": dict(values["ranges"], tokens=[5, 1])}, ["ranges.tokens"]),
        ({"between_s": None}, ["between_s"]),
        ({"between_s": 10**400}, ["between_s", "finite"]),
        ({"r2": -math.inf}, ["r2", "finite"]),
        ({"source": 5}, ["source", "got 5"]),
        ({"device": None}, ["device", "None"]),
        ({"device": [1]}, ["device", "[1]"]),
        ({"device": "ab"}, ["device", "'ab'"]),
        ({"versions": 5}, ["versions", "got 5"]),
        ({"table_se": [0.1]}, ["table_se", "got 1", "one per knot"]),
        ({"page_tokens": 16.7}, ["page_tokens", "16.7", "integer"]),
        ({"iterations": 1.5}, ["iterations", "1.5", "integer"]),
        (
            {name: dict.fromkeys(values[name], 0) for name in ("terms_s", "laws_s")}
            | {"table_s": [0] * len(values["table_s"])},
            ["table_s, terms_s, laws_s", "> 0"],
        ),
        (
            {"residuals": {k: {"n": 1, "mean": 0, "quantiles": [0, 0]} for k in values["residuals"]}},
            ["residuals.decode", "> 0"],
        ),
    ):
        path.write_text(json.dumps(values | change))
        with pytest.raises(BadInputError) as error:
            calibrated.read(path)
        assert str(path) in str(error.value)
        for word in words:
            assert word in str(error.value)
    path.write_text("{")
    with pytest.raises(BadInputError, match="not JSON"):
        calibrated.read(path)
    with pytest.raises(BadInputError, match="cannot read calibration"):
        calibrated.read(tmp_path / "none.json")


def test_outside_what_was_calibrated_is_an_error_or_counted(found: calibrated.Calibration) -> None:
    far = StepLoad(8, 8, 8, 8, 10.0 * found.ranges["decode_context"][1])
    strict = CalibratedCost(found, config(), LinearCost(), where="c.json")
    with pytest.raises(BadInputError, match=r"c\.json: decode_context: an iteration outside what was calibrated"):
        strict.step(far)
    with pytest.raises(BadInputError, match="tokens"):
        strict.step(StepLoad(8, 5000, 8, 0, 0.0))
    counting = CalibratedCost(found, config(), LinearCost(), beyond="count", noise=False)
    assert counting.step(far).seconds > 0
    assert counting.step(StepLoad(4, 4, 4, 4, 400.0)).seconds > 0
    assert counting.beyond_steps == 1
    with pytest.raises(BadInputError, match=r"loop\.temperature\.law"):
        CalibratedCost(found, config({"temperature": {"law": "damped", "target_nats": 1.0}}), LinearCost())


def test_noise_has_the_recorded_distribution_and_its_own_stream(found: calibrated.Calibration) -> None:
    load = StepLoad(4, 4, 4, 4, 400.0)
    noisy = [CalibratedCost(found, config(), LinearCost()) for _ in range(2)]
    draws = np.array([[cost.step(load).seconds for _ in range(5000)] for cost in noisy])
    np.testing.assert_array_equal(draws[0], draws[1])  # same seed, same table
    quiet = CalibratedCost(found, config(), LinearCost(), noise=False)
    ratio = draws[0] / quiet.fitted_s(load)
    assert np.mean(ratio) == pytest.approx(found.residuals["decode"].mean, abs=4 * np.std(ratio) / 5000**0.5)
    assert np.std(ratio) == pytest.approx(0.02, rel=0.2)
    assert ratio.min() >= found.residuals["decode"].quantiles[0] - 1e-12
