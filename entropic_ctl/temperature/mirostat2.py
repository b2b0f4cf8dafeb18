"""Baseline: the controller of Mirostat v2 (Basu et al. 2021) with temperature as its actuator.

    T_t: H_t(T_t) = mu_t (or the nearer clamp),   mu+ = clip(mu - eta (H_t(T_t) - tau), 0, mu_max),   mu_0 = 2 tau

The original keeps the tokens whose surprise -ln p is at most mu, draws one, and feeds *its* surprise S back:
mu+ = mu - eta (S - tau). A law of this framework sets a temperature, here and in a simulator whose tokens have no
identity, so two things are replaced *(ours)*, and results are those of this law, not of the original sampler:

- the actuator. Truncation at mu leaves a distribution whose mean surprise is at most mu; here T makes it mu where the
  clamps allow. tau, mu and eta keep their meaning and unit (nats; llama.cpp counts bits: its tau = 5 is 3.466 nats).
- the observation. H_t(T_t) is the expectation of S given the text so far; S is H plus noise of variance V. Feeding back
  the expectation keeps the mean behaviour and drops the noise.

What differs from ``solve``: the error is remembered. Steps that cannot reach tau (confident ones) raise mu, and later
steps pay it back, so the *average* surprise over a text is held at tau, not that of each step. Anti-windup *(ours)*:
mu stays in [0, mu_max], the original lets it grow without limit.

Integral action, hence not certified by default. H_t as a function of mu is mu cut to what the clamps can reach, so its
slope is 0 or 1 and for 0 < eta < 2 at lag 0 two states fed the same logits come apart by no more than the solver's
tolerance per step; but the proof book has no theorem on this law, so the verdict is ``unknown`` and a loop that runs it
must say ``uncertified``. With the state ln T in place of mu the law is :mod:`feedback`, phi linear and k = eta.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from entropic_ctl import fields
from entropic_ctl.arrays import clip, namespace
from entropic_ctl.signals import Array, LogitView
from entropic_ctl.temperature import solve
from entropic_ctl.temperature.base import TemperatureLaw, clamped_temperature

__all__ = ["Config", "Mirostat2", "build"]


@dataclass(frozen=True)
class Config(solve.Config):
    """The parameters of ``solve`` (``target_nats`` is tau) and of the controller."""

    learning_rate: float = fields.number(0.1, 0.0, 10.0, "eta: change of mu per nat of error", open_lo=True)
    mu_max_nats: float = fields.number(10.0, 0.0, 100.0, "mu_max: upper limit of mu, nats")


class Mirostat2:
    """T with H(T) = mu; mu integrates the error of the tempered entropy about tau. The state is mu, not ln T."""

    integral_action: ClassVar[bool] = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def start(self) -> float:
        """Return mu_0 = 2 tau, cut to its limit, nats."""
        return min(2.0 * self.config.target_nats, self.config.mu_max_nats)

    def temper(self, u: Array, view: LogitView) -> tuple[Array, Array, Array]:
        """Return (T, tempered entropy, varentropy) at H(T) = mu.

        Parameters
        ----------
        u : array, shape (M,)
            State mu, nats.
        view : LogitView
        """
        start = namespace(u).full_like(u, self.config.u_start)
        solution, entropy, varentropy = solve.solve_u(start, view, self.config, target=u)
        return clamped_temperature(solution, self.config), entropy, varentropy

    def update(self, u: Array, tempered_entropy: Array) -> Array:
        """Return the next mu; an entry whose entropy is NaN keeps its mu.

        Parameters
        ----------
        u : array, shape (M,)
            State mu, nats.
        tempered_entropy : array, shape (M,), nats
            Entropy at the temperature that sampled the accepted token.
        """
        xp, config = namespace(u), self.config
        change = -config.learning_rate * (xp.astype(tempered_entropy, u.dtype, copy=False) - config.target_nats)
        return xp.where(xp.isnan(change), u, clip(u + change, 0.0, config.mu_max_nats))


def build(config: Config) -> TemperatureLaw:
    """Return the law."""
    return Mirostat2(config)
