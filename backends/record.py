"""Record an entropy bank from any model the engine runs: what the simulator replays.

Trajectories come from the real engine at one fixed temperature each; the response to the pruning budget is measured
teacher-forced on real text. All randomness derives from one seed: the same model on the same machine
gives the same bank. The shipped ``sim/data/smollm2-135m.npz`` is the default call on the default model in float32.
With a checkpoint folder, an interrupted recording resumes after the last finished part (one temperature, or one
context of one text); the response then agrees with an uninterrupted one up to rounding (other prefill chunks).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from backends.engine import Engine, Output
from backends.models import LoadedModel
from backends.pieces import Arrays, Pieces
from backends.prompts import PROMPTS, Prompt, document_ids
from backends.response import measure_response
from backends.sampling import SamplingParams, TorchLogitView, to_host
from entropic_ctl import bank as banks
from entropic_ctl import config as configs
from entropic_ctl.bank import Bank
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig
from entropic_ctl.signals import FinishReason, FloatArray, StepPlan

__all__ = ["record"]

Progress = Callable[[str, int, int], None]
TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.3, 1.6)
GRID = (0.2, 0.27, 0.35, 0.45, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0)
CONTEXTS = (512, 1024, 2048, 4096, 8000)
POSITIONS = (16, 16, 16, 16, 8)
"""Decode steps measured at each context, per text: fewer at the longest, where each costs most."""
THETAS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)


def record(
    model: LoadedModel,
    *,
    seed: int = 0,
    prompts: Sequence[Prompt] = PROMPTS,
    temperatures: Sequence[float] = TEMPERATURES,
    max_new_tokens: int = 192,
    grid: Sequence[float] = GRID,
    contexts: Sequence[int] = CONTEXTS,
    thetas: Sequence[float] = THETAS,
    texts: int = 2,
    positions: int | Sequence[int] | None = None,
    page_tokens: int = 16,
    pruning: PruningConfig | None = None,
    command: str = "entropic record",
    progress: Progress | None = None,
    checkpoint: Path | None = None,
) -> Bank:
    """Record a bank.

    Parameters
    ----------
    model : LoadedModel
    seed : int
        Root of all random numbers.
    prompts : sequence of Prompt
    temperatures : increasing floats
        Each prompt is sampled once at each.
    max_new_tokens : int
        Longer texts are cut, and marked as not ended.
    grid : increasing floats
        Temperatures at which each step's entropy and varentropy are tabulated.
    contexts, thetas, texts, positions, pruning
        See :func:`backends.response.measure_response`; ``texts`` is how many stretches of the long document are used.
        ``positions`` defaults to ``POSITIONS`` for the default contexts and to 16 for others.
    page_tokens : int
    command : str
        Stamped into the bank: what made it.
    progress : callable(stage, done, total), optional
    checkpoint : Path, optional
        Folder for finished parts; the caller removes it once the bank is written.

    Returns
    -------
    Bank

    Raises
    ------
    BadInputError
        If a list is not increasing, the model is too short for the contexts, or ``checkpoint`` holds another recording.
    """
    say = progress or (lambda *_: None)
    rule = pruning or PruningConfig()
    if positions is None:
        positions = POSITIONS if tuple(contexts) == CONTEXTS else 16
    counts = [positions] * len(contexts) if isinstance(positions, int) else list(positions)
    _require_ranges(model, temperatures=temperatures, grid=grid, contexts=contexts, needed=contexts[-1] + counts[-1])
    pieces = Pieces(
        checkpoint,
        {
            "model": model.name,
            "vocab_size": model.vocab_size,
            "dtype": str(model.model.dtype),
            "seed": seed,
            "prompts": [dataclasses.asdict(prompt) for prompt in prompts],
            "temperatures": list(temperatures),
            "max_new_tokens": max_new_tokens,
            "grid": list(grid),
            "contexts": list(contexts),
            "thetas": list(thetas),
            "texts": texts,
            "positions": counts,
            "page_tokens": page_tokens,
            "pruning": dataclasses.asdict(rule),
        },
    )
    trajectories: list[_Trajectory] = []
    for at, temperature in enumerate(temperatures):
        say("trajectories", at, len(temperatures))
        make = functools.partial(
            _generate,
            model,
            temperature,
            prompts=prompts,
            seeds=[np.random.SeedSequence([seed, at, number]) for number in range(len(prompts))],
            max_new_tokens=max_new_tokens,
            grid=grid,
            page_tokens=page_tokens,
        )
        trajectories += _unpacked(pieces.get(f"trajectories-{at}", lambda make=make: _packed(make())), temperature)
    say("trajectories", len(temperatures), len(temperatures))
    needed = contexts[-1] + counts[-1]
    response = measure_response(
        model,
        [document_ids(model, needed, start=i * needed) for i in range(texts)],
        contexts,
        thetas,
        positions=counts,
        page_tokens=page_tokens,
        pruning=rule,
        progress=lambda done, total: say("response to theta", done, total),
        keep=pieces.get,
    )
    kinds = tuple(dict.fromkeys(prompt.kind for prompt in prompts))
    tables = [t.table for t in trajectories]
    g = len(grid)
    joined = np.concatenate(tables).astype(np.float32)
    return Bank(
        meta={
            "schema": banks.SCHEMA,
            "model": model.name,
            "vocab_size": model.vocab_size,
            "seed": seed,
            "command": command,
            "kinds": list(kinds),
            "page_tokens": page_tokens,
            "dense_layers": rule.dense_layers,
            "sink_pages": rule.sink_pages,
            "recent_pages": rule.recent_pages,
            "prompts": len(prompts),
            "max_new_tokens": max_new_tokens,
            "dtype": str(model.model.dtype).removeprefix("torch."),
            "selection": rule.selection,
            "texts": texts,
            "positions": counts,
        },
        grid=np.asarray(grid, np.float64),
        prompt_kind=np.array([kinds.index(prompts[t.prompt].kind) for t in trajectories], np.int64),
        prompt=np.array([t.prompt for t in trajectories], np.int64),
        temperature=np.array([t.temperature for t in trajectories], np.float64),
        offset=np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int64),
        ended=np.array([t.ended for t in trajectories], np.bool_),
        model_entropy=joined[:, 0],
        entropy_grid=joined[:, 1 : g + 1],
        varentropy_grid=joined[:, g + 1 :],
        theta=np.asarray(thetas, np.float64),
        context=np.asarray(contexts, np.float64),
        **vars(response),
    )


def _require_ranges(
    model: LoadedModel,
    *,
    temperatures: Sequence[float],
    grid: Sequence[float],
    contexts: Sequence[int],
    needed: int,
) -> None:
    """Refuse lists that are not increasing, and contexts beyond the model."""
    for field, values, least in (("temperatures", temperatures, 1), ("grid", grid, 2), ("contexts", contexts, 2)):
        if len(values) < least or values[0] <= 0 or any(b <= a for a, b in itertools.pairwise(values)):
            raise BadInputError("not increasing", field=field, value=list(values), allowed=f"at least {least}, above 0")
    if needed > model.max_context:
        raise BadInputError(
            "the model is too short for these contexts",
            where=model.name,
            field="contexts",
            value=list(contexts),
            allowed=f"<= {model.max_context} tokens, those measured from the last one on included",
            remedy="name shorter contexts",
        )


@dataclasses.dataclass(frozen=True)
class _Trajectory:
    """One text: ``table`` (tokens, 1 + 2 G) holds model entropy, entropies and varentropies on the grid."""

    prompt: int
    temperature: float
    ended: bool
    table: FloatArray


def _packed(trajectories: Sequence[_Trajectory]) -> Arrays:
    return {
        "prompt": np.array([t.prompt for t in trajectories], np.int64),
        "ended": np.array([t.ended for t in trajectories], np.bool_),
        "length": np.array([len(t.table) for t in trajectories], np.int64),
        "table": np.concatenate([t.table for t in trajectories]),
    }


def _unpacked(part: Arrays, temperature: float) -> list[_Trajectory]:
    tables = np.split(part["table"], np.cumsum(part["length"])[:-1])
    return [
        _Trajectory(int(prompt), float(temperature), bool(ended), table)
        for prompt, ended, table in zip(part["prompt"], part["ended"], tables, strict=True)
    ]


class _GridProbe:
    """Collects, per request and token, the entropies of the step's distribution on a grid of temperatures."""

    def __init__(self, grid: Sequence[float]) -> None:
        self._grid = tuple(grid)
        self.rows: dict[int, list[FloatArray]] = {}

    def __call__(self, plan: StepPlan, rows: Any, logits: Tensor) -> None:
        """Tabulate the step (signature of the engine's probe)."""
        view = TorchLogitView(logits)
        pairs = [view.at(np.full(rows.shape[0], t)) for t in self._grid]
        columns = [to_host(view.model_entropy), *(h for h, _ in pairs), *(v for _, v in pairs)]
        for number, values in zip(plan.ids[rows].tolist(), np.stack(columns, axis=1), strict=True):
            self.rows.setdefault(number, []).append(values)


