r"""Fit what a step costs from an engine's log: a table over tokens, linear terms, and what the fit leaves over.

    t = g(tokens) + sum_j b_j x_j(load),      b_j >= 0,  g >= 0

g is piecewise linear between knots: the time of the matrix products, which on a real machine is neither a roofline nor
monotone in the number of tokens (blocking, threads); the fixed time of a step is in it. The x_j are physical: sampling
rows; dense decode rows and their context; prefill rows, their cached context and their query-key pairs; for pruning, a
step that prunes, pruned rows, their context, the context they keep, and the pages sealed (tokens over page size, while
the law is on); and, per temperature law other than ``fixed``, the sampling rows it ran on.

Fitted by non-negative least squares (Lawson and Hanson, 1974) on relative errors, iterated with Tukey's bisquare
weights from a Huber start (Holland and Welsch, 1977): a step during which somebody else used the machine is an outlier,
not the machine's speed. Standard errors are the sandwich estimate (White, 1980) on the coefficients above 0; one that
the bound holds at 0 has none. The choice of terms is ours.

What is left over is kept as a table of quantiles of (measured / fitted) per regime, so that a simulator can draw from
it: a tail latency is made of such steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from entropic_ctl.errors import BadInputError
from entropic_ctl.provenance import hardware, versions
from entropic_ctl.signals import FloatArray, IntArray
from sim.calibrated import REFERENCE_LAW, REGIMES, TERMS, Calibration, Residuals, regime, terms
from sim.engine_log import EngineLog, read_logs
from sim.load import StepLoad

__all__ = ["calibrate", "fit", "robust", "summary"]

_KNOTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
_PER_KNOT = 6  # iterations wanted between two knots
_ROUNDS = 30
_HUBER, _BISQUARE = 1.345, 4.685  # 95% efficiency under normal errors
_QUANTILES = 65
_FEWEST = 30


def _knots(tokens: FloatArray) -> FloatArray:
    """Return knots from the smallest to the largest number of tokens, as many as the data support."""
    low, high = float(tokens.min()), float(tokens.max())
    out = [low]
    for k in _KNOTS:
        inside = np.count_nonzero((tokens > out[-1]) & (tokens <= k))
        if out[-1] < k < high and inside >= _PER_KNOT and np.count_nonzero(tokens > k) >= _PER_KNOT:
            out.append(float(k))
    return np.array([*out, high] if high > low else out)


def _hats(tokens: FloatArray, knots: FloatArray) -> FloatArray:
    """Return the piecewise linear basis at ``tokens``, shape (S, K)."""
    return np.stack([np.interp(tokens, knots, row) for row in np.eye(knots.shape[0])], axis=1)


def _weights(relative: FloatArray, turn: int) -> FloatArray:
    """Return robust weights in [0, 1]: Huber's at first, then the bisquare."""
    spread = max(1.4826 * float(np.median(np.abs(relative - np.median(relative)))), 1e-6)
    z = np.abs(relative - np.median(relative)) / spread
    if turn < _ROUNDS // 3:
        return np.minimum(1.0, _HUBER / np.maximum(z, 1e-12))
    return np.where(z < _BISQUARE, (1.0 - np.minimum(z / _BISQUARE, 1.0) ** 2) ** 2, 0.0)


