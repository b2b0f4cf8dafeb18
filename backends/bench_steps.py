"""Steps of the engine under known loads, logged: what ``entropic calibrate`` fits a machine from.

Decode steps run on copies of filled caches, dense and under budgets, at several batches and contexts; then prompts of
several lengths are prefilled in chunks of several sizes. The step that fills the copies is left out of the log.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backends.engine import Engine
from backends.filled import FilledCache, FilledEngine
from backends.models import LoadedModel
from backends.prompts import document_ids
from backends.sampling import SamplingParams
from entropic_ctl import config as configs
from entropic_ctl.recording import Recorder
from entropic_ctl.signals import StepPlan

__all__ = ["record_steps"]

BATCHES = (1, 4, 8)
CONTEXTS = (128, 500, 2000, 8000)
THETAS = (0.0, 0.02, 0.1)
CHUNKS = (32, 128, 512)
PROMPTS = (40, 150, 600, 1500)


class _DecodeRecorder(Recorder):
    """Leaves out steps in which a row has no context: a filled engine copies pages there."""

    _filling = False

    def plan(self, plan: StepPlan) -> None:
        self._filling = bool((plan.context == 0).any())
        if not self._filling:
            super().plan(plan)

    def temper(self, *arguments: Any) -> None:
        if not self._filling:
            super().temper(*arguments)

    def observe(self, *arguments: Any) -> None:
        if not self._filling:
            super().observe(*arguments)


def _config(theta_nats: float, **engine: int) -> configs.RunConfig:
    pruning = {"law": "budget", "theta_nats": theta_nats, "theta_wide_nats": theta_nats, "min_context": 0}
    return configs.from_mapping({"engine": engine, "loop": {"pruning": pruning} if theta_nats else {}})


def record_steps(
    model: LoadedModel,
    folder: Path,
    *,
    name: str = "",
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    thetas: Sequence[float] = THETAS,
    chunks: Sequence[int] = CHUNKS,
    prompts: Sequence[int] = PROMPTS,
    steps: int = 6,
    page_tokens: int = 16,
    progress: Callable[[str], None] | None = None,
) -> list[Path]:
    """Run the loads and write one log per (batch, context, theta) and per (chunk, theta).

    Parameters
    ----------
    model : LoadedModel
    folder : Path
        Exists; logs of the same names are replaced.
    name : str
        What the names of the logs begin with.
    batches, contexts, thetas : sequences
        Rows, tokens in the cache of each, and nats (0 is dense) of the decode steps.
    chunks, prompts : sequences of int
        Tokens per prefill step, and of the prompts that are prefilled one after the other.
    steps : int
        Decode steps per batch, context and theta.
    page_tokens : int
    progress : callable(what), optional

    Returns
    -------
    list of Path
    """
    say = progress or (lambda _: None)
    model = dataclasses.replace(model, eos_ids=frozenset())
    text = document_ids(model, max(*contexts, sum(prompts)))
    logs: list[Path] = []
    for context in contexts:
        filled = FilledCache(model, text[:context], page_tokens=page_tokens)
        for theta, batch in itertools.product(thetas, batches):
            say(f"{batch} decode rows, context {context:,}, theta {theta:g}")
            config = _config(
                theta,
                page_tokens=page_tokens,
                pages=batch * -(-(context + steps + 2) // page_tokens) + 1,
                max_batch=batch,
                max_batch_tokens=batch * context,
                prefill_chunk=context,
            )
            logs.append(folder / f"{name}decode-{batch}x{context}-{theta:g}.jsonl")
            with _DecodeRecorder(logs[-1]) as recorder:
                engine = FilledEngine(config, model, filled, recorder=recorder)
                engine.admit(batch, max_new_tokens=steps + 1)
                gc.collect()
                engine.run()
    room = {"page_tokens": page_tokens, "pages": sum(-(-(n + steps) // page_tokens) for n in prompts) + 1}
    for chunk in chunks:
        for theta in (min(thetas), max(thetas)):
            say(f"prefill in chunks of {chunk}, theta {theta:g}")
            logs.append(folder / f"{name}prefill-{chunk}-{theta:g}.jsonl")
            sizes = {"prefill_chunk": chunk, "max_batch_tokens": chunk + len(prompts), "max_batch": len(prompts)}
            with Recorder(logs[-1]) as recorder:
                whole = Engine(_config(theta, **room, **sizes), model, recorder=recorder)
                start = 0
                for n in prompts:
                    whole.submit(text[start : start + n], SamplingParams(max_new_tokens=steps))
                    start += n
                whole.run()
    return logs
