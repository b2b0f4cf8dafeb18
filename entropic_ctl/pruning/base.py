"""The meso law's interface: how much attention mass a request may lose per step.

A law maps the last observed model entropy of each request to theta, an information-loss budget in nats: for every
query head of every pruned layer, -ln(1 - m) <= theta, with m the softmax mass of the pages not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from entropic_ctl import fields
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import Array

__all__ = ["PruningConfig", "PruningLaw"]


@dataclass(frozen=True)
class PruningConfig:
    """Parameters every meso law has."""

    sink_pages: int = fields.integer(1, 0, 1024, "pages at the start of the context that are always read")
    recent_pages: int = fields.integer(4, 1, 1024, "last pages always read, the one being written included")
    dense_layers: int = fields.integer(2, 0, 1024, "leading layers that are never pruned")
    selection: str = fields.choice("union", ("union", "group_mean"), "what a KV head keeps for its query heads")
    min_context: int = fields.integer(
        0, 0, 2**31 - 1, "contexts shorter than this, in tokens, are read in full: pruning does not pay there"
    )
    total_nats: float = fields.number(
        0.0, 0.0, 1e9, "most loss a request may spend, summed over its steps, then dense; 0: no limit"
    )

    def __post_init__(self) -> None:
        fields.check(self)
        if self.total_nats and self.selection != "union":
            raise BadInputError(
                "a limit on the total needs steps that stay within their budget",
                field="total_nats",
                value=self.total_nats,
                allowed=f"0 with selection = {self.selection!r}: single heads may lose more than theta",
                remedy="set selection = 'union'",
            )


class PruningLaw(Protocol):
    """A meso law. State is (theta, timer) per request, both arrays (R,)."""

    @property
    def config(self) -> PruningConfig:
        """The parameters."""
        ...

    def start(self) -> tuple[float, int]:
        """Return (theta_nats, timer) of a new request."""
        ...

    def update(self, theta: Array, timer: Array, model_entropy: Array) -> tuple[Array, Array]:
        """Return the next (theta, timer) after one accepted token with this model entropy."""
        ...
