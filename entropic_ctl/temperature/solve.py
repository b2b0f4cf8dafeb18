"""Same-step micro law *(ours)*: the temperature at which *this* step's distribution has entropy H*.

H(u) of softmax(z / exp u) is non-decreasing in u with slope V(u), the varentropy, so the root of H(u) = H* is unique
wherever V > 0. Newton steps act on ln H, whose slope is V / H and which is closer to a straight line than H (a fifth
fewer evaluations on real logits); a bracket that starts as the clamps makes them safe:

- a step that leaves the bracket goes to the clamp if that clamp was never evaluated, else to the middle;
- a step that failed to halve the error is followed by a bisection;
- after :data:`NEWTON_EVALUATIONS` evaluations (real logits take 5 to 10) only bisections follow, a clamp that was never
  evaluated first, so at most ceil(log2(V_max ln(T_max / T_min) / tolerance)) + 1 are left (theorem ``solve``);
- a target outside [H(T_min), H(T_max)] (below ln of the number of tied maxima, say) ends at the nearer clamp.

No state: every step starts from the base u0 = ln T0, so the result depends on the current distribution alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from entropic_ctl import fields
from entropic_ctl.arrays import clip, namespace
from entropic_ctl.signals import Array, LogitView
from entropic_ctl.temperature.base import Stateless, TemperatureConfig, TemperatureLaw, clamped_temperature

__all__ = ["NEWTON_EVALUATIONS", "Config", "Solve", "build", "solve_u"]

NEWTON_EVALUATIONS = 16
"""Evaluations of a distribution after which Newton steps are given up and the bracket is bisected."""


@dataclass(frozen=True)
class Config(TemperatureConfig):
    """Target and stopping rule of the solver."""

    target_nats: float = fields.number(1.5, 0.0, 20.0, "H*: tempered entropy to hold, nats")
    tolerance_nats: float = fields.number(1e-5, 1e-12, 1.0, "stop when |H - H*| is at most this")
    max_iterations: int = fields.integer(64, 1, 1000, "bound on evaluations of the distribution per step")


def solve_u(u: Array, view: LogitView, config: Config, *, target: Array | None = None) -> tuple[Array, Array, Array]:
    """Return (u, H, V) with H(u) = H* within the tolerance, or u at the nearer clamp.

    Parameters
    ----------
    u : array, shape (M,)
        Starting point (moved inside the clamps). A row whose entropy is NaN stays there.
    view : LogitView
        The step's own distributions.
    config : Config
        Target, clamps, tolerance and iteration bound.
    target : array, shape (M,), optional
        A target for each row, nats, instead of that of ``config``.

    Returns
    -------
    u, tempered_entropy, varentropy : arrays, shape (M,), dtype of ``u``
        The last evaluated point of each row.
    """
    xp = namespace(u)
    u_min, u_max = math.log(config.t_min), math.log(config.t_max)
    wanted = config.target_nats if target is None else target
    goal = max(config.target_nats, 1e-30) if target is None else clip(target, 1e-30, math.inf)
    low, high = xp.full_like(u, u_min), xp.full_like(u, u_max)
    low_seen, high_seen = xp.zeros_like(u, dtype=xp.bool), xp.zeros_like(u, dtype=xp.bool)
    previous = xp.full_like(u, xp.inf)
    u = clip(u, u_min, u_max)
    for evaluated in range(1, config.max_iterations + 1):
        H, V = view.at(clamped_temperature(u, config))
        H, V = xp.astype(H, u.dtype, copy=False), xp.astype(V, u.dtype, copy=False)
        error = H - wanted
        size = xp.abs(error)
        below, above = error < 0, error > 0
        low, low_seen = xp.where(below, u, low), low_seen | below
        high, high_seen = xp.where(above, u, high), high_seen | above
        active = (size > config.tolerance_nats) & (high - low > 1e-14 * xp.clip(xp.abs(u), 1.0, None))
        if evaluated == config.max_iterations or not bool(xp.any(active)):
            break
        excess = xp.log(xp.clip(H, 1e-30, None) / goal) * H
        newton = u - xp.where(active, excess, 0.0) / xp.clip(V, 1e-30, None)
        middle = 0.5 * (low + high)
        proposal = xp.where(size > 0.5 * previous, middle, newton)
        if evaluated >= NEWTON_EVALUATIONS:  # out of the bracket: to the clamp not yet seen, else to the middle
            proposal = xp.where(low_seen, xp.full_like(u, xp.inf), xp.full_like(u, -xp.inf))
        proposal = xp.where(proposal >= high, xp.where(high_seen, middle, high), proposal)
        proposal = xp.where(proposal <= low, xp.where(low_seen, middle, low), proposal)
        previous = xp.where(size > 0.5 * previous, xp.full_like(u, xp.inf), size)
        u = xp.where(active, proposal, u)
    return u, H, V


class Solve(Stateless):
    """T with H(T) = H* on the current distribution."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config

    def temper(self, u: Array, view: LogitView) -> tuple[Array, Array, Array]:
        """Return (T, tempered entropy, varentropy) at the solution."""
        u, H, V = solve_u(u, view, self.config)
        return clamped_temperature(u, self.config), H, V


def build(config: Config) -> TemperatureLaw:
    """Return the law."""
    return Solve(config)
