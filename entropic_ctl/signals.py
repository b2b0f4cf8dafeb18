"""The records that cross the boundary between the control plane and an engine, real or simulated.

All per-row data are columns (one NumPy array per quantity), never lists of row objects: a simulator iteration
costs a handful of array operations whatever the batch size. Records are immutable named tuples; arrays
inside them are to be treated as read-only by the receiver. Entropies are in nats, times in seconds, sizes in tokens,
bytes or pages.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "Array",
    "Finish",
    "FinishReason",
    "FloatArray",
    "IntArray",
    "LogitView",
    "Request",
    "StepPlan",
    "StepResult",
    "Tempered",
]

Array = Any
"""An array of any array-API library (NumPy, torch)."""
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class FinishReason(enum.StrEnum):
    """Why a request left the system."""

    EOS = "eos"
    STOP = "stop"  # a stop string matched
    LENGTH = "length"  # max_new_tokens reached
    CAPACITY = "kv_capacity"  # the whole KV pool (or the model's context) is used by this one request
    CANCELLED = "cancelled"
    EMPTY_SUPPORT = "empty_support"  # every logit was -inf or NaN: nothing can be sampled
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request as the control plane sees it (no text, no tensors).

    Parameters
    ----------
    id : int
        Unique, non-negative.
    arrival_s : float
        Time the request entered the system, seconds.
    prompt_tokens : int
        At least 1.
    max_new_tokens : int
        At least 1. A larger value than the KV pool can hold ends with ``FinishReason.CAPACITY``.
    greedy : bool
        Explicit T = 0 mode: argmax, and no temperature law is run or updated for this request.
    prefix_hashes : tuple of int
        Chained hash of each *full* page of the prompt, for prefix caching; empty when unknown.
    client : int
        Who asks, for policies that share service between clients; -1: a client of its own.
    expected_tokens : int
        Predicted output length, for policies that order by it; 0 when unknown. The laws never see the true one.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    max_new_tokens: int
    greedy: bool = False
    prefix_hashes: tuple[int, ...] = ()
    client: int = -1
    expected_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """A request that left, and why. ``detail`` is a sentence for people (for rejections: which limit, what value)."""

    id: int
    reason: FinishReason
    detail: str = ""


_NO_IDS: IntArray = np.empty(0, np.int64)
_NO_VALUES: FloatArray = np.empty(0, np.float64)
_NO_IDS.flags.writeable = _NO_VALUES.flags.writeable = False


class StepPlan(NamedTuple):
    """Decisions of one engine iteration.

    Row columns have length R, in the order in which rows are packed into the forward pass.

    Parameters
    ----------
    step : int
        Iteration number, from 0.
    now_s : float
        Time at which the plan was made.
    ids, slots : IntArray, shape (R,)
        Request ids, and the stable slot each occupies from admission to finish.
    context : IntArray, shape (R,)
        Tokens already in the KV cache before this step.
    n_tokens : IntArray, shape (R,)
        Tokens to run through the model this step (>= 1): known tokens ``context .. context + n_tokens``.
    samples : bool array, shape (R,)
        True where the row's last token yields a new token (a decode row, or the last prefill chunk).
    greedy : bool array, shape (R,)
    theta_nats : FloatArray, shape (R,)
        Information-loss budget per row; 0 means dense. Applies to decode rows only (prefill is exact).
    n_draft : IntArray, shape (R,)
        Most tokens drafted for a decode row (speculative decoding), included in ``n_tokens``; the driver may draft
        fewer. Such a row is dense, and yields up to ``n_draft + 1`` tokens.
    paused, preempted : IntArray
        Ids that hold pages but do not run; ids whose pages were freed in this plan.
    rejected : tuple of Finish
        Requests that can never be served, with the reason.
    block_table : int32 array, shape (max_live, max_pages), read-only view
        Page ids by slot; valid until the next ``plan``. Row ``slot`` holds ``ceil((context + n_tokens) / page)`` pages,
        or more after a rejected draft.
    allocated : int32 array, shape (K, 3)
        (slot, index in table, page id) of pages newly put in a table by this plan, shared prefix pages included.
    admitted : IntArray
        Ids that got a slot just before this plan. From here on the waiting bound holds for them; the time before, in
        the queue for a slot, depends on the load and has no bound.
    pages_used : int
        Pages of the pool that live requests hold when this plan runs, shared ones once, those of paused rows included.
    """

    step: int
    now_s: float
    ids: IntArray
    slots: IntArray
    context: IntArray
    n_tokens: IntArray
    samples: npt.NDArray[np.bool_]
    greedy: npt.NDArray[np.bool_]
    theta_nats: FloatArray
    n_draft: IntArray
    paused: IntArray
    preempted: IntArray
    rejected: tuple[Finish, ...]
    block_table: npt.NDArray[np.int32]
    allocated: npt.NDArray[np.int32]
    admitted: IntArray = _NO_IDS
    pages_used: int = 0

    @property
    def n_rows(self) -> int:
        """Number of rows that run."""
        return int(self.ids.shape[0])

    def pages(self, row: int, page_tokens: int) -> npt.NDArray[np.int32]:
        """Page ids that row ``row`` may read or write in this step."""
        n = -(-int(self.context[row] + self.n_tokens[row]) // page_tokens)
        return self.block_table[self.slots[row], :n]


class LogitView(Protocol):
    """This step's own next-token distributions, one row per *sampling* row of the plan, in plan order.

    A row that drafts has ``1 + n_draft`` of them, one per token verified and the one after.
    """

    @property
    def model_entropy(self) -> Array:
        """Entropy of the raw logits at temperature 1, shape (M,), nats: what clock and scheduler read."""
        ...

    def at(self, temperature: Array) -> tuple[Array, Array]:
        """Tempered entropy (nats) and varentropy (nats squared), each (M,), of processed logits / ``temperature``.

        At T = infinity: the logarithm of the number of tokens with non-zero probability, and 0.
        """
        ...


class Tempered(NamedTuple):
    """What ``temper`` decided, one entry per sampling row; greedy rows have T = 0, H_tempered = V = 0.

    ``valid`` is False where the distribution has empty support or a NaN: such a row must end with
    ``FinishReason.EMPTY_SUPPORT`` and its controllers are not updated.
    """

    temperature: FloatArray
    model_entropy: FloatArray
    tempered_entropy: FloatArray
    varentropy: FloatArray
    valid: npt.NDArray[np.bool_]


class StepResult(NamedTuple):
    """What one iteration did, as measured (engine) or modelled (simulator).

    Parameters
    ----------
    step : int
    start_s, end_s : float
    token_ids : IntArray, shape (M,)
        Request id of each *accepted* token; with speculation an id may occur several times, in order.
    tokens : IntArray, shape (M,)
        The token itself (-1 in the simulator, where tokens have no identity).
    temperature, model_entropy, tempered_entropy, varentropy : FloatArray, shape (M,)
    kept_fraction, pruned_mass_mean, pruned_mass_max, certificate_max : FloatArray, shape (R,)
        Per plan row: share of (KV head, page) pairs read in the pruned layers (layers that are never pruned are left
        out), and the certified upper bounds on softmax mass lost there: mean over (layer, head), maximum over them,
        and the largest ``-ln(1 - m)`` in nats. Dense rows: 1, 0, 0, 0.
    kv_bytes, flops : float
        KV-cache bytes read (page metadata and scoring reads included) and floating-point operations.
    energy_j : float
        Joules spent (modelled, or counted by the machine); 0 where nobody knows.
    finished : tuple of Finish
        Requests the driver ended (EOS, stop string, empty support). Length and capacity are the batcher's.
    drafted : IntArray, shape (R,)
        Tokens really drafted and verified per plan row, at most the plan's ``n_draft``; empty: none.
    """

    step: int
    start_s: float
    end_s: float
    token_ids: IntArray = _NO_IDS
    tokens: IntArray = _NO_IDS
    temperature: FloatArray = _NO_VALUES
    model_entropy: FloatArray = _NO_VALUES
    tempered_entropy: FloatArray = _NO_VALUES
    varentropy: FloatArray = _NO_VALUES
    kept_fraction: FloatArray = _NO_VALUES
    pruned_mass_mean: FloatArray = _NO_VALUES
    pruned_mass_max: FloatArray = _NO_VALUES
    certificate_max: FloatArray = _NO_VALUES
    kv_bytes: float = 0.0
    flops: float = 0.0
    finished: tuple[Finish, ...] = ()
    energy_j: float = 0.0
    drafted: IntArray = _NO_IDS
