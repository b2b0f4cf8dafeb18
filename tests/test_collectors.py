"""Every event an engine reports reaches every listener, refusals and cancellations included."""

from __future__ import annotations

from rich.console import Console
from tiny_model import tiny_llama

from backends import models
from backends.engine import Engine
from backends.sampling import SamplingParams
from entropic_ctl import config as configs
from entropic_ctl.cli_live import GenerationView
from entropic_ctl.collectors import Tee
from entropic_ctl.metrics import Metrics
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
