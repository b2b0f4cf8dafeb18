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

import numpy as np

from entropic_ctl import admission
from entropic_ctl.acceptance import Outcome, limit_finish, match_tokens, publish_prompts
from entropic_ctl.config import EngineConfig
from entropic_ctl.errors import BadInputError, NoProgressError
from entropic_ctl.ordering import draw_order, share_tokens
from entropic_ctl.scheduling.base import EntropySignals, ScheduleView, SchedulingConfig
from entropic_ctl.seating import Seating
from entropic_ctl.signals import Finish, FloatArray, IntArray, Request, StepPlan, StepResult
from entropic_ctl.slots import PageTable, SlotTable

__all__ = ["Batcher"]

Score = Callable[[IntArray], FloatArray]
_NONE = np.empty(0, np.int64)
_NEVER = 2**62


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
        self._protected = np.empty(0, np.bool_)  # by order, after the last plan
        self._drawn_at = 0
        self._next_event = 0
        self._changed = True  # the live set changed since the last draw
        self._admitted: IntArray = _NONE  # ids that got a slot since the last plan
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
        slots = self.slots.add([self._backlog.popitem(last=False)[1] for _ in range(count)], self._step)
        self._admitted = np.concatenate([self._admitted, self.slots.id[slots]])
        return slots

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

    def plan(self, now_s: float, score: Score, theta: FloatArray, draft: IntArray | None = None) -> StepPlan:
        """Decide one iteration.

        Parameters
        ----------
        now_s : float
        score : callable
            Maps live slots (arrival order) to scores; called only when the order is drawn.
        theta : FloatArray, shape (max_live,)
            Information-loss budget by slot, nats; a plan carries it for decode rows, prefill is exact.
        draft : IntArray, shape (max_live,), optional
            Most drafted tokens by slot (speculative decoding); a row that drafts is dense.

        Raises
        ------
        BadInputError
            If the previous plan's result was not observed, or the policy returned NaN.
        """
        self._closed("plan")
        plan = self._repeat(now_s, theta)
        if plan is None:
            plan = self._decide(now_s, score, theta, draft)
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
        if not (due or self._changed) and np.array_equal(s.protected(self._order, step), self._protected):
            return
        index, self._group = draw_order(
            step,
            last_run=s.last_run[live],
            protected=s.protected(live, step),
            protected_until=s.protected_until[live],
            arrival_order=s.order[live],
            score=score(live),
            wait_limit_steps=self.scheduling.wait_limit_steps,
        )
        self._order = live[index]
        self._drawn_at, self._changed = step, False

    def _decide(self, now_s: float, score: Score, theta: FloatArray, draft: IntArray | None) -> StepPlan:
        s, table, engine, step = self.slots, self.pages, self.engine, self._step
        self._draw(score)
        order, group = self._order, self._group
        seating = Seating(s, table, engine)
        rows = np.flatnonzero(seating.able(order, group))[: engine.max_batch]
        need = s.known[order[rows]] - s.cached[order[rows]]
        n = np.zeros(order.shape[0], np.int64)
        first = (need == 1) | (group[rows] < 2)
        n[rows] = share_tokens(need, first, engine.max_batch_tokens, engine.prefill_chunk)
        seating.grant(order, group, n)
        runs = n > 0
        slots = order[runs]
        n = n[runs]
        if order.shape[0] and slots.shape[0] == 0:
            raise NoProgressError(f"step {step}: {order.shape[0]} live requests and none can run")
        context = s.cached[slots]
        samples = context + n == s.known[slots]
        decode = (n == 1) & (context >= s.prompt[slots])
        s.last_run[slots] = step
        fresh = slots[(group[runs] == 1) & ~s.protected(slots, step)]
        s.protected_until[fresh] = step + self.scheduling.quantum_steps
        s.owed[fresh] = True
        self._protected = s.protected(order, step)
        self._set_event(order)
        calm = not (seating.preempted or seating.adopted or seating.overdue_lacks_room)
        self._steady = calm and draft is None and bool((decode & samples).all())
        n_draft = np.zeros(slots.shape[0], np.int64)
        if draft is not None:
            n_draft = seating.draft(slots, np.where(decode & samples, draft[slots], 0), n)
            n, decode = n + n_draft, decode & (n_draft == 0)
        admitted, self._admitted = self._admitted, _NONE
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
            n_draft=n_draft,
            paused=s.id[order[~runs & (table.count[order] > 0)]],
            preempted=s.id[np.asarray(seating.preempted, np.int64)],
            rejected=(),
            block_table=table.view,
            allocated=table.take_log(),
            admitted=admitted,
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
        here = s.id[plan.slots] == plan.ids
        sampling = plan.slots[plan.samples]
        distinct = bool(here.all()) and np.array_equal(result.token_ids, plan.ids[plan.samples])
        if distinct:
            token_rows, token_slots = np.arange(sampling.shape[0]), sampling
            before = s.cached[plan.slots] if s.hashes else _NONE
            s.cached[plan.slots] = plan.context + plan.n_tokens
            s.known[sampling] += 1
            if plan.n_draft.any():  # one token each: every draft was rejected
                s.cached[sampling] = s.known[sampling] - 1
        else:
            token_rows, token_slots = match_tokens(plan, result, s)
            before = s.cached[plan.slots] if s.hashes else _NONE
            s.cached[plan.slots[here]] = (plan.context + plan.n_tokens)[here]
            np.add.at(s.known, token_slots, 1)
            if plan.n_draft.any():  # rejected drafts leave no trace
                drafted = plan.slots[here & (plan.n_draft > 0)]
                s.cached[drafted] = s.known[drafted] - 1
        s.owed[token_slots] = False
        self._open = False
        self.step_s += (0.2 if self.step_s else 1.0) * (result.end_s - result.start_s - self.step_s)
        if s.hashes:
            publish_prompts(s, self.pages, plan.slots[here], before[here])
        finished = [finish for finish in result.finished if finish.id in s.slot_of]
        gone = {finish.id for finish in finished}
        full = sampling[(s.known[sampling] >= s.stop_at[sampling]) & (s.id[sampling] >= 0)].tolist()
        capacity = admission.capacity_tokens(self.engine)
        finished += [limit_finish(s, slot, capacity) for slot in full if int(s.id[slot]) not in gone]
        freed = [s.slot_of[finish.id] for finish in finished]
        if freed:
            self._remove(freed)
        return Outcome(tuple(finished), token_rows, token_slots, np.asarray(freed, np.int64), distinct)
