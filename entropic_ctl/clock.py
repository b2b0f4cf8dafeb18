"""Entropic time and what it costs.

The paper's clock adds up irreversible entropy reduction, in nats:

    tau_t = sum over steps of max(0, H_{t-1} - H_t) = (total variation of H + H_0 - H_t) / 2

with H the *model* entropy of each accepted token; the first token of a request adds 0. Efficiency is d tau / dC for a
cost C in floating-point operations, KV bytes read, or seconds.

Caveat: the sum ratchets on noise, which is not progress. Stationary Gaussian entropy with standard deviation s and
lag-1 autocorrelation phi adds s sqrt((1 - phi) / pi) per step (:func:`noise_ratchet`); any white law at most
s / sqrt(3). So there is a second, *filtered* clock *(ours)*: the same sum over f_t = f_{t-1} + w (H_t - f_{t-1}),
f_0 = H_0. On white Gaussian noise it adds only s w / sqrt((2 - w) pi) per step (:func:`filtered_ratchet`). Report both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["CostLedger", "EntropicClock", "Runs", "filtered_ratchet", "noise_ratchet"]


def noise_ratchet(sd_nats: float, phi: float = 0.0) -> float:
    """Return the mean of max(0, H_{t-1} - H_t) for stationary Gaussian H: s sqrt((1 - phi) / pi), nats per step.

    Parameters
    ----------
    sd_nats : float
        Standard deviation s of H.
    phi : float
        Lag-1 autocorrelation, in [-1, 1] (0: white; an AR(1) process has its coefficient).

    Notes
    -----
    H_{t-1} - H_t is Gaussian with variance 2 s^2 (1 - phi), and E max(0, X) = sd(X) / sqrt(2 pi).
    """
    return sd_nats * math.sqrt((1.0 - phi) / math.pi)


def filtered_ratchet(sd_nats: float, weight: float) -> float:
    """Return the filtered clock's ratchet on white Gaussian entropy: s w / sqrt((2 - w) pi), nats per step *(ours)*.

    The filter's output is an AR(1) process with coefficient 1 - w and variance s^2 w / (2 - w).
    """
    return noise_ratchet(sd_nats * math.sqrt(weight / (2.0 - weight)), 1.0 - weight)


class EntropicClock:
    """Both clocks of many sequences, one slot each, as columns.

    Parameters
    ----------
    slots : int
        Initial number of slots; grows by doubling when a larger one is used.
    weight : float
        w of the filtered clock's moving average, in (0, 1]; at 1 both clocks agree.

    Attributes
    ----------
    tau, tau_filtered : FloatArray, shape (capacity,)
        Entropic time of each slot, nats.
    count : IntArray, shape (capacity,)
        Accepted tokens seen.
    first, last : FloatArray, shape (capacity,)
        First and last model entropy, NaN before the first token.
    """

    def __init__(self, slots: int = 64, weight: float = 0.2) -> None:
        if not 0.0 < weight <= 1.0:
            raise BadInputError("not a filter weight", field="weight", value=weight, allowed="(0, 1]")
        if slots < 1:
            raise BadInputError("no slots", field="slots", value=slots, allowed=">= 1")
        self.weight = float(weight)
        self.tau: FloatArray = np.zeros(slots)
        self.tau_filtered: FloatArray = np.zeros(slots)
        self.count: IntArray = np.zeros(slots, np.int64)
        self.first: FloatArray = np.full(slots, np.nan)
        self.last: FloatArray = np.full(slots, np.nan)
        self._filtered: FloatArray = np.full(slots, np.nan)

    def reserve(self, slots: int) -> None:
        """Make room for slots 0 .. slots - 1."""
        have = self.tau.shape[0]
        if slots <= have:
            return
        extra = max(slots, 2 * have) - have
        for name, fill in (
            ("tau", 0.0),
            ("tau_filtered", 0.0),
            ("first", np.nan),
            ("last", np.nan),
            ("_filtered", np.nan),
        ):
            setattr(self, name, np.concatenate([getattr(self, name), np.full(extra, fill)]))
        self.count = np.concatenate([self.count, np.zeros(extra, np.int64)])

    def start(self, slot: int) -> None:
        """Reset one slot for a new sequence: tau = 0, nothing seen."""
        self.reserve(slot + 1)
        self.tau[slot] = self.tau_filtered[slot] = 0.0
        self.count[slot] = 0
        self.first[slot] = self.last[slot] = self._filtered[slot] = np.nan

    def update(self, slots: IntArray, model_entropy: FloatArray) -> None:
        """Advance the clocks by one accepted token per entry.

        Parameters
        ----------
        slots : IntArray, shape (M,)
            A slot may occur several times (several tokens of one sequence); its entries count in order.
        model_entropy : FloatArray, shape (M,), nats
            A NaN entry (empty support) is skipped: the clock is never updated with it.
        """
        slots, H = np.asarray(slots, np.int64), np.asarray(model_entropy, np.float64)
        if slots.shape != H.shape or slots.ndim != 1:
            raise BadInputError(
                "one entropy per slot is needed",
                field="model_entropy",
                value=H.shape,
                allowed=f"shape {slots.shape}, one axis",
            )
        valid = ~np.isnan(H)
        if not valid.all():
            slots, H = slots[valid], H[valid]
        if slots.shape[0] == 0:
            return
        self.reserve(int(slots.max()) + 1)
        runs = Runs.of(slots)
        if runs.longest == 1:
            self._advance(slots, H)
        elif runs.longest * runs.keys.shape[0] <= 16 * slots.shape[0]:
            self._advance_runs(runs, H[runs.order])
        else:  # a few slots with very many tokens: one round per occurrence needs no padding
            for part in runs.rounds():
                self._advance(slots[part], H[part])

    def _advance(self, slots: IntArray, H: FloatArray) -> None:
        """Advance distinct slots by one token each."""
        previous, filtered = self._before(slots, H)
        smooth = filtered + self.weight * (H - filtered)
        self.tau[slots] += np.maximum(previous - H, 0.0)
        self.tau_filtered[slots] += np.maximum(filtered - smooth, 0.0)
        self.last[slots], self._filtered[slots] = H, smooth
        self.count[slots] += 1

    def _advance_runs(self, runs: Runs, H: FloatArray) -> None:
        """Advance by several tokens per slot; ``H`` is sorted like ``runs``."""
        keys, starts, ends = runs.keys, runs.starts, runs.starts + runs.lengths - 1
        previous, filtered = self._before(keys, H[starts])
        before = np.empty_like(H)
        before[1:] = H[:-1]
        before[starts] = previous
        self.tau[keys] += np.add.reduceat(np.maximum(before - H, 0.0), starts)
        column = np.repeat(np.arange(keys.shape[0]), runs.lengths)
        padded = np.zeros((runs.longest, keys.shape[0]))
        padded[runs.rank, column] = H
        smooth = np.empty((runs.longest + 1, keys.shape[0]))
        smooth[0] = filtered
        for row in range(runs.longest):  # the filter's recursion, all slots at once; padding comes last and is not read
            smooth[row + 1] = smooth[row] + self.weight * (padded[row] - smooth[row])
        drops = np.maximum(smooth[runs.rank, column] - smooth[runs.rank + 1, column], 0.0)
        self.tau_filtered[keys] += np.add.reduceat(drops, starts)
        self.last[keys], self._filtered[keys] = H[ends], smooth[runs.lengths, np.arange(keys.shape[0])]
        self.count[keys] += runs.lengths

    def _before(self, slots: IntArray, H: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the last (entropy, filtered entropy) of distinct slots; a new slot takes its first H for both."""
        previous, filtered = self.last[slots], self._filtered[slots]
        seen = self.count[slots] > 0
        if not seen.all():
            self.first[slots[~seen]] = H[~seen]
            previous, filtered = np.where(seen, previous, H), np.where(seen, filtered, H)
        return previous, filtered


