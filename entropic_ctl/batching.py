"""Continuous batching over paged memory: who runs this iteration, with how many tokens, and which pages.

One rule covers everything (ours; the uniform known/cached rule is also that of vLLM's second engine): a request has
*known* tokens (prompt and generated) and *cached* ones; a step computes ``cached .. cached + n`` and samples iff it
then has computed all known tokens. Prefill, chunked prefill, decode and recomputation after preemption are cases of it.

A plan is made in this order:

1. admission (:meth:`Batcher.admit`): first come, first served, into free slots; nothing is promised but a slot;
2. the order (:mod:`entropic_ctl.ordering`), drawn anew when the live set changed, every ``quantum_steps``, when a row
   becomes overdue and when a protection ends; with quantum 1 that is a full sort every step. While every live row can
   have its seat, tokens and pages, the order decides nothing and is not drawn (:mod:`entropic_ctl.steady`);
3. a row without pages may start only if the pool has room for all its known tokens beside what started rows still
   need for theirs; the first that does not fit holds back those behind it. Starting never preempts, except for overdue
   rows. So preemption comes from growth, and a preempted row does not come back only to be preempted again;
4. seats: the first ``max_batch`` rows that can run; tokens by :func:`entropic_ctl.ordering.share_tokens`;
5. pages, in order: a prefill chunk shrinks to the pages there are, and what it leaves of the step's tokens goes to the
   rows behind it; a row that could not advance at all preempts the
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
from entropic_ctl.scheduling.base import Departures, EntropySignals, ScheduleView, SchedulingConfig
from entropic_ctl.seating import Seating
from entropic_ctl.signals import Finish, FloatArray, IntArray, Request, StepPlan, StepResult
from entropic_ctl.slots import PageTable, SlotTable
from entropic_ctl.steady import accept, advance, seat_all

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
    stateful : bool
        The policy keeps accounts between draws: it sees every change of the live set, and who departed since the last.
    """

    def __init__(self, engine: EngineConfig, scheduling: SchedulingConfig, *, stateful: bool = False) -> None:
        self._stateful = stateful
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
        self._drawn, self._drawn_at = False, 0
        self._next_event = 0
        self._changed = True  # the live set changed since the last draw
        self._admitted: IntArray = _NONE  # ids that got a slot since the last plan
        self._steady = False  # the last plan can be repeated: decode rows only, nothing left to decide
        self._last: StepPlan | None = None
        self._open = False  # a plan with rows waits for its result
        self._departed: list[tuple[int, int, int, int]] = []  # since the last draw; columns of Departures

    @property
    def live(self) -> int:
        """Admitted requests."""
        return len(self.slots.slot_of)

    @property
    def backlog(self) -> int:
        """Submitted requests that wait for a slot."""
        return len(self._backlog)

    @property
    def step(self) -> int:
        """Number of the next iteration."""
        return self._step

    @property
    def plain(self) -> bool:
        """Whether the next plan may be one of :func:`entropic_ctl.steady.seat_all`."""
        s = self.slots
        return 0 < s.live.shape[0] <= self.engine.max_batch and not (s.hashes or self._stateful or self._open)

    @property
    def newcomers(self) -> IntArray:
        """Ids that got a slot since the last plan."""
        return self._admitted

    def ran(self, steps: int, step_s: float, ended: list[Finish], full: list[int]) -> tuple[list[Finish], IntArray]:
        """Note iterations that a driver ran on the columns in place, by :func:`entropic_ctl.steady.seat_all`.

        Parameters
        ----------
        steps : int
        step_s : float
            The running mean of step durations after them.
        ended : list of Finish
            Whose text ended in the last of them.
        full : list of int
            Slots that reached their limit in it.

        Returns
        -------
        finished : list of Finish
        freed : IntArray
            Slots.
        """
        self._step += steps
        self.step_s = step_s
        self._admitted, self._last = _NONE, None
        self._steady = self._changed = self._drawn = False
        self._next_event = _NEVER
        return self._conclude(ended, full)

    def _conclude(self, finished: list[Finish], full: list[int]) -> tuple[list[Finish], IntArray]:
        """Let those go whom the driver ended, and those at their limit."""
        s = self.slots
        gone = {finish.id for finish in finished}
        capacity = admission.capacity_tokens(self.engine)
        finished = finished + [limit_finish(s, slot, capacity) for slot in full if int(s.id[slot]) not in gone]
        freed = [s.slot_of[finish.id] for finish in finished]
        if freed:
            self._remove(freed)
        return finished, np.asarray(freed, np.int64)

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
        s = self.slots
        if self._stateful:
            for slot, computed in zip(slots, s.prompt_computed(np.asarray(slots)).tolist(), strict=True):
                generated = int(s.known[slot] - s.prompt[slot])
                self._departed.append((int(s.order[slot]), int(s.client[slot]), computed, generated))
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
        departed = np.array(self._departed, np.int64).reshape(-1, 4).T
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
            client=s.client[slots],
            expected_tokens=s.expected[slots],
            prompt_computed=s.prompt_computed(slots),
            departed=Departures(*departed),
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
        plan = None
        if draft is None:
            plan = self._repeat(now_s, theta) or self._seat_all(now_s, theta)
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
        pages = self.pages
        done, context, budget, allocated = advance(
            last.slots, last.context, step, pages.page_tokens, *pages.columns, self.slots.last_run, theta
        )
        if not done:
            return None
        pages.pool.took(allocated.shape[0])
        return StepPlan(
            step, now_s, last.ids, last.slots, context, last.n_tokens, last.samples, last.greedy, budget, last.n_draft,
            last.paused, _NONE, (), pages.view, allocated, pages_used=pages.pool.used,
        )  # fmt: skip

    def _seat_all(self, now_s: float, theta: FloatArray) -> StepPlan | None:
        """Plan a step in which every live row has its seat, tokens and pages; None if something has to be decided."""
        s, pages, engine, step = self.slots, self.pages, self.engine, self._step
        if not self.plain:
            return None
        limits = step, engine.page_tokens, engine.max_batch_tokens, engine.prefill_chunk
        done, rows = seat_all(
            s.live,
            (*limits, self.scheduling.wait_limit_steps),
            s.id,
            s.prompt,
            s.known,
            s.cached,
            s.greedy,
            (s.last_run, s.protected_until, s.owed),
            *pages.columns,
            theta,
        )
        if not done:
            return None
        pages.pool.took(rows.allocated.shape[0])
        self._steady, self._changed, self._drawn = rows.decode_only, False, False
        self._next_event = _NEVER
        admitted, self._admitted = self._admitted, _NONE
        return StepPlan(
            step, now_s, rows.ids, s.live, rows.context, rows.n_tokens, rows.samples, rows.greedy, rows.theta,
            np.zeros(s.live.shape[0], np.int64), _NONE, _NONE, (), pages.view, rows.allocated, admitted,
            pages.pool.used,
        )  # fmt: skip

    def _draw(self, score: Score) -> None:
        live, s, step = self.slots.live, self.slots, self._step
        due = step >= self._drawn_at + self.scheduling.quantum_steps or step >= self._next_event
        current = self._drawn and not (due or self._changed)
        if current and np.array_equal(s.protected(self._order, step), self._protected):
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
        self._departed.clear()
        self._drawn_at, self._drawn, self._changed = step, True, False

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
        most = np.zeros(order.shape[0], np.int64)
        most[rows] = np.minimum(need, engine.prefill_chunk)
        seating.grant(order, group, n, most)
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
            pages_used=table.pool.used,
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
        before = s.cached[plan.slots] if s.hashes else _NONE
        distinct, token_slots, full = accept(
            plan.slots, plan.ids, plan.context, plan.n_tokens, plan.samples, result.token_ids,
            s.id, s.cached, s.known, s.owed, s.stop_at,
        )  # fmt: skip
        token_rows = None
        if not distinct:
            token_rows, token_slots, full = self._accept_some(plan, result)
        if plan.n_draft.any():  # rejected drafts leave no trace
            drafted = plan.slots[(s.id[plan.slots] == plan.ids) & (plan.n_draft > 0)]
            s.cached[drafted] = s.known[drafted] - 1
        self._open = False
        self.step_s += (0.2 if self.step_s else 1.0) * (result.end_s - result.start_s - self.step_s)
        if s.hashes:
            here = s.id[plan.slots] == plan.ids
            publish_prompts(s, self.pages, plan.slots[here], before[here])
        if not (result.finished or full.shape[0]):
            return Outcome((), token_rows, token_slots, _NONE, distinct)
        ended = [finish for finish in result.finished if finish.id in s.slot_of]
        finished, freed = self._conclude(ended, full.tolist())
        return Outcome(tuple(finished), token_rows, token_slots, freed, distinct)

    def _accept_some(self, plan: StepPlan, result: StepResult) -> tuple[IntArray, IntArray, IntArray]:
        """Book tokens that are not one for each sampling row: rows of the result, their slots, slots at a limit."""
        s = self.slots
        rows, slots = match_tokens(plan, result, s)
        here = s.id[plan.slots] == plan.ids
        s.cached[plan.slots[here]] = (plan.context + plan.n_tokens)[here]
        np.add.at(s.known, slots, 1)
        s.owed[slots] = False
        sampling = plan.slots[plan.samples & here]
        return rows, slots, sampling[s.known[sampling] >= s.stop_at[sampling]]
