r"""The phase portrait of *this config's* temperature loop: its shipped law on frozen logits, at several gains and lags.

Plants (all frozen): ``target``, two-level logits (L, 0, ..., 0) whose equilibrium at the config's target lies in the
middle of its clamps, the steepest there are for that target; ``sharpest``, the two-level logits of largest varentropy,
with the target set to *their* entropy; ``recorded``, a recorded step on its grid of temperatures. Arms are the config's
gain and fractions of the linear limit 2 sin(pi / (4 d + 2)) / V at this equilibrium. Source: ours.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.temperature import feedback
from proofs.phase import Plant, grid_plant, portrait, trajectory, two_level_plant
from proofs.search import certify
from proofs.search.gain import equilibrium_tail_mass
from proofs.theory import delay_limit
from proofs.vmax import maximum, two_level, two_level_logit

__all__ = ["FACTORS", "PLANTS", "Scene", "arms_of", "scene", "study"]

PLANTS = ("target", "sharpest", "recorded")
FACTORS = (0.5, 0.95, 1.2)
"""Gains of the arms besides the config's, in units of the linear limit."""

_LONG = (3000, 30_000)
"""Tokens after which trajectories must have come to rest; the second where the first did not do."""

_NEAR = 0.01
"""Distance in u from where it ends, below which a trajectory counts as arrived."""

_REST = 1e-4
"""Range of u, over 64 tokens, and distance from the equilibrium, below which a trajectory is at rest."""


@dataclass(frozen=True)
class Scene:
    """A frozen plant and the law that runs on it.

    Parameters
    ----------
    law : feedback.Config
        The config's, with the target of the scene.
    plant : Plant
    what : str
        In words.
    at : float or None
        u of the equilibrium; None if the clamps cannot reach the target.
    varentropy : float or None
        Slope of the plant there, nats squared.
    """

    law: feedback.Config
    plant: Plant
    what: str
    at: float | None
    varentropy: float | None

    def limit(self, lag: int) -> float | None:
        """Return the gain at which the equilibrium starts to repel, None where there is no equilibrium or slope."""
        return delay_limit(lag) / self.varentropy if self.varentropy else None


def scene(
    config: RunConfig,
    vocab_size: int,
    kind: str = "target",
    recorded: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
) -> Scene:
    """Return the plant ``kind`` for a config.

    Parameters
    ----------
    config : RunConfig
        With the ``feedback`` law and clamps apart.
    vocab_size : int
    kind : str
        One of :data:`PLANTS`.
    recorded : (array_like, array_like), optional
        Temperatures and tempered entropies of a recorded step, each (G,).

    Raises
    ------
    BadInputError
        For another law or plant, equal clamps, or a target that no two-level logits have.
    """
    law = config.loop.temperature
    if law.name != "feedback":
        raise BadInputError(
            "the law carries no state: on frozen logits it does not move",
            field="loop.temperature.law",
            value=law.name,
            allowed="feedback",
        )
    c: feedback.Config = law.config
    if c.t_min == c.t_max:
        raise BadInputError("both clamps are equal: nothing moves", field="loop.temperature.t_min", value=c.t_min)
    middle = math.sqrt(c.t_min * c.t_max)
    if kind == "sharpest":
        best = maximum(vocab_size)
        aimed = dataclasses.replace(c, target_nats=best.entropy_nats)
        what = f"sharpest logits of {vocab_size:,} tokens"
        return Scene(aimed, two_level_plant(vocab_size, middle * best.logit), what, math.log(middle), float(best.lower))
    if kind == "target":
        r = equilibrium_tail_mass(vocab_size, c.target_nats)
        if r is None:
            raise BadInputError(
                "no logits of this vocabulary have the target entropy",
                field="loop.temperature.target_nats",
                value=c.target_nats,
                allowed=f"(0, ln {vocab_size}) = (0, {math.log(vocab_size):.4g})",
                remedy="choose another --plant",
            )
        logit = middle * two_level_logit(vocab_size, r)
        what = f"two-level logits of {vocab_size:,} tokens at the target"
        return Scene(c, two_level_plant(vocab_size, logit), what, math.log(middle), two_level(vocab_size, r)[1])
    if kind != "recorded" or recorded is None:
        raise BadInputError("no such plant", field="plant", value=kind, allowed=", ".join(PLANTS))
    plant = grid_plant(*recorded)
    at = _equilibrium(plant, c)
    slope = None
    if at is not None:
        near = plant(np.array([at - 1e-6, at + 1e-6]))
        slope = float(near[1] - near[0]) / 2e-6
    return Scene(c, plant, "a recorded step", at, slope)


