"""The file of a fitted entropy model: JSON with a version, validated on reading like the bank it stands for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from entropic_ctl.errors import BadInputError
from entropic_ctl.results import write_json
from entropic_ctl.signals import FloatArray
from sim.curves import Curves
from sim.parametric import RESPONSE, EntropyModel, generate
from sim.regimes import Regimes

__all__ = ["SCHEMA", "read_model", "write_model"]

SCHEMA = 1
_KIND = "entropic-ctl entropy model"
_REMEDY = "fit it anew with `entropic fit-entropy`"


def write_model(path: str | Path, model: EntropyModel, *, stamp: dict[str, Any] | None = None) -> None:
    """Write a model atomically.

    Parameters
    ----------
    path : str or Path
    model : EntropyModel
    stamp : dict, optional
        What made it (:func:`entropic_ctl.results.stamp`).
    """
    values: dict[str, Any] = {"kind": _KIND, "schema": SCHEMA, **dataclasses.asdict(model)}
    write_json(path, values | ({"stamp": stamp} if stamp is not None else {}))


def read_model(path: str | Path) -> EntropyModel:
    """Read and validate a model.

    Raises
    ------
    BadInputError
        If the file is missing, is no such JSON, is of another version, or holds a table of the wrong shape, a number
        outside its range, or anything a bank could not be generated from.
    """
    where = str(path)
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"cannot read entropy model: {error.strerror}", where=where) from None
    except (ValueError, RecursionError):
        raise BadInputError("not JSON", where=where, remedy=_REMEDY) from None
    if not isinstance(values, dict) or values.get("kind") != _KIND:
        raise BadInputError("not an entropy model", where=where, remedy=_REMEDY)
    if values.get("schema") != SCHEMA:
        raise BadInputError("entropy model of another version", where=where, value=values.get("schema"), allowed="1")
    try:
        model = _Reader(where).model(values)
        generate(model, prompts=1)  # whatever a bank checks
    except BadInputError as error:
        raise (error if error.where == where else error.inside(where)) from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise BadInputError(f"not an entropy model: {error}", where=where, remedy=_REMEDY) from None
    return model


class _Reader:
    """Takes the parts of a file, each checked."""

    def __init__(self, where: str) -> None:
        self._where = where

    def _refuse(self, field: str, problem: str) -> None:
        raise BadInputError(problem, where=self._where, field=field, remedy=_REMEDY)

    def table(
        self, values: dict[str, Any], name: str, shape: tuple[int, ...], lo: float = -np.inf, hi: float = np.inf
    ) -> FloatArray:
        """Return ``values[name]`` as a finite float64 array of this shape (-1 is any) within [lo, hi]."""
        if name not in values:
            self._refuse(name, "missing")
        try:
            array = np.asarray(values[name], np.float64)
        except (ValueError, TypeError, OverflowError):
            array = np.empty(())
        if array.ndim != len(shape) or any(want not in (-1, got) for want, got in zip(shape, array.shape, strict=True)):
            self._refuse(name, f"not a table of shape {shape}")
        if not np.isfinite(array).all():
            self._refuse(name, "not finite")
        if array.size and (array.min() < lo or array.max() > hi):
            self._refuse(name, f"outside [{lo:g}, {hi:g}]")
        return array

    def rising(self, values: dict[str, Any], name: str, least: int) -> FloatArray:
        """Return an increasing axis of numbers >= 0."""
        axis = self.table(values, name, (-1,), 0.0)
        if axis.shape[0] < least or (np.diff(axis) <= 0).any():
            self._refuse(name, f"not increasing with at least {least} points")
        return axis

    def regimes(self, values: dict[str, Any]) -> Regimes:
        """Return the regimes of one temperature."""
        level = self.table(values, "level", (-1,))
        k = level.shape[0]
        if k < 1:
            self._refuse("level", "no regime")
        transition, start = self.table(values, "transition", (k, k), 0, 1), self.table(values, "start", (k,), 0, 1)
        if (np.abs(transition.sum(axis=1) - 1) > 1e-6).any() or abs(start.sum() - 1) > 1e-6:
            self._refuse("transition, start", "probabilities do not sum to 1")
        return Regimes(
            level,
            self.table(values, "phi", (k,), -0.999, 0.999),
            float(self.table(values, "text", ())),
            self.table(values, "sigma", (k,), 1e-6),
            transition,
            start,
        )

    def model(self, values: dict[str, Any]) -> EntropyModel:
        """Return the whole."""
        meta = values["meta"]
        vocab = meta.get("vocab_size") if isinstance(meta, dict) else None
        if isinstance(vocab, bool) or not isinstance(vocab, int) or not 2 <= vocab < 2**31:
            self._refuse("meta.vocab_size", "not a vocabulary size")
        temperature, grid = self.rising(values, "temperature", 1), self.rising(values, "grid", 2)
        if temperature[0] <= 0 or grid[0] <= 0:
            self._refuse("temperature, grid", "not above 0")
        laws = tuple(self.regimes(item) for item in values["regimes"])
        if len(laws) != temperature.shape[0]:
            self._refuse("regimes", "not one set per temperature")
        limit = values["limit"]
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= 10**6:
            self._refuse("limit", "not a number of tokens")
        theta, context = self.rising(values, "theta", 2), self.rising(values, "context", 2)
        shape = (context.shape[0], theta.shape[0])
        first = self.table(values, "first", (temperature.shape[0], 2))
        if (first[:, 1] < 0).any():
            self._refuse("first", "a negative standard deviation")
        return EntropyModel(
            meta=meta,
            temperature=temperature,
            regimes=laws,
            first=first,
            prompt_share=float(self.table(values, "prompt_share", (), 0.0, 1.0)),
            hazard=self.table(values, "hazard", (4,)) if values["hazard"] is not None else None,
            limit=limit,
            grid=grid,
            curves=self.curves(values["curves"], grid),
            theta=theta,
            context=context,
            response={name: self.table(values["response"], name, shape) for name in RESPONSE},
        )

    def curves(self, values: dict[str, Any], grid: FloatArray) -> Curves:
        """Return the curves."""
        edges = self.table(values, "edges", (-1,))
        if (np.diff(edges) <= 0).any():
            self._refuse("edges", "not increasing")
        bins, points = edges.shape[0] + 1, grid.shape[0]
        size = 2 * points - 1 + (0 if (np.abs(np.log(grid)) < 1e-9).any() else 1)
        mean = self.table(values, "mean", (bins, 4, size))
        loadings = self.table(values, "loadings", (bins, -1, size))
        return Curves(edges, mean, loadings, self.table(values, "rest", (bins, size), 0.0))
