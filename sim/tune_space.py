"""What a tuner may vary: the laws themselves (on, off, which policy) and their gains, inside certified ranges.

The target entropy and the starting temperature are not gains: they say how random the text should be, and stay as given
unless the caller adds a range for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from entropic_ctl import config_edit, registry
from entropic_ctl.config import LAWS, RunConfig
from entropic_ctl.errors import BadInputError
from sim.space import Choice, Dimension, Range

__all__ = ["GAIN", "check_space", "default_space", "settings_of"]

GAIN = "loop.temperature.gain"


def default_space(
    config: RunConfig, *, gain_limit: float = math.nan, theta_top: float = 0.1, laws: Sequence[str] = tuple(LAWS)
) -> dict[str, list[Dimension]]:
    """Return the dimensions of each law table, in the order in which law-by-law tuning visits them.

    Temperature: the given law or ``fixed``; ``gain`` from 5% to 95% of the certified limit (log). Pruning: ``budget``
    or ``off``; ``theta_nats`` from 0.002 to a third of the recorded range (log), the wide budget keeping its ratio.
    Scheduling: every policy; ``beta`` and ``gamma`` of ``entropic`` from 0.1 to 10 (log).

    Parameters
    ----------
    config : RunConfig
    gain_limit : float
        Supremum of certified gains; NaN leaves the gain alone.
    theta_top : float
        Largest recorded theta, nats.
    laws : sequence of str
        Tables to tune.

    Raises
    ------
    BadInputError
        If a table is unknown.
    """
    for law in laws:
        if law not in LAWS:
            raise BadInputError("no such law table", where="--law", value=law, allowed=", ".join(LAWS))
    space: dict[str, list[Dimension]] = {}
    if "temperature" in laws:
        law = config.loop.temperature.name
        dimensions: list[Dimension] = []
        if law != "fixed":
            dimensions.append(Choice("loop.temperature.law", (law, "fixed")))
        if law == "feedback" and math.isfinite(gain_limit):
            only = ("loop.temperature.law", "feedback")
            dimensions.append(Range(GAIN, 0.05 * gain_limit, 0.95 * gain_limit, log=True, only=only))
        space["temperature"] = dimensions
    if "pruning" in laws:
        only, top = ("loop.pruning.law", "budget"), theta_top / 3
        wide = ("loop.pruning.theta_wide_nats",) if config.loop.pruning.name == "budget" else ()
        space["pruning"] = [Choice("loop.pruning.law", ("budget", "off"))]
        if top > 0.002 and wide and float(config_edit.value_of(config, "loop.pruning.theta_nats")) > 0:
            space["pruning"].append(Range("loop.pruning.theta_nats", 0.002, top, log=True, also=wide, only=only))
    if "scheduling" in laws:
        only = ("loop.scheduling.policy", "entropic")
        space["scheduling"] = [
            Choice("loop.scheduling.policy", registry.names(LAWS["scheduling"][0])),
            Range("loop.scheduling.beta", 0.1, 10.0, log=True, only=only),
            Range("loop.scheduling.gamma", 0.1, 10.0, log=True, only=only),
        ]
    return {law: dimensions for law, dimensions in space.items() if dimensions}


def check_space(config: RunConfig, space: Sequence[Dimension], gain_limit: float | None) -> None:
    """Refuse, before anything runs, a space that is empty, names what does not exist or leaves the certified gains.

    Parameters
    ----------
    config : RunConfig
        The starting configuration.
    space : sequence of Dimension
    gain_limit : float or None
        Supremum of certified gains; None does not limit.

    Raises
    ------
    BadInputError
        Naming the field.
    """
    if not space:
        raise BadInputError("nothing to tune", where="tune", field="space", allowed="at least one Range or Choice")
    fields = [dimension.field for dimension in space]
    for dimension in space:
        if fields.count(dimension.field) > 1:
            raise BadInputError("named twice", where="tune", field=dimension.field)
        config_edit.kind(dimension.field, where="tune")
        if dimension.field == "seed":
            raise BadInputError(
                "the seed is not tuned: all trials share theirs",
                where="tune",
                field="seed",
                remedy="pass --seed, or more --repeats",
            )
        if isinstance(dimension, Choice):
            for value in dimension.values:
                config_edit.check_value(dimension.field, value, where="tune")
            continue
        if not dimension.only and config_edit.value_of(config, dimension.field) is None:
            raise BadInputError(
                "no such parameter of the laws in use",
                where="tune",
                field=dimension.field,
                remedy="name a parameter of the law the config selects",
            )
        if GAIN in dimension.also:
            raise BadInputError("a certified gain is tuned by itself", where="tune", field=GAIN)
        certified = gain_limit is None or 0 < dimension.low <= dimension.high < gain_limit
        if dimension.field == GAIN and not certified:
            raise BadInputError(
                "range leaves the certified gains",
                where="tune",
                field=GAIN,
                value=(dimension.low, dimension.high),
                allowed=f"inside (0, {gain_limit:.6g})",
                remedy="narrow the range",
            )
        low, high = (math.ceil, math.floor) if dimension.integer else (float, float)
        for end in (low(dimension.low), high(dimension.high)):
            config_edit.check_value(dimension.field, end, where="tune")
        for path in dimension.also:
            present = config_edit.value_of(config, dimension.field)
            if not present or present <= 0:
                raise BadInputError(
                    "no ratio to keep", where="tune", field=dimension.field, value=present, allowed="> 0"
                )
            config_edit.kind(path, where="tune")


def settings_of(config: RunConfig, space: Sequence[Dimension], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a trial: what was chosen, and the fields that keep their ratio to it.

    Parameters
    ----------
    config : RunConfig
        The starting configuration, from which the ratios are taken.
    space : sequence of Dimension
    chosen : mapping
        Path to value, for the dimensions that exist in this trial.
    """
    out: dict[str, Any] = {}
    for dimension in space:
        if dimension.field not in chosen:
            continue
        value = chosen[dimension.field]
        out[dimension.field] = value
        for path in dimension.also if isinstance(dimension, Range) else ():
            out[path] = value * (config_edit.value_of(config, path) / config_edit.value_of(config, dimension.field))
    return out
