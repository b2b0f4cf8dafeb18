"""The workload table: lists are checked, keys of other kinds are errors in files, a trace replaces what it must."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from entropic_ctl import config as configs
from entropic_ctl.cli_run import with_overrides
from entropic_ctl.config import WorkloadConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.workload_config import READ_BY

MMPP = "kind = 'mmpp'\nrates_per_s = [1, 2.5]\ndwell_s = [3.0, 4.0]\n"


def load(tmp_path: Path, body: str) -> configs.RunConfig:
    (tmp_path / "run.toml").write_text("[workload]\n" + body)
    return configs.load(tmp_path / "run.toml")


def test_lists_become_tuples_and_survive_json(tmp_path: Path) -> None:
    run = load(tmp_path, MMPP)
    assert run.workload.rates_per_s == (1.0, 2.5)
    stamped = json.loads(json.dumps(configs.resolve(run)))
    assert configs.from_mapping(stamped) == run
    assert configs.digest(stamped) == configs.digest(configs.resolve(run))


@pytest.mark.parametrize(
    ("body", "needles"),
    [
        (MMPP.replace("2.5", "-1"), ["run.toml:3", "workload.rates_per_s", "number 2: out of range", "[0, 1e+06]"]),
        (MMPP.replace("2.5", "'x'"), ["number 2: not a number"]),
        (MMPP.replace("2.5", "nan"), ["number 2: not finite"]),
        (MMPP.replace("[1, 2.5]", "3"), ["not a list of numbers"]),
        (MMPP.replace("[1, 2.5]", str([1] * 1001)), ["1001 numbers", "at most 1000"]),
        (MMPP.replace("[1, 2.5]", "[1]"), ["too few rates", "at least 2"]),
        (MMPP.replace("[1, 2.5]", "[0, 0]"), ["nobody would ever arrive"]),
        (MMPP.replace("[3.0, 4.0]", "[3.0]"), ["run.toml:4", "workload.dwell_s", "2 numbers"]),
        (MMPP.replace("[3.0, 4.0]", "[3.0, 0.0]"), ["number 2: out of range", "(0, "]),
        ("kind = 'diurnal'\n", ["workload.rates_per_s", "at least 1"]),
        ("kind = 'sessions'\nturns = 2.5\nturns_law = 'fixed'\n", ["run.toml:3", "workload.turns", "2.5"]),
        ("kind = 'sessions'\noutput_length = 'bank'\n", ["workload.output_length", "auto, limit"]),
        ("kind = 'burstgpt'\n", ["needs a trace", "burstgpt"]),
        ("kind = 'llama'\n", ["workload.kind", "burst", "poisson", "mmpp", "sessions", "mooncake", "trace"]),
        ("rate_per_s = 2.0\n", ["run.toml:2", "workload.rate_per_s", "'burst' does not read", "poisson, gamma"]),
        ("kind = 'poisson'\narrival_cv = 3.0\n", ["run.toml:3", "workload.arrival_cv", "with kind gamma"]),
        ("kind = 'azure'\ntrace = 't'\nn_requests = 9\n", ["workload.n_requests"]),
    ],
)
def test_bad_workloads_name_line_key_and_what_is_allowed(tmp_path: Path, body: str, needles: list[str]) -> None:
    with pytest.raises(BadInputError) as caught:
        load(tmp_path, body)
    for needle in needles:
        assert needle in str(caught.value)


def test_a_key_that_says_its_default_is_no_error(tmp_path: Path) -> None:
    assert load(tmp_path, "kind = 'poisson'\nusers = 8\narrival_cv = 1.0\n").workload.kind == "poisson"


def test_sessions_read_what_their_arrivals_read(tmp_path: Path) -> None:
    body = "kind = 'sessions'\nsession_arrivals = 'gamma'\narrival_cv = 2.0\n"
    assert load(tmp_path, body).workload.process == "gamma"
    with pytest.raises(BadInputError, match="arrival_cv"):
        load(tmp_path, body.replace("'gamma'", "'poisson'"))


def test_every_key_in_the_table_of_readers_exists() -> None:
    names = {item.name for item in dataclasses.fields(WorkloadConfig)}
    assert set(READ_BY) <= names
    known = next(item for item in dataclasses.fields(WorkloadConfig) if item.name == "kind").metadata["options"]
    assert {kind for kinds in READ_BY.values() for kind in kinds} == set(known)


def test_a_trace_on_the_command_line_keeps_what_traces_read(tmp_path: Path) -> None:
    run = load(tmp_path, MMPP + "rate_scale = 2.0\nn_requests = 5\nprompt_cv = 0.1\n")
    work = with_overrides(run, trace=tmp_path / "x.csv").workload
    assert (work.kind, work.trace, work.rate_scale) == ("trace", str(tmp_path / "x.csv"), 2.0)
    assert work.unread() == ()
    azure = load(tmp_path, "kind = 'azure'\ntrace = 'a.csv'\ntrace_rows = 4\n")
    work = with_overrides(azure, trace=tmp_path / "x.csv").workload
    assert (work.kind, work.trace_rows) == ("trace", 4)  # of any format
