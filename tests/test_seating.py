"""Pages of a step, on the path that plans take."""

from __future__ import annotations

import numpy as np

from entropic_ctl.config import EngineConfig
from entropic_ctl.seating import Seating
from entropic_ctl.signals import Request
from entropic_ctl.slots import PageTable, SlotTable


def test_s7_a_chunk_that_starts_inside_a_page_takes_the_difference_of_the_ceilings() -> None:
    """Pages of 4, 3 tokens held, a chunk of 5 and exactly 1 free page: it runs whole, with one new page."""
    engine = EngineConfig(pages=4, page_tokens=4, max_batch=1)
    slots, pages = SlotTable(engine), PageTable(engine)
    order = slots.add([(0, Request(0, 0.0, prompt_tokens=8, max_new_tokens=1))], step=0)
    pages.grow(order, np.array([1]))
    slots.cached[order] = 3
    pages.pool.allocate(2)  # somebody else's
    assert pages.pool.available == 1
    n = np.array([5])
    Seating(slots, pages, engine).grant(order, np.array([2]), n, n.copy())
    assert n.tolist() == [5]
    assert pages.count[order].tolist() == [2]
    assert pages.pool.available == 0
