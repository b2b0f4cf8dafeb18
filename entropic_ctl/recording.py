"""Write down every call that crosses a loop's boundary, one JSON object per line.

Floats are written with the shortest text that reads back to the same bits (non-finite ones as NaN and Infinity, as
Python's ``json`` does). Each line is flushed as it is written, so a killed process leaves at most one broken last line.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import Array, Finish, IntArray, LogitView, Request, StepPlan, StepResult, Tempered

__all__ = ["FORMAT", "RecordedView", "Recorder", "finishes", "host_array", "plan_columns", "result_columns"]

FORMAT = 1
"""Version of the log format."""

_PLAN = (
    "ids", "slots", "context", "n_tokens", "samples", "greedy", "theta_nats", "n_draft",
    "paused", "preempted", "admitted",
)  # fmt: skip
_TEMPERED = ("temperature", "model_entropy", "tempered_entropy", "varentropy", "valid")


def host_array(values: Array) -> Any:
    """Return an array of any library as float64 NumPy."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double()
    return np.asarray(values, np.float64)


def finishes(items: tuple[Finish, ...]) -> list[list[Any]]:
    """Return finishes as plain lists."""
    return [[item.id, str(item.reason), item.detail] for item in items]


def plan_columns(plan: StepPlan) -> dict[str, Any]:
    """Return the decisions of a plan as plain lists; the block table follows from ``allocated``."""
    out: dict[str, Any] = {name: getattr(plan, name).tolist() for name in _PLAN}
    return {
        "step": plan.step,
        "now_s": plan.now_s,
        **out,
        "allocated": plan.allocated.tolist(),
        "rejected": finishes(plan.rejected),
    }


def result_columns(result: StepResult) -> dict[str, Any]:
    """Return a step result as plain lists."""
    out: dict[str, Any] = {}
    for name, value in result._asdict().items():
        out[name] = value.tolist() if isinstance(value, np.ndarray) else value
    out["finished"] = finishes(result.finished)
    return out


class RecordedView:
    """A :class:`LogitView` that remembers every evaluation made through it."""

    def __init__(self, view: LogitView) -> None:
        self._view = view
        self.evaluations: list[list[list[float]]] = []

    @property
    def model_entropy(self) -> Array:
        """The wrapped view's."""
        return self._view.model_entropy

    def at(self, temperature: Array) -> tuple[Array, Array]:
        """Evaluate the wrapped view and remember (T, H, V)."""
        entropy, varentropy = self._view.at(temperature)
        self.evaluations.append([host_array(part).tolist() for part in (temperature, entropy, varentropy)])
        return entropy, varentropy


class Recorder:
    """Append-only event log of one loop.

    Parameters
    ----------
    target : path or text stream
        A path is created with the first event (an existing file is replaced then, not before) and closed by
        :meth:`close` or the ``with`` statement.

    Raises
    ------
    BadInputError
        When the first event is written, if the file cannot be.
    """

    def __init__(self, target: str | Path | IO[str]) -> None:
        self._path = Path(target) if isinstance(target, str | Path) else None
        self._stream: IO[str] | None = None if isinstance(target, str | Path) else target

    def _open(self) -> IO[str]:
        if self._stream is None:
            if self._path is None:
                raise BadInputError("the log is closed", where="Recorder")
            try:
                self._stream = self._path.open("w", encoding="utf-8", newline="\n")
            except OSError as error:
                raise BadInputError(f"cannot write log: {error.strerror}", where=str(self._path)) from None
        return self._stream

    def write(self, event: str, **values: Any) -> None:
        """Write one event."""
        stream = self._open()
        stream.write(json.dumps({"event": event, **values}, separators=(",", ":")) + "\n")
        stream.flush()

    def submit(self, request: Request, outcome: Finish | None) -> None:
        """Record a submission and its answer."""
        refused = finishes((outcome,))[0] if outcome is not None else None
        self.write("submit", request=dataclasses.asdict(request), refused=refused)

    def plan(self, plan: StepPlan) -> None:
        """Record a plan."""
        self.write("plan", **plan_columns(plan))

    def temper(self, view: RecordedView, tempered: Tempered, positions: IntArray | None = None) -> None:
        """Record what the micro law asked and what it answered, and of how many positions if not as planned."""
        outcome = {name: getattr(tempered, name).tolist() for name in _TEMPERED}
        if positions is not None:
            outcome["positions"] = positions.tolist()
        self.write("temper", evaluations=view.evaluations, **outcome)

    def observe(self, result: StepResult, finished: tuple[Finish, ...]) -> None:
        """Record a step result and who left."""
        self.write("observe", result=result_columns(result), left=finishes(finished))

    def close(self) -> None:
        """Close the file, if the recorder opened it."""
        if self._path is not None and self._stream is not None:
            self._stream.close()

    def __enter__(self) -> Self:
        """Return the recorder."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the recorder."""
        self.close()
