"""Prompt lookup and its measured acceptance, on a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import byte_tokenizer, tiny_llama

from backends.acceptance import measure
from backends.drafting import lookup
from backends.models import wrap
from backends.prompts import Prompt


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5]),
        ([1, 2, 3, 9, 9, 2, 3, 7, 7, 1, 2, 3], [9, 9]),  # three tokens before two
        ([8, 2, 3, 9, 2, 3, 7, 5, 2, 3], [7, 5]),  # the latest occurrence
        ([1, 2, 3], []),
        ([], []),
        ([4, 4, 4, 4], [4, 4]),  # the occurrence that overlaps the end goes on
        ([1, 2, 3, 1, 2, 3], [1, 2]),
    ],
)
def test_lookup_by_hand(text: list[int], draft: list[int]) -> None:
    assert lookup(text, 2) == draft


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_a_draft_is_what_followed_the_same_tokens(text: list[int], length: int) -> None:
    draft = lookup(text, length)
    assert len(draft) <= length
    if draft:
        n = 3 if any(text[i : i + 3] == text[-3:] for i in range(len(text) - 3)) and len(text) > 3 else 2
        whole = text + draft
        assert len(draft) == length
        assert any(
            text[i : i + n] == text[-n:] and whole[i + n : i + n + length] == draft for i in range(len(text) - n)
        )


def test_tables_count_positions_and_hold_probabilities() -> None:
    model = wrap(tiny_llama(), byte_tokenizer())
    prompts = [Prompt("list", "abcabcabcabc", chat=False), Prompt("list", "xyxyxyxyxyxy", chat=False)]
    got = measure(model, prompts=prompts, temperatures=(0.0, 0.5), max_new_tokens=12, bins=3)
    for kind in ("greedy", "sampled"):
        found, accepted = got[kind]["found"], got[kind]["accepted"]
        starts = np.dot(found["share"], found["count"])
        assert 0 < starts <= sum(found["count"]) <= 2 * 12  # a text may end by itself
        assert sum(accepted["count"]) >= round(starts)  # each draft has a first token
        for table in got[kind].values():
            assert all(0 <= share <= 1 for share in table["share"])
            assert (np.diff(table["entropy_nats"]) > 0).all()
    assert got == measure(model, prompts=prompts, temperatures=(0.0, 0.5), max_new_tokens=12, bins=3)
