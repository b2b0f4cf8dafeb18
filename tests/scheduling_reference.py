"""Every macro policy's score once more, one request and one number at a time, from the published or stated rule.

Independent of the package: plain Python over a model of the requests that the test keeps itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Row:
    """A live request as an onlooker sees it; its prompt fits one step and its pages are never taken."""

    id: int
    arrival_s: float
    prompt: int
    limit: int
    client: int = -1
    expected: int = 0
    started: bool = False
    generated: int = 0
    waited: int = 0
    entropies: list[float] = field(default_factory=list)

    @property
    def known(self) -> int:
        return self.prompt + self.generated

    @property
    def pending(self) -> int:
        return 1 if self.started else self.prompt

    @property
    def who(self) -> Any:
        return self.client if self.client >= 0 else ("own", self.id)


@dataclass(frozen=True)
class World:
    now_s: float
    step_s: float
    budget: int
    pool_pages: int
    page_tokens: int


Scores = dict[int, float]


def expected_length(row: Row, c: Any) -> float:
    if not row.expected:
        return min(row.generated + c.prior_tokens, row.limit)
    length = float(row.expected)
    while length <= row.generated:
        length *= 2
    return min(length, row.limit)


class Fcfs:
    def __init__(self, config: Any) -> None:
        pass

    def __call__(self, rows: list[Row], world: World) -> Scores:
        return {row.id: 0.0 for row in rows}


class Sjf:
    def __init__(self, config: Any) -> None:
        self.c = config

    def __call__(self, rows: list[Row], world: World) -> Scores:
        return {row.id: -((row.prompt - 1) / world.budget + expected_length(row, self.c)) for row in rows}


class Srpt(Sjf):
    def __call__(self, rows: list[Row], world: World) -> Scores:
        return {
            row.id: -((row.pending - 1) / world.budget + expected_length(row, self.c) - row.generated) for row in rows
        }


class Fair:
    """Virtual token counters in a dict that forgets nobody. ``served`` must be told of every step."""

    def __init__(self, config: Any) -> None:
        self.c = config
        self.counter: dict[Any, float] = {}
        self.before: set[Any] = set()
        self.floor = 0.0

    def served(self, row: Row) -> None:
        """Called when ``row`` is about to run: its prompt if it starts, and one token."""
        self.counter[row.who] += self.c.prompt_weight * (0 if row.started else row.prompt) + self.c.output_weight

    def __call__(self, rows: list[Row], world: World) -> Scores:
        active = {row.who for row in rows}
        stayed = active & self.before
        among = stayed or self.before
        if among:
            self.floor = max(self.floor, min(self.counter[who] for who in among))
        for who in active - stayed:
            self.counter[who] = max(self.counter.get(who, 0.0), self.floor)
        self.before = active
        return {row.id: -self.counter[row.who] for row in rows}


class Mlfq:
    def __init__(self, config: Any) -> None:
        self.c = config
        self.period = 0
        self.before: dict[int, float] = {}

    def __call__(self, rows: list[Row], world: World) -> Scores:
        c = self.c
        attained = {row.id: (row.prompt / world.budget if row.started else 0.0) + row.generated for row in rows}
        if c.boost_s and world.now_s // c.boost_s > self.period:
            self.period = world.now_s // c.boost_s
            self.before = dict(attained)
        out = {}
        for row in rows:
            service, level, left = attained[row.id] - self.before.get(row.id, 0.0), 0, c.base_steps
            while level < c.levels - 1 and service >= left:
                level += 1
                left += c.base_steps * c.ratio**level
            if c.entry == "skip" and row.id not in self.before:
                entry = 0
                while entry < c.levels - 1 and row.prompt / world.budget > c.base_steps * c.ratio**entry:
                    entry += 1
                level = max(level, entry)
            out[row.id] = -float(level)
        return out


class Qoe:
    def __init__(self, config: Any) -> None:
        self.c = config

    def demand(self, row: Row, at_s: float) -> float:
        late = at_s - row.arrival_s - self.c.ttft_s
        return 0.0 if late < 0 else min(row.limit, 1.0 + self.c.reading_tokens_per_s * late)

    def whole(self, row: Row, until_s: float, parts: int = 0) -> float:
        """Area under the demand, in closed form: a jump to 1, a ramp to the limit, a plateau."""
        span = until_s - row.arrival_s - self.c.ttft_s
        if span <= 0:
            return 0.0
        ramp = (row.limit - 1) / self.c.reading_tokens_per_s
        if span <= ramp:
            return span * (1.0 + self.demand(row, until_s)) / 2
        return ramp * (1 + row.limit) / 2 + (span - ramp) * row.limit

    def __call__(self, rows: list[Row], world: World) -> Scores:
        c, out, parts = self.c, {}, 16
        step_s = world.step_s or 1.0 / c.reading_tokens_per_s
        for row in rows:
            area = 0.0
            for part in range(parts):
                after = (part + 0.5) * (c.horizon_s / parts)
                demand = self.demand(row, world.now_s + after)
                steps = after / step_s - (math.ceil(row.pending / world.budget) - 1)
                served = min(row.generated + max(0, math.floor(steps)), row.limit)
                area += min(served, demand) - min(row.generated, demand)
            whole = self.whole(row, world.now_s + c.horizon_s)
            out[row.id] = area * c.horizon_s / parts / whole / row.known if whole > 0 else 0.0
        return out


class Entropic:
    def __init__(self, config: Any) -> None:
        self.c = config

    def __call__(self, rows: list[Row], world: World) -> Scores:
        c, out = self.c, {}
        for row in rows:
            ewma, h = 0.0, row.entropies
            for i in range(1, len(h)):
                ewma += (c.reduction_weight if i > 1 else 1.0) * (max(0.0, h[i - 1] - h[i]) - ewma)
            shown = max(len(h) - 1, 0)
            gain = (c.prior_weight * c.prior_nats + shown * ewma) / (c.prior_weight + shown)
            held = -(-(row.known - 1) // world.page_tokens) if row.started else 0
            steps = max(row.pending / world.budget, 1.0) - 1 + min(row.limit - row.generated, c.expected_output_tokens)
            cost = c.alpha * min(row.pending / world.budget, 1.0) + c.beta * held / world.pool_pages
            out[row.id] = gain / (cost + c.gamma * steps * world.step_s / c.latency_objective_s)
        return out


REFERENCE: dict[str, Callable[[Any], Any]] = {
    "fcfs": Fcfs, "sjf": Sjf, "srpt": Srpt, "fair": Fair, "mlfq": Mlfq, "qoe": Qoe, "entropic": Entropic,
}  # fmt: skip