def _equilibrium(plant: Plant, c: feedback.Config) -> float | None:
    """Return u between the clamps with the target entropy, by bisection; None if they cannot reach it."""
    low, high = math.log(c.t_min), math.log(c.t_max)
    ends = plant(np.array([low, high])) - c.target_nats
    if not ends[0] < 0.0 < ends[1]:
        return None
    for _ in range(100):
        middle = (low + high) / 2
        if plant(np.array([middle]))[0] < c.target_nats:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def arms_of(scene: Scene, gain: float, lag: int, gains: Sequence[float] = ()) -> dict[str, feedback.Config]:
    """Return the arms of a portrait by name: the config's gain, then ``gains``, or :data:`FACTORS` times the limit.

    Parameters
    ----------
    scene : Scene
    gain : float
        The config's.
    lag : int
    gains : sequence of float
    """
    limit = scene.limit(lag)
    wanted = {f"k = {gain:.4g} (config)": gain}
    if gains:
        wanted |= {f"k = {value:.4g}": value for value in gains}
    elif limit is not None:
        reach = ((factor, factor * limit) for factor in FACTORS if factor * limit <= 10.0)  # the largest k a law takes
        wanted |= {f"{factor:g} x limit, k = {value:.4g}": value for factor, value in reach}
    return {name: dataclasses.replace(scene.law, gain=value) for name, value in wanted.items()}


def _settles(law: feedback.Config, plant: Plant, starts: Sequence[float], lag: int) -> dict[str, Any]:
    """Say what trajectories do in the end: half the range of the last 64 tokens, its period, the share at a clamp."""
    for steps in _LONG:
        path = trajectory(feedback.build(law), plant, starts, steps, lag=lag)[0]
        u, tail = path[-128:], path[-64:]
        amplitude = float(np.ptp(tail, axis=0).max() / 2)
        clamped = (tail <= math.log(law.t_min) + 1e-9) | (tail >= math.log(law.t_max) - 1e-9)
        period, still = 0, amplitude <= _REST
        if not still:
            period = next((q for q in range(1, 65) if np.abs(u[q:] - u[:-q]).max() < 1e-6), 0)
        apart = float(np.ptp(tail[-1]))
        settles = still and (apart <= _REST or amplitude < 1e-12 or bool(clamped.all()))  # else they creep together
        if settles or period:
            break
    moving = np.flatnonzero(np.abs(path - path[-1]).max(axis=1) > _NEAR)
    if law.gain == 0.0:
        settles, ends = False, "stays where it starts"
    elif settles:
        by = 1 + int(moving[-1]) if moving.size else 0
        ends = "at a clamp" if clamped.all() else "settles" if apart <= _REST else "stands still, not in one place,"
        ends += f" by token {by:,}"
    else:
        ends = f"cycles, period {period}" if period else "still moving"
    return {
        "settles": settles,
        "amplitude": amplitude,
        "period": period,
        "at_clamp": float(np.mean(clamped)),
        "ends": ends,
        "tokens": steps,
    }


def study(
    config: RunConfig,
    vocab_size: int,
    scene: Scene,
    *,
    gains: Sequence[float] = (),
    lags: Sequence[int] = (0, 1),
    tokens: int = 60,
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[Any]], list[dict[str, Any]]]:
    """Run every arm at every lag.

    Parameters
    ----------
    config : RunConfig
    vocab_size : int
    scene : Scene
    gains : sequence of float
        In place of fractions of the limit; any sign.
    lags : sequence of int
        Observation lags, 0 or 1.
    tokens : int
        Length of the trajectories.

    Returns
    -------
    trajectories, map : dict of str to ndarray
        As :func:`proofs.phase.portrait` with a column ``lag``; and, by arm, the update of each u that sees its own
        entropy.
    findings : list of dict
        Per lag and arm: ``gain``, ``loop_gain``, the checker's ``status`` and ``theorem`` for that gain, and what
        the trajectories do in the end (``settles``, ``amplitude``, ``period``, ``at_clamp``; in words ``ends``) after
        ``tokens`` tokens. All that settle end at one point, or at clamps.
    """
    low, high = math.log(scene.law.t_min), math.log(scene.law.t_max)
    starts = [low + share * (high - low) for share in (0.0, 0.25, 0.45, 0.6, 0.8, 1.0)]
    if scene.at is not None:
        starts[3] = min(high, scene.at + 0.02)
    grid = np.linspace(low, high, 401)
    tables, maps, findings, drawn = [], [], [], set()
    for lag in lags:
        arms = arms_of(scene, config.loop.temperature.config.gain, lag, gains)
        table = portrait(arms, scene.plant, starts, tokens, lag=lag)
        tables.append({"lag": np.full(table["u"].shape, lag), **table})
        for name, law in arms.items():
            after = np.asarray(feedback.build(law).update(grid, scene.plant(grid)), np.float64)
            if name not in drawn:
                maps.append({"arm": np.full(grid.shape, name), "u": grid, "next": after})
            drawn.add(name)
            verdict = certify(_with(config, law, lag), vocab_size)
            findings.append(
                {
                    "lag": lag,
                    "arm": name,
                    "gain": law.gain,
                    "loop_gain": None if scene.varentropy is None else law.gain * scene.varentropy,
                    "status": verdict.status,
                    "theorem": verdict.theorem,
                    **_settles(law, scene.plant, starts, lag),
                }
            )
    stacked = ({name: np.concatenate([part[name] for part in parts]) for name in parts[0]} for parts in (tables, maps))
    return next(stacked), next(stacked), findings


def _with(config: RunConfig, law: feedback.Config, lag: int) -> RunConfig:
    temperature = dataclasses.replace(config.loop.temperature, config=law)
    return dataclasses.replace(
        config,
        loop=dataclasses.replace(config.loop, temperature=temperature),
        engine=dataclasses.replace(config.engine, observation_lag=lag),
    )
