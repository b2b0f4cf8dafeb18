"""Finished parts survive a kill at any moment: what was written is found again, the part it fell into is made again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from backends.pieces import Arrays, Pieces
from entropic_ctl.errors import BadInputError

SETTINGS = {"seed": 1, "inner": {"tokens": 7}}


def make(value: float) -> Arrays:
    return {"x": np.array([value, np.nextafter(value, 2.0), np.nan]), "n": np.arange(3)}


def never() -> Arrays:
    raise AssertionError("this part is there already")


def test_a_kept_part_comes_back_bit_by_bit_and_is_not_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    made = Pieces(folder, SETTINGS).get("a", lambda: make(1 / 3))
    again = Pieces(folder, SETTINGS).get("a", never)
    assert made.keys() == again.keys()
    for name, values in made.items():
        assert again[name].dtype == values.dtype
        assert again[name].tobytes() == values.tobytes()
    assert sorted(path.name for path in folder.iterdir()) == ["a.npz", "settings.json"]


@pytest.mark.parametrize("left", [[], [".settings.json.x1.part"]])
def test_a_kill_before_the_first_part_is_there_leaves_a_folder_that_can_be_used(
    tmp_path: Path, left: list[str]
) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for name in left:
        (folder / name).write_text('{"se', encoding="utf-8")
    Pieces(folder, SETTINGS).get("a", lambda: make(0.5))
    assert Pieces(folder, SETTINGS).get("a", never)["x"][0] == 0.5


def test_half_a_part_is_made_again_and_the_others_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    Pieces(folder, SETTINGS).get("a", lambda: make(0.5))
    (folder / ".b.npz.x1.part").write_bytes((folder / "a.npz").read_bytes()[:40])
    pieces = Pieces(folder, SETTINGS)
    assert pieces.get("a", never)["x"][0] == 0.5
    assert pieces.get("b", lambda: make(0.25))["x"][0] == 0.25


def test_other_settings_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    Pieces(folder, SETTINGS).get("a", lambda: make(0.5))
    with pytest.raises(BadInputError, match="parts: inner: holds parts of another run"):
        Pieces(folder, {**SETTINGS, "inner": {"tokens": 8}})
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.part").write_text("years", encoding="utf-8")
    with pytest.raises(BadInputError, match="not a folder of finished parts"):
        Pieces(tmp_path / "foreign", SETTINGS)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BadInputError, match="not a folder of finished parts"):
        Pieces(tmp_path / "file", SETTINGS)
