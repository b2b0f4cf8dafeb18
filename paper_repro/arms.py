"""The arms of the ablation: the baseline, each law alone, all three."""

from __future__ import annotations

import dataclasses

from entropic_ctl.config import LawSpec, LoopConfig, RunConfig
from paper_repro.claims import ARMS

__all__ = ["TABLE_OF", "arms", "with_loop", "with_seed"]

TABLE_OF = {"sampling only": "temperature", "scheduling only": "scheduling", "attention only": "pruning"}
"""Arm to the loop table it switches on."""


def arms(full: LoopConfig, baseline: LoopConfig | None = None) -> dict[str, LoopConfig]:
    """Return one loop per arm: ``baseline`` with none, one or all of the laws of ``full``.

    The default baseline is the paper's standard inference: the starting temperature of ``full`` held fixed, dense
    attention, first come first served.
    """
    if baseline is None:
        baseline = standard(full)
    out = {ARMS[0]: baseline}
    for arm, table in TABLE_OF.items():
        out[arm] = dataclasses.replace(baseline, **{table: getattr(full, table)})
    out[ARMS[-1]] = full
    return {arm: out[arm] for arm in ARMS}


def standard(full: LoopConfig) -> LoopConfig:
    """Return standard inference at the starting temperature and clamps of ``full``."""
    plain = LoopConfig()
    own = full.temperature.config
    fixed = type(plain.temperature.config)(temperature=own.temperature, t_min=own.t_min, t_max=own.t_max)
    return dataclasses.replace(plain, temperature=LawSpec(plain.temperature.name, fixed))


def with_loop(config: RunConfig, loop: LoopConfig) -> RunConfig:
    """Return ``config`` running ``loop``."""
    return dataclasses.replace(config, loop=loop)


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    """Return ``config`` with another root seed."""
    return dataclasses.replace(config, seed=seed)
