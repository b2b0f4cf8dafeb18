r"""Empirical Lyapunov exponents of the temperature loop: how fast two temperatures on the same logits move apart.

Two copies of the loop see the same distributions and start a little apart; after every token their separation is noted
and scaled back to where it began (Benettin et al. 1980): lambda = mean of ln(growth) per token. With an observation lag
d the state is (u, the last d entropies), and all of it is scaled. On frozen logits at equilibrium linear theory says

    lag 0: ln |1 - k V|;    lag d: ln of the largest root modulus of z^(d+1) - z^d + k V.

:func:`exponent` follows the trajectory it is given (on a stable 2-cycle it is negative again); :func:`at_equilibrium`
holds the reference at the equilibrium and so finds where *that* starts to repel. The state map here is the law's own
``temper`` and ``update`` with a lag; a test holds it to :class:`entropic_ctl.policy.Policy`, value by value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from entropic_ctl.errors import BadInputError
from entropic_ctl.temperature.base import TemperatureLaw
from sim.frozen import Views

__all__ = ["Exponent", "at_equilibrium", "exponent", "linear_exponent", "onset"]

_SIZE = 1e-7
_MERGED = 1e-8  # growth below which two copies count as one


@dataclass(frozen=True)
class Exponent:
    """A measured exponent.

    Parameters
    ----------
    value : float
        Nats per token over the tokens at which the copies stayed two; negative contracts.
    linear : float
        Mean of ln |1 - k V_t| along the reference (lag 0 and a gain only; NaN otherwise).
    merged : float
        Share of tokens at which the copies became one (both at a clamp, say).
    """

    value: float
    linear: float
    merged: float


def linear_exponent(loop_gain: float, lag: int) -> float:
    """Return ln of the largest root modulus of z^(d+1) - z^d + k V.

    Parameters
    ----------
    loop_gain : float
        k V.
    lag : int
        d >= 0.
    """
    polynomial = np.zeros(lag + 2)
    polynomial[0], polynomial[1] = 1.0, -1.0
    polynomial[-1] += loop_gain
    largest = float(np.abs(np.roots(polynomial)).max())
    return math.log(largest) if largest > 0 else -math.inf


def exponent(law: TemperatureLaw, views: Views, start: float, steps: int, *, lag: int = 0, burn: int = 0) -> Exponent:
    """Measure the exponent along one trajectory.

    Parameters
    ----------
    law : TemperatureLaw
    views : Views
    start : float
        Initial u = ln T of the reference.
    steps : int
        Tokens measured.
    lag : int
        Observation lag d.
    burn : int
        Tokens before measuring starts.
    """
    return _benettin(law, views, start, steps, lag, burn=burn, hold=False)


def at_equilibrium(law: TemperatureLaw, views: Views, u: float, steps: int, *, lag: int = 0) -> float:
    """Return the exponent of small deviations from the equilibrium ``u`` of frozen logits.

    Parameters
    ----------
    law : TemperatureLaw
    views : Views
        Must not change with t.
    u : float
        ln T with H(u) = H*.
    steps : int
        Tokens.
    lag : int
        Observation lag d.
    """
    return _benettin(law, views, u, steps, lag, burn=min(50, steps // 4), hold=True).value


def _benettin(
    law: TemperatureLaw, views: Views, start: float, steps: int, lag: int, *, burn: int, hold: bool
) -> Exponent:
    if steps < 1 or lag < 0:
        raise BadInputError("nothing to measure", where="exponent", field="steps, lag", value=[steps, lag])
    u = np.array([start, start + _SIZE])
    _, first, _ = law.temper(u, views(0, 2))
    ring = [np.asarray(first, np.float64).copy() for _ in range(lag)]  # entropies the update has not seen, oldest first
    total = linear = 0.0
    merged, gain = 0, float(getattr(law.config, "gain", math.nan))
    scale = abs(gain) if math.isfinite(gain) else 1.0  # an entropy counts as the change of u it will cause
    for t in range(burn + steps):
        _, entropy, varentropy = law.temper(u, views(t, 2))
        ring.append(np.asarray(entropy, np.float64).copy())
        after = np.asarray(law.update(u, ring.pop(0)), np.float64).copy()
        if hold:
            after[0] = start
        parts = [after, *ring]
        apart = math.hypot(float(after[1] - after[0]), *(scale * float(p[1] - p[0]) for p in ring))
        growth = apart / _SIZE
        if t >= burn:
            merged += growth < _MERGED
            total += math.log(growth) if growth >= _MERGED else 0.0
            linear += math.log(max(abs(1.0 - gain * float(varentropy[0])), _MERGED))
        if growth < _MERGED:
            after[1] = after[0] + _SIZE if after[0] + _SIZE <= math.log(law.config.t_max) else after[0] - _SIZE
        else:
            for p in parts:
                p[1] = p[0] + (p[1] - p[0]) / growth
        u = after
    value = total / (steps - merged) if merged < steps else -math.inf
    return Exponent(value, linear / steps if lag == 0 else math.nan, merged / steps)


def onset(exponent_at: Callable[[float], float], low: float, high: float, *, tolerance: float = 1e-4) -> float:
    """Return where a function of the gain crosses zero from below, by bisection.

    Parameters
    ----------
    exponent_at : callable(float) -> float
        Negative at ``low``, positive at ``high``.
    low, high : float
        Bracket.
    tolerance : float
        Relative width at which to stop.

    Raises
    ------
    BadInputError
        If the bracket does not hold a crossing.
    """
    if not exponent_at(low) < 0.0 < exponent_at(high):
        raise BadInputError("no onset between these gains", where="onset", value=[low, high])
    while high - low > tolerance * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if exponent_at(middle) < 0.0 else (low, middle)
    return 0.5 * (low + high)
