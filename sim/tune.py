r"""A thin tuner: two or three gains of a loop, searched inside the ranges the caller states, on the simulator.

Every trial replays the same workload with the same random numbers (one root seed), so differences between trials are
due to the gains. The search is Optuna's tree-structured Parzen estimator with a fixed seed; the configuration as given
is evaluated first, so the result is never worse than it on this workload.

The default objective (ours, lower is better, 0 for the configuration as given) adds three logarithmic or linear costs::

    J = ln(L / L_0) + (KL - KL_0) / 0.01 nats + ln(E / E_0) / 2

with L the normalised latency (sum of end-to-end times over sum of output tokens, so that shorter texts do not count as
speed), KL the recorded divergence per token from dense attention, and E the mean square of the tempered entropy about
its target. The last term is left out for laws without a target.

Certified gains: the caller passes ``gain_limit`` (the supremum of certified gains). A range that leaves (0, gain_limit)
is refused, and with ``certify`` every trial runs under a verdict of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropic_ctl.bank import Bank
from entropic_ctl.certificates import Verdict
from entropic_ctl.config import LawSpec, LoopConfig, RunConfig
from entropic_ctl.errors import BadInputError
from sim.replica import SimulationResult, simulate
from sim.trajectories import load_bank

__all__ = ["Gain", "TuneResult", "default_objective", "tune", "with_gains"]

GAIN_FIELD = "temperature.gain"
KL_SCALE_NATS = 0.01

Objective = Callable[[SimulationResult, SimulationResult], float]
"""Maps (result of a trial, result of the configuration as given) to a cost."""


@dataclass(frozen=True)
class Gain:
    """One number to tune.

    Parameters
    ----------
    field : str
        ``"table.parameter"`` of the loop, for example ``"pruning.theta_nats"``.
    low, high : float
        Range, both ends included.
    log : bool
        Search in the logarithm.
    also : tuple of str
        Further fields that move with it, keeping their ratio to it in the starting loop (not the temperature gain).
    """

    field: str
    low: float
    high: float
    log: bool = False
    also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise BadInputError("empty range", where="Gain", field=self.field, value=(self.low, self.high))
        if self.log and self.low <= 0:
            raise BadInputError("a logarithmic range starts above 0", where="Gain", field=self.field, value=self.low)


@dataclass(frozen=True)
class TuneResult:
    """The tuned loop, its cost, and one row per trial (columns ``trial``, ``objective`` and one per gain)."""

    loop: LoopConfig
    objective: float
    trials: dict[str, np.ndarray]


def _place(loop: LoopConfig, field: str) -> tuple[str, str, float]:
    """Return (table, parameter, present value) of ``"table.parameter"``."""
    table, _, name = field.partition(".")
    spec = getattr(loop, table, None)
    if not isinstance(spec, LawSpec) or name not in {f.name for f in dataclasses.fields(spec.config)}:
        raise BadInputError(
            "no such parameter of the loop",
            where="tune",
            field=field,
            allowed="TABLE.PARAMETER of the laws in use",
            remedy="name a parameter of the law the config selects",
        )
    return table, name, float(getattr(spec.config, name))


def with_gains(loop: LoopConfig, values: dict[str, float]) -> LoopConfig:
    """Return the loop with ``"table.parameter"`` fields replaced.

    Raises
    ------
    BadInputError
        If a field does not exist or a value is out of its range.
    """
    tables: dict[str, dict[str, float]] = {}
    for field, value in values.items():
        table, name, _ = _place(loop, field)
        tables.setdefault(table, {})[name] = value
    specs: dict[str, Any] = {}
    for table, changes in tables.items():
        spec = getattr(loop, table)
        specs[table] = LawSpec(spec.name, dataclasses.replace(spec.config, **changes))
    return dataclasses.replace(loop, **specs)


def _moved(loop: LoopConfig, gains: Sequence[Gain], chosen: Sequence[float]) -> dict[str, float]:
    """Return the fields of a trial: each gain's own, and those that keep their ratio to it."""
    values = {}
    for gain, value in zip(gains, chosen, strict=True):
        values[gain.field] = value
        present = _place(loop, gain.field)[2]
        for field in gain.also:
            if present <= 0:
                raise BadInputError("no ratio to keep", where="tune", field=gain.field, value=present, allowed="> 0")
            values[field] = value * (_place(loop, field)[2] / present)
    return values


