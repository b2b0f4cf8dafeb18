"""A device fitted to logs that a known one wrote."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from metrics_doc import undefined

from entropic_ctl.errors import BadInputError
from sim.cost import Roofline
from sim.device_fit import fit_logs, summary
from sim.devices import DeviceSpec, cpu, device_spec
from sim.load import StepLoad
from sim.model_shapes import MODELS
from tests.command import entropic
from tests.engine_log_maker import PRUNED, config, write_log

MODEL = "smollm2-135m"
KNOWN = dataclasses.replace(
    cpu(2, name="cpu2"),
    peak_flops=7e11,
    attention_efficiency=0.4,
    bandwidth=3e10,
    overhead_s=0.002,
    pruning_step_s=0.003,
    pruning_token_s=2e-7,
)


def write(path: Path, *, pruned: bool, slower: float = 1.0, noise: float = 0.0) -> Path:
    loop = PRUNED if pruned else {}
    model = Roofline(KNOWN, MODELS[MODEL], 16, config(loop).loop.pruning.config)

    def rule(load: StepLoad) -> float:
        return slower * model.step(load).seconds

    write_log(path, rule, seed=int(pruned), loop=loop, steps=300, noise=noise)
    return path


def numbers(device: DeviceSpec) -> list[float]:
    peak = device.peak_flops
    rates = [peak * device.matmul_efficiency, peak * device.attention_efficiency, device.bandwidth]
    return [*rates, device.overhead_s, device.pruning_step_s, device.pruning_token_s]


def test_the_device_that_wrote_the_logs_is_found_whatever_slowed_a_repeat(tmp_path: Path) -> None:
    logs = [write(tmp_path / f"{pruned}.jsonl", pruned=pruned) for pruned in (False, True)]
    found = fit_logs(logs, MODEL)
    assert numbers(found.device) == pytest.approx(numbers(KNOWN), rel=1e-5)
    assert found.mean_error < 1e-6
    slow = [write(tmp_path / f"slow-{pruned}.jsonl", pruned=pruned, slower=1.7) for pruned in (False, True)]
    assert numbers(fit_logs([*slow, *logs], MODEL).device) == pytest.approx(numbers(KNOWN), rel=1e-5)
    assert {name.partition(":")[0] for name in summary(found)} == {"device"}
    assert not undefined("calibrate", {"calibration": summary(found)})


def test_logs_that_cannot_tell_say_so(tmp_path: Path) -> None:
    write_log(tmp_path / "constant.jsonl", lambda _: 0.01, steps=60)
    with pytest.raises(BadInputError, match="does not tell the time of matmul"):
        fit_logs([tmp_path / "constant.jsonl"], MODEL)


def test_the_command_writes_a_device_that_a_config_can_name(tmp_path: Path) -> None:
    logs = [write(tmp_path / f"{pruned}.jsonl", pruned=pruned, noise=0.02) for pruned in (False, True)]
    status, shown, err = entropic(
        "calibrate", *logs, "--out", tmp_path / "cost.json", "--device", tmp_path / "cpu.json"
    )
    assert status == 0, err
    assert "device: bandwidth" in shown
    assert numbers(device_spec(str(tmp_path / "cpu.json")))[:3] == pytest.approx(numbers(KNOWN)[:3], rel=0.1)
    assert "name" not in json.loads((tmp_path / "cpu.json").read_text())
