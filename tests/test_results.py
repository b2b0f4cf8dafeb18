from __future__ import annotations

import builtins
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl import provenance, results
from entropic_ctl.config import RunConfig, from_mapping
from entropic_ctl.errors import BadInputError

COLUMNS = {
    "id": np.array([3, -1, 2**62]),
    "time_s": np.array([0.1, math.nan, 1e-310]),
    "share": np.array([1 / 3, math.inf, -0.0], np.float32),
    "greedy": np.array([True, False, True]),
    "status": np.array(["eos", 'a "quoted", cell', "two\nlines ±"]),
}
ROOT = Path(__file__).resolve().parents[1]
STAMP = results.stamp(RunConfig(seed=5), 7)


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_round_trip_keeps_values_dtypes_and_stamp(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "deep" / f"t{suffix}"
    results.write_table(path, COLUMNS, STAMP)
    columns, stamped = results.read_table(path)
    assert list(columns) == list(COLUMNS)
    for name, values in COLUMNS.items():
        np.testing.assert_array_equal(columns[name], values)
        assert columns[name].dtype.kind == values.dtype.kind
        if values.dtype.kind == "f":
            assert columns[name].dtype == values.dtype
            np.testing.assert_array_equal(np.signbit(columns[name]), np.signbit(values))
    assert stamped == STAMP
    assert from_mapping(stamped["config"]) == RunConfig(seed=5)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_equal_content_gives_equal_bytes(tmp_path: Path, suffix: str) -> None:
    for name in ("a", "b"):
        results.write_table(tmp_path / f"{name}{suffix}", COLUMNS, results.stamp(RunConfig(seed=5), 7))
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_empty_tables(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    results.write_table(path, {name: values[:0] for name, values in COLUMNS.items()}, {})
    columns, stamped = results.read_table(path)
    assert {name: len(values) for name, values in columns.items()} == dict.fromkeys(COLUMNS, 0)
    assert stamped == {}


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=20))
def test_csv_floats_are_exact(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    results.write_table(path, {"x": values}, {})
    np.testing.assert_array_equal(results.read_table(path)[0]["x"], np.array(values))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.csv"
    results.write_table(path, {"x": [1]}, {})
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(results, "_cells", fail)
    with pytest.raises(RuntimeError, match="power cut"):
        results.write_table(path, {"x": [2]}, {})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]
    monkeypatch.undo()
    with path.open("rb") as reader:  # whoever is reading keeps the old file: replaced, not rewritten in place
        results.write_table(path, {"x": [2]}, {})
        assert reader.read() == before
    assert results.read_table(path)[0]["x"].tolist() == [2]


def test_bad_tables_are_refused(tmp_path: Path) -> None:
    good = tmp_path / "good.parquet"
    results.write_table(good, COLUMNS, STAMP)
    (tmp_path / "cut.parquet").write_bytes(good.read_bytes()[:-40])
    (tmp_path / "dir.csv").mkdir()
    for name, content in {
        "plain.csv": "x\n1\n",
        "binary.csv": "\udcff",
        "cells.csv": '# {"dtypes": {"x": "int64"}, "schema": 1, "stamp": {}}\nx\n1,2\n',
        "word.csv": '# {"dtypes": {"x": "int64"}, "schema": 1, "stamp": {}}\nx\none\n',
        "header.csv": '# {"dtypes": {"x": "int64"}, "schema": 1, "stamp": {}}\ny\n1\n',
        "new.csv": '# {"dtypes": {"x": "int64"}, "schema": 99, "stamp": {}}\nx\n1\n',
    }.items():
        (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    for name, needle in {
        "cut.parquet": "not a Parquet table",
        "absent.parquet": "cannot read table",
        "dir.csv": "cannot read table",
        "absent.csv": "cannot read table",
        "plain.csv": "no readable stamp",
        "binary.csv": "not UTF-8",
        "cells.csv": ":3: wrong number of cells",
        "word.csv": "x: bad cell",
        "header.csv": "columns missing",
        "new.csv": "another version",
        "x.txt": "unknown kind of table",
    }.items():
        with pytest.raises(BadInputError, match=needle) as caught:
            results.read_table(tmp_path / name)
        assert name in str(caught.value)
    for columns in ({"x": [1], "y": [1, 2]}, {"x": [[1]]}, {"x": [object()]}, {"x": [1j]}):
        with pytest.raises(BadInputError, match="bad"):
            results.write_table(tmp_path / "bad.csv", columns, {})
    with pytest.raises(BadInputError, match="unknown kind"):
        results.write_table(tmp_path / "x.xlsx", {}, {})
    with pytest.raises(BadInputError, match="cannot write"):
        results.write_table(good / "below" / "t.csv", {"x": [1]}, {})


def test_missing_pyarrow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def blocked(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(BadInputError, match="pip install"):
        results.write_table(tmp_path / "t.parquet", {"x": [1]}, {})
    results.write_table(tmp_path / "t.csv", {"x": [1]}, {})


def test_json_has_null_for_nan(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results.write_json(path, {"a": np.float32(0.5), "b": math.nan, "c": [np.int64(2), math.inf], "d": np.arange(2)})
    assert json.loads(path.read_text()) == {"a": 0.5, "b": None, "c": [2, None], "d": [0, 1]}
    with pytest.raises(BadInputError, match="no JSON form"):
        results.write_json(path, {"a": object()})
    assert json.loads(path.read_text())["a"] == 0.5


def test_stamp_says_what_ran() -> None:
    assert STAMP["seed"] == 7
    assert STAMP["config"]["seed"] == 5
    assert STAMP["config"]["engine"]["page_tokens"] == 16
    assert STAMP["versions"]["numpy"] == np.__version__
    assert STAMP["hardware"]["cores"] >= 1
    assert results.stamp(RunConfig(seed=6), 7)["config_digest"] != STAMP["config_digest"]
    json.dumps(STAMP, allow_nan=False)


def test_commit_is_that_of_the_source_tree_or_unknown(tmp_path: Path) -> None:
    """A copy outside a checkout, even below another repository, does not take that repository's commit."""
    copy = tmp_path / "repo" / "site"
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "outer"]):
        copy.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "-C", str(tmp_path / "repo"), *command], check=True)
    (copy / "entropic_ctl").mkdir(parents=True)
    for source in Path(provenance.__file__).parent.rglob("*.py"):
        target = copy / "entropic_ctl" / source.relative_to(Path(provenance.__file__).parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
    script = "from entropic_ctl.provenance import commit; print(commit())"
    run = subprocess.run([sys.executable, "-c", script], cwd=copy, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "unknown"


def test_stamping_imports_no_heavy_library() -> None:
    script = (
        "import sys; from entropic_ctl import results; from entropic_ctl.config import RunConfig;"
        "results.stamp(RunConfig(), 0);"
        "print([m for m in ('torch', 'pyarrow', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
