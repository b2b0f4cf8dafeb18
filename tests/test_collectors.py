from __future__ import annotations

import inspect

import pytest

from entropic_ctl.collectors import Collector, Listener, Tee
from entropic_ctl.metrics import Metrics
from entropic_ctl.signals import Finish, FinishReason, Request

EVENTS = ("submitted", "refused", "cancelled", "step")


@pytest.mark.parametrize("kind", [Collector, Tee, Metrics])
def test_every_listener_takes_the_events_a_driver_reports(kind: type) -> None:
    for event in EVENTS:
        told = inspect.signature(getattr(Listener, event)).parameters
        assert list(inspect.signature(getattr(kind, event)).parameters) == list(told)


def test_tee_passes_every_event_on_in_order() -> None:
    class Log(Collector):
        def submitted(self, request: Request) -> None:
            seen.append((self, request.id))

        def refused(self, finish: Finish, now_s: float | None = None) -> None:
            seen.append((self, finish.id, now_s))

        def cancelled(self, request_id: int, now_s: float) -> None:
            seen.append((self, request_id, now_s))

    seen: list[tuple[object, ...]] = []
    a, b = Log(), Log()
    tee = Tee(a, b)
    tee.submitted(Request(1, 0.0, 1, 1))
    tee.refused(Finish(2, FinishReason.REJECTED), 0.5)
    tee.cancelled(3, 1.5)
    assert seen == [(a, 1), (b, 1), (a, 2, 0.5), (b, 2, 0.5), (a, 3, 1.5), (b, 3, 1.5)]
