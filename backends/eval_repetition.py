"""How much a text repeats itself, counted on its tokens."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MEASURES", "distinct", "longest_repeat", "repetition"]

MEASURES = ("distinct_1", "distinct_2", "repeated_4", "longest_repeat")


def _grams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def distinct(tokens: Sequence[int], n: int) -> float:
    """Return the share of n-grams that are different from one another (distinct-n, Li et al., 2016).

    Parameters
    ----------
    tokens : sequence of int
    n : int

    Returns
    -------
    float
        In (0, 1]; NaN for a text shorter than n tokens.
    """
    grams = _grams(tokens, n)
    return len(set(grams)) / len(grams) if grams else float("nan")


def longest_repeat(tokens: Sequence[int]) -> int:
    """Return the length of the longest run of tokens that occurs at two places (which may overlap)."""
    low, high = 0, max(0, len(tokens) - 1)
    while low < high:  # a repeat of length n holds one of every shorter length
        middle = (low + high + 1) // 2
        grams = _grams(tokens, middle)
        if len(set(grams)) < len(grams):
            low = middle
        else:
            high = middle - 1
    return low


def repetition(tokens: Sequence[int]) -> dict[str, float]:
    """Return every measure of :data:`MEASURES` for one text.

    ``distinct_1`` and ``distinct_2``; ``repeated_4``, the share of 4-grams that occurred before; ``longest_repeat`` as
    a share of the text. NaN where a text is too short to have one.

    Parameters
    ----------
    tokens : sequence of int
    """
    return {
        "distinct_1": distinct(tokens, 1),
        "distinct_2": distinct(tokens, 2),
        "repeated_4": 1.0 - distinct(tokens, 4),
        "longest_repeat": longest_repeat(tokens) / len(tokens) if len(tokens) > 1 else float("nan"),
    }
