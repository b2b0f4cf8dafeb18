"""Engine logs as regression data: loads, durations with the time between steps, and what a bad log says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from engine_log_maker import PRUNED, write_log

from entropic_ctl.errors import BadInputError
from sim.engine_log import read_log, read_logs


def test_durations_reach_to_the_next_plan_and_idle_waits_are_left_out(tmp_path: Path) -> None:
    write_log(tmp_path / "a.jsonl", lambda load: 0.01 * load.rows, steps=40, between_s=0.002, idle_every=8)
    log = read_log(tmp_path / "a.jsonl")
    assert len(log) == 40
    np.testing.assert_allclose(log.seconds, 0.01 * log.load["rows"], rtol=1e-9)  # a wait of 1 s would show
    assert np.isnan(log.between_s[7::8]).all()
    assert np.isnan(log.between_s).sum() == 5
    np.testing.assert_allclose(log.between_s[~np.isnan(log.between_s)], 0.002, rtol=1e-6)


def test_loads_are_those_a_simulated_step_is_charged_for(tmp_path: Path) -> None:
    write_log(tmp_path / "a.jsonl", lambda _: 0.01, steps=60, loop=PRUNED)
    log = read_log(tmp_path / "a.jsonl")
    load = log.load
    assert log.prunes.all()
    assert (load["pruned_rows"] <= load["decode_rows"]).all()
    assert load["pruned_rows"].sum() > 0
    assert (load["pruned_kept_context"] <= load["pruned_context"]).all()
    assert (load["sampling"] >= load["decode_rows"]).all()
    assert (load["tokens"] >= load["decode_rows"] + 16 * (load["rows"] - load["decode_rows"])).all()


def test_a_broken_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_log(path, lambda _: 0.01, steps=20)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert len(read_log(path)) == 20  # its last line is the empty plan of an idle wait


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda lines: [], ["empty log"]),
        (lambda lines: lines[1:], ["a.jsonl:1", "header"]),
        (lambda lines: ["{}", *lines[1:]], ["a.jsonl:1", "not an event"]),
        (lambda lines: lines[:1], ["no iteration"]),
        (lambda lines: [lines[0], lines[1], lines[2].replace('"end_s"', '"end"')], ["a.jsonl:3", "malformed", "end_s"]),
        (lambda lines: [lines[0], lines[2]], ["a.jsonl:2", "a result without a plan"]),
        (lambda lines: [lines[0].replace('"loop"', '"lop"'), *lines[1:]], ["a.jsonl:1", "loop"]),
    ],
)
def test_a_bad_log_is_refused_with_its_line(edit: object, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_log(path, lambda _: 0.01, steps=3)
    lines = edit(path.read_text().splitlines())  # type: ignore[operator]
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(BadInputError) as error:
        read_log(path)
    for word in words:
        assert word in str(error.value)


def test_columns_of_different_lengths_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_log(path, lambda _: 0.01, steps=3)
    lines = path.read_text().splitlines()
    plan = json.loads(lines[1])
    plan["context"].append(5)
    path.write_text("\n".join([lines[0], json.dumps(plan), *lines[2:]]) + "\n")
    with pytest.raises(BadInputError, match=r"a\.jsonl:3: malformed event: columns of different lengths"):
        read_log(path)


@pytest.mark.parametrize(
    ("line", "field", "value", "words"),
    [
        (1, "format", 99, ["format", "got 99", "allowed: 1"]),
        (2, "context", 10**30, ["a.jsonl:3", "context", "2^31 - 1"]),
        (2, "context", -5, ["a.jsonl:3", "context", "got -5"]),
        (2, "context", 1.5, ["a.jsonl:3", "context", "integers"]),
        (2, "n_tokens", -1, ["a.jsonl:3", "n_tokens", "got -1"]),
        (2, "theta_nats", float("nan"), ["a.jsonl:3", "theta_nats", "nan"]),
        (2, "samples", "yes", ["a.jsonl:3", "samples", "true or false"]),
        (2, "now_s", float("nan"), ["a.jsonl:2", "now_s", "nan"]),
        (4, "now_s", 0.001, ["a.jsonl:4", "now_s", "0.001", "does not go back"]),
        (3, "end_s", 1e308, ["a.jsonl:3", "end_s", "1e+308"]),
        (3, "end_s", float("inf"), ["a.jsonl:3", "end_s", "inf"]),
        (3, "start_s", "0", ["a.jsonl:3", "start_s", "'0'"]),
        (3, "kept_fraction", float("nan"), ["a.jsonl:3", "kept_fraction", "[0, 1]"]),
        (3, "kept_fraction", 1.5, ["a.jsonl:3", "kept_fraction", "got 1.5"]),
    ],
)
def test_values_out_of_range_are_refused_by_name(
    line: int, field: str, value: object, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    write_log(path, lambda _: 0.01, steps=3)
    lines = path.read_text().splitlines()
    event = json.loads(lines[line - 1])
    place = event["result"] if event["event"] == "observe" else event
    place[field] = [value, *place[field][1:]] if isinstance(place[field], list) else value
    lines[line - 1] = json.dumps(event)
    path.write_text("".join(text + "\n" for text in lines))
    with pytest.raises(BadInputError) as error:
        read_log(path)
    for word in words:
        assert word in str(error.value)


def test_logs_of_different_page_sizes_do_not_mix(tmp_path: Path) -> None:
    write_log(tmp_path / "a.jsonl", lambda _: 0.01, steps=3)
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "b.jsonl").write_text(text.replace('"page_tokens": 16', '"page_tokens": 32', 1))
    with pytest.raises(BadInputError, match="page sizes"):
        read_logs([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    with pytest.raises(BadInputError, match="no log"):
        read_logs([])
