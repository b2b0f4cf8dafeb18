"""Live requests as columns over stable slots, and the page table that goes with them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from entropic_ctl.admission import capacity_tokens, token_limit
from entropic_ctl.blocks import BlockPool, PageArray
from entropic_ctl.config import EngineConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import IntArray, Request

__all__ = ["PageTable", "SlotTable"]

_MAX_TABLE = 2**32  # entries; memory is only touched where rows use it


class SlotTable:
    """Struct of arrays over ``max_live`` slots; a request keeps its slot from admission to finish.

    Every column has shape (max_live,). ``known`` counts prompt and generated tokens, ``cached`` those whose K and V
    are in the pool, ``stop_at`` is the value of ``known`` at which the request ends, ``cut`` says that this is the
    capacity and not the request's own limit, ``last_run`` is the last iteration in which the row ran, ``prefilled``
    the prompt tokens that were in the pool when its pages were last taken.
    """

    def __init__(self, engine: EngineConfig) -> None:
        n = engine.max_live
        self._engine = engine
        self.id = np.full(n, -1, np.int64)
        self.arrival_s = np.zeros(n)
        self.order = np.zeros(n, np.int64)
        self.prompt = np.zeros(n, np.int64)
        self.limit = np.zeros(n, np.int64)
        self.client = np.full(n, -1, np.int64)
        self.expected = np.zeros(n, np.int64)
        self.prefilled = np.zeros(n, np.int64)
        self.stop_at = np.zeros(n, np.int64)
        self.known = np.zeros(n, np.int64)
        self.cached = np.zeros(n, np.int64)
        self.last_run = np.zeros(n, np.int64)
        self.protected_until = np.zeros(n, np.int64)
        self.owed = np.zeros(n, np.bool_)  # got a protected seat and has not produced a token on it yet
        self.greedy = np.zeros(n, np.bool_)
        self.cut = np.zeros(n, np.bool_)
        self.live: IntArray = np.empty(0, np.int64)  # slots in arrival order
        self.slot_of: dict[int, int] = {}
        self.hashes: dict[int, tuple[int, ...]] = {}  # slot -> prefix hashes, when prefix caching is on
        self._free = list(range(n - 1, -1, -1))

    @property
    def room(self) -> int:
        """Free slots."""
        return len(self._free)

    def add(self, requests: list[tuple[int, Request]], step: int) -> IntArray:
        """Give each (arrival order, request) a slot; ``step`` is the iteration about to be planned."""
        taken = []
        for order, request in requests:
            slot = self._free.pop()
            taken.append(slot)
            self.id[slot], self.arrival_s[slot], self.order[slot] = request.id, request.arrival_s, order
            limit = token_limit(request, self._engine)
            self.prompt[slot] = self.known[slot] = request.prompt_tokens
            self.limit[slot], self.stop_at[slot] = limit, request.prompt_tokens + limit
            self.cut[slot], self.greedy[slot] = limit < request.max_new_tokens, request.greedy
            self.client[slot], self.expected[slot] = request.client, request.expected_tokens
            self.cached[slot] = self.protected_until[slot] = self.prefilled[slot] = 0
            self.last_run[slot], self.owed[slot] = step - 1, False
            self.slot_of[request.id] = slot
            if self._engine.prefix_caching and request.prefix_hashes:
                self.hashes[slot] = request.prefix_hashes
        added = np.asarray(taken, np.int64)
        self.live = np.concatenate([self.live, added])
        return added

    def protected(self, slots: IntArray, step: int) -> npt.NDArray[np.bool_]:
        """Return which rows hold a protected seat in iteration ``step``."""
        return (self.protected_until[slots] > step) | self.owed[slots]

    def prompt_computed(self, slots: IntArray) -> IntArray:
        """Return the prompt tokens that are, or before a preemption were, in the pool."""
        computed: IntArray = np.maximum(self.prefilled[slots], np.minimum(self.cached[slots], self.prompt[slots]))
        return computed

    def remove(self, slots: list[int]) -> None:
        """Forget the requests in ``slots``."""
        for slot in slots:
            del self.slot_of[int(self.id[slot])]
            self.hashes.pop(slot, None)
            self.id[slot] = -1
        self._free.extend(slots)
        self.live = self.live[self.id[self.live] >= 0]


class PageTable:
    """Which pages each slot holds, in order, on top of a :class:`BlockPool`.

    Attributes
    ----------
    view : int32 array, shape (max_live, max_pages), read-only
    count : IntArray, shape (max_live,)
        Pages held per slot.
    """

    def __init__(self, engine: EngineConfig) -> None:
        self.page_tokens = engine.page_tokens
        self.pool = BlockPool(engine.pages, engine.page_tokens)
        width = -(-capacity_tokens(engine) // engine.page_tokens)
        if width * engine.max_live > _MAX_TABLE:
            raise BadInputError(
                "page table too large",
                where="EngineConfig",
                field="max_live",
                value=engine.max_live,
                allowed=f"max_live * {width} pages per request <= {_MAX_TABLE}",
                remedy="lower max_live, or set max_context",
            )
        self._table = np.zeros((engine.max_live, width), np.int32)
        self.view = self._table.view()
        self.view.flags.writeable = False
        self.count = np.zeros(engine.max_live, np.int64)
        self._new: list[npt.NDArray[np.int32]] = []

    @property
    def columns(self) -> tuple[IntArray, PageArray, PageArray, int, PageArray]:
        """``count``, the writable table, and the pool's free stack with its height and reference counts."""
        return self.count, self._table, *self.pool.columns

    def take_log(self) -> npt.NDArray[np.int32]:
        """Return the (slot, index, page) triples put in the table since the last call, shape (K, 3)."""
        if not self._new:
            return np.empty((0, 3), np.int32)
        log = self._new[0] if len(self._new) == 1 else np.concatenate(self._new)
        self._new = []
        return log

    def _put(self, slots: IntArray, index: IntArray, pages: PageArray) -> None:
        self._table[slots, index] = pages
        log = np.empty((pages.shape[0], 3), np.int32)
        log[:, 0], log[:, 1], log[:, 2] = slots, index, pages
        self._new.append(log)

    def grow(self, slots: IntArray, counts: IntArray) -> None:
        """Append ``counts[i]`` new pages to slot ``slots[i]`` (distinct slots)."""
        total = int(counts.sum())
        if total == 0:
            return
        held = self.count[slots]
        start = np.cumsum(counts) - counts
        index = np.arange(total) + np.repeat(held - start, counts)
        self._put(np.repeat(slots, counts), index, self.pool.allocate(total))
        self.count[slots] = held + counts

    def adopt(self, slot: int, pages: PageArray) -> None:
        """Make shared prefix ``pages`` the first pages of an empty slot (a reference to each is taken)."""
        if pages.shape[0]:
            self.pool.hold(pages)
            self._put(np.full(pages.shape[0], slot), np.arange(pages.shape[0]), pages)
            self.count[slot] = pages.shape[0]

    def drop(self, slot: int) -> None:
        """Release every page of ``slot``."""
        self.pool.release(self._table[slot, : self.count[slot]].copy())
        self.count[slot] = 0

    def drop_unlogged(self, slot: int) -> None:
        """Undo an :meth:`adopt` of the current plan."""
        self.drop(slot)
        self._new = [log for log in self._new if not (log[:, 0] == slot).all()]
