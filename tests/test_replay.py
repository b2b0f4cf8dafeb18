from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from toy_driver import Integral, Rows, Trace, drive, make, step

from entropic_ctl import config
from entropic_ctl.config import EngineConfig, LoopConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.loop import Loop, Recorder
from entropic_ctl.replay import replay
from entropic_ctl.signals import Request

TABLES = {
    "engine": {
        "pages": 12,
        "page_tokens": 4,
        "max_batch": 4,
        "max_batch_tokens": 16,
        "max_live": 8,
        "prefill_chunk": 8,
    },
    "loop": {"scheduling": {"policy": "entropic", "predictor": "ar1", "quantum_steps": 2, "wait_limit_steps": 9}},
}


def record(path: Path) -> int:
    """A run with chunks, pauses, preemptions, a rejection, a greedy request and two cancellations."""
    run = config.from_mapping(TABLES)
    with Recorder(path) as recorder:
        loop = Loop(run.loop, run.engine, 100, recorder=recorder)
        for i in range(20):
            loop.submit(Request(i, 0.1 * i, 5 + i % 13, 4 + i, greedy=i == 3))
        loop.submit(Request(99, 0.0, 1000, 5))
        trace, now = Trace(), 0.0
        while loop.live or loop.backlog:
            step(loop, now, trace)
            now += 1.0
            if len(trace.plans) in (5, 9):
                loop.cancel(len(trace.plans))
        assert sum(plan.preempted.shape[0] for plan in trace.plans) > 0
        assert sum(plan.paused.shape[0] for plan in trace.plans) > 0
        return len(trace.plans)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    record(path)
    return path


def edit(log: Path, event: str, change: object, turn: int = 3) -> int:
    """Change the ``turn``-th event of a kind in place; return its line number."""
    lines = log.read_text().splitlines()
    number = [i for i, line in enumerate(lines) if json.loads(line)["event"] == event][turn]
    values = json.loads(lines[number])
    change(values)  # type: ignore[operator]
    lines[number] = json.dumps(values)
    log.write_text("\n".join(lines) + "\n")
    return number + 1


def test_replay_gives_the_same_decisions(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    steps = record(path)
    report = replay(path, tolerance=0.0)
    assert report.equal
    assert (report.steps, report.largest_temperature_error, report.truncated_line) == (steps, 0.0, None)
    assert report.tokens == sum(
        len(json.loads(line)["result"]["token_ids"]) for line in path.read_text().splitlines() if '"observe"' in line
    )


def test_any_changed_decision_is_found_at_its_line(log: Path) -> None:
    number = edit(log, "plan", lambda values: values["n_tokens"].__setitem__(0, values["n_tokens"][0] + 1))
    report = replay(log)
    assert not report.equal
    assert f"line {number}: plan.n_tokens" in str(report.difference)


@pytest.mark.parametrize(
    ("event", "turn", "change", "needle"),
    [
        ("observe", 3, lambda v: v.__setitem__("left", [[0, "eos", ""]]), "left"),
        ("cancel", 0, lambda v: v.__setitem__("found", False), "cancel"),
        ("submit", 1, lambda v: v.__setitem__("refused", [1, "rejected", ""]), "refusal"),
        ("temper", 3, lambda v: v["valid"].__setitem__(0, False), "valid"),
        ("temper", 3, lambda v: v["evaluations"].append(v["evaluations"][0]), "number of evaluations"),
        ("temper", 3, lambda v: v["evaluations"].clear(), "number of evaluations"),
    ],
)
def test_other_differences(log: Path, event: str, turn: int, change: object, needle: str) -> None:
    number = edit(log, event, change, turn)
    assert f"line {number}: {needle}" in str(replay(log).difference)


def test_temperature_tolerance(log: Path) -> None:
    edit(log, "temper", lambda v: v["temperature"].__setitem__(0, v["temperature"][0] + 1e-10))
    assert replay(log).equal
    assert replay(log).largest_temperature_error == pytest.approx(1e-10, rel=1e-3)
    assert not replay(log, tolerance=1e-11).equal
    edit(log, "temper", lambda v: v["temperature"].__setitem__(0, float("nan")))
    assert not replay(log).equal


def test_a_changed_gain_changes_a_replay(log: Path) -> None:
    edit(log, "header", lambda v: v["loop"]["scheduling"].__setitem__("prior_nats", 0.0), turn=0)
    assert not replay(log).equal


@pytest.mark.parametrize(
    ("damage", "needles"),
    [
        (lambda lines: [*lines[:4], "{oops", *lines[4:]], ["run.jsonl:5", "not a JSON line"]),
        (lambda lines: [*lines[:4], "[1]", *lines[4:]], ["run.jsonl:5", "not an event"]),
        (lambda lines: [*lines[:4], '{"event":"dance"}'], ["run.jsonl:5", "dance"]),
        (lambda lines: [*lines[:4], '{"event":"plan"}'], ["run.jsonl:5", "now_s"]),
        (lambda lines: [*lines[:4], lines[3]], ["run.jsonl:5", "already in the system"]),
        (lambda lines: lines[1:], ["run.jsonl:1", "header"]),
        (lambda lines: [lines[0].replace('"format":1', '"format":9'), *lines[1:]], ["run.jsonl:1", "format", "9"]),
        (lambda lines: [lines[0].replace('"pages":12', '"pages":0'), *lines[1:]], ["engine.pages", "got 0"]),
        (lambda lines: ['{"event":"header","format":1}'], ["run.jsonl:1", "malformed header"]),
        (lambda lines: [], ["empty log"]),
    ],
)
def test_malformed_logs_name_the_line(log: Path, damage: object, needles: list[str]) -> None:
    lines = damage(log.read_text().splitlines())  # type: ignore[operator]
    log.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(BadInputError) as caught:
        replay(log)
    for needle in needles:
        assert needle in str(caught.value)


VALUES = [None, True, -1, 2**40, 10**30, 10**400, 1.5, float("inf"), "x", [], {}, [None], ["x"], [10**30], [[1]]]


@pytest.mark.parametrize("event", ["header", "submit", "plan", "temper", "observe"])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:12])
def test_any_value_put_anywhere_is_a_difference_or_one_clear_error(log: Path, event: str, value: object) -> None:
    whole = log.read_bytes()
    values = next(v for v in map(json.loads, whole.splitlines()) if v["event"] == event)
    inner = {"submit": "request", "observe": "result"}.get(event)
    places = [(name,) for name in values if name != "event"] + [(inner, name) for name in values.get(inner, ())]
    for place in places:

        def put(v: dict[str, object], place: tuple[str, ...] = place) -> None:
            for name in place[:-1]:
                v = v[name]  # type: ignore[assignment]
            v[place[-1]] = value

        edit(log, event, put, turn=0)
        try:
            replay(log)
        except BadInputError as error:
            assert "run.jsonl:" in str(error)  # noqa: PT017 - either outcome is right
        log.write_bytes(whole)


