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

__all__ = ["CostLedger", "EntropicClock", "filtered_ratchet", "noise_ratchet"]


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
        for part in occurrence_rounds(slots):
            self._advance(slots[part], H[part])

    def _advance(self, slots: IntArray, H: FloatArray) -> None:
        previous, filtered = self.last[slots], self._filtered[slots]
        seen = self.count[slots] > 0
        if not seen.all():
            new = slots[~seen]
            self.first[new] = H[~seen]
            previous, filtered = np.where(seen, previous, H), np.where(seen, filtered, H)
        smooth = filtered + self.weight * (H - filtered)
        self.tau[slots] += np.maximum(previous - H, 0.0)
        self.tau_filtered[slots] += np.maximum(filtered - smooth, 0.0)
        self.last[slots], self._filtered[slots] = H, smooth
        self.count[slots] += 1


def occurrence_rounds(keys: IntArray) -> list[IntArray | slice]:
    """Split entries into rounds: round r holds the r-th occurrence of each key, so no round repeats a key.

    One round (the whole, as a slice) when the keys are already distinct, which is the common case.
    """
    n = keys.shape[0]
    order: IntArray = np.argsort(keys, kind="stable")
    ordered = keys[order]
    new: npt.NDArray[np.bool_] = np.empty(n, np.bool_)
    new[:1] = True
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    if new.all():
        return [slice(None)]
    starts = np.flatnonzero(new)
    rank = np.arange(n) - np.repeat(starts, np.diff(np.append(starts, n)))
    by_rank = np.argsort(rank, kind="stable")
    return list(np.split(order[by_rank], np.cumsum(np.bincount(rank))[:-1]))


@dataclass
class CostLedger:
    """What was spent, in the three currencies of d tau / dC.

    Parameters
    ----------
    flops : float
        Floating-point operations.
    kv_bytes : float
        KV-cache bytes read, page metadata and scoring reads included.
    seconds : float
        Time the engine was busy (sum of step durations).
    """

    flops: float = 0.0
    kv_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, flops: float, kv_bytes: float, seconds: float) -> None:
        """Charge one step.

        Raises
        ------
        BadInputError
            If an amount is negative or not finite: costs only ever grow.
        """
        for name, amount in (("flops", flops), ("kv_bytes", kv_bytes), ("seconds", seconds)):
            if not 0.0 <= amount < math.inf:
                raise BadInputError("not a cost", field=name, value=amount, allowed="finite, >= 0")
        self.flops += flops
        self.kv_bytes += kv_bytes
        self.seconds += seconds

    def efficiency(self, tau_nats: float) -> dict[str, float | None]:
        """Return d tau / dC per currency: nats per FLOP, per KV byte, per second; None where nothing was spent."""
        spent = {"flop": self.flops, "kv_byte": self.kv_bytes, "second": self.seconds}
        return {f"tau_per_{name}": tau_nats / cost if cost > 0 else None for name, cost in spent.items()}
