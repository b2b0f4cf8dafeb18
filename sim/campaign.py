"""A results folder that grows: what it belongs to is written first, every finished run at once, tables at the end.

``run.json`` holds the definition (command, resolved configuration, plan, version, digests of the code and of the input
files), ``runs.jsonl`` is the journal. A folder goes on only with exactly the same definition: one setting changed, and
opening it is an error that names the setting. So results of different settings, versions or inputs never mix.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import entropic_ctl
from entropic_ctl import __version__, results
from entropic_ctl.cli_output import MARKER, Interrupted, alone
from entropic_ctl.config import RunConfig, digest, inputs_of
from entropic_ctl.config_edit import differences
from entropic_ctl.errors import BadInputError
from sim.journal import Journal

__all__ = ["JOURNAL", "Campaign", "definition", "input_digests", "open_folder"]

JOURNAL = "runs.jsonl"
_SHOWN = 4


@dataclass(frozen=True)
class Campaign:
    """An open folder: its definition, its journal, and a place for tables."""

    out: Path
    about: Mapping[str, Any]
    journal: Journal

    def seal(self) -> None:
        """Note in ``run.json`` which files are ours, so that other commands treat the folder as results."""
        files = sorted(str(path.relative_to(self.out)) for path in self.out.rglob("*") if path.is_file())
        _mark(self.out, self.about, files)


def _mark(out: Path, about: Mapping[str, Any], files: list[str]) -> None:
    results.write_json(out / MARKER, {"digest": digest(about), "files": files, **about})


@functools.lru_cache(maxsize=64)
def _sha256(path: str, size: int, mtime_ns: int) -> str:  # noqa: ARG001 - the last two make the key
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@functools.cache
def _code() -> str:
    """Return a digest of the source that decides results: this package and the control plane, without the CLI."""
    found = hashlib.sha256()
    for package in (Path(entropic_ctl.__file__).parent, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            if not path.name.startswith("cli"):
                found.update(f"{package.name}/{path.relative_to(package).as_posix()}".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def input_digests(configs: Iterable[RunConfig], tried: Iterable[Any] = ()) -> dict[str, str]:
    """Return the SHA-256 of every file that runs of ``configs`` read, by path.

    Parameters
    ----------
    configs : iterable of RunConfig
    tried : iterable
        Further values of fields; those that name files count.
    """
    tried, inputs = list(tried), {}
    for path in sorted({p for config in configs for p in inputs_of(config, tried)}):
        with contextlib.suppress(OSError):  # an unreadable file is for the run itself to complain about
            found = Path(path).stat()
            inputs[path] = _sha256(path, found.st_size, found.st_mtime_ns)
    return inputs


def definition(
    command: str,
    config: RunConfig,
    plan: Mapping[str, Any],
    configs: Iterable[RunConfig] = (),
    tried: Iterable[Any] = (),
) -> dict[str, Any]:
    """Return what a folder belongs to, JSON-able.

    Parameters
    ----------
    command : str
    config : RunConfig
        The starting configuration, stamped with every default spelled out.
    plan : mapping
        Everything else that determines the results.
    configs : iterable of RunConfig
        All configurations that run: the contents of the files they name belong to the definition.
    tried : iterable
        Further values of fields that may run; those that name files count as well.
    """
    stamp = results.stamp(config, config.seed)
    about = {
        "command": command,
        "version": __version__,
        "code": _code(),
        "config": stamp["config"],
        "plan": plan,
        "inputs": input_digests((config, *configs), tried),
    }
    return dict(json.loads(json.dumps(results.plain(about))))


def _held(out: Path) -> dict[str, Any]:
    try:
        held = dict(json.loads((out / MARKER).read_text(encoding="utf-8")))
        differences(held, {})  # what nests too deeply to be compared is not ours
        return {name: value for name, value in held.items() if name not in ("digest", "files")}
    except (OSError, ValueError, TypeError, RecursionError):
        raise BadInputError(
            f"the folder is not empty and holds no {MARKER} of ours",
            where="--out",
            value=str(out),
            remedy="name another folder",
        ) from None


def _admit(out: Path, about: Mapping[str, Any], *, resume: bool) -> None:
    """Refuse a folder of other settings, and one of the same unless it is to be resumed; mark a new one."""
    if not any(out.iterdir()):
        _mark(out, about, [MARKER, JOURNAL])
        return
    held = _held(out)
    changed = differences(held, about)
    if changed:
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        raise BadInputError(
            f"the folder holds results of other settings: {'; '.join(changed[:_SHOWN])}{more}",
            where="--out",
            value=str(out),
            remedy="undo the change to go on, or name another folder",
        )
    if not resume:
        raise BadInputError(
            "the folder holds this very run, begun or finished",
            where="--out",
            value=str(out),
            remedy="pass --resume to go on with it, or name another folder",
        )


@contextlib.contextmanager
def open_folder(out: Path, about: Mapping[str, Any], *, resume: bool) -> Iterator[Campaign]:
    """Open a folder for the block; nobody else can write it meanwhile.

    Parameters
    ----------
    out : Path
        Made if missing.
    about : mapping
        From :func:`definition`.
    resume : bool
        Go on where an earlier call with the same definition stopped; without it such a folder is refused.

    Raises
    ------
    BadInputError
        If the folder holds something else, or another process writes it.
    Interrupted
        In place of KeyboardInterrupt: the folder can be resumed.
    """
    out = out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"cannot make the folder: {error.strerror}", where="--out", value=str(out)) from None
    with alone(out):
        _admit(out, about, resume=resume)
        try:
            with Journal(out / JOURNAL) as journal:
                yield Campaign(out, about, journal)
        except KeyboardInterrupt:
            raise Interrupted(out) from None
