"""Texts that each arm writes: greedy ones to hold against dense's, sampled ones for how they repeat themselves.

Both come from the real engine, batched, with the arm's laws. Greedy decoding ignores temperatures, so greedy texts show
what pruning does; sampled ones, drawn with the same seeds in every arm, show the whole loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from backends.engine import Engine
from backends.eval_arms import Arm
from backends.eval_overlap import first_difference, rouge_l, sentence_bleu
from backends.eval_repetition import MEASURES, repetition
from backends.models import LoadedModel
from backends.pieces import Arrays, Pieces
from backends.prompts import Prompt
from backends.sampling import SamplingParams
from entropic_ctl.certificates import Verdict
from entropic_ctl.errors import BadInputError
from entropic_ctl.metrics import Metrics
from entropic_ctl.signals import FinishReason

__all__ = ["MODES", "compare_outputs", "document_prompts", "prompts_that_fit", "write_outputs"]

MODES = ("greedy", "sampled")
_ROWS = 8
_CHUNK = 256


def document_prompts(model: LoadedModel, texts: Sequence[Sequence[int]]) -> tuple[Prompt, ...]:
    """Return one prompt per token list, in turns a text to continue and a chat turn that asks for a summary.

    Parameters
    ----------
    model : LoadedModel
    texts : sequences of token ids
    """
    found = []
    for number, ids in enumerate(texts):
        text = model.decode(ids)
        if number % 2:
            found.append(Prompt("summary", f"Summarise this text in three sentences.\n\n{text}"))
        else:
            found.append(Prompt("continue", text, chat=False))
    return tuple(found)


def prompts_that_fit(model: LoadedModel, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
    """Return the prompts' token ids.

    Raises
    ------
    BadInputError
        If the longest one, or with it the tokens to be written, do not fit the model's context.
    """
    ids = [model.prompt_ids(prompt.text, chat=prompt.chat) for prompt in prompts]
    longest = max(len(prompt) for prompt in ids)
    room = model.max_context - longest
    if room < 1:
        raise BadInputError(
            "the longest prompt leaves no room in the model's context",
            where=model.name,
            field="prompts",
            value=f"{longest:,} tokens",
            allowed=f"< {model.max_context:,} tokens",
        )
    if max_new_tokens > room:
        raise BadInputError(
            f"the longest prompt has {longest:,} of the {model.max_context:,} tokens of the model's context",
            where=model.name,
            field="new_tokens",
            value=max_new_tokens,
            allowed=f"[1, {room}]",
        )
    return ids


def write_outputs(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    arms: Sequence[Arm],
    *,
    seed: int,
    pieces: Pieces,
    progress: Callable[[str, float], None],
    verdict: Verdict | None = None,
    uncertified: bool = False,
) -> dict[str, Arrays]:
    """Write every prompt's greedy and sampled text under every arm.

    Parameters
    ----------
    model : LoadedModel
    prompts : sequence of Prompt
    max_new_tokens : int
    arms : sequence of Arm
    seed : int
        Keys the sampling, the same in all arms.
    pieces : Pieces
        Keeps each finished arm.
    progress : callable(what, share)
    verdict, uncertified
        For arms whose temperature law needs a certificate, see :class:`entropic_ctl.loop.Loop`.

    Returns
    -------
    dict of str to arrays, by arm
        ``tokens`` (all texts, one after another), ``length`` and ``kept`` (share of pages read by decode steps), one
        per text: all greedy ones, then all sampled ones.

    Raises
    ------
    BadInputError
        If a prompt and its text do not fit the model.
    UncertifiedError
        If a law needs a certificate that ``verdict`` does not give.
    """
    ids = prompts_that_fit(model, prompts, max_new_tokens)
    longest = max(len(prompt) for prompt in ids)
    keys = np.random.SeedSequence([seed, 4]).generate_state(len(ids), np.uint32).tolist()
    found = {}
    for number, arm in enumerate(arms):

        def make(arm: Arm = arm, number: int = number) -> Arrays:
            engine, metrics = _engine(arm, model, longest + max_new_tokens, len(ids), verdict, uncertified)
            for greedy in (True, False):
                for prompt, key in zip(ids, keys, strict=True):
                    engine.submit(prompt, SamplingParams(max_new_tokens=max_new_tokens, seed=key, greedy=greedy))

            def tell(left: int, total: int) -> None:
                progress(f"texts of arm {arm.name!r}", (number + left / total) / len(arms))

            return _packed(engine.run(progress=tell), metrics, model)

        found[arm.name] = pieces.get(f"texts-{number}", make)
    return found


def _engine(
    arm: Arm, model: LoadedModel, tokens: int, prompts: int, verdict: Verdict | None, uncertified: bool
) -> tuple[Engine, Metrics]:
    config = arm.config
    page = config.engine.page_tokens
    limits = dataclasses.replace(
        config.engine,
        pages=(2 * prompts + 1) * -(-(tokens + page) // page),
        max_batch=_ROWS,
        max_batch_tokens=2 * _CHUNK,
        prefill_chunk=_CHUNK,
        max_live=2 * prompts,
        prefix_caching=False,
        audit_every=0,
    )
    metrics = Metrics(page, keep_tokens=True)
    needs = verdict if arm.config.loop.build()[0].integral_action else None
    engine = Engine(
        dataclasses.replace(config, engine=limits), model, verdict=needs, uncertified=uncertified, metrics=metrics
    )
    return engine, metrics


def _packed(outputs: Sequence[object], metrics: Metrics, model: LoadedModel) -> Arrays:
    """Return the engine's outputs as arrays."""
    tokens, kept = [], []
    table = metrics.tokens_table()
    for output in outputs:
        reason = output.finish.reason  # type: ignore[attr-defined]
        if reason is FinishReason.EMPTY_SUPPORT:
            raise BadInputError(
                "the model gave no token a finite logit",
                where=model.name,
                remedy="its weights are damaged, or overflow in this dtype: set model.dtype = 'float32'",
            )
        tokens.append(output.token_ids)  # type: ignore[attr-defined]
        mine = table["kept_fraction"][(table["id"] == output.id) & (table["index"] > 0)]  # type: ignore[attr-defined]
        kept.append(float(mine.mean()) if mine.size else 1.0)
    return {
        "tokens": np.array([token for text in tokens for token in text], np.int64),
        "length": np.array([len(text) for text in tokens], np.int64),
        "kept": np.array(kept),
    }


