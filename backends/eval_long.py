"""What an arm does to the prediction of long text: KL and negative log-likelihood against dense, position by position.

Stretches of real text are decoded teacher forced (:mod:`backends.eval_forced`) behind contexts of several lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from backends.eval_arms import Arm
from backends.eval_forced import COLUMNS, Stretch, decode_forced
from backends.models import LoadedModel
from backends.pieces import Arrays, Pieces
from backends.prompts import document_ids
from entropic_ctl.errors import BadInputError

__all__ = ["long_texts", "measure_long_text", "read_text", "whole_pages"]


def whole_pages(
    model: LoadedModel, lengths: Sequence[int], more: int, page_tokens: int, field: str, *, fit: bool = False
) -> list[int]:
    """Return increasing context lengths, each cut to whole pages (one at least), after a check against the model.

    Parameters
    ----------
    model : LoadedModel
    lengths : sequence of int
        Tokens.
    more : int
        Tokens decoded behind the context.
    page_tokens : int
    field : str
        What the lengths are called, for errors.
    fit : bool
        Leave out what does not fit the model, as long as something does.

    Raises
    ------
    BadInputError
        If there is none, one is below 1, or one does not fit the model.
    """
    if not lengths or min(lengths) < 1:
        raise BadInputError("no lengths", field=field, value=list(lengths), allowed="one or more positive integers")
    found = sorted({max(page_tokens, length - length % page_tokens) for length in lengths})
    if fit and found[0] + more <= model.max_context:
        found = [length for length in found if length + more <= model.max_context]
    if found[-1] + more > model.max_context:
        raise BadInputError(
            f"with {more} tokens to decode this is beyond the model's context",
            where=model.name,
            field=field,
            value=max(lengths),
            allowed=f"<= {max(0, model.max_context - more)}",
            remedy="name shorter ones",
        )
    return found


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file.

    Raises
    ------
    BadInputError
        If it cannot be read, is not UTF-8, or is blank.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise BadInputError(f"cannot read text: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError as error:
        raise BadInputError(f"not UTF-8 at byte {error.start}", where=str(path)) from None
    if not text.strip():
        raise BadInputError("the text is blank", where=str(path))
    return text


def long_texts(model: LoadedModel, needed: int, count: int, path: Path | None = None) -> list[list[int]]:
    """Return up to ``count`` disjoint pieces of ``needed`` tokens, evenly spread over the text.

    Parameters
    ----------
    model : LoadedModel
    needed, count : int
        Tokens of each; how many.
    path : Path, optional
        A file in place of the built-in document. It gives fewer pieces if it is shorter, but one at least.

    Raises
    ------
    BadInputError
        If the text is shorter than one piece.
    """
    if path is None:
        return [document_ids(model, needed, start=i * needed) for i in range(count)]
    ids = model.prompt_ids(read_text(path), chat=False)
    count = min(count, len(ids) // needed)
    if not count:
        raise BadInputError(
            "the text is shorter than the longest context and what is decoded behind it",
            where=str(path),
            field="tokens",
            value=len(ids),
            allowed=f">= {needed}",
            remedy="name shorter contexts (--context), or a longer text",
        )
    starts = np.linspace(0, len(ids) - needed, count).astype(int).tolist()
    return [ids[start : start + needed] for start in starts]


def measure_long_text(
    model: LoadedModel,
    texts: Sequence[Sequence[int]],
    contexts: Sequence[int],
    positions: int,
    arms: Sequence[Arm],
    *,
    pieces: Pieces,
    progress: Callable[[str, float], None],
) -> Arrays:
    """Decode ``positions`` tokens behind each context of each text under every arm; one row per position and arm.

    Parameters
    ----------
    model : LoadedModel
    texts : sequences of token ids
        Each at least ``contexts[-1] + positions + 1`` long.
    contexts : increasing ints
        Whole pages.
    positions : int
    arms : sequence of Arm
    pieces : Pieces
        Keeps each finished text.
    progress : callable(what, share)

    Returns
    -------
    dict of arrays of one length
        ``arm``, ``text``, ``context``, ``index`` (position behind the context), and the columns of
        :func:`backends.eval_forced.decode_forced`.
    """
    tables = []
    for number, text in enumerate(texts):
        stretches = [Stretch(tuple(text[: context + positions + 1]), context) for context in contexts]

        def tell(share: float, number: int = number) -> None:
            progress(f"long text {number + 1} of {len(texts)}", (number + share) / len(texts))

        def make(stretches: list[Stretch] = stretches, tell: Callable[[float], None] = tell) -> Arrays:
            return decode_forced(model, stretches, arms, progress=tell)

        tables.append(pieces.get(f"long-{number}", make))
    shape = (len(texts), len(arms), len(contexts), positions)
    at = np.indices(shape).reshape(4, -1)
    out: Arrays = {
        "arm": np.array([arm.name for arm in arms])[at[1]],
        "text": at[0],
        "context": np.asarray(contexts)[at[2]],
        "index": at[3],
    }
    return out | {name: np.stack([table[name] for table in tables]).reshape(-1) for name in COLUMNS}
