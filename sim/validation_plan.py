"""What a validation runs: a calibration load, a different validation load, and settings fixed in advance.

*Calibration*: short blocks that sweep what a step's time depends on: rows in a batch, contexts from 16 to 2,000 tokens,
prefill chunks, budgets, temperature laws. Prompts are log-uniform, arrivals come in bursts of several sizes.

*Validation*: one Poisson trace with log-normal prompts and uniform output lengths, the same requests in every run.
Twelve settings of the controller run it at one arrival rate; the first of them also runs it at other rates, given as
utilisations: rate times the makespan per request when everybody arrives at once, as the calibrated simulator has it.

Both are pure functions of a seed. All of it is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from entropic_ctl.config import RunConfig, from_mapping, resolve
from entropic_ctl.signals import FloatArray, IntArray
from sim.streams import stream

__all__ = [
    "BLOCK_KINDS",
    "SETTINGS",
    "UTILISATIONS",
    "Load",
    "Scale",
    "Setting",
    "blocks",
    "configure",
    "validation_load",
]

UTILISATIONS = (0.5, 0.8, 1.2)
"""Of the first setting; the twelve settings are compared at the middle one."""
_DOCUMENT_TOKENS = 20_000  # prompts start at a random place of the document's first tokens


@dataclass(frozen=True)
class Load:
    """A workload as columns of shape (N,).

    Parameters
    ----------
    arrival_s : FloatArray
        Seconds, non-decreasing, from 0.
    prompt_tokens, output_tokens : IntArray
    offset : IntArray
        Where each prompt starts in the document, tokens.
    """

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    offset: IntArray

    def faster(self, factor: float) -> Load:
        """Return the same requests at ``factor`` times the rate."""
        return Load(self.arrival_s / factor, self.prompt_tokens, self.output_tokens, self.offset)


@dataclass(frozen=True)
class Setting:
    """A controller setting: tables that replace those of the base configuration."""

    name: str
    loop: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """How large a validation is; the defaults suit SmolLM2-135M on two cores (about 15 minutes).

    Parameters
    ----------
    requests, repeats : int
        Of the validation load; runs of each setting.
    blocks, block_requests : int
        Calibration blocks (8 cover every law), requests in each.
    prompt_mean, prompt_cv, prompt_max : float, float, int
        Prompts of the validation load, tokens.
    output_range : (int, int)
        Tokens generated, both ends included.
    calibration_prompt_max : int
        Longest prompt of the calibration load, tokens.
    block_gap_s : float
        Mean time between arrivals in a block, after its burst.
    tries : int
        Of one run, disturbed ones included.
    """

    requests: int = 24
    repeats: int = 3
    blocks: int = 24
    block_requests: int = 12
    prompt_mean: float = 200.0
    prompt_cv: float = 0.7
    prompt_max: int = 1500
    output_range: tuple[int, int] = (12, 44)
    calibration_prompt_max: int = 2000
    block_gap_s: float = 0.5
    tries: int = 6


_THETA = {"law": "budget", "theta_nats": 0.02, "theta_wide_nats": 0.03}
_WIDE = {"law": "budget", "theta_nats": 0.1, "theta_wide_nats": 0.2}
_FEEDBACK = {"law": "feedback", "target_nats": 1.0, "gain": 0.02}
_SOLVE = {"law": "solve", "target_nats": 1.0}

SETTINGS = (
    Setting("base"),
    Setting("batch 4", engine={"max_batch": 4}),
    Setting("batch 2", engine={"max_batch": 2}),
    Setting("chunk 64", engine={"prefill_chunk": 64}),
    Setting("chunk 512", engine={"prefill_chunk": 512}),
    Setting("feedback", {"temperature": _FEEDBACK}),
    Setting("feedback, gain 0.04", {"temperature": _FEEDBACK | {"gain": 0.04}}),
    Setting("solve", {"temperature": _SOLVE}),
    Setting("prune 0.02", {"pruning": _THETA}),
    Setting("prune 0.1, batch 4", {"pruning": _WIDE}, {"max_batch": 4}),
    Setting("entropic order, batch 3", {"scheduling": {"policy": "entropic"}}, {"max_batch": 3}),
    Setting("full loop", {"temperature": _FEEDBACK, "pruning": _THETA, "scheduling": {"policy": "entropic"}}),
)
"""Fixed before anything was measured; some differ clearly, some hardly. The first is the base."""

BLOCK_KINDS: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = (
    ({}, {"prefill_chunk": 256}),
    ({"pruning": _THETA}, {"prefill_chunk": 256}),
    ({}, {"prefill_chunk": 64, "max_batch": 6}),
    ({"temperature": _SOLVE}, {"prefill_chunk": 256, "max_batch": 5}),
    ({}, {"prefill_chunk": 512, "max_batch": 4}),
    ({"pruning": _WIDE}, {"prefill_chunk": 128}),
    ({"temperature": _FEEDBACK}, {"prefill_chunk": 128, "max_batch": 7}),
    ({"temperature": _FEEDBACK, "pruning": _THETA}, {"prefill_chunk": 512, "max_batch": 3}),
)
"""(loop tables, engine tables) of calibration blocks, in turn: block i is of kind i modulo their number."""


def configure(base: RunConfig, setting: Setting, seed: int) -> RunConfig:
    """Return the base configuration with a setting's tables in place of its own, and ``seed``."""
    tables = resolve(base)
    for name, values in setting.loop.items():
        tables["loop"][name] = dict(values)
    tables["engine"] |= setting.engine
    return from_mapping(tables | {"seed": seed}, where=f"setting {setting.name!r}")


def blocks(seed: int, scale: Scale) -> list[tuple[Setting, Load]]:
    """Return the calibration load as (setting, load) of each block."""
    out = []
    for i in range(scale.blocks):
        rng = stream(seed, f"calibration {i}")
        n = scale.block_requests
        loop, engine = BLOCK_KINDS[i % len(BLOCK_KINDS)]
        high = np.log(scale.calibration_prompt_max)
        prompt = np.exp(rng.uniform(np.log(16.0), high, n)).astype(np.int64)
        prompt[prompt > 600] //= 1 + (rng.random(int((prompt > 600).sum())) < 0.5)  # long ones cost most: half as many
        output = rng.integers(6, 41, n)
        burst = int(rng.integers(1, n + 1))  # so many at once, the others one by one
        gaps = rng.exponential(scale.block_gap_s, n)
        gaps[:burst] = 0.0
        out.append((Setting(f"block {i}", loop, engine), Load(np.cumsum(gaps), prompt, output, _offsets(rng, n))))
    return out


def validation_load(seed: int, scale: Scale) -> Load:
    """Return the validation load at one arrival per second."""
    rng, n = stream(seed, "validation"), scale.requests
    sigma = np.sqrt(np.log1p(scale.prompt_cv**2))
    prompt = np.exp(np.log(scale.prompt_mean) - sigma**2 / 2 + sigma * rng.standard_normal(n))
    prompt = np.clip(np.rint(prompt), 16, scale.prompt_max).astype(np.int64)
    low, high = scale.output_range
    arrival = np.cumsum(rng.exponential(1.0, n))
    return Load(arrival - arrival[0], prompt, rng.integers(low, high + 1, n), _offsets(rng, n))


def _offsets(rng: np.random.Generator, n: int) -> IntArray:
    return rng.integers(0, _DOCUMENT_TOKENS, n)
