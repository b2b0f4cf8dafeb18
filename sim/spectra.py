r"""Frequency response and coherence from many short records, with bounds that say how far they can be trusted.

Every record (one request) is cut into overlapping segments, each detrended by its mean and tapered with a Hann window;
cross-spectra are averaged over all segments of all records (Welch 1967). With excitation r, input u and output y,

    G = S_ry / S_ru,        coherence = |S_ry|^2 / (S_rr S_yy).

In open loop r is u and G is the classical H1 estimate. In closed loop u carries the output's noise and H1 would be
biased towards -1/controller; r does not, so the ratio stays consistent (joint input-output with external excitation).

Bounds. The error of G is S_re / S_ru with e = y - G u, and with n independent segments

    |G_hat - G|^2 <= F(2, 2n - 2; level) S_rr S_ee / ((n - 1) |S_ru|^2)

(Bendat and Piersol, Random Data, ch. 9, whose open-loop case r = u is F (1 - coherence) S_yy / ((n - 1) S_uu)).
Unrelated noise gives a coherence above 1 - (1 - level)^(1 / (n - 1)) with probability 1 - level. Overlapping segments
are not independent: n is the number that would give the same variance under the window's correlation (Welch's formula).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import fdtri

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray

__all__ = ["FrequencyResponse", "frequency_response"]


@dataclass(frozen=True)
class FrequencyResponse:
    """Estimates at F frequencies; 0 and 1/2 are left out (the mean is removed, and 1/2 has half the data).

    Parameters
    ----------
    frequency : FloatArray, shape (F,)
        Cycles per token, in (0, 1/2).
    response : complex128, shape (F,)
        G, output units per input unit.
    radius : FloatArray, shape (F,)
        |G_hat - G| stays below it with probability ``level``, at each frequency.
    coherence : FloatArray, shape (F,)
        Between excitation and output, in [0, 1].
    coherence_floor : float
        What unrelated noise exceeds with probability 1 - ``level``.
    segments : float
        Equivalent number of independent segments n.
    level : float
    """

    frequency: FloatArray
    response: npt.NDArray[np.complex128]
    radius: FloatArray
    coherence: FloatArray
    coherence_floor: float
    segments: float
    level: float

    def table(self) -> dict[str, FloatArray]:
        """Return columns: frequency, real, imag, gain, gain_low, gain_high, phase_deg, phase_error_deg, coherence."""
        gain = np.abs(self.response)
        angle = np.degrees(np.arcsin(np.minimum(1.0, self.radius / np.maximum(gain, 1e-300))))
        return {
            "frequency": self.frequency,
            "real": self.response.real,
            "imag": self.response.imag,
            "gain": gain,
            "gain_low": np.maximum(gain - self.radius, 0.0),
            "gain_high": gain + self.radius,
            "phase_deg": np.degrees(np.angle(self.response)),
            "phase_error_deg": np.where(self.radius >= gain, 180.0, angle),
            "coherence": self.coherence,
            "coherence_floor": np.full(gain.shape, self.coherence_floor),
        }


def _independent(window: FloatArray, hop: int, count: int) -> float:
    """Return how many independent segments have the variance of ``count`` overlapping ones (white noise)."""
    n = window.shape[0]
    power = float(np.sum(window**2))
    excess = 0.0
    for j in range(1, min(count, -(-n // hop))):
        shared = float(np.sum(window[: n - j * hop] * window[j * hop :])) / power
        excess += 2.0 * (1.0 - j / count) * shared * shared
    return count / (1.0 + excess)


def frequency_response(
    excitation: Sequence[FloatArray],
    inputs: Sequence[FloatArray],
    outputs: Sequence[FloatArray],
    *,
    segment: int = 64,
    level: float = 0.95,
) -> FrequencyResponse:
    """Estimate G from records of several requests.

    Parameters
    ----------
    excitation, inputs, outputs : sequences of FloatArray
        One array per request, the three of a request equally long; requests shorter than ``segment`` are left out.
        Pass the inputs as excitation for an open loop.
    segment : int
        Tokens per segment, even, >= 8; the resolution is 1 / ``segment`` cycles per token, half of it overlaps.
    level : float
        Confidence of the bounds, in (0, 1).

    Raises
    ------
    BadInputError
        If fewer than 3 segments fit, records differ in length, or the excitation has no power at some frequency.
    """
    if segment < 8 or segment % 2:
        raise BadInputError("not a segment", field="segment", value=segment, allowed="even, >= 8 tokens")
    if not 0.0 < level < 1.0:
        raise BadInputError("not a confidence level", field="level", value=level, allowed="(0, 1)")
    window, hop = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(segment) / segment), segment // 2
    sums = np.zeros((6, segment // 2 + 1), np.complex128)
    independent = 0.0
    for record, (r, u, y) in enumerate(zip(excitation, inputs, outputs, strict=True)):
        if not r.shape == u.shape == y.shape:
            raise BadInputError("records differ in length", where=f"record {record}", value=[len(r), len(u), len(y)])
        count = (r.shape[0] - segment) // hop + 1
        if count < 1:
            continue
        cuts = np.stack([r, u, y])[:, np.arange(count)[:, None] * hop + np.arange(segment)]  # (3, count, segment)
        cuts = (cuts - cuts.mean(-1, keepdims=True)) * window
        R, U, Y = np.fft.rfft(cuts, axis=-1)
        sums += np.stack(
            [(a.conj() * b).sum(0) for a, b in ((R, R), (U, U), (Y, Y), (R, U), (R, Y), (U, Y))]  # S_ab = E conj(A) B
        )
        independent += _independent(window, hop, count)
    if independent < 3.0:
        raise BadInputError(
            "too little data for a frequency response",
            field="segments",
            value=round(independent, 2),
            allowed=">= 3 independent segments",
            remedy="more requests, longer ones, or a shorter segment",
        )
    inner = slice(1, segment // 2)
    rr, uu, yy, ru, ry, uy = sums[:, inner]
    if (rr.real <= 0).any() or (np.abs(ru) ** 2 <= 1e-24 * rr.real * uu.real).any():
        raise BadInputError(
            "the excitation has no power at some frequency", field="excitation", remedy="choose a prbs or a multisine"
        )
    response = ry / ru
    error = yy.real + np.abs(response) ** 2 * uu.real - 2.0 * (response.conj() * uy).real  # S_ee of e = y - G u
    quantile = float(fdtri(2.0, 2.0 * (independent - 1.0), level))
    radius = np.sqrt(quantile * rr.real * np.maximum(error, 0.0) / (independent - 1.0)) / np.abs(ru)
    coherence = np.abs(ry) ** 2 / np.maximum(rr.real * yy.real, 1e-300)
    return FrequencyResponse(
        frequency=np.arange(1, segment // 2) / segment,
        response=response,
        radius=radius,
        coherence=np.minimum(coherence, 1.0),
        coherence_floor=1.0 - (1.0 - level) ** (1.0 / (independent - 1.0)),
        segments=independent,
        level=level,
    )
