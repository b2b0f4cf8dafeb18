"""The quality harness: what pruning and temperature laws do to a model's output, against dense attention.

Three tasks, each paired by text, prompt or needle with dense: predicting long text (:mod:`backends.eval_long`), writing
texts (:mod:`backends.eval_outputs`), finding a hidden fact (:mod:`backends.eval_needle`). The tables and the summary
are what ``entropic eval`` writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends import eval_summary
from backends.eval_arms import Arm, settings_of
from backends.eval_long import long_texts, measure_long_text, read_text, whole_pages
from backends.eval_needle import measure_needles
from backends.eval_outputs import compare_outputs, document_prompts, prompts_that_fit, write_outputs
from backends.eval_overlap import require_metrics
from backends.models import LoadedModel
from backends.pieces import Arrays, Pieces
from backends.prompts import Prompt
from entropic_ctl import fields
from entropic_ctl.certificates import Verdict
from entropic_ctl.config import digest
from entropic_ctl.errors import BadInputError

__all__ = ["TASKS", "Evaluation", "Settings", "check_size", "evaluate", "quick"]

TASKS = ("long", "texts", "needle")
_SHARE = {"long": 0.45, "texts": 0.3, "needle": 0.25}  # of the time, for the progress bar
_SPECIAL_TOKENS = 8  # that a tokenizer may add
_NEEDLE_TOKENS = 32  # room for the answer behind a needle's text


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Parameters
    ----------
    tasks : tuple of str
        Of :data:`TASKS`.
    contexts : tuple of int
        Context lengths of the long texts, tokens (cut to whole pages).
    needle_lengths : tuple of int
        Lengths of the texts that hide a needle.
    """

    tasks: tuple[str, ...] = TASKS
    contexts: tuple[int, ...] = (512, 2048, 4096)
    texts: int = fields.integer(2, 1, 10_000, "long texts")
    positions: int = fields.integer(48, 1, 10**6, "tokens decoded behind each context")
    block: int = fields.integer(16, 1, 10**6, "positions per bootstrap block")
    prompts: int = fields.integer(8, 1, 10_000, "prompts to write to")
    prompt_tokens: int = fields.integer(512, 1, 2**24, "text in each of the built-in prompts, tokens")
    new_tokens: int = fields.integer(64, 1, 2**24, "most tokens written to each prompt")
    needle_lengths: tuple[int, ...] = (512, 1024, 2048)
    depths: tuple[float, ...] = fields.numbers((0.0, 0.25, 0.5, 0.75, 1.0), 0.0, 1.0, "where the needle stands")
    needles: int = fields.integer(2, 1, 10_000, "needles at each depth of each length")
    fit_lengths: bool = fields.flag(False, "leave out lengths beyond the model's context in place of refusing them")
    seed: int = fields.integer(0, 0, 2**63 - 1, "of numbers, sampling and bootstrap")

    def __post_init__(self) -> None:
        fields.check(self)
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown or not self.tasks:
            raise BadInputError("not tasks", field="tasks", value=self.tasks, allowed=", ".join(TASKS))
        if not self.depths:
            raise BadInputError("no depths", field="depths", value=self.depths, allowed="one or more in [0, 1]")


def quick(settings: Settings) -> Settings:
    """Return settings for a first look, under a minute: short contexts, few and short texts."""
    return dataclasses.replace(
        settings,
        contexts=(256, 1024),
        texts=1,
        positions=16,
        block=8,
        prompts=4,
        prompt_tokens=192,
        new_tokens=16,
        needle_lengths=(256, 512),
        depths=(0.0, 0.5, 1.0),
        needles=1,
    )


@dataclass(frozen=True)
class Evaluation:
    """What a run found.

    Parameters
    ----------
    tables : dict of str to dict of arrays
        ``summary`` (one row per comparison, see :mod:`backends.eval_summary`), and one per task: ``positions``,
        ``texts``, ``needles``.
    verdict : list of str
    arms : tuple of str
    notes : list of str
        What was measured less than asked for.
    """

    tables: dict[str, Arrays]
    verdict: list[str]
    arms: tuple[str, ...]
    notes: list[str] = field(default_factory=list)


