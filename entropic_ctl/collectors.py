"""What drivers feed: the events of a run, and how several collectors listen to the same ones."""

from __future__ import annotations

from typing import Protocol

from entropic_ctl.signals import Finish, Request, StepPlan, StepResult

__all__ = ["Collector", "Listener", "Tee"]


class Listener(Protocol):
    """The events a driver (simulator or engine) reports; :class:`entropic_ctl.metrics.Metrics` is one listener."""

    def submitted(self, request: Request) -> None:
        """A request entered."""
        ...

    def refused(self, finish: Finish, now_s: float | None = None) -> None:
        """A request was refused, at ``now_s`` where the driver knows it."""
        ...

    def cancelled(self, request_id: int, now_s: float) -> None:
        """A live request was cancelled."""
        ...

    def step(self, plan: StepPlan, result: StepResult, finished: tuple[Finish, ...]) -> None:
        """One iteration is over."""
        ...


class Collector:
    """A listener that ignores every event; subclasses override those they need."""

    def submitted(self, request: Request) -> None:
        """Ignore."""

    def refused(self, finish: Finish, now_s: float | None = None) -> None:
        """Ignore."""

    def cancelled(self, request_id: int, now_s: float) -> None:
        """Ignore."""

    def step(self, plan: StepPlan, result: StepResult, finished: tuple[Finish, ...]) -> None:
        """Ignore."""


class Tee:
    """Feeds several listeners with the same events.

    Parameters
    ----------
    listeners : Listener
        In the order in which they are told.
    """

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def submitted(self, request: Request) -> None:
        """Pass on."""
        for listener in self._listeners:
            listener.submitted(request)

    def refused(self, finish: Finish, now_s: float | None = None) -> None:
        """Pass on."""
        for listener in self._listeners:
            listener.refused(finish, now_s)

    def cancelled(self, request_id: int, now_s: float) -> None:
        """Pass on."""
        for listener in self._listeners:
            listener.cancelled(request_id, now_s)

    def step(self, plan: StepPlan, result: StepResult, finished: tuple[Finish, ...]) -> None:
        """Pass on."""
        for listener in self._listeners:
            listener.step(plan, result, finished)
