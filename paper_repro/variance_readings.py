"""What "entropy variance" can mean, as ratios to fixed T with intervals over texts; the prediction of linear theory.

Everything is computed from three numbers per text: mean, variance about that mean, and length; measured series and
theory alike give them, so both go through the same readings. Texts are drawn anew with replacement, the same draws for
arm, baseline and prediction (paired bootstrap). Source: ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropic_ctl.signals import FloatArray, IntArray
from proofs.theory import stationary_ratio
from sim.intervals import Effect

__all__ = [
    "READINGS",
    "Moments",
    "autocorrelations",
    "draws",
    "effect",
    "gains",
    "gap",
    "moments",
    "predict",
    "ratios",
]

READINGS: Mapping[str, str] = {
    "within, mean": "in each text, about its own mean",
    "within, target": "in each text, about H*",
    "pooled, mean": "all tokens of all texts, about their common mean",
    "typical text": "geometric mean over texts of each one's ratio, about its own mean",
}
"""About H*, pooled and per text are the same number."""


@dataclass(frozen=True)
class Moments:
    """Mean (nats), variance about it (nats squared) and length of each text, each shape (B,)."""

    mean: FloatArray
    variance: FloatArray
    length: FloatArray


def moments(series: Sequence[FloatArray]) -> Moments:
    """Return the moments of measured series."""
    return Moments(
        np.array([s.mean() for s in series]),
        np.array([s.var() for s in series]),
        np.array([float(s.shape[0]) for s in series]),
    )


def autocorrelations(series: FloatArray) -> FloatArray:
    """Return r_1, r_2, ... about the sample mean, each sum divided by the length; 0 for a constant series."""
    w = np.asarray(series, float) - np.mean(series)
    n, power = w.shape[0], float(w @ w)
    if power == 0.0:
        return np.zeros(n - 1)
    spectrum = np.abs(np.fft.rfft(w, 2 * n)) ** 2
    covariance: FloatArray = np.fft.irfft(spectrum)[1:n]
    return covariance / power


def gains(varentropy: FloatArray, gain: float) -> tuple[float, float]:
    """Return g = k E[V] and G = k E[V^2] / E[V] of one text."""
    mean = float(np.mean(varentropy))
    return gain * mean, gain * float(np.mean(varentropy**2)) / mean if mean > 0 else 0.0


def predict(law: Any, entropy: Sequence[FloatArray], varentropy: Sequence[FloatArray], targets: FloatArray) -> Moments:
    """Return what linear theory says of each text under a law, from the text at T0 alone.

    ``feedback``: the variance is multiplied by :func:`proofs.theory.stationary_ratio` of the measured
    autocorrelations and V moments (infinite where k E[V^2] / E[V] >= 2), the mean goes to H*. ``damped`` and ``solve``
    (f = 1): the distance to H* is multiplied by 1 - f.

    Parameters
    ----------
    law : LawSpec
    entropy, varentropy : sequence of B arrays
        At T0, by text.
    targets : FloatArray, shape (B,)
        H*, nats.
    """
    base = moments(entropy)
    if law.name != "feedback":
        left = 1.0 - getattr(law.config, "fraction", 1.0)
        return Moments(targets + left * (base.mean - targets), left**2 * base.variance, base.length)
    factor = np.ones(targets.shape[0])
    for i, (h, v) in enumerate(zip(entropy, varentropy, strict=True)):
        g, noisy = gains(v, law.config.gain)
        if 0.0 < g < 2.0 and noisy < 2.0:
            factor[i] = stationary_ratio(autocorrelations(h).tolist(), g, noisy)
        elif g > 0:
            factor[i] = np.inf
    return Moments(targets.copy(), factor * base.variance, base.length)


def draws(texts: int, count: int, seed: int) -> IntArray:
    """Return how often each text is drawn: the texts themselves once each, then ``count`` bootstrap draws."""
    rng = np.random.default_rng([seed, texts])
    again = rng.multinomial(texts, np.full(texts, 1.0 / texts), size=count)
    return np.concatenate([np.ones((1, texts), np.int64), again])


def ratios(arm: Moments, base: Moments, targets: FloatArray, drawn: IntArray) -> dict[str, FloatArray]:
    """Return each reading's ratio arm / base for every draw, shape (D,); see :data:`READINGS`.

    Parameters
    ----------
    arm, base : Moments
    targets : FloatArray, shape (B,)
    drawn : IntArray, shape (D, B)
        From :func:`draws`.
    """

    def within(m: Moments) -> FloatArray:
        return _mean(m.variance, m.length, drawn)

    def about(m: Moments) -> FloatArray:
        return _mean(m.variance + (m.mean - targets) ** 2, m.length, drawn)

    def pooled(m: Moments) -> FloatArray:
        return _mean(m.variance + m.mean**2, m.length, drawn) - _mean(m.mean, m.length, drawn) ** 2

    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(arm.variance) - np.log(base.variance)
        out = {
            "within, mean": within(arm) / within(base),
            "within, target": about(arm) / about(base),
            "pooled, mean": pooled(arm) / pooled(base),
        }
    usable = np.isfinite(logs)
    weight = drawn[:, usable] if usable.any() else np.zeros((drawn.shape[0], 0))
    count = weight.sum(1)
    typical = np.full(drawn.shape[0], np.nan)
    typical[count > 0] = np.exp((weight @ logs[usable])[count > 0] / count[count > 0])
    if np.isneginf(logs).all():
        typical[:] = 0.0
    out["typical text"] = typical
    return out


def _mean(values: FloatArray, length: FloatArray, drawn: IntArray) -> FloatArray:
    weight = drawn * length
    return (weight @ values) / weight.sum(1)


def effect(found: FloatArray, texts: int, *, level: float = 0.95) -> Effect:
    """Return the first entry with the percentile interval of the others, as an effect over ``texts`` pairs."""
    rest = found[1:][np.isfinite(found[1:])]
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(rest, (tail, 100.0 - tail)) if rest.size else (np.nan, np.nan)
    return Effect(float(found[0]), float(low), float(high), texts, identical=False)


def gap(measured: FloatArray, predicted: FloatArray, texts: int) -> Effect:
    """Return measured - predicted with its paired interval."""
    with np.errstate(invalid="ignore"):
        return effect(measured - predicted, texts)
