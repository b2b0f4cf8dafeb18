"""What the built-in runs do: workload, engine limits, the full loop, prompts. Nothing here is tuned to a claim."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass

from entropic_ctl.config import RunConfig, from_mapping

__all__ = ["Size", "engine_config", "long_prompt", "prompts", "simulation_config"]

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
    tune_trials : int
        Simulations spent on tuning.
    """

    sim_requests: int = 32
    sim_repeats: int = 8
    engine_repeats: int = 3
    max_new_tokens: int = 32
    tune_trials: int = 16


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


def long_prompt(characters: int = 9600) -> str:
    """Return real text that ships with every CPython, some 2,000 tokens or more of it."""
    text = "\n".join(str(pydoc_data.topics.topics[name]) for name in sorted(pydoc_data.topics.topics))
    return text[:characters]


def prompts() -> list[str]:
    """Return eight prompts of several kinds; the last is long."""
    return [
        "Why is the sky blue? Answer in two sentences.",
        "Write the opening of a story about a lighthouse keeper who finds a letter.",
        "List five uses for a paper clip.",
        "Write a Python function that returns the n-th Fibonacci number.",
        "What is 17 times 24? Show your working.",
        "Explain to a child how a bicycle stays upright.",
        "Summarise the plot of Romeo and Juliet in one paragraph.",
        "Continue this documentation:\n\n" + long_prompt(),
    ]
