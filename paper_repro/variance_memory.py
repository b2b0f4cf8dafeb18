"""How much memory the entropy of a text has, and the largest cut of its variance that any gain could make of it.

Theory (:func:`proofs.theory.stationary_ratio`) gives the variance ratio from autocorrelations and the first two moments
of V: what a text allows is its minimum over all gains, or over the certified ones. A minimum over g can find something
in white noise too, so each text is compared with its own entropies in random order. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from entropic_ctl.signals import FloatArray
from paper_repro.variance_readings import autocorrelations
from paper_repro.variance_texts import Texts
from proofs.theory import small_gain_slope

__all__ = ["SHUFFLES", "best", "memory"]

SHUFFLES = 100
_GRID = np.concatenate([np.geomspace(2e-3, 0.2, 60, endpoint=False), np.linspace(0.2, 1.95, 71)])


def best(series: Sequence[FloatArray], *, noise: float = 1.0, most: float = 2.0) -> tuple[FloatArray, FloatArray]:
    """Return the least ratio over g in (0, ``most``) of each series, and where; (1, 0) if no gain helps.

    Parameters
    ----------
    series : sequence of B arrays of one length
    noise : float
        E[V^2] / E[V]^2 >= 1; 1 is a constant V.
    most : float
        Upper limit of g = k E[V]; g E[V^2] / E[V]^2 < 2 holds besides.
    """
    grid = _GRID[(most > _GRID) & (noise * _GRID < 2.0)]
    r = np.stack([autocorrelations(s) for s in series])
    discounted = r @ ((1.0 - grid[:, None]) ** np.arange(r.shape[1])).T
    noisy = noise * grid
    ratio = 1.0 + noisy * (1.0 + 2.0 * (1.0 - grid) * discounted) / (2.0 - noisy) - 2.0 * grid * discounted
    ratio, grid = np.pad(ratio, ((0, 0), (1, 0)), constant_values=1.0), np.concatenate([[0.0], grid])
    at = ratio.argmin(axis=1)
    return ratio[np.arange(at.shape[0]), at], grid[at]


def _initial_sum(r: FloatArray) -> float:
    """Return the sum of r_1, r_2, ... up to the first pair r_(2i) + r_(2i+1) that is not positive (Geyer 1992).

    (All sample autocorrelations about the sample mean always sum to -1/2, so the sum has to stop somewhere.)
    """
    pairs = np.concatenate([[1.0], r])
    pairs = pairs[: 2 * (pairs.shape[0] // 2)].reshape(-1, 2).sum(1)
    stop = np.flatnonzero(pairs <= 0)
    return float(pairs[: stop[0] if stop.size else None].sum()) - 1.0


def memory(texts: Texts, source: str, *, gain: float, certified: float, seed: int) -> dict[str, np.ndarray]:
    """Return one row per text: moments, autocorrelations, and what the best gain could do.

    Parameters
    ----------
    texts : Texts
        Each is judged at the temperature that sampled it.
    source : str
        What the column ``source`` says.
    gain : float
        k of the discounted sum.
    certified : float
        Supremum of the gains that are certified for every distribution.
    seed : int
        Of the random orders.
    """
    entropy, varentropy = (texts.split(part) for part in texts.at_start())
    rows: list[dict[str, Any]] = []
    for i, (h, v) in enumerate(zip(entropy, varentropy, strict=True)):
        rng = np.random.default_rng([seed, 2, i])
        r, mean_v = autocorrelations(h), float(v.mean())
        noise = float((v**2).mean()) / mean_v**2 if mean_v > 0 else 1.0
        least, at = best([h], noise=noise)
        constant, _ = best([h])
        within, _ = best([h], noise=noise, most=certified * mean_v)
        shuffled, _ = best([rng.permutation(h) for _ in range(SHUFFLES)])
        g = min(gain * mean_v, 1.0)
        rows.append(
            {
                "source": source,
                "text": texts.name[i],
                "kind": texts.kind[i],
                "temperature": texts.temperature,
                "tokens": h.shape[0],
                "entropy_mean": float(h.mean()),
                "entropy_variance": float(h.var()),
                "varentropy_mean": mean_v,
                "varentropy_noise": noise,
                "correlation_H_V": _correlation(h, v),
                "r1": float(r[0]),
                "sum_initial": _initial_sum(r),
                "sum_discounted": float(((1.0 - g) ** np.arange(r.shape[0])) @ r),
                "small_gain_slope": small_gain_slope([_initial_sum(r)]),
                "best_ratio": float(least[0]),
                "best_g": float(at[0]),
                "best_ratio_constant_v": float(constant[0]),
                "best_ratio_certified": float(within[0]),
                "shuffled_ratio_5": float(np.percentile(shuffled, 5)),
            }
        )
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _correlation(a: FloatArray, b: FloatArray) -> float:
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else 0.0
