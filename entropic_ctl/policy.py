"""The three laws with their state, as arrays over slots: priority (macro), theta (meso) and temperature (micro).

A host engine with its own batcher uses this class alone; with :class:`entropic_ctl.batching.Batcher` it makes a
:class:`entropic_ctl.loop.Loop`. State belongs to a request (a slot) from :meth:`Policy.start` to :meth:`Policy.stop`,
through batching, chunked prefill and preemption, and is updated exactly once per accepted token.

``observation_lag`` d: what the host knows when it decides is d tokens old. The entropies of token k reach the macro
and meso laws and the micro law's ``update`` when token k + d is accepted; until then nothing is updated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace, device, to_device

from entropic_ctl.compiled import compiled, faster
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning import accountant
from entropic_ctl.pruning.base import PruningLaw
from entropic_ctl.scheduling.base import EntropySignals, ScheduleView, SchedulingPolicy
from entropic_ctl.signals import Array, FloatArray, IntArray, LogitView, Tempered
from entropic_ctl.temperature.base import TemperatureLaw

__all__ = ["Policy"]

_LAST, _FIRST, _SUM, _SQUARES, _PRODUCTS, _EWMA = range(6)


class Policy:
    """Macro, meso and micro law of one replica.

    Parameters
    ----------
    temperature : TemperatureLaw
    pruning : PruningLaw
    scheduling : SchedulingPolicy
    slots : int
        Most requests that can be live at once.
    observation_lag : int
        d >= 0, in accepted tokens.

    Attributes
    ----------
    u : FloatArray, shape (slots,)
        The micro law's state of each request: ln T (``mirostat2``: mu, nats).
    theta : FloatArray, shape (slots,)
        Information-loss budget that the meso law asks for each request, nats; :attr:`budgets` are those in force.
    spent, worst : FloatArray, shape (slots,)
        Certified loss of each request so far: sum over its steps, and largest; see
        :mod:`entropic_ctl.pruning.accountant`.
    dense : bool
        All budgets in force are 0 (:meth:`entropic_ctl.loop.Loop.stop_pruning`).
    active : bool array, shape (slots,)
    """

    def __init__(
        self,
        temperature: TemperatureLaw,
        pruning: PruningLaw,
        scheduling: SchedulingPolicy,
        *,
        slots: int,
        observation_lag: int = 0,
    ) -> None:
        if observation_lag < 0:
            raise BadInputError(
                "negative", where="Policy", field="observation_lag", value=observation_lag, allowed=">= 0"
            )
        self.temperature, self.pruning, self.scheduling = temperature, pruning, scheduling
        self.observation_lag = observation_lag
        self.always_greedy = temperature.config.temperature == 0.0
        self.u = np.zeros(slots)
        self.theta = np.zeros(slots)
        self.timer = np.zeros(slots, np.int64)
        self.total_nats, self.min_context = float(pruning.config.total_nats), int(pruning.config.min_context)
        self.spent, self.worst = np.zeros(slots), np.zeros(slots)
        self.dense = False
        self.seen = np.zeros(slots, np.int64)
        self.active = np.zeros(slots, np.bool_)
        self.stats = np.zeros((slots, 6))
        self._late = np.zeros((slots, observation_lag, 2))  # ring of entropies not yet visible
        self._arrived = np.zeros(slots, np.int64)

    def start(self, slots: IntArray) -> None:
        """Give each of these slots, which hold no request, the state of a new one."""
        if self.active[slots].any():
            raise BadInputError(
                "slot already holds a request",
                where="Policy.start",
                field="slots",
                value=slots[self.active[slots]].tolist(),
            )
        count = slots.shape[0]
        self.u[slots] = _starts(self.temperature, count)
        self.theta[slots], self.timer[slots] = _starts(self.pruning, count)
        self.active[slots] = True

    def stop(self, slots: IntArray) -> None:
        """Forget the requests in these slots."""
        self._reset(slots)
        self.active[slots] = False

    def _reset(self, slots: IntArray) -> None:
        loss = (self.spent, self.worst)
        for column in (self.u, self.theta, self.timer, *loss, self.seen, self.stats, self._late, self._arrived):
            column[slots] = 0

    @property
    def budgets(self) -> FloatArray:
        """Budgets in force, shape (slots,), nats: theta, or 0 where a step could exceed the request's limit."""
        if self.dense:
            return np.zeros_like(self.theta)
        return accountant.allowed(self.theta, self.spent, self.total_nats) if self.total_nats else self.theta

    def charge(self, slots: IntArray, theta: FloatArray, certificate: FloatArray) -> None:
        """Book what a step cost these distinct requests.

        Parameters
        ----------
        slots : IntArray, shape (R,)
        theta : FloatArray, shape (R,)
            Budgets the step ran under, nats.
        certificate : FloatArray, shape (R,) or (0,)
            Largest certified loss of each, nats; empty or NaN: not reported, charged at theta. So is every step with
            an ``observation_lag``: its certificate would come too late for the next plan.
        """
        if certificate.shape[0] != theta.shape[0] or self.observation_lag:
            certificate = theta
        accountant.charge(self.spent, self.worst, slots, theta, certificate)

    def signals(self, slots: IntArray) -> EntropySignals:
        """Return what the macro policy may know of the model entropies, one entry per slot.

        Mean, variance and lag-1 autocovariance are running estimates about the running mean, both divided by the
        number of entropies, so that |cov1| <= var up to rounding.
        """
        stats, seen = self.stats[slots], self.seen[slots]
        count = np.maximum(seen, 1)
        mean = stats[:, _SUM] / count
        variance = np.maximum(stats[:, _SQUARES] / count - mean**2, 0.0)
        pairs = 2 * stats[:, _SUM] - stats[:, _FIRST] - stats[:, _LAST]
        cov1 = (stats[:, _PRODUCTS] - mean * pairs + (count - 1) * mean**2) / count
        unseen = seen == 0
        return EntropySignals(
            entropy=np.where(unseen, np.nan, stats[:, _LAST]),
            entropy_mean=np.where(unseen, np.nan, mean),
            reduction_ewma=stats[:, _EWMA],
            entropy_cov1=np.clip(cov1, -variance, variance),
            entropy_var=variance,
            seen=seen,
        )

    @property
    def last_entropy(self) -> FloatArray:
        """Last model entropy seen of each slot, shape (slots,), nats; NaN where none was seen yet."""
        return np.where(self.seen > 0, self.stats[:, _LAST], np.nan)

    def scores(self, view: ScheduleView) -> FloatArray:
        """Return the macro policy's scores; NaN or a wrong shape is refused where the order is drawn."""
        return np.asarray(self.scheduling.score(view), np.float64)

    def temper(self, slots: IntArray, greedy: npt.NDArray[np.bool_], view: LogitView) -> Tempered:
        """Return this step's temperature for each sampling row.

        Parameters
        ----------
        slots : IntArray, shape (M,)
        greedy : bool array, shape (M,)
            Rows in T = 0 mode. The law sees a placeholder for them, and its answer is discarded.
        view : LogitView
            The rows' own distributions, of NumPy or of any array-API library; the law runs in that library.

        Returns
        -------
        Tempered
            float64 NumPy arrays (one packed copy from the device). A row whose entropy is not finite is invalid and
            carries T = 1.
        """
        if slots.shape[0] == 0:
            empty = np.empty(0)
            return Tempered(empty, empty, empty, empty, np.empty(0, np.bool_))
        entropy = view.model_entropy
        u: Array = self.u[slots]
        if isinstance(entropy, np.ndarray):
            columns = [np.asarray(part, np.float64) for part in (*self.temperature.temper(u, view), entropy)]
        else:
            xp = array_namespace(entropy)
            u = xp.asarray(u, device=device(entropy))
            parts = [xp.astype(part, xp.float64) for part in (*self.temperature.temper(u, view), entropy)]
            packed = np.asarray(to_device(xp.stack(parts), "cpu"), np.float64)
            columns = list(packed)
        temperature, tempered, varentropy, model = columns
        if not np.count_nonzero(greedy) and _finite(temperature, tempered) and _finite(varentropy, model):
            return Tempered(temperature, model, tempered, varentropy, np.ones(slots.shape[0], np.bool_))
        valid = np.isfinite(temperature + tempered + varentropy + model)
        if greedy.any():
            valid |= greedy & np.isfinite(model)
            temperature, tempered, varentropy = (np.where(greedy, 0.0, part) for part in columns[:3])
        if not valid.all():
            temperature = np.where(valid, temperature, 1.0)
        return Tempered(temperature, model, tempered, varentropy, valid)

    def observe(
        self,
        slots: IntArray,
        model_entropy: FloatArray,
        tempered_entropy: FloatArray,
        greedy: npt.NDArray[np.bool_],
        valid: npt.NDArray[np.bool_] | None = None,
        *,
        distinct: bool = False,
    ) -> None:
        """Update every law once per accepted token.

        Parameters
        ----------
        slots : IntArray, shape (M,)
            Slot of each accepted token; a slot may occur several times (speculation), in order.
        model_entropy, tempered_entropy : FloatArray, shape (M,)
            Nats. Tokens with a non-finite entropy update nothing.
        greedy : bool array, shape (M,)
            Tokens whose request is in T = 0 mode: the micro law is not updated.
        valid : bool array, shape (M,), optional
            False leaves a token out.
        distinct : bool
            The caller knows that no slot occurs twice.
        """
        model_entropy = np.asarray(model_entropy, np.float64)
        tempered_entropy = np.asarray(tempered_entropy, np.float64)
        if valid is not None or not _finite(model_entropy, tempered_entropy):
            use = np.isfinite(model_entropy) & (greedy | np.isfinite(tempered_entropy))
            if valid is not None:
                use &= valid
            slots, greedy = slots[use], greedy[use]
            model_entropy, tempered_entropy = model_entropy[use], tempered_entropy[use]
        if not distinct and len(set(slots.tolist())) < slots.shape[0]:
            for rows in _rounds(slots):
                self._update(slots[rows], model_entropy[rows], tempered_entropy[rows], greedy[rows])
        elif slots.shape[0]:
            self._update(slots, model_entropy, tempered_entropy, greedy)

    def _update(self, slots: IntArray, model: FloatArray, tempered: FloatArray, greedy: npt.NDArray[np.bool_]) -> None:
        """Update distinct slots."""
        lag = self.observation_lag
        if lag:
            place = self._arrived[slots]
            old = self._late[slots, place % lag]
            self._late[slots, place % lag, 0] = model
            self._late[slots, place % lag, 1] = tempered
            self._arrived[slots] = place + 1
            ready = place >= lag
            slots, greedy, model, tempered = slots[ready], greedy[ready], old[ready, 0], old[ready, 1]
            if slots.shape[0] == 0:
                return
        if not np.count_nonzero(greedy):
            u = self.u[slots]
            after = self.temperature.update(u, tempered)
            if after is not u:
                self.u[slots] = after
        elif not greedy.all():
            rows = slots[~greedy]
            self.u[rows] = self.temperature.update(self.u[rows], tempered[~greedy])
        theta, timer = self.theta[slots], self.timer[slots]
        wider, later = self.pruning.update(theta, timer, model)
        if wider is not theta or later is not timer:  # a law that is off returns its arguments
            self.theta[slots], self.timer[slots] = wider, later
        _count(self.stats, self.seen, slots, model, self.scheduling.config.reduction_weight)


