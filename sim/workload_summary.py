"""A workload at a glance, before it is run: how many, how fast, how bursty, how long, how alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.config import RunConfig
from sim.arrivals import Workload, make_workload
from sim.prefixes import BlockHashes, SessionHashes

__all__ = ["drawn", "summarise", "table"]


def drawn(config: RunConfig) -> Workload:
    """Return the workload of a run, with page hashes to the token whatever the engine's pages."""
    return make_workload(config.workload, config.seed, 1, page_tokens=1)


def table(workload: Workload) -> dict[str, npt.NDArray[Any]]:
    """Return one row per request.

    Returns
    -------
    dict of arrays, shape (N,)
        ``id``; ``arrival_s`` (NaN where it waits for another request to leave); ``prompt_tokens``; ``output_limit``;
        ``client`` (-1: a client of its own); ``shared_tokens``: prompt tokens with which an earlier request began.
    """
    n = len(workload)
    follows, hashes = workload.follows, workload.prefix_hashes
    arrival_s = workload.arrival_s if follows is None else np.where(follows < 0, workload.arrival_s, np.nan)
    shared = hashes.shared_tokens() if isinstance(hashes, BlockHashes | SessionHashes) else np.zeros(1, np.int64)
    return {
        "id": np.arange(n),
        "arrival_s": arrival_s,
        "prompt_tokens": workload.prompt_tokens,
        "output_limit": workload.limit_tokens,
        "client": workload.client if workload.client is not None else np.full(n, -1),
        "shared_tokens": np.resize(shared, n),
    }


def summarise(workload: Workload) -> dict[str, Any]:
    """Return the numbers that describe a workload.

    Returns
    -------
    dict
        ``requests``, ``trace_rows_skipped``, ``clients`` (distinct ones), ``known_arrivals`` (the others wait for
        somebody to leave), ``span_s`` (first to last known arrival), ``rate_per_s`` ((known - 1) / span),
        ``documented_rate_per_s`` (the mean of the process; None for bursts, closed loops and traces), ``gap_cv``
        (standard deviation over mean of the gaps), ``prompt_tokens`` and ``output_limit`` (mean, P50, P90, P99, max,
        total), ``shared_prefix_share`` (shared over all prompt tokens: what an unbounded prefix cache could spare).
    """
    columns = table(workload)
    known = columns["arrival_s"][~np.isnan(columns["arrival_s"])]
    gaps, span_s = np.diff(known), float(known[-1] - known[0])
    clients = columns["client"]
    return {
        "requests": len(workload),
        "trace_rows_skipped": workload.skipped_rows,
        "clients": int(np.unique(clients[clients >= 0]).shape[0] + np.count_nonzero(clients < 0)),
        "known_arrivals": int(known.shape[0]),
        "span_s": span_s,
        "rate_per_s": float(gaps.shape[0] / span_s) if span_s > 0 else None,
        "documented_rate_per_s": workload.config.mean_rate_per_s,
        "gap_cv": float(gaps.std() / gaps.mean()) if span_s > 0 else None,
        "prompt_tokens": _lengths(workload.prompt_tokens),
        "output_limit": _lengths(workload.limit_tokens),
        "shared_prefix_share": float(columns["shared_tokens"].sum() / workload.prompt_tokens.sum()),
    }


def _lengths(x: npt.NDArray[Any]) -> dict[str, float]:
    p50, p90, p99 = np.quantile(x, [0.5, 0.9, 0.99]).tolist()
    return {"mean": float(x.mean()), "p50": p50, "p90": p90, "p99": p99, "max": int(x.max()), "total": int(x.sum())}
