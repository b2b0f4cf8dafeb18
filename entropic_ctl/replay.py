"""Drive a fresh loop from a recorded log and compare: host decisions bit for bit, temperatures within a tolerance.

Temperatures are compared with a tolerance because the exponential function differs between libraries in the last
bit; everything else the loop decides is float64 on the host and must be equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from entropic_ctl.config import LoopConfig, from_mapping
from entropic_ctl.errors import BadInputError, EntropicError
from entropic_ctl.loop import Loop
from entropic_ctl.recording import FORMAT, finishes, plan_columns
from entropic_ctl.signals import Array, Finish, FinishReason, Request, StepResult

__all__ = ["ReplayReport", "read_events", "replay"]

_MALFORMED = (EntropicError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError)
"""What reading a value of the wrong type, shape or size from a log can raise, here or inside the loop."""


@dataclass
class ReplayReport:
    """Outcome of a replay.

    Attributes
    ----------
    steps, tokens, events : int
        Plans, accepted tokens and events replayed.
    difference : str or None
        The first difference (line, what, recorded and replayed value), or None if there is none.
    largest_temperature_error : float
        Largest |T replayed - T recorded|.
    truncated_line : int or None
        Number of a broken last line that was ignored.
    """

    steps: int = 0
    tokens: int = 0
    events: int = 0
    difference: str | None = None
    largest_temperature_error: float = 0.0
    truncated_line: int | None = None

    @property
    def equal(self) -> bool:
        """True if nothing differed."""
        return self.difference is None


@dataclass
class _ReplayView:
    """Answers the micro law with the recorded evaluations, in turn."""

    model_entropy: Array
    evaluations: list[Any]
    error: float = 0.0
    turn: int = field(default=0)

    def at(self, temperature: Array) -> tuple[Array, Array]:
        if self.turn >= len(self.evaluations):
            raise _Different("number of evaluations", len(self.evaluations), self.turn + 1)
        asked, entropy, varentropy = (np.asarray(part, np.float64) for part in self.evaluations[self.turn])
        self.turn += 1
        if asked.shape != np.shape(temperature):
            raise _Different("shape of T", asked.shape, np.shape(temperature))
        self.error = max(self.error, _distance(asked, np.asarray(temperature, np.float64)))
        return entropy, varentropy


class _Different(Exception):  # noqa: N818 - not an error: the outcome of a comparison
    def __init__(self, what: str, recorded: object, replayed: object) -> None:
        super().__init__(f"{what}: recorded {recorded!r}, replayed {replayed!r}")


def _distance(a: Any, b: Any) -> float:
    """Return max |a - b|, where equal entries (NaN and infinities included) count 0 and NaN against a number inf."""
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    gap = np.abs(np.where(same, 0.0, a) - np.where(same, 0.0, b))
    return float(np.max(np.where(np.isnan(gap), np.inf, gap), initial=0.0))


def read_events(path: Path, report: ReplayReport) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, event) of a log; a broken last line is noted in the report and left out.

    Parameters
    ----------
    path : Path
    report : ReplayReport
        Gets ``truncated_line``.

    Raises
    ------
    BadInputError
        If the file cannot be read or a line is not an event.
    """
    where = str(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BadInputError(f"cannot read log: {error.strerror}", where=where) from None
    lines = raw.split(b"\n")
    if lines[-1]:
        report.truncated_line = len(lines)
    for number, line in enumerate(lines[:-1], start=1):
        try:
            values = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            raise BadInputError("not a JSON line", where=where, line=number, remedy="record the run anew") from None
        if not isinstance(values, dict) or not isinstance(values.get("event"), str):
            raise BadInputError("not an event", where=where, line=number, allowed='{"event": ...}')
        yield number, values


def _loop(header: dict[str, Any], where: str, laws: tuple[Any, Any, Any] | None) -> Loop:
    if header.get("event") != "header":
        raise BadInputError("log does not start with a header", where=where, line=1, value=header.get("event"))
    if header.get("format") != FORMAT:
        raise BadInputError(
            "unknown log format", where=where, line=1, field="format", value=header.get("format"), allowed=str(FORMAT)
        )
    if header["own_laws"] and laws is None:
        raise BadInputError(
            "recorded with laws that no config names",
            where=where,
            line=1,
            field="own_laws",
            remedy="pass the same laws",
        )
    tables = {"engine": header["engine"], "loop": {} if laws is not None else header["loop"]}
    tables["speculation"] = header.get("speculation", {})  # a log from before there was any
    config = from_mapping(tables, where=f"{where}:1")
    loop = config.loop if laws is None else LoopConfig()
    return Loop(loop, config.engine, header["vocab_size"], uncertified=True, laws=laws, speculation=config.speculation)


def _finish(item: list[Any]) -> Finish:
    return Finish(int(item[0]), FinishReason(item[1]), str(item[2]))


def _result(values: dict[str, Any]) -> StepResult:
    arrays: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, list) and name != "finished":
            arrays[name] = np.asarray(value, np.int64 if name in ("token_ids", "tokens", "drafted") else np.float64)
        else:
            arrays[name] = value
    arrays["finished"] = tuple(_finish(item) for item in values["finished"])
    return StepResult(**arrays)


