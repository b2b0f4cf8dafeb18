"""Finished parts of a long measurement, kept in a folder so that an interrupted one resumes where it stopped.

One file per part, on disk and then renamed, so that a kill at any moment loses the part it fell into and no other;
``settings.json`` says what they belong to. Parts of other settings are never mixed in: they are an error.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.config import digest
from entropic_ctl.errors import BadInputError
from entropic_ctl.results import atomic, plain

__all__ = ["Arrays", "Pieces"]

Arrays = dict[str, npt.NDArray[Any]]
_SETTINGS = "settings.json"


class Pieces:
    """The parts done so far.

    Parameters
    ----------
    folder : Path or None
        Where they are kept; made on the first part. None keeps nothing.
    settings : mapping
        JSON-able: everything the parts depend on.

    Raises
    ------
    BadInputError
        If the folder holds parts of other settings, or something else.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self.folder, self._settings = folder, plain(settings)
        if folder is None or not folder.exists() or _unmarked(folder):
            return
        try:
            held = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            held = None
        if not isinstance(held, dict):
            raise BadInputError(
                "not a folder of finished parts", where=str(folder), remedy="delete it, or name another"
            )
        if digest(held) != digest(self._settings):
            differ = sorted(key for key in {*held, *self._settings} if held.get(key) != self._settings.get(key))
            raise BadInputError(
                "holds parts of another run",
                where=str(folder),
                field=", ".join(differ),
                remedy="repeat the command that began it, or delete the folder",
            )

    def get(self, name: str, make: Callable[[], Arrays]) -> Arrays:
        """Return part ``name`` as kept, or make it and keep it.

        Raises
        ------
        BadInputError
            If a kept part cannot be read, or a new one not be written.
        """
        if self.folder is None:
            return make()
        path = self.folder / f"{name}.npz"
        if path.is_file():
            try:
                with np.load(path, allow_pickle=False) as data:
                    return {key: data[key] for key in data.files}
            except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
                raise BadInputError(f"broken part: {error}", where=str(path), remedy="delete this file") from None
        arrays = make()
        if not (self.folder / _SETTINGS).is_file():
            text = json.dumps(self._settings, indent=1, allow_nan=False) + "\n"
            with atomic(self.folder / _SETTINGS) as temporary, temporary.open("wb") as handle:
                handle.write(text.encode())
                _to_disk(handle)
        with atomic(path) as temporary, temporary.open("wb") as handle:
            np.savez(handle, **arrays)  # type: ignore[arg-type]
            _to_disk(handle)
        return arrays


def _unmarked(folder: Path) -> bool:
    """Return True for a folder that holds nothing, or only what a kill before the first part left in it."""
    return folder.is_dir() and all(
        path.name.startswith(f".{_SETTINGS}.") and path.suffix == ".part" for path in folder.iterdir()
    )


def _to_disk(handle: IO[bytes]) -> None:
    handle.flush()
    os.fsync(handle.fileno())
