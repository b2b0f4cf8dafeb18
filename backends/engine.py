"""The real engine: it executes step plans with real forward passes and a real clock.

One step: plan, draft, one packed forward pass over all rows (ragged, no padding), temper, sample, observe. What to run,
with which temperature and which pages, and how many tokens to draft, is decided by :class:`entropic_ctl.loop.Loop`, the
same object the simulator drives. Who drafts: :mod:`backends.drafting`; what becomes of a draft:
:mod:`backends.verification`.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.attention import PagedBatch
from backends.audit import LiveAudit
from backends.decoder import paged
from backends.drafting import Drafted, Drafter, drafter_of
from backends.energy import Counters, EnergyMeter, counters
from backends.flops import step_flops
from backends.jobs import Job, OnText, Output, new_job
from backends.models import LoadedModel
from backends.sampling import SamplingParams, kernels, process, row_maxima, sample
from backends.verification import Positions, drafted_plan, settled, verify
from entropic_ctl.certificates import Verdict
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import NoProgressError
from entropic_ctl.loop import Loop
from entropic_ctl.signals import Finish, FinishReason, StepPlan, StepResult

__all__ = ["Engine", "Output"]

_IDLE_LIMIT = 1000
Probe = Callable[[StepPlan, Any, Tensor], None]


class Engine:
    """Run requests on a model under a control loop.

    Parameters
    ----------
    config : RunConfig
        ``engine``, ``loop`` and ``speculation`` are used; the model is given.
    model : LoadedModel
        From :func:`backends.models.load`. Its attention implementation is switched to the paged one.
    verdict, uncertified, recorder, laws
        Passed to :class:`entropic_ctl.loop.Loop`.
    metrics : entropic_ctl.metrics.Metrics, optional
        Collector fed with every submission, refusal and step.
    clock, sleep : callable
        Seconds now; wait that many seconds. The engine's time 0 is its construction, audits are left out.
    probe : callable(plan, rows, logits), optional
        Shown the raw logits (K, n) of the sampling rows of every step (``rows`` index the plan; a row that verifies
        drafts occurs once per position, rejected ones included).
    draft_model : LoadedModel, optional
        With ``speculation.drafter = "model"``: the loaded drafter, in place of ``speculation.draft_model``.
    drafter : Drafter, optional
        Who drafts, in place of what the configuration names; ``speculation.draft_tokens`` still bounds it.
    energy : EnergyMeter, optional
        Default: the machine's counters, read once per step if ``metrics`` are kept (audits are left in).

    Attributes
    ----------
    drafted, accepted : int
        Tokens drafted so far, and those of them that became text.

    Raises
    ------
    BadInputError
        If the draft model has another tokenizer.
    UncertifiedError
        If the temperature law needs a certificate that ``verdict`` does not give.
    """

    def __init__(
        self,
        config: RunConfig,
        model: LoadedModel,
        *,
        verdict: Verdict | None = None,
        uncertified: bool = False,
        recorder: Any = None,
        laws: tuple[Any, Any, Any] | None = None,
        metrics: Any = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        probe: Probe | None = None,
        draft_model: LoadedModel | None = None,
        drafter: Drafter | None = None,
        energy: EnergyMeter | None = None,
    ) -> None:
        longest = min(config.engine.max_context, max(2, model.max_context))
        limits = dataclasses.replace(config.engine, max_context=longest)
        self.config, self.model, self.metrics, self.limits = config, model, metrics, limits
        self.loop = Loop(
            config.loop,
            limits,
            model.vocab_size,
            verdict=verdict,
            uncertified=uncertified,
            recorder=recorder,
            laws=laws,
            speculation=config.speculation,
        )
        self._drafter = drafter or drafter_of(config.speculation, model, limits, draft_model)
        self.drafted = self.accepted = 0
        self.cache, self._run = paged(model, limits.pages, limits.page_tokens, limits.kernels)
        self.audit = LiveAudit(limits, config.seed, clock)
        self._sampling = kernels(limits.kernels, self.cache.device)
        self.outputs: dict[int, Output] = {}
        self._pruning = config.loop.pruning.config
        self._prunes = config.loop.pruning.name != "off"
        self._jobs: dict[int, Job] = {}
        self._waiting: list[tuple[float, int]] = []  # arrivals in the future
        self._next_id = 0
        self._clock, self._sleep, self._probe = clock, sleep, probe
        self._origin = clock()
        self.energy = energy or EnergyMeter(Counters() if metrics is None else counters())
        self._idle_steps = 0
        self._stepping = False
        self._ending: set[int] = set()  # cancelled by a callback while a step runs

    # -- requests ---------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the engine's time in seconds: real time since construction, audits left out."""
        return self._clock() - self._origin - self.audit.seconds

    @property
    def idle(self) -> bool:
        """True when every request has left."""
        return not self._jobs

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        arrival_s: float | None = None,
        chat: bool = True,
        client: int = -1,
        expected_tokens: int = 0,
    ) -> int:
        """Hand in a request and return its id.

        Parameters
        ----------
        prompt : str or sequence of int
            Text (through the chat template if ``chat`` and the model has one), or token ids.
        params : SamplingParams, optional
        arrival_s : float, optional
            Engine time at which the request enters; in the future it waits outside until then. Default: now.
        client : int
            Who asks, for policies that share service between clients; -1: a client of its own.
        expected_tokens : int
            Predicted output length, for policies that order by it; 0: unknown.

        Raises
        ------
        BadInputError
            If the prompt is empty, a token id lies outside the vocabulary, the arrival is not finite, or stop strings
            meet a model without tokenizer. A request that can never be served is no error: it leaves ``REJECTED``.
        """
        ids = self.model.prompt_ids(prompt, chat=chat) if isinstance(prompt, str) else [int(t) for t in prompt]
        number = self._next_id
        job = new_job(
            self.model,
            number,
            ids,
            params or SamplingParams(),
            arrival_s=self.now() if arrival_s is None else float(arrival_s),
            prefix_page=self.limits.page_tokens if self.limits.prefix_caching else 0,
            client=client,
            expected_tokens=expected_tokens,
        )
        self._next_id += 1
        self.outputs[number], self._jobs[number] = job.output, job
        heapq.heappush(self._waiting, (job.request.arrival_s, number))
        return number

    def cancel(self, request_id: int, *, on_text: OnText | None = None) -> bool:
        """End a request, free its pages, and return whether it was there.

        From a callback inside a step it takes no more tokens and no more text, and leaves at the end of that step.

        Parameters
        ----------
        request_id : int
        on_text : callable(id, text), optional
            Called with the text that was held back, which cancelling makes certain.
        """
        if request_id not in self._jobs or request_id in self._ending:
            return False
        if self._stepping:
            self._ending.add(request_id)
            return True
        if self.loop.cancel(request_id) and self.metrics is not None:
            self.metrics.cancelled(request_id, self.now())
        self._leave(Finish(request_id, FinishReason.CANCELLED), on_text)
        return True

    # -- running ----------------------------------------------------------------------------------------------------

    def run(self, *, on_text: OnText | None = None, progress: Callable[[int, int], None] | None = None) -> list[Output]:
        """Step until every request has left; return all outputs in order of submission.

        Parameters
        ----------
        on_text : callable(id, text), optional
            Called with each piece of text as it becomes certain.
        progress : callable(left, total), optional
            Called after each step.
        """
        while not self.idle:
            self.step(on_text=on_text)
            if progress is not None:
                progress(len(self.outputs) - len(self._jobs), len(self.outputs))
        return [self.outputs[number] for number in sorted(self.outputs)]

    def stream(self) -> Iterator[tuple[int, str]]:
        """Step until idle, yielding (id, text) as text becomes certain."""
        pieces: list[tuple[int, str]] = []
        while not self.idle:
            self.step(on_text=lambda number, text: pieces.append((number, text)))
            yield from pieces
            pieces.clear()

    def step(self, *, on_text: OnText | None = None) -> StepResult | None:
        """Run one iteration; return its result, or None if nothing could run (then it waited for an arrival).

        Whatever is raised inside (an interrupt, an error of ``on_text``) ends the requests of this step as cancelled,
        since some of their tokens may have been taken in and others not; all others go on with the next step.
        """
        now = self._arrivals(on_text)
        plan = self.loop.plan(now)
        if plan.n_rows == 0:
            for finish in plan.rejected:
                self._refuse(finish, on_text)
            self._wait(now)
            return None
        self._idle_steps, self._stepping = 0, True
        self.energy.lap()  # what was drawn between steps is nobody's
        finished = None
        try:
            drafted = Drafted([])
            if self._drafter is not None:
                jobs = [self._jobs[int(i)] for i in plan.ids]
                drafted = self._drafter.propose(plan, jobs)
                plan = drafted_plan(plan, drafted, jobs, self.model.vocab_size)
            result = self._execute(plan, on_text)
            result = result._replace(kv_bytes=result.kv_bytes + drafted.kv_bytes, flops=result.flops + drafted.flops)
            finished = self.loop.observe(result)
            if self.metrics is not None:
                self.metrics.step(plan, result, finished)
            for finish in (*plan.rejected, *finished):
                self._leave(finish, on_text)
        except BaseException:
            self._abandon(plan, finished)
            raise
        finally:
            self._stepping = False
        while self._ending:
            self.cancel(self._ending.pop(), on_text=on_text)
        return result

    def _abandon(self, plan: StepPlan, finished: tuple[Finish, ...] | None) -> None:
        """Close a step that raised; ``finished`` is None while its plan is open."""
        if finished is None:
            why = "the step it ran in was interrupted"
            finished = tuple(Finish(number, FinishReason.CANCELLED, why) for number in plan.ids.tolist())
            for number in plan.ids.tolist():
                if self.loop.cancel(number) and self.metrics is not None:
                    self.metrics.cancelled(number, self.now())
            nothing = np.zeros(plan.n_rows)
            self.loop.observe(
                StepResult(
                    step=plan.step,
                    start_s=plan.now_s,
                    end_s=self.now(),
                    kept_fraction=np.ones(plan.n_rows),
                    pruned_mass_mean=nothing,
                    pruned_mass_max=nothing,
                    certificate_max=nothing,
                )
            )
        for finish in (*plan.rejected, *finished):
            self._ending.discard(finish.id)
            self._leave(finish, None)

    def _arrivals(self, on_text: OnText | None) -> float:
        now = self.now()
        while self._waiting and self._waiting[0][0] <= now:
            _, number = heapq.heappop(self._waiting)
            job = self._jobs.get(number)
            if job is None:  # cancelled before it arrived
                continue
            if self.metrics is not None:
                self.metrics.submitted(job.request)
            refusal = self.loop.submit(job.request)
            if refusal is not None:
                self._refuse(refusal, on_text)
        return now

    def _refuse(self, finish: Finish, on_text: OnText | None) -> None:
        if self.metrics is not None:
            self.metrics.refused(finish, self.now())
        self._leave(finish, on_text)

    def _wait(self, now: float) -> None:
        self._idle_steps += 1
        if self._waiting:
            self._sleep(max(0.0, self._waiting[0][0] - now))
        elif self._jobs and self._idle_steps > _IDLE_LIMIT:
            raise NoProgressError(f"{len(self._jobs)} requests are live but {_IDLE_LIMIT} plans in a row ran none")

    def _leave(self, finish: Finish, on_text: OnText | None) -> None:
        job = self._jobs.pop(finish.id, None)
        if self._drafter is not None:
            self._drafter.leave(finish.id)
        if job is not None:
            job.leave(finish, self.now(), on_text)

    # -- one forward pass -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _execute(self, plan: StepPlan, on_text: OnText | None) -> StepResult:
        jobs = [self._jobs[int(i)] for i in plan.ids]
        rows = np.flatnonzero(plan.samples)
        spans = zip(jobs, plan.context.tolist(), plan.n_tokens.tolist(), strict=True)
        packed = [token for job, start, count in spans for token in job.tokens(start, count)]
        inputs = torch.tensor(packed, dtype=torch.long, device=self.cache.device)
        at = Positions.of(plan.n_draft[rows] + 1)
        dense = self.audit.dense(plan, lambda exact: self._forward(self._batch(exact), inputs))
        batch = self._batch(plan)
        logits = self._forward(batch, inputs)
        if self._probe is not None and rows.size:
            self._probe(plan, rows[at.owner], logits)
        chosen, finished = self._choose(plan, jobs, rows, at, logits, on_text)
        statistics = batch.statistics()
        if self._prunes:
            self.cache.seal_pages(batch.filled_pages(settled(plan, jobs)))
        if dense is not None:
            alarm = self.audit.compare(plan, rows, logits[at.first], dense[at.first])
            if alarm is not None:
                self.loop.stop_pruning(alarm)
        for job, nats in zip(jobs, statistics.certificate_max.tolist(), strict=True):
            job.charge(nats)
        return StepResult(
            step=plan.step,
            start_s=plan.now_s,
            end_s=self.now(),
            **chosen,
            kept_fraction=statistics.kept_fraction,
            pruned_mass_mean=statistics.pruned_mass_mean,
            pruned_mass_max=statistics.pruned_mass_max,
            certificate_max=statistics.certificate_max,
            kv_bytes=statistics.kv_bytes,
            flops=step_flops(self.model, plan, statistics.kept_fraction, statistics.pruned_layers),
            finished=tuple(finished),
            drafted=plan.n_draft,
            energy_j=self.energy.lap(),
        )

    def _batch(self, plan: StepPlan) -> PagedBatch:
        return PagedBatch.from_plan(plan, self.cache, self._pruning)

    def _forward(self, batch: PagedBatch, tokens: Tensor) -> Tensor:
        """Return the raw logits of the sampling rows' positions, float32 (K, n), in plan order."""
        return self._run(batch, tokens).float()

    def _choose(
        self, plan: StepPlan, jobs: list[Job], rows: Any, at: Positions, logits: Tensor, on_text: OnText | None
    ) -> tuple[dict[str, Any], list[Finish]]:
        """Temper, sample, verify; extend texts; return the per-token columns of the result, and who is done."""
        picked = [jobs[row] for row in rows]
        shown = [(picked[i], ahead) for i, ahead in zip(at.owner.tolist(), at.ahead.tolist(), strict=True)]
        params = [job.params for job, _ in shown]
        processed = process(logits, params, [job.seen(ahead) for job, ahead in shown])
        tempered = self.loop.temper(self._sampling.view(logits, processed), at.count if self._drafter else None)
        alive = tempered.valid  # which says all about the raw logits
        if processed is not logits:
            alive = alive & np.isfinite(row_maxima(processed))
        drawn = sample(
            processed,
            tempered.temperature,
            plan.greedy[rows[at.owner]],
            params,
            [len(job.output.token_ids) + ahead for job, ahead in shown],
            self._sampling.choose,
            alive=alive,
        )
        used, drafted, accepted, finished = verify(
            picked, at, drawn, tempered.temperature, self.now(), self.model.eos_ids, self._ending, on_text
        )
        self.drafted += drafted
        self.accepted += accepted
        if self._ending:
            gone = [number for number in plan.ids.tolist() if number in self._ending]
            finished = [finish for finish in finished if finish.id not in self._ending]
            finished += [Finish(number, FinishReason.CANCELLED) for number in gone]
        columns = {name: values[used] for name, values in tempered._asdict().items() if name != "valid"}
        return {"token_ids": plan.ids[rows[at.owner[used]]], "tokens": drawn[used]} | columns, finished
