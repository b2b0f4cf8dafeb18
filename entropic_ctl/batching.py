"""Continuous batching over paged memory: who runs this iteration, with how many tokens, and which pages.

One rule covers everything (ours; the uniform known/cached rule is also that of vLLM's second engine): a request has
*known* tokens (prompt and generated) and *cached* ones; a step computes ``cached .. cached + n`` and samples iff it
then has computed all known tokens. Prefill, chunked prefill, decode and recomputation after preemption are cases of it.

A plan is made in this order:

1. admission (:meth:`Batcher.admit`): first come, first served, into free slots; nothing is promised but a slot;
2. the order (:mod:`entropic_ctl.ordering`), drawn anew when the live set changed, every ``quantum_steps``, when a row
   becomes overdue and when a protection ends; with quantum 1 that is a full sort every step (while every live row has
   a seat and pages suffice, the order decides nothing and is not drawn);
3. a row without pages may start only if the pool has room for all its known tokens beside what started rows still
   need for theirs; the first that does not fit holds back those behind it. Starting never preempts, except for overdue
   rows. So preemption comes from growth, and a preempted row does not come back only to be preempted again;
4. seats: the first ``max_batch`` rows that can run; tokens by :func:`entropic_ctl.ordering.share_tokens`;
5. pages, in order: a prefill chunk shrinks to the pages there are; a row that could not advance at all preempts the
   *last* page holder strictly behind it. Paused rows stand behind running ones, so they go first, and a protected or
   overdue row gives way only to rows before it.

There is always a row that runs: the first holder in order can take everything behind it, and each request alone fits
the pool; without holders the pool is empty and the first row starts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entropic_ctl import admission
from entropic_ctl.config import EngineConfig
from entropic_ctl.errors import BadInputError, NoProgressError
from entropic_ctl.ordering import draw_order, share_tokens
from entropic_ctl.scheduling.base import ScheduleView, SchedulingConfig
from entropic_ctl.signals import Finish, FinishReason, FloatArray, IntArray, Request, StepPlan, StepResult
from entropic_ctl.slots import PageTable, SlotTable

__all__ = ["Batcher", "EntropySignals", "Outcome"]

Score = Callable[[IntArray], FloatArray]
_NONE = np.empty(0, np.int64)
_NO_PAGES = np.empty(0, np.int32)
_NEVER = 2**62


@dataclass(frozen=True, slots=True)
class EntropySignals:
    """What a policy knows of each live request's model entropy; columns as in :class:`ScheduleView`."""

    entropy: FloatArray
    entropy_mean: FloatArray
    reduction_ewma: FloatArray
    entropy_cov1: FloatArray
    entropy_var: FloatArray
    seen: IntArray


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step result meant: who left, the slot of each accepted token, the slots that became free.

    ``token_rows`` indexes ``StepResult.token_ids`` (tokens of requests cancelled meanwhile are left out), and
    ``token_slots[i]`` is the slot of that token.
    """

    finished: tuple[Finish, ...]
    token_rows: IntArray
    token_slots: IntArray
    freed: IntArray


class Batcher:
    """Admission, order, seats, tokens and pages of one replica; see the module's text for the rules.

    Parameters
    ----------
    engine : EngineConfig
    scheduling : SchedulingConfig
        The waiting bound W and the quantum q.
    """

    def __init__(self, engine: EngineConfig, scheduling: SchedulingConfig) -> None:
        self.engine = engine
        self.scheduling = scheduling
        self.slots = SlotTable(engine)
        self.pages = PageTable(engine)
        self.step_s = 0.0  # EWMA of step durations
        self._backlog: OrderedDict[int, tuple[int, Request]] = OrderedDict()
        self._arrivals = 0
        self._step = 0
        self._order: IntArray = _NONE  # slots
        self._group: IntArray = _NONE
        self._drawn_at = 0
        self._next_event = 0
        self._changed = True  # the live set changed since the last draw
        self._steady = False  # the last plan can be repeated: decode rows only, nothing left to decide
        self._last: StepPlan | None = None
        self._open = False  # a plan with rows waits for its result

    @property
    def live(self) -> int:
        """Admitted requests."""
        return len(self.slots.slot_of)

    @property
    def backlog(self) -> int:
        """Submitted requests that wait for a slot."""
        return len(self._backlog)

    def slot_of(self, request_id: int) -> int | None:
        """Return the slot of an admitted request, or None."""
        return self.slots.slot_of.get(request_id)

    def submit(self, request: Request) -> Finish | None:
        """Queue a request, or return why it can never be served.

        Raises
        ------
        BadInputError
            If a field is outside its domain or the id is already in the system.
        """
        admission.validate(request, self.engine)
        if request.id in self._backlog or request.id in self.slots.slot_of:
            raise BadInputError(
                "already in the system", where="submit", field="id", value=request.id, allowed="new ids"
            )
        refused = admission.refusal(request, self.engine)
        if refused is None:
            self._backlog[request.id] = (self._arrivals, request)
            self._arrivals += 1
        return refused

    def cancel(self, request_id: int) -> bool:
        """Remove a request and free its pages at once; False if it is not in the system."""
        if self._backlog.pop(request_id, None) is not None:
            return True
        slot = self.slots.slot_of.get(request_id)
        if slot is None:
            return False
        self._remove([slot])
        return True

    def _remove(self, slots: list[int]) -> None:
        for slot in slots:
            self.pages.drop(slot)
        self.slots.remove(slots)
        self._changed = True

    def admit(self) -> IntArray:
        """Move waiting requests into free slots, in arrival order; return those slots. Call before :meth:`plan`."""
        self._closed("admit")
        count = min(len(self._backlog), self.slots.room)
        if count == 0:
            return _NONE
        self._changed = True
        return self.slots.add([self._backlog.popitem(last=False)[1] for _ in range(count)], self._step)

    def _closed(self, what: str) -> None:
        if self._open:
            remedy = "observe the result of the previous plan first"
            raise BadInputError(f"{what} before observe", where=f"Batcher.{what}", remedy=remedy)

    def view(self, now_s: float, slots: IntArray, signals: EntropySignals) -> ScheduleView:
        """Return the columns a macro policy scores, for these slots."""
        s, at = self.slots, self._step
        last_run = s.last_run[slots]
        return ScheduleView(
            now_s=now_s,
            arrival_s=s.arrival_s[slots],
            arrival_order=s.order[slots],
            prompt_tokens=s.prompt[slots],
            known_tokens=s.known[slots],
            cached_tokens=s.cached[slots],
            generated_tokens=s.known[slots] - s.prompt[slots],
            token_limit=s.limit[slots],
            pages=self.pages.count[slots],
            waited_steps=at - 1 - last_run,
            seated=last_run == at - 1 if at else np.zeros(slots.shape[0], np.bool_),
            entropy=signals.entropy,
            entropy_mean=signals.entropy_mean,
            reduction_ewma=signals.reduction_ewma,
            entropy_cov1=signals.entropy_cov1,
            entropy_var=signals.entropy_var,
            seen=signals.seen,
            pool_pages=self.engine.pages,
            token_budget=self.engine.max_batch_tokens,
            step_s=self.step_s,
        )

    def plan(self, now_s: float, score: Score, theta: FloatArray) -> StepPlan:
        """Decide one iteration.

        Parameters
        ----------
        now_s : float
        score : callable
            Maps live slots (arrival order) to scores; called only when the order is drawn.
        theta : FloatArray, shape (max_live,)
            Information-loss budget by slot, nats; a plan carries it for decode rows, prefill is exact.

        Raises
        ------
        BadInputError
            If the previous plan's result was not observed, or the policy returned NaN.
        """
        self._closed("plan")
        plan = self._repeat(now_s, theta)
        if plan is None:
            plan = self._decide(now_s, score, theta)
        self._last = plan
        self._open = plan.ids.shape[0] > 0
        self._step += 1
        return plan

    def _repeat(self, now_s: float, theta: FloatArray) -> StepPlan | None:
        """Plan the step after a steady one: the same decode rows, one token further; None if anything changed."""
        last, step = self._last, self._step
        if not self._steady or self._changed or last is None or step >= self._next_event:
            return None
        context = last.context + 1
        full = last.slots[context == self.pages.count[last.slots] * self.engine.page_tokens]
        if full.shape[0]:
            if full.shape[0] > self.pages.pool.available:
                return None
            self.pages.grow_one(full)
        self.slots.last_run[last.slots] = step
        return StepPlan(
            step=step,
            now_s=now_s,
            ids=last.ids,
            slots=last.slots,
            context=context,
            n_tokens=last.n_tokens,
            samples=last.samples,
            greedy=last.greedy,
            theta_nats=theta[last.slots],
            n_draft=last.n_draft,
            paused=last.paused,
            preempted=_NONE,
            rejected=(),
            block_table=self.pages.view,
            allocated=self.pages.take_log(),
        )

    def _draw(self, score: Score) -> None:
        live, s, step = self.slots.live, self.slots, self._step
        due = step >= self._drawn_at + self.scheduling.quantum_steps or step >= self._next_event
        if not (due or self._changed):
            return
        index, self._group = draw_order(
            step,
            s.last_run[live],
            s.protected_until[live],
            s.order[live],
            score(live),
            self.scheduling.wait_limit_steps,
        )
        self._order = live[index]
        self._drawn_at, self._changed = step, False

    def _decide(self, now_s: float, score: Score, theta: FloatArray) -> StepPlan:
        s, table, engine, step = self.slots, self.pages, self.engine, self._step
        self._draw(score)
        order, group = self._order, self._group
        need = s.known[order] - s.cached[order]
        able, adopted, squeeze = self._able(order, group, need)
        rows = np.flatnonzero(able)[: engine.max_batch]
        if adopted:
            need = s.known[order] - s.cached[order]
        n = np.zeros(order.shape[0], np.int64)
        first = (need[rows] == 1) | (group[rows] < 2)
        n[rows] = share_tokens(need[rows], first, engine.max_batch_tokens, engine.prefill_chunk)
        more = np.maximum(0, -(-(s.cached[order] + n) // engine.page_tokens) - table.count[order])
        more[n == 0] = 0
        preempted: list[int] = []
        if squeeze or int(more.sum()) > table.pool.available:
            preempted = self._squeeze(order, group, n, adopted)
        else:
            table.grow(order[more > 0], more[more > 0])
        for slot in adopted:  # a starter that got no token after all gives its prefix back
            if table.count[slot] and not n[order == slot].any():
                self._unadopt(slot)
        runs = n > 0
        slots = order[runs]
        n = n[runs]
        if order.shape[0] and slots.shape[0] == 0:
            raise NoProgressError(f"step {step}: {order.shape[0]} live requests and none can run")
        context = s.cached[slots]
        samples = context + n == s.known[slots]
        decode = (n == 1) & (context >= s.prompt[slots])
        s.last_run[slots] = step
        fresh = slots[(group[runs] == 1) & (s.protected_until[slots] <= step)]
        s.protected_until[fresh] = step + self.scheduling.quantum_steps
        self._set_event(order)
        self._steady = bool(decode.all()) and bool(samples.all()) and not preempted and not adopted and not squeeze
        return StepPlan(
            step=step,
            now_s=now_s,
            ids=s.id[slots],
            slots=slots,
            context=context,
            n_tokens=n,
            samples=samples,
            greedy=s.greedy[slots],
            theta_nats=np.where(decode, theta[slots], 0.0),
            n_draft=np.zeros(slots.shape[0], np.int64),
            paused=s.id[order[~runs & (table.count[order] > 0)]],
            preempted=s.id[np.asarray(preempted, np.int64)],
            rejected=(),
            block_table=table.view,
            allocated=table.take_log(),
        )

    def _set_event(self, order: IntArray) -> None:
        """Set the step at which a repeat or an old order is no longer right."""
        s, step = self.slots, self._step
        waiting = s.last_run[order]
        waiting = waiting[waiting < step]
        event = _NEVER
        if waiting.shape[0]:  # the next row to become overdue; rows overdue already are in front
            event = self._drawn_at + self.scheduling.quantum_steps
            at = waiting + self.scheduling.wait_limit_steps + 1
            at = at[at > step]
            event = min(event, int(at.min())) if at.shape[0] else event
        ends = s.protected_until[order]
        ends = ends[ends > step]
        self._next_event = min(event, int(ends.min())) if ends.shape[0] else event

    def _able(self, order: IntArray, group: IntArray, need: IntArray) -> tuple[npt.NDArray[np.bool_], list[int], bool]:
        """Return which rows can run (holders, and starters that fit), whose prefix was adopted, and "squeeze".

        Squeeze means that an overdue starter lacks room, so that pages must be taken from rows behind it.
        """
        s, table = self.slots, self.pages
        able = table.count[order] > 0
        holders = np.cumsum(able)
        if holders.shape[0] == 0 or holders[-1] == order.shape[0]:
            return able, [], False
        page = self.engine.page_tokens
        missing = -(-s.known[order] // page) - table.count[order]
        room = table.pool.available - int(np.maximum(0, missing[able]).sum())
        adopted: list[int] = []
        squeeze, started = False, 0
        for i in np.flatnonzero(~able).tolist():
            if holders[i] + started >= self.engine.max_batch:
                break
            slot = int(order[i])
            prefix = _NO_PAGES
            if slot in s.hashes:
                prefix = table.pool.match(s.hashes[slot])[: (int(s.known[slot]) - 1) // page]
            want = int(missing[i]) - prefix.shape[0]
            cost = want + (table.pool.remembered(prefix) if prefix.shape[0] else 0)
            if cost > room:
                if group[i] == 2:
                    break
                squeeze = True
            room -= cost
            able[i] = True
            started += 1
            if prefix.shape[0]:
                table.adopt(slot, prefix)
                s.cached[slot] = prefix.shape[0] * page
                adopted.append(slot)
        return able, adopted, squeeze

    def _unadopt(self, slot: int) -> None:
        self.pages.drop_unlogged(slot)
        self.slots.cached[slot] = 0

    def _squeeze(self, order: IntArray, group: IntArray, n: IntArray, adopted: list[int]) -> list[int]:
        """Give out pages row by row when they are short; change ``n`` in place and return the preempted slots."""
        s, table, page = self.slots, self.pages, self.engine.page_tokens
        holders = np.flatnonzero(table.count[order] > 0).tolist()
        fresh = set(adopted)
        preempted: list[int] = []

        def take_last(behind: int) -> bool:
            if not holders or holders[-1] <= behind:
                return False
            victim = holders.pop()
            slot = int(order[victim])
            n[victim] = 0
            if slot in fresh:
                self._unadopt(slot)
            else:
                table.drop(slot)
                s.cached[slot] = s.protected_until[slot] = 0
                s.preemptions[slot] += 1
                preempted.append(slot)
            return True

        for i in np.flatnonzero(n).tolist():
            if n[i] == 0:  # preempted meanwhile
                continue
            slot = int(order[i])
            held, cached = int(table.count[slot]), int(s.cached[slot])
            if held == 0 or slot in fresh:  # starting: all known tokens must find a place
                least = -(-int(s.known[slot]) // page) - held
            else:
                least = 0 if held * page > cached else 1
            starting_in_turn = (held == 0 or slot in fresh) and group[i] == 2
            while table.pool.available < least and not starting_in_turn and take_last(i):
                pass
            if table.pool.available < least:
                n[i] = 0
                continue
            n[i] = min(int(n[i]), (held + table.pool.available) * page - cached)
            more = -(-(cached + int(n[i])) // page) - held
            if more > 0:
                table.grow(order[i : i + 1], np.array([more]))
        return preempted

    def observe(self, result: StepResult) -> Outcome:
        """Take in what the last plan's step did.

        Raises
        ------
        BadInputError
            If the result is of another step, names a request that did not run, or leaves a sampling row with neither
            a token nor a finish.
        """
        plan = self._last
        if not self._open or plan is None or result.step != plan.step:
            raise BadInputError(
                "no such plan is open",
                where="Batcher.observe",
                field="step",
                value=result.step,
                allowed=f"{plan.step}" if plan is not None and self._open else "nothing: call plan first",
            )
        s = self.slots
        self.step_s += (0.2 if self.step_s else 1.0) * (result.end_s - result.start_s - self.step_s)
        here = s.id[plan.slots] == plan.ids
        sampling = plan.slots[plan.samples]
        if here.all() and np.array_equal(result.token_ids, plan.ids[plan.samples]):
            token_rows, token_slots = np.arange(sampling.shape[0]), sampling
            before = s.cached[plan.slots] if s.hashes else _NONE
            s.cached[plan.slots] = plan.context + plan.n_tokens
            s.known[sampling] += 1
        else:
            token_rows, token_slots = self._match(plan, result)
            before = s.cached[plan.slots] if s.hashes else _NONE
            s.cached[plan.slots[here]] = (plan.context + plan.n_tokens)[here]
            np.add.at(s.known, token_slots, 1)
        self._open = False
        if s.hashes:
            self._publish(plan.slots[here], before[here])
        finished = [finish for finish in result.finished if finish.id in s.slot_of]
        gone = {finish.id for finish in finished}
        full = sampling[(s.known[sampling] >= s.stop_at[sampling]) & (s.id[sampling] >= 0)]
        for slot in full.tolist():
            if int(s.id[slot]) not in gone:
                finished.append(self._full(slot))
        freed = [s.slot_of[finish.id] for finish in finished]
        if freed:
            self._remove(freed)
        return Outcome(tuple(finished), token_rows, token_slots, np.asarray(freed, np.int64))

    def _full(self, slot: int) -> Finish:
        s = self.slots
        if not s.cut[slot]:
            return Finish(int(s.id[slot]), FinishReason.LENGTH)
        detail = (
            f"stopped after {int(s.limit[slot])} tokens: with a prompt of {int(s.prompt[slot])} the capacity of "
            f"{admission.capacity_tokens(self.engine)} KV tokens is used up"
        )
        return Finish(int(s.id[slot]), FinishReason.CAPACITY, detail)

    def _match(self, plan: StepPlan, result: StepResult) -> tuple[IntArray, IntArray]:
        """Map accepted tokens to slots when they are not simply the sampling rows in order."""
        s = self.slots
        sampled = dict(zip(plan.ids[plan.samples].tolist(), plan.slots[plan.samples].tolist(), strict=True))
        rows, slots = [], []
        for row, request_id in enumerate(result.token_ids.tolist()):
            if request_id not in sampled:
                raise BadInputError(
                    "token for a request that was not sampled",
                    where="Batcher.observe",
                    field="token_ids",
                    value=request_id,
                    allowed="ids of the plan's sampling rows",
                )
            if s.id[sampled[request_id]] == request_id:
                rows.append(row)
                slots.append(sampled[request_id])
        excused = set(result.token_ids.tolist()) | {finish.id for finish in result.finished}
        for request_id, slot in sampled.items():
            if request_id not in excused and s.id[slot] == request_id:
                raise BadInputError(
                    "a sampled request got neither a token nor a finish",
                    where="Batcher.observe",
                    field="token_ids",
                    value=request_id,
                    remedy="report its token, or a Finish with the reason",
                )
        return np.asarray(rows, np.int64), np.asarray(slots, np.int64)

    def _publish(self, slots: IntArray, before: IntArray) -> None:
        """Make prompt pages that became full findable by their hash."""
        page = self.engine.page_tokens
        for slot, was in zip(slots.tolist(), before.tolist(), strict=True):
            hashes = self.slots.hashes.get(slot)
            if hashes:
                for index in range(was // page, min(int(self.slots.cached[slot]) // page, len(hashes))):
                    self.pages.pool.publish(int(self.pages.view[slot, index]), hashes[index])
