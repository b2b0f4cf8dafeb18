"""How fast the simulator is: one standard run, timed. Never asserted in a test, only measured."""

from __future__ import annotations

import dataclasses
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from entropic_ctl import config as configs
from entropic_ctl.bank import Bank
from entropic_ctl.config import RunConfig
from sim.cost import DEVICES, MODELS, kv_pages
from sim.replica import Progress, simulate

__all__ = ["bench", "bench_config", "cold_start_s", "warm"]

_THREE_LAWS = {
    "temperature": {"law": "feedback", "gain": 0.03},
    "pruning": {"law": "budget"},
    "scheduling": {"policy": "entropic"},
}


def bench_config(trace: str | Path | None = None, *, loop: bool = True, batch: int = 128, repeat: int = 1) -> RunConfig:
    """Return the standard run: Llama-3-8B on an A100, ``batch`` seats, all memory as KV pool.

    Parameters
    ----------
    trace : path, optional
        Azure CSV; all its rows run to their recorded length. Without it: 1,024 requests at once, mean prompt 512, mean
        output 128.
    loop : bool
        The three laws, or standard inference.
    batch : int
        Rows that run in one step.
    repeat : int
        Play the trace so many times, end to end.
    """
    workload: dict[str, Any] = {"output_length": "limit"}
    if trace is None:
        workload |= {
            "kind": "burst",
            "n_requests": 1024,
            "prompt_tokens": 512.0,
            "output_tokens": 128.0,
            "output_cv": 0.5,
        }
    else:
        workload |= {"kind": "azure", "trace": str(trace), "trace_repeat": repeat}
    return configs.from_mapping(
        {
            "workload": workload,
            "engine": {
                "pages": kv_pages(DEVICES["a100-80"], MODELS["llama-3-8b"], 16),
                "max_batch": batch,
                "max_batch_tokens": max(2048, batch),
                "prefill_chunk": 512,
                "max_live": max(256, 2 * batch),
            },
            "cost": {"preset": "a100-80-llama-3-8b", "beyond_bank": "dense"},
            "loop": _THREE_LAWS if loop else {},
        },
        where="bench",
    )


def bench(
    trace: str | Path | None = None,
    *,
    loop: bool = True,
    batch: int = 128,
    repeat: int = 1,
    bank: Bank | None = None,
    progress: Progress | None = None,
) -> dict[str, float | int]:
    """Time one run of :func:`bench_config` (the gain runs without a certificate: nothing but speed is measured).

    Parameters
    ----------
    trace : str or Path, optional
        Azure CSV; without it the burst of :func:`bench_config`.
    loop : bool
        All three laws on, or the standard ones.
    batch : int
        Rows per step, at most.
    repeat : int
        Play the trace so many times, end to end.
    bank : Bank, optional
        Default: the shipped one.
    progress : callable, optional

    Returns
    -------
    dict
        ``decode_tokens_per_s`` (output tokens per second of wall time), ``output_tokens``, ``requests_in``,
        ``requests_finished``, ``requests_refused``, ``iterations``, ``us_per_iteration`` (wall time, reading the trace
        included), ``rows_per_iteration``, ``wall_s`` and its split (``read_s``: bank and trace, ``build_s``, ``run_s``,
        ``tables_s``), ``stretch_share`` (of the iterations, see :mod:`sim.stretch`), ``cold_start_s``
        (:func:`cold_start_s`), ``peak_rss_mib`` (of the whole process).
    """
    config = bench_config(trace, loop=loop, batch=batch, repeat=repeat)
    cold = cold_start_s()
    timing: dict[str, float] = {}
    start = time.perf_counter()
    summary = simulate(config, uncertified=True, bank=bank, progress=progress, timing=timing).summary
    wall_s = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    iterations = int(summary["iterations"])
    return {
        "decode_tokens_per_s": summary["output_tokens"] / wall_s,
        "output_tokens": int(summary["output_tokens"]),
        "requests_in": int(summary["requests_in"]),
        "requests_finished": int(summary["requests_finished"]),
        "requests_refused": int(summary["requests_refused"]),
        "iterations": iterations,
        "us_per_iteration": 1e6 * wall_s / max(1, iterations),
        "rows_per_iteration": float(summary["rows_per_step_mean"] or 0.0),
        "wall_s": wall_s,
        **{name: timing[name] for name in ("read_s", "build_s", "run_s", "tables_s")},
        "stretch_share": timing["iterations_in_stretches"] / max(1, iterations),
        "cold_start_s": cold,
        "peak_rss_mib": peak / (2**20 if sys.platform == "darwin" else 2**10),
    }


def warm() -> None:
    """Compile what a simulation needs, so that the machine code is in the cache."""
    for loop in (True, False):
        run = bench_config(loop=loop)
        for requests, pages in ((8, 400), (40, 120)):  # with room for all, and with preemptions
            workload = dataclasses.replace(run.workload, n_requests=requests, output_tokens=40.0)
            engine = dataclasses.replace(run.engine, pages=pages)
            simulate(dataclasses.replace(run, workload=workload, engine=engine), uncertified=True)


def cold_start_s() -> float:
    """Return the wall seconds of a fresh process that imports the simulator and simulates one request."""
    script = (
        "import dataclasses; from sim.bench import bench_config; from sim.replica import simulate;"
        "run = bench_config(); work = dataclasses.replace(run.workload, n_requests=1, output_tokens=20.0);"
        "simulate(dataclasses.replace(run, workload=work), uncertified=True)"
    )
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", script], check=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    warm()
