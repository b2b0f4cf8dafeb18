"""The live world: the engine decodes the same prompts with the same seeds under each law, and the text reacts.

All texts of an arm decode as one batch and run to the same length (end-of-text tokens are drawn like any other; where
the first one fell is reported). The run at fixed T also tabulates every distribution over temperature, so the laws can
be replayed on exactly these texts: replay and live then differ by the reaction of the text alone. Source: ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.engine import Engine
from backends.models import LoadedModel
from backends.prompts import PROMPTS, document_ids
from backends.record import GRID
from backends.sampling import SamplingParams, TorchLogitView
from backends.trials import endless
from entropic_ctl.config import RunConfig
from entropic_ctl.metrics import Metrics
from entropic_ctl.signals import FloatArray, IntArray
from paper_repro.variance_texts import OwnTargets, Texts

__all__ = ["Live", "decode", "prompts", "tabulated"]

_PIECE, _STRIDE = 96, 2300
"""Length of a document prompt, and how far apart they lie, in tokens."""


@dataclass(frozen=True)
class Live:
    """One run of the engine over B texts of L tokens.

    Parameters
    ----------
    entropy, temperature : FloatArray, shape (B, L)
        Tempered entropy (nats) and T of every token.
    ended : IntArray, shape (B,)
        Tokens before the first end-of-text token; L if there is none.
    table : FloatArray, shape (B, L, 2 G)
        Entropy and varentropy on the grid; empty if they were not tabulated.
    """

    entropy: FloatArray
    temperature: FloatArray
    ended: IntArray
    table: FloatArray


def prompts(model: LoadedModel, count: int) -> list[tuple[str, list[int]]]:
    """Return (kind, token ids) of ``count`` prompts: the built-in ones, then pieces of the long document."""
    built = [(prompt.kind, model.prompt_ids(prompt.text, chat=prompt.chat)) for prompt in PROMPTS[:count]]
    pieces = max(0, count - len(built))
    if pieces:
        ids = document_ids(model, _STRIDE * pieces)
        built += [("document", ids[_STRIDE * i : _STRIDE * i + _PIECE]) for i in range(pieces)]
    return built


def decode(
    config: RunConfig,
    model: LoadedModel,
    texts: Sequence[tuple[str, list[int]]],
    *,
    tokens: int,
    seed: int,
    law: OwnTargets | None = None,
    tabulate: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Live:
    """Decode every text once.

    Parameters
    ----------
    config : RunConfig
        With the ``fixed`` law at T0; ``engine`` is widened to hold all texts in one batch.
    model : LoadedModel
    texts : sequence of (kind, token ids)
    tokens : int
        Of each text.
    seed : int
        Keys the random numbers of every text, the same for every law.
    law : OwnTargets, optional
        In place of fixed T. The caller has seen to its certificate: a law with a target per text is none the config
        can name, so the engine runs it as uncertified.
    tabulate : bool
        Keep each distribution's entropies over temperature.
    progress : callable(share), optional
    """
    model = endless(model)
    page = config.engine.page_tokens
    pages = sum(-(-(len(ids) + tokens) // page) for _, ids in texts) + 1
    limits = dataclasses.replace(
        config.engine,
        pages=pages,
        max_batch=len(texts),
        max_live=len(texts),
        max_batch_tokens=max(config.engine.max_batch_tokens, 512),
    )
    metrics, table = Metrics(page, keep_tokens=True), _Table(GRID) if tabulate else None

    def probe(plan: Any, rows: Any, logits: Any) -> None:
        if law is not None:
            law.rows = plan.ids[rows]
        if table is not None:
            table(plan.ids[rows], logits)

    own = None if law is None else (law, *config.loop.build()[1:])
    engine = Engine(
        dataclasses.replace(config, engine=limits), model, laws=own, uncertified=True, metrics=metrics, probe=probe
    )
    keys = np.random.SeedSequence([seed, 1]).generate_state(len(texts), np.uint32).tolist()
    for (_, ids), key in zip(texts, keys, strict=True):
        engine.submit(ids, SamplingParams(max_new_tokens=tokens, seed=key), arrival_s=0.0)
    done = 0
    while not engine.idle:
        result = engine.step()
        done += 0 if result is None else int(result.token_ids.shape[0])
        if progress is not None:
            progress(done / (tokens * len(texts)))
    columns = metrics.tokens_table()
    order = np.lexsort((columns["index"], columns["id"]))
    shape = (len(texts), tokens)
    stops = _stops(model, [engine.outputs[i].token_ids for i in range(len(texts))])
    return Live(
        columns["tempered_entropy"][order].astype(float).reshape(shape),
        columns["temperature"][order].astype(float).reshape(shape),
        stops,
        np.zeros(0) if table is None else np.stack([np.stack(table.rows[i]) for i in range(len(texts))]),
    )


def _stops(model: LoadedModel, generated: Sequence[Sequence[int]]) -> IntArray:
    """Return how many tokens came before the first end of text, as the tokenizer names it."""
    end = getattr(model.tokenizer, "eos_token_id", None)
    return np.array([list(ids).index(end) if end in ids else len(ids) for ids in generated], np.int64)


class _Table:
    """Entropy and varentropy of every step's distribution on a grid of temperatures, by request."""

    def __init__(self, grid: Sequence[float]) -> None:
        self._grid = tuple(grid)
        self.rows: dict[int, list[FloatArray]] = {}

    def __call__(self, ids: IntArray, logits: Any) -> None:
        view = TorchLogitView(logits)
        pairs = [view.at(np.full(ids.shape[0], t)) for t in self._grid]
        columns = [np.asarray(part, float) for part in (*(h for h, _ in pairs), *(v for _, v in pairs))]
        for number, values in zip(ids.tolist(), np.stack(columns, axis=1), strict=True):
            self.rows.setdefault(number, []).append(values)


def tabulated(live: Live, texts: Sequence[tuple[str, list[int]]], temperature: float) -> Texts:
    """Return the texts of a tabulated run at fixed T, to be replayed."""
    count, length, width = live.table.shape
    joined, g = live.table.astype(np.float32).reshape(-1, width), len(GRID)
    return Texts(
        name=tuple(f"engine {i}" for i in range(len(texts))),
        kind=tuple(kind for kind, _ in texts),
        start=length * np.arange(count + 1, dtype=np.int64),
        grid=np.asarray(GRID, float),
        entropy=joined[:, :g],
        varentropy=joined[:, g:],
        temperature=temperature,
    )
