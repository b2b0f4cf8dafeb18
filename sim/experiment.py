"""An identification experiment: what is moved and how, who carries the signal, and the records that come back.

The input is u = ln T (about the operating point) or theta. One request is one record, one accepted token one sample.

- *open loop*: the micro law is replaced by a fixed T0, and the excitation moves u (or theta);
- *closed loop*: the config's ``feedback`` law runs, and the excitation is added to its output u or to its target H*.

The experiment brings its own workload: a burst of requests of equal length that run to their limit. It runs in the
simulator here; a caller may run the same laws on the engine. :mod:`sim.identify` reads the records. Source: ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropic_ctl import fields
from entropic_ctl.bank import Bank
from entropic_ctl.config import LawSpec, RunConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray
from entropic_ctl.temperature import fixed
from sim.excitation import KINDS, Excited, ExcitedBudget, make_signal
from sim.replica import Progress, simulate
from sim.streams import stream
from sim.trajectories import bank_of

__all__ = ["Experiment", "Records", "collect", "prepare", "run_simulation"]

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
    bank = bank_of(config) if bank is None else bank
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
