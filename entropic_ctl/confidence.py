"""Confidence sequences: intervals for a mean that hold at every sample size at once, whenever one looks or stops.

Setting. Losses Y_1, Y_2, ... in [0, 1] arrive one by one; m_i = E[Y_i | all before]. Nothing else is assumed: the Y_i
may depend on each other and on whatever was decided from them. The target is the running mean of the m_i,

    M_n = (m_1 + ... + m_n) / n,

the mean of a constant-mean sequence if there is one. A sequence of intervals C_n covers if P(M_n in C_n for *all* n)
is at least 1 - alpha: then C_n may be read after every sample, and sampling stopped because of what it says.

:class:`MeanBound` is the empirical Bernstein sequence of Waudby-Smith and Ramdas (2023, theorem 2) with two changes
*(ours)*: every sample has the same weight, so that it is about M_n whatever the m_i do, and the rate of the bet is
mixed over a grid instead of tuned. With any a_i in [0, 1] fixed before Y_i, and psi(l) = -ln(1 - l) - l, both

    exp( sum_i l (Y_i - m_i) - psi(l) (Y_i - a_i)^2 )    and the same with -l in the first term      (0 <= l < 1)

are nonnegative supermartingales that begin at 1: for x >= -1, exp(l x - psi(l) x^2) <= 1 + l x (Fan, Grama and Liu,
2015), here with x = +-(Y - a); take expectations, and 1 + l (m - a) <= exp(l (m - a)). A mixture over l with weights
that sum to 1 is one again. Ville's inequality: with chance at least 1 - alpha neither mixture ever reaches 2 / alpha,
so that |sum (Y_i - m_i)| stays below the d_n at which the mixture at V_n = sum (Y_i - a_i)^2 reaches it, for all n at
once. Here a_i is the mean of the Y before i. (Betting with wealth that adapts to the data, section 4 there, is tighter,
but about a mean that does not move: the mean loss of generated text moves.)

Looking at random (live audit). Let X_t in [0, cap] be the loss of *every* step, and B_t a coin with P(B_t = 1) = p that
is tossed independently of everything up to and including X_t; X_t is seen only where B_t = 1. Then Y_t = B_t X_t / cap
has conditional mean p X_t / cap given the past *and* X_t. So the theorem with this larger past makes M_n cap / p the
*realised* mean of X over all n steps, seen or not, however they depend on each other, on the text and on decisions
taken from the interval itself. :meth:`MeanBound.skip` books a step that was left out (Y_t = 0). The weight 1 / p of a
seen step is a constant, so it moves nothing but the unit.

A loss above the cap is counted as the cap: the interval is about E[min(X, cap)], which the share of capped losses
qualifies. KL has no finite range, and without one no nonasymptotic interval for a mean exists (Bahadur and Savage,
1956).
"""

from __future__ import annotations

import math

import numpy as np

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray

__all__ = ["MeanBound", "samples_needed"]

_BETS: FloatArray = np.geomspace(1e-4, 0.95, 48)
"""The grid of l; each has the same weight in the mixture."""
_LOG_WEIGHT = -math.log(_BETS.shape[0])
_PSI: FloatArray = -np.log1p(-_BETS) - _BETS


class MeanBound:
    """Anytime-valid interval for the running mean of nonnegative losses.

    Parameters
    ----------
    cap : float
        Losses above count as this; > 0.
    alpha : float
        Chance that the interval ever misses, in (0, 1).
    rate : float
        p: probability with which a step is looked at, in (0, 1].

    Attributes
    ----------
    looked, steps, capped : int
        Losses seen; steps, those not looked at included; losses above the cap.
    """

    def __init__(self, cap: float, *, alpha: float = 0.05, rate: float = 1.0) -> None:
        for name, value, fine, allowed in (
            ("cap", cap, math.isfinite(cap) and cap > 0, "> 0, finite"),
            ("alpha", alpha, 0 < alpha < 1, "(0, 1)"),
            ("rate", rate, 0 < rate <= 1, "(0, 1]"),
        ):
            if not fine:
                raise BadInputError("out of range", where="MeanBound", field=name, value=value, allowed=allowed)
        self.cap, self.alpha, self.rate = cap, alpha, rate
        self.looked = self.steps = self.capped = 0
        self._sum = self._spread = 0.0
        self._seen_mean = 0.0

    def add(self, loss: float) -> None:
        """Take in the loss of a step that was looked at.

        Raises
        ------
        BadInputError
            If it is negative or not a number.
        """
        if not loss >= 0:
            raise BadInputError("not a loss", where="MeanBound", field="loss", value=loss, allowed=">= 0")
        self.looked += 1
        self.capped += loss > self.cap
        self._take(min(loss / self.cap, 1.0))

    def skip(self, count: int = 1) -> None:
        """Take in ``count`` steps that the coin left out (only with ``rate`` < 1)."""
        for _ in range(count):
            self._take(0.0)

    def _take(self, y: float) -> None:
        self._spread += (y - self._seen_mean) ** 2
        self._sum += y
        self.steps += 1
        self._seen_mean = self._sum / self.steps

    @property
    def mean(self) -> float:
        """Estimate of the mean loss per step, NaN without steps."""
        return self._sum / self.steps * self.cap / self.rate if self.steps else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Interval for the mean loss per step, in the unit of the losses; (0, cap) before the first."""
        if not self.steps:
            return 0.0, self.cap
        centre, width = self._sum / self.steps, _deviation(self._spread, self.alpha) / self.steps
        scale = self.cap / self.rate
        return min(max(centre - width, 0.0) * scale, self.cap), min((centre + width) * scale, self.cap)


def _deviation(spread: float, alpha: float) -> float:
    """Return the d at which the mixture of exp(l d - psi(l) V) reaches 2 / alpha: the upper end of a bisection."""
    goal = math.log(2.0 / alpha)
    fixed = _LOG_WEIGHT - _PSI * spread
    low, high = 0.0, float(((goal - fixed) / _BETS).min())  # there one term alone reaches it
    for _ in range(60):
        middle = 0.5 * (low + high)
        exponent = fixed + _BETS * middle
        top = float(exponent.max())
        if top + math.log(float(np.exp(exponent - top).sum())) < goal:
            low = middle
        else:
            high = middle
    return high


def samples_needed(resolution: float, *, cap: float, mean: float, deviation: float, alpha: float = 0.05) -> int:
    """Return how many losses it takes until the half width of :class:`MeanBound` is ``resolution``.

    Parameters
    ----------
    resolution : float
        Unit of the losses; > 0.
    cap, alpha : float
    mean, deviation : float
        Expected mean and standard deviation of one loss. Of losses looked at with a small chance p, count those looked
        at and give the root mean square as the deviation.

    Raises
    ------
    BadInputError
        If the resolution is not positive.
    """
    if not resolution > 0:
        raise BadInputError("not a resolution", field="resolution", value=resolution, allowed="> 0")
    variance = min((deviation / cap) ** 2, mean / cap * (1 - min(mean / cap, 1.0)))
    low, high = 0, 1
    while _deviation(high * variance, alpha) / high > resolution / cap:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _deviation(middle * variance, alpha) / middle > resolution / cap:
            low = middle
        else:
            high = middle
    return high
