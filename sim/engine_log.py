"""An engine log as data for a regression: one row per iteration, what it was asked (its load) and how long it took.

A log is what ``entropic generate --log`` and :class:`entropic_ctl.recording.Recorder` write. An iteration lasts from
its plan to the next one if that followed at once, so that what the host does between two steps is charged too; before
an idle wait, and at the end of the log, it lasts until its tokens are there, plus the log's median time between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from entropic_ctl.config import RunConfig, from_mapping
from entropic_ctl.errors import BadInputError
from entropic_ctl.recording import FORMAT
from entropic_ctl.replay import ReplayReport, read_events
from entropic_ctl.signals import FloatArray, IntArray
from sim.load import StepLoad, measure

__all__ = ["EngineLog", "read_log", "read_logs"]

_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
_LATEST_S = 1e10
_REMEDY = "record the run anew"
_COLUMNS = {
    "context": ("iu", 0, 2**31 - 1, "integers in [0, 2^31 - 1]"),
    "n_tokens": ("iu", 1, 2**24, "integers in [1, 2^24]"),
    "samples": ("b", False, True, "true or false"),
    "theta_nats": ("iuf", 0.0, np.inf, "numbers >= 0"),
    "kept_fraction": ("iuf", 0.0, 1.0, "numbers in [0, 1]"),
}
"""Of each column of an iteration: kinds of numbers, lowest, highest, and the two in words."""


@dataclass(frozen=True)
class EngineLog:
    """Iterations of one or several logs, columns of length S.

    Parameters
    ----------
    load : dict of str to FloatArray
        The fields of :class:`sim.load.StepLoad`.
    law : array of str
        Temperature law.
    prunes : bool array
        Whether the pruning law was on (pages are sealed then, whoever is pruned).
    dense_layers, protected_tokens : IntArray
        Leading layers that are never pruned, and tokens in pages that are always read.
    seconds : FloatArray
        Duration, the time to the next plan included.
    between_s : FloatArray
        That time alone; NaN where the next plan did not follow at once.
    page_tokens : int
    """

    load: dict[str, FloatArray]
    law: np.ndarray
    prunes: np.ndarray
    dense_layers: IntArray
    protected_tokens: IntArray
    seconds: FloatArray
    between_s: FloatArray
    page_tokens: int

    def __len__(self) -> int:
        return int(self.seconds.shape[0])

    def take(self, index: np.ndarray) -> EngineLog:
        """Return the iterations at ``index`` (bool or int)."""
        columns = {name: getattr(self, name)[index] for name in _PER_STEP}
        return EngineLog({name: x[index] for name, x in self.load.items()}, **columns, page_tokens=self.page_tokens)


_PER_STEP = ("law", "prunes", "dense_layers", "protected_tokens", "seconds", "between_s")


def _header(event: Mapping[str, Any], where: str) -> RunConfig:
    if event.get("event") != "header":
        raise BadInputError(
            "log does not start with a header",
            where=where,
            line=1,
            value=event.get("event"),
            remedy="record a run with `entropic generate --log FILE`",
        )
    if event.get("format") != FORMAT:
        raise BadInputError(
            "unknown log format",
            where=where,
            line=1,
            field="format",
            value=event.get("format"),
            allowed=str(FORMAT),
            remedy=_REMEDY,
        )
    try:
        return from_mapping({"engine": event["engine"], "loop": event["loop"]}, where=f"{where}:1")
    except KeyError as error:
        raise BadInputError("malformed header", where=where, line=1, field=str(error.args[0])) from None


def _seconds(event: Mapping[str, Any], field: str, since_s: float = 0.0) -> float:
    value = event[field]
    if type(value) not in (int, float) or not since_s <= value <= _LATEST_S:
        allowed = f"seconds in [{since_s:.17g}, {_LATEST_S:g}]; time does not go back"
        raise BadInputError("not a time", field=field, value=value, allowed=allowed, remedy=_REMEDY)
    return float(value)


def _column(event: Mapping[str, Any], field: str) -> np.ndarray:
    kinds, low, high, allowed = _COLUMNS[field]
    values = event[field]
    found = np.asarray(values)
    if not isinstance(values, list) or found.ndim != 1 or (found.size and found.dtype.kind not in kinds):
        bad: object = values
    elif not (good := (found >= low) & (found <= high)).all():
        bad = values[int(np.argmin(good))]
    else:
        return found
    raise BadInputError("not a column", field=field, value=bad, allowed=allowed, remedy=_REMEDY)


def _load(plan: Mapping[str, Any], result: Mapping[str, Any], protected_tokens: int) -> StepLoad:
    context, tokens = _column(plan, "context").astype(np.int64), _column(plan, "n_tokens").astype(np.int64)
    samples, theta = _column(plan, "samples").astype(np.bool_), _column(plan, "theta_nats").astype(np.float64)
    kept = _column(result, "kept_fraction").astype(np.float64)
    if not context.shape == tokens.shape == samples.shape == theta.shape == kept.shape:
        raise ValueError("columns of different lengths")
    return measure(context, tokens, samples, theta, kept, protected_tokens=protected_tokens)


def read_log(path: str | Path) -> EngineLog:
    """Read one log.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    EngineLog

    Raises
    ------
    BadInputError
        If the file is missing, empty or malformed (with the line), or holds no iteration; a broken last line, of a
        process that was killed, is left out.
    """
    where, report = str(path), ReplayReport()
    events = read_events(Path(path), report)
    first = next(events, None)
    if first is None:
        raise BadInputError("empty log", where=where, allowed="a header line and events")
    config = _header(first[1], where)
    pruning = config.loop.pruning.config
    page = config.engine.page_tokens
    protected = (pruning.sink_pages + pruning.recent_pages) * page
    loads: list[StepLoad] = []
    seconds: list[float] = []
    between: list[float] = []
    plan: Mapping[str, Any] | None = None
    end_s: float | None = None
    latest_s = 0.0
    for number, event in events:
        try:
            if event["event"] == "plan":
                now_s = latest_s = _seconds(event, "now_s", latest_s)
                if end_s is not None and event["ids"]:
                    between[-1] = now_s - end_s
                plan, end_s = event, None
            elif event["event"] == "observe":
                if plan is None:
                    raise ValueError("a result without a plan")
                result = event["result"]
                end_s = latest_s = _seconds(result, "end_s", latest_s)
                lasted = end_s - _seconds(result, "start_s")
                if not lasted > 0.0:
                    raise ValueError(f"an iteration of {lasted} s")
                loads.append(_load(plan, result, protected))
                seconds.append(lasted)
                between.append(np.nan)
                plan = None
        except BadInputError as error:
            raise error.inside(where, line=number) from None
        except _MALFORMED as error:
            raise BadInputError(f"malformed event: {error}", where=where, line=number) from None
    if not loads:
        raise BadInputError("no iteration in the log", where=where, remedy="record a run that generates tokens")
    gap = np.asarray(between)
    usual = float(np.median(gap[~np.isnan(gap)])) if not np.isnan(gap).all() else 0.0
    return EngineLog(
        {name: np.array([getattr(x, name) for x in loads], np.float64) for name in StepLoad._fields},
        np.full(len(loads), config.loop.temperature.name),
        np.full(len(loads), config.loop.pruning.name != "off"),
        np.full(len(loads), pruning.dense_layers, np.int64),
        np.full(len(loads), protected, np.int64),
        np.asarray(seconds) + np.where(np.isnan(gap), usual, gap),
        gap,
        page,
    )


def read_logs(paths: Sequence[str | Path]) -> EngineLog:
    """Read several logs of one engine, in order.

    Raises
    ------
    BadInputError
        If one cannot be read, there is none, or their page sizes differ.
    """
    logs = [read_log(path) for path in paths]
    if not logs:
        raise BadInputError("no log", where="calibrate", allowed="at least one file")
    sizes = {log.page_tokens: str(path) for path, log in zip(paths, logs, strict=True)}
    if len(sizes) > 1:
        raise BadInputError(
            "logs of engines with different page sizes",
            where=list(sizes.values())[-1],
            field="engine.page_tokens",
            value=sorted(sizes),
            remedy="calibrate each on its own",
        )
    return EngineLog(
        {name: np.concatenate([log.load[name] for log in logs]) for name in StepLoad._fields},
        **{name: np.concatenate([getattr(log, name) for log in logs]) for name in _PER_STEP},
        page_tokens=logs[0].page_tokens,
    )
