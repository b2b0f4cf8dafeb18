"""Running accounts of a run: one row of sums per request, one per iteration, updated as the tokens come.

Rows are float64 (counts are exact up to 2^53), so that one array holds an account and a token touches one cache line or
two. :func:`book_tokens` and :func:`book_step` each have a NumPy reference and a compiled twin with the same bits: sums
run in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.compiled import compiled, faster
from entropic_ctl.histogram import FIRST_PLACE, PLACES, SHIFT
from entropic_ctl.signals import FloatArray, IntArray

__all__ = [
    "REQUEST",
    "SCHEDULED",
    "STEP",
    "Account",
    "StepTable",
    "book_rows",
    "book_step",
    "book_tokens",
]

REQUEST = (
    "first_token_s", "last_token_s", "gap_sum_s", "gap_max_s", "output_tokens", "entropy_n", "entropy_sum",
    "tempered_mean", "tempered_m2", "target_square_sum", "tau", "tau_filtered", "entropy_last", "entropy_filtered",
    "clock_n", "last_step", "last_end_s", "wait_steps", "wait_s", "loss_nats", "loss_max_nats",
)  # fmt: skip
"""Fields of a request's account. Entropies in nats, times in seconds; ``tempered_m2`` is about the running mean."""

(
    FIRST_TOKEN, LAST_TOKEN, GAP_SUM, GAP_MAX, OUTPUT, N, MODEL_SUM, MEAN, M2, TARGET_SQUARE, TAU, TAU_FILTERED, LAST,
    FILTERED, CLOCK_N, LAST_STEP, LAST_END, WAIT_STEPS, WAIT, LOSS, LOSS_MAX,
) = range(len(REQUEST))  # fmt: skip

STEP = (
    "step", "steps", "start_s", "end_s", "rows", "output_tokens", "live", "waiting", "paused", "preempted",
    "pages_used", "busy_s", "row_seconds", "page_seconds", "kv_bytes", "flops", "energy_j", "scheduled_tokens",
    "decode_rows", "pages_held", "pages_read", "kept_sum", "mass_sum", "mass_max", "certificate_max",
)  # fmt: skip
"""Fields of an iteration's account."""

SCHEDULED = STEP.index("scheduled_tokens")
"""From this field on: sums over the rows."""

_COUNTS = {"step", "steps", "rows", "output_tokens", "live", "waiting", "paused", "preempted", "scheduled_tokens"}
_COUNTS |= {"decode_rows"}
_FIRST, _LAST = ("step", "start_s"), ("end_s",)
_LARGEST = ("live", "waiting", "pages_used", "mass_max", "certificate_max")


def _book_tokens_columns(
    sums: FloatArray,
    gap_counts: IntArray,
    rows: IntArray,
    now_s: float,
    model: FloatArray,
    tempered: FloatArray,
    target: float,
    weight: float,
) -> float:
    """Book one token on each of these distinct rows; return the longest gap that ended.

    Parameters
    ----------
    sums : FloatArray, shape (capacity, len(REQUEST))
        Changed in place, like ``gap_counts``.
    gap_counts : IntArray
        Of a :class:`~entropic_ctl.histogram.DurationHistogram`.
    rows : IntArray, shape (M,)
    now_s : float
        When the tokens came.
    model, tempered : FloatArray, shape (M,), nats
        A token with an entropy that is not finite counts as a token, but in no entropy and no clock.
    target : float
        H* for the mean square about it, NaN for none.
    weight : float
        Of the filtered clock.
    """
    s = sums[rows]
    new = np.isnan(s[:, LAST_TOKEN])
    gaps = np.where(new, 0.0, now_s - s[:, LAST_TOKEN])
    s[:, FIRST_TOKEN] = np.where(new, now_s, s[:, FIRST_TOKEN])
    s[:, LAST_TOKEN] = now_s
    s[:, GAP_SUM] += gaps
    s[:, GAP_MAX] = np.maximum(s[:, GAP_MAX], gaps)
    s[:, OUTPUT] += 1
    places = (gaps[~new].view(np.int64) >> SHIFT) - FIRST_PLACE
    gap_counts += np.bincount(np.minimum(np.maximum(places, 0), PLACES - 1), minlength=PLACES)
    ok = np.isfinite(model) & np.isfinite(tempered)
    if not ok.all():
        sums[rows], s = s, s[ok]
        rows, model, tempered = rows[ok], model[ok], tempered[ok]
    s[:, N] += 1
    s[:, MODEL_SUM] += model
    before = tempered - s[:, MEAN]
    s[:, MEAN] += before / s[:, N]
    s[:, M2] += before * (tempered - s[:, MEAN])
    if not np.isnan(target):
        error = tempered - target
        s[:, TARGET_SQUARE] += error * error
    began = s[:, CLOCK_N] > 0
    last, filtered = np.where(began, s[:, LAST], model), np.where(began, s[:, FILTERED], model)
    smooth = filtered + weight * (model - filtered)
    s[:, TAU] += np.maximum(last - model, 0.0)
    s[:, TAU_FILTERED] += np.maximum(filtered - smooth, 0.0)
    s[:, LAST], s[:, FILTERED] = model, smooth
    s[:, CLOCK_N] += 1
    sums[rows] = s
    return float(gaps.max(initial=0.0))


