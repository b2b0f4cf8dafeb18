"""Can a fact still be found? One sentence with a random number, hidden at a depth of a long text, is asked for.

The question is prefilled; the answer's opening words and the number are decoded teacher forced, so that the pages
holding the fact may be pruned when it is needed. The number counts as *retrieved* if every token of it was the most
likely one: exactly when greedy decoding, given the same opening, would have written it. Its log-probability says more
where a small model fails even with dense attention. The idea of a needle in a haystack is Kamradt's (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from backends.eval_arms import Arm
from backends.eval_forced import Stretch, decode_forced
from backends.models import LoadedModel
from backends.pieces import Arrays, Pieces
from entropic_ctl.errors import BadInputError

__all__ = ["case", "measure_needles"]

_FACT = "\n\nThe secret number of the lighthouse is {number}. Remember it.\n\n"
_QUESTION = "\n\nQuestion: What is the secret number of the lighthouse?\nAnswer:"
_OPENING = " The secret number of the lighthouse is"
_LOOK_BACK = 64


def _answer(model: LoadedModel, number: int) -> tuple[list[int], list[int]]:
    """Return the tokens of the opening and of the number as they stand behind it."""
    opening = model.prompt_ids(_OPENING, chat=False)
    whole = model.prompt_ids(f"{_OPENING} {number}", chat=False)
    if whole[: len(opening)] != opening:  # the number's first token reaches back into the opening
        opening = whole[:-1]
    return opening, whole[len(opening) :]


def _boundary(model: LoadedModel, filler: Sequence[int], at: int) -> int:
    """Return the nearest place at or before ``at`` that follows a line's end, within a few tokens; else ``at``."""
    for place in range(at, max(0, at - _LOOK_BACK), -1):
        if "\n" in model.decode([filler[place - 1]]):
            return place
    return at


def case(
    model: LoadedModel, filler: Sequence[int], length: int, depth: float, number: int, page_tokens: int
) -> tuple[Stretch, int]:
    """Build one needle.

    Parameters
    ----------
    model : LoadedModel
    filler : sequence of int
        At least ``length`` tokens.
    length : int
        Tokens before the answer's opening; whole pages.
    depth : float
        Where the fact stands: 0 at the start, 1 just before the question.
    number : int
    page_tokens : int

    Returns
    -------
    (Stretch, answer_tokens)
        The last ``answer_tokens`` tokens of the stretch are the number.

    Raises
    ------
    BadInputError
        If ``length`` leaves no room for fact and question.
    """
    fact = model.prompt_ids(_FACT.format(number=number), chat=False)
    question = model.prompt_ids(_QUESTION, chat=False)
    opening, answer = _answer(model, number)
    room = length - len(fact) - len(question)
    if room < 1:
        least = page_tokens * -(-(len(fact) + len(question) + 1) // page_tokens)
        raise BadInputError(
            "no room for the needle and its question", field="length", value=length, allowed=f">= {least}"
        )
    at = _boundary(model, filler, round(depth * room)) if 0 < depth < 1 else round(depth * room)
    tokens = [*filler[:at], *fact, *filler[at:room], *question, *opening, *answer]
    return Stretch(tuple(tokens), length), len(answer)


def measure_needles(
    model: LoadedModel,
    filler: Sequence[Sequence[int]],
    lengths: Sequence[int],
    depths: Sequence[float],
    arms: Sequence[Arm],
    *,
    seed: int,
    pieces: Pieces,
    progress: Callable[[str, float], None],
) -> Arrays:
    """Ask for a needle at every depth of every length, once per filler text, under every arm.

    Parameters
    ----------
    model : LoadedModel
    filler : sequence of token lists
        Each at least as long as the longest length.
    lengths : increasing ints
        Whole pages.
    depths : sequence of float
        Each in [0, 1].
    arms : sequence of Arm
    seed : int
        Of the numbers: five digits, the same for all arms.
    pieces : Pieces
        Keeps each finished length of each text.
    progress : callable(what, share)

    Returns
    -------
    dict of arrays of one length
        ``arm``, ``repeat``, ``length``, ``depth``, ``number``, ``retrieved`` (0 or 1), ``log_p`` (nats, mean over the
        number's tokens), ``answer_tokens``, ``kept`` (share of pages read while the number was predicted).
    """
    for depth in depths:
        if not 0.0 <= depth <= 1.0:
            raise BadInputError("not a depth", field="depth", value=depth, allowed="[0, 1]")
    names = ("repeat", "length", "depth", "number", "answer_tokens", "arm", "retrieved", "log_p", "kept")
    out: dict[str, list[object]] = {name: [] for name in names}
    rng = np.random.default_rng([seed, 3])
    total = len(filler) * sum(lengths)
    done = 0
    for repeat, text in enumerate(filler):
        for length in lengths:
            numbers = rng.integers(10_000, 100_000, len(depths)).tolist()
            page = arms[0].config.engine.page_tokens
            cases = [case(model, text, length, d, n, page) for d, n in zip(depths, numbers, strict=True)]

            def tell(share: float, begun: int = done, length: int = length) -> None:
                progress(f"needles in {length:,} tokens", (begun + share * length) / total)

            def make(cases: list[tuple[Stretch, int]] = cases, tell: Callable[[float], None] = tell) -> Arrays:
                return decode_forced(model, [stretch for stretch, _ in cases], arms, progress=tell)

            found = pieces.get(f"needle-{repeat}-{length}", make)
            done += length
            for number, arm in enumerate(arms):
                for row, (stretch, size) in enumerate(cases):
                    last = slice(stretch.steps - size, stretch.steps)
                    values = {key: found[key][number, row, last] for key in ("hit", "nll", "kept")}
                    row_out = (repeat, length, depths[row], numbers[row], size, arm.name)
                    row_out += (float(values["hit"].all()), -float(values["nll"].mean()), float(values["kept"].mean()))
                    for name, value in zip(names, row_out, strict=True):
                        out[name].append(value)
    return {name: np.array(values) for name, values in out.items()}
