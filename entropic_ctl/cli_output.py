"""Where results go: a folder that appears whole or not at all, and never replaces results of another configuration."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entropic_ctl.config import digest
from entropic_ctl.errors import BadInputError

__all__ = ["MARKER", "Interrupted", "check_file", "folder"]

MARKER = "run.json"
"""Present in every results folder: the resolved configuration it belongs to and its digest."""


class Interrupted(KeyboardInterrupt):
    """The user stopped a run; ``kept`` names the folder that holds what was finished."""

    def __init__(self, kept: Path) -> None:
        super().__init__()
        self.kept = kept


def check_file(path: Path | None, what: str) -> None:
    """Refuse, before any work, a file that could not be written at the end.

    Raises
    ------
    BadInputError
        If ``path`` is a folder, or its parent does not exist or cannot be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise BadInputError("is a folder", where=what, value=str(path), allowed="the path of a file to write")
    if not path.parent.is_dir():
        raise BadInputError("no such folder", where=what, value=str(path.parent), remedy=f"mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise BadInputError("folder cannot be written", where=what, value=str(path.parent))


def _refuse_foreign(out: Path, key: str, force: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise BadInputError("not a folder", where="--out", value=str(out))
    if not any(out.iterdir()):
        return
    try:
        held = json.loads((out / MARKER).read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInputError(
            f"the folder is not empty and holds no {MARKER} of ours",
            where="--out",
            value=str(out),
            remedy="name another folder; --force does not delete what this program did not write",
        ) from None
    if held != key and not force:
        raise BadInputError(
            f"the folder holds results of another configuration ({str(held)[:12]}, this run is {key[:12]})",
            where="--out",
            value=str(out),
            remedy="name another folder, or pass --force to replace them",
        )


@contextmanager
def folder(out: Path, subject: Mapping[str, Any], *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside ``out`` that becomes ``out`` on a clean exit.

    On an interrupt it becomes ``<out>.partial`` instead (an older one is replaced) and :class:`Interrupted` is raised;
    on any other error it is removed and ``out`` is as before.

    Parameters
    ----------
    out : Path
        Results folder.
    subject : mapping
        What the results belong to (command and resolved configuration), JSON-able.
    force : bool
        Replace results of another configuration.

    Raises
    ------
    BadInputError
        If ``out`` holds something else (before any work is done).
    """
    key = digest(subject)
    _refuse_foreign(out, key, force)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = out.with_name(f".{out.name}.{os.getpid()}.part")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
    except OSError as error:
        raise BadInputError(f"cannot make the folder: {error.strerror}", where="--out", value=str(out)) from None
    try:
        text = json.dumps({"digest": key, **subject}, indent=2, allow_nan=False)
        (work / MARKER).write_text(text + "\n", encoding="utf-8")
        yield work
    except KeyboardInterrupt:
        kept = out.with_name(out.name + ".partial")
        shutil.rmtree(kept, ignore_errors=True)
        work.rename(kept)
        raise Interrupted(kept) from None
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        out.rename(old)
    work.rename(out)
    shutil.rmtree(old, ignore_errors=True)
