"""The headline numbers of a run. ``METRICS.md`` gives symbol, formula, unit and edge cases of every one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.clock import CostLedger
from entropic_ctl.config import SloConfig
from entropic_ctl.histogram import DurationHistogram
from entropic_ctl.metrics_tables import REASONS, Table
from entropic_ctl.signals import FloatArray

__all__ = ["GROUPS", "Measured", "Summary", "grouped", "merge", "summarise"]

Summary = dict[str, float | int | None]

_QUANTILES = (50, 90, 99)
_OUTSIDE = ("live", "rejected", "cancelled")  # statuses of requests that were not served to an end

GROUPS: dict[str, tuple[str, ...]] = {
    "requests": (
        *(f"requests_{what}" for what in ("in", "finished", "refused", "cancelled", "live")),
        *(f"finish_{reason}" for reason in REASONS if reason not in _OUTSIDE),
    ),
    "latency": tuple(
        f"{name}_{what}_s" for name in ("ttft", "tpot", "itl", "e2e") for what in ("mean", "p50", "p90", "p99", "max")
    ),
    "throughput": (
        "output_tokens",
        "makespan_s",
        "busy_s",
        "utilisation",
        "throughput_tokens_per_s",
        "throughput_requests_per_s",
        "goodput_requests_per_s",
        "slo_share",
    ),
    "queueing": (
        "queue_depth_mean",
        "queue_depth_max",
        "longest_wait_steps",
        "longest_wait_s",
        "longest_admission_wait_s",
        "preemptions",
        "fairness_jain",
    ),
    "batching and memory": (
        "iterations",
        "rows_per_step_mean",
        "scheduled_tokens",
        "kv_use_mean",
        "kv_use_max",
        "pages_held",
        "pages_read",
    ),
    "entropic time": (
        "tau_nats",
        *(f"tau_per_{currency}" for currency in ("flop", "kv_byte", "second", "joule")),
        "tau_filtered_nats",
        *(f"tau_filtered_per_{currency}" for currency in ("flop", "kv_byte", "second", "joule")),
    ),
    "cost": ("flops", "kv_bytes", "energy_j", "energy_idle_j", "energy_per_token_j"),
    "entropy": (
        "model_entropy_mean_nats",
        "tempered_entropy_mean_nats",
        "tempered_variance_within",
        "tempered_variance_pooled",
        "tempered_target_mean_square",
    ),
    "pruning": (
        "kept_fraction_mean",
        "pruned_mass_mean",
        "pruned_mass_max",
        "certificate_max_nats",
        "loss_mean_nats",
        "loss_max_nats",
        "kl_nats_mean",
    ),
    "simulation": (
        "trace_rows_skipped",
        "bank_context_beyond",
        "draft_tokens",
        "draft_tokens_accepted",
    ),
}
"""Keys of a summary, in order, by subject; ``kl_nats_mean`` and those of ``simulation`` are the simulator's own."""


@dataclass(frozen=True)
class Measured:
    """All that a summary is made of.

    Parameters
    ----------
    requests, steps : Table
        As returned by :mod:`entropic_ctl.metrics_tables`.
    ledger : CostLedger
    gaps : DurationHistogram
        Inter-token latencies.
    pool_pages : int
        Pages of one replica's KV pool; 0 when unknown.
    slo : SloConfig, optional
    idle_w : float
        Watts of one replica while nothing runs.
    replicas : int
    """

    requests: Table
    steps: Table
    ledger: CostLedger
    gaps: DurationHistogram
    pool_pages: int = 0
    slo: SloConfig | None = None
    idle_w: float = 0.0
    replicas: int = 1

    @property
    def end_s(self) -> float:
        """End of the last step, NaN without one."""
        end = self.steps["end_s"]
        return float(end.max()) if end.shape[0] else math.nan

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the end of the last step, NaN without either."""
        arrivals = self.requests["arrival_s"]
        return self.end_s - float(arrivals.min()) if arrivals.shape[0] else math.nan


def merge(parts: Sequence[Measured]) -> Measured:
    """Return what several equal replicas measured as one, tables with a column ``replica`` (its index).

    Requests are ordered by arrival, then id; steps by start, then replica. One part is returned as it is.
    """
    if len(parts) == 1:
        return parts[0]
    requests, steps = _stack([part.requests for part in parts]), _stack([part.steps for part in parts])
    gaps, ledger = DurationHistogram(), CostLedger()
    for part in parts:
        gaps.merge(part.gaps)
        spent = part.ledger
        ledger.add(spent.flops, spent.kv_bytes, spent.seconds, spent.joules)
    by_arrival = np.lexsort((requests["id"], requests["arrival_s"]))
    by_start = np.lexsort((steps["replica"], steps["start_s"]))
    return dataclasses.replace(
        parts[0],
        requests={name: column[by_arrival] for name, column in requests.items()},
        steps={name: column[by_start] for name, column in steps.items()},
        ledger=ledger,
        gaps=gaps,
        replicas=sum(part.replicas for part in parts),
    )


def _stack(tables: Sequence[Table]) -> Table:
    rows = [table["arrival_s" if "arrival_s" in table else "start_s"].shape[0] for table in tables]
    out = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    return {**out, "replica": np.repeat(np.arange(len(tables)), rows)}


def grouped(summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a summary by subject, for printing; keys that are in no group come last, under ``more``."""
    out = {
        group: {key: summary[key] for key in keys if key in summary}
        for group, keys in GROUPS.items()
        if not summary.keys().isdisjoint(keys)
    }
    known = {key for keys in GROUPS.values() for key in keys}
    more = {key: value for key, value in summary.items() if key not in known}
    return {**out, "more": more} if more else out


