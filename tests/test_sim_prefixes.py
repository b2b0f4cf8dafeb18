"""Page hashes: equal exactly when everything up to the end of the page is equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from sim.prefixes import BlockHashes, SessionHashes, TraceBlocks

BLOCK = 8


def blocks(prompts: list[list[int]]) -> TraceBlocks:
    offset = np.cumsum([0, *(len(ids) for ids in prompts)])
    return TraceBlocks(offset.astype(np.int64), np.array([i for ids in prompts for i in ids], np.int64), BLOCK)


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=8)


@given(PROMPTS, st.sampled_from([1, 2, 4, 8]), st.integers(0, BLOCK - 1))
def test_pages_are_equal_exactly_when_their_whole_prefix_is(prompts: list[list[int]], page: int, short: int) -> None:
    lengths = np.array([len(ids) * BLOCK - short for ids in prompts])
    hashes = BlockHashes(blocks(prompts), lengths, page, where="t")
    seen: dict[int, tuple[object, ...]] = {}
    for i, ids in enumerate(prompts):
        mine = hashes[i]
        assert len(mine) == lengths[i] // page
        assert len(hashes[i + len(prompts)]) == len(mine)
        assert not set(mine) & set(hashes[i + len(prompts)])  # a repetition shares nothing
        for k, value in enumerate(mine):
            prefix = (k, *ids[: k * page // BLOCK + 1])
            assert seen.setdefault(value, prefix) == prefix
    assert len(seen) == len(set(seen.values()))


@given(PROMPTS)
def test_shared_tokens_are_those_of_the_longest_earlier_prefix(prompts: list[list[int]]) -> None:
    lengths = np.array([len(ids) * BLOCK - 3 for ids in prompts])
    shared = blocks(prompts).shared_tokens(lengths)
    for i, ids in enumerate(prompts):
        best = max((sum(np.cumprod([a == b for a, b in zip(ids, old)])) for old in prompts[:i]), default=0)  # noqa: B905
        assert shared[i] == min(best * BLOCK, lengths[i] - 1)


@given(PROMPTS, st.randoms(use_true_random=False))
def test_taking_rows_takes_their_blocks(prompts: list[list[int]], random: object) -> None:
    order = list(range(len(prompts)))
    random.shuffle(order)  # type: ignore[attr-defined]
    taken, expected = blocks(prompts).take(np.array(order)), blocks([prompts[i] for i in order])
    np.testing.assert_array_equal(taken.offset, expected.offset)
    np.testing.assert_array_equal(taken.ids, expected.ids)


def test_a_page_that_does_not_divide_the_block_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"page_tokens.*got 3.*divisors of 8.*prefix_caching"):
        BlockHashes(blocks([[1]]), np.array([5]), 3, where="t.jsonl")


def test_a_short_prompt_of_a_session_lies_within_the_shared_part() -> None:
    hashes = SessionHashes(np.array([0, 1]), np.array([40, 100]), 16, 64)
    assert hashes[0] == hashes[1][:2]
    assert len(hashes[1]) == 6
