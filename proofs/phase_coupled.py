r"""The phase portrait of the coupled loop in the plane of u = ln T and the budget theta: both shipped laws.

On frozen logits: tempered entropy H(u) + rho theta, model entropy h = h0 + s (v - u*) + r theta, never below 0, where v
is the u under which the token before was sampled: temperature reaches the model entropy through the text, a token later
(section 12 of the proof book). rho, r, s are the assumptions' (taken positive), h0 is a free level: the middle of the
budget's band unless it is given. The budget narrows at once and widens only after ``widen_after`` tokens that each ask
for more, so (u, theta) is the state up to v and that timer. Trajectories start, and the field is drawn, with v = u, as
if the text were of this temperature. The field shows the step of a row whose timer is about to run out, and of one
whose timer was reset. Source: ours (the specification's section 7 with the shipped laws, in their order).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.laws import budget
from entropic_ctl.temperature import feedback
from proofs.check import Assumptions
from proofs.phase_scene import Scene

__all__ = ["Coupled", "coupled"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Coupled:
    """Tables of one portrait.

    Parameters
    ----------
    trajectories : dict
        ``start``, ``token``, ``u``, ``theta``, ``timer``, ``tempered``, ``model`` (nats).
    field : dict
        ``u``, ``theta`` and the step there: ``du``, ``widening`` (timer about to run out), ``holding`` (reset).
    curves : dict
        ``curve`` (``settled budget``: theta that asks for itself; ``target``: the tempered entropy is H*), ``u``,
        ``theta``.
    level_nats : float
        h0.
    band : (float, float) or None
        The u at which the model entropy leaves the budget's band on either side, at the middle budget; None if it
        does not depend on u.
    """

    trajectories: dict[str, npt.NDArray[Any]]
    field: dict[str, npt.NDArray[Any]]
    curves: dict[str, npt.NDArray[Any]]
    level_nats: float
    band: tuple[float, float] | None


def coupled(
    config: RunConfig, scene: Scene, assumptions: Assumptions, *, level_nats: float | None = None, tokens: int = 120
) -> Coupled:
    """Return the portrait.

    Parameters
    ----------
    config : RunConfig
        With the ``budget`` law and two different budgets; its gain and observation lag are used.
    scene : Scene
        Plant of the temperature loop, with an equilibrium.
    assumptions : Assumptions
        ``rho``, ``r`` and ``s``.
    level_nats : float, optional
        Model entropy at the equilibrium with theta = 0.
    tokens : int
        Length of the trajectories.

    Raises
    ------
    BadInputError
        If theta is constant, or the clamps cannot reach the target.
    """
    law, pruning, lag = scene.law, config.loop.pruning, config.engine.observation_lag
    b = pruning.config
    if pruning.name != "budget" or b.theta_nats == b.theta_wide_nats:
        raise BadInputError("theta is constant: nothing is coupled", field="loop.pruning.law", value=pruning.name)
    if scene.at is None:
        raise BadInputError("the clamps cannot reach the target", field="target_nats", value=law.target_nats)
    rho, r, s, at = assumptions.rho, assumptions.r, assumptions.s, scene.at
    level = (b.entropy_low_nats + b.entropy_high_nats) / 2 if level_nats is None else level_nats
    if not 0.0 <= level <= 100.0:
        raise BadInputError("not an entropy", field="model entropy", value=level, allowed="[0, 100] nats")

    def tempered(u: FloatArray, theta: FloatArray) -> FloatArray:
        return np.maximum(scene.plant(u) + rho * theta, 0.0)

    def model(before: FloatArray, theta: FloatArray) -> FloatArray:
        return np.maximum(level + s * (before - at) + r * theta, 0.0)

    thermostat, meso = feedback.build(law), budget.Budget(b)
    low, high = math.log(law.t_min), math.log(law.t_max)
    narrow, wide = b.theta_nats, b.theta_wide_nats
    spots = [(x, y) for y in (0.0, 1.0) for x in (0.05, 0.35, 0.65, 0.95)] + [(0.2, 0.5), (0.8, 0.5)]
    u = np.array([low + x * (high - low) for x, _ in spots])
    theta, timer = np.array([narrow + y * (wide - narrow) for _, y in spots]), np.zeros(len(spots), np.int64)
    rows, seen, before = [], [], u
    for token in range(tokens + 1):
        seen.append((tempered(u, theta), model(before, theta)))
        rows.append((np.full(u.shape, token), u, theta, timer, *seen[-1]))
        before = u
        if token >= lag:
            late_tempered, late_model = seen[token - lag]
            u = np.asarray(thermostat.update(u, late_tempered), np.float64)
            theta, timer = (np.asarray(part) for part in meso.update(theta, timer, late_model))
    names = ("token", "u", "theta", "timer", "tempered", "model")
    trajectories = {name: np.stack([row[i] for row in rows]).ravel() for i, name in enumerate(names)}
    trajectories["start"] = np.tile(np.arange(len(spots)), tokens + 1)

    gu, gt = (part.ravel() for part in np.meshgrid(np.linspace(low, high, 19), np.linspace(narrow, wide, 13)))
    here, there = tempered(gu, gt), model(gu, gt)
    ready = np.full(gu.shape, b.widen_after - 1, np.int64)
    field = {
        "u": gu,
        "theta": gt,
        "du": np.asarray(thermostat.update(gu, here), np.float64) - gu,
        "widening": np.asarray(meso.update(gt, ready, there)[0], np.float64) - gt,
        "holding": np.asarray(meso.update(gt, np.zeros_like(ready), there)[0], np.float64) - gt,
    }
    line = np.linspace(low, high, 201)
    settled = np.full(line.shape, narrow)
    for _ in range(400):  # slopes |g r| below 1 contract; halving helps where they do not
        settled = 0.5 * settled + 0.5 * np.asarray(meso.wanted(model(line, settled)), np.float64)
    levels = np.linspace(narrow, wide, 41)
    reach = tempered(np.tile(line, 41), np.repeat(levels, 201)).reshape(41, 201)
    meets = np.array([np.interp(law.target_nats, row, line) for row in reach])
    curves = {
        "curve": np.array(["settled budget"] * 201 + ["target"] * 41),
        "u": np.concatenate((line, meets)),
        "theta": np.concatenate((settled, levels)),
    }
    band = None
    if s > 0.0:
        middle = level + r * (narrow + wide) / 2
        band = (at + (b.entropy_low_nats - middle) / s, at + (b.entropy_high_nats - middle) / s)
    return Coupled(trajectories, field, curves, level, band)
