"""Open arrival processes: unit-rate randomness, then a change of time.

Every process turns the same unit exponentials (stream ``arrivals``) into times, so changing a rate moves the same
arrivals and nothing else (common random numbers). ``S_i`` is the sum of the first i unit gaps, in extended precision.

===========  =====================================================  =================================================
process      arrival i (from 1)                                     mean rate
===========  =====================================================  =================================================
``burst``    0                                                      -
``poisson``  S_i / rate                                             rate; gaps of CV 1
``gamma``    G_i / rate, G of Gamma gaps of mean 1, shape 1 / cv^2  rate; gaps of CV cv (0: regular)
``mmpp``     L^-1(S_i), L the integral of the rate of the state     sum(r_k d_k) / sum(d_k), at every moment
``diurnal``  L^-1(S_i), L the integral of the rate of the slice     mean of the rates over a period
===========  =====================================================  =================================================

All rates are multiplied by ``rate_scale``. ``mmpp``: the states follow one another in a circle, each for an exponential
time of mean d_k; the first state is drawn with probability d_k / sum(d), so the process is stationary from time 0 (the
time left in a state has no memory). States come from a stream of their own (``arrival-states``): a rate does not move
them. ``diurnal``: equal slices of the period, from time 0; a rate of 0 is allowed. For two states the index of
dispersion of counts over a time t is 1 + 2 (r_1 - r_2)^2 d_1 d_2 c / ((d_1 + d_2) (r_1 d_1 + r_2 d_2)) *
(1 - (1 - exp(-t / c)) c / t), 1 / c = 1 / d_1 + 1 / d_2 (Heffes and Lucantoni, 1986); a test holds the draws to it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from entropic_ctl.config import WorkloadConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray
from sim.streams import stream

__all__ = ["arrival_times"]

_MOST_CHANGES = 10_000_000
_BLOCK = 4096

Precise = npt.NDArray[np.longdouble]


def arrival_times(config: WorkloadConfig, n: int, seed: int) -> FloatArray:
    """Draw the first ``n`` arrival times of ``config.process``, seconds, non-decreasing.

    Parameters
    ----------
    config : WorkloadConfig
        Its ``process`` must be one of the table above.
    n : int
        At least 1.
    seed : int
        Root seed.

    Returns
    -------
    FloatArray, shape (n,)
        May hold infinity where a rate is so low that the time exceeds float64.

    Raises
    ------
    BadInputError
        If ``mmpp`` would have to change state more than ten million times.
    """
    rng = stream(seed, "arrivals")
    if config.process == "burst":
        return np.zeros(n)
    if config.process == "gamma":
        squared = config.arrival_cv**2
        gaps = rng.standard_gamma(1.0 / squared, n) * squared if squared > 0 else np.ones(n)
    else:
        gaps = rng.standard_exponential(n)
    work: Precise = np.cumsum(gaps, dtype=np.longdouble)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # the workload refuses what is not finite
        if config.process == "mmpp":
            work /= config.rate_scale
            times = _time_of(work, *_states(config, float(work[-1]), seed))
        elif config.process == "diurnal":
            times = _periodic(work / config.rate_scale, np.array(config.rates_per_s), config.period_s)
        else:
            times = work / (config.rate_per_s * config.rate_scale)
        return times.astype(np.float64)


def _periodic(work: Precise, rates: FloatArray, period_s: float) -> Precise:
    """Return the times at which the integral of a rate that repeats, slice by slice, reaches ``work``."""
    slices = np.linspace(0.0, period_s, rates.shape[0] + 1)
    whole = np.sum(rates * np.diff(slices), dtype=np.longdouble)
    period = np.floor(work / whole)
    rest = np.clip(work - period * whole, 0, np.nextafter(whole, np.longdouble(0)))
    times: Precise = period * period_s + _time_of(rest, slices, rates)
    return times


def _time_of(work: Precise, start_s: FloatArray, rate: FloatArray) -> Precise:
    """Return the times at which the integral of a piecewise constant rate reaches ``work``.

    Parameters
    ----------
    work : longdouble array, shape (n,)
        Non-negative, less than the integral over all pieces.
    start_s : FloatArray, shape (K + 1,)
        Piece k lasts from ``start_s[k]`` to ``start_s[k + 1]``.
    rate : FloatArray, shape (K,)
        Pieces of rate 0 are passed over.
    """
    busy = np.flatnonzero(rate > 0)
    begin, end, rate = start_s[:-1][busy], start_s[1:][busy], rate[busy]
    done = np.cumsum((end - begin) * rate, dtype=np.longdouble)
    piece = np.minimum(np.searchsorted(done, work, side="right"), busy.shape[0] - 1)
    before = np.concatenate([[np.longdouble(0)], done])[piece]
    times: Precise = np.minimum(begin[piece] + (work - before) / rate[piece], end[piece])
    return times


def _states(config: WorkloadConfig, work: float, seed: int) -> tuple[FloatArray, FloatArray]:
    """Return (start of each stay and the end of the last, rate of each stay) until the rates add up to ``work``."""
    rates, dwell, rng = np.array(config.rates_per_s), np.array(config.dwell_s), stream(seed, "arrival-states")
    state = int(np.searchsorted(np.cumsum(dwell) / dwell.sum(), rng.random(), side="right"))
    needed = work / float(np.mean(rates * dwell))
    if not needed <= _MOST_CHANGES:
        raise BadInputError(
            f"about {needed:.3g} changes of state pass before the last arrival",
            where="workload",
            field="dwell_s",
            value=list(config.dwell_s),
            allowed=f"at most {_MOST_CHANGES:,}",
            remedy="raise rates_per_s or dwell_s, or lower n_requests",
        )
    stays: list[FloatArray] = []
    paid: list[FloatArray] = []
    total = 0.0
    while total <= work:
        index = (state + np.arange(_BLOCK)) % rates.shape[0]
        state = (state + _BLOCK) % rates.shape[0]
        stays.append(rng.standard_exponential(_BLOCK) * dwell[index])
        paid.append(rates[index])
        total += float(np.sum(stays[-1] * paid[-1]))
    start_s = np.concatenate([[0.0], np.cumsum(np.concatenate(stays), dtype=np.longdouble)]).astype(np.float64)
    return start_s, np.concatenate(paid)
