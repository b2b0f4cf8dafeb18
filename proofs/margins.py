r"""The linear temperature loop as python-control objects, and how far it is from instability.

One sample per accepted token (dt = 1). With e the target minus the tempered entropy, varentropy V as the plant's slope,
observation lag d and, where entropies are filtered before they are used (no shipped law does), an average of weight b,

    u+ = u + k F(z) z^-d e,     y = V u,     F(z) = b z / (z - 1 + b),     L(z) = k V F(z) z^-d / (z - 1).

Every factor falls in magnitude and phase, so |L| = 1 once at most. ``control.stability_margins`` is not used: of L(z)
it misses the crossing at z = -1, which is *the* gain margin of this loop at lag 0 (it answers infinity where 2 / (k V)
is right), and takes the pole at 1 for a crossing when there is a filter. Crossings are found here from L's frequency
response by bracketing, and compared with the closed forms in tests. Source: ours.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import control
import numpy as np
import numpy.typing as npt
from scipy import optimize, signal

from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.results import atomic, write_json

__all__ = ["Margins", "closed", "frequencies", "gain_of", "load", "loop", "margins", "response", "save", "step"]

FloatArray = npt.NDArray[np.float64]
ComplexArray = npt.NDArray[np.complex128]

_SETTLED = 0.02
_LONGEST = 10**6
_HALF_POWER = math.sqrt(0.5)


def gain_of(config: RunConfig) -> float:
    """Return k of a loop that has integral action.

    Raises
    ------
    BadInputError
        For a law without any (what it has instead is said), or a gain that is not positive: no margin exists.
    """
    law = config.loop.temperature
    if law.name != "feedback":
        raise BadInputError(
            "the law feeds back no past error, so there is no loop with margins",
            field="loop.temperature.law",
            value=law.name,
            allowed="feedback",
        )
    gain = float(law.config.gain)
    if not gain > 0.0:
        raise BadInputError(
            "no margin exists: a gain that is not positive does not pull towards the target",
            field="loop.temperature.gain",
            value=gain,
            allowed="> 0",
        )
    return gain


def loop(
    config: RunConfig, varentropy: float, *, ema: float = 1.0, gain: float | None = None, lag: int | None = None
) -> control.StateSpace:
    """Return the open loop L from the error (target minus entropy, nats) to the tempered entropy (nats).

    Parameters
    ----------
    config : RunConfig
        With the ``feedback`` law; k is its gain, d the engine's observation lag.
    varentropy : float
        V > 0, nats squared.
    ema : float
        Weight b of the newest entropy, in (0, 1]; 1 is no filter.
    gain, lag : float, int, optional
        In place of the config's; a lag has no upper limit here.

    Returns
    -------
    control.StateSpace
        dt = 1 (an accepted token). States: ``u`` (ln T), ``late1`` ... ``late<d>`` (errors on their way), ``filtered``.

    Raises
    ------
    BadInputError
        For another law, a gain that is not positive, or a varentropy or weight out of range.
    """
    k = gain_of(config) if gain is None else gain
    lag = config.engine.observation_lag if lag is None else lag
    if lag < 0:
        raise BadInputError("negative", field="lag", value=lag, allowed=">= 0 tokens")
    if not 0.0 < varentropy < math.inf:
        raise BadInputError("not a varentropy", field="varentropy", value=varentropy, allowed="> 0 nats^2, finite")
    if not 0.0 < ema <= 1.0:
        raise BadInputError("not a filter weight", field="ema", value=ema, allowed="(0, 1]")
    names = ["u", *(f"late{i}" for i in range(1, lag + 1)), *(["filtered"] if ema < 1.0 else [])]
    size = len(names)
    A, B, C = np.zeros((size, size)), np.zeros((size, 1)), np.zeros((1, size))
    for i in range(1, lag + 1):  # late1+ = e, late2+ = late1, ...
        (B if i == 1 else A)[i, 0 if i == 1 else i - 1] = 1.0
    seen = (A, lag) if lag else (B, 0)  # where the entropy that is used stands
    A[0, 0] = 1.0
    seen[0][0, seen[1]] = k * ema
    if ema < 1.0:
        A[-1, -1] = 1.0 - ema
        A[0, -1] = k * (1.0 - ema)
        seen[0][size - 1, seen[1]] = ema
    C[0, 0] = varentropy
    return control.StateSpace(
        A,
        B,
        C,
        0.0,
        1,
        inputs=["error_nats"],
        outputs=["tempered_entropy"],
        states=names,
        name="L",
        remove_useless_states=False,
    )


def closed(L: control.StateSpace) -> tuple[control.StateSpace, control.StateSpace]:
    """Return (S, T): from a disturbance of the entropy, and from the target, to the entropy.

    Parameters
    ----------
    L : control.StateSpace
        From error to entropy, strictly proper, one input and output.
    """
    A, B, C = (np.asarray(m) for m in (L.A, L.B, L.C))
    said: dict[str, Any] = {"states": list(L.state_labels), "remove_useless_states": False}
    S = control.StateSpace(
        A - B @ C, B, -C, 1.0, 1, inputs=["disturbance"], outputs=["tempered_entropy"], name="S", **said
    )
    T = control.StateSpace(A - B @ C, B, C, 0.0, 1, inputs=["target"], outputs=["tempered_entropy"], name="T", **said)
    return S, T


def response(system: control.StateSpace, w: npt.ArrayLike) -> ComplexArray:
    """Return the frequency response at ``w``, rad per token: shape (len(w),), or (len(w), outputs, inputs) of a matrix.

    Parameters
    ----------
    system : control.StateSpace
    w : array_like, shape (W,)
        In (0, pi].
    """
    value = np.asarray(system(np.exp(1j * np.atleast_1d(np.asarray(w, np.float64))), squeeze=False))
    value = np.moveaxis(value.reshape(system.noutputs, system.ninputs, -1), -1, 0).astype(np.complex128)
    return value[:, 0, 0] if value.shape[1:] == (1, 1) else value


def frequencies(slowest: float, count: int = 2000) -> FloatArray:
    """Return frequencies in rad per token that show a loop whose loop gain is ``slowest``, up to pi (2 tokens a period).

    Parameters
    ----------
    slowest : float
        Smallest k V shown.
    count : int
        Points in logarithmic steps; half as many more in linear ones.
    """
    low = min(1e-3, 0.02 * slowest)
    return np.unique(np.concatenate((np.geomspace(low, math.pi, count), np.linspace(low, math.pi, count // 2))))


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
        Rad per token: where |L| = 1; where |T| falls to -3 dB (None: not below the fastest frequency, pi); below which
        |S| is under -3 dB.
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
    grid = w
    for _ in range(4):  # narrow the grid about the worst frequency
        alpha = np.asarray(control.disk_margins(L, grid, returnall=True)[0])
        at = int(np.argmin(alpha))
        grid = np.linspace(grid[max(0, at - 1)], grid[min(grid.shape[0] - 1, at + 1)], 101)
    worst = float(alpha.min())
    high = math.inf if worst >= 2.0 else (1 + worst / 2) / (1 - worst / 2)
    return worst, (1 - worst / 2) / (1 + worst / 2), high, math.degrees(2 * math.atan(worst / 2))


def step(T: control.StateSpace, tokens: int) -> FloatArray:
    """Return the response to a unit step, shape (tokens,).

    Parameters
    ----------
    T : control.StateSpace
        One input, one output.
    tokens : int
    """
    if tokens <= 2000:
        return np.asarray(control.step_response(T, np.arange(tokens)).outputs, np.float64).ravel()
    num, den = signal.ss2tf(T.A, T.B, T.C, T.D)
    return np.asarray(signal.lfilter(num[0], den, np.ones(tokens)), np.float64)


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


# -- files --------------------------------------------------------------------------------------------------------------


def _described(system: control.StateSpace) -> dict[str, Any]:
    return {
        **{name: np.asarray(getattr(system, name), np.float64).tolist() for name in "ABCD"},
        "dt": 1,
        "inputs": list(system.input_labels),
        "outputs": list(system.output_labels),
        "states": list(system.state_labels),
    }


def save(path: str | Path, systems: Mapping[str, control.StateSpace]) -> None:
    """Write systems with their names: ``*.json`` (:func:`load` reads it) or ``*.mat`` (a struct each, for MATLAB).

    Parameters
    ----------
    path : str or Path
    systems : mapping of str to control.StateSpace
        Names must be identifiers.

    Raises
    ------
    BadInputError
        For another suffix, or a path that cannot be written.
    """
    path = Path(path)
    documents = {name: _described(system) for name, system in systems.items()}
    if path.suffix == ".json":
        write_json(path, {"dt_unit": "accepted token", "systems": documents})
    elif path.suffix == ".mat":
        from scipy.io import savemat

        structs = {
            name: {
                key: np.asarray(value, object if isinstance(value, list) and key in _NAMED else None)
                for key, value in document.items()
            }
            for name, document in documents.items()
        }
        with atomic(path) as temporary:
            savemat(temporary, structs, appendmat=False)
    else:
        raise BadInputError("unknown kind of file", where="--export", value=path.suffix, allowed=".json, .mat")


_NAMED = ("inputs", "outputs", "states")


def load(path: str | Path, name: str | None = None) -> control.StateSpace:
    """Read a system that :func:`save` wrote as JSON.

    Parameters
    ----------
    path : str or Path
    name : str, optional
        Which one; the first if absent.

    Raises
    ------
    BadInputError
        If the file cannot be read or holds no such system.

    Examples
    --------
    >>> from proofs import margins                                            # doctest: +SKIP
    >>> L = margins.load("loops.json", "v_max_L")                             # doctest: +SKIP
    """
    where = str(path)
    try:
        systems = json.loads(Path(path).read_text(encoding="utf-8"))["systems"]
        names: Sequence[str] = list(systems)
        chosen = names[0] if name is None else name
        if chosen not in systems:
            raise BadInputError("no such system", where=where, field="name", value=name, allowed=", ".join(names))
        given = systems[chosen]
        return control.StateSpace(
            *(np.asarray(given[key], np.float64) for key in "ABCD"),
            given["dt"],
            inputs=given["inputs"],
            outputs=given["outputs"],
            states=given["states"],
            name=chosen,
            remove_useless_states=False,
        )
    except OSError as error:
        raise BadInputError(f"cannot read systems: {error.strerror}", where=where) from None
    except BadInputError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise BadInputError(f"not a file of systems: {error}", where=where) from None
