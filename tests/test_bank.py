"""Damaged banks: one clear error each, whatever is wrong with the file or a table."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_bank import make_bank

from entropic_ctl import bank as banks
from entropic_ctl.errors import BadInputError

Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bank") / "bank.npz"
    banks.save(make_bank()[0], path)
    return path


def changed(good: Path, tmp_path: Path, **tables: Any) -> Path:
    with np.load(good) as data:
        arrays = {name: data[name] for name in data.files} | tables
    np.savez(tmp_path / "bad.npz", **arrays)
    return tmp_path / "bad.npz"


def meta(good: Path, **values: Any) -> Any:
    with np.load(good) as data:
        held = json.loads(bytes(data["meta"]).decode())
    return np.frombuffer(json.dumps(held | values).encode(), np.uint8)


@pytest.mark.parametrize("value", [None, "x", "64", 0, 1, -1, 1.5, 10**30, True, [64]])
def test_vocabulary_is_a_size(good: Path, tmp_path: Path, value: object) -> None:
    with pytest.raises(BadInputError, match=r"bad\.npz.*vocab_size"):
        banks.load(changed(good, tmp_path, meta=meta(good, vocab_size=value)))


@pytest.mark.parametrize("text", ["[]", "3", "{", "[" * 100_000, "9" * 5000])
def test_meta_is_an_object(good: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInputError, match=r"bad\.npz"):
        banks.load(changed(good, tmp_path, meta=np.frombuffer(text.encode(), np.uint8)))


@pytest.mark.parametrize("name", ["grid", "temperature", "offset", "ended", "model_entropy", "theta", "context", "kl"])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda a: np.array(1.0),
        lambda a: np.zeros((2, 2, 2)),
        lambda a: np.full(a.shape, "a"),
        lambda a: np.full(a.shape, np.nan),
        lambda a: np.zeros(a.shape, "M8[s]") if a.dtype.kind != "f" or a.ndim > 1 else np.zeros((0, 0)),
        lambda a: a[:-1],
    ],
)
def test_a_table_of_wrong_type_or_shape_is_refused(
    good: Path, tmp_path: Path, name: str, wrong: Callable[[Any], Any]
) -> None:
    with np.load(good) as data:
        table = wrong(data[name])
    with pytest.raises(BadInputError, match=r"bad\.npz"):
        banks.load(changed(good, tmp_path, **{name: table}))


def test_a_share_above_one_is_refused(good: Path, tmp_path: Path) -> None:
    with np.load(good) as data:
        kept = 2 * data["kept"]
    with pytest.raises(BadInputError, match="share above 1"):
        banks.load(changed(good, tmp_path, kept=kept))


def test_no_flipped_byte_makes_a_traceback(good: Path, tmp_path: Path) -> None:
    raw, path = good.read_bytes(), tmp_path / "bad.npz"
    refused = 0
    for at in range(0, len(raw), 97):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :])
        try:
            banks.load(path)
        except BadInputError:
            refused += 1
    assert refused > len(raw) / 97 / 2


def test_a_single_array_is_no_bank(tmp_path: Path) -> None:
    single = io.BytesIO()
    np.save(single, np.zeros(3))
    (tmp_path / "a.npy").write_bytes(single.getvalue())
    with pytest.raises(BadInputError, match=r"a\.npy"):
        banks.load(tmp_path / "a.npy")


def test_a_bank_that_cannot_be_written_is_one_error_and_no_debris(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="cannot write"):
        banks.save(make_bank()[0], tmp_path / "file" / "bank.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
