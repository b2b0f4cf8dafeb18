"""Devices: sizes, files, power limits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from entropic_ctl.errors import BadInputError
from sim.devices import DEVICES, cpu, device_spec, resized


def test_data_sheets() -> None:
    a100, h100, h200 = (DEVICES[name] for name in ("a100-80", "h100", "h200"))
    assert (a100.peak(16), a100.peak(8), a100.peak(32)) == (312e12, 624e12, 19.5e12)
    assert (h100.bandwidth, h200.bandwidth, h200.memory_bytes) == (3.35e12, 4.8e12, 141e9)
    assert [d.limit_w for d in (a100, h100, h200)] == [400.0, 700.0, 700.0]


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_power_terms_stay_below_the_limit_one_at_a_time(name: str) -> None:
    device = DEVICES[name]
    assert 0 < device.idle_w < device.limit_w
    for more in (device.compute_w, device.memory_w, device.overhead_w):
        assert device.idle_w + more <= device.limit_w


def test_the_measured_machine_is_two_cores_of_the_generic_one() -> None:
    assert cpu(2, name="cpu2") == DEVICES["cpu2"]
    assert DEVICES["cpu2"].peak_flops == 2 * DEVICES["cpu"].peak_flops
    assert DEVICES["cpu2"].bandwidth == 2 * DEVICES["cpu"].bandwidth
    assert cpu(64).bandwidth == 200e9
    assert cpu(64, 400e9).bandwidth == 400e9


def test_unknown_arithmetic_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"cost.compute_bits.*32.*one of|cost.compute_bits.*32.*16"):
        DEVICES["cpu2"].peak(32)


def test_only_the_generic_cpu_has_cores() -> None:
    assert resized(DEVICES["cpu"], 8).peak_flops == 8 * DEVICES["cpu"].peak_flops
    assert resized(DEVICES["h100"], bandwidth=1e12, matmul_efficiency=0.5) == dataclasses.replace(
        DEVICES["h100"], bandwidth=1e12, matmul_efficiency=0.5
    )
    with pytest.raises(BadInputError, match=r"cost.cores.*got 8"):
        resized(DEVICES["h100"], 8)


def test_a_device_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"peak_flops": 1e12, "bandwidth": 1e11, "memory_bytes": 1e9, "overhead_s": 0.5}))
    device = device_spec(str(file))
    assert (device.name, device.overhead_s, device.limit_w) == ("mine", 0.5, 0.0)


@pytest.mark.parametrize(
    ("content", "needle"),
    [
        ({"peak_flops": 1e12, "bandwidth": 1e11}, "memory_bytes"),
        ({"peak_flops": 1e12, "bandwidth": -1, "memory_bytes": 1e9}, "bandwidth"),
        ({"peak_flops": 1e12, "bandwidth": 1e11, "memory_bytes": 1e9, "speed": 3}, "speed"),
        ({"peak_flops": 1e12, "bandwidth": 1e11, "memory_bytes": 1e9, "name": 3}, "name"),
        ({"peak_flops": 1e12, "bandwidth": 1e11, "memory_bytes": 1e9, "idle_w": 5, "limit_w": 3}, "idle_w"),
        ([1], "table"),
    ],
)
def test_a_broken_device_file_names_the_field(tmp_path: Path, content: Any, needle: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(content))
    with pytest.raises(BadInputError, match=needle) as caught:
        device_spec(str(file))
    assert str(file) in str(caught.value)


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(BadInputError, match=r"cost.device.*a100-80, h100"):
        device_spec("b300")
