r"""Entropy against temperature, H(T) and V(T) of one step, as a random function of the model entropy h.

On the grid and T = 1 (where H = h is known) a curve is a chain of shares: going down from 1, H_i = H_{i+1} r_i; going
up, ln n - H_i = (ln n - H_{i-1}) r_i, with every r in (0, 1) and n the vocabulary. So whatever the r, entropy increases
with T, stays in [0, ln n] and passes through h. The varentropy at a grid point is the mean of the two secant slopes
beside it times a positive factor, so V >= 0 and V follows dH/du.

logit r and the logarithm of the factors are a vector y of normal variables given h and the sampling temperature:
in each of a few bins of x(h), a mean linear in x, u = ln T and u^2, a few principal components of the residuals, and
independent rests. Curves of successive tokens are independent given h. All of it is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["Curves", "draw_curves", "fit_curves"]

_SLOPES = 1e-5
"""Entropy (nats) below which half-precision tables say nothing about shares and slopes."""
_BOUND = 12.0
_TERMS = 4


@dataclass(frozen=True)
class Curves:
    """Parameters; B bins of x, D components of y, M principal components; float64.

    ``edges``: (B - 1,); ``mean``: (B, 4, D), coefficients of 1, x, u, u^2; ``loadings``: (B, M, D); ``rest``: (B, D),
    standard deviations.
    """

    edges: FloatArray
    mean: FloatArray
    loadings: FloatArray
    rest: FloatArray


def _axis(grid: FloatArray) -> tuple[FloatArray, IntArray, int]:
    """Return (ln T of the chain's points, which of them are grid points, index of T = 1)."""
    u: FloatArray = np.log(grid)
    at = int(np.searchsorted(u, 0.0))
    near = [i for i in (at - 1, at) if 0 <= i < u.shape[0] and abs(u[i]) < 1e-9]
    if near:
        return u, np.arange(u.shape[0], dtype=np.int64), near[0]
    chain = np.insert(u, at, 0.0)
    return chain, np.delete(np.arange(chain.shape[0], dtype=np.int64), at), at


def _secants(u: FloatArray, h: FloatArray) -> FloatArray:
    """Return, for each point, the mean of the secant slopes beside it, (N, P)."""
    slope = np.diff(h, axis=1) / np.diff(u)
    padded = np.concatenate((slope[:, :1], slope, slope[:, -1:]), axis=1)
    mean: FloatArray = 0.5 * (padded[:, 1:] + padded[:, :-1])
    return mean


def _encode(grid: FloatArray, h: FloatArray, table: FloatArray, slopes: FloatArray, top: float) -> FloatArray:
    """Return y (N, D); NaN where the tables cannot tell."""
    u, points, one = _axis(grid)
    chain = np.empty((h.shape[0], u.shape[0]))
    chain[:, points] = table
    chain[:, one] = h
    below, above = chain[:, :one], chain[:, one + 1 :]
    with np.errstate(divide="ignore", invalid="ignore"):
        down = below / chain[:, 1 : one + 1]
        up = (top - above) / (top - chain[:, one:-1])
        down[chain[:, 1 : one + 1] < _SLOPES] = np.nan
        share = np.concatenate((down, up), axis=1)
        mean = _secants(u, chain)[:, points]
        factor = np.log(slopes / mean)
        factor[mean < _SLOPES] = np.nan
        y = np.concatenate((np.log(share / (1.0 - share)), factor), axis=1)
    y[np.isnan(share).nonzero()] = np.nan
    return np.where(np.isnan(y), np.nan, np.clip(y, -_BOUND, _BOUND))


def _design(x: FloatArray, u: FloatArray) -> FloatArray:
    return np.stack((np.ones_like(x), x, u, u * u), axis=1)


def fit_curves(
    grid: FloatArray,
    *,
    model_entropy: FloatArray,
    table: FloatArray,
    slopes: FloatArray,
    x: FloatArray,
    u: FloatArray,
    vocab_size: int,
    bins: int = 8,
    components: int = 3,
) -> Curves:
    """Fit the curves of a bank's tokens.

    Parameters
    ----------
    grid : FloatArray, shape (G,)
    model_entropy : FloatArray, shape (N,)
    table, slopes : FloatArray, shape (N, G)
        Tempered entropy and varentropy.
    x, u : FloatArray, shape (N,)
        Transformed model entropy; ln of the sampling temperature.
    vocab_size : int
    bins, components : int
    """
    y = _encode(grid, model_entropy, table, slopes, float(np.log(vocab_size)))
    edges = np.unique(np.quantile(x, np.arange(1, bins) / bins))
    where, size = np.searchsorted(edges, x, side="right"), y.shape[1]
    count = edges.shape[0] + 1
    components = min(components, size)
    mean, loadings, rest = np.zeros((count, _TERMS, size)), np.zeros((count, components, size)), np.zeros((count, size))
    for b in range(count):
        inside = where == b
        z = y[inside]
        known = ~np.isnan(z)
        centre = np.where(known.any(axis=0), np.nanmean(np.where(known.any(axis=0), z, 0.0), axis=0), 0.0)
        z = np.where(known, z, centre)
        design = _design(x[inside], u[inside])
        gram = design.T @ design + 1e-6 * z.shape[0] * np.eye(_TERMS)
        mean[b] = np.linalg.solve(gram, design.T @ z)
        residual = z - design @ mean[b]
        _, scale, axes = np.linalg.svd(residual / np.sqrt(max(1, z.shape[0])), full_matrices=False)
        kept = min(components, scale.shape[0])
        loadings[b, :kept] = scale[:kept, None] * axes[:kept]
        rest[b] = np.sqrt(np.maximum((residual**2).mean(axis=0) - (loadings[b] ** 2).sum(axis=0), 0.0))
    return Curves(edges, mean, loadings, rest)


def draw_curves(
    curves: Curves,
    grid: FloatArray,
    *,
    model_entropy: FloatArray,
    x: FloatArray,
    u: FloatArray,
    vocab_size: int,
    rng: np.random.Generator,
) -> tuple[FloatArray, FloatArray]:
    """Draw the curves of some tokens.

    Parameters
    ----------
    curves : Curves
    grid, model_entropy, x, u, vocab_size
        As in :func:`fit_curves`.
    rng : Generator

    Returns
    -------
    entropy, varentropy : FloatArray, each shape (N, G)
        Nats, nats squared.
    """
    chain_u, points, one = _axis(grid)
    where = np.searchsorted(curves.edges, x, side="right")
    scores = rng.standard_normal((x.shape[0], curves.loadings.shape[1]))
    y = rng.standard_normal((x.shape[0], curves.rest.shape[1]))
    for b in range(curves.mean.shape[0]):
        at = np.flatnonzero(where == b)
        design = _design(x[at], u[at])
        y[at] = design @ curves.mean[b] + scores[at] @ curves.loadings[b] + y[at] * curves.rest[b]
    y = np.clip(y, -_BOUND, _BOUND)
    shares = 1.0 / (1.0 + np.exp(-y[:, : chain_u.shape[0] - 1]))
    top = float(np.log(vocab_size))
    h = np.empty((x.shape[0], chain_u.shape[0]))
    h[:, one] = np.minimum(model_entropy, top)
    for i in range(one - 1, -1, -1):
        h[:, i] = h[:, i + 1] * shares[:, i]
    for i in range(one + 1, chain_u.shape[0]):
        h[:, i] = top - (top - h[:, i - 1]) * shares[:, i - 1]
    v = _secants(chain_u, h)[:, points] * np.exp(y[:, chain_u.shape[0] - 1 :])
    return h[:, points], v
