"""What the built-in runs do: workload, engine limits, the full loop, prompts. Nothing here is tuned to a claim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from entropic_ctl.config import RunConfig, from_mapping

__all__ = ["LONG_TOKENS", "Size", "engine_config", "prompts", "simulation_config"]

LONG_TOKENS = 2200
"""Length of the long prompt."""

_LOOP = {
    "temperature": {"law": "feedback", "temperature": 0.8, "target_nats": 1.0, "gain": 0.02},
    "pruning": {"law": "budget", "theta_nats": 0.02, "theta_wide_nats": 0.03},
    "scheduling": {"policy": "entropic"},
}
"""The full loop before tuning: the paper's feedback law, our information-loss budget, the paper's priority."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much a built-in run does.

    Parameters
    ----------
    sim_requests, sim_repeats : int
        Simulated requests per run; runs per arm.
    engine_repeats, max_new_tokens : int
        Runs per arm on the engine; tokens per request there.
    long_tokens : int
        Length of the long prompt.
    tune_trials : int
        Simulations spent on tuning.
    """

    sim_requests: int = 32
    sim_repeats: int = 8
    engine_repeats: int = 5
    max_new_tokens: int = 32
    tune_trials: int = 16
    long_tokens: int = LONG_TOKENS


def simulation_config(seed: int, size: Size) -> RunConfig:
    """Return the simulated workload: a closed queue of users with mixed prompt lengths on the 2-core CPU preset.

    Closed, so that throughput is the rate the system sustains and not the rate at which requests were sent.
    """
    return from_mapping(
        {
            "seed": seed,
            "workload": {
                "kind": "closed",
                "n_requests": size.sim_requests,
                "users": 8,
                "prompt_tokens": 600,
                "prompt_cv": 1.2,
                "output_tokens": 64,
            },
            "engine": {"pages": 2048, "max_batch": 4, "max_batch_tokens": 512, "prefill_chunk": 256},
            "cost": {"beyond_bank": "dense"},  # a log-normal prompt is now and then longer than any recorded context
            "loop": _LOOP,
        },
        where="built-in simulation",
    )


def engine_config(seed: int) -> RunConfig:
    """Return the limits of the real engine: as in the simulation, with every fourth step audited against dense."""
    return from_mapping(
        {
            "seed": seed,
            "engine": {
                "pages": 512,
                "max_batch": 4,
                "max_batch_tokens": 512,
                "prefill_chunk": 256,
                "audit_every": 4,
            },
            "loop": _LOOP,
        },
        where="built-in engine run",
    )


def prompts(model: Any, long_tokens: int = LONG_TOKENS) -> list[tuple[Any, bool]]:
    """Return eight built-in prompts, (text or token ids, whether it is a chat turn); the last is long real text."""
    from backends.prompts import PROMPTS, document_ids

    kinds: dict[str, tuple[Any, bool]] = {}
    for prompt in PROMPTS:
        kinds.setdefault(f"{prompt.kind} {prompt.chat}", (prompt.text, prompt.chat))
    short = list(kinds.values())[:7]
    return [*short, (document_ids(model, long_tokens), False)]
