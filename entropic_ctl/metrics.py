"""What happened, collected alike from the simulator and the real engine: latencies, tokens, entropic time, costs.

A :class:`Metrics` is fed the events of a run (submitted, refused, step) and yields three tables and a summary.

Definitions (all of them: ``METRICS.md``). TTFT: end of the step that gave the first token, minus arrival. Gap: time
between consecutive tokens (tokens accepted in one step have gap 0), also called inter-token latency. E2E: last token
minus arrival, so TTFT + sum of gaps = E2E whatever was preempted and recomputed in between. TPOT: sum of gaps /
(tokens - 1), undefined below two tokens. Wait: iterations, and seconds, between two services of a live request (from
arrival for the first). Requests in = finished + refused + cancelled + live.

Memory. A request costs about 200 bytes for good (percentiles need it), a step nothing once ``max_steps`` is reached
(neighbouring rows of the steps table are then merged, sums kept), a token nothing unless ``keep_tokens``. Steps go
into a buffer and are reduced some thousands of rows at a time, so the cost per step is a few array copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.clock import CostLedger, EntropicClock
from entropic_ctl.collectors import Collector
from entropic_ctl.columns import Columns
from entropic_ctl.config import SloConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.metrics_buffer import StepBuffer, TokenBuffer
from entropic_ctl.metrics_summary import Measured, summarise
from entropic_ctl.metrics_tables import REASONS, requests_table, steps_table
from entropic_ctl.signals import Finish, FinishReason, IntArray, Request, StepPlan, StepResult

__all__ = ["Metrics"]

_REQUEST: dict[str, npt.DTypeLike] = {
    "id": np.int64,
    "status": np.int8,  # index into REASONS; 0 is live
    "prompt_tokens": np.int64,
    "max_new_tokens": np.int64,
    "client": np.int64,
    "output_tokens": np.int64,
    "preemptions": np.int64,
    "wait_steps": np.int64,
    "last_step": np.int64,
    "arrival_s": np.float64,
    "first_token_s": np.float64,
    "last_token_s": np.float64,
    "left_s": np.float64,
    "gap_sum_s": np.float64,
    "gap_max_s": np.float64,
    "wait_s": np.float64,
    "admission_wait_s": np.float64,
    "last_end_s": np.float64,
    "entropy_n": np.int64,
    "entropy_sum": np.float64,
    "tempered_mean": np.float64,
    "tempered_m2": np.float64,
    "target_square_sum": np.float64,
}


class Metrics(Collector):
    """Collector of one run.

    Parameters
    ----------
    page_tokens : int
        Tokens per KV page, to count pages.
    keep_tokens : bool
        Keep one row per accepted token (:meth:`tokens_table`).
    target_nats : float, optional
        H* of the micro law; the tempered entropy's mean square about it is reported when given.
    filter_weight : float
        Weight of the filtered clock, in (0, 1].
    max_steps : int
        Longest steps table; at least 2.
    pool_pages : int
        Pages of the KV pool, for its share in use; 0 when unknown.
    slo : SloConfig, optional
        Latency objective that goodput counts against.
    idle_w : float
        Watts while nothing runs.

    Attributes
    ----------
    clock : EntropicClock
        One slot per request, in order of submission.
    ledger : CostLedger
        FLOPs, KV bytes and busy seconds so far.
    """

    def __init__(
        self,
        page_tokens: int,
        keep_tokens: bool = False,
        *,
        target_nats: float | None = None,
        filter_weight: float = 0.2,
        max_steps: int = 2**20,
        pool_pages: int = 0,
        slo: SloConfig | None = None,
        idle_w: float = 0.0,
    ) -> None:
        if page_tokens < 1:
            raise BadInputError("not a page size", field="page_tokens", value=page_tokens, allowed=">= 1")
        if max_steps < 2:
            raise BadInputError("not a table length", field="max_steps", value=max_steps, allowed=">= 2")
        self.clock, self.ledger = EntropicClock(weight=filter_weight), CostLedger()
        self._target, self._pool_pages, self._slo, self._idle_w = target_nats, pool_pages, slo, idle_w
        self._requests = Columns(_REQUEST)
        self._row_of_id: dict[int, int] = {}
        self._row_of_slot: IntArray = np.full(64, -1, np.int64)
        self._ids: IntArray = np.empty(0, np.int64)  # who was served in the last step, and their rows
        self._rows: IntArray = np.empty(0, np.int64)
        self._n_steps = 0
        self._end_s = 0.0
        self._steps = StepBuffer(page_tokens, max_steps)
        self._tokens = TokenBuffer(self._requests, self.clock, target_nats, keep_tokens)

    @property
    def live(self) -> int:
        """Requests submitted that have not left."""
        return len(self._row_of_id)

    def submitted(self, request: Request) -> None:
        """A request entered the system.

        Raises
        ------
        BadInputError
            If a live request already has this id.
        """
        if request.id in self._row_of_id:
            raise BadInputError("a live request has this id", field="id", value=request.id, allowed="unique ids")
        row = self._requests.n
        self._row_of_id[request.id] = row
        self._requests.append(
            1,
            id=request.id,
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=request.max_new_tokens,
            client=request.client,
            last_step=self._n_steps - 1,
            arrival_s=request.arrival_s,
            last_end_s=request.arrival_s,
            gap_sum_s=0.0,
            gap_max_s=0.0,
            wait_s=0.0,
            admission_wait_s=0.0,
            entropy_sum=0.0,
            tempered_mean=0.0,
            tempered_m2=0.0,
            target_square_sum=0.0,
        )
        self.clock.reserve(row + 1)

    def refused(self, finish: Finish, now_s: float | None = None) -> None:
        """A request left outside a step: refused on submission, or cancelled.

        A refusal may come without a :meth:`submitted` before it (the request is then counted as having come in).

        Parameters
        ----------
        finish : Finish
        now_s : float, optional
            When it left; default the arrival for a refusal, else the end of the last step.
        """
        if finish.id not in self._row_of_id and finish.reason is FinishReason.REJECTED:
            self.submitted(Request(finish.id, self._end_s if now_s is None else now_s, 0, 0))
        row = self._row(finish.id)
        if now_s is None:
            arrival = float(self._requests["arrival_s"][row])
            now_s = arrival if finish.reason is FinishReason.REJECTED else max(arrival, self._end_s)
        self._close_seats()
        self._leave(finish, now_s)

    def cancelled(self, request_id: int, now_s: float) -> None:
        """A live request was cancelled."""
        self.refused(Finish(request_id, FinishReason.CANCELLED), now_s)

    def step(self, plan: StepPlan, result: StepResult, finished: Iterable[Finish]) -> None:
        """One iteration ran.

        Parameters
        ----------
        plan : StepPlan
        result : StepResult
        finished : iterable of Finish
            Everything that left in this step (the loop's ``observe``); ``plan.rejected`` is added to it.

        Raises
        ------
        BadInputError
            If the step names a request that is not live, or a token of a request that did not run.
        """
        if plan.admitted.shape[0]:
            self._admit(plan.admitted, result.start_s)
        if not np.array_equal(plan.ids, self._ids):
            self._take_seats(plan, result.start_s)
        for request_id in plan.preempted.tolist():
            self._requests["preemptions"][self._row(request_id)] += 1
        if result.token_ids.shape[0]:
            self._take_tokens(plan, result)
        self._steps.add(plan, result, self.live)
        self.ledger.add(result.flops, result.kv_bytes, result.end_s - result.start_s, result.energy_j)
        self._n_steps += 1
        self._end_s = result.end_s
        leaving = {finish.id: finish for finish in (*plan.rejected, *finished)}
        if leaving:
            self._close_seats()
            for finish in leaving.values():
                self._leave(finish, result.end_s)

    def requests_table(self) -> dict[str, npt.NDArray[Any]]:
        """Return one row per request, in order of submission; undefined values are NaN. See :func:`requests_table`."""
        self._tokens.flush()
        return requests_table(self._requests.table(), self.clock, self._target)

    def steps_table(self) -> dict[str, npt.NDArray[Any]]:
        """Return one row per iteration (or per ``steps`` merged ones). See :func:`steps_table`."""
        return steps_table(self._steps.table())

    def tokens_table(self) -> dict[str, npt.NDArray[Any]]:
        """Return one row per accepted token, in order of time.

        Columns: id, index (0 is the request's first), time_s, temperature, model_entropy, tempered_entropy (nats),
        varentropy (nats squared), theta_nats, kept_fraction.

        Raises
        ------
        BadInputError
            If tokens were not kept.
        """
        return self._tokens.table()

    def summary(self) -> dict[str, float | int | None]:
        """Return the run's headline numbers, JSON-able; undefined ones are None. See ``METRICS.md``."""
        return summarise(self.measured())

    def measured(self) -> Measured:
        """Return everything that :func:`~entropic_ctl.metrics_summary.summarise` reads."""
        return Measured(
            self.requests_table(),
            self.steps_table(),
            self.ledger,
            self._tokens.gaps,
            pool_pages=self._pool_pages,
            slo=self._slo,
            idle_w=self._idle_w,
        )

    def _row(self, request_id: int) -> int:
        try:
            return self._row_of_id[request_id]
        except KeyError:
            raise BadInputError(
                "no such live request",
                field="id",
                value=request_id,
                allowed="ids that were submitted and have not left",
            ) from None

    def _admit(self, ids: IntArray, start_s: float) -> None:
        """Close the account of the wait for a slot; waits for service count from here."""
        rows = np.array([self._row(request_id) for request_id in ids.tolist()])
        requests = self._requests
        requests["admission_wait_s"][rows] = np.maximum(start_s - requests["arrival_s"][rows], 0.0)
        requests["last_step"][rows] = self._n_steps - 1
        requests["last_end_s"][rows] = start_s

    def _take_seats(self, plan: StepPlan, start_s: float) -> None:
        """Note who runs from now on, and how long they had waited."""
        self._close_seats()
        if plan.ids.shape[0] == 0:
            return
        if self._requests.n == 0:
            self._row(int(plan.ids[0]))
        top = int(plan.slots.max())
        if top >= self._row_of_slot.shape[0]:
            self._row_of_slot = np.concatenate([self._row_of_slot, np.full(top + 1, -1, np.int64)])
        rows = self._row_of_slot[plan.slots]
        unknown = (rows < 0) | (self._requests["id"][rows] != plan.ids)
        for i in np.flatnonzero(unknown | (self._requests["status"][rows] != 0)).tolist():
            rows[i] = self._row_of_slot[plan.slots[i]] = self._row(int(plan.ids[i]))
        waits = self._requests["wait_steps"]
        waits[rows] = np.maximum(waits[rows], self._n_steps - self._requests["last_step"][rows] - 1)
        waits_s = self._requests["wait_s"]
        waits_s[rows] = np.maximum(waits_s[rows], start_s - self._requests["last_end_s"][rows])
        self._ids, self._rows = plan.ids.copy(), rows

    def _close_seats(self) -> None:
        """Write down when those served in the last step were served last, and forget the seating."""
        if self._rows.shape[0]:
            self._requests["last_step"][self._rows] = self._n_steps - 1
            self._requests["last_end_s"][self._rows] = self._end_s
            self._ids = self._rows = np.empty(0, np.int64)

    def _take_tokens(self, plan: StepPlan, result: StepResult) -> None:
        ids = result.token_ids
        if np.array_equal(ids, self._ids):
            where: Any = slice(None)
        else:
            where = np.flatnonzero(plan.samples)
            if not np.array_equal(ids, self._ids[where]):  # speculation: several tokens of one request
                order = np.argsort(self._ids)
                place = np.searchsorted(self._ids, ids, sorter=order)
                where = order[np.minimum(place, order.shape[0] - 1)] if order.shape[0] else order
                if where.shape[0] == 0 or not np.array_equal(self._ids[where], ids):
                    raise BadInputError("a token of a request that did not run", field="token_ids", value=ids.tolist())
        self._tokens.add(self._rows[where], plan, result, where)

    def _leave(self, finish: Finish, now_s: float) -> None:
        row = self._row(finish.id)
        del self._row_of_id[finish.id]
        self._requests["status"][row] = REASONS.index(finish.reason)
        self._requests["left_s"][row] = now_s
        waited = self._n_steps - int(self._requests["last_step"][row]) - 1
        waited_s = now_s - float(self._requests["last_end_s"][row])
        if waited > 0:
            self._requests["wait_steps"][row] = max(int(self._requests["wait_steps"][row]), waited)
            self._requests["wait_s"][row] = max(float(self._requests["wait_s"][row]), waited_s)
