"""Reference-counted bookkeeping of paged KV memory: which page is free, held, shared or merely remembered. No tensors.

A page is in exactly one of three states:

- *held*: referenced by one or more requests (shared prefix pages have several references);
- *remembered*: unreferenced, but still findable under the chained hash of the tokens it stores; it counts as
  available and is given away in least-recently-released order;
- *free*: neither.

The number of pages is conserved: held + remembered + free = pages, after every operation (ours; the prefix-cache
semantics follow paged attention as in vLLM, the code does not).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from entropic_ctl.compiled import ENABLED, compiled
from entropic_ctl.errors import BadInputError, EntropicError
from entropic_ctl.signals import IntArray

__all__ = ["BlockPool", "OutOfPagesError", "PageArray", "new_pages", "pages_for"]

PageArray = npt.NDArray[np.int32]
Tokens = TypeVar("Tokens", int, IntArray)


class OutOfPagesError(EntropicError):
    """More pages were asked for than are available; nothing was changed."""


def pages_for(tokens: Tokens, page_tokens: int) -> Tokens:
    """Return ceil(tokens / page_tokens): the pages that hold ``tokens`` tokens (an int, or an array of them)."""
    return -(-tokens // page_tokens)


def new_pages(held_tokens: int, more_tokens: int, page_tokens: int) -> int:
    """Return the pages to add so that ``more_tokens`` fit behind ``held_tokens``.

    The difference of two ceilings, never the ceiling of the difference: a partly filled last page of ``page_tokens``
    tokens is used first.

    Examples
    --------
    >>> new_pages(3, 5, 4)
    1
    """
    return pages_for(held_tokens + more_tokens, page_tokens) - pages_for(held_tokens, page_tokens)


@compiled
def _give_back(pages: PageArray, refs: PageArray, stack: PageArray, free: int) -> int:
    """Release pages that nobody else holds; return the new height of the stack, or -1 (and do nothing) if some are."""
    plain = True
    for page in pages:
        refs[page] -= 1
        plain &= refs[page] == 0
    if not plain:
        for page in pages:
            refs[page] += 1
        return -1
    for i in range(pages.shape[0] - 1, -1, -1):
        stack[free] = pages[i]
        free += 1
    return free


class BlockPool:
    """The pages of one KV pool.

    Parameters
    ----------
    pages : int
        Pages in the pool, at least 1.
    page_tokens : int
        Tokens per page, at least 1.
    """

    def __init__(self, pages: int, page_tokens: int) -> None:
        for name, value in (("pages", pages), ("page_tokens", page_tokens)):
            if value < 1:
                raise BadInputError("not positive", where="BlockPool", field=name, value=value, allowed=">= 1")
        self.pages = pages
        self.page_tokens = page_tokens
        self._stack: PageArray = np.arange(pages - 1, -1, -1, dtype=np.int32)  # free pages; the top is at the end
        self._n_free = pages
        self._refs = np.zeros(pages, np.int32)
        self._page_of: dict[int, int] = {}  # hash -> page
        self._hash_of: dict[int, int] = {}  # page -> hash
        self._remembered: OrderedDict[int, None] = OrderedDict()  # least recently released first

    @property
    def available(self) -> int:
        """Pages that ``allocate`` can hand out: free ones and remembered ones."""
        return self._n_free + len(self._remembered)

    @property
    def used(self) -> int:
        """Pages held by at least one request."""
        return self.pages - self.available

    @property
    def columns(self) -> tuple[PageArray, int, PageArray]:
        """The stack of free pages, how many it holds (the top is the last), and the reference counts."""
        return self._stack, self._n_free, self._refs

    @property
    def remembered_pages(self) -> int:
        """Pages that nobody holds but that are still findable."""
        return len(self._remembered)

    def took(self, count: int) -> None:
        """Note that the top ``count`` free pages were taken in place, each with one reference."""
        self._n_free -= count

    def references(self, page: int) -> int:
        """Return how many requests hold ``page``."""
        return int(self._refs[page])

    def allocate(self, count: int) -> PageArray:
        """Take ``count`` pages, each with one reference, free ones before remembered ones.

        Raises
        ------
        OutOfPagesError
            If fewer are available; the pool is unchanged.
        """
        if count < 0:
            raise BadInputError("negative", where="BlockPool.allocate", field="count", value=count, allowed=">= 0")
        if count > self.available:
            raise OutOfPagesError(f"{count} pages asked for, {self.available} of {self.pages} available")
        from_stack = min(count, self._n_free)
        taken = self._stack[self._n_free - from_stack : self._n_free][::-1].copy()
        self._n_free -= from_stack
        if from_stack < count:
            evicted = [self._evict() for _ in range(count - from_stack)]
            taken = np.concatenate([taken, np.asarray(evicted, np.int32)])
        self._refs[taken] = 1
        return taken

    def _evict(self) -> int:
        page, _ = self._remembered.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page

    def match(self, hashes: Sequence[int]) -> PageArray:
        """Return the pages of the longest *contiguous* known prefix of ``hashes``; takes no references."""
        found = []
        for value in hashes:
            page = self._page_of.get(value)
            if page is None:
                break
            found.append(page)
        return np.asarray(found, np.int32)

    def remembered(self, pages: PageArray) -> int:
        """Return how many of ``pages`` are unreferenced: holding them lowers ``available`` by this number."""
        return int(np.count_nonzero(self._refs[pages] == 0))

    def hold(self, pages: PageArray) -> None:
        """Add one reference to each of these distinct held or remembered pages.

        Raises
        ------
        BadInputError
            If one of them is free: its content is undefined.
        """
        for page in pages.tolist():
            if self._refs[page] == 0 and page not in self._remembered:
                raise BadInputError("a free page cannot be shared", where="BlockPool.hold", field="pages", value=page)
        for page in pages.tolist():
            self._remembered.pop(page, None)
        self._refs[pages] += 1

    def take(self, hashes: Sequence[int], count: int) -> tuple[PageArray, int] | None:
        """Hold the known prefix of ``hashes`` and allocate ``count`` pages behind it, or change nothing.

        References are taken before the allocation, so that the new pages never evict the prefix they extend.

        Returns
        -------
        tuple of (int32 array, int) or None
            All pages in order and the number of prefix hits; None if it does not fit.
        """
        prefix = self.match(hashes)
        if count > self.available - self.remembered(prefix):
            return None
        self.hold(prefix)
        return np.concatenate([prefix, self.allocate(count)]), int(prefix.shape[0])

    def publish(self, page: int, value: int) -> None:
        """Make a held, completely written page findable under the chained hash ``value``; the first page wins."""
        if self._refs[page] == 0:
            raise BadInputError(
                "only a held page can be published", where="BlockPool.publish", field="page", value=page
            )
        if value not in self._page_of and page not in self._hash_of:
            self._page_of[value] = page
            self._hash_of[page] = value

    def release(self, pages: PageArray) -> None:
        """Drop one reference per entry; the last one frees the page, or leaves it remembered if it was published.

        Pages are released from the end, so that of one prompt the deepest page is evicted first and the rest of the
        prefix stays matchable.

        Raises
        ------
        BadInputError
            If a page has fewer references than entries (a double release); the pool is unchanged.
        """
        if pages.shape[0] == 0:
            return
        if ENABLED and not self._hash_of and (free := _give_back(pages, self._refs, self._stack, self._n_free)) >= 0:
            self._n_free = free
            return
        np.subtract.at(self._refs, pages, 1)
        left = self._refs[pages]
        if (left < 0).any():
            np.add.at(self._refs, pages, 1)
            raise BadInputError(
                "released more often than held",
                where="BlockPool.release",
                field="pages",
                value=pages[left < 0].tolist(),
            )
        idle = list(dict.fromkeys(pages[left == 0][::-1].tolist()))
        if self._hash_of:
            for page in idle:
                if page in self._hash_of:
                    self._remembered[page] = None
            idle = [page for page in idle if page not in self._hash_of]
        self._stack[self._n_free : self._n_free + len(idle)] = idle
        self._n_free += len(idle)
