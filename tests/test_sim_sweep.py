"""Sweeps: the same tables whatever was killed, cut off, resumed, or run in whichever order; settings never mix."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_bank import make_bank

from entropic_ctl import bank as banks
from entropic_ctl import config as configs
from entropic_ctl import results
from entropic_ctl.config_toml import to_toml
from entropic_ctl.errors import BadInputError
from sim import runs
from sim.campaign import JOURNAL, definition
from sim.carry_out import CrashedError
from sim.intervals import mean_interval
from sim.replica import simulate
from sim.space import Choice, Range
from sim.streams import repeat_seeds
from sim.sweep import remaining, sweep
from sim.workers import Cluster, Crash, Inline, Processes

ROOT = Path(__file__).resolve().parents[1]
TABLES = ("results.parquet", "results.csv", "points.parquet", "points.csv")
POLICY = Choice("loop.scheduling.policy", ("fcfs", "entropic"))
RATE = Range("workload.rate_per_s", 0.5, 20.0, log=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> configs.RunConfig:
    path = tmp_path_factory.mktemp("bank") / "bank.npz"
    banks.save(make_bank()[0], path)
    return configs.from_mapping(
        {
            "seed": 4,
            "workload": {"kind": "poisson", "n_requests": 4, "prompt_tokens": 12.0, "output_tokens": 5.0},
            "engine": {"pages": 64},
            "cost": {"bank": str(path)},
            "loop": {"temperature": {"t_min": 0.5, "t_max": 1.5}},
        }
    )


def tables(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TABLES}


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Shuffled:
    """Completes tasks in random order, like a cluster; dies over one of them if told so."""

    def __init__(self, seed: int, crash: int | None = None) -> None:
        self._random, self._crash = random.Random(seed), crash

    def each(self, tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        waiting = list(tasks)
        self._random.shuffle(waiting)
        for task in waiting:
            yield task, Crash("killed by signal SIGKILL") if task.id == self._crash else runs.run(task)

    def __enter__(self) -> Shuffled:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_w8_kill_after_seven_half_a_line_resume_then_a_changed_setting(
    config: configs.RunConfig, tmp_path: Path
) -> None:
    """W8: a 12-point sweep, kill -9 after 7, half a line appended, resumed: the table of the uninterrupted one."""
    file = tmp_path / "run.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    arguments = ["--grid", "loop.scheduling.policy=fcfs,entropic", "--sobol", "workload.rate_per_s=0.5:20:log"]
    command = [sys.executable, "-m", "entropic_ctl", "sweep", str(file), *arguments, "--points", "6", "--workers", "1"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    sweep(config, [POLICY, RATE], whole, Inline(runs.run), count=6)
    begun = subprocess.Popen([*command, "--out", str(cut)], cwd=ROOT, stderr=subprocess.DEVNULL)
    journal = cut / JOURNAL
    while lines(journal) < 7:
        assert begun.poll() is None
        time.sleep(0.001)
    begun.send_signal(signal.SIGKILL)
    assert begun.wait() == -signal.SIGKILL
    kept = journal.read_bytes().split(b"\n")[:7]  # it may have got a little further before the signal arrived
    journal.write_bytes(b"\n".join(kept) + b'\n{"id":8,"re')
    assert not any((cut / name).exists() for name in TABLES)
    resumed = subprocess.run(
        [*command, "--out", str(cut), "--resume"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert tables(cut) == tables(whole)
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    assert sorted((r["id"], r["repeat"]) for r in records) == [(i, 0) for i in range(12)]
    assert journal.read_bytes().startswith(b"\n".join(kept) + b"\n")  # what was finished was not run again
    changed = dataclasses.replace(config, engine=dataclasses.replace(config.engine, pages=65))
    before = journal.read_bytes()
    with pytest.raises(BadInputError, match=r"engine\.pages: 64 -> 65"):
        sweep(changed, [POLICY, RATE], cut, Inline(runs.run), count=6, resume=True)
    assert journal.read_bytes() == before
    assert tables(cut) == tables(whole)


def test_order_of_completion_processes_and_cluster_make_no_difference(
    config: configs.RunConfig, tmp_path: Path
) -> None:
    """W8, done-when 5 in small: worker processes with three stops, any order, and a local Dask cluster."""
    pytest.importorskip("distributed")
    plan: dict[str, Any] = {"count": 3, "repeats": 2}
    sweep(config, [POLICY, RATE], tmp_path / "whole", Inline(runs.run), **plan)
    sweep(config, [POLICY, RATE], tmp_path / "any", Shuffled(1), **plan)
    journal = tmp_path / "cut" / JOURNAL
    sweep(config, [POLICY, RATE], journal.parent, Processes(runs.run, 2), **plan)
    whole = journal.read_bytes()
    for cut in (1, len(whole) // 3, len(whole) - 1):
        journal.write_bytes(whole[:cut])
        sweep(config, [POLICY, RATE], journal.parent, Inline(runs.run), resume=True, **plan)
    sweep(config, [POLICY, RATE], tmp_path / "dask", Cluster(runs.run, "local", 2), **plan)
    expected = tables(tmp_path / "whole")
    for name in ("any", "cut", "dask"):
        assert tables(tmp_path / name) == expected, name


def test_the_table_says_what_a_single_run_says(config: configs.RunConfig, tmp_path: Path) -> None:
    found = sweep(config, [POLICY, RATE], tmp_path / "s", Inline(runs.run), count=2, repeats=3)
    table, stamp = results.read_table(tmp_path / "s" / "results.parquet")
    assert stamp["config"] == configs.resolve(config)
    assert table["point"].tolist() == [p for p in range(4) for _ in range(3)]
    assert table["repeat"].tolist() == [0, 1, 2] * 4
    assert table["root_seed"].tolist() == repeat_seeds(4, 3) * 4  # common random numbers
    row = 7
    alone = configs.from_mapping(configs.resolve(config))
    alone = dataclasses.replace(
        alone,
        seed=int(table["root_seed"][row]),
        workload=dataclasses.replace(alone.workload, rate_per_s=float(table["workload.rate_per_s"][row])),
        loop=configs.from_mapping({**configs.resolve(config), "loop": {"scheduling": {"policy": "entropic"}}}).loop,
    )
    alone = dataclasses.replace(alone, loop=dataclasses.replace(alone.loop, temperature=config.loop.temperature))
    summary = simulate(alone).summary
    for name in ("e2e_mean_s", "ttft_p99_s", "output_tokens", "tau_nats", "kl_nats_mean"):
        assert table[name][row] == summary[name], name
    interval = mean_interval(table["e2e_mean_s"][6:9])
    assert found.points["e2e_mean_s"][2] == interval.mean
    assert found.points["e2e_mean_s_low"][2] == interval.low
    assert found.points["repeats"].tolist() == [3] * 4


def test_points_that_cannot_run_are_recorded_and_do_not_stop_the_others(
    config: configs.RunConfig, tmp_path: Path
) -> None:
    gains = {"law": "feedback", "t_min": 0.5, "t_max": 1.5, "target_nats": 1.0}
    run = configs.from_mapping({**configs.resolve(config), "loop": {"temperature": gains}})
    asked = []

    def certify(point: configs.RunConfig) -> None:
        asked.append(point.loop.temperature.config.gain)
        if point.loop.temperature.config.gain > 0.05:
            raise BadInputError("too high", field="gain")

    grid = Choice("loop.temperature.gain", (0.01, 0.09, 99.0))
    found = sweep(run, [grid], tmp_path / "s", Inline(runs.run), certify=certify, repeats=2)  # type: ignore[arg-type]
    assert asked == [0.01, 0.01, 0.09, 0.09]
    assert found.results["status"].tolist() == ["failed"] * 6  # no verdict: a gain never runs by accident
    assert "needs a gain certificate" in found.failed[0]
    assert "too high" in found.failed[1]
    assert "out of range" in found.failed[2]
    loose = sweep(run, [grid], tmp_path / "t", Inline(runs.run), uncertified=True)
    assert loose.results["status"].tolist() == ["ok", "ok", "failed"]
    assert np.isnan(loose.results["e2e_mean_s"][2])
    assert loose.points["point"].tolist() == [0, 1]
    again = sweep(run, [grid], tmp_path / "t", Inline(runs.run), uncertified=True, resume=True)
    assert again.failed == loose.failed


def test_a_typo_fails_before_anything_is_made(config: configs.RunConfig, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="gain"):
        sweep(config, [Choice("loop.temperature.gain", (0.1, 0.2))], tmp_path / "s", Inline(runs.run))
    with pytest.raises(BadInputError, match="--repeats"):
        sweep(config, [POLICY], tmp_path / "s", Inline(runs.run), repeats=0)
    assert not (tmp_path / "s").exists()


def test_too_many_runs_are_refused_at_once(config: configs.RunConfig, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"points x repeats: too many runs \(got 20000000\).*1,000,000"):
        sweep(config, [POLICY], tmp_path / "s", Inline(runs.run), repeats=10**7)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"id": 99}, ["id, repeat", "(99, 0)", "id in [0, 1]"]),
        ({"repeat": 7}, ["id, repeat", "(1, 7)", "repeat in [0, 0]"]),
        ({"metrics": 5}, ["metrics", "got 5", "a table"]),
        ({"metrics": {"x": [1]}}, ["metrics", "a table of numbers"]),
        ({"metrics": {"x": 10**400}}, ["metrics", "a table of numbers"]),
        ({"error": 5}, ["error", "got 5", "a text"]),
        ({"set": 5}, ["set", "got 5"]),
        ({"set": {"loop.scheduling.policy": "fcfs"}}, ["set", "other settings", "entropic"]),
    ],
)
def test_an_edited_journal_is_refused_by_record(
    config: configs.RunConfig, tmp_path: Path, edit: dict[str, Any], words: list[str]
) -> None:
    sweep(config, [POLICY], tmp_path / "s", Inline(runs.run))
    journal = tmp_path / "s" / JOURNAL
    first, second = journal.read_text().splitlines()
    journal.write_text(first + "\n" + json.dumps(json.loads(second) | edit) + "\n")
    with pytest.raises(BadInputError) as caught:
        sweep(config, [POLICY], tmp_path / "s", Inline(runs.run), resume=True)
    for word in (str(journal), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("nested", ["[" * 200_000, '{"a":' * 900 + "1" + "}" * 900, '{"a":' * 5000 + "1" + "}" * 5000])
def test_a_deeply_nested_marker_is_not_ours(config: configs.RunConfig, tmp_path: Path, nested: str) -> None:
    (tmp_path / "run.json").write_text(nested)
    with pytest.raises(BadInputError, match="--out"):
        sweep(config, [POLICY], tmp_path, Inline(runs.run), resume=True)


def test_a_crash_names_the_point_and_resume_tries_it_again(config: configs.RunConfig, tmp_path: Path) -> None:
    out = tmp_path / "s"
    with pytest.raises(CrashedError, match=r"point 2 \(.*policy = entropic.*SIGKILL.*--resume"):
        sweep(config, [POLICY, RATE], out, Shuffled(3, crash=2), count=2)
    assert lines(out / JOURNAL) == 3
    assert not (out / "results.csv").exists()
    sweep(config, [POLICY, RATE], out, Shuffled(3), count=2, resume=True)
    sweep(config, [POLICY, RATE], tmp_path / "whole", Inline(runs.run), count=2)
    assert tables(out) == tables(tmp_path / "whole")


def test_folders_are_never_mixed(config: configs.RunConfig, tmp_path: Path) -> None:
    out = tmp_path / "s"
    sweep(config, [POLICY], out, Inline(runs.run))
    before = tables(out)
    with pytest.raises(BadInputError, match="--resume"):
        sweep(config, [POLICY], out, Inline(runs.run))
    for changed, needle in (
        ({"repeats": 2}, r"plan\.repeats: 1 -> 2"),
        ({"uncertified": True}, r"plan\.uncertified"),
        ({"dimensions": [RATE]}, r"plan\.dimensions"),
    ):
        arguments: dict[str, Any] = {"dimensions": [POLICY], "resume": True, **changed}
        with pytest.raises(BadInputError, match=needle):
            sweep(config, arguments.pop("dimensions"), out, Inline(runs.run), **arguments)
    bank = Path(config.cost.bank)
    kept = bank.read_bytes()
    banks.save(make_bank(seed=1)[0], bank)
    try:
        with pytest.raises(BadInputError, match=r"inputs\."):
            sweep(config, [POLICY], out, Inline(runs.run), resume=True)
    finally:
        bank.write_bytes(kept)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.md").write_text("mine")
    with pytest.raises(BadInputError, match=r"no run\.json of ours"):
        sweep(config, [POLICY], tmp_path / "mine", Inline(runs.run), resume=True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.md"]
    assert tables(out) == before


def test_an_interrupt_leaves_a_folder_that_can_be_resumed(config: configs.RunConfig, tmp_path: Path) -> None:
    class Interrupting(Inline):
        def each(self, tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
            for n, found in enumerate(super().each(tasks)):
                if n == 1:
                    raise KeyboardInterrupt
                yield found

    with pytest.raises(KeyboardInterrupt) as caught:
        sweep(config, [POLICY], tmp_path / "s", Interrupting(runs.run))
    assert caught.value.kept == (tmp_path / "s").resolve()  # type: ignore[attr-defined]
    found = sweep(config, [POLICY], tmp_path / "s", Inline(runs.run), resume=True)
    assert found.results["status"].tolist() == ["ok", "ok"]


def test_remaining_time() -> None:
    assert [remaining(s) for s in (0, 59.6, 3599, 3600, -1)] == ["0:00", "1:00", "59:59", "1:00:00", "0:00"]


@pytest.mark.parametrize("field", ["workload.trace", *(f"cost.{n}" for n in ("bank", "calibrated", "device", "model"))])
def test_the_definition_tells_changed_contents_of_every_input(
    config: configs.RunConfig, tmp_path: Path, field: str
) -> None:
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "config.json"
    named = file.parent if field == "cost.model" else file
    table, _, name = field.partition(".")
    changed = dataclasses.replace(config, **{table: dataclasses.replace(getattr(config, table), **{name: str(named)})})
    draft = dataclasses.replace(config, speculation=dataclasses.replace(config.speculation, draft_model=str(named)))
    for run in (changed, draft):
        found = []
        for content in ("one", "three"):
            file.write_text(content)
            found.append(definition("sweep", run, {})["inputs"][str(file)])
        assert found[0] != found[1]
    assert str(file) in definition("tune", config, {}, tried=[2, str(named)])["inputs"]
