"""Timelines: valid trace events whose times and tokens are those of the metrics' tables, from both worlds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import entropic
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_bank import make_bank
from test_metrics import plan_of, result_of
from timeline import of, read, request_spans, seconds_inside

from entropic_ctl import config as configs
from entropic_ctl.collectors import Tee
from entropic_ctl.errors import BadInputError
from entropic_ctl.metrics import Metrics
from entropic_ctl.perfetto import FIRST_SLOT, PerfettoFile
from entropic_ctl.signals import Finish, FinishReason, Request
from sim.replica import SimulationResult, simulate

BANK, _ = make_bank()


def crowded(seed: int, kind: str = "poisson", **more: Any) -> configs.RunConfig:
    """Little memory and few seats: preemption and pauses."""
    engine = {"pages": 24, "max_batch": 3, "max_batch_tokens": 64, "prefill_chunk": 16, "page_tokens": 4}
    work = {"kind": kind, "n_requests": 14, "rate_per_s": 25.0, "users": 5, "prompt_tokens": 30.0, "prompt_cv": 1.0}
    loop = {"scheduling": {"policy": "entropic", "quantum_steps": 1}}
    return configs.from_mapping({"seed": seed, "workload": work, "engine": engine, "loop": loop, **more})


def agree(events: list[dict[str, Any]], result: SimulationResult) -> None:
    """Compare with the tables: requests, tokens, times, preemptions, iterations."""
    table, steps = result.requests, result.steps
    spans, inside = request_spans(events), seconds_inside(events)
    for i, request in enumerate(table["id"].tolist()):
        assert sum(s["args"].get("output_tokens", 0) for s in spans[request]) == table["output_tokens"][i]
        assert inside[request] == pytest.approx(table["left_s"][i] - table["arrival_s"][i], abs=1e-6)
    assert len(of(events, "i", "arrival")) == len(table["id"])
    departures = [e for e in of(events, "i") if e["name"] not in ("arrival", "preemption")]
    assert sorted(e["name"] for e in departures) == sorted(table["status"].tolist())
    assert len(of(events, "i", "preemption")) == table["preemptions"].sum()
    iterations = of(events, "X", "iteration")
    assert len(iterations) == result.summary["iterations"]
    assert sum(e["dur"] for e in iterations) / 1e6 == pytest.approx(result.summary["busy_s"], abs=1e-6)
    computed = sum(s["args"].get("computed_tokens", 0) for each in spans.values() for s in each)
    assert computed == sum(e["args"]["computed_tokens"] for e in iterations) == result.summary["scheduled_tokens"]
    assert sum(e["args"]["output_tokens"] for e in iterations) == result.summary["output_tokens"]
    assert steps["rows"].sum() == sum(e["args"]["rows"] for e in iterations)
    assert max(e["args"]["value"] for e in of(events, "C", "kv_pages")) == steps["pages_used"].max()
    assert max(e["args"]["value"] for e in of(events, "C", "queue")) == steps["waiting"].max()


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.sampled_from(["poisson", "burst", "closed"]))
def test_a_timeline_tells_what_the_tables_tell(seed: int, kind: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.json"
        with PerfettoFile(path) as trace:
            result = simulate(crowded(seed, kind), bank=BANK, trace=trace)
        agree(read(path), result)


def test_every_kind_of_event_occurs(tmp_path: Path) -> None:
    """What the property above compares is there: the crowded runs do preempt, pause and recompute."""
    seen: set[str] = set()
    for seed in range(6):
        with PerfettoFile(tmp_path / "t.json") as trace:
            simulate(crowded(seed, "burst"), bank=BANK, trace=trace)
        seen |= {event["name"] for event in read(tmp_path / "t.json")}
    assert {"queued", "prefill", "decode", "recompute", "paused", "preempted", "arrival", "preemption"} <= seen
    assert {"length", "rejected", "live", "queue", "kv_pages", "entropy_nats", "temperature", "theta_nats"} <= seen


def test_a_trace_changes_nothing(tmp_path: Path) -> None:
    plain = simulate(crowded(3), bank=BANK)
    with PerfettoFile(tmp_path / "t.json") as trace:
        traced = simulate(crowded(3), bank=BANK, trace=trace)
    assert traced.summary == plain.summary


def test_a_process_per_replica(tmp_path: Path) -> None:
    config = crowded(1, cluster={"replicas": 3, "router": "least_loaded"})
    with PerfettoFile(tmp_path / "t.json") as trace:
        result = simulate(config, bank=BANK, trace=trace)
    events = read(tmp_path / "t.json")
    agree(events, result)
    names = {e["pid"]: e["args"]["name"] for e in of(events, "M", "process_name")}
    assert names == {1: "replica 0", 2: "replica 1", 3: "replica 2"}
    for pid in names:
        mine = {e["args"]["request"] for e in of(events, "i", "arrival", pid)}
        assert mine == set(result.requests["id"][result.requests["replica"] == pid - 1].tolist())


def test_the_first_seconds_only(tmp_path: Path) -> None:
    with PerfettoFile(tmp_path / "all.json") as trace:
        result = simulate(crowded(2), bank=BANK, trace=trace)
    cut = float(result.steps["end_s"][-1]) / 2
    with PerfettoFile(tmp_path / "half.json", seconds=cut) as trace:
        simulate(crowded(2), bank=BANK, trace=trace)
    whole, half = read(tmp_path / "all.json"), read(tmp_path / "half.json")
    assert 0 < len(half) < len(whole)
    assert json.loads((tmp_path / "half.json").read_text())["otherData"] == {"truncated_at_s": cut}
    kept = [e for e in of(whole, "X", "iteration") if e["ts"] < 1e6 * cut]
    assert of(half, "X", "iteration") == kept
    assert max(e["ts"] for e in half if e["ph"] in "be") <= 1e6 * cut


def test_a_trace_of_bounded_size(tmp_path: Path) -> None:
    """S16: beyond the limit only what is open is closed, and the tracks forget everything."""
    config = crowded(2, "burst")
    with PerfettoFile(tmp_path / "t.json", max_events=60) as trace:
        simulate(config, bank=BANK, trace=trace)
        track = trace.replica(0)
        assert not track._slot
        assert not track._arrival_s
    events = read(tmp_path / "t.json")
    assert 60 <= len(events) <= 60 + 2 * 14 + 40


def test_memory_goes_with_the_requests_in_the_system(tmp_path: Path) -> None:
    """S16: a request that left is forgotten."""
    with PerfettoFile(tmp_path / "t.json") as trace:
        track = trace.replica(0)
        for i in range(300):
            track.submitted(Request(i, float(i), 4, 1))
            done = (Finish(i, FinishReason.EOS),)
            track.step(plan_of(i, [i], [i % 2]), result_of(i, i, i + 1.0, [i], [1.0], 1), done)
            assert len(track._slot) + len(track._arrival_s) == 0
        assert track._id.shape[0] == 64
    assert len(request_spans(read(tmp_path / "t.json"))) == 300


def test_speculated_tokens_of_one_row_all_count(tmp_path: Path) -> None:
    with PerfettoFile(tmp_path / "t.json") as trace:
        track = trace.replica(0)
        track.submitted(Request(7, 0.0, 4, 9))
        track.step(plan_of(0, [7], [0]), result_of(0, 0.0, 1.0, [7, 7, 7], [1.0] * 3, 1), ())
    (span,) = request_spans(read(tmp_path / "t.json"))[7]
    assert (span["name"], span["args"]["output_tokens"], span["tid"]) == ("prefill", 3, FIRST_SLOT)


def broken(path: Path, error: type[BaseException]) -> None:
    with PerfettoFile(path) as trace:
        trace.replica(0).submitted(Request(1, 0.5, 4, 4))
        raise error


def test_an_error_leaves_nothing_and_an_interrupt_a_valid_file(tmp_path: Path) -> None:
    for error, left in ((ValueError, []), (KeyboardInterrupt, ["t.json"])):
        with pytest.raises(error):
            broken(tmp_path / "t.json", error)
        assert [path.name for path in tmp_path.iterdir()] == left
    assert seconds_inside(read(tmp_path / "t.json")) == {1: 0.0}
    with pytest.raises(BadInputError, match="not open"):
        PerfettoFile(tmp_path / "u.json").replica(0)


@pytest.mark.parametrize("limits", [{"seconds": 0.0}, {"seconds": float("nan")}, {"max_events": 0}])
def test_limits_that_make_no_sense_are_refused(limits: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"> 0|>= 1"):
        PerfettoFile(tmp_path / "t.json", **limits)


def test_the_engine_writes_the_same_schema(tmp_path: Path, one_thread: None) -> None:
    pytest.importorskip("transformers")
    from tiny_model import tiny_llama

    from backends import models
    from backends.engine import Engine
    from backends.sampling import SamplingParams

    run = configs.from_mapping({"engine": {"pages": 10, "page_tokens": 4, "max_batch": 2, "prefill_chunk": 4}})
    metrics = Metrics(4, pool_pages=10)
    with PerfettoFile(tmp_path / "t.json") as trace:
        engine = Engine(run, models.wrap(tiny_llama(), None), metrics=Tee(metrics, trace.replica(0)))
        engine.submit(list(range(100)), SamplingParams(max_new_tokens=2))  # refused
        for i in range(4):
            engine.submit([1 + i, 2, 3, 4, 5, 6], SamplingParams(max_new_tokens=14))
        gone = engine.submit([1, 2], SamplingParams(max_new_tokens=9))
        for _ in range(3):
            engine.step()
        engine.cancel(gone)
        engine.run()
    events = read(tmp_path / "t.json")
    summary, table = metrics.summary(), metrics.requests_table()
    spans = request_spans(events)
    for i, request in enumerate(table["id"].tolist()):
        assert sum(s["args"].get("output_tokens", 0) for s in spans[request]) == table["output_tokens"][i]
    inside = seconds_inside(events)
    done = np.isin(table["status"], ["length", "eos"])
    assert done.sum() == 4
    for request, left, arrival in zip(
        table["id"][done].tolist(), table["left_s"][done], table["arrival_s"][done], strict=True
    ):
        assert inside[request] == pytest.approx(left - arrival, abs=1e-6)
    names = {e["name"] for e in of(events, "i")}
    assert {"arrival", "rejected", "cancelled"} <= names
    assert len(of(events, "X", "iteration")) == summary["iterations"]
    assert 0 < summary["kv_use_max"] <= 1  # type: ignore[operator]


def test_the_command_line_writes_a_timeline_whole_or_not_at_all(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[workload]\nn_requests = 3\nprompt_tokens = 20\noutput_tokens = 4\n[cluster]\nreplicas = 2\n")
    status, out, err = entropic("simulate", config, "--perfetto", tmp_path / "t.json", "--out", tmp_path / "res")
    assert status == 0, err
    assert "replica 1" in out
    assert len(of(read(tmp_path / "t.json"), "i", "arrival")) == 3
    assert (tmp_path / "res" / "replicas.parquet").is_file()
    status, _, err = entropic("simulate", config, "--perfetto-seconds", 1)
    assert status == 2
    assert "--perfetto FILE" in err
    status, _, err = entropic("simulate", config, "--perfetto", config)
    assert status == 2
    assert "overwrite" in err
    status, _, err = entropic("simulate", config, "--perfetto", tmp_path / "u.json", "--perfetto-seconds", -1)
    assert status == 2
    assert not (tmp_path / "u.json").exists()


def test_a_link_stays_one_and_a_device_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "t.json")
    (tmp_path / "null").symlink_to(os.devnull)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("link", "null", "pipe"):
        with PerfettoFile(tmp_path / name) as trace:
            trace.replica(0).submitted(Request(1, 0.5, 4, 4))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "pipe").is_fifo()
    assert Path(os.devnull).is_char_device()
    assert os.read(reader, 10**5) == (tmp_path / "t.json").read_bytes()
    os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "null", "pipe", "t.json"]
