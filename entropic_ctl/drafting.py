r"""How many tokens to draft: one rule per request, the same objects for the simulator and the real engine.

A step that verifies d > 0 drafted tokens of one row costs about b + c d one-token steps (b - 1 is what verifying costs
at all) and yields 1 + (accepted run) tokens; with every draft token accepted with probability a, independently, the
expected yield is

    E(a, d) = 1 + a + ... + a^d

(Leviathan et al., 2023). The length that maximises E(a, d) / (b + c d), or 0 if that is at most 1, is
:func:`best_length` *(ours)*. Going from k - 1 >= 1 to k tokens pays iff g_k = a^k (b + c (k - 1)) - c E(a, k - 1) > 0.
g_{k+1} - g_k = a^k (b + c k) (a - 1) <= 0, so the best positive length is the last k with g_k > 0; it rises with a, and
so does the best ratio. A list of thresholds on a decides it all.

The rules differ only in where a comes from:

- ``fixed``: no estimate, always d;
- ``entropy``: a(H) = a_0 exp(-H / h) of the last model entropy H seen *(ours)*; measured values are the defaults;
- ``history``: an exponential average of the request's own accepted (1) and rejected (0) drafts. A request whose length
  fell to 0 drafts one token after ``probe`` steps without a draft, else it would never learn that times have changed.

``speculation.draft_below_nats`` holds for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from entropic_ctl.config import SpeculationConfig
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["DraftRule", "best_length", "expected_yield", "rule_of", "thresholds"]


def expected_yield(acceptance: float, length: int) -> float:
    """Return E(a, d), the expected tokens of a step that verifies ``length`` drafted ones."""
    return float(sum(acceptance**i for i in range(length + 1)))


def thresholds(cost: float, most: int, start: float = 0.0) -> FloatArray:
    """Return the acceptance above which the k-th drafted token pays, k = 1 .. most, never falling; infinite if never.

    Parameters
    ----------
    cost : float
        c: what one more drafted and verified token costs, in one-token steps.
    most : int
        Longest draft.
    start : float
        b - 1: what verifying any number of tokens costs besides.
    """
    base = 1.0 + start

    def pays(k: int) -> Callable[[float], bool]:
        return lambda a: a**k * (base + cost * (k - 1)) > cost * expected_yield(a, k - 1)

    def worth_it(a: float) -> bool:
        return any(expected_yield(a, k) > base + cost * k for k in range(1, most + 1))

    least = [_least(worth_it), *(_least(pays(k)) for k in range(2, most + 1))]
    return np.maximum.accumulate(np.array(least[:most]))


def _least(true_above: Callable[[float], bool]) -> float:
    """Return where on [0, 1] a rising condition becomes true, by bisection; infinity if not even at 1."""
    if not true_above(1.0):
        return float("inf")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if true_above(middle) else (middle, high)
    return low


def best_length(acceptance: float, cost: float, most: int, start: float = 0.0) -> int:
    """Return the draft length that maximises expected tokens per cost; ties go to the shorter one.

    Parameters
    ----------
    acceptance : float
        a, of every drafted token.
    cost, most, start
        As in :func:`thresholds`.
    """
    return int(np.searchsorted(thresholds(cost, most, start), acceptance, side="left"))


class DraftRule(Protocol):
    """Most tokens to draft, by slot."""

    def lengths(self, entropy: FloatArray) -> IntArray:
        """Return the length for each slot, given the last model entropy seen of each (nats; NaN: none yet)."""
        ...

    def observe(self, slots: IntArray, drafted: IntArray, accepted: IntArray) -> None:
        """Take in what a step drafted and accepted, one entry per row that sampled (distinct slots)."""
        ...

    def stop(self, slots: IntArray) -> None:
        """Forget the requests in these slots."""
        ...


class _Stateless:
    def observe(self, slots: IntArray, drafted: IntArray, accepted: IntArray) -> None:
        """Learn nothing."""

    def stop(self, slots: IntArray) -> None:
        """Forget nothing."""


class Fixed(_Stateless):
    """Always the same length."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._most = config.draft_tokens

    def lengths(self, entropy: FloatArray) -> IntArray:
        """Return d everywhere."""
        return np.full(entropy.shape[0], self._most, np.int64)


class Entropy(_Stateless):
    """Longer where the last entropy was lower: thresholds on a(H) = a_0 exp(-H / h), kept as levels of H.

    Attributes
    ----------
    levels : FloatArray, shape (d,)
        Falling; the k-th token is drafted while H is below the k-th level, nats.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        least = thresholds(config.rule_cost, config.draft_tokens, config.rule_start)
        with np.errstate(divide="ignore"):
            levels = np.log(config.rule_acceptance) - np.log(least)
        self.levels = np.where(np.isnan(levels), -np.inf, levels) * config.rule_scale_nats

    def lengths(self, entropy: FloatArray) -> IntArray:
        """Return the number of levels above each entropy; 0 where none was seen yet."""
        count = np.searchsorted(-self.levels, -np.where(np.isnan(entropy), np.inf, entropy), side="left")
        return np.asarray(count, np.int64)


class History:
    """Longer where the request's own drafts were accepted.

    Attributes
    ----------
    acceptance : FloatArray, shape (slots,)
        Running estimate of each request.
    """

    def __init__(self, config: SpeculationConfig, slots: int) -> None:
        self._least = thresholds(config.rule_cost, config.draft_tokens, config.rule_start)
        self._start, self._weight, self._probe = config.rule_acceptance, config.rule_weight, config.rule_probe
        self.acceptance = np.full(slots, self._start)
        self._idle = np.zeros(slots, np.int64)

    def lengths(self, entropy: FloatArray) -> IntArray:  # noqa: ARG002 - one signature for all
        """Return the length by slot; entropies are not read."""
        length = np.searchsorted(self._least, self.acceptance, side="left")
        probe = (length == 0) & (self._idle >= self._probe) & (self._least.shape[0] > 0)
        return np.asarray(np.where(probe, 1, length), np.int64)

    def observe(self, slots: IntArray, drafted: IntArray, accepted: IntArray) -> None:
        """Average over the tosses of a run: ``accepted`` successes, and a failure if it ended early."""
        rest = (1.0 - self._weight) ** accepted
        estimate = self.acceptance[slots] * rest + (1.0 - rest)
        failed = accepted < drafted
        self.acceptance[slots] = np.where(failed, estimate * (1.0 - self._weight), estimate)
        self._idle[slots] = np.where(drafted > 0, 0, self._idle[slots] + 1)

    def stop(self, slots: IntArray) -> None:
        """Start over."""
        self.acceptance[slots], self._idle[slots] = self._start, 0


def rule_of(config: SpeculationConfig, slots: int) -> DraftRule:
    """Return the rule that ``speculation.rule`` names.

    Parameters
    ----------
    config : SpeculationConfig
    slots : int
        Most requests that can be live at once.
    """
    if config.rule == "entropy":
        return Entropy(config)
    return History(config, slots) if config.rule == "history" else Fixed(config)
