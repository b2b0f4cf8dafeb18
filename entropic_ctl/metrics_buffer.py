"""The two buffers behind :class:`~entropic_ctl.metrics.Metrics`: columns of recent rows, reduced a block at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.clock import EntropicClock, Runs
from entropic_ctl.columns import Columns
from entropic_ctl.errors import BadInputError
from entropic_ctl.histogram import DurationHistogram
from entropic_ctl.signals import FloatArray, IntArray, StepPlan, StepResult

__all__ = ["StepBuffer", "TokenBuffer"]

_BLOCK = 16384
"""Rows that trigger a reduction: large enough to amortise it, small enough to stay in cache."""

_STEP: dict[str, npt.DTypeLike] = {
    "step": np.int64,
    "steps": np.int64,
    "rows": np.int64,
    "output_tokens": np.int64,
    "live": np.int64,
    "waiting": np.int64,
    "paused": np.int64,
    "preempted": np.int64,
    "scheduled_tokens": np.int64,
    "decode_rows": np.int64,
    "pages_held": np.float64,
    "pages_used": np.float64,
    "pages_read": np.float64,
    "start_s": np.float64,
    "end_s": np.float64,
    "busy_s": np.float64,
    "row_seconds": np.float64,
    "page_seconds": np.float64,
    "kv_bytes": np.float64,
    "flops": np.float64,
    "energy_j": np.float64,
    "kept_sum": np.float64,
    "mass_sum": np.float64,
    "mass_max": np.float64,
    "certificate_max": np.float64,
}
_FIRST, _LAST = ("step", "start_s"), ("end_s",)
_MAX = ("live", "waiting", "pages_used", "mass_max", "certificate_max")


class StepBuffer:
    """Rows of the plans and what they read, summed per step.

    Parameters
    ----------
    page_tokens : int
    max_steps : int
        When the table is longer, neighbouring rows are merged: counts and costs add up, what is counted at one
        moment (live, waiting, pages used) and the maxima take the larger, ``steps`` counts the iterations a row stands
        for.
    """

    def __init__(self, page_tokens: int, max_steps: int) -> None:
        self._page, self._max_steps = page_tokens, max_steps
        self._done = Columns(_STEP)
        self._scalars: list[tuple[float, ...]] = []
        self._n = 0
        self._ints = {name: np.empty(_BLOCK, np.int64) for name in ("context", "n_tokens")}
        self._floats = {name: np.empty(_BLOCK) for name in ("kept", "mass", "mass_max", "certificate")}

    def add(self, plan: StepPlan, result: StepResult, live: int) -> None:
        """Note one step."""
        rows = plan.ids.shape[0]
        if self._n + rows > self._ints["context"].shape[0]:
            self.flush()
            if rows > _BLOCK:
                self._ints = {name: np.empty(rows, np.int64) for name in self._ints}
                self._floats = {name: np.empty(rows) for name in self._floats}
        a, b = self._n, self._n + rows
        self._n = b
        self._ints["context"][a:b], self._ints["n_tokens"][a:b] = plan.context, plan.n_tokens
        floats = self._floats
        if result.kept_fraction.shape[0] or not rows:
            floats["kept"][a:b], floats["mass"][a:b] = result.kept_fraction, result.pruned_mass_mean
            floats["mass_max"][a:b], floats["certificate"][a:b] = result.pruned_mass_max, result.certificate_max
        else:  # nothing reported: dense
            floats["kept"][a:b] = 1.0
            for name in ("mass", "mass_max", "certificate"):
                floats[name][a:b] = 0.0
        self._scalars.append(
            (
                plan.step,
                rows,
                result.token_ids.shape[0],
                live,
                plan.paused.shape[0],
                plan.preempted.shape[0],
                result.start_s,
                result.end_s,
                result.kv_bytes,
                result.flops,
                result.energy_j,
                plan.pages_used,
            )
        )
        if len(self._scalars) >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        """Reduce what is buffered."""
        if not self._scalars:
            return
        scalars = np.array(self._scalars, np.float64).T
        rows, busy = scalars[1].astype(np.int64), scalars[7] - scalars[6]
        context, n_tokens = self._ints["context"][: self._n], self._ints["n_tokens"][: self._n]
        floats = {name: data[: self._n] for name, data in self._floats.items()}
        held = (context + n_tokens + (self._page - 1)) // self._page
        decode = (n_tokens == 1) & (context > 0)
        some = np.flatnonzero(rows)
        starts = (np.cumsum(rows) - rows)[some]

        def per_step(operation: np.ufunc, values: npt.NDArray[Any]) -> FloatArray:
            out = np.zeros(rows.shape[0])
            if some.shape[0]:
                out[some] = operation.reduceat(values, starts)
            return out

        self._done.append(
            rows.shape[0],
            step=scalars[0],
            steps=1,
            rows=rows,
            output_tokens=scalars[2],
            live=scalars[3],
            waiting=scalars[3] - scalars[1],
            paused=scalars[4],
            preempted=scalars[5],
            scheduled_tokens=per_step(np.add, n_tokens),
            decode_rows=per_step(np.add, decode.astype(np.int64)),
            pages_held=per_step(np.add, held),
            pages_used=scalars[11],
            pages_read=per_step(np.add, held * floats["kept"]),
            start_s=scalars[6],
            end_s=scalars[7],
            busy_s=busy,
            row_seconds=scalars[1] * busy,
            page_seconds=scalars[11] * busy,
            kv_bytes=scalars[8],
            flops=scalars[9],
            energy_j=scalars[10],
            kept_sum=per_step(np.add, floats["kept"] * decode),
            mass_sum=per_step(np.add, floats["mass"] * decode),
            mass_max=per_step(np.maximum, floats["mass_max"]),
            certificate_max=per_step(np.maximum, floats["certificate"]),
        )
        self._scalars.clear()
        self._n = 0
        while self._done.n > self._max_steps:
            self._merge()

    def _merge(self) -> None:
        even = self._done.n - self._done.n % 2
        kept = even // 2 + self._done.n % 2
        for name in _STEP:
            column = self._done[name]
            first, second = column[0:even:2].copy(), column[1:even:2].copy()
            if name in _FIRST:
                merged = first
            elif name in _LAST:
                merged = second
            else:
                merged = np.maximum(first, second) if name in _MAX else first + second
            column[even // 2 : kept] = column[even:]
            column[: even // 2] = merged
        self._done.truncate(kept)

    def table(self) -> dict[str, npt.NDArray[Any]]:
        """Return the columns so far."""
        self.flush()
        return self._done.table()


class TokenBuffer:
    """Accepted tokens, reduced into the columns of their requests.

    Parameters
    ----------
    requests : Columns
        The requests table, written in place.
    clock : EntropicClock
        One slot per row of it.
    target_nats : float or None
        H* for the mean square about the target.
    keep : bool
        Keep every token.

    Attributes
    ----------
    gaps : DurationHistogram
        Times between consecutive tokens of a request, all requests together.
    """

    _EXTRA = ("temperature", "varentropy", "theta_nats", "kept_fraction")

    def __init__(self, requests: Columns, clock: EntropicClock, target_nats: float | None, keep: bool) -> None:
        self._requests, self._clock, self._target = requests, clock, target_nats
        self._rows: IntArray = np.empty(_BLOCK, np.int64)
        names = ("time_s", "model_entropy", "tempered_entropy", *(self._EXTRA if keep else ()))
        self._data: dict[str, FloatArray] = {name: np.empty(_BLOCK) for name in names}
        self._n = 0
        self.gaps = DurationHistogram()
        kept: dict[str, npt.DTypeLike] = {"id": np.int64, "index": np.int64}
        kept |= {
            "time_s": np.float64,
            "temperature": np.float64,
            "model_entropy": np.float64,
            "tempered_entropy": np.float64,
            "varentropy": np.float64,
            "theta_nats": np.float64,
            "kept_fraction": np.float64,
        }
        self._kept = Columns(kept) if keep else None

    def add(self, rows: IntArray, plan: StepPlan, result: StepResult, where: Any) -> None:
        """Note the tokens of one step; ``where`` selects their plan rows."""
        m = rows.shape[0]
        if self._n + m > self._rows.shape[0]:
            self.flush()
            if m > self._rows.shape[0]:
                self._rows = np.empty(m, np.int64)
                self._data = {name: np.empty(m) for name in self._data}
        a, b = self._n, self._n + m
        self._n = b
        data = self._data
        self._rows[a:b] = rows
        data["time_s"][a:b] = result.end_s
        data["model_entropy"][a:b], data["tempered_entropy"][a:b] = result.model_entropy, result.tempered_entropy
        if self._kept is not None:
            data["temperature"][a:b], data["varentropy"][a:b] = result.temperature, result.varentropy
            data["theta_nats"][a:b] = plan.theta_nats[where]
            data["kept_fraction"][a:b] = result.kept_fraction[where] if result.kept_fraction.shape[0] else 1.0

    def flush(self) -> None:
        """Reduce what is buffered."""
        if self._n == 0:
            return
        rows = self._rows[: self._n]
        data = {name: column[: self._n] for name, column in self._data.items()}
        runs = Runs.of(rows)
        if self._kept is not None:
            index: IntArray = np.empty(self._n, np.int64)
            index[runs.order] = runs.rank + np.repeat(self._requests["output_tokens"][runs.keys], runs.lengths)
            self._kept.append(self._n, id=self._requests["id"][rows], index=index, **data)
        self._times(runs, data["time_s"][runs.order])
        self._entropies(runs, data["model_entropy"][runs.order], data["tempered_entropy"][runs.order])
        self._requests["output_tokens"][runs.keys] += runs.lengths
        self._n = 0

    def _times(self, runs: Runs, time_s: FloatArray) -> None:
        columns, keys = self._requests, runs.keys
        before = np.empty_like(time_s)
        before[1:] = time_s[:-1]
        previous = columns["last_token_s"][keys]
        new = np.isnan(previous)
        columns["first_token_s"][keys[new]] = time_s[runs.starts[new]]
        before[runs.starts] = np.where(new, time_s[runs.starts], previous)
        gaps = time_s - before
        columns["gap_sum_s"][keys] += np.add.reduceat(gaps, runs.starts)
        columns["gap_max_s"][keys] = np.maximum(columns["gap_max_s"][keys], np.maximum.reduceat(gaps, runs.starts))
        columns["last_token_s"][keys] = time_s[runs.starts + runs.lengths - 1]
        self.gaps.add(np.delete(gaps, runs.starts[new]) if new.any() else gaps)  # a first token ends no gap

    def _entropies(self, runs: Runs, model: FloatArray, tempered: FloatArray) -> None:
        columns, keys, starts = self._requests, runs.keys, runs.starts
        self._clock.update(np.repeat(keys, runs.lengths), model)
        valid = np.isfinite(model) & np.isfinite(tempered)
        weight = valid.astype(np.float64)
        model, tempered = np.where(valid, model, 0.0), np.where(valid, tempered, 0.0)
        n = np.add.reduceat(weight, starts)
        columns["entropy_sum"][keys] += np.add.reduceat(model, starts)
        mean = np.add.reduceat(tempered, starts) / np.maximum(n, 1.0)
        deviation = (tempered - np.repeat(mean, runs.lengths)) * weight
        m2 = np.add.reduceat(deviation * deviation, starts)
        old_n, old_mean = columns["entropy_n"][keys], columns["tempered_mean"][keys]
        both = np.maximum(old_n + n, 1.0)
        columns["tempered_m2"][keys] += m2 + (mean - old_mean) ** 2 * old_n * n / both
        columns["tempered_mean"][keys] = old_mean + (mean - old_mean) * n / both
        columns["entropy_n"][keys] += n.astype(np.int64)
        if self._target is not None:
            error = (tempered - self._target) * weight
            columns["target_square_sum"][keys] += np.add.reduceat(error * error, starts)

    def table(self) -> dict[str, npt.NDArray[Any]]:
        """Return the kept tokens."""
        if self._kept is None:
            raise BadInputError(
                "tokens were not kept", field="keep_tokens", value=False, remedy="pass keep_tokens=True"
            )
        self.flush()
        return self._kept.table()
