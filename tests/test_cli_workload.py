"""`entropic workload` and `entropic trace convert`: what they print and write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import entropic

from entropic_ctl import results
from sim.traces import read_trace

TOML = "seed = 3\n[workload]\nkind = 'poisson'\nn_requests = 400\nrate_per_s = 2.0\noutput_cv = 0.5\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,7,3\n2.5,9,4\n1.0,5,0\n"
MOON = '{{"timestamp": {t}, "input_length": {n}, "output_length": 4, "hash_ids": {ids}}}\n'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(TOML)
    return tmp_path / "run.toml"


def test_a_workload_is_summarised_tabled_and_drawn(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    status, out, err = entropic("workload", config, "--out", tmp_path / "w", "--json", tmp_path / "w.json")
    assert status == 0, err
    assert "shared_prefix_share" in out
    values = json.loads((tmp_path / "w.json").read_text())
    table, stamp = results.read_table(tmp_path / "w" / "workload.parquet")
    assert stamp["seed"] == 3
    assert values["requests"] == len(table["id"]) == 400
    times = table["arrival_s"]
    assert values["rate_per_s"] == pytest.approx(399 / (times[-1] - times[0]))
    assert values["documented_rate_per_s"] == 2.0
    assert values["gap_cv"] == pytest.approx(np.diff(times).std() / np.diff(times).mean())
    assert values["output_limit"]["mean"] == table["output_limit"].mean()
    assert (tmp_path / "w" / "workload.png").read_bytes()[:4] == b"\x89PNG"


def test_a_trace_replaces_the_arrivals_and_its_prefixes_are_counted(config: Path, tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(
        MOON.format(t=0, n=1024, ids=[1, 2]) + MOON.format(t=5, n=1000, ids=[1, 3]) + MOON.format(t=9, n=512, ids=[1])
    )
    status, _, err = entropic("workload", config, "--trace", tmp_path / "m.jsonl", "--json", tmp_path / "w.json")
    assert status == 0, err
    values = json.loads((tmp_path / "w.json").read_text())
    assert values["requests"] == 3
    assert values["shared_prefix_share"] == pytest.approx((512 + 511) / (1024 + 1000 + 512))
    assert values["stamp"]["config"]["workload"]["kind"] == "trace"


def test_sessions_and_users_wait_for_one_another(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("[workload]\nkind = 'sessions'\nn_requests = 30\nturns = 3\nturns_law = 'fixed'\nprompt_cv = 0\n")
    entropic("workload", path, "--json", tmp_path / "s.json")
    values = json.loads((tmp_path / "s.json").read_text())
    assert (values["clients"], values["known_arrivals"], values["requests"]) == (10, 10, 30)
    # prompts of 128, 224, 320 tokens; the second and third begin with the one before
    assert values["shared_prefix_share"] == pytest.approx((128 + 224) / (128 + 224 + 320))


def test_convert_writes_a_trace_that_reads_the_same(tmp_path: Path) -> None:
    (tmp_path / "v.csv").write_text(VIDUR)
    status, _, err = entropic("trace", "convert", tmp_path / "v.csv", tmp_path / "v.parquet")
    assert status == 0
    assert "2 requests, 1 rows left out" in err
    trace = read_trace(tmp_path / "v.parquet", "parquet")
    assert trace.arrival_s.tolist() == [0.0, 2.0]
    assert trace.prompt_tokens.tolist() == [7, 9]


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (("v.csv", "v.csv"), ".parquet"),
        (("v.csv", "no/v.parquet"), "no such folder"),
        (("absent.csv", "v.parquet"), "cannot read trace"),
        (("bad.csv", "v.parquet"), "bad.csv:2"),
        (("v.parquet", "v.parquet"), "overwrite"),
    ],
)
def test_convert_refuses_in_one_line_and_writes_nothing(
    tmp_path: Path, arguments: tuple[str, str], needle: str
) -> None:
    (tmp_path / "v.csv").write_text(VIDUR)
    (tmp_path / "bad.csv").write_text(VIDUR.replace("0.5", "x"))
    before = sorted(tmp_path.iterdir())
    status, _, err = entropic("trace", "convert", *(tmp_path / name for name in arguments))
    assert status == 2
    assert needle in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_a_bad_window_names_trace_and_config(config: Path, tmp_path: Path) -> None:
    (tmp_path / "v.csv").write_text(VIDUR)
    config.write_text(f"[workload]\nkind = 'vidur'\ntrace = '{tmp_path}/v.csv'\nwindow_start_s = 99\n")
    status, _, err = entropic("workload", config)
    assert status == 2
    assert "v.csv" in err
    assert "window" in err