def _starts(law: Any, count: int) -> Any:
    """Return the state of ``count`` new requests; a law with ``starts`` gives each one of its own."""
    return law.starts(count) if hasattr(law, "starts") else law.start()


def _count_columns(table: FloatArray, count: IntArray, slots: IntArray, model: FloatArray, weight: float) -> None:
    """Take one entropy of each of these distinct slots into the running statistics (in place)."""
    stats, seen = table[slots], count[slots]
    started = seen > 0
    last = stats[:, _LAST]
    drop = np.where(started, np.maximum(last - model, 0.0), 0.0)
    blend = np.where(seen == 1, 1.0, weight)  # the first reduction is taken whole
    stats[:, _EWMA] = np.where(started, stats[:, _EWMA] + blend * (drop - stats[:, _EWMA]), 0.0)
    stats[:, _PRODUCTS] += np.where(started, last * model, 0.0)
    stats[:, _SUM] += model
    stats[:, _SQUARES] += model * model
    stats[:, _FIRST] = np.where(started, stats[:, _FIRST], model)
    stats[:, _LAST] = model
    table[slots] = stats
    count[slots] = seen + 1


@compiled
def count_loop(table: FloatArray, count: IntArray, slots: IntArray, model: FloatArray, weight: float) -> None:
    """Twin of :func:`_count_columns`."""
    for i in range(slots.shape[0]):
        slot, h = slots[i], model[i]
        row, seen = table[slot], count[slot]
        if seen > 0:
            last = row[_LAST]
            drop = max(last - h, 0.0)
            row[_EWMA] += (1.0 if seen == 1 else weight) * (drop - row[_EWMA])
            row[_PRODUCTS] += last * h
        else:
            row[_FIRST], row[_EWMA] = h, 0.0
        row[_SUM] += h
        row[_SQUARES] += h * h
        row[_LAST] = h
        count[slot] = seen + 1


_count = faster(count_loop, _count_columns)


def _finite_columns(first: FloatArray, second: FloatArray) -> bool:
    """Return whether every entry of both arrays is finite."""
    return bool(np.isfinite(first + second).all())


@compiled
def _finite_loop(first: FloatArray, second: FloatArray) -> bool:
    """Twin of :func:`_finite_columns`."""
    for i in range(first.shape[0]):  # noqa: SIM110 - compiled: a loop, not a generator
        if not (np.isfinite(first[i]) and np.isfinite(second[i])):
            return False
    return True


_finite = faster(_finite_loop, _finite_columns)


def _rounds(slots: IntArray) -> list[IntArray]:
    """Split positions so that each part holds distinct slots and the order within a slot is kept."""
    count: dict[int, int] = {}
    rounds: list[list[Any]] = []
    for position, slot in enumerate(slots.tolist()):
        turn = count.get(slot, 0)
        count[slot] = turn + 1
        if turn == len(rounds):
            rounds.append([])
        rounds[turn].append(position)
    return [np.asarray(part, np.int64) for part in rounds]