def summarise(measured: Measured) -> Summary:
    """Return the headline numbers of a run, JSON-able; undefined ones are None, never 0 or NaN.

    Parameters
    ----------
    measured : Measured

    Notes
    -----
    Latencies are over finished requests (refused, cancelled and live ones left out; those without a token have none),
    inter-token latencies over all gaps. Entropic time, tokens, preemptions and costs count every request, live ones
    included. Rates are per second of makespan; ``tau_per_second`` is per *busy* second. Queue depth and KV use are
    means over time and replicas.
    """
    status = measured.requests["status"]
    counts = {reason: int((status == reason).sum()) for reason in REASONS}
    finished: npt.NDArray[np.bool_] = ~np.isin(status, _OUTSIDE)
    out: Summary = {
        "requests_in": int(status.shape[0]),
        "requests_finished": int(finished.sum()),
        "requests_refused": counts["rejected"],
        "requests_cancelled": counts["cancelled"],
        "requests_live": counts["live"],
    }
    out |= {f"finish_{reason}": counts[reason] for reason in REASONS if reason not in _OUTSIDE}
    out |= _latencies(measured, finished)
    out |= _rates(measured, finished)
    out |= _queueing(measured)
    out |= _batching(measured)
    out |= _costs(measured)
    out |= _entropies(measured.requests)
    return out


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _per(amount: float, whole: float) -> float | None:
    """Return amount / whole, None unless the whole is positive."""
    return _number(amount / whole) if whole > 0 else None


def _mean(values: npt.NDArray[Any], weights: npt.NDArray[Any] | None = None) -> float | None:
    known = ~np.isnan(values)
    if weights is not None:
        known &= weights > 0
    if not known.any():
        return None
    return _number(float(np.average(values[known], weights=None if weights is None else weights[known])))


def _latencies(measured: Measured, finished: npt.NDArray[np.bool_]) -> Summary:
    requests = measured.requests
    out: Summary = {}
    for name in ("ttft", "tpot", "e2e"):
        values = requests[f"{name}_s"][finished]
        values = values[~np.isnan(values)]
        out[f"{name}_mean_s"] = _mean(values)
        some = values.shape[0] > 0
        out |= {f"{name}_p{q}_s": float(np.percentile(values, q)) if some else None for q in _QUANTILES}
        out[f"{name}_max_s"] = float(values.max()) if some else None
    gaps = float(np.maximum(requests["output_tokens"] - 1, 0).sum())
    out["itl_mean_s"] = _per(float(requests["gap_sum_s"].sum()), gaps)
    out |= {f"itl_p{q}_s": measured.gaps.quantile(q / 100) for q in _QUANTILES}
    out["itl_max_s"] = measured.gaps.quantile(1.0)
    return out


def _rates(measured: Measured, finished: npt.NDArray[np.bool_]) -> Summary:
    requests, span, busy_s = measured.requests, measured.makespan_s, measured.ledger.seconds
    tokens, done = int(requests["output_tokens"].sum()), int(finished.sum())
    limits = measured.slo.limits if measured.slo is not None else {}
    met = finished.copy()
    for name, limit_s in limits.items():
        none_due = requests["output_tokens"] == 1 if name == "tpot_s" else False  # one token has no TPOT to miss
        met &= (requests[name] <= limit_s) | none_due
    left = done + int((requests["status"] == "rejected").sum())
    return {
        "output_tokens": tokens,
        "makespan_s": _number(span),
        "busy_s": busy_s,
        "utilisation": _per(min(busy_s, span * measured.replicas), span * measured.replicas),
        "throughput_tokens_per_s": _per(tokens, span),
        "throughput_requests_per_s": _per(done, span),
        "goodput_requests_per_s": _per(int(met.sum()), span) if limits else None,
        "slo_share": _per(int(met.sum()), left) if limits else None,
    }