@compiled
def book_tokens_loop(
    sums: FloatArray,
    gap_counts: IntArray,
    rows: IntArray,
    now_s: float,
    model: FloatArray,
    tempered: FloatArray,
    target: float,
    weight: float,
) -> float:
    """Twin of :func:`_book_tokens_columns`."""
    longest = 0.0
    gaps = np.empty(rows.shape[0])
    bits = gaps.view(np.int64)
    for i in range(rows.shape[0]):
        s = sums[rows[i]]
        if np.isnan(s[LAST_TOKEN]):
            s[FIRST_TOKEN] = now_s
        else:
            gaps[i] = now_s - s[LAST_TOKEN]
            place = (bits[i] >> SHIFT) - FIRST_PLACE
            gap_counts[min(max(place, 0), PLACES - 1)] += 1
            s[GAP_SUM] += gaps[i]
            s[GAP_MAX] = max(s[GAP_MAX], gaps[i])
            longest = max(longest, gaps[i])
        s[LAST_TOKEN] = now_s
        s[OUTPUT] += 1
        h, t = model[i], tempered[i]
        if not (np.isfinite(h) and np.isfinite(t)):
            continue
        s[N] += 1
        s[MODEL_SUM] += h
        before = t - s[MEAN]
        s[MEAN] += before / s[N]
        s[M2] += before * (t - s[MEAN])
        if not np.isnan(target):
            s[TARGET_SQUARE] += (t - target) * (t - target)
        if s[CLOCK_N] == 0:
            s[LAST] = s[FILTERED] = h
        smooth = s[FILTERED] + weight * (h - s[FILTERED])
        s[TAU] += max(s[LAST] - h, 0.0)
        s[TAU_FILTERED] += max(s[FILTERED] - smooth, 0.0)
        s[LAST], s[FILTERED] = h, smooth
        s[CLOCK_N] += 1
    return longest


book_tokens = faster(book_tokens_loop, _book_tokens_columns)


def _book_rows_columns(
    sums: FloatArray, rows: IntArray, step: int, start_s: float, end_s: float, certificate: FloatArray
) -> None:
    """Book one service on these rows, how long each had waited for it, and what pruning cost it.

    Parameters
    ----------
    sums : FloatArray, shape (capacity, len(REQUEST))
        Changed in place.
    rows : IntArray, shape (R,)
        Those that run, each once.
    step : int
        Iterations before this one.
    start_s, end_s : float
    certificate : FloatArray, shape (R,)
        Largest certified loss of the step, nats.
    """
    s = sums[rows]
    s[:, WAIT_STEPS] = np.maximum(s[:, WAIT_STEPS], step - s[:, LAST_STEP] - 1.0)
    s[:, WAIT] = np.maximum(s[:, WAIT], start_s - s[:, LAST_END])
    s[:, LAST_STEP], s[:, LAST_END] = step, end_s
    s[:, LOSS] += certificate
    s[:, LOSS_MAX] = np.maximum(s[:, LOSS_MAX], certificate)
    sums[rows] = s


@compiled
def book_rows_loop(
    sums: FloatArray, rows: IntArray, step: int, start_s: float, end_s: float, certificate: FloatArray
) -> None:
    """Twin of :func:`_book_rows_columns`."""
    for i in range(rows.shape[0]):
        s = sums[rows[i]]
        s[WAIT_STEPS] = max(s[WAIT_STEPS], step - s[LAST_STEP] - 1.0)
        s[WAIT] = max(s[WAIT], start_s - s[LAST_END])
        s[LAST_STEP], s[LAST_END] = step, end_s
        s[LOSS] += certificate[i]
        s[LOSS_MAX] = max(s[LOSS_MAX], certificate[i])


book_rows = faster(book_rows_loop, _book_rows_columns)


