"""The two buffers behind :class:`~entropic_ctl.metrics.Metrics`: columns of recent rows, reduced a block at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.clock import EntropicClock, Runs
from entropic_ctl.columns import Columns
from entropic_ctl.errors import BadInputError
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
    "paused": np.int64,
    "preempted": np.int64,
    "scheduled_tokens": np.int64,
    "decode_rows": np.int64,
    "pages_held": np.float64,
    "pages_read": np.float64,
    "start_s": np.float64,
    "end_s": np.float64,
    "busy_s": np.float64,
    "kv_bytes": np.float64,
    "flops": np.float64,
    "kept_sum": np.float64,
    "mass_sum": np.float64,
    "mass_max": np.float64,
    "certificate_max": np.float64,
}
_REPORTED = (("kept_fraction", 1.0), ("pruned_mass_mean", 0.0), ("pruned_mass_max", 0.0), ("certificate_max", 0.0))
_FIRST, _LAST = ("step", "start_s"), ("end_s",)
_MAX = ("live", "mass_max", "certificate_max")


class StepBuffer:
    """Rows of the plans and what they read, summed per step.

    Parameters
    ----------
    page_tokens : int
    max_steps : int
        When the table is longer, neighbouring rows are merged: counts and costs add up, ``live`` and the maxima
        take the larger, ``steps`` counts the iterations a row stands for.
    """

    def __init__(self, page_tokens: int, max_steps: int) -> None:
        self._page, self._max_steps = page_tokens, max_steps
        self._done = Columns(_STEP)
        self._pending: list[tuple[StepPlan, StepResult, int]] = []
        self._rows = 0

    def add(self, plan: StepPlan, result: StepResult, live: int) -> None:
        """Note one step."""
        self._pending.append((plan, result, live))
        self._rows += plan.ids.shape[0]
        if self._rows >= _BLOCK or len(self._pending) >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        """Reduce what is buffered."""
        pending = self._pending
        if not pending:
            return
        scalars = np.array(
            [
                (
                    plan.step,
                    plan.ids.shape[0],
                    result.token_ids.shape[0],
                    live,
                    plan.paused.shape[0],
                    plan.preempted.shape[0],
                    result.start_s,
                    result.end_s,
                    result.kv_bytes,
                    result.flops,
                )
                for plan, result, live in pending
            ],
            np.float64,
        ).T
        rows = scalars[1].astype(np.int64)
        context = np.concatenate([plan.context for plan, _, _ in pending])
        n_tokens = np.concatenate([plan.n_tokens for plan, _, _ in pending])
        kept, mass, mass_max, certificate = (self._reported(name, dense) for name, dense in _REPORTED)
        self._pending, self._rows = [], 0
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
            paused=scalars[4],
            preempted=scalars[5],
            scheduled_tokens=per_step(np.add, n_tokens),
            decode_rows=per_step(np.add, decode.astype(np.int64)),
            pages_held=per_step(np.add, held),
            pages_read=per_step(np.add, held * kept),
            start_s=scalars[6],
            end_s=scalars[7],
            busy_s=scalars[7] - scalars[6],
            kv_bytes=scalars[8],
            flops=scalars[9],
            kept_sum=per_step(np.add, kept * decode),
            mass_sum=per_step(np.add, mass * decode),
            mass_max=per_step(np.maximum, mass_max),
            certificate_max=per_step(np.maximum, certificate),
        )
        while self._done.n > self._max_steps:
            self._merge()

    def _reported(self, name: str, dense: float) -> FloatArray:
        """Return a row column of the pending results; a step that reported nothing was dense."""
        parts = (
            column if (column := getattr(result, name)).shape[0] else np.full(plan.ids.shape[0], dense)
            for plan, result, _ in self._pending
        )
        return np.concatenate(list(parts))

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
    """

    def __init__(self, requests: Columns, clock: EntropicClock, target_nats: float | None, keep: bool) -> None:
        self._requests, self._clock, self._target = requests, clock, target_nats
        self._pending: list[tuple[IntArray, StepPlan, StepResult, Any]] = []
        self._n = 0
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
        """Note the tokens of one step: their requests' rows, and what selects their plan rows."""
        self._pending.append((rows, plan, result, where))
        self._n += rows.shape[0]
        if self._n >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        """Reduce what is buffered."""
        if not self._pending:
            return
        pending, results = self._pending, [result for _, _, result, _ in self._pending]
        rows = np.concatenate([rows for rows, _, _, _ in pending])
        ends = np.array([result.end_s for result in results])
        time_s = np.repeat(ends, [rows.shape[0] for rows, _, _, _ in pending])
        model = np.concatenate([result.model_entropy for result in results])
        tempered = np.concatenate([result.tempered_entropy for result in results])
        runs = Runs.of(rows)
        if self._kept is not None:
            index: IntArray = np.empty(self._n, np.int64)
            index[runs.order] = runs.rank + np.repeat(self._requests["output_tokens"][runs.keys], runs.lengths)
            self._kept.append(
                self._n,
                id=self._requests["id"][rows],
                index=index,
                time_s=time_s,
                temperature=np.concatenate([result.temperature for result in results]),
                model_entropy=model,
                tempered_entropy=tempered,
                varentropy=np.concatenate([result.varentropy for result in results]),
                theta_nats=np.concatenate([plan.theta_nats[where] for _, plan, _, where in pending]),
                kept_fraction=np.concatenate(
                    [
                        result.kept_fraction[where] if result.kept_fraction.shape[0] else np.ones(rows.shape[0])
                        for rows, _, result, where in pending
                    ]
                ),
            )
        self._times(runs, time_s[runs.order])
        self._entropies(runs, model[runs.order], tempered[runs.order])
        self._requests["output_tokens"][runs.keys] += runs.lengths
        self._pending, self._n = [], 0

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
