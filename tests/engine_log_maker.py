"""A log as the engine writes it, of an engine whose step times follow a known rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from entropic_ctl.config import RunConfig, from_mapping, resolve_loop
from sim.load import StepLoad, measure

Rule = Callable[[StepLoad], float]

PRUNED = {"pruning": {"law": "budget", "theta_nats": 0.02, "theta_wide_nats": 0.03}}


def config(loop: dict[str, Any] | None = None) -> RunConfig:
    return from_mapping({"engine": {"pages": 4096, "max_batch": 8}, "loop": loop or {}})


def columns(rng: np.random.Generator, *, prunes: bool) -> dict[str, np.ndarray]:
    """One iteration: 0 to 8 decode rows and up to 2 prefill chunks."""
    decode, chunks = int(rng.integers(0, 9)), int(rng.integers(0, 3)) * int(rng.random() < 0.4)
    if not decode and not chunks:
        decode = 1
    n = np.concatenate([np.ones(decode, np.int64), rng.choice([16, 64, 128, 250], chunks)])
    context = np.concatenate([rng.integers(16, 2000, decode), 64 * rng.integers(0, 20, chunks)])
    decodes = np.arange(n.size) < decode
    samples = decodes | (rng.random(n.size) < 0.5)  # a last chunk samples too
    kept = np.where(prunes & decodes & (context >= 80), rng.uniform(0.2, 0.9, n.size), 1.0)
    return {"context": context, "n_tokens": n, "samples": samples, "theta_nats": 0.02 * prunes * decodes, "kept": kept}


def write_log(
    path: Path,
    rule: Rule,
    *,
    steps: int = 400,
    seed: int = 0,
    noise: float = 0.0,
    loop: dict[str, Any] | None = None,
    between_s: float = 0.0005,
    idle_every: int = 10,
) -> None:
    """Write ``steps`` iterations of ``rule(load)`` (1 + noise) seconds, ``between_s`` of it after the result."""
    rng, run = np.random.default_rng(seed), config(loop)
    page, pruning = run.engine.page_tokens, run.loop.pruning.config
    protected = (pruning.sink_pages + pruning.recent_pages) * page
    engine = {"page_tokens": page, "pages": run.engine.pages, "max_batch": run.engine.max_batch}
    lines: list[dict[str, Any]] = [
        {"event": "header", "format": 1, "engine": engine, "loop": resolve_loop(run.loop), "vocab_size": 64}
    ]
    now = 0.0
    for step in range(steps):
        c = columns(rng, prunes=run.loop.pruning.name != "off")
        load = measure(
            c["context"], c["n_tokens"], c["samples"], c["theta_nats"], c["kept"], protected_tokens=protected
        )
        lasted = rule(load) * (1.0 + noise * rng.standard_normal()) - between_s
        plan = {name: c[name].tolist() for name in ("context", "n_tokens", "samples", "theta_nats")}
        lines.append({"event": "plan", "step": step, "now_s": now, "ids": list(range(c["context"].size)), **plan})
        result = {"start_s": now, "end_s": now + lasted, "kept_fraction": c["kept"].tolist()}
        lines.append({"event": "observe", "result": result, "left": []})
        now += lasted + between_s
        if step % idle_every == idle_every - 1:  # nothing to do: an empty plan, then a wait
            lines.append({"event": "plan", "step": step, "now_s": now, "ids": []})
            now += 1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
