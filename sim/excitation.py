"""Known signals added to a running loop, so that its response can be told from everything else that moves.

- **Signals** with zero mean and a stated amplitude: ``prbs`` (a maximal-length binary sequence: flat spectrum, two
  levels), ``multisine`` (every harmonic of its period, equal power, phases after Schroeder 1970: a low crest) and
  ``chirp`` (frequency rises linearly from 0 to 1/2 cycle per token).
- **Laws** that carry a signal. :class:`Excited` wraps any micro law and adds the signal to u = ln T behind it
  (``output``) or to its target H* (``target``, closed loop only); :class:`ExcitedBudget` moves theta about a point.

Each request enters the signal at a random place of its own. So the signal is independent of the token's position and of
the other requests, and what texts have in common (they start uncertain) averages out.

A law's state is one number per request. ``Excited`` keeps the inner law's u in it, and the place in the signal in
multiples of 64: both are exact to 1e-11 for |u| < 30 and periods up to 10,000 tokens. Source: ours.
"""

from __future__ import annotations

import math

import numpy as np
from array_api_compat import array_namespace, device, to_device

from entropic_ctl.arrays import clip
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig
from entropic_ctl.signals import Array, FloatArray, IntArray, LogitView
from entropic_ctl.temperature.base import TemperatureLaw

__all__ = ["KINDS", "Excited", "ExcitedBudget", "make_signal"]

KINDS = ("prbs", "chirp", "multisine")
_CELL = 64.0
_LONGEST = 10_000
_DEEPEST = 30.0


