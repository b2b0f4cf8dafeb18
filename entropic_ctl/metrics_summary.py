"""Result tables in their published form, and the headline numbers of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.clock import CostLedger, EntropicClock
from entropic_ctl.signals import FinishReason, FloatArray

__all__ = ["REASONS", "requests_table", "steps_table", "summarise"]

Table = dict[str, npt.NDArray[Any]]

REASONS: tuple[str, ...] = ("live", *FinishReason)
"""Statuses by code: 0 is live, then the finish reasons."""


def _ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """Return numerator / denominator, NaN where the denominator is not positive."""
    out: FloatArray = np.full(numerator.shape, np.nan)
    np.divide(numerator, denominator, out=out, where=denominator > 0)
    return out


def requests_table(raw: Mapping[str, npt.NDArray[Any]], clock: EntropicClock, target_nats: float | None) -> Table:
    """Return one row per request; undefined values are NaN.

    Parameters
    ----------
    raw : mapping of str to ndarray
        The collector's columns.
    clock : EntropicClock
        Keyed by the same rows.
    target_nats : float, optional
        H*, for ``tempered_target_mean_square``.

    Notes
    -----
    Columns: id, status (``live`` or the finish reason), prompt_tokens, max_new_tokens, output_tokens, preemptions,
    longest_wait_steps, longest_wait_s (without service, from admission on: what the waiting bound is about),
    admission_wait_s (before, in the queue for a slot), arrival_s, left_s, ttft_s, e2e_s, tpot_s, gap_sum_s, gap_max_s
    (seconds);
    tau_nats, tau_filtered_nats, model_entropy_mean, tempered_entropy_mean (nats), tempered_variance (about the
    request's own mean, 1 / (n - 1)) and tempered_target_mean_square (mean square about H*), in nats squared.
    """
    rows = raw["id"].shape[0]
    output = raw["output_tokens"]
    n = raw["entropy_n"].astype(np.float64)
    status = np.array(REASONS)[raw["status"]]
    return {
        "id": raw["id"],
        "status": status,
        "prompt_tokens": raw["prompt_tokens"],
        "max_new_tokens": raw["max_new_tokens"],
        "output_tokens": output,
        "preemptions": raw["preemptions"],
        "longest_wait_steps": raw["wait_steps"],
        "longest_wait_s": raw["wait_s"],
        "admission_wait_s": raw["admission_wait_s"],
        "arrival_s": raw["arrival_s"],
        "left_s": raw["left_s"],
        "ttft_s": raw["first_token_s"] - raw["arrival_s"],
        "e2e_s": raw["last_token_s"] - raw["arrival_s"],
        "tpot_s": _ratio(raw["gap_sum_s"], output - 1.0),
        "gap_sum_s": raw["gap_sum_s"],
        "gap_max_s": raw["gap_max_s"],
        "tau_nats": clock.tau[:rows].copy(),
        "tau_filtered_nats": clock.tau_filtered[:rows].copy(),
        "entropy_tokens": raw["entropy_n"],
        "model_entropy_mean": _ratio(raw["entropy_sum"], n),
        "tempered_entropy_mean": np.where(n > 0, raw["tempered_mean"], np.nan),
        "tempered_variance": _ratio(raw["tempered_m2"], n - 1.0),
        "tempered_target_mean_square": np.full(rows, np.nan)
        if target_nats is None
        else _ratio(raw["target_square_sum"], n),
    }


def steps_table(raw: Mapping[str, npt.NDArray[Any]]) -> Table:
    """Return one row per iteration, or per ``steps`` merged iterations.

    Columns: step (first), steps, start_s, end_s, busy_s (seconds); rows, decode_rows, scheduled_tokens, output_tokens,
    paused, preempted (sums over the merged iterations), live (largest); kv_bytes (bytes), flops; pages_held, and of
    them pages_read, as a pruned layer reads them; kept_fraction and pruned_mass_mean (means over decode rows, NaN
    without any), pruned_mass_max, certificate_max (nats).
    """
    derived = ("kept_sum", "mass_sum", "mass_max")
    out: Table = {name: column for name, column in raw.items() if name not in derived}
    decode = raw["decode_rows"].astype(np.float64)
    out["kept_fraction"] = _ratio(raw["kept_sum"], decode)
    out["pruned_mass_mean"] = _ratio(raw["mass_sum"], decode)
    out["pruned_mass_max"] = raw["mass_max"]
    return out


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _mean(values: npt.NDArray[Any], weights: npt.NDArray[Any] | None = None) -> float | None:
    known = ~np.isnan(values)
    if weights is not None:
        known &= weights > 0
    if not known.any():
        return None
    return _number(float(np.average(values[known], weights=None if weights is None else weights[known])))


def summarise(requests: Table, steps: Table, ledger: CostLedger) -> dict[str, float | int | None]:
    """Return the headline numbers of a run, JSON-able; undefined ones are None.

    Parameters
    ----------
    requests, steps : Table
        As returned by the collector.
    ledger : CostLedger

    Notes
    -----
    Latencies are over finished requests (refused, cancelled and live ones left out; those without a token have none).
    Throughput is output tokens (and finished requests) per second of makespan, from the first arrival to the end of
    the last step; ``tau_per_second`` is per *busy* second. Entropic time and tokens count every request, live ones
    included. ``tempered_variance_within`` is the mean over requests of the variance about the request's own mean;
    ``pooled`` is the variance of all tokens about the grand mean; ``target_ms`` the tokens' mean square about H*.
    """
    status = requests["status"]
    counts = {reason: int((status == reason).sum()) for reason in REASONS}
    left = {"requests_refused": counts["rejected"], "requests_cancelled": counts["cancelled"]}
    n_in, live = status.shape[0], counts["live"]
    finished = ~np.isin(status, ["live", "rejected", "cancelled"])
    output_tokens = int(requests["output_tokens"].sum())
    out: dict[str, float | int | None] = {
        "requests_in": n_in,
        "requests_finished": n_in - live - sum(left.values()),
        **left,
        "requests_live": live,
    }
    out |= {f"finish_{reason}": counts[reason] for reason in REASONS if reason not in ("live", "rejected", "cancelled")}
    span = float(steps["end_s"][-1] - np.min(requests["arrival_s"])) if n_in and steps["end_s"].shape[0] else math.nan
    out |= {
        "output_tokens": output_tokens,
        "steps": int(steps["steps"].sum()),
        "scheduled_tokens": int(steps["scheduled_tokens"].sum()),
        "makespan_s": _number(span),
        "busy_s": ledger.seconds,
        "throughput_tokens_per_s": output_tokens / span if span > 0 else None,
        "throughput_requests_per_s": int(finished.sum()) / span if span > 0 else None,
        "rows_per_step_mean": _mean(steps["rows"] / steps["steps"], steps["steps"]),
    }
    for name in ("ttft", "tpot", "e2e"):
        values = requests[f"{name}_s"][finished]
        values = values[~np.isnan(values)]
        out[f"{name}_mean_s"] = _mean(values)
        for q in (50, 90, 99):
            out[f"{name}_p{q}_s"] = float(np.percentile(values, q)) if values.shape[0] else None
    tau, filtered = float(requests["tau_nats"].sum()), float(requests["tau_filtered_nats"].sum())
    out |= {
        "preemptions": int(requests["preemptions"].sum()),
        "longest_wait_steps": int(requests["longest_wait_steps"].max(initial=0)),
        "longest_wait_s": float(requests["longest_wait_s"].max(initial=0.0)),
        "longest_admission_wait_s": float(requests["admission_wait_s"].max(initial=0.0)),
        "tau_nats": tau,
        "tau_filtered_nats": filtered,
        **ledger.efficiency(tau),
        **{name.replace("tau", "tau_filtered", 1): value for name, value in ledger.efficiency(filtered).items()},
        "flops": ledger.flops,
        "kv_bytes": ledger.kv_bytes,
        "pages_held": float(steps["pages_held"].sum()),
        "pages_read": float(steps["pages_read"].sum()),
        "kept_fraction_mean": _mean(steps["kept_fraction"], steps["decode_rows"]),
        "pruned_mass_mean": _mean(steps["pruned_mass_mean"], steps["decode_rows"]),
        "pruned_mass_max": float(steps["pruned_mass_max"].max(initial=0.0)),
        "certificate_max_nats": float(steps["certificate_max"].max(initial=0.0)),
    }
    n = requests["entropy_tokens"]
    grand = _mean(requests["tempered_entropy_mean"], n)
    spread = np.where(n > 1, requests["tempered_variance"] * (n - 1), 0.0)
    if grand is not None:
        spread = spread + np.where(n > 0, n * (requests["tempered_entropy_mean"] - grand) ** 2, 0.0)
    out |= {
        "model_entropy_mean_nats": _mean(requests["model_entropy_mean"], n),
        "tempered_entropy_mean_nats": grand,
        "tempered_variance_within": _mean(requests["tempered_variance"]),
        "tempered_variance_pooled": float(spread.sum() / (n.sum() - 1)) if n.sum() > 1 else None,
        "tempered_target_mean_square": _mean(requests["tempered_target_mean_square"], n),
    }
    return out