def _book_step_columns(
    row: FloatArray,
    page: int,
    context: IntArray,
    n_tokens: IntArray,
    kept: FloatArray,
    mass: FloatArray,
    mass_max: FloatArray,
    certificate: FloatArray,
) -> None:
    """Put the sums over the rows of one iteration into the last fields of its account.

    Parameters
    ----------
    row : FloatArray, shape (len(STEP),)
        Changed in place.
    page : int
        Tokens per page.
    context, n_tokens : IntArray, shape (R,)
    kept, mass, mass_max, certificate : FloatArray, shape (R,)
        As in ``StepResult``.
    """
    held = (context + n_tokens + (page - 1)) // page
    decode = ((n_tokens == 1) & (context > 0)).astype(np.float64)
    totals = (n_tokens, decode, held, held * kept, kept * decode, mass * decode)
    row[SCHEDULED:] = (
        *(np.cumsum(values)[-1] if values.shape[0] else 0.0 for values in totals),
        mass_max.max(initial=0.0),
        certificate.max(initial=0.0),
    )


@compiled
def book_step_loop(
    row: FloatArray,
    page: int,
    context: IntArray,
    n_tokens: IntArray,
    kept: FloatArray,
    mass: FloatArray,
    mass_max: FloatArray,
    certificate: FloatArray,
) -> None:
    """Twin of :func:`_book_step_columns`."""
    row[SCHEDULED:] = 0.0
    for r in range(context.shape[0]):
        held = (context[r] + n_tokens[r] + (page - 1)) // page
        decode = 1.0 if n_tokens[r] == 1 and context[r] > 0 else 0.0
        row[SCHEDULED] += n_tokens[r]
        row[SCHEDULED + 1] += decode
        row[SCHEDULED + 2] += held
        row[SCHEDULED + 3] += held * kept[r]
        row[SCHEDULED + 4] += kept[r] * decode
        row[SCHEDULED + 5] += mass[r] * decode
        row[SCHEDULED + 6] = max(row[SCHEDULED + 6], mass_max[r])
        row[SCHEDULED + 7] = max(row[SCHEDULED + 7], certificate[r])


book_step = faster(book_step_loop, _book_step_columns)


class Account:
    """Rows of named float64 sums that grow by doubling.

    Parameters
    ----------
    names : sequence of str
    capacity : int
        Rows reserved at first.

    Attributes
    ----------
    n : int
        Rows in use.
    sums : FloatArray, shape (capacity, len(names))
        Replaced when it grows.
    """

    def __init__(self, names: Sequence[str], capacity: int = 256) -> None:
        self._names = tuple(names)
        self.n = 0
        self.sums: FloatArray = np.zeros((capacity, len(self._names)))

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` more rows."""
        if self.n + rows > self.sums.shape[0]:
            more = np.zeros((max(self.n + rows, 2 * self.sums.shape[0]), len(self._names)))
            more[: self.n] = self.sums[: self.n]
            self.sums = more

    def __getitem__(self, name: str) -> FloatArray:
        """Return a column of the rows in use (a view)."""
        column: FloatArray = self.sums[: self.n, self._names.index(name)]
        return column


class StepTable(Account):
    """One row per iteration; beyond ``max_steps``, neighbours are merged.

    Counts and costs add up, what is counted at one moment (live, waiting, pages used) and the maxima take the larger,
    ``steps`` counts the iterations a row stands for.

    Parameters
    ----------
    max_steps : int
        At least 2.
    """

    def __init__(self, max_steps: int) -> None:
        super().__init__(STEP, max_steps)  # memory is taken as rows are touched
        self._max_steps = max_steps

    def next_row(self) -> FloatArray:
        """Return the account of the next iteration, to be filled."""
        if self.n >= self._max_steps:
            self._merge()
        self.n += 1
        row: FloatArray = self.sums[self.n - 1]
        return row

    def reserve_rows(self, rows: int) -> FloatArray:
        """Return the next rows, at most ``rows`` and none past ``max_steps``; count those filled in :attr:`n`."""
        ahead: FloatArray = self.sums[self.n : min(self.n + rows, self._max_steps)]
        return ahead

    def _merge(self) -> None:
        even = self.n - self.n % 2
        first, second = self.sums[0:even:2].copy(), self.sums[1:even:2].copy()
        merged = first + second
        for name in STEP:
            i = STEP.index(name)
            if name in _FIRST:
                merged[:, i] = first[:, i]
            elif name in _LAST:
                merged[:, i] = second[:, i]
            elif name in _LARGEST:
                merged[:, i] = np.maximum(first[:, i], second[:, i])
        self.sums[even // 2 : even // 2 + self.n - even] = self.sums[even : self.n]
        self.sums[: even // 2] = merged
        self.n = even // 2 + self.n % 2

    def table(self) -> dict[str, npt.NDArray[Any]]:
        """Return every column; those of floats are views."""
        return {name: self[name].astype(np.int64) if name in _COUNTS else self[name] for name in STEP}
