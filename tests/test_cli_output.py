"""Results folders and output files: whatever happens, nothing that was there is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from command import entropic

from entropic_ctl import cli_output, results
from entropic_ctl.cli_output import MARKER, folder
from entropic_ctl.errors import BadInputError

SUBJECT = {"command": "test"}


def run(
    out: Path, name: str = "table", text: str = "1", *, stop: bool = False, force: bool = False, **subject: str
) -> None:
    with folder(out, {**SUBJECT, **subject}, force=force) as work:
        (work / name).write_text(text)
        if stop:
            raise KeyboardInterrupt


def names(top: Path) -> list[str]:
    return sorted(path.name for path in top.iterdir())


def test_notes_in_a_results_folder_survive_the_next_run(tmp_path: Path) -> None:
    out = tmp_path / "res"
    run(out, "old table")
    (out / "notes.md").write_text("mine")
    (out / "plots").mkdir()
    (out / "plots" / "a.png").write_text("picture")
    run(out, "new table", force=True, seed="2")
    assert names(out) == ["new table", "notes.md", "plots", MARKER]
    assert (out / "notes.md").read_text() == "mine"
    assert (out / "plots" / "a.png").read_text() == "picture"
    assert json.loads((out / MARKER).read_text())["files"] == ["new table", MARKER]
    assert names(tmp_path) == ["res"]


def test_an_interrupt_replaces_an_earlier_partial_result_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "res.partial").mkdir()
    (tmp_path / "res.partial" / "thesis").write_text("years")
    for text in ("1", "2"):
        with pytest.raises(cli_output.Interrupted) as caught:
            run(tmp_path / "res", text=text, stop=True)
        assert caught.value.kept == tmp_path / "res.partial2"
        assert (tmp_path / "res.partial2" / "table").read_text() == text
    assert names(tmp_path) == ["res.partial", "res.partial2"]
    assert (tmp_path / "res.partial" / "thesis").read_text() == "years"


def test_a_link_to_a_results_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "dangling").symlink_to(tmp_path / "later")
    run(tmp_path / "link")
    run(tmp_path / "dangling")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "table").is_file()
    assert (tmp_path / "later" / "table").is_file()


def test_what_killed_runs_left_is_cleared_up_and_other_runs_are_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "res"
    run(out, text="old")
    out.rename(tmp_path / ".res.123.old")  # killed between the two renames
    (tmp_path / ".res.124.part").mkdir()
    for other in (".res.partial.123.old", ".res.b.123.part", ".res.backup.old"):
        (tmp_path / other).mkdir()
    with pytest.raises(BadInputError, match="another configuration"):  # so the old results are back
        run(out, seed="2")
    assert (out / "table").read_text() == "old"
    assert names(tmp_path) == [".res.b.123.part", ".res.backup.old", ".res.partial.123.old", "res"]


def test_two_runs_into_one_folder_do_not_mix(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with folder(tmp_path / "res", SUBJECT) as work:
        with pytest.raises(BadInputError, match="another run"):
            run(tmp_path / "res")
        (work / "table").write_text("first")
    assert (tmp_path / "res" / "table").read_text() == "first"
    assert names(tmp_path) == ["res"]


def test_a_folder_is_not_replaced_from_inside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path / "res")
    monkeypatch.chdir(tmp_path / "res")
    with pytest.raises(BadInputError, match="from inside"):
        run(Path())
    assert (tmp_path / "res" / "table").is_file()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_a_pipe_is_written_to_and_a_link_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    results.write_json(tmp_path / "pipe", {"a": 1})
    assert json.loads(os.read(reader, 100)) == {"a": 1}
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    results.write_json(tmp_path / "link", {"a": 2})
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "target").read_text()) == {"a": 2}


def test_a_second_name_of_an_input_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "input").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "input")
    os.link(tmp_path / "input", tmp_path / "hard")
    for name in ("input", "link", "hard"):
        with pytest.raises(BadInputError, match="would overwrite"):
            cli_output.check_file(tmp_path / name, "--json", None, "", tmp_path / "input")
    cli_output.check_file(Path(os.devnull), "--json", os.devnull)
    cli_output.check_file(tmp_path / "other", "--json", tmp_path / "input")


@pytest.mark.parametrize("field", ["cost.calibrated", "cost.device", "cost.model", "speculation.draft_model"])
@pytest.mark.parametrize(
    "command",
    [
        ("simulate", "--json"),
        ("simulate", "--perfetto"),
        ("prove", "--out"),
        ("sweep", "--out", "{new}", "--json"),
        ("tune", "--out", "{new}", "--json"),
        ("capacity", "--json"),
        ("routers", "--json"),
        ("identify", "--out", "{new}", "--json"),
        ("stability", "--out", "{new}", "--json"),
        ("workload", "--json"),
        ("validate", "--out", "{new}", "--json"),
    ],
)
def test_no_output_overwrites_an_input(tmp_path: Path, command: tuple[str, ...], field: str) -> None:
    precious, run = tmp_path / "config.json", tmp_path / "run.toml"
    precious.write_text("precious")
    table, _, name = field.partition(".")
    run.write_text(f"[{table}]\n{name} = '{precious}'\n")
    name, *options = (part.format(new=tmp_path / "new") for part in command)
    status, _, err = entropic(name, run, *options, precious)
    assert (status, precious.read_text()) == (2, "precious"), err
    assert "would overwrite it" in err


@pytest.mark.parametrize(("option", "name"), [("--grid", "sweep"), ("--choice", "tune")])
def test_no_output_overwrites_an_input_that_is_tried(tmp_path: Path, option: str, name: str) -> None:
    (tmp_path / "bank.npz").write_text("precious")
    (tmp_path / "run.toml").write_text("")
    tried = f"cost.bank={tmp_path / 'bank.npz'}"
    arguments = (option, tried, "--out", tmp_path / "new", "--json", tmp_path / "bank.npz")
    status, _, err = entropic(name, tmp_path / "run.toml", *arguments)
    assert status == 2
    assert "would overwrite it" in err


@pytest.mark.parametrize("command", [("simulate",), ("sweep", "--grid", "workload.n_requests=1,2"), ("validate",)])
def test_the_root_is_no_results_folder(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "run.toml").write_text("")
    status, _, err = entropic(command[0], tmp_path / "run.toml", *command[1:], "--out", "/")
    assert status == 2
    assert "not a folder for results" in err
    assert err.count("\n") == 1