@pytest.mark.parametrize("name", ["tempered_entropy", "varentropy"])
def test_a_changed_entropy_is_found(log: Path, name: str) -> None:
    number = edit(log, "temper", lambda v: v[name].__setitem__(0, v[name][0] + 1.0), 3)
    assert f"line {number}: {name}" in str(replay(log).difference)


def test_a_recorder_replaces_an_old_log_with_its_first_event_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("old")
    with Recorder(path) as recorder:
        assert path.read_text() == "old"
        recorder.write("x")
    assert path.read_text() == '{"event":"x"}\n'
    with pytest.raises(BadInputError, match="cannot write log"):
        Recorder(tmp_path).write("x")


def test_missing_and_truncated_files(log: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot read log"):
        replay(tmp_path / "absent.jsonl")
    whole = log.read_bytes()
    log.write_bytes(whole[:-20])
    report = replay(log)
    assert report.equal
    assert report.truncated_line == whole.count(b"\n")


def test_kill_loses_at_most_the_line_being_written(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; sys.path[:0] = sys.argv[2:]\n"
        "from toy_driver import *\nfrom entropic_ctl.loop import Recorder\n"
        "from entropic_ctl.config import EngineConfig\nfrom entropic_ctl.signals import Request\n"
        "loop = make(EngineConfig(), micro=Integral(), recorder=Recorder(sys.argv[1]))\n"
        "loop.submit(Request(0, 0.0, 5, 50)); trace = Trace()\n"
        "for now in range(7): step(loop, float(now), trace)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path, here = tmp_path / "run.jsonl", Path(__file__).resolve().parent
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(here), str(here.parent)], check=False, env=os.environ
    )
    assert done.returncode == -signal.SIGKILL
    report = replay(path, laws=(Integral(), *LoopConfig().build()[1:]))
    assert report.equal
    assert (report.steps, report.tokens, report.truncated_line) == (7, 7, None)


def test_own_laws_must_be_passed_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        drive(make(EngineConfig(), micro=Integral(), recorder=recorder), [Request(0, 0.0, 5, 9)])
    with pytest.raises(BadInputError, match="pass the same laws"):
        replay(path)
    assert replay(path, laws=(Integral(), *LoopConfig().build()[1:])).equal


def test_a_torch_run_replays_on_numpy(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "run.jsonl"
    with Recorder(path) as recorder:
        loop = make(EngineConfig(), micro=Integral(), recorder=recorder)
        loop.submit(Request(0, 0.0, 5, 9))
        loop.plan(0.0)
        loop.temper(Rows(torch.tensor([1.7], dtype=torch.float32)))
    report = replay(path, laws=(Integral(), *LoopConfig().build()[1:]))
    assert report.equal
    assert report.largest_temperature_error <= 1e-15


def test_recorder_writes_floats_exactly_and_leaves_a_stream_open() -> None:
    stream = io.StringIO()
    with Recorder(stream) as recorder:
        recorder.write("x", values=[0.1 + 0.2, 1e-310, float("inf")])
    assert not stream.closed
    assert json.loads(stream.getvalue())["values"] == [0.1 + 0.2, 1e-310, np.inf]