@dataclass(frozen=True, slots=True)
class Runs:
    """Equal keys brought together, keeping their order: the index arithmetic of segment sums.

    Parameters
    ----------
    order : IntArray, shape (M,)
        Stable sorting permutation of the keys.
    keys, starts, lengths : IntArray, shape (K,)
        Distinct keys, ascending; where each one's run starts in the sorted order, and its length.
    rank : IntArray, shape (M,)
        Position of each sorted entry inside its run.
    """

    order: IntArray
    keys: IntArray
    starts: IntArray
    lengths: IntArray
    rank: IntArray

    @classmethod
    def of(cls, keys: IntArray) -> Runs:
        """Group at least one key."""
        n, low = keys.shape[0], keys.min()
        narrow = keys.max() - low < 2**16  # 16-bit keys take NumPy's radix sort
        order = np.argsort((keys - low).astype(np.uint16) if narrow else keys, kind="stable")
        ordered = keys[order]
        new: npt.NDArray[np.bool_] = np.ones(n, np.bool_)
        np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
        starts = np.flatnonzero(new)
        lengths = np.diff(starts, append=n)
        return cls(order, ordered[starts], starts, lengths, np.arange(n) - np.repeat(starts, lengths))

    @property
    def longest(self) -> int:
        """Length of the longest run."""
        return int(self.lengths.max())

    def rounds(self) -> list[IntArray]:
        """Return index arrays into the unsorted entries; the r-th holds the r-th occurrence of each key."""
        by_rank = np.argsort(self.rank, kind="stable")
        return np.split(self.order[by_rank], np.cumsum(np.bincount(self.rank))[:-1])


@dataclass
class CostLedger:
    """What was spent, in the currencies of d tau / dC.

    Parameters
    ----------
    flops : float
        Floating-point operations.
    kv_bytes : float
        KV-cache bytes read, page metadata and scoring reads included.
    seconds : float
        Time the engine was busy (sum of step durations).
    joules : float
        Energy of the steps; 0 where nobody knows.
    """

    flops: float = 0.0
    kv_bytes: float = 0.0
    seconds: float = 0.0
    joules: float = 0.0

    def add(self, flops: float, kv_bytes: float, seconds: float, joules: float = 0.0) -> None:
        """Charge one step.

        Raises
        ------
        BadInputError
            If an amount is negative or not finite: costs only ever grow.
        """
        for name, amount in (("flops", flops), ("kv_bytes", kv_bytes), ("seconds", seconds), ("joules", joules)):
            if not 0.0 <= amount < math.inf:
                raise BadInputError("not a cost", field=name, value=amount, allowed="finite, >= 0")
        self.flops += flops
        self.kv_bytes += kv_bytes
        self.seconds += seconds
        self.joules += joules

    def efficiency(self, tau_nats: float) -> dict[str, float | None]:
        """Return d tau / dC per currency: nats per FLOP, KV byte, second and joule; None where nothing was spent."""
        spent = {"flop": self.flops, "kv_byte": self.kv_bytes, "second": self.seconds, "joule": self.joules}
        return {f"tau_per_{name}": tau_nats / cost if cost > 0 else None for name, cost in spent.items()}
