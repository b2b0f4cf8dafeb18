"""Azure traces: exact times, stable order, and an error with file, line and column for every bad row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from sim.traces import MAX_TOKENS, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(path: Path, rows: list[str], header: str = HEADER, end: str = "\r\n") -> Path:
    path.write_bytes(end.join([header, *rows, ""]).encode())
    return path


def test_s10_seven_fractional_digits_and_crlf(tmp_path: Path) -> None:
    times = ["03.0010000", "03.0020000", "03.0090000", "03.0110000"]
    trace = read_trace(write(tmp_path / "t.csv", [f"2023-11-16 18:17:{t},10,2" for t in times]))
    np.testing.assert_allclose(trace.arrival_s, [0, 0.001, 0.008, 0.010], rtol=0, atol=1e-12)
    assert trace.line.tolist() == [2, 3, 4, 5]


def test_s9_unsorted_rows_are_sorted_stably(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:17:{s:02d}.0000000,{p},1" for s, p in ((0, 1), (5, 2), (3, 3), (5, 4))]
    trace = read_trace(write(tmp_path / "t.csv", rows))
    assert trace.arrival_s.tolist() == [0, 3, 5, 5]
    assert trace.prompt_tokens.tolist() == [1, 3, 2, 4]  # the ties at 5 keep their order in the file


@pytest.mark.parametrize(
    ("first", "second", "gap"),
    [
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:00.017335+00:00", 0.007405),
        ("2024-05-10 00:00:00+00:00", "2024-05-10 01:00:00+01:00", 0.0),
        ("2024-05-10 00:00:00Z", "2024-05-09 23:00:00-01:00", 0.0),
        ("2023-12-31 23:59:59.9999999", "2024-01-01 00:00:00", 1e-7),
        ("2024-02-28 23:59:59", "2024-03-01 00:00:00", 86401.0),  # a leap year
        ("2024-05-10T00:00:00.1", "2024-05-10T00:00:00.123456789", 0.023456789),
    ],
)
def test_time_spellings(tmp_path: Path, first: str, second: str, gap: float) -> None:
    trace = read_trace(write(tmp_path / "t.csv", [f"{first},1,1", f"{second},1,1"], end="\n"))
    np.testing.assert_allclose(trace.arrival_s, [0, gap], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("row", "needles"),
    [
        ("2023-11-16 18:17:03.0,10", ["missing column", "GeneratedTokens"]),
        ("2023-11-16 18:17:03.0", ["missing column", "ContextTokens, GeneratedTokens"]),
        ("2023-11-16 18:17:03.0,1,2,3", ["too many columns"]),
        ("2023-11-16 18:17:03.0,ten,2", ["ContextTokens", "not an integer", "'ten'"]),
        ("2023-11-16 18:17:03.0,1.5,2", ["ContextTokens", "not an integer", "'1.5'"]),
        ("2023-11-16 18:17:03.0,10,-2", ["GeneratedTokens", "out of range", "'-2'", "[1, "]),
        ("2023-11-16 18:17:03.0,0,2", ["ContextTokens", "out of range", "'0'"]),
        ("2023-11-16 18:17:03.0,10,1000000000000000000", ["GeneratedTokens", "out of range", str(MAX_TOKENS)]),
        ("2023-11-16 18:17:03.0,1e18,2", ["ContextTokens", "not an integer", "'1e18'"]),
        ("2023-11-16 18:17:03.0,NaN,2", ["ContextTokens", "'NaN'"]),
        ("2023-11-16 18:17:03.0,,2", ["ContextTokens", "empty"]),
        ("2023-11-16 18:17:03.0, 10,2", ["ContextTokens", "not a plain integer", "' 10'"]),
        ("yesterday,10,2", ["TIMESTAMP", "unparsable time", "'yesterday'", "YYYY-MM-DD"]),
        ("2023-11-16 25:17:03.0,10,2", ["TIMESTAMP", "unparsable time"]),
        ("2023-02-30 18:17:03.0,10,2", ["TIMESTAMP", "no such date", "2023-02-30"]),
        ("nan,10,2", ["TIMESTAMP", "unparsable time"]),
        ("\0\1\2", ["not a text row"]),
        ("x" * 10_000, ["not a text row"]),
        ("2023-11-16 18:17:03.0,\u0661,2", ["ContextTokens", "not an integer"]),  # an Arabic digit
    ],
)
def test_bad_row_names_file_line_column_value_and_range(tmp_path: Path, row: str, needles: list[str]) -> None:
    path = write(tmp_path / "trace.csv", ["2023-11-16 18:17:02.0000000,1,1", row])
    with pytest.raises(BadInputError) as caught:
        read_trace(path)
    for needle in ["trace.csv:3", "allowed", *needles]:
        assert needle in str(caught.value)


@pytest.mark.parametrize(
    ("content", "needle"),
    [
        (b"", "empty file"),
        (HEADER.encode() + b"\r\n", "no row to simulate"),
        (HEADER.encode() + b"\n2023-11-16 18:17:03.0,10,0\n", "1 rows with GeneratedTokens 0"),
        (b"Timestamp,Model,Request tokens\n1,2,3\n", "wrong header"),
        (b"2023-11-16 18:17:03.0,10,2\n", "wrong header"),
        (b"\xff\xfe\x00\x01" * 100, "wrong header"),
    ],
)
def test_bad_file(tmp_path: Path, content: bytes, needle: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(BadInputError, match=needle):
        read_trace(tmp_path / "t.csv", "azure")


@pytest.mark.parametrize("stray", ["9999-12-31 00:00:00", "0001-01-01 00:00:00"])
def test_a_stray_date_centuries_away_is_an_error_not_an_overflow(tmp_path: Path, stray: str) -> None:
    path = write(tmp_path / "t.csv", ["2023-11-16 18:17:03,1,1", f"{stray},1,1"])
    with pytest.raises(BadInputError, match=r"t\.csv: TIMESTAMP: .* lie between lines (2 and 3|3 and 2)"):
        read_trace(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.csv", tmp_path):
        with pytest.raises(BadInputError, match="cannot read trace"):
            read_trace(path)


def test_rows_without_output_are_reported_not_lost(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:17:03,10,2", "2023-11-16 18:17:01,10,0", "", "2023-11-16 18:17:04,10,1"]
    trace = read_trace(write(tmp_path / "t.csv", rows))
    assert len(trace) == 2
    assert trace.skipped.tolist() == [3]
    assert trace.arrival_s.tolist() == [0, 1]  # time starts at the first request that is simulated


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 99), st.integers(1, 99)), min_size=1, max_size=20))
def test_any_order_equals_the_stable_sort(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]]
) -> None:
    path = write(tmp_path_factory.mktemp("a") / "t.csv", [f"2023-11-16 00:00:{s:02d},{p},{g}" for s, p, g in rows])
    trace = read_trace(path)
    expected = sorted(rows, key=lambda row: row[0])
    assert trace.prompt_tokens.tolist() == [row[1] for row in expected]
    assert trace.output_tokens.tolist() == [row[2] for row in expected]
    assert (np.diff(trace.arrival_s) >= 0).all()


def test_the_public_trace(azure_trace: Path) -> None:
    trace = read_trace(azure_trace)
    assert len(trace) == 19_366
    assert int(trace.output_tokens.sum()) == 4_088_665
    assert 3_500 < trace.arrival_s[-1] < 3_502
    assert (trace.line[0], trace.prompt_tokens[0], trace.output_tokens[0]) == (2, 374, 44)
