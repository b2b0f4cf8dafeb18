"""BurstGPT, Vidur, Mooncake and Parquet: detected, read exactly, every bad row named; windows and repetition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_bank import make_bank

from entropic_ctl import config as configs
from entropic_ctl.config import WorkloadConfig
from entropic_ctl.errors import BadInputError
from sim.arrivals import Workload, make_workload
from sim.cost import LinearCost
from sim.replica import simulate
from sim.trace_csv import BadCellError, CsvFormat
from sim.trace_parquet import write_parquet
from sim.traces import CSV_FORMATS, read_trace

BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens"
S11 = ["5,ChatGPT,0,0,0,Conversation log", "6,GPT-4,20,0,20,API log", "7,GPT-4,20,3,23,API log"]
S12 = {"timestamp": 0, "input_length": 20, "output_length": 4, "hash_ids": [0, 1]}


def write(tmp_path: Path, *lines: str, name: str = "t.csv", end: str = "\n") -> Path:
    (tmp_path / name).write_bytes(end.join([*lines, ""]).encode())
    return tmp_path / name


def moon(tmp_path: Path, *rows: Any, name: str = "t.jsonl") -> Path:
    return write(tmp_path, *(row if isinstance(row, str) else json.dumps(row) for row in rows), name=name)


def row(length: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": length, "output_length": 4, "hash_ids": ids, **more}


def refused(path: Path, *needles: str, kind: str = "trace") -> None:
    with pytest.raises(BadInputError) as caught:
        read_trace(path, kind)
    for needle in (str(path), *needles):
        assert needle in str(caught.value)


def test_s11_sentinel_rows_are_reported_not_simulated(tmp_path: Path) -> None:
    """S11: one row simulated, two reported as skipped."""
    trace = read_trace(write(tmp_path, BURST, *S11, end="\r\n"))
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([20], [3])
    assert trace.skipped.tolist() == [2, 3]
    assert trace.line.tolist() == [4]


@pytest.mark.parametrize(
    ("bad", "needles"),
    [
        ("7,GPT-4,20,3,23", ["missing column", "Log Type"]),
        ("7,GPT-4,20,3,23,API log,x", ["too many columns"]),
        ("7,GPT-4,1e18,3,23,API log", ["Request tokens", "not an integer", "'1e18'"]),
        ("7,GPT-4,1000000000000000000,3,23,API log", ["Request tokens", "out of range", "9999999"]),
        ("7,GPT-4,-3,3,0,API log", ["Request tokens", "out of range", "'-3'"]),
        ("7,GPT-4,20,-3,17,API log", ["Response tokens", "out of range", "'-3'"]),
        ("7,GPT-4,20,3,24,API log", ["Total tokens", "not the sum", "'24'", "23"]),
        ("7,GPT-4,20,3,,API log", ["Total tokens", "empty"]),
        ("7,GPT-4,0,3,3,API log", ["Request tokens", "out of range"]),
        ("-7,GPT-4,20,3,23,API log", ["Timestamp", "out of range", "'-7'"]),
        ("nan,GPT-4,20,3,23,API log", ["Timestamp", "unparsable time"]),
        ("99999999999,GPT-4,20,3,23,API log", ["Timestamp", "unparsable time"]),
        (",GPT-4,20,3,23,API log", ["Timestamp", "empty"]),
    ],
)
def test_s11_everything_else_is_an_error_naming_line_and_column(tmp_path: Path, bad: str, needles: list[str]) -> None:
    refused(write(tmp_path, BURST, *S11, bad), "t.csv:5", "allowed", *needles)


@pytest.mark.parametrize("header", [BURST, VIDUR])
def test_s11_a_missing_column_in_the_header(tmp_path: Path, header: str) -> None:
    short = header.rpartition(",")[0]
    refused(write(tmp_path, short, "1,2,3"), "t.csv:1", "no known kind of trace", "burstgpt", "vidur", "mooncake")
    kind = "burstgpt" if header is BURST else "vidur"
    refused(write(tmp_path, short, "1,2,3"), "t.csv:1", header.rpartition(",")[2], kind=kind)


def test_vidur_times_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    rows = ["0.30000000000000004,5,6", "0.1,7,8", "1e-05,1,2", "12.5,3,0", "2.0E0,9,9"]
    trace = read_trace(write(tmp_path, VIDUR, *rows))
    np.testing.assert_array_equal(trace.arrival_s, np.array([0, 99_990_000, 299_990_000, 1_999_990_000]) / 1e9)
    assert trace.prompt_tokens.tolist() == [1, 7, 5, 9]
    assert trace.skipped.tolist() == [5]
    refused(write(tmp_path, VIDUR, "1,0,3"), "t.csv:2", "num_prefill_tokens", "out of range")
    refused(write(tmp_path, VIDUR, "1,3,2.0"), "t.csv:2", "num_decode_tokens", "not an integer")
    refused(write(tmp_path, VIDUR, "1e11,3,2"), "t.csv:2", "arrived_at", "out of range")


NUMBERS = st.one_of(
    st.integers(0, 12).map(str), st.sampled_from(["007", "9999999", "10000000", "-1", "+3", " 4", "", "x", "1e3"])
)
DECIMALS = st.from_regex(r"[0-9]{1,3}(\.[0-9]{0,3})?", fullmatch=True)
STAMPS = st.from_regex(r"20[0-3][0-9]-[01][0-9]-[0-3][0-9] [0-2][0-9]:59:0[0-9](\.[0-9]{1,3})?Z?", fullmatch=True)


@given(st.sampled_from(sorted(CSV_FORMATS)), DECIMALS, STAMPS, st.lists(NUMBERS, min_size=3, max_size=3))
def test_the_fast_path_agrees_with_the_strict_one(kind: str, second: str, stamp: str, counts: list[str]) -> None:
    """Whatever the pattern of a whole row accepts, the cell by cell parser reads the same way."""
    form: CsvFormat = CSV_FORMATS[kind]
    total = str(int(counts[0]) + int(counts[1])) if counts[0].isdigit() and counts[1].isdigit() else counts[2]
    cells = {
        "azure": [stamp, *counts[:2]],
        "vidur": [second, *counts[:2]],
        "burstgpt": [second, "m", *counts[:2], total, "x"],
    }[kind]
    fast = form.fast(",".join(cells).encode() + b"\r\n")
    try:
        strict = form.parse(cells)
    except BadCellError:
        strict = None
    assert fast is None or fast == strict


def test_the_fast_path_is_taken_and_knows_its_limits() -> None:
    good = {"azure": "2023-11-16 18:17:03.5,7,3", "burstgpt": "3.25,GPT-4,7,3,10,x", "vidur": "3.25,7,3"}
    for kind, line in good.items():
        assert CSV_FORMATS[kind].fast(line.encode() + b"\n") == CSV_FORMATS[kind].parse(line.split(","))
        assert CSV_FORMATS[kind].fast(line.replace("7,3", "7,x").encode()) is None
        with pytest.raises(BadCellError):
            CSV_FORMATS[kind].parse(line.replace("7,3", "7,x").split(","))
    assert CSV_FORMATS["burstgpt"].fast(b"3,GPT-4,7,3,11,x\n") is None
    assert CSV_FORMATS["azure"].fast(b"2023-02-30 18:17:03.5,7,3\n") is None


def test_s12_contradicting_hashes_are_refused_with_their_line(tmp_path: Path) -> None:
    """S12: 20 tokens have one block of 512, not two."""
    refused(moon(tmp_path, S12, S12), "t.jsonl:1", "hash_ids", "2 hashes for a prompt of 20 tokens", "1: one per 512")
    refused(moon(tmp_path, row(20, [0]), S12), "t.jsonl:2", "hash_ids")


def test_s12_a_repeated_prompt_keeps_one_token_to_compute(tmp_path: Path) -> None:
    """S12: the same 32-token prompt twice: at most 31 cached, at least one computed (a page of 16 is found)."""
    path = moon(tmp_path, row(32, [5]), row(32, [5], timestamp=1000))
    config = configs.from_mapping(
        {
            "workload": {"kind": "mooncake", "trace": str(path)},
            "engine": {"pages": 16, "page_tokens": 16, "prefix_caching": True},
        }
    )
    result = simulate(config, bank=make_bank()[0], cost=LinearCost(0.0, 0.01))
    np.testing.assert_allclose(result.requests["ttft_s"], [0.32, 0.16])
    assert result.requests["output_tokens"].tolist() == [4, 4]


@pytest.mark.parametrize(
    ("bad", "needles"),
    [
        ("{", ["not a JSON object"]),
        ("[1]", ["not a JSON object"]),
        ("[" * 5000, ["not a JSON object"]),
        ({"timestamp": 0}, ["missing key", "input_length, output_length, hash_ids"]),
        (row(5, [1], chat=3), ["unknown key", "chat"]),
        (row(5, [1], timestamp=-1), ["timestamp", "not a time", "-1"]),
        (row(5, [1], timestamp="1"), ["timestamp"]),
        (row(5, [1], timestamp=float("nan")), ["timestamp"]),
        (row(5, [1], timestamp=True), ["timestamp"]),
        (row(5, [1], timestamp=10**400), ["timestamp", "not a time"]),
        (row(5, [1], timestamp=float("inf")), ["timestamp", "inf"]),
        (row(0, []), ["input_length", "[1, 9999999]"]),
        (row(10**18, []), ["input_length"]),
        (row(5, [1], output_length=-3), ["output_length", "-3"]),
        (row(5, [1], output_length=2.0), ["output_length"]),
        (row(5, [-1]), ["hash_ids", "not block hashes"]),
        (row(5, ["a"]), ["hash_ids"]),
        (row(5, [2**63]), ["hash_ids"]),
        (row(5, []), ["hash_ids"]),
        (row(513, [1]), ["hash_ids", "1 hashes for a prompt of 513 tokens", "2: one per 512"]),
    ],
)
def test_bad_mooncake_rows_name_line_and_key(tmp_path: Path, bad: Any, needles: list[str]) -> None:
    refused(moon(tmp_path, row(5, [1]), bad), "t.jsonl:2", *needles)


def test_mooncake_zero_output_is_skipped_and_hashes_follow_the_sort(tmp_path: Path) -> None:
    rows = [row(600, [1, 2], timestamp=3000), row(5, [9], output_length=0), row(5, [7], timestamp=500)]
    trace = read_trace(moon(tmp_path, *rows))
    assert trace.arrival_s.tolist() == [0.0, 2.5]
    assert trace.skipped.tolist() == [2]
    assert trace.blocks is not None
    assert trace.blocks.offset.tolist() == [0, 1, 3]
    assert trace.blocks.ids.tolist() == [7, 1, 2]


def test_the_public_mooncake_trace(shared: Path) -> None:
    trace = read_trace(shared / "traces" / "mooncake_conversation.jsonl")
    assert len(trace) == 12_031
    assert trace.arrival_s[-1] == 3536.999
    assert trace.blocks is not None
    assert trace.blocks.ids.shape == (288_500,)
    assert int(trace.blocks.chained().shape[0]) == 288_500
    assert len(set(trace.blocks.chained().tolist())) == 182_790  # as many as ids: they are chained already


# -- Parquet -----------------------------------------------------------------------------------------------------------


def same(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(a.arrival_s, b.arrival_s)
    np.testing.assert_array_equal(a.prompt_tokens, b.prompt_tokens)
    np.testing.assert_array_equal(a.output_tokens, b.output_tokens)
    assert (a.blocks is None) == (b.blocks is None)
    assert (a.client is None) == (b.client is None)
    if a.client is not None:
        np.testing.assert_array_equal(a.client, b.client)
    if a.blocks is not None:
        assert a.blocks.tokens == b.blocks.tokens
        np.testing.assert_array_equal(a.blocks.offset, b.blocks.offset)
        np.testing.assert_array_equal(a.blocks.ids, b.blocks.ids)


def test_parquet_round_trips_every_format(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    times = ["2023-11-16 18:17:03.0010001,7,3", "2023-12-16 18:17:03.123456789,8,4"]
    for path in (
        write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", *times, name="a.csv"),
        write(tmp_path, BURST, *S11, name="b.csv"),
        moon(tmp_path, row(600, [1, 2], timestamp=3), row(5, [7]), row(512, [3])),
    ):
        trace = read_trace(path)
        write_parquet(tmp_path / "t.parquet", trace)
        again = read_trace(tmp_path / "t.parquet")
        same(trace, again)
        assert again.line.tolist() == list(range(1, len(trace) + 1))


def table(tmp_path: Path, meta: dict[str, str] | None = None, **columns: Any) -> Path:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    base = {"arrival_s": [0.0, 1.5, 0.5], "prompt_tokens": [1, 2, 3], "output_tokens": [4, 5, 0]}
    made = pa.table({k: v for k, v in {**base, **columns}.items() if v is not None})
    parquet.write_table(made.replace_schema_metadata(meta), path)
    return path


def test_parquet_clients_and_skipped_rows(tmp_path: Path) -> None:
    trace = read_trace(table(tmp_path, client=[3, -1, 0]), "parquet")
    assert trace.client is not None
    assert trace.client.tolist() == [3, -1]
    assert trace.skipped.tolist() == [3]
    work = make_workload(WorkloadConfig(kind="parquet", trace=str(tmp_path / "t.parquet"), trace_repeat=2), 0, 1)
    assert [r.client for r in work.arrived(9.0)] == [3, -1, 7, -1]


@pytest.mark.parametrize(
    ("columns", "needles"),
    [
        ({"arrival_s": None}, ["column missing", "arrival_s"]),
        ({"extra": [1, 2, 3]}, ["unknown column", "extra"]),
        ({"prompt_tokens": ["a", "b", "c"]}, ["prompt_tokens", "another type", "string", "int64"]),
        ({"prompt_tokens": [1.0, 2.0, 3.0]}, ["prompt_tokens", "another type"]),
        ({"prompt_tokens": [1, 0, 3]}, ["prompt_tokens (row 2)", "out of range", "got 0"]),
        ({"output_tokens": [1, 2, -3]}, ["output_tokens (row 3)", "got -3"]),
        ({"output_tokens": [1, 2, 10**18]}, ["output_tokens (row 3)"]),
        ({"output_tokens": [1, None, 3]}, ["output_tokens (row 2)", "empty"]),
        ({"arrival_s": [0.0, float("nan"), 1.0]}, ["arrival_s (row 2)", "nan"]),
        ({"arrival_s": [0.0, -0.5, 1.0]}, ["arrival_s (row 2)"]),
        ({"client": [0, -2, 1]}, ["client (row 2)"]),
        ({"output_tokens": [0, 0, 0]}, ["no row to simulate", "3 rows"]),
        ({"hash_ids": [[1], [2], [3]]}, ["block_tokens"]),
        ({"hash_ids": [[1], [2, 2], [3]], "meta": {"block_tokens": "512"}}, ["hash_ids (row 2)", "2 hashes"]),
        ({"hash_ids": [[1], [-2], [3]], "meta": {"block_tokens": "512"}}, ["hash_ids (row 2)", "not block hashes"]),
    ],
)
def test_bad_parquet_names_column_and_row(tmp_path: Path, columns: dict[str, Any], needles: list[str]) -> None:
    refused(table(tmp_path, **columns), *needles)


def test_a_parquet_column_may_stand_once(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    whole = parquet.read_table(table(tmp_path))
    parquet.write_table(whole.append_column("arrival_s", pa.array([0.0, 1.0, 2.0])), tmp_path / "t.parquet")
    refused(tmp_path / "t.parquet", "column twice", "arrival_s")


def test_half_precision_times_are_read(tmp_path: Path) -> None:
    times = np.array([0.0, 1.5, 0.5], np.float16)
    assert read_trace(table(tmp_path, arrival_s=times), "parquet").arrival_s.tolist() == [0.0, 1.5]
    refused(table(tmp_path, arrival_s=np.array([0.0, np.inf, 1.0], np.float16)), "arrival_s (row 2)", "inf")


def test_parquet_that_is_cut_short_or_is_none(tmp_path: Path) -> None:
    path = table(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    refused(path, "not a Parquet table")
    refused(write(tmp_path, VIDUR, "1,2,3"), "not a Parquet table", kind="parquet")
    with pytest.raises(BadInputError, match="kind of trace to write"):
        write_parquet(tmp_path / "x.csv", read_trace(write(tmp_path, VIDUR, "1,2,3")))


# -- windows, rows, repetition -----------------------------------------------------------------------------------------


def played(path: Path, **more: Any) -> Workload:
    return make_workload(WorkloadConfig(kind="trace", trace=str(path), **more), 0, 3)


def test_window_rows_repetition_and_rate_in_the_documented_order(tmp_path: Path) -> None:
    path = write(tmp_path, VIDUR, *(f"{t},{t + 1},1" for t in (0, 1, 2, 4, 7, 9)))
    assert played(path, window_start_s=1.0, window_s=6.0).arrival_s.tolist() == [0, 1, 3]  # [1, 7)
    assert played(path, window_start_s=1.5).prompt_tokens.tolist() == [3, 5, 8, 10]
    assert played(path, window_start_s=1.5).arrival_s.tolist() == [0.5, 2.5, 5.5, 7.5]
    assert played(path, trace_rows=2).prompt_tokens.tolist() == [1, 2]
    twice = played(path, window_start_s=1.0, window_s=6.0, trace_rows=2, trace_repeat=3, rate_scale=2.0)
    assert twice.arrival_s.tolist() == [0, 0.5, 3, 3.5, 6, 6.5]
    assert twice.prompt_tokens.tolist() == [2, 3] * 3
    assert played(path, trace_repeat=2).arrival_s.tolist() == [0, 1, 2, 4, 7, 9, 9, 10, 11, 13, 16, 18]
    with pytest.raises(BadInputError, match=r"t\.csv.*window.*9 s"):
        played(path, window_start_s=50.0)


def test_repeating_ten_times_is_the_trace_at_ten_times_its_length(azure_trace: Path) -> None:
    once, ten = played(azure_trace), played(azure_trace, trace_repeat=10)
    assert len(ten) == 193_660
    assert ten.arrival_s[-1] == pytest.approx(10 * once.arrival_s[-1])
    assert (np.diff(ten.arrival_s) >= 0).all()
    assert int(ten.limit_tokens.sum()) == 10 * 4_088_665
    np.testing.assert_array_equal(ten.limit_tokens[19_366:38_732], once.limit_tokens)


def test_s16_a_long_trace_is_served_in_full(tmp_path: Path) -> None:
    """S16 in small (the million rows are run by hand, see sim/README.md): requests in = out + live + refused."""
    path = write(tmp_path, VIDUR, *(f"{i},{5 if i % 10 else 5000},1" for i in range(200)))
    config = configs.from_mapping(
        {
            "workload": {"kind": "vidur", "trace": str(path), "trace_repeat": 20, "rate_scale": 10.0},
            "engine": {"pages": 8, "max_batch": 64},
        }
    )
    result = simulate(config, bank=make_bank()[0], cost=LinearCost(0.1, 0.0))
    summary = result.summary
    assert summary["requests_in"] == 4000
    assert summary["requests_refused"] == 400
    assert summary["requests_finished"] == 3600
    assert summary["requests_live"] == 0
