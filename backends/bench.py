"""How fast a decode step is: this engine, transformers' own ``generate``, and the floor that memory sets.

A decode step reads every weight once, so it cannot take less than weight bytes over memory bandwidth; bandwidth is
measured by copying. Nothing here is asserted in a test: times are reported with the machine they were taken on.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from backends.energy import EnergyMeter
from backends.engine import Engine
from backends.models import LoadedModel, load
from backends.prompts import document_ids
from backends.sampling import SamplingParams
from entropic_ctl import config as configs

__all__ = ["bench_engine", "copy_bandwidth"]


def copy_bandwidth(device: torch.device | str = "cpu", *, megabytes: int = 256, repeats: int = 5) -> float:
    """Return bytes read and written per second by a large copy (best of ``repeats``)."""
    source = torch.ones(megabytes << 18, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = min(_timed(lambda: target.copy_(source), source.device) for _ in range(repeats + 1))
    return 2.0 * source.numel() * source.element_size() / best


def bench_engine(
    model: LoadedModel | None = None,
    *,
    batches: Sequence[int] = (1, 8),
    context: int = 128,
    steps: int = 24,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure decode steps.

    Parameters
    ----------
    model : LoadedModel, optional
        Default: the fetched default model in bfloat16.
    batches : sequence of int
        Sequences decoded together.
    context : int
        Prompt length in tokens.
    steps : int
        Decode steps per measurement, at least 2.
    progress : callable(str), optional

    Returns
    -------
    dict
        ``hardware``, ``versions``, ``weight_bytes``, ``copy_bytes_per_s``, ``floor_ms`` (per step), and in
        ``batches`` per batch size: ``engine_ms`` and ``engine_p90_ms`` (median and 90% point per step),
        ``generate_ms`` (mean per step of transformers' ``generate``), ``engine_over_generate``, ``engine_over_floor``,
        ``energy_j`` (per decoded token, by the machine's counters; None where ``energy_missing`` says why).
    """
    say = progress or (lambda _: None)
    model = model or load()
    network = model.model
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    say("memory bandwidth")
    bandwidth = copy_bandwidth(network.device)
    floor = 1e3 * weights / bandwidth
    ids = document_ids(model, context + max(batches))
    rows: dict[str, dict[str, float | None]] = {}
    energy = EnergyMeter()
    for batch in batches:
        prompts = [ids[i : i + context] for i in range(batch)]
        say(f"transformers generate, batch {batch}")
        theirs = _generate_ms(model, prompts, steps)
        say(f"engine, batch {batch}")
        ours, joules = _engine_ms(model, prompts, steps, energy)
        middle = statistics.median(ours)
        rows[str(batch)] = {
            "engine_ms": middle,
            "engine_p90_ms": statistics.quantiles(ours, n=10)[-1],
            "generate_ms": theirs,
            "engine_over_generate": middle / theirs,
            "engine_over_floor": middle / floor,
            "energy_j": joules if energy.source.found else None,
        }
    return {
        "hardware": {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": str(network.device),
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "model": model.name,
        "dtype": str(network.dtype).removeprefix("torch."),
        "context": context,
        "steps": steps,
        "weight_bytes": weights,
        "copy_bytes_per_s": bandwidth,
        "floor_ms": floor,
        "energy_missing": energy.source.reason,
        "batches": rows,
    }


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _engine_ms(
    model: LoadedModel, prompts: Sequence[Sequence[int]], steps: int, energy: EnergyMeter
) -> tuple[list[float], float]:
    """Duration of each full decode step, milliseconds, and joules per token; the first two are left out (warm-up)."""
    pages = len(prompts) * (-(-(len(prompts[0]) + steps + 4) // 16)) + 1
    rows = max(8, len(prompts))
    tokens = rows * len(prompts[0])
    run = configs.from_mapping(
        {"engine": {"pages": pages, "max_batch": rows, "max_batch_tokens": tokens, "prefill_chunk": tokens}}
    )
    engine = Engine(run, dataclasses.replace(model, eos_ids=frozenset()), energy=energy)  # every row runs to its limit
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, SamplingParams(max_new_tokens=steps + 3, seed=i))
    times, joules = [], []
    while not engine.idle:
        result = engine.step()
        if result is not None and result.token_ids.shape[0] == len(prompts):
            times.append(1e3 * (result.end_s - result.start_s))
            joules.append(result.energy_j / len(prompts))
    return times[2:], statistics.fmean(joules[2:])


def _generate_ms(model: LoadedModel, prompts: Sequence[Sequence[int]], steps: int) -> float:
    """Mean duration of a decode step of transformers' ``generate`` (sampling on), milliseconds."""
    network = model.model
    network.set_attn_implementation("sdpa")
    x = torch.tensor([list(p) for p in prompts], device=network.device)
    options = {"attention_mask": torch.ones_like(x), "do_sample": True, "pad_token_id": 0, "eos_token_id": None}

    def run(n: int) -> float:
        torch.manual_seed(0)
        with torch.inference_mode():
            work = lambda: network.generate(x, max_new_tokens=n, min_new_tokens=n, **options)  # noqa: E731
            return _timed(work, x.device)

    run(2)  # warm-up
    return 1e3 * (run(steps + 1) - run(1)) / steps
