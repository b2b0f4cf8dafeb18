"""Teacher-forced decoding under several arms at once: every arm reads the same tokens and predicts each next one.

The text before a stretch is prefilled exactly, once for all arms (pages that begin alike are shared between
stretches). The stretch itself is decoded token by token, so pruning acts as in a running engine: each arm writes its
own keys and values, and its laws (budget, temperature) see its own entropies. Losses therefore accumulate along the
stretch; they are not those of single steps over an exact cache. The laws start anew where the stretch starts.
Batches have one shape in all arms: at budget 0 an arm equals dense bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backends.attention import PagedBatch, register
from backends.attention.rows import rows_plan, single_row_plan
from backends.audit import kl_nats
from backends.eval_arms import Arm
from backends.jobs import prefix_hashes
from backends.kv_cache import PagedKVCache
from backends.models import LoadedModel
from backends.pieces import Arrays
from backends.sampling import TorchLogitView
from entropic_ctl.errors import BadInputError
from entropic_ctl.policy import Policy
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["COLUMNS", "Stretch", "decode_forced"]

COLUMNS = (
    "nll",
    "kl",
    "nll_tempered",
    "kl_tempered",
    "entropy",
    "temperature",
    "theta",
    "kept",
    "certificate",
    "hit",
    "agrees",
)
"""What is measured at each decoded position, see :func:`decode_forced`."""


@dataclass(frozen=True)
class Stretch:
    """Where in a text decoding is teacher forced.

    Parameters
    ----------
    tokens : tuple of int
        The text; the last token is only predicted.
    start : int
        Tokens prefilled exactly; a whole number of pages, at least one.
    """

    tokens: tuple[int, ...]
    start: int

    @property
    def steps(self) -> int:
        """Decoded tokens; each predicts the one after it."""
        return len(self.tokens) - 1 - self.start


class _Pages:
    """The cache of one group of stretches: shared exact pages of the prefixes, then private pages by arm and row."""

    def __init__(self, model: LoadedModel, stretches: Sequence[Stretch], arms: int, size: int) -> None:
        known: dict[int, int] = {}
        self.prefix: list[list[int]] = []
        for stretch in stretches:
            if stretch.start < size or stretch.start % size or stretch.steps < 1:
                raise BadInputError(
                    "not a stretch",
                    field="start",
                    value=stretch.start,
                    allowed=f"a positive multiple of {size}, at least 2 tokens before the end",
                )
            hashes = prefix_hashes(stretch.tokens[: stretch.start], size)
            self.prefix.append([known.setdefault(key, len(known)) for key in hashes])
        own = [-(-stretch.steps // size) for stretch in stretches]
        at, self.own = len(known), []
        for _ in range(arms):
            self.own.append([])
            for count in own:
                self.own[-1].append(list(range(at, at + count)))
                at += count
        shape, network = model.shape, model.model
        self.size = size
        self.cache = PagedKVCache(shape.layers, shape.kv_heads, shape.head_dim, at, size, network.dtype, network.device)
        self.ready = np.zeros(at, np.bool_)

    def table(self, arm: int, row: int) -> list[int]:
        """Return the page ids of a row, in order."""
        return self.prefix[row] + self.own[arm][row]


def _prefill(model: LoadedModel, pages: _Pages, row: int, stretch: Stretch, chunk: int, arm: Arm) -> None:
    """Fill the prefix pages of a row that no earlier row has filled."""
    table = pages.prefix[row]
    done = int(pages.ready[table].sum()) * pages.size  # hashes are chained: what is shared is a beginning
    for context in range(done, stretch.start, chunk):
        n = min(chunk, stretch.start - context)
        plan = single_row_plan(context, n, table, samples=True)
        batch = PagedBatch.from_plan(plan, pages.cache, arm.config.loop.pruning.config)
        batch.run(model.model, _ids(model, stretch.tokens[context : context + n]))
        pages.cache.seal(batch)
    pages.ready[table] = True


def _ids(model: LoadedModel, tokens: Sequence[int]) -> Tensor:
    return torch.tensor(tokens, dtype=torch.long, device=model.model.device)


class _Decoder:
    """One arm decoding all rows of a group."""

    def __init__(self, model: LoadedModel, arm: Arm, number: int, pages: _Pages, stretches: Sequence[Stretch]) -> None:
        self.model, self.arm, self.pages, self.stretches = model, arm, pages, stretches
        count = len(stretches)
        config = arm.config
        self.policy = Policy(*config.loop.build(), slots=count, observation_lag=config.engine.observation_lag)
        self.policy.start(np.arange(count))
        self._protected = config.loop.pruning.config
        tables = [pages.table(number, row) for row in range(count)]
        self._blocks = np.zeros((count, max(len(table) for table in tables)), np.int32)
        for row, table in enumerate(tables):
            self._blocks[row, : len(table)] = table

    def step(self, step: int, rows: IntArray) -> tuple[Tensor, FloatArray, dict[str, FloatArray]]:
        """Decode token ``step`` of these rows; return raw logits (n, V), temperatures (n,) and columns (n,)."""
        theta = self.policy.theta[rows]
        logits, kept, certificate = self._run(step, rows)
        view = TorchLogitView(logits)
        greedy = np.zeros(rows.size, np.bool_)
        tempered = self.policy.temper(rows, greedy, view)
        self.policy.observe(rows, tempered.model_entropy, tempered.tempered_entropy, greedy, tempered.valid)
        columns = {
            "entropy": tempered.model_entropy,
            "temperature": tempered.temperature,
            "theta": theta,
            "kept": kept,
            "certificate": certificate,
        }
        return logits, tempered.temperature, columns

    def _run(self, step: int, rows: IntArray) -> tuple[Tensor, FloatArray, FloatArray]:
        mine = [self.stretches[row] for row in rows]
        context = np.array([stretch.start + step for stretch in mine], np.int64)
        plan = rows_plan(context, self._blocks[rows], theta_nats=self.policy.theta[rows])
        batch = PagedBatch.from_plan(plan, self.pages.cache, self._protected)
        ids = [stretch.tokens[at] for stretch, at in zip(mine, context.tolist(), strict=True)]
        logits = batch.run(self.model.model, _ids(self.model, ids)).float()
        self.pages.cache.seal(batch)
        statistics = batch.statistics()
        return logits, statistics.kept_fraction, statistics.certificate_max


@torch.inference_mode()
def decode_forced(
    model: LoadedModel,
    stretches: Sequence[Stretch],
    arms: Sequence[Arm],
    *,
    chunk: int = 1024,
    progress: Callable[[float], None] | None = None,
) -> Arrays:
    """Decode every stretch under every arm and compare each next-token distribution with the first arm's.

    Parameters
    ----------
    model : LoadedModel
    stretches : sequence of R Stretch
        Decoded together, one row each.
    arms : sequence of A Arm
        The first is what the others are compared with.
    chunk : int
        Tokens per prefill pass.
    progress : callable(share), optional

    Returns
    -------
    dict of float64 arrays, shape (A, R, N)
        N is the longest stretch; shorter ones end in NaN. ``nll`` is -ln p(next token) and ``kl`` is KL(arm || first
        arm), both at temperature 1; ``nll_tempered`` and ``kl_tempered`` are the same at each arm's own temperature
        (what would be sampled from); ``entropy`` the model entropy; ``temperature``; ``theta`` the budget in force;
        ``kept`` the share of pages read; ``certificate`` the largest certified -ln(1 - m); all in nats but for
        temperature and share. ``hit`` is 1 where the most likely token is the next one, ``agrees`` where it is the
        first arm's most likely one.

    Raises
    ------
    BadInputError
        If a stretch does not start at a page boundary or has nothing to predict, or a distribution is not finite.
    """
    network = model.model
    network.set_attn_implementation(register())
    size = arms[0].config.engine.page_tokens
    pages = _Pages(model, stretches, len(arms), size)
    steps = np.array([stretch.steps for stretch in stretches], np.int64)
    fill = [stretch.start for stretch in stretches]
    work = sum(fill) / 32 + len(arms) * int(steps.max())  # a prefilled token costs about 1/32 of a decode step
    for row, stretch in enumerate(stretches):
        _prefill(model, pages, row, stretch, chunk, arms[0])
        if progress is not None:
            progress(sum(fill[: row + 1]) / 32 / work)
    decoders = [_Decoder(model, arm, number, pages, stretches) for number, arm in enumerate(arms)]
    out = {name: np.full((len(arms), len(stretches), int(steps.max())), np.nan) for name in COLUMNS}
    for step in range(int(steps.max())):
        rows = np.flatnonzero(steps > step)
        target = _ids(model, [stretches[row].tokens[stretches[row].start + step + 1] for row in rows])
        first: tuple[Tensor, Tensor] | None = None
        for number, decoder in enumerate(decoders):
            logits, temperature, columns = decoder.step(step, rows)
            tempered = logits.double() / torch.from_numpy(temperature).to(logits.device).unsqueeze(1)
            first = first or (logits, tempered)
            columns |= _compare(logits, tempered, first, target)
            if not np.isfinite(columns["kl"]).all():
                raise BadInputError(
                    "the model gave a distribution that is not finite",
                    where=model.name,
                    remedy="its weights are damaged, or overflow in this dtype: set model.dtype = 'float32'",
                )
            for name, values in columns.items():
                out[name][number, rows, step] = values
            if progress is not None:
                progress((sum(fill) / 32 + step * len(arms) + number + 1) / work)
    return out


def _compare(logits: Tensor, tempered: Tensor, first: tuple[Tensor, Tensor], target: Tensor) -> dict[str, FloatArray]:
    """Return the columns that need the distributions themselves, each (n,)."""

    def nll(z: Tensor) -> FloatArray:
        log_p = torch.log_softmax(z.double(), dim=-1).gather(1, target.unsqueeze(1))[:, 0]
        return np.asarray(-log_p.cpu().numpy(), np.float64)

    best, first_best = logits.argmax(dim=-1), first[0].argmax(dim=-1)
    return {
        "nll": nll(logits),
        "kl": kl_nats(logits, first[0]),
        "nll_tempered": nll(tempered),
        "kl_tempered": kl_nats(tempered, first[1]),
        "hit": np.asarray((best == target).cpu().numpy(), np.float64),
        "agrees": np.asarray((best == first_best).cpu().numpy(), np.float64),
    }