def _generate(
    model: LoadedModel,
    temperature: float,
    *,
    prompts: Sequence[Prompt],
    seeds: Sequence[np.random.SeedSequence],
    max_new_tokens: int,
    grid: Sequence[float],
    page_tokens: int,
) -> list[_Trajectory]:
    """Sample every prompt once at one temperature through the real engine."""
    law = {"law": "fixed", "temperature": temperature, "t_min": min(temperature, 0.3), "t_max": max(temperature, 1.6)}
    ids = [model.prompt_ids(prompt.text, chat=prompt.chat) for prompt in prompts]
    pages = sum(-(-(len(prompt) + max_new_tokens) // page_tokens) for prompt in ids) + 1
    limits = {"pages": pages, "page_tokens": page_tokens, "max_batch": min(len(ids), 16)}
    run = configs.from_mapping({"engine": limits, "loop": {"temperature": law}}, where="record")
    probe = _GridProbe(grid)
    engine = Engine(run, model, probe=probe)
    for prompt, sequence in zip(ids, seeds, strict=True):
        key = int(sequence.generate_state(1, np.uint64)[0] >> 1)
        engine.submit(prompt, SamplingParams(max_new_tokens=max_new_tokens, seed=key))
    outputs: list[Output] = engine.run()
    return [
        _Trajectory(
            prompt=number,
            temperature=float(temperature),
            ended=output.finish is not None and output.finish.reason is FinishReason.EOS,
            table=np.stack(probe.rows[output.id][: len(output.token_ids)]),
        )
        for number, output in enumerate(outputs)
    ]
