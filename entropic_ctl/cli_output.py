"""Where results go: a folder that appears whole or not at all, and never costs what another run or person put there.

A results folder lists the files this program wrote into it. When a newer run replaces it, every other file in it
(notes, plots) is carried over.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entropic_ctl.config import digest
from entropic_ctl.errors import BadInputError

__all__ = ["MARKER", "Interrupted", "alone", "check_file", "folder"]

MARKER = "run.json"
"""Present in every results folder: the resolved configuration it belongs to, its digest, and the files of the run."""


class Interrupted(KeyboardInterrupt):
    """The user stopped a run; ``kept`` names the file or folder that holds what was finished."""

    def __init__(self, kept: Path) -> None:
        super().__init__()
        self.kept = kept


def check_file(path: Path | None, what: str, *others: Path | str | None) -> None:
    """Refuse, before any work, a file that could not be written at the end, or whose writing would destroy another.

    Parameters
    ----------
    path : Path or None
        File to write.
    what : str
        The option that named it.
    others : Path, str or None
        What the command reads, and what else it writes; empty ones do not count.

    Raises
    ------
    BadInputError
        If ``path`` is a folder or one of ``others``, cannot be written, or its parent does not exist or cannot be.
    """
    if path is None:
        return
    shown = str(path)
    if path.is_dir():
        raise BadInputError("is a folder", where=what, value=shown, allowed="the path of a file to write")
    if not path.parent.is_dir():
        raise BadInputError("no such folder", where=what, value=str(path.parent), remedy=f"mkdir -p {path.parent}")
    for other in others:
        if other and _same(path, Path(other)):
            raise BadInputError(
                "the command also uses this file, and would overwrite it",
                where=what,
                value=shown,
                remedy="name another",
            )
    if not path.exists():
        if not os.access(path.parent, os.W_OK):
            raise BadInputError("folder cannot be written", where=what, value=str(path.parent))
    elif not os.access(path, os.W_OK):
        raise BadInputError("file cannot be written", where=what, value=shown)
    elif path.is_file() and str(path.absolute()).startswith(("/dev/", "/proc/")):  # standard output, redirected
        raise BadInputError("stands for another file", where=what, value=shown, remedy="name that file itself")


def _same(a: Path, b: Path) -> bool:
    """Return True if both are one regular file, or would be."""
    if a.exists() and not stat.S_ISREG(a.stat().st_mode):
        return False
    return a.resolve() == b.resolve() or (a.exists() and b.exists() and a.samefile(b))


def _held(out: Path) -> dict[str, Any]:
    """Return the marker of a results folder.

    Raises
    ------
    BadInputError
        If the folder holds none of ours.
    """
    try:
        held = json.loads((out / MARKER).read_text(encoding="utf-8"))
        return {"digest": str(held["digest"]), "files": [str(name) for name in held.get("files", ())]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise BadInputError(
            f"the folder is not empty and holds no {MARKER} of ours",
            where="--out",
            value=str(out),
            remedy="name another folder; --force does not delete what this program did not write",
        ) from None


def _refuse_foreign(out: Path, key: str, force: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise BadInputError("not a folder", where="--out", value=str(out))
    if not any(out.iterdir()):
        return
    held = _held(out)["digest"]
    if held != key and not force:
        raise BadInputError(
            f"the folder holds results of another configuration ({held[:12]}, this run is {key[:12]})",
            where="--out",
            value=str(out),
            remedy="name another folder, or pass --force to replace them",
        )
    if Path.cwd().is_relative_to(out):
        raise BadInputError(
            "the folder cannot be replaced from inside it", where="--out", value=str(out), remedy="cd .."
        )


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the right to write ``out`` while the block runs (a no-op where the system has no file locks).

    Raises
    ------
    BadInputError
        If another process holds it, ``out`` has no name (``/``), or nothing can be written beside it.
    """
    if not out.name:
        raise BadInputError("not a folder for results", where="--out", value=str(out), remedy="name a folder inside it")
    try:
        import fcntl
    except ImportError:
        yield
        return
    path = out.with_name(f".{out.name}.lock")
    while True:
        try:
            opened = path.open("w")
        except OSError as error:
            raise BadInputError(f"cannot make the folder: {error.strerror}", where="--out", value=str(out)) from None
        with opened as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not path.exists() or path.stat().st_ino != os.fstat(handle.fileno()).st_ino:
                    continue  # its last holder removed it meanwhile
            except BlockingIOError:
                raise BadInputError(
                    "another run is writing this folder", where="--out", value=str(out), remedy="wait, or name another"
                ) from None
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _reclaim(out: Path) -> None:
    """Clear up after killed runs: old results that were set aside come back, half-written ones go."""
    ours = re.compile(rf"\.{re.escape(out.name)}\.[0-9]+\.(part|old)")
    for left in sorted(path for path in out.parent.iterdir() if ours.fullmatch(path.name)):
        if left.suffix == ".old" and not out.exists():
            left.rename(out)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _files(top: Path) -> set[str]:
    return {str(path.relative_to(top)) for path in top.rglob("*") if path.is_symlink() or not path.is_dir()}


