r"""Identification: what the loop's plant does, measured by moving an input on purpose.

The input is u = ln T (about the operating point) or theta. One request is one record, one accepted token one sample.

- *open loop*: the micro law is replaced by a fixed T0, and the excitation moves u (or theta);
- *closed loop*: the config's ``feedback`` law runs, and the excitation is added to its output u or to its target H*.

What theory says, for comparison: the same-step gain of the tempered entropy is the mean varentropy at the unexcited u,
dH/du = V; on frozen logits the excitation reaches u through a pole at 1 - k V (lag 0), or through 1 - q^-1 + k V q^-2
(lag 1), k V being the loop gain. If a token's temperature also moves the *next* entropy, by s through the text, the
slow pole sees V + s: the loop gain is compared with both. The *model* entropy of a token is measured before that
token's temperature acts, so its lag-0 coefficient must be zero: a check on the whole procedure.

The experiment brings its own workload: a burst of requests of equal length that run to their limit. Estimators are in
:mod:`sim.spectra` and :mod:`sim.transfer`; what runs the requests (simulator or engine) is the caller's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from entropic_ctl import fields
from entropic_ctl.bank import Bank
from entropic_ctl.config import LawSpec, RunConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray
from entropic_ctl.temperature import fixed
from sim.excitation import KINDS, Excited, ExcitedBudget, make_signal
from sim.replica import Progress, simulate
from sim.spectra import frequency_response
from sim.streams import stream
from sim.trajectories import load_bank
from sim.transfer import Transfer, fit, impulse_response, padded
from sim.transfer import simulate as respond

__all__ = ["Experiment", "Findings", "Records", "analyse", "collect", "prepare", "run_simulation"]

Laws = tuple[Any, Any, Any]


@dataclass(frozen=True)
class Experiment:
    """What is moved, how, and for how long."""

    input: str = fields.choice("temperature", ("temperature", "theta"), "u = ln T, or the information-loss budget")
    signal: str = fields.choice("prbs", KINDS, "shape of the excitation")
    loop: str = fields.choice("open", ("open", "output", "target"), "open, or closed with the excitation added there")
    amplitude: float = fields.number(0.0, 0.0, 10.0, "in ln T, nats (target) or nats of theta; 0 is a default")
    period: int = fields.integer(255, 15, 10_000, "period of the signal, tokens")
    requests: int = fields.integer(160, 8, 10**6, "requests")
    tokens: int = fields.integer(256, 32, 10**6, "tokens per request")
    segment: int = fields.integer(64, 8, 4096, "tokens per segment of the spectra, even")
    lags: int = fields.integer(8, 1, 64, "longest lag of the impulse response, tokens")
    level: float = fields.number(0.95, 0.5, 0.9999, "confidence of every bound")

    def __post_init__(self) -> None:
        fields.check(self)
        if self.segment > self.tokens:
            raise BadInputError("a segment longer than a request", field="segment", value=self.segment)

    def size(self, config: RunConfig) -> float:
        """Return the amplitude in force: as given, else 0.2 in ln T, 0.3 nats of target, half of theta."""
        if self.amplitude > 0:
            return self.amplitude
        if self.input == "theta":
            return 0.5 * float(getattr(config.loop.pruning.config, "theta_nats", 0.0))
        return 0.3 if self.loop == "target" else 0.2


def prepare(config: RunConfig, experiment: Experiment) -> tuple[RunConfig, Laws, Excited | None]:
    """Return the configuration and the laws of an experiment, and the excited micro law (None for theta).

    Parameters
    ----------
    config : RunConfig
        Operating point: ``loop.temperature.temperature`` and, for theta, ``loop.pruning.theta_nats``.
    experiment : Experiment

    Raises
    ------
    BadInputError
        If the law in the config cannot carry the excitation, or its clamps leave no room for it.
    """
    micro, meso = config.loop.temperature, config.loop.pruning
    law, size = micro.config, experiment.size(config)
    if law.temperature == 0:
        raise BadInputError(
            "greedy decoding has no temperature to move", field="loop.temperature.temperature", value=0.0, allowed="> 0"
        )
    if experiment.input == "theta" and meso.name != "budget":
        raise BadInputError("no budget to move", field="loop.pruning.law", value=meso.name, allowed="budget")
    if experiment.loop == "open":
        micro = LawSpec("fixed", fixed.Config(temperature=law.temperature, t_min=law.t_min, t_max=law.t_max))
        low, high = (math.log(t / law.temperature) for t in (law.t_min, law.t_max))
        if experiment.input == "temperature" and not (low <= -size and size <= high):
            raise BadInputError(
                "the clamps leave no room for it",
                field="amplitude",
                value=size,
                allowed=f"(0, {min(-low, high):.4g}] about T = {law.temperature:g}",
                remedy="lower it, or widen loop.temperature.t_min and t_max",
            )
    elif micro.name != "feedback":
        raise BadInputError(
            "a closed loop needs the feedback law", field="loop.temperature.law", value=micro.name, allowed="feedback"
        )
    workload = dataclasses.replace(
        config.workload,
        kind="burst",
        n_requests=experiment.requests,
        output_tokens=float(experiment.tokens),
        output_cv=0.0,
        output_length="limit",
    )
    config = dataclasses.replace(config, workload=workload, loop=dataclasses.replace(config.loop, temperature=micro))
    temperature, pruning, scheduling = config.loop.build()
    wave = make_signal(experiment.signal, experiment.period, size, stream(config.seed, "excitation"))
    places = stream(config.seed, "excitation places")
    if experiment.input == "theta":
        return config, (temperature, ExcitedBudget(meso.config, meso.config.theta_nats, wave, places), scheduling), None
    excited = Excited(temperature, wave, places, at="target" if experiment.loop == "target" else "output")
    return config, (excited, pruning, scheduling), excited


def run_simulation(
    config: RunConfig, experiment: Experiment, *, bank: Bank | None = None, progress: Progress | None = None
) -> Records:
    """Run an experiment in the simulator.

    Parameters
    ----------
    config : RunConfig
    experiment : Experiment
    bank : Bank, optional
        In place of the one the config names.
    progress : callable, optional
        As in :func:`sim.replica.simulate`.

    Raises
    ------
    BadInputError
        If the excitation would leave the recorded range.
    """
    bank = load_bank(config.cost.bank) if bank is None else bank
    size = experiment.size(config)
    if experiment.input == "theta":
        top = float(config.loop.pruning.config.theta_nats) + size if config.loop.pruning.name == "budget" else 0.0
        if top > bank.theta[-1]:
            raise BadInputError(
                "beyond the budgets of the entropy bank",
                field="amplitude",
                value=size,
                allowed=f"theta + amplitude <= {bank.theta[-1]:g} nats",
            )
    elif experiment.loop == "open" and config.loop.temperature.config.temperature > 0:
        middle = math.log(config.loop.temperature.config.temperature)
        low, high = math.log(bank.grid[0]), math.log(bank.grid[-1])
        if middle - size < low or middle + size > high:
            raise BadInputError(
                "beyond the temperatures of the entropy bank",
                field="amplitude",
                value=size,
                allowed=f"T in [{bank.grid[0]:g}, {bank.grid[-1]:g}]",
            )
    config, laws, excited = prepare(config, experiment)
    result = simulate(config, laws=laws, uncertified=True, keep_tokens=True, bank=bank, progress=progress)
    return collect(result.tokens or {}, excited)


@dataclass(frozen=True)
class Records:
    """One array per request and quantity, in order of tokens.

    Parameters
    ----------
    excitation : list of FloatArray
        r: the known signal (ln T, or nats).
    input : list of FloatArray
        ln T or theta, as applied.
    tempered, model : list of FloatArray
        Entropies of each token, nats.
    varentropy : list of FloatArray
        At the unexcited u (theta: at the u in force), nats squared.
    """

    excitation: list[FloatArray]
    input: list[FloatArray]
    tempered: list[FloatArray]
    model: list[FloatArray]
    varentropy: list[FloatArray]


def collect(tokens: Mapping[str, Any], excited: Excited | None) -> Records:
    """Sort a tokens table into records; the first token of a theta experiment is left out (it is computed dense).

    Parameters
    ----------
    tokens : mapping
        Columns of :meth:`entropic_ctl.metrics.Metrics.tokens_table`.
    excited : Excited or None
        The law that moved T; None if theta was moved.

    Raises
    ------
    BadInputError
        If there are no tokens, or the table is not the one the law saw.
    """
    table = {name: np.asarray(tokens[name]) for name in tokens}
    if not table or table["id"].shape[0] == 0:
        raise BadInputError("no tokens", where="identification", remedy="check engine limits: were all refused?")
    if excited is None:
        value = place = np.asarray(table["theta_nats"], np.float64)
        gain = table["varentropy"]
    else:
        value, gain = np.concatenate(excited.applied), np.concatenate(excited.frozen_gain)
        place = np.log(table["temperature"])
        if value.shape != place.shape:
            raise BadInputError(
                "tokens and excitation differ in number", where="identification", value=[len(place), len(value)]
            )
    order = np.lexsort((table["index"], table["id"]))
    if excited is None:
        order = order[table["index"][order] > 0]
    ends = np.flatnonzero(np.diff(table["id"][order])) + 1
    parts: dict[str, list[FloatArray]] = {}
    for name, column in (
        ("excitation", value),
        ("input", place),
        ("tempered", table["tempered_entropy"]),
        ("model", table["model_entropy"]),
        ("varentropy", gain),
    ):
        parts[name] = np.split(np.asarray(column, np.float64)[order], ends)
    return Records(**parts)


@dataclass(frozen=True)
class Findings:
    """Tables (``frequency``, ``impulse``), fitted models by name, and numbers beside what theory says."""

    frequency: dict[str, np.ndarray]
    impulse: dict[str, np.ndarray]
    models: dict[str, Transfer]
    numbers: dict[str, Any]


def _interval(value: float, error: float, level: float) -> dict[str, float]:
    half = float(stats.norm.ppf(0.5 + level / 2)) * error
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
