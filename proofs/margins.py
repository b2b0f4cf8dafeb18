r"""How far the linear temperature loop is from instability: gain, phase, delay, modulus and disk margins.

Every factor of L (:mod:`proofs.linear_loop`) falls in magnitude and phase, so |L| = 1 once at most.
``control.stability_margins`` is not used: of L(z) it misses the crossing at z = -1, which is *the* gain margin of this
loop at lag 0 (it answers infinity where 2 / (k V) is right), and takes the pole at 1 for a crossing when there is a
filter. Crossings are found here from the frequency response by bracketing; tests hold them to the closed forms.
Source: ours.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import optimize

from entropic_ctl.config import RunConfig
from proofs.linear_loop import (
    ComplexArray,
    FloatArray,
    closed,
    frequencies,
    gain_of,
    load,
    loop,
    response,
    save,
    step,
)

if TYPE_CHECKING:
    import control

__all__ = ["Margins", "load", "loop", "margins", "save"]

_SETTLED = 0.02
_LONGEST = 10**6
_HALF_POWER = math.sqrt(0.5)


@dataclass(frozen=True)
class Margins:
    """Distance from instability of one linear loop; None where a number does not exist.

    Parameters
    ----------
    varentropy, loop_gain : float
        V (nats squared) and k V.
    stable : bool
        Every closed-loop pole inside the unit circle.
    spectral_radius : float
        Largest modulus of a pole: the error shrinks by it per token, in the long run.
    gain_margin : float
        Factor on k at which the loop starts to ring; below 1 it already does.
    gain_limit : float
        k there.
    phase_margin_deg : float or None
        At the frequency where |L| = 1; negative when unstable, None when |L| > 1 everywhere.
    delay_margin : float or None
        Phase margin over that frequency, in tokens.
    delay_margin_steps : int
        Whole tokens of further delay that leave it stable; negative: so many fewer would be needed.
    modulus_margin : float or None
        Least distance of L from -1: 1 / ``sensitivity_peak``; the next ones too are None when unstable.
    disk_margin, disk_gain_low, disk_gain_high, disk_phase_deg : float or None
        Balanced disk margin alpha (python-control's ``disk_margins``): the loop survives any gain in this range, or
        any phase up to this, at once and at every frequency.
    sensitivity_peak : float or None
        Largest |S|: worst amplification of a disturbance of the entropy.
    crossover, bandwidth, rejection : float or None
        Rad per token: where |L| = 1; where |T| falls to -3 dB (None: nowhere below pi); below which |S| is under -3 dB.
    settling_tokens : float or None
        First token from which the entropy stays within 2% of a step of the target.
    overshoot : float or None
        As a share of the step.
    """

    varentropy: float
    loop_gain: float
    stable: bool
    spectral_radius: float
    gain_margin: float
    gain_limit: float
    phase_margin_deg: float | None
    delay_margin: float | None
    delay_margin_steps: int
    modulus_margin: float | None = None
    disk_margin: float | None = None
    disk_gain_low: float | None = None
    disk_gain_high: float | None = None
    disk_phase_deg: float | None = None
    sensitivity_peak: float | None = None
    crossover: float | None = None
    bandwidth: float | None = None
    rejection: float | None = None
    settling_tokens: float | None = None
    overshoot: float | None = None


def _crossing(f: Any, w: FloatArray, values: FloatArray) -> float | None:
    """Return the first zero of f in ``w``, whose values there are given; None without a change of sign."""
    at = np.flatnonzero(np.sign(values[1:]) * np.sign(values[:-1]) < 0)
    if at.size == 0:
        return None
    return float(optimize.brentq(f, w[at[0]], w[at[0] + 1], xtol=1e-15, rtol=1e-14))


def _largest(system: control.StateSpace, w: FloatArray) -> float:
    """Return the largest magnitude of a response over [w[0], pi]."""
    size = np.abs(response(system, w))
    at = int(np.argmax(size))
    left, right = w[max(0, at - 1)], w[min(w.shape[0] - 1, at + 1)]
    found = optimize.minimize_scalar(
        lambda x: -abs(response(system, x)[0]), bounds=(left, right), method="bounded", options={"xatol": 1e-12}
    )
    return max(float(size[at]), -float(found.fun))


def _gain_margin(L: control.StateSpace, w: FloatArray, values: ComplexArray) -> float:
    """Return the least factor K > 0 with a pole of the closed loop on the unit circle: K = -1 / L where L < 0.

    The phase of L falls; the first crossing of -180 degrees lies before pi, or at it, where L is real.
    """
    w0 = _crossing(lambda x: response(L, x)[0].imag, w[:-1], values.imag[:-1])  # at pi it is rounding alone
    return float(-1.0 / (response(L, math.pi if w0 is None else w0)[0].real))


def _disk(L: control.StateSpace, w: FloatArray) -> tuple[float, float, float, float]:
    """Return (alpha, least gain, largest gain, phase in degrees) of the balanced disk margin."""
    import control

    grid = np.append(w[:-1:8], w[-1])
    for _ in range(5):  # narrow the grid about the worst frequency
        alpha = np.asarray(control.disk_margins(L, grid, returnall=True)[0])
        at = int(np.argmin(alpha))
        grid = np.linspace(grid[max(0, at - 1)], grid[min(grid.shape[0] - 1, at + 1)], 41)
    worst = float(alpha.min())
    high = math.inf if worst >= 2.0 else (1 + worst / 2) / (1 - worst / 2)
    return worst, (1 - worst / 2) / (1 + worst / 2), high, math.degrees(2 * math.atan(worst / 2))


def _settling(T: control.StateSpace, radius: float) -> tuple[float, float]:
    """Return (settling time in tokens, overshoot as a share) of a stable loop."""
    tokens = 16 + (0 if radius == 0.0 else math.ceil(2.0 * math.log(_SETTLED / 4) / math.log(radius)))
    if tokens > _LONGEST:  # one slow pole near 1 rules: its exponential
        return float(math.ceil(math.log(_SETTLED) / math.log(radius))), 0.0
    y = step(T, tokens)
    outside = np.flatnonzero(np.abs(y - 1.0) > _SETTLED)
    return float(outside[-1] + 1 if outside.size else 0), max(0.0, float(y.max()) - 1.0)


def margins(config: RunConfig, varentropy: float, *, ema: float = 1.0) -> Margins:
    """Return the margins of the linear loop at one varentropy; V_max(n) gives the worst case.

    Parameters
    ----------
    config : RunConfig
        With the ``feedback`` law.
    varentropy : float
        V > 0, nats squared.
    ema : float
        Weight of the newest entropy; 1 is no filter.

    Raises
    ------
    BadInputError
        As :func:`loop`.
    """
    L = loop(config, varentropy, ema=ema)
    S, T = closed(L)
    k, lag = gain_of(config), config.engine.observation_lag
    radius = float(np.abs(np.asarray(T.poles())).max())
    w = frequencies(k * varentropy)
    values = response(L, w)
    gain_margin = _gain_margin(L, w, values)
    stable = gain_margin > 1.0 + 1e-12
    at = _crossing(lambda x: abs(response(L, x)[0]) - 1.0, w, np.abs(values) - 1.0)
    phase_margin = delay = None
    steps = -1 - lag
    if at is not None:
        left = max(0, int(np.searchsorted(w, at)) - 1)
        phases = np.unwrap(np.angle(values[: left + 1]))  # starts near -90 degrees, at the integrator
        phase = float(phases[left]) + float(np.angle(response(L, at)[0] / values[left]))
        phase_margin = math.degrees(math.pi + phase)
        delay = (math.pi + phase) / at
        steps = math.ceil(delay - 1e-9) - 1
    found = Margins(
        varentropy,
        k * varentropy,
        stable,
        radius,
        gain_margin,
        k * gain_margin,
        phase_margin,
        delay,
        steps,
        crossover=at,
    )
    if not stable:
        return found
    alpha, low, high, phase = _disk(L, w)
    peak = _largest(S, w)
    settling, overshoot = _settling(T, radius)
    return dataclasses.replace(
        found,
        modulus_margin=1.0 / peak,
        disk_margin=alpha,
        disk_gain_low=low,
        disk_gain_high=high,
        disk_phase_deg=phase,
        sensitivity_peak=peak,
        bandwidth=_crossing(lambda x: abs(response(T, x)[0]) - _HALF_POWER, w, np.abs(response(T, w)) - _HALF_POWER),
        rejection=_crossing(lambda x: abs(response(S, x)[0]) - _HALF_POWER, w, np.abs(response(S, w)) - _HALF_POWER),
        settling_tokens=settling,
        overshoot=overshoot,
    )
