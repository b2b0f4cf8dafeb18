"""Which rows have a place in memory this step: who can start, and who gives way when pages are short."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from entropic_ctl.blocks import pages_for
from entropic_ctl.config import EngineConfig
from entropic_ctl.signals import IntArray
from entropic_ctl.slots import PageTable, SlotTable

__all__ = ["Seating"]

_NO_PAGES = np.empty(0, np.int32)


class Seating:
    """Page decisions of one plan, made on the live columns; see :mod:`entropic_ctl.batching` for the rules.

    Attributes
    ----------
    adopted : list of int
        Slots that took references to a shared prefix in this plan.
    preempted : list of int
        Slots whose pages were freed in this plan.
    overdue_lacks_room : bool
        An overdue starter needs pages that rows behind it hold.
    """

    def __init__(self, slots: SlotTable, pages: PageTable, engine: EngineConfig) -> None:
        self._slots, self._pages, self._engine = slots, pages, engine
        self.adopted: list[int] = []
        self.preempted: list[int] = []
        self.overdue_lacks_room = False

    def able(self, order: IntArray, group: IntArray) -> npt.NDArray[np.bool_]:
        """Return which rows can run: page holders, and starters that fit; adopts known prefixes of the latter.

        Parameters
        ----------
        order : IntArray, shape (L,)
            Slots, first to last.
        group : IntArray, shape (L,)
            0 protected, 1 overdue, 2 rest.
        """
        s, table = self._slots, self._pages
        able = table.count[order] > 0
        holders = np.cumsum(able)
        if holders.shape[0] == 0 or holders[-1] == order.shape[0]:
            return able
        page = self._engine.page_tokens
        missing = pages_for(s.known[order], page) - table.count[order]
        room = table.pool.available - int(np.maximum(0, missing[able]).sum())
        for started, i in enumerate(np.flatnonzero(~able).tolist()):
            if holders[i] + started >= self._engine.max_batch:
                break
            slot = int(order[i])
            prefix = _NO_PAGES
            if slot in s.hashes:  # at least one token is left to compute
                prefix = table.pool.match(s.hashes[slot])[: (int(s.known[slot]) - 1) // page]
            cost = int(missing[i]) - prefix.shape[0]
            if prefix.shape[0]:
                cost += table.pool.remembered(prefix)
            if cost > room:
                if group[i] == 2:
                    break
                self.overdue_lacks_room = True
            room -= cost
            able[i] = True
            if prefix.shape[0]:
                table.adopt(slot, prefix)
                s.cached[slot] = prefix.shape[0] * page
                self.adopted.append(slot)
        return able

    def grant(self, order: IntArray, group: IntArray, n: IntArray, most: IntArray) -> None:
        """Give the rows their pages; where pages are short, shrink ``n`` in place, preempt, or leave a row out.

        Tokens of the step that a row cannot use for want of pages go to the seated rows behind it.

        Parameters
        ----------
        order, group : IntArray, shape (L,)
        n : IntArray, shape (L,)
            Tokens per row, 0 for rows that do not run; changed in place.
        most : IntArray, shape (L,)
            Tokens each could use, 0 for rows without a seat; changed in place.
        """
        s, table, page = self._slots, self._pages, self._engine.page_tokens
        more = np.maximum(0, pages_for(s.cached[order] + n, page) - table.count[order])
        more[n == 0] = 0
        if self.overdue_lacks_room or int(more.sum()) > table.pool.available:
            self._squeeze(order, group, n, most)
        else:
            grows = more > 0
            table.grow(order[grows], more[grows])
        if self.adopted:  # a starter that got no token after all gives its prefix back
            running = set(order[n > 0].tolist())
            for slot in self.adopted:
                if slot not in running and table.count[slot]:
                    self._give_back(slot)

    def draft(self, slots: IntArray, wish: IntArray, n: IntArray) -> IntArray:
        """Return how many tokens each row may draft; their pages are taken from what is free, never from other rows.

        A row drafts no token that its limit would cut off, rows share what the step's token budget has left, and where
        no page is free a draft ends with the pages held. Pages beyond the accepted tokens stay with the row: it
        fills them next.

        Parameters
        ----------
        slots, wish, n : IntArray, shape (R,)
            Running rows in order, the most each would draft, and their tokens so far (granted).
        """
        s, table, page = self._slots, self._pages, self._engine.page_tokens
        wish = np.minimum(wish, s.stop_at[slots] - s.known[slots] - 1).clip(0)
        left = self._engine.max_batch_tokens - int(n.sum())
        wish = np.minimum(wish, (left - np.cumsum(wish) + wish).clip(0))
        end = s.cached[slots] + n
        more = np.maximum(0, pages_for(end + wish, page) - table.count[slots])
        if int(more.sum()) > table.pool.available:
            more = np.minimum(more, (table.pool.available - np.cumsum(more) + more).clip(0))
            wish = np.minimum(wish, (table.count[slots] + more) * page - end)
        grows = more > 0
        table.grow(slots[grows], more[grows])
        return wish

    def _give_back(self, slot: int) -> None:
        self._pages.drop_unlogged(slot)
        self._slots.cached[slot] = 0

    def _squeeze(self, order: IntArray, group: IntArray, n: IntArray, most: IntArray) -> None:
        s, table, page = self._slots, self._pages, self._engine.page_tokens
        holders = np.flatnonzero(table.count[order] > 0).tolist()
        left = self._engine.max_batch_tokens - int(n.sum())
        for i in np.flatnonzero(most).tolist():
            asked = min(int(most[i]), int(n[i]) + left)
            if asked == 0:  # preempted meanwhile, or the step has no token left
                continue
            left -= asked - int(n[i])
            slot = int(order[i])
            held, cached = int(table.count[slot]), int(s.cached[slot])
            starting = held == 0 or slot in self.adopted
            least = 0 if held * page > cached else 1
            if starting:  # all known tokens must find a place
                least = pages_for(int(s.known[slot]), page) - held
            if not starting or group[i] < 2:
                while table.pool.available < least and holders and holders[-1] > i:
                    last = holders.pop()
                    self._take(int(order[last]))
                    left += int(n[last])
                    n[last] = most[last] = 0
            room = (held + table.pool.available) * page - cached if table.pool.available >= least else 0
            n[i] = min(asked, room)
            left += asked - int(n[i])
            if n[i] == 0:
                continue
            more = pages_for(cached + int(n[i]), page) - held
            if more > 0:
                table.grow(order[i : i + 1], np.array([more]))

    def _take(self, slot: int) -> None:
        """Free the pages of a row behind; it is recomputed later."""
        if slot in self.adopted:
            self._give_back(slot)
            return
        s = self._slots
        self._pages.drop(slot)
        s.prefilled[slot] = max(int(s.prefilled[slot]), min(int(s.cached[slot]), int(s.prompt[slot])))
        s.cached[slot] = s.protected_until[slot] = 0
        s.owed[slot] = False
        self.preempted.append(slot)