def _compare(what: str, recorded: object, replayed: object) -> None:
    if recorded != replayed:
        raise _Different(what, recorded, replayed)


def _step(loop: Loop, event: dict[str, Any], report: ReplayReport, tolerance: float) -> None:
    """Replay one event; raise :class:`_Different` at a difference."""
    kind = event["event"]
    if kind == "submit":
        values = dict(event["request"])
        values["prefix_hashes"] = tuple(values["prefix_hashes"])
        outcome = loop.submit(Request(**values))
        _compare("refusal", event["refused"], finishes((outcome,))[0] if outcome is not None else None)
    elif kind == "cancel":
        _compare("cancel", event["found"], loop.cancel(event["id"]))
    elif kind == "plan":
        replayed = plan_columns(loop.plan(event["now_s"]))
        report.steps += 1
        for name, value in replayed.items():
            _compare(f"plan.{name}", event[name], value)
    elif kind == "temper":
        view = _ReplayView(np.asarray(event["model_entropy"], np.float64), event["evaluations"])
        positions = event.get("positions")
        tempered = loop.temper(view, None if positions is None else np.asarray(positions, np.int64))
        _compare("number of evaluations", len(view.evaluations), view.turn)
        _compare("valid", event["valid"], tempered.valid.tolist())
        for name in ("tempered_entropy", "varentropy"):
            told = getattr(tempered, name)
            if not _distance(np.asarray(event[name], np.float64), told) <= tolerance:
                raise _Different(name, event[name], told.tolist())
        error = max(view.error, _distance(np.asarray(event["temperature"], np.float64), tempered.temperature))
        report.largest_temperature_error = max(report.largest_temperature_error, error)
        if not error <= tolerance:
            raise _Different("temperature", event["temperature"], tempered.temperature.tolist())
    elif kind == "stop_pruning":
        loop.stop_pruning(event["why"])
    elif kind == "observe":
        result = _result(event["result"])
        report.tokens += int(result.token_ids.shape[0])
        _compare("left", event["left"], finishes(loop.observe(result)))
    else:
        raise ValueError(f"unknown event {kind!r}")


def replay(path: str | Path, *, tolerance: float = 1e-9, laws: tuple[Any, Any, Any] | None = None) -> ReplayReport:
    """Replay a recorded log through a fresh loop.

    Parameters
    ----------
    path : path
        Written by :class:`entropic_ctl.recording.Recorder`.
    tolerance : float
        Largest allowed |difference| in any temperature.
    laws : tuple, optional
        (temperature, pruning, scheduling), needed exactly when the loop was recorded with law objects of its own.

    Returns
    -------
    ReplayReport
        Stops at the first difference. No certificate is asked for: a replay decides nothing.

    Raises
    ------
    BadInputError
        If the log is missing, empty or malformed, with the line number; a broken *last* line is reported instead.
    """
    where, report = str(path), ReplayReport()
    events = read_events(Path(path), report)
    header = next(events, None)
    if header is None:
        raise BadInputError("empty log", where=where, allowed="a header line and events")
    try:
        loop = _loop(header[1], where, laws)
    except BadInputError:
        raise
    except _MALFORMED as error:
        raise BadInputError(f"malformed header: {error}", where=where, line=1) from None
    for number, event in events:
        try:
            with np.errstate(all="ignore"):
                _step(loop, event, report, tolerance)
        except _Different as error:
            report.difference = f"line {number}: {error}"
            return report
        except _MALFORMED as error:
            raise BadInputError(f"malformed event: {error}", where=where, line=number) from None
        report.events += 1
    return report