def robust(design: FloatArray, seconds: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return (coefficients, standard errors, robust weights) of the relative, non-negative, robust fit.

    Parameters
    ----------
    design : FloatArray, shape (S, K)
    seconds : FloatArray, shape (S,)

    The standard errors are the sandwich's with the weights held fixed: with 5% of outliers, intervals of nominal 95%
    cover 87 to 90%.
    """
    from scipy.optimize import nnls

    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    x = design / scale / seconds[:, None]
    weight = np.ones(seconds.shape[0])
    b = np.zeros(design.shape[1])
    for turn in range(_ROUNDS):
        root = np.sqrt(weight)
        b, _ = nnls(x * root[:, None], root, maxiter=50 * design.shape[1])
        new = _weights(1.0 - x @ b, turn)
        if turn >= _ROUNDS // 3 and np.abs(new - weight).max() < 1e-6:
            break
        weight = new
    free = np.flatnonzero(b > 0)
    xf, residual = x[:, free], 1.0 - x @ b
    bread = np.linalg.pinv(xf.T @ (weight[:, None] * xf))
    meat = (xf * (weight * residual)[:, None]).T @ (xf * (weight * residual)[:, None])
    errors = np.full(b.shape, np.nan)
    errors[free] = np.sqrt(np.maximum(np.diag(bread @ meat @ bread), 0.0))
    return b / scale, errors / scale, weight


def _residuals(ratio: FloatArray) -> Residuals:
    q = np.linspace(0.0, 1.0, _QUANTILES)
    quantiles = np.quantile(ratio, q)
    mean = float(np.mean((quantiles[1:] + quantiles[:-1]) / 2))  # of what a draw from the table gives
    return Residuals(int(ratio.shape[0]), mean, tuple(float(x) for x in quantiles))


def fit(log: EngineLog, *, source: Sequence[str] = ()) -> Calibration:
    """Fit a calibration.

    Parameters
    ----------
    log : EngineLog
    source : sequence of str
        Names of the logs, to be written down.

    Raises
    ------
    BadInputError
        If there are fewer iterations than the fit needs, or none with the ``fixed`` temperature law (what a sampling
        row costs by itself is then not identified).
    """
    n = len(log)
    if n < _FEWEST:
        raise BadInputError(
            "too few iterations to fit", where="calibrate", value=n, allowed=f">= {_FEWEST}", remedy="log a longer run"
        )
    laws = sorted(set(log.law.tolist()) - {REFERENCE_LAW})
    if laws and not (log.law == REFERENCE_LAW).any():
        raise BadInputError(
            "no iteration under the fixed temperature law",
            where="calibrate",
            value=laws,
            remedy="add the log of a run without a temperature law",
        )
    load = StepLoad(**log.load)  # type: ignore[arg-type]
    knots = _knots(log.load["tokens"])
    hats = _hats(log.load["tokens"], knots)
    linear = np.stack(terms(load, log.prunes, log.page_tokens), axis=1)
    by_law = np.stack([log.load["sampling"] * (log.law == law) for law in laws], axis=1) if laws else np.empty((n, 0))
    coefficients, errors, weight = robust(np.concatenate([hats, linear, by_law], axis=1), log.seconds)
    a, b = knots.shape[0], knots.shape[0] + len(TERMS)
    fitted = np.concatenate([hats, linear, by_law], axis=1) @ coefficients
    ratio = log.seconds / fitted
    kind: IntArray = np.asarray(regime(load), np.int64)
    kept = weight > 0
    spread = float(np.sum(weight * (log.seconds - np.average(log.seconds, weights=weight)) ** 2))
    gap = log.between_s[~np.isnan(log.between_s)]
    return Calibration(
        knots=tuple(knots.tolist()),
        table_s=tuple(coefficients[:a].tolist()),
        table_se=tuple(errors[:a].tolist()),
        terms_s=dict(zip(TERMS, coefficients[a:b].tolist(), strict=True)),
        terms_se=dict(zip(TERMS, errors[a:b].tolist(), strict=True)),
        laws_s={REFERENCE_LAW: 0.0, **dict(zip(laws, coefficients[b:].tolist(), strict=True))},
        laws_se={REFERENCE_LAW: 0.0, **dict(zip(laws, errors[b:].tolist(), strict=True))},
        residuals={
            name: _residuals(ratio[kind == i]) if (kind == i).any() else dataclasses.replace(_residuals(ratio), n=0)
            for i, name in enumerate(REGIMES)
        },
        ranges={name: (float(c.min()), float(c.max())) for name, c in log.load.items()},
        page_tokens=log.page_tokens,
        between_s=float(np.median(gap)) if gap.size else 0.0,
        iterations=n,
        outliers=int(n - np.count_nonzero(kept)),
        r2=1.0 - float(np.sum(weight * (log.seconds - fitted) ** 2)) / spread if spread > 0 else 1.0,
        source=tuple(source),
        device=hardware(),
        versions=versions(),
    )


def calibrate(paths: Sequence[str | Path]) -> Calibration:
    """Fit a calibration from engine logs.

    Raises
    ------
    BadInputError
        If a log cannot be read, or they hold too little.
    """
    return fit(read_logs(paths), source=[Path(path).name for path in paths])


def summary(calibration: Calibration) -> dict[str, Any]:
    """Return a calibration for people: milliseconds with standard errors, and how good the fit is."""
    out: dict[str, Any] = {
        "iterations": calibration.iterations,
        "outliers": calibration.outliers,
        "r2": calibration.r2,
        "between_steps_ms": 1e3 * calibration.between_s,
    }
    for k, s, e in zip(calibration.knots, calibration.table_s, calibration.table_se, strict=True):
        out[f"step of {k:g} tokens, ms"] = _with_error(s, e)
    for name in TERMS:
        out[f"{name}, ms"] = _with_error(calibration.terms_s[name], calibration.terms_se[name])
    for name in calibration.laws_s:
        if name != REFERENCE_LAW:
            out[f"law {name} per row, ms"] = _with_error(calibration.laws_s[name], calibration.laws_se[name])
    for name, r in calibration.residuals.items():
        low, high = (float(np.interp(q, np.linspace(0, 1, len(r.quantiles)), r.quantiles)) for q in (0.05, 0.95))
        seen = f"{r.n} steps" if r.n else "none seen, those of all steps taken"
        out[f"measured / fitted, {name}"] = f"{seen}: mean {r.mean:.3f}, 5-95% {low:.3f}-{high:.3f}"
    return out


def _with_error(seconds: float, error: float) -> str:
    return f"{1e3 * seconds:.4g}" + (f" ± {1e3 * error:.2g}" if math.isfinite(error) else " (at the bound)")