def compare_outputs(model: LoadedModel, prompts: Sequence[Prompt], written: dict[str, Arrays]) -> Arrays:
    """Judge every text: likeness to the first arm's text of the same prompt, and self-repetition.

    Parameters
    ----------
    model : LoadedModel
    prompts : sequence of Prompt
    written : dict of str to arrays
        From :func:`write_outputs`, the arm to compare with first.

    Returns
    -------
    dict of arrays of one length
        ``arm``, ``mode``, ``prompt`` (number), ``kind``, ``tokens`` (how many), ``kept``, ``exact`` (0 or 1),
        ``first_difference`` (token index, -1 if equal), ``rouge_l`` [0, 1], ``bleu`` [0, 100], the measures of
        :mod:`backends.eval_repetition`, and ``text``. Likeness is NaN for sampled texts, where one different draw
        changes everything after it.
    """
    names = ("arm", "mode", "prompt", "kind", "tokens", "kept", "exact", "first_difference", "rouge_l", "bleu")
    out: dict[str, list[object]] = {name: [] for name in (*names, *MEASURES, "text")}
    base = next(iter(written.values()))
    reference = _split(base)
    for arm, arrays in written.items():
        for number, (tokens, kept) in enumerate(zip(_split(arrays), arrays["kept"].tolist(), strict=True)):
            mode, prompt = MODES[number // len(prompts)], number % len(prompts)
            text = model.decode(tokens)
            row: dict[str, object] = {"arm": arm, "mode": mode, "prompt": prompt, "kind": prompts[prompt].kind}
            row |= {"tokens": len(tokens), "kept": kept, "text": text, **repetition(tokens)}
            if mode == "greedy":
                other = model.decode(reference[number])
                row |= {"exact": float(tokens == reference[number])}
                row |= {"first_difference": first_difference(tokens, reference[number])}
                row |= {"rouge_l": rouge_l(text, other), "bleu": sentence_bleu(text, other)}
            else:
                row |= {"exact": np.nan, "first_difference": -1, "rouge_l": np.nan, "bleu": np.nan}
            for name, values in out.items():
                values.append(row[name])
    return {name: np.array(values) for name, values in out.items()}


def _split(arrays: Arrays) -> list[list[int]]:
    ends = np.cumsum(arrays["length"])[:-1]
    return [part.tolist() for part in np.split(arrays["tokens"], ends)]
