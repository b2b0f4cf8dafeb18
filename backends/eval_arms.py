"""The arms of a quality comparison: dense attention at a fixed temperature, and what is measured against it.

Every arm sees the same texts, prompts and seeds. One arm is a control: a budget of a millionth of a nat, which can lose
nothing that matters but is computed in another order. Its distance from dense is that of rounding alone, which in
bfloat16 is not small; what an arm shows beyond it is the arm's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from entropic_ctl import registry
from entropic_ctl.config import LAWS, LawSpec, LoopConfig, RunConfig, SpeculationConfig, digest, resolve
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig

__all__ = ["CONTROL", "DENSE", "LOOP", "Arm", "arms_of", "settings_of"]

DENSE, CONTROL, LOOP = "dense", "rounding", "loop"
_CONTROL_NATS = 1e-6


@dataclass(frozen=True)
class Arm:
    """One setting under test.

    Parameters
    ----------
    name : str
        ``dense``, ``rounding`` (the control), ``loop`` (the laws of the config) or ``theta X``.
    config : RunConfig
        Its ``loop`` is what runs; everything else is common to the arms.
    """

    name: str
    config: RunConfig

    @property
    def fixed_temperature(self) -> bool:
        """True if no law moves the temperature."""
        return self.config.loop.temperature.name == "fixed"


def _law(table: str, name: str, **values: Any) -> LawSpec:
    return LawSpec(name, registry.load(LAWS[table][0], name).Config(**values))


def _constant(config: RunConfig, theta: float | None) -> RunConfig:
    """Return ``config`` at its starting temperature, held, and at one budget (None: dense); protected pages stay."""
    loop = config.loop
    start, low, high = (getattr(loop.temperature.config, name) for name in ("temperature", "t_min", "t_max"))
    shared = {field.name: getattr(loop.pruning.config, field.name) for field in dataclasses.fields(PruningConfig)}
    if theta is None:
        pruning = _law("pruning", "off", **shared)
    else:
        pruning = _law("pruning", "budget", theta_nats=theta, theta_wide_nats=theta, **shared)
    laws = LoopConfig(
        temperature=_law("temperature", "fixed", temperature=start, t_min=low, t_max=high),
        pruning=pruning,
        scheduling=_law("scheduling", "fcfs"),
    )
    return dataclasses.replace(config, loop=laws, speculation=SpeculationConfig())


def arms_of(config: RunConfig, thetas: Sequence[float], *, loop: bool) -> tuple[Arm, ...]:
    """Return the arms: dense, its control, the configured loop, one per constant budget.

    Parameters
    ----------
    config : RunConfig
    thetas : sequence of float
        Constant budgets, nats, each in [0, 10]; repeated ones count once.
    loop : bool
        Whether the laws of ``config`` are an arm of their own.

    Raises
    ------
    BadInputError
        If a budget is outside its range, or nothing is left to compare with dense.
    """
    for theta in thetas:
        if not 0.0 <= theta <= 10.0:
            raise BadInputError("not a budget", field="theta", value=theta, allowed="[0, 10] nats")
    if not thetas and not loop:
        raise BadInputError(
            "nothing to compare with dense", field="theta", remedy="pass --theta, or a config whose laws do something"
        )
    dense = _constant(config, None)
    found = [Arm(DENSE, dense), Arm(CONTROL, _constant(config, _CONTROL_NATS))]
    if loop:
        found.append(Arm(LOOP, config))
    found += [Arm(f"theta {theta:g}", _constant(config, theta)) for theta in sorted(set(thetas))]
    return tuple(found)


def settings_of(arms: Sequence[Arm]) -> dict[str, str]:
    """Return a digest of each arm's configuration, for the settings that kept parts belong to.

    Parameters
    ----------
    arms : sequence of Arm
    """
    return {arm.name: digest(resolve(arm.config)) for arm in arms}
