"""What happened, collected alike from the simulator and the real engine: latencies, tokens, entropic time, costs.

A :class:`Metrics` is fed the events of a run (submitted, refused, step) and yields three tables and a summary.

Definitions (all of them: ``METRICS.md``). TTFT: end of the step that gave the first token, minus arrival. Gap: time
between consecutive tokens (tokens accepted in one step have gap 0), also called inter-token latency. E2E: last token
minus arrival, so TTFT + sum of gaps = E2E whatever was preempted and recomputed in between. TPOT: sum of gaps /
(tokens - 1), undefined below two tokens. Wait: iterations, and seconds, between two services of a live request (from
arrival for the first). Requests in = finished + refused + cancelled + live.

Memory. A request costs about 250 bytes for good (percentiles need it), a step nothing once ``max_steps`` is reached
(neighbouring rows of the steps table are then merged, sums kept), a token nothing unless ``keep_tokens``. The sums are
those of :mod:`entropic_ctl.accounts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.accounts import (
    FIRST_TOKEN,
    LAST_END,
    LAST_STEP,
    LAST_TOKEN,
    OUTPUT,
    REQUEST,
    SCHEDULED,
    WAIT,
    WAIT_STEPS,
    Account,
    StepTable,
    book_rows,
    book_step,
    book_tokens,
)
from entropic_ctl.clock import CostLedger, Runs
from entropic_ctl.collectors import Collector
from entropic_ctl.columns import Columns
from entropic_ctl.compiled import compiled, faster
from entropic_ctl.config import SloConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.histogram import DurationHistogram
from entropic_ctl.metrics_summary import Measured, summarise
from entropic_ctl.metrics_tables import REASONS, requests_table, steps_table
from entropic_ctl.signals import Finish, FinishReason, FloatArray, IntArray, Request, StepPlan, StepResult

__all__ = ["Metrics"]

_FACTS: dict[str, npt.DTypeLike] = {
    "id": np.int64,
    "status": np.int8,  # index into REASONS; 0 is live
    "prompt_tokens": np.int64,
    "max_new_tokens": np.int64,
    "client": np.int64,
    "preemptions": np.int64,
    "arrival_s": np.float64,
    "left_s": np.float64,
    "admission_wait_s": np.float64,
}
_TOKEN: dict[str, npt.DTypeLike] = {
    "id": np.int64,
    "index": np.int64,
    "time_s": np.float64,
    "temperature": np.float64,
    "model_entropy": np.float64,
    "tempered_entropy": np.float64,
    "varentropy": np.float64,
    "theta_nats": np.float64,
    "kept_fraction": np.float64,
}
_NOBODY: IntArray = np.empty(0, np.int64)


def _are_theirs_columns(rows: IntArray, ids: IntArray, id_of: IntArray, status: npt.NDArray[np.int8]) -> bool:
    """Return whether every row is that of the live request with the given id."""
    return not ((rows < 0) | (id_of[rows] != ids) | (status[rows] != 0)).any()


@compiled
def _are_theirs_loop(rows: IntArray, ids: IntArray, id_of: IntArray, status: npt.NDArray[np.int8]) -> bool:
    """Twin of :func:`_are_theirs_columns`."""
    for i in range(rows.shape[0]):  # noqa: SIM110 - compiled: a loop, not a generator
        if rows[i] < 0 or id_of[rows[i]] != ids[i] or status[rows[i]] != 0:
            return False
    return True


_are_theirs = faster(_are_theirs_loop, _are_theirs_columns)


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
    gaps : DurationHistogram
        Times between consecutive tokens of a request, all requests together.
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
        max_steps: int = 2**15,
        pool_pages: int = 0,
        slo: SloConfig | None = None,
        idle_w: float = 0.0,
    ) -> None:
        if page_tokens < 1:
            raise BadInputError("not a page size", field="page_tokens", value=page_tokens, allowed=">= 1")
        if max_steps < 2:
            raise BadInputError("not a table length", field="max_steps", value=max_steps, allowed=">= 2")
        if not 0.0 < filter_weight <= 1.0:
            raise BadInputError("not a filter weight", field="filter_weight", value=filter_weight, allowed="(0, 1]")
        self.ledger, self.gaps = CostLedger(), DurationHistogram()
        self._page, self.filter_weight = page_tokens, filter_weight
        self.target_nats = math.nan if target_nats is None else target_nats
        self._pool_pages, self._slo, self._idle_w = pool_pages, slo, idle_w
        self._facts, self._account = Columns(_FACTS), Account(REQUEST)
        self._row_of_id: dict[int, int] = {}
        self._row_of_slot: IntArray = np.full(64, -1, np.int64)
        self._ids: IntArray = _NOBODY  # who was served in the last step, and their rows
        self._rows: IntArray = _NOBODY
        self._token_ids: IntArray = _NOBODY  # whose tokens were accepted in it, where in the plan, and their rows
        self._token_where: Any = slice(None)
        self._token_rows: IntArray = _NOBODY
        self._n_steps = 0
        self._end_s = 0.0
        self._steps = StepTable(max_steps)
        self._dense = np.ones(0), np.zeros(0)  # what a step that reports nothing kept and lost
        self._kept = Columns(_TOKEN) if keep_tokens else None

    @property
    def plain(self) -> bool:
        """Whether all that is kept of a token are sums."""
        return self._kept is None

    @property
    def sums(self) -> FloatArray:
        """Accounts of the requests; see :data:`entropic_ctl.accounts.REQUEST`."""
        return self._account.sums

    def reserve_steps(self, steps: int) -> FloatArray:
        """Return the accounts of at most ``steps`` iterations to come, to be filled in place."""
        return self._steps.reserve_rows(steps)

    @property
    def steps(self) -> int:
        """Iterations so far."""
        return self._n_steps

    def ran(self, steps: int, end_s: float, finished: Iterable[Finish]) -> None:
        """Note iterations whose accounts a driver booked in place, and who left in the last of them."""
        self._steps.n += steps
        self._n_steps += steps
        self._end_s = end_s
        for finish in finished:
            self._leave(finish, end_s)

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
        row = self._facts.n
        self._row_of_id[request.id] = row
        self._facts.append(
            1,
            id=request.id,
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=request.max_new_tokens,
            client=request.client,
            arrival_s=request.arrival_s,
            admission_wait_s=0.0,
        )
        self._account.reserve(1)
        self._account.n += 1
        sums = self._account.sums[row]
        sums[FIRST_TOKEN] = sums[LAST_TOKEN] = math.nan
        sums[LAST_STEP], sums[LAST_END] = self._n_steps - 1, request.arrival_s

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
            arrival = float(self._facts["arrival_s"][row])
            now_s = arrival if finish.reason is FinishReason.REJECTED else max(arrival, self._end_s)
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
            self.admitted(plan.admitted, result.start_s)
        rows = self._rows
        if plan.ids is not self._ids:  # a repeated plan shares its row columns
            rows = self.rows_of(plan.ids, plan.slots)
        nats = result.certificate_max if result.certificate_max.shape[0] == rows.shape[0] else np.zeros(rows.shape[0])
        book_rows(self._account.sums, rows, self._n_steps, result.start_s, result.end_s, nats)
        if plan.preempted.shape[0]:
            for request_id in plan.preempted.tolist():
                self._facts["preemptions"][self._row(request_id)] += 1
        if result.token_ids.shape[0]:
            self._take_tokens(plan, result)
        self._take_step(plan, result)
        self._n_steps += 1
        self._end_s = result.end_s
        if plan.rejected or finished:
            leaving = {finish.id: finish for finish in (*plan.rejected, *finished)}
            for finish in leaving.values():
                self._leave(finish, result.end_s)

    def _take_step(self, plan: StepPlan, result: StepResult) -> None:
        rows, live, row = plan.ids.shape[0], self.live, self._steps.next_row()
        busy_s, used = result.end_s - result.start_s, plan.pages_used
        self.ledger.add(result.flops, result.kv_bytes, busy_s, result.energy_j)
        row[:SCHEDULED] = (
            plan.step, 1.0, result.start_s, result.end_s, rows, result.token_ids.shape[0], live, live - rows,
            plan.paused.shape[0], plan.preempted.shape[0], used, busy_s, rows * busy_s, used * busy_s,
            result.kv_bytes, result.flops, result.energy_j,
        )  # fmt: skip
        kept, mass = result.kept_fraction, result.pruned_mass_mean
        most, nats = result.pruned_mass_max, result.certificate_max
        if kept.shape[0] != rows:
            if self._dense[0].shape[0] != rows:
                self._dense = np.ones(rows), np.zeros(rows)
            kept, mass = self._dense
            most = nats = mass
        book_step(row, self._page, plan.context, plan.n_tokens, kept, mass, most, nats)

    def requests_table(self) -> dict[str, npt.NDArray[Any]]:
        """Return one row per request, in order of submission; undefined values are NaN. See :func:`requests_table`."""
        return requests_table(
            self._facts.table() | {name: self._account[name].copy() for name in REQUEST}, self.target_nats
        )

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
        if self._kept is None:
            raise BadInputError(
                "tokens were not kept", field="keep_tokens", value=False, remedy="pass keep_tokens=True"
            )
        return self._kept.table()

    def summary(self) -> dict[str, float | int | None]:
        """Return the run's headline numbers, JSON-able; undefined ones are None. See ``METRICS.md``."""
        return summarise(self.measured())

    def measured(self) -> Measured:
        """Return everything that :func:`~entropic_ctl.metrics_summary.summarise` reads."""
        return Measured(
            self.requests_table(),
            self.steps_table(),
            self.ledger,
            self.gaps,
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

    def admitted(self, ids: IntArray, start_s: float) -> None:
        """Requests got a slot: close the account of the wait for it; waits for service count from here."""
        waits, arrivals, sums = self._facts["admission_wait_s"], self._facts["arrival_s"], self._account.sums
        for request_id in ids.tolist():
            row = self._row(request_id)
            waits[row] = max(start_s - arrivals[row], 0.0)
            sums[row, LAST_STEP], sums[row, LAST_END] = self._n_steps - 1, start_s

    def rows_of(self, ids: IntArray, slots: IntArray) -> IntArray:
        """Return the rows in :attr:`sums` of live requests, given the slots they are in.

        Raises
        ------
        BadInputError
            If one of them is not live.
        """
        if ids.shape[0] and self._facts.n:
            top = int(slots.max())
            if top >= self._row_of_slot.shape[0]:
                self._row_of_slot = np.concatenate([self._row_of_slot, np.full(top + 1, -1, np.int64)])
            rows = self._row_of_slot[slots]
            if not _are_theirs(rows, ids, self._facts["id"], self._facts["status"]):
                strange = (rows < 0) | (self._facts["id"][rows] != ids) | (self._facts["status"][rows] != 0)
                for i in np.flatnonzero(strange).tolist():
                    rows[i] = self._row_of_slot[slots[i]] = self._row(int(ids[i]))
        else:
            rows = np.array([self._row(request_id) for request_id in ids.tolist()], np.int64)
        self._ids, self._rows, self._token_ids = ids, rows, _NOBODY
        return rows

    def _take_tokens(self, plan: StepPlan, result: StepResult) -> None:
        ids, distinct = result.token_ids, True
        if ids is self._token_ids:
            where = self._token_where
        elif np.array_equal(ids, self._ids):
            where = slice(None)
        else:
            where = np.flatnonzero(plan.samples)
            if not np.array_equal(ids, self._ids[where]):  # speculation: several tokens of one request
                distinct = False
                order = np.argsort(self._ids)
                place = np.searchsorted(self._ids, ids, sorter=order)
                where = order[np.minimum(place, order.shape[0] - 1)] if order.shape[0] else order
                if where.shape[0] == 0 or not np.array_equal(self._ids[where], ids):
                    raise BadInputError("a token of a request that did not run", field="token_ids", value=ids.tolist())
        if distinct and ids is not self._token_ids:
            self._token_ids, self._token_where, self._token_rows = ids, where, self._rows[where]
        self._book(self._token_rows if distinct else self._rows[where], plan, result, where, distinct=distinct)

    def _book(self, rows: IntArray, plan: StepPlan, result: StepResult, where: Any, *, distinct: bool) -> None:
        """Book the accepted tokens; several of one request (speculation) one after the other."""
        if self._kept is not None:
            self._keep(rows, plan, result, where)
        counts, sums, now_s = self.gaps.counts, self._account.sums, result.end_s
        model, tempered = result.model_entropy, result.tempered_entropy
        parts = [(rows, model, tempered)]
        if not distinct:
            parts = [(rows[part], model[part], tempered[part]) for part in Runs.of(rows).rounds()]
        for part in parts:
            longest = book_tokens(sums, counts, part[0], now_s, *part[1:], self.target_nats, self.filter_weight)
            self.gaps.maximum_s = max(self.gaps.maximum_s, longest)

    def _keep(self, rows: IntArray, plan: StepPlan, result: StepResult, where: Any) -> None:
        runs = Runs.of(rows)
        index: IntArray = np.empty(rows.shape[0], np.int64)
        index[runs.order] = runs.rank + np.repeat(self._account.sums[runs.keys, OUTPUT].astype(np.int64), runs.lengths)
        if self._kept is not None:
            self._kept.append(
                rows.shape[0],
                id=self._facts["id"][rows],
                index=index,
                time_s=result.end_s,
                temperature=result.temperature,
                model_entropy=result.model_entropy,
                tempered_entropy=result.tempered_entropy,
                varentropy=result.varentropy,
                theta_nats=plan.theta_nats[where],
                kept_fraction=result.kept_fraction[where] if result.kept_fraction.shape[0] else 1.0,
            )

    def _leave(self, finish: Finish, now_s: float) -> None:
        row = self._row(finish.id)
        self._ids = self._token_ids = _NOBODY
        del self._row_of_id[finish.id]
        self._facts["status"][row] = REASONS.index(finish.reason)
        self._facts["left_s"][row] = now_s
        sums = self._account.sums[row]
        waited = self._n_steps - sums[LAST_STEP] - 1
        if waited > 0:
            sums[WAIT_STEPS] = max(sums[WAIT_STEPS], waited)
            sums[WAIT] = max(sums[WAIT], now_s - sums[LAST_END])
