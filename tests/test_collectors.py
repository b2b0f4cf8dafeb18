"""Every event an engine reports reaches every listener, refusals and cancellations included."""

from __future__ import annotations

import inspect

import pytest
from rich.console import Console
from tiny_model import tiny_llama

from backends import models
from backends.engine import Engine
from backends.sampling import SamplingParams
from entropic_ctl import config as configs
from entropic_ctl.cli_live import GenerationView
from entropic_ctl.collectors import Collector, Tee
from entropic_ctl.metrics import Metrics
from entropic_ctl.signals import Finish, FinishReason, Request
from paper_repro.guarantee import Guarantee


def test_refused_and_cancelled_requests_pass_through_a_tee() -> None:
    metrics = Metrics(4)
    run = configs.from_mapping({"engine": {"pages": 8, "page_tokens": 4}})
    listeners = Tee(metrics, GenerationView(Console()), Guarantee())
    engine = Engine(run, models.wrap(tiny_llama(), None), metrics=listeners)
    engine.submit(list(range(100)), SamplingParams(max_new_tokens=2))  # more than the pool can ever hold
    gone = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=9))
    engine.submit([1, 2, 3], SamplingParams(max_new_tokens=2))
    engine.step()
    assert engine.cancel(gone)
    engine.run()
    summary = metrics.summary()
    assert [summary[f"requests_{what}"] for what in ("in", "refused", "cancelled", "finished", "live")] == [
        3,
        1,
        1,
        1,
        0,
    ]


EVENTS = ("submitted", "refused", "cancelled", "step")


@pytest.mark.parametrize("kind", [Tee, Metrics, GenerationView, Guarantee])
def test_every_listener_takes_the_events_a_driver_reports(kind: type) -> None:
    for event in EVENTS:
        told = inspect.signature(getattr(Collector, event)).parameters
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
