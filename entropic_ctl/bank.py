"""The entropy bank: what a real model did, recorded once, read by the simulator.

Two measured tables in one compressed ``.npz`` (under 1 MB for the shipped one):

- **trajectories**: token-by-token model entropy of real generations, each sampled at one fixed temperature, with the
  tempered entropy and varentropy of every step's distribution on a grid of temperatures, so that a micro law can act
  on a recorded step as it would on the real logits;
- **response**: what a pruning budget theta did at a context length: share of pages read, certificate, true pruned
  mass, KL to dense, and the mean shift of model entropy.

Written by ``entropic record`` (``backends.record``), read by ``sim.trajectories``: neither imports the other.
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.errors import BadInputError
from entropic_ctl.results import atomic

__all__ = ["SCHEMA", "Bank", "load", "save"]

SCHEMA = 1

_TOKENS = ("model_entropy", "entropy_grid", "varentropy_grid")
_RESPONSE = ("kept", "certificate_mean", "certificate_max", "mass_mean", "kl", "entropy_shift")
_TABLES = ("entropy_grid", "varentropy_grid", *_RESPONSE)
_KINDS = {"prompt_kind": "iu", "prompt": "iu", "offset": "iu", "ended": "b"}  # NumPy kinds; floats otherwise
_KIND_NAMES = {"iu": "integers", "b": "booleans", "f": "floats"}


@dataclass(frozen=True)
class Bank:
    """A recorded entropy bank.

    Parameters
    ----------
    meta : dict
        JSON-able: ``schema``, ``model``, ``vocab_size``, ``seed``, ``command``, ``kinds`` (names of prompt kinds),
        ``prompts`` (count), the pruning rule of the response (``page_tokens``, ``dense_layers``, ``sink_pages``,
        ``recent_pages``, ``selection``), free extras.
    grid : float64, shape (G,)
        Increasing temperatures at which entropies are tabulated.
    prompt_kind : int64, shape (K,)
        Index into ``meta['kinds']``.
    prompt : int64, shape (K,)
        Prompt identity: the same prompt was recorded at every temperature.
    temperature : float64, shape (K,)
        Sampling temperature of each trajectory.
    offset : int64, shape (K + 1,)
        Trajectory k holds tokens ``offset[k] : offset[k + 1]``.
    ended : bool, shape (K,)
        True if the model ended the text itself (EOS), False if the recording limit did (censored length).
    model_entropy : float32, shape (N,)
    entropy_grid, varentropy_grid : float32, shape (N, G)
        Tempered entropy (nats) and varentropy (nats squared) of each step at each grid temperature.
    theta : float64, shape (A,)
        Increasing budgets in nats, theta[0] = 0 (dense).
    context : float64, shape (C,)
        Increasing context lengths in tokens.
    kept, certificate_mean, certificate_max, mass_mean, kl, entropy_shift : float64, shape (C, A)
        Measured response. ``kept`` is the share of pages read over pruned layers; certificates are upper bounds on
        pruned softmax mass (mean over heads, maximum); ``mass_mean`` the true one; ``kl`` in nats per token;
        ``entropy_shift`` = mean(pruned model entropy - dense model entropy).
    """

    meta: dict[str, Any]
    grid: npt.NDArray[np.float64]
    prompt_kind: npt.NDArray[np.int64]
    prompt: npt.NDArray[np.int64]
    temperature: npt.NDArray[np.float64]
    offset: npt.NDArray[np.int64]
    ended: npt.NDArray[np.bool_]
    model_entropy: npt.NDArray[np.float32]
    entropy_grid: npt.NDArray[np.float32]
    varentropy_grid: npt.NDArray[np.float32]
    theta: npt.NDArray[np.float64]
    context: npt.NDArray[np.float64]
    kept: npt.NDArray[np.float64]
    certificate_mean: npt.NDArray[np.float64]
    certificate_max: npt.NDArray[np.float64]
    mass_mean: npt.NDArray[np.float64]
    kl: npt.NDArray[np.float64]
    entropy_shift: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        _validate(self)


def _validate(bank: Bank) -> None:
    def refuse(field: str, problem: str) -> None:
        raise BadInputError(problem, where="entropy bank", field=field, remedy="record it anew with `entropic record`")

    meta: object = bank.meta
    if not isinstance(meta, dict):
        refuse("meta", "not a table of names")
    elif bank.meta.get("schema") != SCHEMA:
        refuse("meta.schema", f"schema {bank.meta.get('schema')!r} is not {SCHEMA}")
    vocabulary = bank.meta.get("vocab_size")
    if isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or not 2 <= vocabulary < 2**31:
        refuse("meta.vocab_size", "not a vocabulary size")
    for item in dataclasses.fields(bank):
        if item.name == "meta":
            continue
        values, kinds = getattr(bank, item.name), _KINDS.get(item.name, "f")
        if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
            refuse(item.name, f"not an array of {_KIND_NAMES[kinds]}")
        if values.ndim != (2 if item.name in _TABLES else 1):
            refuse(item.name, "wrong number of axes")
    tokens, trajectories = bank.model_entropy.shape[0], bank.temperature.shape[0]
    grid_shape, response_shape = (tokens, bank.grid.shape[0]), (bank.context.shape[0], bank.theta.shape[0])
    if bank.offset.shape != (trajectories + 1,) or bank.offset[0] != 0 or bank.offset[-1] != tokens:
        refuse("offset", "does not cover the tokens")
    if (np.diff(bank.offset) < 1).any():
        refuse("offset", "an empty trajectory")
    for name in ("grid", "theta", "context"):
        axis = getattr(bank, name)
        if axis.ndim != 1 or axis.shape[0] < 2 or (np.diff(axis) <= 0).any():
            refuse(name, "not increasing with at least 2 points")
    if bank.theta[0] != 0.0:
        refuse("theta", "the first budget must be 0 (dense)")
    for name in ("prompt_kind", "prompt", "temperature", "ended"):
        if getattr(bank, name).shape != (trajectories,):
            refuse(name, "wrong length")
    for name in ("entropy_grid", "varentropy_grid"):
        if getattr(bank, name).shape != grid_shape:
            refuse(name, "wrong shape")
    for name in _RESPONSE:
        if getattr(bank, name).shape != response_shape:
            refuse(name, "wrong shape")
    for name in (*_TOKENS, *_RESPONSE, "grid", "theta", "context", "temperature"):
        values = getattr(bank, name)
        if not np.isfinite(values).all():
            refuse(name, "not finite")
        if name != "entropy_shift" and (values < 0).any():
            refuse(name, "negative")
    if (bank.kept > 1).any() or (bank.mass_mean > 1).any():
        refuse("kept, mass_mean", "a share above 1")


def save(bank: Bank, path: str | Path) -> None:
    """Write a bank atomically (a temporary file in the same folder, then a rename); grids are stored as float16.

    Raises
    ------
    BadInputError
        If the file cannot be written.
    """
    arrays: dict[str, Any] = {name: value for name, value in vars(bank).items() if name != "meta"}
    for name in _TOKENS:
        arrays[name] = arrays[name].astype(np.float16)
    with atomic(Path(path)) as temporary, temporary.open("wb") as handle:
        np.savez_compressed(handle, meta=np.frombuffer(json.dumps(bank.meta).encode(), np.uint8), **arrays)


def load(path: str | Path) -> Bank:
    """Read and validate a bank.

    Raises
    ------
    BadInputError
        If the file is missing, truncated, of another schema, or holds inconsistent or non-finite tables.
    """
    where = str(path)
    try:
        with Path(path).open("rb") as handle:
            data: Any = np.load(handle, allow_pickle=False)
            arrays = {name: data[name] for name in data.files} if hasattr(data, "files") else {}
    except OSError as error:
        raise BadInputError(f"cannot read entropy bank: {error.strerror or error}", where=where) from None
    except (ValueError, EOFError, MemoryError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as e:
        raise BadInputError(f"not an entropy bank: {e}", where=where) from None
    try:
        meta = json.loads(bytes(arrays.pop("meta")).decode())
        for name in _TOKENS:
            arrays[name] = arrays[name].astype(np.float32)
        return Bank(meta=meta, **arrays)
    except BadInputError as error:
        raise error.inside(where) from None
    except KeyError as error:
        raise BadInputError("table missing", where=where, field=str(error)) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInputError(f"not an entropy bank: {error}", where=where) from None
