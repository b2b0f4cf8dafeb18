"""Many iterations in one call, for as long as nobody comes, nobody leaves and nothing has to be decided.

Most of a simulation is such stretches: every live row has its seat (:func:`entropic_ctl.steady.seat_all`) and the next
arrival is some iterations away. :func:`_run` executes them in one compiled loop made of the very twins that the
step-by-step path calls, in the same order, on the same arrays: the state of the control plane, the recordings, the
clock and the accounts is afterwards what single steps would have left, bit for bit (a test compares the two). It stops
in front of an iteration that needs more: an arrival, the end of a request, a plan that is not the plain one.

It knows the laws ``fixed``, ``feedback`` (linear), ``off`` and ``budget`` and the roofline; every other case, and a run
that is recorded or traced, takes single steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from entropic_ctl import accounts, arrays, policy, steady
from entropic_ctl.collectors import Collector
from entropic_ctl.compiled import ENABLED, compiled
from entropic_ctl.errors import BadInputError
from entropic_ctl.loop import Loop
from entropic_ctl.metrics import Metrics
from entropic_ctl.pruning import accountant
from entropic_ctl.pruning.laws import budget, off
from entropic_ctl.signals import Finish, FinishReason, FloatArray, IntArray
from entropic_ctl.temperature import feedback, fixed
from sim import load as loads
from sim import response, trajectories
from sim.clock import Clock
from sim.cost import Roofline, RooflineConstants, charge
from sim.step import StepModel

__all__ = ["Stretch"]

_LONGEST = 256  # iterations in one call
_PAUSE = 8  # iterations before another try when the live set is what it was
_FIXED, _FEEDBACK = 0, 1
_OFF, _BUDGET = 0, 1
_PLANNED, _OFF_GRID, _OFF_THETA, _OFF_RECORDED, _BAD_TIME = range(5)  # why it stopped

_ERRORS = {
    _OFF_GRID: "temperature outside the recorded grid",
    _OFF_THETA: "theta outside the recorded response",
    _OFF_RECORDED: "temperature outside those the bank was sampled at",
    _BAD_TIME: "a step of no finite duration",
}

Bools = npt.NDArray[np.bool_]
Grid = npt.NDArray[np.float32]
Pages = npt.NDArray[np.int32]


class _Slots(NamedTuple):
    """Columns of the slot table and the page table, by slot."""

    ids: IntArray
    prompt: IntArray
    known: IntArray
    cached: IntArray
    stop_at: IntArray
    greedy: Bools
    last_run: IntArray
    protected_until: IntArray
    owed: Bools
    held: IntArray
    table: Pages
    stack: Pages
    refs: Pages


class _Laws(NamedTuple):
    """State of the laws by slot, and their parameters."""

    u: FloatArray
    theta: FloatArray
    timer: IntArray
    spent: FloatArray
    worst: FloatArray
    stats: FloatArray
    seen: IntArray
    micro: int
    feedback: tuple[float, float, float, float, float]  # target, gain, rate limit, bounds of u
    clamps: tuple[float, float]  # of T
    meso: int
    budget: tuple[float, float, float, float, int]  # narrow, wide, entropy band, dwell
    weight: float  # of the reduction average
    total: float  # limit on a request's loss, nats; 0: none


class _World(NamedTuple):
    """The recordings, the places of the requests in them, and the response to pruning."""

    prompt: IntArray
    xi: FloatArray
    token: IntArray
    u: FloatArray
    recorded: FloatArray
    choices: IntArray
    start: IntArray
    length: IntArray
    ends: Bools
    model: Grid
    entropy: Grid
    varentropy: Grid
    log_grid: FloatArray
    contexts: FloatArray
    thetas: FloatArray
    response: FloatArray


class _Limits(NamedTuple):
    """What does not change during a run."""

    page: int
    budget: int
    chunk: int
    wait: int
    protected_tokens: int
    min_context: int
    target: float
    clock_weight: float


class _State(NamedTuple):
    """Scalars that a stretch moves on."""

    step: int
    free: int
    now_s: float
    sum_s: float
    low_s: float
    step_s: float  # running mean of step durations
    kl_sum: float
    decoded: int
    beyond: int
    flops: float
    kv_bytes: float
    busy_s: float
    energy_j: float
    longest_gap_s: float


def _run(
    live: IntArray,
    rows: IntArray,
    until_s: float,
    used_by_nobody: int,
    in_system: int,
    s: _Slots,
    laws: _Laws,
    w: _World,
    c: RooflineConstants,
    limits: _Limits,
    state: _State,
    sums: FloatArray,
    gaps: IntArray,
    table: FloatArray,
    booked: int,
) -> tuple[int, int, _State, IntArray, Bools]:
    """Run iterations until ``until_s``, until something else has to happen, or until ``table`` is full.

    Parameters
    ----------
    live, rows : IntArray, shape (L,)
        Slots in the order of arrival, and the rows of their accounts.
    until_s : float
        The next arrival.
    used_by_nobody : int
        Pages of the pool that are neither held nor on the free stack.
    in_system : int
        Requests submitted that have not left.
    s, laws, w, c, limits, state
        See the classes; arrays are changed in place.
    sums, gaps, table
        Accounts of the requests, histogram of gaps, accounts of the iterations to come.
    booked : int
        Iterations in the accounts so far.

    Returns
    -------
    steps : int
    why : int
        0, or what went wrong.
    state : _State
    ended : IntArray
        Slots of the rows that ended with the last iteration.
    by_text : bool array
        Whether the recorded text ended, not (only) the limit was reached.
    """
    count, page = live.shape[0], limits.page
    step, free, now_s, sum_s, low_s, step_s, kl_sum, decoded, beyond = state[:9]
    flops, kv_bytes, busy_s, energy_j, longest = state[9:]
    waits = (s.last_run, s.protected_until, s.owed)
    pool = s.stack.shape[0] - used_by_nobody
    done, why = 0, _PLANNED
    token_rows, ended, by_text, ends = (
        np.empty(count, np.int64),
        np.empty(count, np.int64),
        np.empty(count, np.bool_),
        0,
    )
    for i in range(count):
        if s.greedy[live[i]]:
            until_s = now_s
    while done < table.shape[0] and now_s < until_s and ends == 0:
        # who samples, and what it reads
        n = 0
        for i in range(count):
            if s.known[live[i]] - s.cached[live[i]] <= limits.chunk:
                token_rows[n] = i
                n += 1
        sampling = live[token_rows[:n]]
        ids = s.ids[sampling]
        at, last, off_recorded = trajectories.select_loop(
            w.recorded, w.choices, w.start, w.length, w.ends, w.prompt[ids], w.xi[ids], w.token[ids], w.u[ids]
        )
        if off_recorded:
            why = _OFF_RECORDED
            break
        theta = laws.theta
        if laws.total > 0.0:
            theta = accountant.allowed_loop(laws.theta, laws.spent, laws.total)
        if limits.min_context > 0:
            theta = accountant.reaching_loop(theta, s.cached, limits.min_context)
        ok, plan = steady.seat_all_loop(
            live, (step, page, limits.budget, limits.chunk, limits.wait), s.ids, s.prompt, s.known, s.cached, s.greedy,
            waits, s.held, s.table, s.stack, free, s.refs, theta,
        )  # fmt: skip
        if not ok:
            break
        free -= plan.allocated.shape[0]
        # what it costs
        decode = plan.samples & (plan.n_tokens == 1)
        decoding = 0
        pruning = False
        for i in range(count):
            decoding += decode[i]
            pruning |= plan.theta[i] != 0.0
        decoded += decoding
        answer = np.zeros((w.response.shape[1], count))
        answer[0] = 1.0
        if pruning:
            answer, more, inside = response.bilinear_loop(
                w.contexts, w.thetas, w.response, plan.context, plan.theta, decode
            )
            beyond += more
            step_kl = 0.0
            for i in range(count):
                step_kl += answer[5, i]
            kl_sum += step_kl
            if not inside:
                why = _OFF_THETA
                break
        parts = loads.sums_loop(
            plan.context, plan.n_tokens, plan.samples, plan.theta, answer[0], limits.protected_tokens, w.contexts[-1]
        )
        seconds, more_flops, more_bytes, joules = charge(c, loads.StepLoad(count, *parts))
        if not (seconds >= 0.0 and np.isfinite(seconds)):
            why = _BAD_TIME
            break
        start_s, total_s = now_s, sum_s + seconds
        if sum_s >= seconds:
            low_s += (sum_s - total_s) + seconds
        else:
            low_s += (seconds - total_s) + sum_s
        sum_s = total_s
        now_s = max(now_s, total_s + low_s)
        # the micro law on what was read
        model, tempered = np.empty(n), np.empty(n)
        if n > 0:
            temperature = arrays.exp_loop(laws.u[sampling])
            if laws.micro == _FEEDBACK:
                for i in range(n):
                    temperature[i] = min(max(temperature[i], laws.clamps[0]), laws.clamps[1])
            log_t = arrays.log_loop(temperature)
            tempered, _, inside = trajectories.hermite_loop(w.entropy, w.varentropy, w.log_grid, at, log_t)
            if not inside:
                why = _OFF_GRID
                break
            for i in range(n):
                model[i] = w.model[at[i]]
                if pruning:
                    shift = answer[6, token_rows[i]]
                    model[i] = max(model[i] + shift, 0.0)
                    tempered[i] = max(tempered[i] + shift, 0.0)
                w.token[ids[i]] += 1
                w.u[ids[i]] += trajectories.TEXT_WEIGHT * (log_t[i] - w.u[ids[i]])
        # books: losses, tokens, laws, accounts
        if pruning:
            accountant.charge_loop(laws.spent, laws.worst, live, plan.theta, answer[3])
        for i in range(count):
            slot = live[i]
            s.cached[slot] = plan.context[i] + plan.n_tokens[i]
            if plan.samples[i]:
                s.known[slot] += 1
                s.owed[slot] = False
        for i in range(n):
            if last[i] or s.known[sampling[i]] >= s.stop_at[sampling[i]]:
                ended[ends], by_text[ends] = sampling[i], last[i]
                ends += 1
        step_s += (0.2 if step_s != 0.0 else 1.0) * (now_s - start_s - step_s)
        if n > 0:
            if laws.micro == _FEEDBACK:
                laws.u[sampling] = feedback.linear_loop(laws.u[sampling], tempered, *laws.feedback)
            if laws.meso == _BUDGET:
                wider, timer = budget.step_loop(laws.theta[sampling], laws.timer[sampling], model, *laws.budget)
                laws.theta[sampling], laws.timer[sampling] = wider, timer
            policy.count_loop(laws.stats, laws.seen, sampling, model, laws.weight)
            gap = accounts.book_tokens_loop(
                sums, gaps, rows[token_rows[:n]], now_s, model, tempered, limits.target, limits.clock_weight
            )
            longest = max(longest, gap)
        accounts.book_rows_loop(sums, rows, booked + done, start_s, now_s, answer[3])
        duration, used = now_s - start_s, float(pool - free)
        flops, kv_bytes = flops + more_flops, kv_bytes + more_bytes
        busy_s, energy_j = busy_s + duration, energy_j + joules
        row = table[done]
        row[0], row[1], row[2], row[3], row[4], row[5] = step, 1.0, start_s, now_s, count, n
        row[6], row[7], row[8], row[9], row[10], row[11] = in_system, in_system - count, 0.0, 0.0, used, duration
        row[12], row[13], row[14] = count * duration, used * duration, more_bytes
        row[15], row[16] = more_flops, joules
        accounts.book_step_loop(row, page, plan.context, plan.n_tokens, answer[0], answer[1], answer[2], answer[3])
        step += 1
        done += 1
    after = _State(
        step, free, now_s, sum_s, low_s, step_s, kl_sum, decoded, beyond, flops, kv_bytes, busy_s, energy_j,
        longest,
    )  # fmt: skip
    return done, why, after, ended[:ends], by_text[:ends]


_run_loop = compiled(_run)


class Stretch:
    """Runs stretches of one replica.

    Parameters
    ----------
    loop : Loop
    model : StepModel
    metrics : Metrics
    clock : Clock
    constants : RooflineConstants
    """

    def __init__(
        self, loop: Loop, model: StepModel, metrics: Metrics, clock: Clock, constants: RooflineConstants
    ) -> None:
        self._loop, self._model, self._metrics, self._clock = loop, model, metrics, clock
        self._constants = constants
        self._live = self._rows = np.empty(0, np.int64)  # the last live set, and the rows of its accounts
        self._not_before = 0
        batcher, rules, places = loop.batcher, loop.policy, model.trajectories
        t, pages, engine = batcher.slots, batcher.pages, batcher.engine
        held, table, stack, _, refs = pages.columns
        self._slots = _Slots(
            t.id, t.prompt, t.known, t.cached, t.stop_at, t.greedy, t.last_run, t.protected_until, t.owed, held, table,
            stack, refs,
        )  # fmt: skip
        micro, meso = rules.temperature, rules.pruning
        gains, bounds = (0.0,) * 5, (micro.config.t_min, micro.config.t_max)
        if isinstance(micro, feedback.Feedback):
            gains = micro.constants
        band = (0.0, 0.0, 0.0, 1.0, 1)
        if isinstance(meso, budget.Budget):
            band = meso.constants
        self._laws = _Laws(
            rules.u, rules.theta, rules.timer, rules.spent, rules.worst, rules.stats, rules.seen,
            _FEEDBACK if isinstance(micro, feedback.Feedback) else _FIXED, gains, bounds,
            _BUDGET if isinstance(meso, budget.Budget) else _OFF, band, rules.scheduling.config.reduction_weight,
            rules.total_nats,
        )  # fmt: skip
        self._world = _World(*(*places.columns, *places.response.columns))
        self._limits = _Limits(
            engine.page_tokens, engine.max_batch_tokens, engine.prefill_chunk, batcher.scheduling.wait_limit_steps,
            model.protected_tokens, rules.min_context, metrics.target_nats, metrics.filter_weight,
        )  # fmt: skip

    @staticmethod
    def of(loop: Loop, model: StepModel, collector: Collector, clock: Clock) -> Stretch | None:
        """Return the stretches of a replica, or None where it has to take single steps."""
        cost = model.cost
        if not (
            ENABLED
            and isinstance(cost, Roofline)
            and type(loop) is Loop
            and type(collector) is Metrics
            and collector.plain
            and loop.plain
        ):
            return None
        rules, micro = loop.policy, loop.policy.temperature
        known = (
            rules.observation_lag == 0
            and not rules.always_greedy
            and not rules.dense
            and (type(micro) is fixed.Fixed or (type(micro) is feedback.Feedback and micro.config.phi == "linear"))
            and type(rules.pruning) in (off.Off, budget.Budget)
        )
        return Stretch(loop, model, collector, clock, cost.constants) if known else None

    def run(self, until_s: float) -> tuple[int, list[Finish]]:
        """Run iterations that start before ``until_s``, up to the first in which somebody leaves.

        Returns
        -------
        steps : int
            0: the next iteration is not plain, nothing was done.
        finished : list of Finish
            Who left with the last of them.

        Raises
        ------
        BadInputError
            If a temperature or a budget leaves the recorded range.
        """
        loop, metrics, clock, model = self._loop, self._metrics, self._clock, self._model
        batcher, places = loop.batcher, model.trajectories
        loop.admit()
        if not batcher.plain:
            return 0, []
        if batcher.newcomers.shape[0]:
            metrics.admitted(batcher.newcomers, clock.now_s)
        slots = batcher.slots
        if slots.live is not self._live:
            self._live, self._rows = slots.live, metrics.rows_of(slots.id[slots.live], slots.live)
        elif batcher.step < self._not_before:
            return 0, []
        table, ledger, pool = metrics.reserve_steps(_LONGEST), metrics.ledger, batcher.pages.pool
        _, free, _ = pool.columns
        before = _State(
            batcher.step, free, clock.now_s, *clock.parts, batcher.step_s, model.kl_sum, model.decode_tokens,
            places.response.beyond_context, ledger.flops, ledger.kv_bytes, ledger.seconds,
            ledger.joules, metrics.gaps.maximum_s,
        )  # fmt: skip
        steps, why, after, ended, by_text = _run_loop(
            slots.live, self._rows, until_s, pool.remembered_pages, metrics.live, self._slots, self._laws,
            self._world, self._constants, self._limits, before, metrics.sums, metrics.gaps.counts, table,
            metrics.steps,
        )  # fmt: skip
        if why != _PLANNED:
            raise BadInputError(
                _ERRORS[why],
                where="entropy bank" if why != _BAD_TIME else "cost model",
                remedy="narrow the law's clamps, or record a wider bank",
            )
        if steps == 0:  # something has to be decided; unless somebody comes or goes, it will have to be for a while
            self._not_before = batcher.step + _PAUSE
            return 0, []
        pool.took(free - after.free)
        clock.set(after.now_s, after.sum_s, after.low_s)
        model.kl_sum, model.decode_tokens = after.kl_sum, after.decoded
        places.response.beyond_context = after.beyond
        ledger.flops, ledger.kv_bytes, ledger.seconds = after.flops, after.kv_bytes, after.busy_s
        ledger.joules, metrics.gaps.maximum_s = after.energy_j, after.longest_gap_s
        finished: list[Finish] = []
        if ended.shape[0]:
            texts = [Finish(int(slots.id[slot]), FinishReason.EOS) for slot in ended[by_text].tolist()]
            full = ended[slots.known[ended] >= slots.stop_at[ended]].tolist()
            finished = loop.ran(steps, after.step_s, texts, full)
        else:
            loop.ran(steps, after.step_s, [], [])
        metrics.ran(steps, after.now_s, finished)
        return steps, finished
