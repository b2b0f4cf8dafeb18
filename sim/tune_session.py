"""A tuning run with a folder: search, judge the choice on fresh seeds, write everything down.

The folder (see :mod:`sim.campaign`) ends up with ``trials`` (one row per trial: status, settings, mean costs with 95%
intervals, Pareto membership), ``runs`` (one row per simulation), ``pareto.json`` (rule, Pareto set, held-out check),
``tuned.toml`` and one ``pareto/trial-NNN.toml`` per member of the Pareto set.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropic_ctl import config_edit, config_toml, results
from entropic_ctl.config import LAWS, RunConfig
from entropic_ctl.errors import BadInputError
from sim import objectives, runs
from sim import tune as tuner
from sim.campaign import Campaign, definition, open_folder
from sim.intervals import Interval, mean_interval
from sim.runs import Certify
from sim.space import LARGEST, Choice, Dimension, parse_choice, parse_range
from sim.sweep import rows
from sim.tune_space import GAIN, check_space, default_space
from sim.tune_trials import Judged, TuneResult, pareto
from sim.workers import Pool

__all__ = ["ALL_LAWS", "Options", "Outcome", "spaces", "tune"]

ALL_LAWS = tuple(LAWS)
RULE = "lowest weighted sum of mean costs over the search's seeds; the config as given costs 0"


@dataclass(frozen=True)
class Options:
    """What to search and how; see ``entropic tune --help``."""

    trials: int = 40
    repeats: int = 4
    objectives: tuple[str, ...] = ("latency", "throughput", "tau_per_second", "quality")
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    joint: bool = True
    laws: tuple[str, ...] = ALL_LAWS
    ranges: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    sampler: str = "tpe"
    batch: int = 2


@dataclass(frozen=True)
class Outcome:
    """What tuning found.

    Parameters
    ----------
    found : TuneResult
    judged : Judged
        The choice on fresh seeds.
    numbers : dict
        What ``pareto.json`` holds, JSON-able.
    lines : dict
        Objective to one line for people.
    verdict : str
        One sentence on the held-out check.
    """

    found: TuneResult
    judged: Judged
    numbers: dict[str, Any]
    lines: dict[str, str]
    verdict: str


def spaces(config: RunConfig, options: Options, gain_limit: float, theta_top: float) -> dict[str, list[Dimension]]:
    """Return the dimensions per stage: the default ones, with those the caller named added or put in their place.

    Parameters
    ----------
    config : RunConfig
    options : Options
    gain_limit, theta_top : float
        As in :func:`tune`.

    Raises
    ------
    BadInputError
        If a range or choice is malformed, or nothing is left to tune.
    """
    by_law = default_space(config, gain_limit=gain_limit, theta_top=theta_top, laws=options.laws)
    own: list[Dimension] = [
        *(parse_choice(text, "--choice") for text in options.choices),
        *(parse_range(text, "--range") for text in options.ranges),
    ]
    named = {dimension.field for dimension in own}
    by_law = {law: [d for d in space if d.field not in named] for law, space in by_law.items()}
    old = {
        d.field: d
        for space in default_space(config, gain_limit=gain_limit, theta_top=theta_top).values()
        for d in space
    }
    for dimension in own:
        parts = dimension.field.split(".")
        law = parts[1] if parts[0] == "loop" else "other"
        before = old.get(dimension.field)
        if not isinstance(dimension, Choice) and before is not None and not isinstance(before, Choice):
            dimension = dataclasses.replace(dimension, only=before.only, also=before.also)  # noqa: PLW2901
        by_law.setdefault(law, []).append(dimension)
    by_law = {law: space for law, space in by_law.items() if space}
    if not by_law:
        raise BadInputError("nothing to tune", where="tune", remedy="name fields with --range or --choice")
    return {"joint": [d for space in by_law.values() for d in space]} if options.joint else by_law


def _described(stages: Mapping[str, list[Dimension]]) -> dict[str, Any]:
    return {stage: {d.field: repr(d) for d in space} for stage, space in stages.items()}


def tune(
    config: RunConfig,
    options: Options,
    out: Any,
    pool: Pool,
    *,
    gain_limit: float,
    theta_top: float,
    certify: Certify,
    resume: bool = False,
    report: Callable[[str, float], None] | None = None,
) -> Outcome:
    """Search, judge and write.

    Parameters
    ----------
    config : RunConfig
    options : Options
    out : Path
        Folder that grows.
    pool : Pool
        Over :func:`sim.runs.run`, not started.
    gain_limit : float
        Supremum of certified gains; NaN if the law needs none.
    theta_top : float
        Largest theta of the bank, nats.
    certify : callable
        Every trial runs under its verdict.
    resume : bool
    report : callable, optional

    Raises
    ------
    BadInputError
        If options, space or folder are wrong, or the given configuration cannot run.
    """
    goals = objectives.named(options.objectives)
    stages = spaces(config, options, gain_limit, theta_top)
    for space in stages.values():
        check_space(config, space, gain_limit if np.isfinite(gain_limit) else None)
    plan = {**dataclasses.asdict(options), "space": _described(stages), "optuna": importlib.metadata.version("optuna")}
    tried = [value for text in options.choices for value in parse_choice(text, "--choice").values]
    about = definition("tune", config, plan, tried=tried)
    fresh = max(options.repeats, 4)
    total = (options.trials + 2) * options.repeats  # the last two: the held-out comparison
    if total > LARGEST:
        raise BadInputError(
            "too many runs",
            where="tune",
            field="(trials + 2) x repeats",
            value=total,
            allowed=f"<= {LARGEST:,}",
            remedy="lower --trials or --repeats",
        )
    with open_folder(out, about, resume=resume) as campaign, pool:
        campaign.journal.check(options.trials, options.repeats + fresh)

        def told(done: int, trials: int, best: float) -> None:
            if report is not None:
                report(f"trial {done} of {trials}, best weighted cost {best:+.3f}", done * options.repeats / total)

        found = tuner.tune(
            config,
            stages,
            trials=options.trials,
            objectives=goals,
            weights=options.weights,
            sampler=options.sampler,
            repeats=options.repeats,
            batch=options.batch,
            gain_limit=gain_limit if np.isfinite(gain_limit) else None,
            certify=certify,
            pool=pool,
            journal=campaign.journal,
            progress=told,
        )
        if report is not None:
            report("the choice on fresh seeds", options.trials * options.repeats / total)
        judged = tuner.held_out(
            config,
            found,
            goals,
            repeats=fresh,
            first=options.repeats,
            certify=certify,
            pool=pool,
            journal=campaign.journal,
        )
        return _write(campaign, config, found, judged, fresh)


def _bounds(interval: Interval) -> dict[str, float]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def trials_table(found: TuneResult) -> dict[str, np.ndarray]:
    """Return one row per trial.

    Columns: ``trial``, ``stage``, ``status`` ("ok" or "failed"), ``error``, ``pareto`` and ``chosen`` (bool), one per
    tuned field, then ``weighted`` and ``cost.NAME`` per objective, each with ``_low`` and ``_high``.
    """
    front = pareto(np.array([trial.mean for trial in found.trials]))
    lines = []
    for trial, member in zip(found.trials, front.tolist(), strict=True):
        settings = {
            name: trial.settings.get(name) if trial.config is None else config_edit.value_of(trial.config, name)
            for name in found.fields
        }
        each = {"weighted": found.weights @ trial.cost}
        each |= {f"cost.{name}": row for name, row in zip(found.objectives, trial.cost, strict=True)}
        line: dict[str, Any] = {
            "trial": trial.number,
            "stage": trial.stage,
            "status": "failed" if trial.error else "ok",
            "error": trial.error,
            "pareto": member,
            "chosen": trial is found.best,
            **settings,
        }
        for name, values in each.items():
            interval = mean_interval(values)
            line |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
        lines.append(line)
    return runs.table(lines)


def _write(campaign: Campaign, config: RunConfig, found: TuneResult, judged: Judged, fresh: int) -> Outcome:
    stamp = {**results.stamp(config, config.seed), "plan": campaign.about["plan"], "inputs": campaign.about["inputs"]}
    table = trials_table(found)
    planned = [runs.Point(trial.number, trial.settings, trial.config) for trial in found.trials]
    for name, columns in (("trials", table), ("runs", runs.table(rows(planned, campaign.journal.records)))):
        for suffix in ("parquet", "csv"):
            results.write_table(campaign.out / f"{name}.{suffix}", columns, stamp)
    members = []
    for trial in found.trials:
        if not table["pareto"][trial.number] or trial.config is None:
            continue
        file = f"pareto/trial-{trial.number:03d}.toml"
        _toml(campaign, file, trial.config, f"Trial {trial.number}, a member of the Pareto set.")
        each = {n: _bounds(mean_interval(row)) for n, row in zip(found.objectives, trial.cost, strict=True)}
        members.append({"trial": trial.number, "file": file, "settings": dict(trial.settings), "costs": each})
    best = found.best
    _toml(
        campaign,
        "tuned.toml",
        found.config,
        f"Trial {best.number} of {len(found.trials)}: {RULE}.",
        "Made by `entropic tune`. Its certificate: `entropic prove tuned.toml --out cert.json`.",
    )
    verdict = _sentence(found, judged, fresh)
    numbers = {
        "rule": RULE,
        "weights": dict(zip(found.objectives, found.weights.tolist(), strict=True)),
        "trials": len(found.trials),
        "trials_failed": sum(bool(trial.error) for trial in found.trials),
        "chosen": {
            "trial": best.number,
            "settings": dict(best.settings),
            "weighted": _bounds(mean_interval(found.weights @ best.cost)),
        },
        "held_out": {
            "repeats": fresh,
            "verdict": judged.verdict,
            "weighted": _bounds(judged.weighted),
            "costs": {name: _bounds(interval) for name, interval in judged.costs.items()},
        },
        "pareto": members,
    }
    results.write_json(campaign.out / "pareto.json", {**numbers, "stamp": stamp})
    campaign.seal()
    lines = {name: _line(interval) for name, interval in judged.costs.items()}
    settings = {name: config_edit.value_of(found.config, name) for name in (*found.fields, GAIN)}
    shown = {name: value for name, value in settings.items() if value is not None}
    return Outcome(found, judged, numbers, {**lines, "weighted": _line(judged.weighted), **shown}, verdict)


def _line(interval: Interval) -> str:
    return f"{interval.mean:+.4f} [{interval.low:+.4f}, {interval.high:+.4f}]"


def _sentence(found: TuneResult, judged: Judged, fresh: int) -> str:
    if found.best.number == 0:
        return "no trial beat the config as given: tuned.toml is the given one"
    searched = found.weighted(found.best)
    what = {
        "better": "the gain holds up on fresh seeds",
        "worse": "the gain does not hold up: on fresh seeds the tuned config is worse",
        "undecided": "undecided on fresh seeds: the interval holds 0",
    }[judged.verdict]
    return f"{what} (weighted cost {searched:+.4f} in the search, {_line(judged.weighted)} on {fresh} fresh seeds)"


def _toml(campaign: Campaign, name: str, config: RunConfig, *comments: str) -> None:
    with results.atomic(campaign.out / name) as temporary:
        temporary.write_text(config_toml.to_toml(config, comments), encoding="utf-8")