def make_signal(kind: str, period: int, amplitude: float, rng: np.random.Generator) -> FloatArray:
    """Return one period of an excitation, float64 (P,), zero mean.

    Parameters
    ----------
    kind : str
        ``prbs``, ``chirp`` or ``multisine``.
    period : int
        P in tokens, 15 to 10,000; a prbs has the next length 2^m - 1.
    amplitude : float
        Largest absolute value, in the unit of the input, > 0.
    rng : numpy.random.Generator
        Start of the prbs register.

    Raises
    ------
    BadInputError
        For another kind, period or amplitude.
    """
    if kind not in KINDS:
        raise BadInputError("no such signal", field="signal", value=kind, allowed=", ".join(KINDS))
    if not 15 <= period <= _LONGEST:
        raise BadInputError("not a period", field="period", value=period, allowed=f"[15, {_LONGEST}] tokens")
    if not (math.isfinite(amplitude) and amplitude > 0):
        raise BadInputError("not an amplitude", field="amplitude", value=amplitude, allowed="> 0")
    if kind == "prbs":
        from scipy.signal import max_len_seq

        bits = min(max(4, math.ceil(math.log2(period + 1))), 13)
        state = rng.integers(0, 2, bits)
        state[0] = 1  # the register must not be all zeros
        wave = 2.0 * max_len_seq(bits, state=state)[0] - 1.0
    elif kind == "chirp":
        t = np.arange(period)
        wave = np.sin(np.pi * 0.5 * t * t / period)  # phase pi t^2 / (2 P): instantaneous frequency t / (2 P)
    else:
        spectrum = np.zeros(period // 2 + 1, np.complex128)
        k = np.arange(1, (period + 1) // 2)
        spectrum[k] = np.exp(-1j * np.pi * k * (k - 1) / k.shape[0])
        wave = np.fft.irfft(spectrum, period)
    wave = np.asarray(wave, np.float64) - float(np.mean(wave))
    return amplitude * wave / float(np.abs(wave).max())


class Excited:
    """A micro law with a known signal added behind it, or to its target.

    Parameters
    ----------
    inner : TemperatureLaw
        ``fixed`` for an open loop, ``feedback`` for a closed one.
    signal : FloatArray, shape (P,)
        One period; in u = ln T (``output``) or nats (``target``).
    rng : numpy.random.Generator
        Where each request enters the signal.
    at : str
        ``output`` or ``target``.

    Attributes
    ----------
    applied : list of FloatArray
        The signal's value at every row of every call of ``temper``, in order.
    frozen_gain : list of FloatArray
        Likewise dH/du of that row's own distribution at the *unexcited* u: its varentropy there.
    """

    def __init__(
        self, inner: TemperatureLaw, signal: FloatArray, rng: np.random.Generator, *, at: str = "output"
    ) -> None:
        if at not in ("output", "target") or (at == "target" and not inner.integral_action):
            raise BadInputError(
                "the signal cannot enter there",
                field="at",
                value=at,
                allowed="output, or target of a law with integral action",
            )
        self.inner, self.config, self.integral_action = inner, inner.config, inner.integral_action
        low, high = math.log(inner.config.t_min), math.log(inner.config.t_max)
        if max(-low, high) > _DEEPEST or signal.shape[0] > _LONGEST:
            raise BadInputError(
                "outside what one state can hold",
                field="t_min",
                value=inner.config.t_min,
                allowed=f"|ln T| <= {_DEEPEST:g} and a period of at most {_LONGEST} tokens",
            )
        self.applied: list[FloatArray] = []
        self.frozen_gain: list[FloatArray] = []
        self._signal, self._rng, self._at, self._range = signal, rng, at, (low, high)

    def start(self) -> float:
        """Return the state of one new request."""
        return float(self.starts(1)[0])

    def starts(self, n: int) -> FloatArray:
        """Return the states of ``n`` new requests, float64 (n,): each enters the signal somewhere else."""
        return self.inner.start() + _CELL * self._rng.integers(0, self._signal.shape[0], n).astype(np.float64)

    def _split(self, state: Array) -> tuple[Array, IntArray, Array]:
        """Return (u of the inner law, place in the signal, value there)."""
        xp = array_namespace(state)
        place = xp.round(state / _CELL)
        index = np.asarray(to_device(place, "cpu")).astype(np.int64)
        value = xp.asarray(self._signal[index], dtype=state.dtype, device=device(state))
        return state - _CELL * place, index, value

    def temper(self, u: Array, view: LogitView) -> tuple[Array, Array, Array]:
        """Return (T, tempered entropy, varentropy) of the excited law; ``u`` is its packed state, (M,).

        Parameters
        ----------
        u : array, shape (M,)
        view : LogitView
        """
        inner, index, value = self._split(u)
        plain = self.inner.temper(inner, view)
        self.applied.append(self._signal[index])
        self.frozen_gain.append(np.asarray(to_device(plain[2], "cpu"), np.float64))
        return plain if self._at == "target" else self.inner.temper(clip(inner + value, *self._range), view)

    def update(self, u: Array, tempered_entropy: Array) -> Array:
        """Return the next packed state: the inner law's, one place further in the signal.

        Parameters
        ----------
        u : array, shape (M,)
        tempered_entropy : array, shape (M,), nats
        """
        xp = array_namespace(u)
        inner, index, value = self._split(u)
        seen = tempered_entropy - value if self._at == "target" else tempered_entropy
        place = xp.asarray((index + 1.0) % self._signal.shape[0], dtype=u.dtype, device=device(u))
        return self.inner.update(inner, seen) + _CELL * place


class ExcitedBudget:
    """A meso law whose theta follows a known signal about an operating point; the timer is the place in the signal.

    Parameters
    ----------
    config : PruningConfig
        The rule under which pages are pruned.
    theta_nats : float
        Operating point, nats.
    signal : FloatArray, shape (P,)
        Nats; ``theta_nats`` plus signal must not be negative.
    rng : numpy.random.Generator
        Where each request enters the signal.
    """

    def __init__(self, config: PruningConfig, theta_nats: float, signal: FloatArray, rng: np.random.Generator) -> None:
        self.config, self._theta, self._rng = config, theta_nats + signal, rng
        if self._theta.min() < 0:
            raise BadInputError(
                "the budget would become negative",
                field="amplitude",
                value=float(np.abs(signal).max()),
                allowed=f"<= theta = {theta_nats:g} nats",
            )

    def start(self) -> tuple[float, int]:
        """Return (theta, place) of one new request."""
        theta, place = self.starts(1)
        return float(theta[0]), int(place[0])

    def starts(self, n: int) -> tuple[FloatArray, IntArray]:
        """Return (theta, place), each (n,), of ``n`` new requests."""
        place = self._rng.integers(0, self._theta.shape[0], n)
        return self._theta[place], place

    def update(self, theta: Array, timer: Array, model_entropy: Array) -> tuple[Array, Array]:  # noqa: ARG002
        """Return the next (theta, place), whatever was observed."""
        place = (timer + 1) % self._theta.shape[0]
        return self._theta[place], place
