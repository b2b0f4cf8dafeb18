"""`entropic variance` interrupted: killed anywhere it goes on, to the bytes of the uninterrupted run; nothing mixes."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("flint")

from synthetic_bank import make_bank
from tiny_model import byte_tokenizer, tiny_llama

from backends import fetch, models, pieces
from entropic_ctl.cli import app
from entropic_ctl.errors import BadInputError
from paper_repro import variance
from paper_repro import variance_live as live

ROOT = Path(__file__).resolve().parents[1]
SIZE = variance.Size(4, 66)
RUNS = 5
"""Fixed T, fixed T with other seeds, and the three arms of the quick version."""


def bank() -> Any:
    made, _ = make_bank(prompts=4, lengths=(66, 80), temperatures=(0.3, 0.8), grid=np.geomspace(0.2, 2.0, 9))
    return dataclasses.replace(made, meta={**made.meta, "vocab_size": 49152})


def tiny(**changes: Any) -> models.LoadedModel:
    return models.wrap(tiny_llama(**changes), byte_tokenizer(), name="tiny")


def run(work: Path, parts: Path | None, **changes: Any) -> None:
    work.mkdir(parents=True)
    settings = {"model": tiny(), "seed": 4, "size": SIZE, "uncertified": True, "quick": True, "bank": bank(), **changes}
    variance.run(work, parts=parts, **settings)


def die_in(moment: str, work: Path, parts: Path) -> None:
    """Run, and be killed while the third run decodes, or when half of its part is in the temporary file."""
    import torch

    torch.set_num_threads(1)
    savez, calls = np.savez, 0

    def half(handle: Any, **arrays: Any) -> None:
        nonlocal calls
        calls += 1
        savez(handle, **arrays)
        if calls == 3:
            handle.flush()
            os.truncate(handle.name, handle.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def halfway(what: str, share: float) -> None:
        if what.startswith("engine: feedback") and share > 0.05 + 0.92 * 2.5 / RUNS:
            os.kill(os.getpid(), signal.SIGKILL)

    if moment == "write":
        pieces.np.savez = half
    run(work, parts, progress=halfway if moment == "decode" else None)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    work = tmp_path_factory.mktemp("whole") / "work"
    run(work, None)
    return files(work)


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("moment", ["decode", "write"])
def test_killed_in_the_third_run_it_goes_on_to_the_same_bytes(
    moment: str, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, script = tmp_path / "parts", "import sys; sys.path.insert(0, 'tests'); from pathlib import Path; "
    script += f"import {Path(__file__).stem} as t; t.die_in({moment!r}, *map(Path, sys.argv[1:]))"
    arguments = [sys.executable, "-c", script, str(tmp_path / "killed"), str(parts)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not list((tmp_path / "killed").iterdir())
    assert len(list(parts.glob("*.npz"))) == 2
    assert len(list(parts.glob(".*.part"))) == (moment == "write")
    kept, decoded, decode = files(parts), [], live.decode

    def counted(*arguments: Any, **settings: Any) -> live.Live:
        decoded.append(settings["seed"])
        return decode(*arguments, **settings)

    monkeypatch.setattr(live, "decode", counted)
    run(tmp_path / "resumed", parts)
    assert len(decoded) == RUNS - 2  # the finished ones were not run again
    assert files(tmp_path / "resumed") == whole
    assert len(list(parts.glob("*.npz"))) == RUNS
    assert kept.items() <= files(parts).items()


def test_parts_of_other_settings_are_refused(one_thread: None, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(what: str, share: float) -> None:
        if what == "engine: fixed T, other seeds":
            raise StopError

    parts = tmp_path / "parts"
    with pytest.raises(StopError):
        run(tmp_path / "begun", parts, progress=stop)
    before = files(parts)
    changes: list[tuple[str, dict[str, Any]]] = [
        ("config, config_digest, seed", {"seed": 5}),
        ("config, config_digest", {"temperature": 0.3}),
        ("prompts, size", {"size": variance.Size(5, 66)}),
        ("size", {"size": variance.Size(4, 67)}),
        ("uncertified", {"uncertified": False}),
        ("arms", {"quick": False}),
        ("model", {"model": dataclasses.replace(tiny(), name="other")}),
    ]
    for number, (field, change) in enumerate(changes):
        with pytest.raises(BadInputError, match=f"parts: {field}: holds parts of another run"):
            run(tmp_path / str(number), parts, **change)
        assert not list((tmp_path / str(number)).iterdir())
    assert files(parts) == before


def test_the_command_is_interrupted_refuses_to_start_anew_and_resumes(
    one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "fetch", lambda *_: None)
    monkeypatch.setattr(models, "load", tiny)
    monkeypatch.setattr(variance, "QUICK", SIZE)
    monkeypatch.setattr("sim.trajectories.load_bank", bank)
    out, decode, left = tmp_path / "out", live.decode, [2]

    def stopped(*arguments: Any, **settings: Any) -> live.Live:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        return decode(*arguments, **settings)

    def entropic(*more: str, to: Path = out) -> Any:
        command = ["variance", "--quick", "--uncertified", "--out", str(to), *more]
        return CliRunner().invoke(app, command)

    monkeypatch.setattr(live, "decode", stopped)
    result = entropic()
    assert result.exit_code == 130, result.output
    assert "out.parts" in result.output.replace("\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["out.parts"]
    refused = entropic()
    assert refused.exit_code == 2
    assert "--resume" in refused.output
    other = entropic("--resume", "--seed", "1")
    assert other.exit_code == 2
    assert "seed" in other.output
    assert [path.name for path in tmp_path.iterdir()] == ["out.parts"]
    left[0] = RUNS - 2  # enough for what is missing, and no more
    resumed = entropic("--resume")
    assert resumed.exit_code == 0, resumed.output
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    left[0] = RUNS
    assert entropic(to=tmp_path / "straight").exit_code == 0
    assert files(out) == files(tmp_path / "straight")
