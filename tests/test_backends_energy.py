from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import tiny_llama

from backends import energy, models
from backends.engine import Engine
from backends.sampling import SamplingParams
from entropic_ctl import config as configs
from entropic_ctl.metrics import Metrics

RANGE = 262_143_328_850


def domain(root: Path, folder: str, name: str, microjoules: int, limit: int = RANGE) -> Path:
    place = root / folder
    place.mkdir(parents=True)
    for file, text in (("name", name), ("max_energy_range_uj", str(limit)), ("energy_uj", str(microjoules))):
        (place / file).write_text(f"{text}\n")
    return place


def add(place: Path, microjoules: int) -> None:
    limit, now = int((place / "max_energy_range_uj").read_text()), int((place / "energy_uj").read_text())
    (place / "energy_uj").write_text(f"{(now + microjoules) % (limit + 1)}\n")


def test_packages_add_up_and_nothing_counts_twice(tmp_path: Path) -> None:
    domain(tmp_path, "intel-rapl", "control", 5)
    first = domain(tmp_path, "intel-rapl:0", "package-0", 100)
    second = domain(tmp_path, "intel-rapl:1", "package-1", RANGE - 5)
    memory = domain(tmp_path, "intel-rapl:0:2", "dram", 0)
    others = [
        domain(tmp_path, "intel-rapl:0:0", "core", 0),
        domain(tmp_path, "intel-rapl:0:1", "uncore", 0),
        domain(tmp_path, "intel-rapl:2", "psys", 0),
        domain(tmp_path, "intel-rapl-mmio:0", "package-0", 0),
    ]
    found = energy.rapl(tmp_path)
    assert [c.name for c in found.found] == ["intel-rapl:0 package-0", "intel-rapl:0:2 dram", "intel-rapl:1 package-1"]
    assert found.reason == ""
    assert found.joules() == 0.0
    for place in others:
        add(place, 10**9)
    add(first, 3_000_000)
    add(second, 2_000_000)  # wraps
    add(memory, 500_000)
    assert found.joules() == pytest.approx(5.5)
    meter = energy.EnergyMeter(found)
    assert meter.lap() == pytest.approx(5.5)
    add(first, 250_000)
    assert [meter.lap(), meter.lap()] == pytest.approx([0.25, 0.0])


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(0, 1000))
def test_any_number_of_wraps_is_counted_and_joules_never_fall(
    tmp_path_factory: pytest.TempPathFactory, parts: list[int], start: int
) -> None:
    """Each step is less than one range, so a fall of the count is one wrap."""
    place = domain(tmp_path_factory.mktemp("rapl"), "intel-rapl:0", "package-0", start, limit=1000)
    counter, seen = energy.RaplCounter(place, "x"), [0.0]
    for part in parts:
        add(place, part)
        seen.append(counter.joules())
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(sum(parts) * 1e-6)


def test_absence_permission_and_damage_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "virtual machine" in energy.rapl(tmp_path / "none").reason
    assert "no processor package" in energy.rapl(tmp_path).reason
    place = domain(tmp_path, "intel-rapl:0", "package-0", 1)
    broken = domain(tmp_path, "intel-rapl:1", "package-1", 1)
    (broken / "energy_uj").write_text("?\n")
    mixed = energy.rapl(tmp_path)
    assert len(mixed.found) == 1
    assert "intel-rapl:1" in mixed.missing[0]
    read = Path.read_text

    def refuse(self: Path, *args: Any, **kwargs: Any) -> str:
        if self.name == "energy_uj":  # as for a user who is not root; the tests may run as root
            raise PermissionError(13, os.strerror(13), str(self))
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refuse)
    closed = energy.rapl(tmp_path)
    assert not closed.found
    assert str(place / "energy_uj") in closed.reason
    assert "root" in closed.reason
    assert energy.EnergyMeter(closed).lap() == 0.0


class NvmlError(Exception):
    pass


def library(boards: list[list[int] | None]) -> Any:
    """A stand-in: per board the millijoules of successive looks, or None where the board counts none."""

    def total(board: int) -> int:
        values = boards[board]
        if values is None:
            raise NvmlError("Not Supported")
        return values.pop(0)

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(boards),
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetTotalEnergyConsumption=total,
    )


def test_boards_add_up_and_a_reloaded_driver_does_not_count_back() -> None:
    found = energy.nvml(library([[1000, 3500, 100], None, [7, 7, 8]]))
    assert [c.name for c in found.found] == ["nvml:0", "nvml:2"]
    assert found.missing == ("NVML: board 1: Not Supported",)
    assert [found.joules(), found.joules()] == pytest.approx([2.5, 2.601])
    broken = library([])
    broken.nvmlInit = lambda: (_ for _ in ()).throw(NvmlError("Driver Not Loaded"))
    assert energy.nvml(broken).reason == "NVML: Driver Not Loaded"
    assert energy.nvml(library([])).reason == "NVML: no board"


class Steady:
    """Two joules at each look."""

    name = "steady"
    total = 0.0

    def joules(self) -> float:
        self.total += 2.0
        return self.total


@pytest.mark.parametrize("known", [True, False])
def test_the_engine_books_joules_per_step_or_none(known: bool) -> None:
    meter = energy.EnergyMeter(energy.Counters((Steady(),) if known else (), () if known else ("nothing here",)))
    metrics = Metrics(4)
    run = configs.from_mapping({"engine": {"pages": 16, "page_tokens": 4}})
    engine = Engine(run, models.wrap(tiny_llama(), None), metrics=metrics, energy=meter)
    engine.submit([1, 2, 3], SamplingParams(max_new_tokens=3, greedy=True))
    engine.run()
    summary = metrics.summary()
    steps = summary["iterations"]
    assert (summary["energy_j"], summary["energy_per_token_j"]) == ((2.0 * steps, 2.0) if known else (None, None))
    assert metrics.steps_table()["energy_j"].tolist() == [2.0 * known] * steps


def test_this_machine_either_counts_or_says_why() -> None:
    here = energy.counters()
    assert bool(here.found) == (here.reason == "")
    assert here.joules() >= 0.0
