"""Who listens to a run: the events an engine or a replica reports, and how to pass them on to several listeners."""

from __future__ import annotations

from entropic_ctl.signals import Finish, Request, StepPlan, StepResult

__all__ = ["Collector", "Tee"]


class Collector:
    """A listener that ignores every event; override what matters (:class:`entropic_ctl.metrics.Metrics` hears all)."""

    def submitted(self, request: Request) -> None:
        """A request entered the system."""

    def refused(self, finish: Finish, now_s: float | None = None) -> None:
        """A request left outside a step: it can never be served."""

    def cancelled(self, request_id: int, now_s: float) -> None:
        """A live request was cancelled."""

    def step(self, plan: StepPlan, result: StepResult, finished: tuple[Finish, ...]) -> None:
        """One iteration is over."""


class Tee(Collector):
    """Feeds several collectors with the same events.

    Parameters
    ----------
    *collectors : Collector or Metrics
    """

    def __init__(self, *collectors: Collector) -> None:
        self._collectors = collectors

    def submitted(self, request: Request) -> None:
        """Pass on."""
        for collector in self._collectors:
            collector.submitted(request)

    def refused(self, finish: Finish, now_s: float | None = None) -> None:
        """Pass on."""
        for collector in self._collectors:
            collector.refused(finish, now_s)

    def cancelled(self, request_id: int, now_s: float) -> None:
        """Pass on."""
        for collector in self._collectors:
            collector.cancelled(request_id, now_s)

    def step(self, plan: StepPlan, result: StepResult, finished: tuple[Finish, ...]) -> None:
        """Pass on."""
        for collector in self._collectors:
            collector.step(plan, result, finished)
