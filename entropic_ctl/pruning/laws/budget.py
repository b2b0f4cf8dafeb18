"""The information-loss budget, wide while the model is sure and narrow while it is not.

Let h be the last observed model entropy. The law asks for

    want(h) = narrow + (wide - narrow) * clip((high - h) / (high - low), 0, 1)      nats,

narrows to it at once, and widens to it only after ``widen_after`` consecutive steps that each asked for more than the
budget in force *(ours; the paper's threshold is not published)*. A level band alone has no dwell time: an entropy
that hops across it makes the budget chatter. The timer gives one: two widenings are at least ``widen_after`` steps
apart, whatever the entropy does.

Loss is convex in theta, so at equal pages read a *constant* budget beats a strong modulation; the default is gentle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entropic_ctl import fields
from entropic_ctl.arrays import clip, namespace
from entropic_ctl.compiled import compiled
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig, PruningLaw
from entropic_ctl.signals import Array, FloatArray, IntArray

__all__ = ["Budget", "Config", "build"]


@dataclass(frozen=True)
class Config(PruningConfig):
    """Parameters of the budget; equal ``theta_nats`` and ``theta_wide_nats`` make it constant."""

    theta_nats: float = fields.number(0.02, 0.0, 10.0, "narrow budget per query head and step, nats; 0 is dense")
    theta_wide_nats: float = fields.number(0.03, 0.0, 10.0, "wide budget, nats, >= theta_nats")
    entropy_low_nats: float = fields.number(0.5, 0.0, 100.0, "model entropy at or below which the wide budget is asked")
    entropy_high_nats: float = fields.number(3.0, 0.0, 100.0, "model entropy from which the narrow budget is asked")
    widen_after: int = fields.integer(4, 1, 10**6, "d: consecutive steps that must ask for wider before it widens")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.theta_wide_nats < self.theta_nats:
            raise BadInputError(
                "the wide budget is below the narrow one",
                field="theta_wide_nats",
                value=self.theta_wide_nats,
                allowed=f">= theta_nats = {self.theta_nats:g}",
                remedy="set both to the same value for a constant budget",
            )
        if self.entropy_high_nats <= self.entropy_low_nats:
            raise BadInputError(
                "the entropy band is empty",
                field="entropy_high_nats",
                value=self.entropy_high_nats,
                allowed=f"> entropy_low_nats = {self.entropy_low_nats:g}",
            )


@compiled
def _step(
    theta: FloatArray, timer: IntArray, entropy: FloatArray, narrow: float, wide: float, low: float, high: float, d: int
) -> tuple[FloatArray, IntArray]:
    """Twin of :meth:`Budget.update`."""
    budget, count = np.empty_like(theta), np.empty_like(timer)
    for i in range(theta.shape[0]):
        sure = (high - entropy[i]) / (high - low)
        sure = 0.0 if np.isnan(sure) else min(max(sure, 0.0), 1.0)
        want = min(max(narrow + (wide - narrow) * sure, narrow), wide)
        n = timer[i] + 1 if want > theta[i] else 0
        widen = n >= d
        budget[i] = want if want < theta[i] or widen else theta[i]
        count[i] = 0 if widen else n
    return budget, count


class Budget:
    """Element-wise law with state (theta, timer); runs unchanged on NumPy arrays and torch tensors."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def start(self) -> tuple[float, int]:
        """Return (narrow, 0): nothing has been observed yet."""
        return self.config.theta_nats, 0

    def wanted(self, model_entropy: Array) -> Array:
        """Return the budget this entropy asks for, nats; NaN (no observation) asks for the narrow one.

        Parameters
        ----------
        model_entropy : array, any shape, float
            Entropy of the raw logits, nats.
        """
        c, xp = self.config, namespace(model_entropy)
        sure = (c.entropy_high_nats - model_entropy) / (c.entropy_high_nats - c.entropy_low_nats)
        sure = xp.where(xp.isnan(sure), xp.zeros_like(sure), clip(sure, 0.0, 1.0))
        return clip(c.theta_nats + (c.theta_wide_nats - c.theta_nats) * sure, c.theta_nats, c.theta_wide_nats)

    def update(self, theta: Array, timer: Array, model_entropy: Array) -> tuple[Array, Array]:
        """Return the next (theta, timer) after one accepted token.

        Parameters
        ----------
        theta : array, shape (R,), float
            Budget in force, nats.
        timer : array, shape (R,), integer
            Consecutive steps so far that asked for more than ``theta``.
        model_entropy : array, shape (R,), float
            Model entropy of the token just accepted, nats.
        """
        c = self.config
        if _step is not None and type(theta) is np.ndarray:
            band = c.entropy_low_nats, c.entropy_high_nats
            return _step(theta, timer, model_entropy, c.theta_nats, c.theta_wide_nats, *band, c.widen_after)
        xp = namespace(theta)
        want = self.wanted(model_entropy)
        timer = xp.where(want > theta, timer + 1, xp.zeros_like(timer))
        widen = timer >= c.widen_after
        theta = xp.where((want < theta) | widen, want, theta)
        return theta, xp.where(widen, xp.zeros_like(timer), timer)


def build(config: Config) -> PruningLaw:
    """Return the law."""
    return Budget(config)