def evaluate(
    model: LoadedModel,
    arms: Sequence[Arm],
    settings: Settings,
    *,
    text: Path | None = None,
    prompts: Sequence[Prompt] | None = None,
    verdict: Verdict | None = None,
    uncertified: bool = False,
    checkpoint: Path | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Evaluation:
    """Run the tasks and compare every arm with the first.

    Parameters
    ----------
    model : LoadedModel
    arms : sequence of Arm
        From :func:`backends.eval_arms.arms_of`.
    settings : Settings
    text : Path, optional
        Long text in place of the built-in document; also the needles' filler.
    prompts : sequence of Prompt, optional
        In place of pieces of that text.
    verdict, uncertified
        For a temperature law that needs a certificate, see :class:`entropic_ctl.loop.Loop`.
    checkpoint : Path, optional
        Folder for finished parts, for an interrupted run to go on with.
    progress : callable(what, share), optional

    Raises
    ------
    BadInputError
        Before any work: a text too short, a length beyond the model's context, an absent package, a folder of parts of
        another run.
    """
    say = progress or (lambda *_: None)
    plan = _Plan(model, arms[0].config.engine.page_tokens, settings, text, prompts)
    pieces = Pieces(
        checkpoint,
        {
            "model": model.name,
            "vocab_size": model.vocab_size,
            "dtype": str(model.model.dtype),
            "arms": settings_of(arms),
            "text": plan.digest,
            **dataclasses.asdict(settings),
        },
    )
    names = [arm.name for arm in arms]
    moving = [arm.name for arm in arms if not arm.fixed_temperature]
    seed, begun, whole = settings.seed, 0.0, sum(_SHARE[task] for task in settings.tasks)
    tables: dict[str, Arrays] = {}
    rows: list[eval_summary.Row] = []
    for task in (task for task in TASKS if task in settings.tasks):

        def tell(what: str, share: float, task: str = task, begun: float = begun) -> None:
            say(what, (begun + share * _SHARE[task]) / whole)

        if task == "long":
            tables["positions"] = measure_long_text(
                model, plan.texts, plan.contexts, settings.positions, arms, pieces=pieces, progress=tell
            )
            rows += eval_summary.summarise_long(tables["positions"], names, moving, block=settings.block, seed=seed)
        elif task == "texts":
            written = write_outputs(
                model,
                plan.prompts,
                settings.new_tokens,
                arms,
                seed=seed,
                pieces=pieces,
                progress=tell,
                verdict=verdict,
                uncertified=uncertified,
            )
            tables["texts"] = compare_outputs(model, plan.prompts, written)
            rows += eval_summary.summarise_outputs(tables["texts"], names, seed=seed)
        else:
            tables["needles"] = measure_needles(
                model, plan.filler, plan.lengths, settings.depths, arms, seed=seed, pieces=pieces, progress=tell
            )
            rows += eval_summary.summarise_needles(tables["needles"], names, seed=seed)
        begun += _SHARE[task]
    tables = {"summary": eval_summary.table_of(rows), **tables}
    return Evaluation(tables, eval_summary.verdict(rows, names), tuple(names), plan.notes)


def check_size(text: Path, settings: Settings, page_tokens: int, context: int) -> None:
    """Refuse a file that has fewer bytes than the tasks need tokens, before a model is loaded.

    Parameters
    ----------
    text : Path
    settings : Settings
    page_tokens : int
    context : int
        The model's, tokens; 0 if not known yet.

    Raises
    ------
    BadInputError
        Naming both numbers, or if the file is no text.
    """
    size = len(read_text(text).encode())
    needed = settings.prompt_tokens if "texts" in settings.tasks else 1
    for task, lengths, more, read in (
        ("long", settings.contexts, settings.positions + 1, settings.positions + 1),
        ("needle", settings.needle_lengths, _NEEDLE_TOKENS, 0),
    ):
        if task in settings.tasks and lengths:
            fits = [n for n in lengths if n + more <= context] if settings.fit_lengths else lengths
            longest = max(fits or [min(lengths)])
            needed = max(needed, longest - longest % page_tokens + read)
    if size + _SPECIAL_TOKENS < needed:
        raise BadInputError(
            "the text is shorter than the longest context and what is decoded behind it",
            where=str(text),
            field="bytes",
            value=size,
            allowed=f">= {needed} tokens, of some 4 bytes each",
            remedy="name shorter contexts (--context), or a longer text",
        )


class _Plan:
    """Everything a run reads, checked and cut before the first forward pass."""

    def __init__(
        self,
        model: LoadedModel,
        page_tokens: int,
        settings: Settings,
        text: Path | None,
        prompts: Sequence[Prompt] | None,
    ) -> None:
        if model.tokenizer is None:
            raise BadInputError("the model has no tokenizer", where=model.name, remedy="evaluation needs text")
        self.notes: list[str] = []
        self._fit = settings.fit_lengths
        self.texts: list[list[int]] = []
        self.filler: list[list[int]] = []
        self.contexts: list[int] = []
        self.lengths: list[int] = []
        self.prompts: tuple[Prompt, ...] = ()
        if "long" in settings.tasks:
            more = settings.positions + 1
            self.contexts = self._lengths(model, settings.contexts, more, page_tokens, "contexts")
            self.texts = long_texts(model, self.contexts[-1] + more, settings.texts, text)
            self._fewer("long texts", len(self.texts), settings.texts)
        if "needle" in settings.tasks:
            self.lengths = self._lengths(model, settings.needle_lengths, _NEEDLE_TOKENS, page_tokens, "needle_lengths")
            self.filler = long_texts(model, self.lengths[-1], settings.needles, text)
            self._fewer("needles at each place", len(self.filler), settings.needles)
        if "texts" in settings.tasks:
            require_metrics()
            self.prompts = tuple(prompts or ())
            if not self.prompts:
                pieces = long_texts(model, settings.prompt_tokens, settings.prompts, text)
                self._fewer("prompts", len(pieces), settings.prompts)
                self.prompts = document_prompts(model, pieces)
            prompts_that_fit(model, self.prompts, settings.new_tokens)

    def _lengths(self, model: LoadedModel, wanted: Sequence[int], more: int, page: int, field: str) -> list[int]:
        found = whole_pages(model, wanted, more, page, field, fit=self._fit)
        if max(wanted) >= found[-1] + page:
            self.notes.append(f"{field.replace('_', ' ')} end at {found[-1]:,}: the model's context")
        return found

    def _fewer(self, what: str, found: int, wanted: int) -> None:
        if found < wanted:
            self.notes.append(f"the text gave {found} of {wanted} {what}")

    @property
    def digest(self) -> str:
        """Identifies the tokens and prompts."""
        prompts = [dataclasses.asdict(prompt) for prompt in self.prompts]
        content: dict[str, Any] = {"texts": self.texts, "filler": self.filler, "prompts": prompts}
        return digest(content)
