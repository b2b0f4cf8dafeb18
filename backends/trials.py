"""Timed runs of the real engine on a workload given as columns: real time arrivals, real text, fixed output lengths.

A trial is what the simulator is compared with, and what it is calibrated from. Prompts are pieces of one document, one
per request, of exactly the given length; every text runs to its limit (end-of-text tokens are drawn like any other), so
that both worlds produce the same tokens. Before and after a run a small fixed decode is timed, and during it a small
fixed product of matrices every half second: a run that a busy or slow machine disturbed shows there, whatever its own
load was.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.engine import Engine
from backends.machine import ForeignLoad, SpeedProbe
from backends.models import LoadedModel
from backends.prompts import document_ids
from backends.sampling import SamplingParams
from entropic_ctl import config as configs
from entropic_ctl.certificates import Verdict
from entropic_ctl.config import RunConfig
from entropic_ctl.metrics import Metrics
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["Trial", "endless", "prompts", "reference_step_s", "run_trial", "warm_up"]

_LEAD_S = 0.02
_REFERENCE = {"pages": 64, "page_tokens": 16, "max_batch": 4, "max_batch_tokens": 512, "prefill_chunk": 256}


@dataclass(frozen=True)
class Trial:
    """What one run gave: tables as :class:`entropic_ctl.metrics.Metrics` defines them (arrivals counted from 0).

    ``reference_s`` is the median step of the small fixed decode just before the run, or just after it if that is more;
    ``probe_s`` the mean duration of the fixed product during the run; ``foreign_cores`` the mean number of cores that
    other processes kept busy during it (NaN if unknown).
    """

    requests: dict[str, npt.NDArray[Any]]
    steps: dict[str, npt.NDArray[Any]]
    summary: dict[str, Any]
    reference_s: float
    probe_s: float
    foreign_cores: float


def endless(model: LoadedModel) -> LoadedModel:
    """Return the model without end-of-text tokens: every text runs to its limit."""
    return dataclasses.replace(model, eos_ids=frozenset())


def prompts(model: LoadedModel, prompt_tokens: IntArray, offsets: IntArray) -> list[list[int]]:
    """Return one piece of the document per request.

    Parameters
    ----------
    model : LoadedModel
    prompt_tokens : IntArray, shape (N,)
        Their lengths.
    offsets : IntArray, shape (N,)
        Where they start, tokens into the document.

    Raises
    ------
    BadInputError
        If the document ends before a piece does.
    """
    ids = document_ids(model, int((prompt_tokens + offsets).max()))
    return [ids[start : start + n] for start, n in zip(offsets.tolist(), prompt_tokens.tolist(), strict=True)]


def warm_up(model: LoadedModel, pieces: Sequence[Sequence[int]], config: RunConfig) -> None:
    """Run a few requests, unmeasured, so that no trial pays for what happens only once in a process."""
    loose = dataclasses.replace(config, loop=configs.LoopConfig())
    engine = Engine(loose, endless(model))
    for piece in pieces:
        engine.submit(piece, SamplingParams(max_new_tokens=4))
    engine.run()


def reference_step_s(model: LoadedModel, *, steps: int = 10) -> float:
    """Return the median duration of a decode step of four short sequences, seconds."""
    run = configs.from_mapping({"engine": _REFERENCE})
    engine = Engine(run, endless(model))
    for i in range(4):
        engine.submit([1 + (7 * i + j) % (model.vocab_size - 1) for j in range(32)], SamplingParams(steps + 1, seed=i))
    times = []
    while not engine.idle:
        result = engine.step()
        if result is not None and result.token_ids.shape[0] == 4:
            times.append(result.end_s - result.start_s)
    return statistics.median(times[1:])


def run_trial(
    config: RunConfig,
    model: LoadedModel,
    pieces: Sequence[Sequence[int]],
    arrival_s: FloatArray,
    output_tokens: IntArray,
    *,
    verdict: Verdict | None = None,
    recorder: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> Trial:
    """Run a workload in real time, once.

    Parameters
    ----------
    config : RunConfig
        ``engine``, ``loop`` and ``seed`` (which keys the sampling) are used.
    model : LoadedModel
    pieces : sequence of N token lists
    arrival_s : FloatArray, shape (N,)
        Seconds from the start of the run, non-decreasing.
    output_tokens : IntArray, shape (N,)
        Tokens each request generates.
    verdict : Verdict, optional
    recorder : Recorder, optional
        Writing the log takes time too, of the order of a percent of a step: log both runs of a comparison or neither.
    progress : callable(left, total), optional

    Raises
    ------
    UncertifiedError
        If the temperature law needs a certificate that ``verdict`` does not give.
    """
    model = endless(model)
    reference = reference_step_s(model)
    metrics = Metrics(config.engine.page_tokens)
    engine = Engine(config, model, verdict=verdict, recorder=recorder, metrics=metrics)
    keys = np.random.SeedSequence(config.seed).generate_state(len(pieces), np.uint32).tolist()
    probe = SpeedProbe()
    gc.collect()

    def between_steps(left: int, total: int) -> None:
        probe.sample()
        if progress is not None:
            progress(left, total)

    others = ForeignLoad()
    start_s = engine.now() + _LEAD_S
    for piece, at_s, n, key in zip(pieces, arrival_s.tolist(), output_tokens.tolist(), keys, strict=True):
        engine.submit(piece, SamplingParams(max_new_tokens=n, seed=key), arrival_s=start_s + at_s)
    engine.run(progress=between_steps)
    foreign = others.cores()
    reference = max(reference, reference_step_s(model))
    requests, steps = metrics.requests_table(), metrics.steps_table()
    for table, names in ((requests, ("arrival_s", "left_s")), (steps, ("start_s", "end_s"))):
        for name in names:
            table[name] = table[name] - start_s
    return Trial(requests, steps, dict(metrics.summary()), reference, probe.mean_s, foreign)
