"""The macro law's interface: who runs next.

A policy turns a columnar view of the live requests into a score, higher first. Ties break by arrival order. The hard
waiting bound (overdue requests first, longest wait first, not preempted by the rest; see
:mod:`entropic_ctl.ordering`) is common to all policies and is applied by the batcher, not by the policy. It counts
from admission: the queue for a slot (``max_live``) lies before it and has no bound under overload.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from entropic_ctl import fields
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["Departures", "EntropySignals", "ScheduleView", "SchedulingConfig", "SchedulingPolicy"]


@dataclass(frozen=True)
class SchedulingConfig:
    """Parameters every macro policy has."""

    wait_limit_steps: int = fields.integer(200, 1, 10**9, "W: unserved iterations that make a request overdue")
    quantum_steps: int = fields.integer(8, 1, 10**6, "q: iterations a seat is held before the order is drawn up again")
    reduction_weight: float = fields.number(
        0.2, 0.0, 1.0, "weight of the newest term in the EWMA of entropy reductions", open_lo=True
    )

    def __post_init__(self) -> None:
        fields.check(self)


@dataclass(frozen=True, slots=True)
class Departures:
    """Requests that left (served or cancelled) since the order was last drawn, in the order in which they left.

    What a policy needs to keep an account that outlives requests; columns as in :class:`ScheduleView`, final values.
    """

    arrival_order: IntArray
    client: IntArray
    prompt_computed: IntArray
    generated_tokens: IntArray


@dataclass(frozen=True, slots=True)
class ScheduleView:
    """Columns over the live requests, one entry each, in arrival order.

    Entropies are the model entropies known to the host (``observation_lag`` applied); ``seen`` counts them.
    ``arrival_order`` is unique in a run and never used again, so it identifies a request from draw to draw.
    """

    now_s: float
    arrival_s: FloatArray
    arrival_order: IntArray
    prompt_tokens: IntArray
    known_tokens: IntArray  # prompt + generated
    cached_tokens: IntArray  # tokens whose K and V are in the pool
    generated_tokens: IntArray
    token_limit: IntArray  # effective max_new_tokens
    pages: IntArray
    waited_steps: IntArray
    seated: npt.NDArray[np.bool_]  # ran in the last plan
    entropy: FloatArray  # last model entropy, NaN while seen == 0
    entropy_mean: FloatArray  # running mean, NaN while seen == 0
    reduction_ewma: FloatArray  # EWMA of max(0, H_{t-1} - H_t), 0 while seen < 2
    entropy_cov1: FloatArray  # running lag-1 autocovariance about the running mean
    entropy_var: FloatArray  # running variance
    seen: IntArray
    pool_pages: int
    token_budget: int  # tokens one step can run
    step_s: float  # EWMA of the duration of a step, seconds (0 before the first)
    client: IntArray  # who asks; -1: a client of its own
    expected_tokens: IntArray  # predicted output length, 0: unknown
    prompt_computed: IntArray  # prompt tokens in the pool, or that were before a preemption: each counts once
    departed: Departures


@dataclass(frozen=True, slots=True)
class EntropySignals:
    """What a policy knows of each live request's model entropy; columns as in :class:`ScheduleView`."""

    entropy: FloatArray
    entropy_mean: FloatArray
    reduction_ewma: FloatArray
    entropy_cov1: FloatArray
    entropy_var: FloatArray
    seen: IntArray


class SchedulingPolicy(Protocol):
    """A macro policy.

    A policy whose scores are always equal may say ``reads_view = False`` (a class attribute, not required): the loop
    then does not build the view at all.

    A policy may keep state of its own, and keep it a function of the views it was shown, so that a replay reproduces
    it. It then says ``stateful = True`` (a class attribute, not required) and can rely on this: ``score`` is called in
    the first plan after every change of the live set (admission, finish, cancellation), and then at least every
    ``quantum_steps`` iterations while somebody waits; ``departed`` names who left in between. For a policy without
    state, no order is drawn while every live request can have its seat, and ``departed`` is empty.
    """

    @property
    def config(self) -> SchedulingConfig:
        """The parameters."""
        ...

    def score(self, view: ScheduleView) -> FloatArray:
        """Return one score per live request; higher runs first. NaN is an error of the policy."""
        ...
