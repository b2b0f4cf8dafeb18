"""What a reader needs to know before the numbers: the paper, the clock, the arms, the two workloads, the words.

Text only, built from the configuration where it depends on it; results are in :mod:`paper_repro.statements`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from entropic_ctl.config import LoopConfig, RunConfig, resolve, resolve_loop
from paper_repro.claims import ARMS
from paper_repro.report import number

__all__ = ["GLOSSARY", "MEANS", "PAPER", "PRUNING", "RATIOS", "TAU", "arms_text", "differences", "workloads_text"]

PAPER = (
    "Tested here: A. Kiruluta, “Entropic-Time Inference: Self-Organizing Large Language Model Decoding Beyond "
    "Attention”, arXiv 2603.03310 (2026). Every number labelled “paper” is that paper's; all others are ours."
)

TAU = (
    "Entropic time τ counts uncertainty removed instead of tokens emitted. Before each token the model's distribution "
    "over the vocabulary has an entropy H (nats): large when many continuations are open, 0 when one is certain. τ is "
    "the sum over a sequence of every fall of H from one token to the next; rises count as zero. The paper's aim is "
    "much τ per unit of cost, dτ/dC. It also rises on plain noise in H, so more τ is not better by itself."
)

RATIOS = (
    "Each ratio compares two runs with the same seed, one of the arm and one of the baseline, and is the geometric "
    "mean of those ratios over the pairs, with a 95% Student interval on their logarithms. It is not the quotient of "
    "the two means in the tables above: those are arithmetic means, in which a few slow runs weigh more, so the "
    "quotient can differ from the ratio and even lie on the other side of 1. The verdicts use the ratios. The paper "
    "claims one number for dτ/dC and does not say which cost C is, so seconds, FLOPs and KV bytes are all held "
    "against that number."
)

MEANS = (
    "Arithmetic means over the runs of each arm. p99 latency is the 99th percentile within a run and longest wait its "
    "largest gap between two services of a live request: with {requests} requests in a run both are close to the "
    "single worst request."
)

PRUNING = (
    "“Pages read” and “KV read” differ. Pages read is the share of pages whose keys and values were read in the layers "
    "that may prune, averaged over decode steps with every request counting the same, however short; short contexts "
    "have nothing to drop and pull it to 1. KV read counts all bytes: the {dense} leading layers that are always "
    "read in full, the prompt's own passes, and the small copy of the keys (the shadow) that must be scanned to "
    "choose the pages. So KV read falls much less than pages read, and where few pages can be dropped the scan can "
    "make it rise."
)

GLOSSARY = (
    ("TTFT", "time to first token: from arrival to the end of the step that gave the first token"),
    ("TPOT", "time per output token after the first, mean within a request"),
    ("latency", "end to end: from arrival to the last token of a request; p99 is its 99th percentile in a run"),
    ("nat", "unit of entropy with natural logarithms; 1 nat = 1.44 bits"),
    ("KV cache, page", "stored keys and values of earlier tokens, read again for each new one; kept in pages"),
    ("pages read", "share of those pages that pruned layers read for a new token (explained below the tables)"),
    (
        "certified mass",
        "proved upper bound on the attention weight that the dropped pages would have had; mean over heads",
    ),
    ("θ", "budget: the most information, in nats, that dropping pages may cost a head, -ln(1 - mass) <= θ"),
    ("KL", "how far pruning moved the next-token distribution from that of full (dense) attention, nats per token"),
    ("dτ/dC", "entropic efficiency: entropic time gained per unit of cost C (second, FLOP or KV byte)"),
    ("T, gain k", "sampling temperature, and how strongly it reacts to entropy being off its target"),
    ("gain certificate", "machine-checked proof that with this gain the temperature settles on any fixed distribution"),
    ("baseline", "standard inference: fixed temperature, full attention, first come first served"),
)

_ARRIVALS = {
    "closed": "{users} users who each send the next request when the last is answered",
    "burst": "all requests at time 0",
    "poisson": "Poisson arrivals at {rate_per_s:g} a second",
    "gamma": "Gamma-distributed gaps (coefficient of variation {arrival_cv:g}) at {rate_per_s:g} requests a second",
    "mmpp": "arrivals whose rate switches at random (Markov-modulated Poisson)",
    "diurnal": "Poisson arrivals whose rate follows the time of day",
    "sessions": "sessions of {turns:g} turns on average",
    "trace": "the arrivals of a recorded trace",
}


def arms_text(arms: Mapping[str, LoopConfig]) -> str:
    """Return what each arm switches on."""
    full = arms[ARMS[-1]]
    table = resolve_loop(full)
    temperature, pruning, scheduling = (table[name] for name in ("temperature", "pruning", "scheduling"))
    target = f" towards {temperature['target_nats']:g} nats" if "target_nats" in temperature else ""
    gain = f" with gain k = {number(temperature['gain'], 4)}" if "gain" in temperature else ""
    theta = f" of θ = {number(pruning['theta_nats'])} nats" if "theta_nats" in pruning else ""
    return (
        "The arms switch three laws on and off. Sampling: the temperature follows entropy"
        f"{target} ({temperature['law']} law{gain}). Attention: old KV pages are skipped within an information-loss "
        f"budget{theta}. Scheduling: requests are served by expected entropy reduction per cost "
        f"({scheduling['policy']} policy) instead of in order of arrival. “Sampling only”, “attention only” and "
        "“scheduling only” switch on one law; the full loop all three; the baseline none."
    )


def workloads_text(config: RunConfig, engine: RunConfig | None, prompts: int, tokens: int) -> str:
    """Return what the simulation and the engine ran, and what a second is in each.

    Parameters
    ----------
    config, engine : RunConfig
        Simulated world; real engine, if it ran.
    prompts, tokens : int
        Prompts of the engine, and the limit on output tokens of each.
    """
    work = config.workload
    arrivals = _ARRIVALS["trace" if work.replays else work.kind].format(**asdict(work))
    sizes = (
        ""
        if work.replays
        else f"{work.n_requests} requests, prompts of {work.prompt_tokens:g} tokens on average (coefficient of "
        f"variation {work.prompt_cv:g}), at most {work.output_tokens:g} output tokens, "
    )
    charges = ", ".join(f"{name} = {value if value != '' else 'the shipped one'}" for name, value in _cost(config))
    out = (
        f"The two worlds run different workloads. Simulation: {sizes}{arrivals}; no model runs, entropies are replayed "
        f"from a recorded bank and each step is charged the seconds of a cost model ({charges}; see sim/cost.py for "
        "what it charges)."
    )
    if engine is None:
        return out
    return out + (
        f" Engine: a real model ({engine.model.path}) decodes {prompts} built-in prompts, the last one long, all "
        f"handed in at time 0, at most {tokens} output tokens each; its seconds are those of this machine's clock. "
        "So absolute numbers of the two must not be compared; each ratio is to the baseline of its own world."
    )


def _cost(config: RunConfig) -> list[tuple[str, Any]]:
    """Return the settings that were given, and the bank."""
    return [(name, value) for name, value in resolve(config)["cost"].items() if value or name == "bank"]


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of ``other`` that differs from ``one``, so that a shared configuration is printed once."""
    out: dict[str, Any] = {}
    for name, value in other.items():
        before = one.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := differences(before, value):
                out[name] = inner
        elif name not in one or value != before:
            out[name] = value
    return out