def _latency(result: SimulationResult) -> float:
    requests = result.requests
    tokens = float(requests["output_tokens"].sum())
    return float(np.nansum(requests["e2e_s"])) / tokens if tokens else math.inf


def default_objective(result: SimulationResult, given: SimulationResult) -> float:
    """Return J of the module, relative to the configuration as given."""
    divergence = float(result.summary["kl_nats_mean"]) - float(given.summary["kl_nats_mean"])
    cost = math.log(_latency(result) / _latency(given)) + divergence / KL_SCALE_NATS
    spread, reference = (
        result.summary.get("tempered_target_mean_square"),
        given.summary.get("tempered_target_mean_square"),
    )
    if spread and reference:
        cost += 0.5 * math.log(spread / reference)
    return cost


def _check_gains(gains: Sequence[Gain], gain_limit: float | None) -> None:
    if not gains:
        raise BadInputError("nothing to tune", where="tune", field="gains", allowed="at least one Gain")
    for gain in gains:
        if GAIN_FIELD in gain.also:
            raise BadInputError("a certified gain is tuned by itself", where="tune", field=GAIN_FIELD)
        if gain.field == GAIN_FIELD and gain_limit is not None and not 0 < gain.low <= gain.high < gain_limit:
            raise BadInputError(
                "range leaves the certified gains",
                where="tune",
                field=gain.field,
                value=(gain.low, gain.high),
                allowed=f"inside (0, {gain_limit:.6g})",
                remedy="narrow the range",
            )


def tune(
    config: RunConfig,
    gains: Sequence[Gain],
    *,
    trials: int = 20,
    gain_limit: float | None = None,
    certify: Callable[[LoopConfig], Verdict] | None = None,
    objective: Objective = default_objective,
    bank: Bank | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> TuneResult:
    """Search the gains.

    Parameters
    ----------
    config : RunConfig
        Workload, engine, starting loop and root seed; the seed also seeds the search.
    gains : sequence of Gain
    trials : int
        Simulations in all, the configuration as given included; at least 1.
    gain_limit : float, optional
        Supremum of certified gains of ``temperature.gain``.
    certify : callable, optional
        Returns the verdict under which a loop runs. Without it the trials run uncertified, inside ``gain_limit``.
    objective : callable
        Cost of (trial, configuration as given); not finite counts as worst.
    bank : Bank, optional
        In place of the configured one; read once for all trials.
    progress : callable, optional
        ``progress(trials done, trials in all, best cost)``.

    Raises
    ------
    BadInputError
        If a range or field is wrong, or Optuna is not installed.
    """
    _check_gains(gains, gain_limit)
    if trials < 1:
        raise BadInputError("out of range", where="tune", field="trials", value=trials, allowed=">= 1")
    try:
        import optuna
    except ImportError:
        raise BadInputError(
            "Optuna is not installed", where="tune", remedy="pip install 'entropic-ctl[sweep]'"
        ) from None
    used = load_bank(config.cost.bank, seed=config.seed, prompts=config.cost.bank_prompts) if bank is None else bank

    def run(loop: LoopConfig) -> SimulationResult:
        verdict = certify(loop) if certify is not None else None
        return simulate(dataclasses.replace(config, loop=loop), verdict=verdict, uncertified=certify is None, bank=used)

    given = run(config.loop)
    rows: list[tuple[float, ...]] = [
        (objective(given, given), *(_place(config.loop, gain.field)[2] for gain in gains)),
    ]
    best_loop, best = config.loop, rows[0][0]
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=config.seed % 2**32, n_startup_trials=5))
        for done in range(1, trials):
            trial = study.ask()
            chosen = [trial.suggest_float(gain.field, gain.low, gain.high, log=gain.log) for gain in gains]
            loop = with_gains(config.loop, _moved(config.loop, gains, chosen))
            cost = objective(run(loop), given)
            cost = cost if math.isfinite(cost) else math.inf
            study.tell(trial, cost if math.isfinite(cost) else 1e9)
            rows.append((cost, *chosen))
            if cost < best:
                best_loop, best = loop, cost
            if progress is not None:
                progress(done + 1, trials, best)
    finally:
        optuna.logging.set_verbosity(verbosity)
    table = {"trial": np.arange(len(rows)), "objective": np.array([row[0] for row in rows])}
    for i, gain in enumerate(gains):
        table[gain.field] = np.array([row[i + 1] for row in rows])
    return TuneResult(best_loop, best, table)