def _seconds_inside(measured: Measured) -> FloatArray:
    """Return how long each request was in the system, up to the end of the last step, shape (N,)."""
    requests, end_s = measured.requests, measured.end_s
    left = requests["left_s"]
    inside: FloatArray = np.maximum(np.where(left < end_s, left, end_s) - requests["arrival_s"], 0.0)
    return inside


def _queueing(measured: Measured) -> Summary:
    requests, steps = measured.requests, measured.steps
    waited = float(_seconds_inside(measured).sum()) - float(steps["row_seconds"].sum())
    return {
        "queue_depth_mean": _per(max(waited, 0.0), measured.makespan_s * measured.replicas),
        "queue_depth_max": int(steps["waiting"].max(initial=0)),
        "longest_wait_steps": int(requests["longest_wait_steps"].max(initial=0)),
        "longest_wait_s": float(requests["longest_wait_s"].max(initial=0.0)),
        "longest_admission_wait_s": float(requests["admission_wait_s"].max(initial=0.0)),
        "preemptions": int(requests["preemptions"].sum()),
        "fairness_jain": _jain(measured),
    }


def _jain(measured: Measured) -> float | None:
    """Return Jain's index of the clients' service rates, None if nobody was served."""
    requests, inside = measured.requests, _seconds_inside(measured)
    who = np.flatnonzero((inside > 0) & (requests["status"] != "rejected"))
    client = requests["client"][who]
    alone = client < 0
    _, key = np.unique(np.where(alone, -1 - np.arange(who.shape[0]), client), return_inverse=True)
    rate = np.bincount(key, requests["output_tokens"][who]) / np.bincount(key, inside[who])
    return _per(float(rate.sum()) ** 2, rate.shape[0] * float((rate**2).sum()))


def _batching(measured: Measured) -> Summary:
    steps, pool = measured.steps, measured.pool_pages
    page_seconds = float(steps["page_seconds"].sum())
    return {
        "iterations": int(steps["steps"].sum()),
        "rows_per_step_mean": _mean(steps["rows"] / steps["steps"], steps["steps"]),
        "scheduled_tokens": int(steps["scheduled_tokens"].sum()),
        "kv_use_mean": _per(page_seconds, measured.makespan_s * measured.replicas * pool) if pool else None,
        "kv_use_max": _per(float(steps["pages_used"].max(initial=0.0)), pool),
        "pages_held": float(steps["pages_held"].sum()),
        "pages_read": float(steps["pages_read"].sum()),
    }


def _costs(measured: Measured) -> Summary:
    requests, steps, ledger = measured.requests, measured.steps, measured.ledger
    tau, filtered = float(requests["tau_nats"].sum()), float(requests["tau_filtered_nats"].sum())
    known = ledger.joules > 0
    idle_j = measured.idle_w * max(0.0, measured.makespan_s * measured.replicas - ledger.seconds) if known else 0.0
    return {
        "tau_nats": tau,
        **ledger.efficiency(tau),
        "tau_filtered_nats": filtered,
        **{name.replace("tau", "tau_filtered", 1): value for name, value in ledger.efficiency(filtered).items()},
        "flops": ledger.flops,
        "kv_bytes": ledger.kv_bytes,
        "energy_j": ledger.joules + idle_j if known else None,
        "energy_idle_j": idle_j if known else None,
        "energy_per_token_j": _per(ledger.joules + idle_j, float(requests["output_tokens"].sum())) if known else None,
        "kept_fraction_mean": _mean(steps["kept_fraction"], steps["decode_rows"]),
        "pruned_mass_mean": _mean(steps["pruned_mass_mean"], steps["decode_rows"]),
        "pruned_mass_max": float(steps["pruned_mass_max"].max(initial=0.0)),
        "certificate_max_nats": float(steps["certificate_max"].max(initial=0.0)),
        "loss_mean_nats": _mean(requests["loss_nats"]),
        "loss_max_nats": float(requests["loss_nats"].max(initial=0.0)),
    }


def _entropies(requests: Table) -> Summary:
    n = requests["entropy_tokens"]
    grand = _mean(requests["tempered_entropy_mean"], n)
    spread = np.where(n > 1, requests["tempered_variance"] * (n - 1), 0.0)
    if grand is not None:
        spread = spread + np.where(n > 0, n * (requests["tempered_entropy_mean"] - grand) ** 2, 0.0)
    return {
        "model_entropy_mean_nats": _mean(requests["model_entropy_mean"], n),
        "tempered_entropy_mean_nats": grand,
        "tempered_variance_within": _mean(requests["tempered_variance"]),
        "tempered_variance_pooled": float(spread.sum() / (n.sum() - 1)) if n.sum() > 1 else None,
        "tempered_target_mean_square": _mean(requests["tempered_target_mean_square"], n),
    }
