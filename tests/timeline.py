"""Reads a trace file as a stranger would, and checks what the trace-event format asks for."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
REQUIRED = {
    "M": {"ph", "ts", "pid", "tid", "name", "args"},
    "X": {"ph", "ts", "dur", "pid", "tid", "name", "cat", "args"},
    "i": {"ph", "ts", "pid", "tid", "name", "s", "args"},
    "C": {"ph", "ts", "pid", "tid", "name", "args"},
    "b": {"ph", "ts", "pid", "tid", "name", "cat", "id"},
    "e": {"ph", "ts", "pid", "tid", "name", "cat", "id"},
}


def read(path: Path) -> list[Event]:
    """Return the events of a valid trace."""
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["displayTimeUnit"] == "ms"
    events: list[Event] = content["traceEvents"]
    check(events)
    return events


def check(events: list[Event]) -> None:
    """Required fields, time that never runs backwards on a track, spans of a track that never overlap, b before e."""
    last: dict[Any, float] = defaultdict(float)
    end: dict[Any, float] = defaultdict(float)
    open_: dict[Any, float] = {}
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys(), event
        assert event["ts"] >= 0
        track = (event["pid"], event["tid"], event["name"] if event["ph"] == "C" else "")
        if event["ph"] in "XiC":
            assert event["ts"] >= last[track], (event, last[track])
            last[track] = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= end[track] - 2e-3, (event, end[track])
            end[track] = event["ts"] + event["dur"]
        elif event["ph"] == "C":
            assert isinstance(event["args"]["value"], float)
        elif event["ph"] == "b":
            assert (event["pid"], event["id"]) not in open_
            open_[event["pid"], event["id"]] = event["ts"]
        elif event["ph"] == "e":
            assert event["ts"] >= open_.pop((event["pid"], event["id"]))
    assert not open_
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events} <= named


def of(events: list[Event], ph: str, name: str | None = None, pid: int | None = None) -> list[Event]:
    """Return the events of a kind."""
    return [
        e for e in events if e["ph"] == ph and (name is None or e["name"] == name) and (pid is None or e["pid"] == pid)
    ]


def request_spans(events: list[Event]) -> dict[int, list[Event]]:
    """Return each request's spans on slot tracks, in order."""
    out = defaultdict(list)
    for event in of(events, "X"):
        if event["name"] != "iteration":
            out[event["args"]["request"]].append(event)
    return out


def seconds_inside(events: list[Event]) -> dict[int, float]:
    """Return the total duration of each request's spans, the queue included, seconds."""
    out: dict[int, float] = defaultdict(float)
    for event in of(events, "b"):
        out[event["id"]] -= event["ts"] / 1e6
    for event in of(events, "e"):
        out[event["id"]] += event["ts"] / 1e6
    for request, spans in request_spans(events).items():
        out[request] += sum(span["dur"] for span in spans) / 1e6
    return out