def _seal(work: Path, key: str, subject: Mapping[str, Any]) -> None:
    """Write the marker."""
    marker = {"digest": key, "files": sorted(_files(work) | {MARKER}), **subject}
    (work / MARKER).write_text(json.dumps(marker, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _replace(work: Path, out: Path) -> None:
    """Move ``work`` to ``out``; files in ``out`` that no run wrote are carried over."""
    if not out.exists():
        work.rename(out)
        return
    if any(out.iterdir()):
        for name in sorted(_files(out) - set(_held(out)["files"]) - _files(work)):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(out / name, work / name, follow_symlinks=False)
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    out.rename(old)
    try:
        work.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _keep(work: Path, out: Path) -> Path:
    """Move what an interrupted run left beside ``out``; an earlier one of ours is replaced, nothing else is."""
    kept, n = out.with_name(f"{out.name}.partial"), 1
    while kept.exists() and not (kept / MARKER).is_file():
        n += 1
        kept = out.with_name(f"{out.name}.partial{n}")
    if kept.exists():
        _replace(work, kept)
    else:
        work.rename(kept)
    return kept


@contextmanager
def folder(out: Path, subject: Mapping[str, Any], *, force: bool = False, parts: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder beside ``out`` that becomes ``out`` on a clean exit.

    On an interrupt it becomes ``<out>.partial`` instead (an older one is replaced) and :class:`Interrupted` is raised;
    on any other error it is removed and ``out`` is as before. What a killed process left is cleared up by the next run.

    Parameters
    ----------
    out : Path
        Results folder; a symbolic link stays one.
    subject : mapping
        What the results belong to (command and resolved configuration), JSON-able.
    force : bool
        Replace results of another configuration.
    parts : Path, optional
        Folder of ours in which the block keeps what it has finished, for the next call to go on with. It then takes the
        place of ``<out>.partial``: an interrupt names it, an error leaves it, and it goes once ``out`` is there.

    Raises
    ------
    BadInputError
        If ``out`` holds something else, or another process writes it (before any work is done).
    """
    key = digest(subject)
    out = out.resolve()
    with contextlib.ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(out))
            _reclaim(out)
            _refuse_foreign(out, key, force)
            work = out.with_name(f".{out.name}.{os.getpid()}.part")
            work.mkdir()
        except OSError as error:
            raise BadInputError(f"cannot make the folder: {error.strerror}", where="--out", value=str(out)) from None
        try:
            _seal(work, key, subject)
            yield work
            _seal(work, key, subject)
            _replace(work, out)
            if parts is not None:
                shutil.rmtree(parts, ignore_errors=True)
        except KeyboardInterrupt:
            if not work.is_dir():  # it is in its place already
                raise
            if parts is not None:
                shutil.rmtree(work, ignore_errors=True)
                if parts.is_dir():
                    raise Interrupted(parts) from None
                raise
            _seal(work, key, subject)
            raise Interrupted(_keep(work, out)) from None
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
