"""Fair sharing between clients: the client that has received the least service goes first.

    score = -counter(client),   service = w_in * prompt tokens computed + w_out * tokens generated

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with their weights
1 and 2. A client that becomes active again is lifted to the least counter among the active clients, so that nobody
saves up credit while away; when nobody is active, to the least of those that were active last. Within a client, first
come first served.

Where this differs from the paper (ours): a client is active while it has *live* requests, running or waiting, because
running requests compete for their seats here too; prompt tokens are charged as they are computed (chunk by chunk), once
each, so that recomputation after a preemption is nobody's debt, and a cached prefix counts as service received; and the
order governs live requests only, the queue for a slot (``max_live``) before them is first come first served, so a
flooding client is held back only if ``max_live`` is large. A request without a client is a client of its own.

Fairness: between two clients that both have at least B (seats) live requests, services received since both became
active differ by at most B (w_in L + w_out q), with prompts of at most L tokens and q the quantum: while one is behind,
it has all the seats, and one quantum can put it ahead by no more than that. So over *any* interval they differ by at
most twice as much, as in the paper, where the batch plays the part of the quantum. (Page shortage and the waiting bound
can override the order.)

Counters outlive requests, but not for ever: the floor to which a client is lifted never falls, so the counter of an
absent client at or below it is forgotten without any effect. ``clients`` bounds the rest; beyond it the absent clients
nearest the floor are forgotten first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from entropic_ctl import fields
from entropic_ctl.scheduling.base import Departures, ScheduleView, SchedulingConfig, SchedulingPolicy
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["Config", "Fair", "build"]


@dataclass(frozen=True)
class Config(SchedulingConfig):
    """Weights of service, and how many absent clients are remembered."""

    prompt_weight: float = fields.number(1.0, 0.0, 1e6, "w_in: service per prompt token computed")
    output_weight: float = fields.number(2.0, 0.0, 1e6, "w_out: service per token generated", open_lo=True)
    clients: int = fields.integer(4096, 0, 2**24, "most absent clients whose counters are kept")


def _keys(client: IntArray, arrival_order: IntArray) -> IntArray:
    """Return one number per client; a request without a client has one of its own, below 0."""
    keys: IntArray = np.where(client >= 0, client, -1 - arrival_order)
    return keys


class Fair:
    """Counters of the clients, carried from draw to draw.

    ``_keys`` (sorted) and ``_base`` are the clients remembered and the service of their departed requests, lifts
    included; ``_active`` says who had live requests at the last draw. The counter of a client is its base and the
    service of its live requests.
    """

    stateful: ClassVar[bool] = True  # the order is drawn whenever somebody comes or goes

    def __init__(self, config: Config) -> None:
        self.config = config
        self._keys: IntArray = np.empty(0, np.int64)
        self._base: FloatArray = np.empty(0)
        self._active = np.empty(0, np.bool_)
        self._floor = 0.0

    @property
    def remembered(self) -> int:
        """Clients with a counter."""
        return int(self._keys.shape[0])

    def _service(self, columns: ScheduleView | Departures) -> FloatArray:
        c = self.config
        service: FloatArray = c.prompt_weight * columns.prompt_computed + c.output_weight * columns.generated_tokens
        return service

    def score(self, view: ScheduleView) -> FloatArray:
        """Return minus the counter of each request's client, shape (L,), in weighted tokens."""
        self._charge(view.departed)
        keys, row = np.unique(_keys(view.client, view.arrival_order), return_inverse=True)
        service = np.bincount(row, weights=self._service(view), minlength=keys.shape[0])
        place, known = self._find(keys)
        base = np.zeros(keys.shape[0])
        base[known] = self._base[place[known]]
        stayed = known.copy()
        stayed[known] = self._active[place[known]]
        counter = base + service
        self._raise_floor(counter[stayed])
        lift = np.maximum(self._floor - counter, 0.0) * ~stayed
        self._remember(keys, base + lift, place[known])
        score: FloatArray = -(counter + lift)[row]
        return score

    def _charge(self, departed: Departures) -> None:
        """Add the service of requests that left to their clients, all of which were live at the last draw."""
        if departed.client.shape[0]:
            place, known = self._find(_keys(departed.client, departed.arrival_order))
            np.add.at(self._base, place[known], self._service(departed)[known])

    def _find(self, keys: IntArray) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Return the place of each key among those remembered, and whether it is there."""
        place = np.searchsorted(self._keys, keys)
        known = place < self.remembered
        known[known] = self._keys[place[known]] == keys[known]
        return place, known

    def _raise_floor(self, stayed: FloatArray) -> None:
        """Set the floor to the least counter among those that stayed active, or else among those that were."""
        last = stayed if stayed.shape[0] else self._base[self._active]
        if last.shape[0]:
            self._floor = max(self._floor, float(last.min()))

    def _remember(self, keys: IntArray, base: FloatArray, place: IntArray) -> None:
        """Keep the active clients, and the absent ones whose counters still matter."""
        absent = (self._keys >= 0) & (self._base > self._floor)
        absent[place] = False
        kept = np.flatnonzero(absent)
        if kept.shape[0] > self.config.clients:
            far = np.argsort(-self._base[kept], kind="stable")[: self.config.clients]
            kept = kept[np.sort(far)]
        everyone = np.concatenate([keys, self._keys[kept]])
        order = np.argsort(everyone)
        self._keys = everyone[order]
        self._base = np.concatenate([base, self._base[kept]])[order]
        self._active = order < keys.shape[0]


def build(config: Config) -> SchedulingPolicy:
    """Return the policy."""
    return Fair(config)
