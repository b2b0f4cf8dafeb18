r"""Fit the roofline's device (:mod:`sim.devices`) to engine logs: what ``[cost] device = "FILE"`` then charges.

With overlap 0 everywhere a step takes a sum of non-negative terms, each linear in one number of the device::

    t = overhead + F_matrix / matmul rate + F_attention / attention rate + B / bandwidth
        + pruning_step (if it prunes) + pruning_token * tokens scored

F and B are those of :class:`sim.cost.Roofline`, which is asked for each term with the other numbers at 0: the fit has
no formula of its own. The weights, read in every step, are part of B. The fit is the robust one of
:mod:`sim.calibrate`; its outliers are left out from then on. But attention hides the smaller of its arithmetic
and its reading (overlap 1: decoding waits for memory, prefill does not), so that fit is where a second one starts:
least squares of ln(charged / measured), soft L1 beyond 5%. Six numbers fit worse than a calibration's table, but they
may be asked about any load. Source: ours.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig
from entropic_ctl.signals import FloatArray
from sim.calibrate import robust
from sim.calibrated import REGIMES, regime
from sim.cost import Roofline, RooflineConstants, charge
from sim.devices import DEVICES, DeviceSpec
from sim.engine_log import EngineLog, read_logs
from sim.load import StepLoad
from sim.model_shapes import ModelShape, model_shape

__all__ = ["DeviceFit", "fit_device", "fit_logs", "summary"]


@dataclass(frozen=True)
class DeviceFit:
    """A fitted device and its errors.

    Parameters
    ----------
    device : DeviceSpec
    iterations, outliers : int
        Seen; and of them given no weight.
    mean_error : float
        Mean of |measured / fitted - 1|, outliers left out.
    ratios : dict of str to (float, float, float)
        Quantiles 0.05, 0.5 and 0.95 of measured / fitted, by regime.
    """

    device: DeviceSpec
    iterations: int
    outliers: int
    mean_error: float
    ratios: dict[str, tuple[float, float, float]]


def _units(c: RooflineConstants) -> list[RooflineConstants]:
    """Return constants that charge one unit of each term: overhead, matrices, attention, bytes, the two of pruning."""
    none = {name: 0.0 for name in RooflineConstants._fields if name.endswith("_s")}
    read = {name: getattr(c, name) / c.byte_s for name in ("layers_s", "head_s", "experts_s")}
    terms: list[dict[str, float]] = [{"overhead_s": 1.0}, {"matmul_s": 1.0}, {"attention_s": 1.0}]
    terms += [{"byte_s": 1.0, **read}, {"pruning_step_s": 1.0}, {"pruning_token_s": 1.0}]
    return [c._replace(**{**none, "loose": 1.0, "attention_loose": 1.0, **term}) for term in terms]


def _steps(log: EngineLog, device: DeviceSpec, shape: ModelShape) -> Iterator[tuple[RooflineConstants, StepLoad]]:
    """Return the constants of a device and the load of each step."""

    @functools.cache
    def constants(dense_layers: int, protected_tokens: int) -> RooflineConstants:
        pages = protected_tokens // log.page_tokens
        rule = PruningConfig(sink_pages=0, recent_pages=max(1, pages), dense_layers=dense_layers)
        return Roofline(device, shape, log.page_tokens, rule).constants

    loads = zip(*(log.load[name].tolist() for name in StepLoad._fields), strict=True)
    for load, *rule in zip(loads, log.dense_layers.tolist(), log.protected_tokens.tolist(), strict=True):
        yield constants(*rule), StepLoad(*load)


def _design(log: EngineLog, device: DeviceSpec, shape: ModelShape) -> FloatArray:
    """Return the six terms of each step, shape (S, 6)."""
    units = functools.cache(_units)
    return np.array([[charge(unit, load)[0] for unit in units(c)] for c, load in _steps(log, device, shape)])


def _charged(log: EngineLog, shape: ModelShape, device: DeviceSpec) -> FloatArray:
    """Return the seconds of each step on a device, shape (S,)."""
    return np.array([charge(c, load)[0] for c, load in _steps(log, device, shape)])


def _device(start: DeviceSpec, numbers: FloatArray) -> DeviceSpec:
    """Return ``start`` with these seconds: overhead; per FLOP of matrices, attention; per byte; the two of pruning."""
    overhead, matmul, attention, byte, step, token = numbers.tolist()
    peak = 1.0 / min(matmul, attention)
    return dataclasses.replace(
        start,
        peak_flops=peak,
        matmul_efficiency=1.0 / matmul / peak,
        attention_efficiency=1.0 / attention / peak,
        bandwidth=1.0 / byte,
        bandwidth_efficiency=1.0,
        overlap=0.0,
        attention_overlap=1.0,
        overhead_s=overhead,
        pruning_step_s=step,
        pruning_token_s=token,
    )


def _refined(log: EngineLog, shape: ModelShape, start: DeviceSpec, found: FloatArray) -> DeviceSpec:
    from scipy.optimize import least_squares

    def residual(x: FloatArray) -> FloatArray:
        return np.asarray(np.log(_charged(log, shape, _device(start, x * unit)) / log.seconds), np.float64)

    unit = np.maximum(found, [1e-4, 0.0, 0.0, 0.0, 1e-4, 1e-8])  # what may be 0 needs a scale to move on
    fit = least_squares(
        residual,
        np.maximum(found / unit, 0.1),
        bounds=([0.0, 0.05, 0.05, 0.05, 0.0, 0.0], 20.0 * np.ones(6)),
        loss="soft_l1",
        f_scale=0.05,
    )
    return _device(start, np.where(fit.x < 1e-6, 0.0, fit.x) * unit)  # what came to lie at its bound


def _fastest(log: EngineLog) -> EngineLog:
    """Return the fastest of the iterations that have the same load: a busy machine only ever slows a step."""
    load = np.stack([log.load[name] for name in StepLoad._fields], axis=1)
    _, group = np.unique(load, axis=0, return_inverse=True)
    order = np.lexsort((log.seconds, group.reshape(-1)))
    first = np.diff(group.reshape(-1)[order], prepend=-1) > 0
    return log.take(np.sort(order[first]))


def fit_device(log: EngineLog, shape: ModelShape, start: DeviceSpec) -> DeviceFit:
    """Fit a device to the fastest iteration of each load.

    Parameters
    ----------
    log : EngineLog
        Dense and pruned decode steps and prefill, of several sizes.
    shape : ModelShape
        Of the model that ran.
    start : DeviceSpec
        Gives the name, the memory and the watts.

    Raises
    ------
    BadInputError
        If the log does not tell a rate: the term's coefficient is 0.
    """
    log = _fastest(log)
    found, _, weight = robust(_design(log, start, shape), log.seconds)
    for name, value in zip(("matmul", "attention", "bytes"), found[1:4], strict=True):
        if not value > 0.0:
            raise BadInputError(
                f"the log does not tell the time of {name}",
                where="calibrate",
                remedy="record steps of more sizes: entropic bench steps",
            )
    device = _refined(log.take(np.flatnonzero(weight > 0)), shape, start, found)
    ratio = log.seconds / _charged(log, shape, device)
    kind = np.asarray(regime(StepLoad(**log.load)))  # type: ignore[arg-type]
    low, middle, high = (
        [float(np.quantile(ratio[kind == i], q)) if (kind == i).any() else np.nan for i in range(len(REGIMES))]
        for q in (0.05, 0.5, 0.95)
    )
    return DeviceFit(
        device=device,
        iterations=len(log),
        outliers=int(np.count_nonzero(weight == 0)),
        mean_error=float(np.abs(ratio - 1.0)[weight > 0].mean()),
        ratios={name: (low[i], middle[i], high[i]) for i, name in enumerate(REGIMES)},
    )


def fit_logs(paths: Sequence[str | Path], model: str) -> DeviceFit:
    """Fit a CPU to logs of the model called ``model`` (:func:`sim.model_shapes.model_shape`).

    Raises
    ------
    BadInputError
        If a log or the model cannot be read, or the logs hold too little.
    """
    return fit_device(read_logs(paths), model_shape(model), DEVICES["cpu2"])


def summary(fit: DeviceFit) -> dict[str, Any]:
    """Return a fit for people."""
    device = fit.device
    out = {
        "device: loads, outliers": f"{fit.iterations}, {fit.outliers}",
        "device: mean error": f"{fit.mean_error:.1%}",
        "device: matrix products, FLOP/s": f"{device.peak_flops * device.matmul_efficiency:.3g}",
        "device: attention, FLOP/s": f"{device.peak_flops * device.attention_efficiency:.3g}",
        "device: bandwidth, bytes/s": f"{device.bandwidth:.4g}",
        "device: overhead, ms": f"{1e3 * device.overhead_s:.4g}",
        "device: pruning per step, ms": f"{1e3 * device.pruning_step_s:.4g}",
        "device: pruning per scored token, us": f"{1e6 * device.pruning_token_s:.4g}",
    }
    for name, (low, middle, high) in fit.ratios.items():
        out[f"device: measured / fitted, {name}"] = f"median {middle:.3f}, 5-95% {low:.3f}-{high:.3f}"
    return out
