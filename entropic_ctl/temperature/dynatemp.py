"""Baseline: the dynamic temperature of koboldcpp and llama.cpp ("dynatemp").

    T = T_min + (T_max - T_min) (H / H_max)^a,   H_max = ln(number of tokens with non-zero probability)

H is the entropy at temperature 1 of the distribution that is tempered (penalties and masks applied). The more uncertain
the step, the higher T: the **opposite sign** of the paper's feedback. No target, no state, nothing to certify.

Variants: llama.cpp gives a middle and a half-range, T_min = temp - range (not below 0), T_max = temp + range; here they
are the clamps, and ``temperature`` only says whether requests are greedy. It runs after the truncating samplers, so
that H_max is the logarithm of the candidates they leave; here truncation follows the temperature (spec: order inside a
step), so H_max is that of the whole support, and H / H_max is smaller. One possible token (H_max = 0) gets T_min.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from entropic_ctl import fields
from entropic_ctl.arrays import clip, namespace
from entropic_ctl.signals import Array, LogitView
from entropic_ctl.temperature.base import Stateless, TemperatureConfig, TemperatureLaw

__all__ = ["Config", "Dynatemp", "build"]


@dataclass(frozen=True)
class Config(TemperatureConfig):
    """T runs between the clamps."""

    exponent: float = fields.number(1.0, 0.0, 100.0, "a: above 1 keeps T low until H is near its maximum", open_lo=True)


class Dynatemp(Stateless):
    """T between the clamps by the relative entropy of the step."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config

    def temper(self, u: Array, view: LogitView) -> tuple[Array, Array, Array]:
        """Return (T, tempered entropy, varentropy); a NaN entropy stays NaN."""
        xp, config = namespace(u), self.config
        entropy, _ = view.at(xp.ones_like(u))
        most, _ = view.at(xp.full_like(u, math.inf))
        entropy, most = xp.astype(entropy, u.dtype, copy=False), xp.astype(most, u.dtype, copy=False)
        share = clip(entropy / clip(most, 1e-30, math.inf), 0.0, 1.0) ** config.exponent
        temperature = clip(config.t_min + (config.t_max - config.t_min) * share, config.t_min, config.t_max)
        return temperature, *view.at(temperature)


def build(config: Config) -> TemperatureLaw:
    """Return the law."""
    return Dynatemp(config)
