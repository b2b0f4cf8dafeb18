"""The journal survives being cut off at any byte, and refuses damage that no kill can have made."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from sim.journal import Journal, read

RECORDS = [
    {"id": i, "repeat": r, "metrics": {"x": 0.1 * i + r, "name": "ä\n", "none": None}} for i in range(3) for r in (0, 1)
]
HALVES = (b"", b'{"id":8,"re', b'{"id":8,"re' + b"\n", bytes(2))


def written(path: Path) -> bytes:
    with Journal(path) as journal:
        for record in RECORDS:
            journal.append(record)
    return path.read_bytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(st.data())
def test_cut_at_any_byte_and_resumed_it_ends_up_the_same(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "runs.jsonl"
    path.unlink(missing_ok=True)
    whole = written(path)
    cut = data.draw(st.integers(0, len(whole)))
    at_end_of_line = whole[:cut][-1:] in (b"", b"\n")
    path.write_bytes(whole[:cut] + (data.draw(st.sampled_from(HALVES)) if at_end_of_line else b""))
    with Journal(path) as journal:
        assert len(journal.records) == whole[:cut].count(b"\n")
        for record in RECORDS:
            if (record["id"], record["repeat"]) not in journal.records:
                journal.append(record)
    assert path.read_bytes() == whole
    assert list(read(path)[0].values()) == RECORDS


def test_every_record_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        for n, record in enumerate(RECORDS, start=1):
            journal.append(record)
            assert len(read(tmp_path / "j")[0]) == n


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ('{"id":1,"re\n{"id":2,"repeat":0}\n', "j:1: damaged record"),
        ('{"id":1,"repeat":0}\n[]\n{"id":2', "j:2: damaged record"),
        ('{"id":1,"repeat":0}\n{"id":-1,"repeat":0}\n{"id":2,"repeat":0}\n', "j:2: damaged record"),
        ('{"id":1,"repeat":0,"x":1}\n{"id":1,"repeat":0,"x":2}\n', "two different records"),
    ],
)
def test_damage_in_the_middle_is_an_error(tmp_path: Path, text: str, needle: str) -> None:
    path = tmp_path / "j"
    path.write_text(text)
    with pytest.raises(BadInputError, match=needle):
        Journal(path)
    assert path.read_text() == text
