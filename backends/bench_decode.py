"""Decode steps beside the floor that memory sets and beside other engines: one run, repeats, arms interleaved.

Every (batch, context) is measured in rounds; in each round every arm runs once, so a machine that slows down slows all
of them. Our arms are the whole engine, from planning to sampling; a peer is timed inside its own process and frozen
while another is timed. Loss is measured apart from time: real text, teacher forced, every certificate against float64.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from backends.decode_arms import MIN_CONTEXT, Arm, our_arm, peer_arms, protected, run_round
from backends.decode_loss import audit_losses
from backends.decode_table import Row, ratios_of, summarise, targets_of
from backends.filled import FilledCache
from backends.machine import SpeedProbe, read_bandwidth
from backends.models import LoadedModel, load
from backends.peers.launch import find_peers
from backends.prompts import document_ids
from entropic_ctl.errors import BadInputError

__all__ = ["CELLS", "CROSSOVER_CONTEXTS", "bench_decode", "crossover"]

CELLS = ((1, 128), (8, 128), (8, 2000), (8, 8000))
CROSSOVER_CONTEXTS = (128, 256, 512, 1024, 2000, 4000, 8000)
Say = Callable[[str], None]


def bench_decode(
    model: LoadedModel | None = None,
    *,
    thetas: Sequence[float] = (0.05, 0.075),
    cells: Sequence[tuple[int, int]] = CELLS,
    repeats: int = 5,
    steps: int = 16,
    warmup: int = 3,
    texts: int = 2,
    positions: int = 64,
    page_tokens: int = 32,
    min_context: int = MIN_CONTEXT,
    peers: str | Path | None = None,
    without_peers: bool = False,
    progress: Say | None = None,
) -> dict[str, Any]:
    """Time decode steps of every engine at every (batch, context), and audit what pruning loses there.

    Parameters
    ----------
    model : LoadedModel, optional
        Default: the fetched default model in bfloat16.
    thetas : sequence of float
        Budgets of the pruned arms, nats, each > 0.
    cells : sequence of (batch, context)
    repeats, steps, warmup : int
        Rounds; timed steps and untimed ones of each arm in each round.
    texts, positions : int
        Audited texts per context, and tokens of each.
    page_tokens : int
    min_context : int
        Tokens from which the pruned arms prune. Cells whose steps all stay below it are timed reading everything, and
        have no losses to audit.
    peers : path, optional
        Environment with the peers; see :func:`backends.peers.launch.find_peers`.
    without_peers : bool
    progress : callable(str), optional

    Returns
    -------
    dict
        ``rows`` (see :class:`backends.decode_table.Row`), ``ratios``, ``targets``, ``peers``, and the machine.

    Raises
    ------
    BadInputError
        If a size is below 1, an audited context too short, or a budget not positive.
    """
    pruned = sorted({c for _, c in cells if c + 1 + warmup + steps >= min_context})
    _check(thetas, cells, pruned, repeats=repeats, steps=steps, warmup=warmup, texts=texts, positions=positions)
    say = progress or (lambda _: None)
    model = model or load()
    _check_room(model, max(c for _, c in cells) + steps + warmup + 3)
    python = find_peers(peers) if peers or not without_peers else None
    python = None if without_peers else python
    say("read bandwidth")
    bandwidth = read_bandwidth()
    probe = SpeedProbe(every_s=0.0)
    longest = (max(b for b, _ in cells), max(c for _, c in cells))
    ours = [our_arm(model, theta, steps, warmup, min_context=min_context) for theta in (0.0, *thetas)]
    losses: dict[tuple[float, int], dict[str, float]] = {}
    with peer_arms(model, python, longest, steps, warmup, say) as (others, states):
        arms = [*ours, *others]
        for context in sorted({c for _, c in cells}):
            say(f"prefill of {context:,} tokens")
            filled = FilledCache(model, document_ids(model, context), page_tokens=page_tokens)
            for batch in sorted({b for b, c in cells if c == context}):
                for number in range(repeats):
                    label = f"batch {batch}, context {context:,}, round {number + 1} of {repeats}"
                    run_round(arms, batch, filled, probe, say, label)
            del filled
    sizes = {"texts": texts, "positions": positions, "page_tokens": page_tokens, "pruning": protected(page_tokens)}
    for context in pruned:
        for theta, loss in audit_losses(model, context, thetas, progress=say, **sizes).items():
            losses[theta, context] = loss
    rows = _rows(arms, cells, losses, bandwidth)
    for arm in others:
        for state in states:
            if state["engine"] == arm.name and arm.failed:
                state |= {"state": f"failed: {arm.failed}", "remedy": "see the peer's own message"}
    return {
        "hardware": {"machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "model": model.name,
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "page_tokens": page_tokens,
        "min_context": min_context,
        "read_bytes_per_s": bandwidth,
        "repeats": repeats,
        "steps": steps,
        "rows": [dataclasses.asdict(row) for row in rows],
        "ratios": ratios_of(rows),
        "targets": targets_of(rows),
        "peers": states,
    }


def _rows(
    arms: Sequence[Arm],
    cells: Sequence[tuple[int, int]],
    losses: dict[tuple[float, int], dict[str, float]],
    bandwidth: float,
) -> list[Row]:
    rows = []
    for cell in cells:
        dense = arms[0].samples[cell]
        for arm in arms:
            if samples := arm.samples.get(cell):
                loss = losses.get((arm.theta_nats, cell[1]))
                base = arm.samples.get((cell[0], min(c for b, c in cells if b == cell[0])))
                rows.append(
                    summarise(arm.name, *cell, samples, dense=dense, base=base, loss=loss, theta_nats=arm.theta_nats,
                              weight_bytes=arm.weight_bytes, bandwidth=bandwidth)
                )  # fmt: skip
    return rows


def _check(thetas: Sequence[float], cells: Sequence[tuple[int, int]], audited: Sequence[int], **sizes: int) -> None:
    for name, value in sizes.items():
        if value < (0 if name == "warmup" else 1):
            raise BadInputError("not a count", where="bench decode", field=name, value=value, allowed=">= 1")
    for theta in thetas:
        if not 0 < theta < math.inf:
            raise BadInputError("not a budget", where="bench decode", field="theta", value=theta, allowed="> 0")
    if not cells:
        raise BadInputError("nothing to measure", where="bench decode", field="cells", allowed="BATCHxCONTEXT, ...")
    for batch, context in cells:
        least = sizes["positions"] + 1 if context in audited else 1
        if batch < 1 or context < least:
            raise BadInputError(
                "not a batch and a context",
                where="bench decode",
                field="cells",
                value=f"{batch}x{context}",
                allowed=f"batch >= 1, context >= {least}" + " (more than the audited positions)" * (least > 1),
            )


def _check_room(model: LoadedModel, tokens: int) -> None:
    if tokens > model.max_context:
        raise BadInputError(
            "longer than the model's context",
            where="bench decode",
            field="cells",
            value=f"{tokens:,} tokens with those that are decoded",
            allowed=f"<= {model.max_context:,}",
            remedy="name shorter contexts: --cells 8x128,8x2000",
        )


def crossover(
    model: LoadedModel,
    theta_nats: float,
    *,
    batch: int = 8,
    contexts: Sequence[int] = CROSSOVER_CONTEXTS,
    repeats: int = 5,
    steps: int = 16,
    warmup: int = 3,
    page_tokens: int = 32,
    progress: Say | None = None,
) -> dict[str, Any]:
    """Find the context from which pruning pays.

    Returns
    -------
    dict
        ``contexts``; ``dense_ms``, ``pruned_ms``, ``speedup`` (median over rounds of dense over pruned), ``prunes``
        (True where pages were left out at all); ``crossover_tokens``: where the speedup passes 1 for good,
        interpolated in the logarithm of the context; None if it never does.
    """
    say = progress or (lambda _: None)
    arms = [our_arm(model, theta, steps, warmup, min_context=0) for theta in (0.0, theta_nats)]
    probe = SpeedProbe(every_s=0.0)
    found: dict[str, Any] = {"contexts": list(contexts), "dense_ms": [], "pruned_ms": [], "speedup": [], "prunes": []}
    for context in contexts:
        filled = FilledCache(model, document_ids(model, context), page_tokens=page_tokens)
        for number in range(repeats):
            run_round(arms, batch, filled, probe, say, f"context {context:,}, round {number + 1} of {repeats}")
        dense, pruned = (arm.samples[batch, context] for arm in arms)
        for name, samples in (("dense_ms", dense), ("pruned_ms", pruned)):
            found[name].append(statistics.median(t for s in samples for t in s.step_ms))
        pairs = zip(dense, pruned, strict=True)
        found["speedup"].append(
            statistics.median(statistics.median(a.step_ms) / statistics.median(b.step_ms) for a, b in pairs)
        )
        found["prunes"].append(any(s.certificate_max > 0 for s in pruned))
    return {
        "batch": batch,
        "theta_nats": theta_nats,
        **found,
        "crossover_tokens": _crossing(contexts, found["speedup"]),
    }


def _crossing(contexts: Sequence[int], speedup: Sequence[float]) -> float | None:
    """Return where ``speedup`` passes 1 for good; the first context if it is never below, None if it ends below."""
    losing = [i for i, s in enumerate(speedup) if s < 1.0]
    if not losing:
        return float(contexts[0])
    last = losing[-1]
    if last == len(contexts) - 1:
        return None
    low, high = speedup[last], speedup[last + 1]
    share = (1.0 - low) / (high - low) if high > low else 0.0
    return float(contexts[last] ** (1 - share) * contexts[last + 1] ** share)
