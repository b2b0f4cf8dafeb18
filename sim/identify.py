r"""Identification: what the loop's plant does, measured by moving an input on purpose.

What theory says, for comparison: the same-step gain of the tempered entropy is the mean varentropy at the unexcited u,
dH/du = V; on frozen logits the excitation reaches u through a pole at 1 - k V (lag 0), or through 1 - q^-1 + k V q^-2
(lag 1), k V being the loop gain. If a token's temperature also moves the *next* entropy, by s through the text, the
slow pole sees V + s: the loop gain is compared with both. The *model* entropy of a token is measured before that
token's temperature acts, so its lag-0 coefficient must be zero: a check on the whole procedure.

The records come from :mod:`sim.experiment`; the estimators are in :mod:`sim.spectra` and :mod:`sim.transfer`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri

from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray
from sim.experiment import Experiment, Records
from sim.spectra import frequency_response
from sim.transfer import Transfer, fit, impulse_response, padded
from sim.transfer import simulate as respond

__all__ = ["Findings", "analyse"]


@dataclass(frozen=True)
class Findings:
    """Tables (``frequency``, ``impulse``), fitted models by name, and numbers beside what theory says."""

    frequency: dict[str, np.ndarray]
    impulse: dict[str, np.ndarray]
    models: dict[str, Transfer]
    numbers: dict[str, Any]


def _interval(value: float, error: float, level: float) -> dict[str, float]:
    half = float(ndtri(0.5 + level / 2)) * error
    return {"value": value, "low": value - half, "high": value + half}


def _beside(value: float, error: float, theory: float, level: float) -> dict[str, Any]:
    found: dict[str, Any] = _interval(value, error, level)
    return {**found, "theory": theory, "agrees": bool(found["low"] <= theory <= found["high"])}


def analyse(records: Records, experiment: Experiment, config: RunConfig) -> Findings:
    """Estimate responses and models from the records of one experiment.

    Parameters
    ----------
    records : Records
    experiment : Experiment
    config : RunConfig
        As given to :func:`prepare`: gain and lag of the law are compared with what was found.

    Raises
    ------
    BadInputError
        If too few requests are long enough.
    """
    long = [i for i, r in enumerate(records.excitation) if r.shape[0] >= experiment.segment]
    if len(long) < 6:
        raise BadInputError(
            "too few requests are as long as a segment",
            where="identification",
            field="requests",
            value=len(long),
            allowed=f">= 6 of {experiment.segment} tokens",
            remedy="ask for more requests or tokens, or a shorter segment",
        )
    r, u, tempered, model, varentropy = (
        [getattr(records, f.name)[i] for i in long] for f in dataclasses.fields(Records)
    )
    level, closed = experiment.level, experiment.input == "temperature" and experiment.loop != "open"
    models: dict[str, Transfer] = {}
    explained = u
    if closed:
        models["loop"] = fit(r, u)
        swept, real = padded(r)
        explained = [row[m] for row, m in zip(respond(models["loop"], swept), real, strict=True)]
    numbers: dict[str, Any] = {
        "requests": len(long),
        "tokens": int(sum(x.shape[0] for x in u)),
        "amplitude": experiment.size(config),
        "input_mean": float(np.mean(np.concatenate(u))),
        "varentropy_mean": float(np.mean(np.concatenate(varentropy))),
        "varentropy_error": float(np.std([v.mean() for v in varentropy], ddof=1) / math.sqrt(len(long))),
    }
    frequency: list[dict[str, np.ndarray]] = []
    impulse: list[dict[str, np.ndarray]] = []
    for name, output in (("tempered_entropy", tempered), ("model_entropy", model)):
        spectrum = frequency_response(r, u, output, segment=experiment.segment, level=level)
        models[name] = fit(explained, output)
        fitted = models[name].response(spectrum.frequency)
        frequency.append(
            {
                "output": np.full(spectrum.frequency.shape, name),
                **spectrum.table(),
                "fit_gain": np.abs(fitted),
                "fit_phase_deg": np.degrees(np.angle(fitted)),
            }
        )
        response = impulse_response(explained, output, lags=experiment.lags)
        impulse.append(
            {
                "output": np.full(response.lag.shape, name),
                "lag": response.lag,
                "value": response.value,
                "error": response.error,
            }
        )
        numbers["segments"] = spectrum.segments
        numbers[name] = {
            "same_step": _interval(float(response.value[0]), float(response.error[0]), level),
            "next_step": _interval(float(response.value[1]), float(response.error[1]), level),
            "static_gain": _interval(*models[name].static_gain(), level),
            "explained_held_out": models[name].explained,
            "coherence_mean": float(spectrum.coherence.mean()),
            "coherence_floor": spectrum.coherence_floor,
        }
        first = [(float(response.value[j]), float(response.error[j])) for j in (0, 1)]
        if name == "tempered_entropy":
            same, after = first
        else:
            before, text = first
    if experiment.input == "temperature":
        numbers["compared"] = {
            "same_step_gain_is_V": _beside(
                same[0], math.hypot(same[1], numbers["varentropy_error"]), numbers["varentropy_mean"], level
            ),
            "model_entropy_ignores_this_T": _beside(*before, 0.0, level),
        }
        numbers["text_feedback_s"] = _interval(*text, level)
    if closed:
        gain = float(config.loop.temperature.config.gain)
        value, error, modulus = _loop_gain(r, u, config.engine.observation_lag)
        numbers["compared"]["loop_gain_frozen_kV"] = _beside(value, error, gain * numbers["varentropy_mean"], level)
        both = math.hypot(error, gain * same[1], gain * after[1])
        numbers["compared"]["loop_gain_with_text"] = _beside(value, both, gain * (same[0] + after[0]), level)
        numbers["loop_pole_modulus"] = modulus
    return Findings(_stack(frequency), _stack(impulse), models, numbers)


def _loop_gain(r: list[FloatArray], u: list[FloatArray], lag: int) -> tuple[float, float, float]:
    """Fit the denominator the law predicts on frozen logits; return (its loop gain, standard error, pole modulus)."""
    model = fit(r, u, orders=((2 + lag, 1 + lag),))
    value = float(model.denominator[-1]) + (0.0 if lag else 1.0)
    return value, math.sqrt(max(0.0, float(model.covariance[-1, -1]))), float(np.abs(model.poles).max())


def _stack(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
