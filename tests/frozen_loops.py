"""Many frozen loops at once for tests: logits of a few levels, the shipped law, any number of updates a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from proofs.search.gain import equilibrium_tail_mass
from proofs.vmax import two_level

Array = np.ndarray


def moments(log_p: Array, counts: Array) -> tuple[Array, Array]:
    """Return (entropy, varentropy) of normalised log-probabilities (..., L) with multiplicities (..., L), nats."""
    mass = counts * np.exp(log_p)
    mean = (mass * log_p).sum(-1)
    return -mean, (mass * (log_p - mean[..., None]) ** 2).sum(-1)


def normalised(gaps: Array, counts: Array) -> Array:
    """Return log-probabilities of logits (..., L), each ``counts`` times."""
    top = gaps.max(-1, keepdims=True)
    return gaps - top - np.log((counts * np.exp(gaps - top)).sum(-1, keepdims=True))


@dataclass(frozen=True)
class Levels:
    """Logits ``gaps`` (M, L), each ``counts`` (M, L) times; the equilibrium is at ``at`` (M,)."""

    gaps: Array
    counts: Array
    at: Array

    def entropy(self, u: Array) -> Array:
        """Tempered entropy at u (M,), nats."""
        return moments(normalised(self.gaps * np.exp(-u)[:, None], self.counts), self.counts)[0]


def random_levels(rng: np.random.Generator, n: int, target: float, low: float, high: float, size: int) -> Levels:
    """Draw logits over n tokens, scaled so that their entropy is ``target`` at a random u between the clamps.

    A third is near the two-level logits that attain V_max(n; H*); in the others a few tokens stand out at random.
    """
    levels = 5
    counts = np.zeros((size, levels))
    for row in counts:
        cuts = np.exp(rng.uniform(0, math.log(n), levels - 1)).astype(int)
        cuts[0] = int(math.exp(0.9 * target * rng.random()))  # ties at the top: fewer than the target needs
        row[:-1] = np.minimum(cuts, max(1, n // levels))
        row[:-1] = np.where(np.cumsum(row[:-1]) < n, row[:-1], 0)
        row[-1] = n - row[:-1].sum()
    gaps = rng.exponential(1.0, (size, levels)).cumsum(1)[:, ::-1].copy()
    near = rng.random(size) < 1 / 3
    gaps[near] = 1e-3 * rng.random((int(near.sum()), levels))
    gaps[near, 0] = 1.0
    counts[near, -1] += counts[near, 0] - 1
    counts[near, 0] = 1
    # log-scale by bisection: entropy rises with the temperature
    cold, hot = np.full(size, -20.0), np.full(size, 20.0)
    for _ in range(80):
        middle = (cold + hot) / 2
        below = moments(normalised(gaps * np.exp(-middle)[:, None], counts), counts)[0] < target
        cold, hot = np.where(below, middle, cold), np.where(below, hot, middle)
    at = rng.uniform(low, high, size)
    met = np.abs(moments(normalised(gaps * np.exp(-cold)[:, None], counts), counts)[0] - target) < 1e-6
    scaled = Levels(gaps * np.exp(at - cold)[:, None], counts, at)
    return Levels(scaled.gaps[met], scaled.counts[met], at[met])


def two_levels(n: int, target: float, at: Array) -> Levels:
    """Return the two-level logits of entropy ``target`` at each u in ``at``."""
    tail = equilibrium_tail_mass(n, target)
    assert tail is not None
    logit = math.log1p(-tail) - math.log(tail) + math.log(n - 1)
    gaps = np.stack([logit * np.exp(at), np.zeros_like(at)], axis=1)
    return Levels(gaps, np.broadcast_to([1.0, n - 1.0], gaps.shape), at)


def largest_target(n: int) -> float:
    """Return the largest target whose V_max(n; H*) is known to be the two-level one, by bisection in floats."""
    c = math.log(n - 1)

    def known(x: float) -> bool:
        entropy, varentropy = two_level(n, 1 / (1 + math.exp(x)))
        return varentropy + ((x + c) * math.tanh(x / 2) - 2) * (math.log(n) - entropy) >= 0

    low, high = -0.8 * c, 0.0  # not at the uniform distribution itself, which meets its own tangent
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if known(middle) else (middle, high)
    return two_level(n, 1 / (1 + math.exp(high)))[0] if n > 2 else math.log(2)


def sharp_varentropy(n: int, target: float) -> float:
    """Return V_max(n; H*) for a target up to :func:`largest_target`, in floats."""
    tail = equilibrium_tail_mass(n, target)
    assert tail is not None
    return two_level(n, tail)[1]


def run(
    law: Any, plant: Levels, u: Array, steps: int, *, lag: int = 0, updates: Callable[[int, Array], Array] | None = None
) -> Array:
    """Return u (steps + 1, M): every step updates row i ``updates(t, u)[i]`` times, from entropies seen at one u."""
    history = [u]
    late = np.full(u.shape, np.nan)  # the shipped law keeps u while it sees NaN
    for t in range(steps):
        seen = plant.entropy(u)
        many = np.ones(u.shape, int) if updates is None else updates(t, u)
        for j in range(int(many.max())):
            entropy, late = (seen, late) if lag == 0 else (late, np.where(j < many, seen, late))
            u = np.where(j < many, law.update(u, entropy), u)
        history.append(u)
    return np.stack(history)


def settled(u: Array, floor: float = 1e-9) -> Array:
    """Return which columns die down: swings late in the run well below those in its middle, gone, or all one way."""
    moves = np.diff(u, axis=0)
    steps, late = np.abs(moves), moves[-100:]
    half = steps.shape[0] // 2
    middle, end = steps[half : half + 20].max(0), steps[-20:].max(0)
    return (end <= floor) | (end < 0.9 * middle) | (late >= 0).all(0) | (late <= 0).all(0)
