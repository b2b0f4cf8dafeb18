from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from entropic_ctl.blocks import BlockPool, OutOfPagesError, new_pages, pages_for
from entropic_ctl.errors import BadInputError


def test_s7_partly_filled_page_is_used_before_a_new_one() -> None:
    assert new_pages(3, 5, 4) == 1
    pool = BlockPool(2, 4)
    pool.allocate(1)  # holds 3 tokens
    assert pool.allocate(new_pages(3, 5, 4)).shape == (1,)
    assert pool.available == 0


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.integers(1, 40))
def test_new_pages_add_up_and_suffice(held: int, a: int, b: int, page: int) -> None:
    assert new_pages(held, a, page) + new_pages(held + a, b, page) == new_pages(held, a + b, page)
    assert (pages_for(held, page) + new_pages(held, a, page)) * page >= held + a
    assert new_pages(held, a, page) <= pages_for(a, page)


def chain(pool: BlockPool, hashes: list[int]) -> np.ndarray:
    pages = pool.allocate(len(hashes))
    for page, value in zip(pages.tolist(), hashes, strict=True):
        pool.publish(page, value)
    return pages


def test_s5_only_a_contiguous_prefix_matches() -> None:
    pool = BlockPool(3, 4)
    first = chain(pool, [1])
    pool.release(first)  # the oldest remembered page
    rest = chain(pool, [2, 3])
    pool.release(rest)
    pool.allocate(1)  # evicts the page of hash 1
    assert pool.match([1, 2, 3]).shape == (0,)
    assert pool.match([2, 3]).shape == (2,)


def test_s6_references_are_taken_before_allocation() -> None:
    pool = BlockPool(4, 4)
    prefix = chain(pool, [1, 2])
    pool.release(prefix)
    assert pool.take([1, 2], 3) is None
    assert np.array_equal(pool.match([1, 2]), prefix)
    assert pool.used == 0
    taken = pool.take([1, 2], 2)
    assert taken is not None
    pages, hits = taken
    assert hits == 2
    assert np.array_equal(pages[:2], prefix)
    assert len(set(pages.tolist())) == 4
    assert np.array_equal(pool.match([1, 2]), prefix)
    assert pool.used == 4


def test_the_deepest_page_of_a_prompt_is_evicted_first() -> None:
    pool = BlockPool(3, 4)
    prefix = chain(pool, [1, 2, 3])
    pool.release(prefix)
    pool.allocate(1)
    assert np.array_equal(pool.match([1, 2, 3]), prefix[:2])


def test_refusals_change_nothing() -> None:
    pool = BlockPool(3, 4)
    pages = pool.allocate(2)
    with pytest.raises(OutOfPagesError, match="2 pages asked for, 1 of 3 available"):
        pool.allocate(2)
    with pytest.raises(BadInputError, match="released more often than held"):
        pool.release(np.concatenate([pages, pages[:1]]))
    assert pool.used == 2
    free = next(page for page in range(3) if page not in pages.tolist())
    with pytest.raises(BadInputError, match="free page"):
        pool.hold(np.array([free], np.int32))
    with pytest.raises(BadInputError, match="only a held page"):
        pool.publish(free, 7)
    with pytest.raises(BadInputError, match="negative"):
        pool.allocate(-1)
    with pytest.raises(BadInputError, match="not positive"):
        BlockPool(0, 4)
    pool.release(pages)
    assert pool.used == 0


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that lists holders; a cached page counts as available."""

    PAGES = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.PAGES, 4)
        self.holders: list[list[int]] = []
        self.remembered: list[int] = []  # least recently released first
        self.hash_of: dict[int, int] = {}

    def held(self) -> set[int]:
        return {page for pages in self.holders for page in pages}

    def model_match(self, hashes: list[int]) -> list[int]:
        page_of = {value: page for page, value in self.hash_of.items()}
        found = []
        for value in hashes:
            if value not in page_of:
                break
            found.append(page_of[value])
        return found

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        free = self.PAGES - len(self.held())
        if count > free:
            with pytest.raises(OutOfPagesError):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count).tolist()
        self.account(pages)
        self.holders.append(pages)

    def account(self, pages: list[int]) -> None:
        assert not self.held() & set(pages)
        plain = self.PAGES - len(self.held()) - len(self.remembered)
        evicted = self.remembered[: max(0, len(pages) - plain)]
        assert set(evicted) <= set(pages)  # the oldest remembered pages go, and no others
        assert not set(self.remembered[len(evicted) :]) & set(pages)
        self.remembered = self.remembered[len(evicted) :]
        for page in evicted:
            del self.hash_of[page]

    @rule(hashes=st.lists(st.integers(0, 5), max_size=3, unique=True), count=st.integers(0, 3))
    def take(self, hashes: list[int], count: int) -> None:
        prefix = self.model_match(hashes)
        room = self.PAGES - len(self.held() | set(prefix))
        taken = self.pool.take(hashes, count)
        if count > room:
            assert taken is None
            return
        assert taken is not None
        pages, hits = taken
        assert hits == len(prefix)
        assert pages[:hits].tolist() == prefix
        self.remembered = [page for page in self.remembered if page not in prefix]
        self.holders.append(prefix)
        self.account(pages[hits:].tolist())
        self.holders[-1] = pages.tolist()

    @precondition(lambda self: self.held())
    @rule(data=st.data(), value=st.integers(0, 5))
    def publish(self, data: st.DataObject, value: int) -> None:
        page = data.draw(st.sampled_from(sorted(self.held())))
        self.pool.publish(page, value)
        if page not in self.hash_of and value not in self.hash_of.values():
            self.hash_of[page] = value

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(np.asarray(pages, np.int32))
        self.remembered += [page for page in reversed(pages) if page in self.hash_of and page not in self.held()]

    @invariant()
    def agrees(self) -> None:
        assert self.pool.used == len(self.held())
        assert self.pool.available == self.PAGES - len(self.held())
        for page in range(self.PAGES):
            assert self.pool.references(page) == sum(pages.count(page) for pages in self.holders)
        for value in range(6):
            assert self.pool.match([value]).tolist() == self.model_match([value])

    def teardown(self) -> None:
        for pages in self.holders:
            self.pool.release(np.asarray(pages, np.int32))
        assert self.pool.used == 0


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
