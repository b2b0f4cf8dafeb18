"""The one controller object that both worlds drive: ``Loop`` = ``Policy`` (three laws) + ``Batcher`` (rows and pages).

A driver repeats: submit what arrived; ``plan``; run the plan (a forward pass, or a cost model); ``temper`` the
sampling rows; sample; ``observe``. The loop computes and holds no clock, no tensors and no randomness, so a log of
these calls replays through a fresh loop to the same decisions (:mod:`entropic_ctl.replay`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from entropic_ctl import __version__, certificates
from entropic_ctl.batching import Batcher
from entropic_ctl.certificates import Verdict
from entropic_ctl.config import EngineConfig, LoopConfig, SpeculationConfig, resolve_loop
from entropic_ctl.drafting import rule_of
from entropic_ctl.errors import BadInputError
from entropic_ctl.policy import Policy
from entropic_ctl.pruning import accountant
from entropic_ctl.recording import FORMAT, RecordedView, Recorder
from entropic_ctl.signals import Finish, FloatArray, IntArray, LogitView, Request, StepPlan, StepResult, Tempered

__all__ = ["Loop", "Recorder"]


class Loop:
    """Plan, temper, observe.

    Parameters
    ----------
    loop : LoopConfig
        The three laws; ``fixed``, ``off`` and ``fcfs`` switch one off.
    engine : EngineConfig
    vocab_size : int
        Part of what a gain certificate is about.
    verdict : Verdict, optional
        A checked certificate; needed when the temperature law feeds back a past error.
    uncertified : bool
        Run without one, said out loud.
    recorder : Recorder, optional
        Receives every call.
    laws : tuple, optional
        (temperature, pruning, scheduling) objects in place of those ``loop`` names; a replay needs the same. No
        certificate covers such a temperature law: with integral action it runs ``uncertified`` only.
    speculation : SpeculationConfig, optional
        Drafting; off by default. The up to d + 1 tokens of a step are sampled under one state of the temperature law
        and then update it one by one, so the gain that is certified falls with d (theorem ``gain-drafts``).

    Raises
    ------
    UncertifiedError
        If the micro law needs a certificate and ``verdict`` does not prove it.
    """

    def __init__(
        self,
        loop: LoopConfig,
        engine: EngineConfig,
        vocab_size: int,
        *,
        verdict: Verdict | None = None,
        uncertified: bool = False,
        recorder: Recorder | None = None,
        laws: tuple[Any, Any, Any] | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> None:
        temperature, pruning, scheduling = laws if laws is not None else loop.build()
        self._speculation = speculation or SpeculationConfig()
        certificates.require(
            loop.temperature,
            temperature.integral_action,
            engine.observation_lag,
            vocab_size,
            verdict if laws is None else None,  # a certificate is about the law that ``loop`` names
            speculation=self._speculation,
            uncertified=uncertified,
        )
        self.policy = Policy(
            temperature, pruning, scheduling, slots=engine.max_live, observation_lag=engine.observation_lag
        )
        self.batcher = Batcher(engine, scheduling.config, stateful=getattr(scheduling, "stateful", False))
        self._rule = rule_of(self._speculation, engine.max_live)
        self._reads_view = bool(getattr(scheduling, "reads_view", True))
        self._recorder = recorder
        self._plan: StepPlan | None = None
        self._sampling: IntArray = np.empty(0, np.int64)
        self._greedy = np.empty(0, np.bool_)
        self._now_s = 0.0
        if recorder is not None:
            recorder.write(
                "header",
                format=FORMAT,
                version=__version__,
                loop=resolve_loop(loop),
                engine=dataclasses.asdict(engine),
                vocab_size=vocab_size,
                uncertified=uncertified,
                own_laws=laws is not None,
                speculation=dataclasses.asdict(self._speculation),
            )

    @property
    def plain(self) -> bool:
        """Whether nobody records the calls and no tokens are drafted."""
        return self._recorder is None and not self._speculation.draft_tokens

    @property
    def live(self) -> int:
        """Admitted requests."""
        return self.batcher.live

    @property
    def backlog(self) -> int:
        """Submitted requests that wait for a slot."""
        return self.batcher.backlog

    def submit(self, request: Request) -> Finish | None:
        """Queue a request; return a REJECTED finish, with the numbers, if it can never be served."""
        outcome = self.batcher.submit(
            dataclasses.replace(request, greedy=True) if self.policy.always_greedy else request
        )
        if self._recorder is not None:
            self._recorder.submit(request, outcome)
        return outcome

    def cancel(self, request_id: int) -> bool:
        """Remove a request and free its pages and state at once; False if it is not in the system."""
        slot = self.batcher.slot_of(request_id)
        found = self.batcher.cancel(request_id)
        if slot is not None:
            self._stop(np.array([slot]))
        if self._recorder is not None:
            self._recorder.write("cancel", id=request_id, found=found)
        return found

    def plan(self, now_s: float) -> StepPlan:
        """Decide the next iteration; a plan without rows means that nothing is in the system."""
        self.admit()
        self._now_s = now_s
        budgets, least = self.policy.budgets, self.policy.min_context
        if least:
            budgets = accountant.reaching(budgets, self.batcher.slots.cached, least)
        plan = self.batcher.plan(now_s, self._score, budgets, self._draft())
        last = self._plan
        if last is None or plan.samples is not last.samples:  # a repeated plan shares its row columns
            self._sampling, self._greedy = plan.slots[plan.samples], plan.greedy[plan.samples]
            if plan.n_draft.any():
                verified = plan.n_draft[plan.samples] + 1
                self._sampling, self._greedy = self._sampling.repeat(verified), self._greedy.repeat(verified)
        self._plan = plan
        if self._recorder is not None:
            self._recorder.plan(plan)
        return plan

    def admit(self) -> None:
        """Give waiting requests the free slots, in the order they came; :meth:`plan` does it first thing."""
        admitted = self.batcher.admit()
        if admitted.shape[0]:
            self.policy.start(admitted)

    def stop_pruning(self, why: str) -> None:
        """Run dense from the next plan on, for all requests and for good; the first call is recorded.

        Parameters
        ----------
        why : str
            A sentence for people.
        """
        if self.policy.dense:
            return
        self.policy.dense = True
        if self._recorder is not None:
            self._recorder.write("stop_pruning", why=why)

    def ran(self, steps: int, step_s: float, ended: list[Finish], full: list[int]) -> list[Finish]:
        """Note iterations that a driver ran on the state in place (see ``Batcher.ran``); return who left."""
        finished, freed = self.batcher.ran(steps, step_s, ended, full)
        if freed.shape[0]:
            self._stop(freed)
        return finished

    def _stop(self, slots: IntArray) -> None:
        self.policy.stop(slots)
        self._rule.stop(slots)

    def _draft(self) -> IntArray | None:
        """Return the most tokens to draft by slot: 0 where the last model entropy is too high; None if off."""
        if not self._speculation.draft_tokens:
            return None
        entropy = self.policy.last_entropy
        return np.where(entropy >= self._speculation.draft_below_nats, 0, self._rule.lengths(entropy))

    def _score(self, slots: IntArray) -> FloatArray:
        if not self._reads_view:
            return np.zeros(slots.shape[0])
        return self.policy.scores(self.batcher.view(self._now_s, slots, self.policy.signals(slots)))

    def temper(self, view: LogitView, positions: IntArray | None = None) -> Tempered:
        """Return temperatures for the last plan's sampling rows, in plan order; ``1 + n_draft`` of a row that drafts.

        Parameters
        ----------
        view : LogitView
        positions : IntArray, shape (M,), optional
            Distributions of each sampling row in the view, where the driver drafted fewer tokens than planned.

        Raises
        ------
        BadInputError
            If no plan was made, ``positions`` are not within 1 and ``1 + n_draft``, or the view has another number of
            rows.
        """
        if self._plan is None:
            raise BadInputError("temper before plan", where="Loop.temper", remedy="call plan first")
        if positions is not None:
            self._narrow(self._plan, positions)
        rows = self._sampling.shape[0]
        if rows and view.model_entropy.shape != (rows,):
            raise BadInputError(
                "wrong number of rows",
                where="Loop.temper",
                field="view.model_entropy",
                value=tuple(view.model_entropy.shape),
                allowed=f"({rows},), one per sampling row and drafted token",
            )
        if self._recorder is None:
            return self.policy.temper(self._sampling, self._greedy, view)
        recorded = RecordedView(view)
        tempered = self.policy.temper(self._sampling, self._greedy, recorded)
        self._recorder.temper(recorded, tempered, positions)
        return tempered

    def _narrow(self, plan: StepPlan, positions: IntArray) -> None:
        """Look at ``positions`` distributions of each sampling row."""
        most = plan.n_draft[plan.samples] + 1
        if positions.shape != most.shape or ((positions < 1) | (positions > most)).any():
            raise BadInputError(
                "not the numbers of tokens verified",
                where="Loop.temper",
                field="positions",
                value=positions.tolist(),
                allowed=f"from 1 to {most.tolist()}, one per sampling row",
            )
        self._sampling = plan.slots[plan.samples].repeat(positions)
        self._greedy = plan.greedy[plan.samples].repeat(positions)

    def observe(self, result: StepResult) -> tuple[Finish, ...]:
        """Take in a step's result; return everything that left in it."""
        _check_lengths(result)
        _check_drafts(result, self._plan)
        self._charge(result)
        outcome = self.batcher.observe(result)
        slots, rows = outcome.token_slots, outcome.token_rows
        if slots.shape[0]:
            model, tempered = result.model_entropy, result.tempered_entropy
            if rows is not None:
                model, tempered = model[rows], tempered[rows]
            greedy = self.batcher.slots.greedy[slots]
            self.policy.observe(slots, model, tempered, greedy, distinct=outcome.distinct)
        if self._speculation.draft_tokens and result.drafted.shape[0] and self._plan is not None:
            self._count_drafts(self._plan, result)
        if outcome.freed.shape[0]:
            self._stop(outcome.freed)
        if self._recorder is not None:
            self._recorder.observe(result, outcome.finished)
        return outcome.finished

    def _count_drafts(self, plan: StepPlan, result: StepResult) -> None:
        """Tell the draft rule what became of the drafts of the rows that are still there."""
        here = plan.samples & (self.batcher.slots.id[plan.slots] == plan.ids)
        ids, drafted = plan.ids[here], result.drafted[here]
        order = np.argsort(ids)
        known = result.token_ids[np.isin(result.token_ids, ids)]
        yielded = np.zeros(ids.shape[0], np.int64)
        np.add.at(yielded, order[np.searchsorted(ids, known, sorter=order)], 1)
        self._rule.observe(plan.slots[here], drafted, np.minimum(np.maximum(yielded - 1, 0), drafted))

    def _charge(self, result: StepResult) -> None:
        """Book what the open plan's step cost its requests; a result of another step is the batcher's to refuse."""
        plan = self._plan
        if plan is None or result.step != plan.step or not np.count_nonzero(plan.theta_nats):
            return
        here = self.batcher.slots.id[plan.slots] == plan.ids  # not cancelled meanwhile
        slots, theta, nats = plan.slots, plan.theta_nats, result.certificate_max
        if not here.all():
            slots, theta = slots[here], theta[here]
            nats = nats[here] if nats.shape[0] == here.shape[0] else nats[:0]
        self.policy.charge(slots, theta, nats)


def _check_lengths(result: StepResult) -> None:
    count = result.token_ids.shape[0]
    for name in ("model_entropy", "tempered_entropy"):
        if getattr(result, name).shape[0] != count:
            raise BadInputError(
                "wrong length",
                where="StepResult",
                field=name,
                value=getattr(result, name).shape[0],
                allowed=f"{count}, one per accepted token",
            )


def _check_drafts(result: StepResult, plan: StepPlan | None) -> None:
    drafted = result.drafted
    if plan is None or not drafted.shape[0]:
        return
    if drafted.shape != plan.n_draft.shape or ((drafted < 0) | (drafted > plan.n_draft)).any():
        raise BadInputError(
            "not the numbers of drafted tokens",
            where="StepResult",
            field="drafted",
            value=drafted.tolist(),
            allowed=f"from 0 to {plan.n_draft.tolist()}, one per plan row",
        )
