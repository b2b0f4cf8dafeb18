"""The phase portrait as a table: the shipped law in closed loop with one frozen distribution. Computes, never draws.

A *plant* maps u = ln T to the tempered entropy of fixed logits; the loop is the shipped ``update`` and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.errors import BadInputError
from entropic_ctl.temperature import feedback
from entropic_ctl.temperature.base import TemperatureLaw
from proofs.check import gain_ceiling
from proofs.vmax import maximum

__all__ = ["Plant", "grid_plant", "logits_plant", "portrait", "sharp_portrait", "trajectory", "two_level_plant"]

Plant = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
"""u = ln T, shape (M,) -> tempered entropy in nats, shape (M,)."""


def logits_plant(logits: npt.ArrayLike) -> Plant:
    """Return the plant of one logit vector, shape (n,); -inf entries are outside the support.

    Raises
    ------
    BadInputError
        If nothing is left to sample from, or a logit is NaN or +inf.
    """
    z = np.asarray(logits, np.float64).ravel()
    if np.isnan(z).any() or np.isposinf(z).any() or not np.isfinite(z).any():
        raise BadInputError("not a distribution", field="logits", allowed="finite or -inf, at least one finite")
    gap = z[np.isfinite(z)] - z.max()

    def entropy(u: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        scaled = gap * np.exp(-np.asarray(u))[:, None]
        weight = np.exp(scaled)
        total = weight.sum(axis=1)
        result: npt.NDArray[np.float64] = np.log(total) - (weight * scaled).sum(axis=1) / total
        return result

    return entropy


def two_level_plant(n: int, logit: float) -> Plant:
    """Return the plant of logits (L, 0, ..., 0) over n tokens in closed form, for any n."""

    def entropy(u: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        gap = logit * np.exp(-np.asarray(u))
        rest = (n - 1) * np.exp(-gap)  # relative to the top token's weight 1
        result: npt.NDArray[np.float64] = np.log1p(rest) + rest / (1.0 + rest) * gap
        return result

    return entropy


def grid_plant(temperatures: npt.ArrayLike, entropies: npt.ArrayLike) -> Plant:
    """Return a recorded plant: entropies (G,) on increasing temperatures (G,), linear in ln T (a bank's step)."""
    at, known = np.log(np.asarray(temperatures, np.float64)), np.asarray(entropies, np.float64)
    if at.ndim != 1 or at.shape != known.shape or at.shape[0] < 2 or (np.diff(at) <= 0).any():
        raise BadInputError("not increasing, or of different lengths", field="temperatures", allowed="at least 2")
    return lambda u: np.interp(u, at, known)


def trajectory(
    law: TemperatureLaw, plant: Plant, starts: npt.ArrayLike, steps: int, *, lag: int = 0
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Run the shipped law on a frozen plant.

    Parameters
    ----------
    law : TemperatureLaw
    plant : Plant
    starts : array_like, shape (S,)
        Initial u.
    steps : int
        Accepted tokens.
    lag : int
        Age in tokens of the entropy an update sees; until one that old exists, u stays.

    Returns
    -------
    u, entropy : float64, each (steps + 1, S)
    """
    u = np.asarray(starts, np.float64)
    history, seen = [u], [plant(u)]
    for t in range(steps):
        u = np.asarray(law.update(u, seen[t - lag]), np.float64) if t >= lag else u
        history.append(u)
        seen.append(plant(u))
    return np.stack(history), np.stack(seen)


def portrait(
    arms: Mapping[str, feedback.Config], plant: Plant, starts: Sequence[float], steps: int, *, lag: int = 0
) -> dict[str, npt.NDArray[Any]]:
    """Return trajectories of several settings from several starts as one long table.

    Parameters
    ----------
    arms : mapping of str to feedback.Config
    plant : callable
        Tempered entropy as a function of u.
    starts : sequence of float
        Initial u.
    steps : int
    lag : int
        Observation lag.

    Returns
    -------
    dict of str to ndarray, each (len(arms) * S * (steps + 1),)
        ``arm`` (its name), ``gain``, ``start`` (index), ``step``, ``u``, ``temperature``, ``entropy`` and ``error``
        (H - H*), nats.
    """
    parts: dict[str, list[npt.NDArray[Any]]] = {
        name: [] for name in ("arm", "gain", "start", "step", "u", "temperature", "entropy", "error")
    }
    shape = (len(starts), steps + 1)
    for name, config in arms.items():
        u, entropy = (part.T for part in trajectory(feedback.build(config), plant, starts, steps, lag=lag))
        columns = {
            "arm": np.full(shape, name, dtype=object),
            "gain": np.full(shape, config.gain),
            "start": np.broadcast_to(np.arange(shape[0])[:, None], shape),
            "step": np.broadcast_to(np.arange(shape[1]), shape),
            "u": u,
            "temperature": np.exp(u),
            "entropy": entropy,
            "error": entropy - config.target_nats,
        }
        for key, column in columns.items():
            parts[key].append(column.ravel())
    table = {key: np.concatenate(column) for key, column in parts.items()}
    table["arm"] = table["arm"].astype(str)
    return table


def sharp_portrait(
    n: int,
    *,
    factors: Sequence[float] = (0.5, 0.95, 1.2),
    starts: Sequence[float] = (-1.0, -0.4, 0.02, 0.4, 1.0),
    steps: int = 60,
    lag: int = 0,
) -> dict[str, npt.NDArray[Any]]:
    """Return the portrait on the sharpest logits of a vocabulary: settles below the certified limit, cycles above it.

    The plant is (L, 0, ..., 0) of maximal varentropy with equilibrium u = 0; the gains are ``factors`` times the
    largest certified gain; linear error, no rate limit, clamps T in [0.1, 10]. Arms are named like ``0.95 x limit``.

    Parameters
    ----------
    n : int
        Vocabulary size.
    factors, starts : sequence of float
        Gains in units of the certified limit; initial u.
    steps, lag : int
        Iterations, and the observation lag.
    """
    best = maximum(n)
    limit = gain_ceiling(n, lag, best.bracket())
    arms = {
        f"{factor:g} x limit": feedback.Config(
            temperature=1.0, t_min=0.1, t_max=10.0, target_nats=best.entropy_nats, gain=factor * limit, rate_limit=0.0
        )
        for factor in factors
    }
    if any(not math.log(0.1) <= start <= math.log(10.0) for start in starts):
        raise BadInputError("a start outside the clamps", field="starts", value=list(starts), allowed="[-2.30, 2.30]")
    return portrait(arms, two_level_plant(n, best.logit), starts, steps, lag=lag)
