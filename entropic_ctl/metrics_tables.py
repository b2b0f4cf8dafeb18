"""Result tables in their published form: one row per request, one row per iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.signals import FinishReason, FloatArray

__all__ = ["REASONS", "Table", "requests_table", "steps_table"]

Table = dict[str, npt.NDArray[Any]]

REASONS: tuple[str, ...] = ("live", *FinishReason)
"""Statuses by code: 0 is live, then the finish reasons."""


def _ratio(numerator: FloatArray, denominator: FloatArray) -> FloatArray:
    """Return numerator / denominator, NaN where the denominator is not positive."""
    out: FloatArray = np.full(numerator.shape, np.nan)
    np.divide(numerator, denominator, out=out, where=denominator > 0)
    return out


def requests_table(raw: Mapping[str, npt.NDArray[Any]], target_nats: float) -> Table:
    """Return one row per request; undefined values are NaN.

    Parameters
    ----------
    raw : mapping of str to ndarray
        The collector's columns.
    target_nats : float
        H*, for ``tempered_target_mean_square``; NaN for none.

    Notes
    -----
    Columns: id, client (-1: its own), status (``live`` or the finish reason), prompt_tokens, max_new_tokens,
    output_tokens, preemptions, longest_wait_steps, longest_wait_s (without service, from admission on: what the waiting
    bound is about), admission_wait_s (before, in the queue for a slot), arrival_s, left_s, ttft_s, e2e_s, tpot_s,
    gap_sum_s, gap_max_s (seconds); loss_nats and loss_max_nats (what pruning cost: the certified -ln(1 - m) of each
    step, summed and largest);
    tau_nats, tau_filtered_nats, model_entropy_mean, tempered_entropy_mean (nats), tempered_variance (about the
    request's own mean, 1 / (n - 1)) and tempered_target_mean_square (mean square about H*), in nats squared.
    """
    rows = raw["id"].shape[0]
    output = raw["output_tokens"].astype(np.int64)
    n = raw["entropy_n"]
    status = np.array(REASONS)[raw["status"]]
    return {
        "id": raw["id"],
        "client": raw["client"],
        "status": status,
        "prompt_tokens": raw["prompt_tokens"],
        "max_new_tokens": raw["max_new_tokens"],
        "output_tokens": output,
        "preemptions": raw["preemptions"],
        "longest_wait_steps": raw["wait_steps"].astype(np.int64),
        "longest_wait_s": raw["wait_s"],
        "admission_wait_s": raw["admission_wait_s"],
        "arrival_s": raw["arrival_s"],
        "left_s": raw["left_s"],
        "ttft_s": raw["first_token_s"] - raw["arrival_s"],
        "e2e_s": raw["last_token_s"] - raw["arrival_s"],
        "tpot_s": _ratio(raw["gap_sum_s"], (output - 1.0).astype(np.float64)),
        "gap_sum_s": raw["gap_sum_s"],
        "gap_max_s": raw["gap_max_s"],
        "loss_nats": raw["loss_nats"],
        "loss_max_nats": raw["loss_max_nats"],
        "tau_nats": raw["tau"],
        "tau_filtered_nats": raw["tau_filtered"],
        "entropy_tokens": n.astype(np.int64),
        "model_entropy_mean": _ratio(raw["entropy_sum"], n),
        "tempered_entropy_mean": np.where(n > 0, raw["tempered_mean"], np.nan),
        "tempered_variance": _ratio(raw["tempered_m2"], n - 1.0),
        "tempered_target_mean_square": np.full(rows, np.nan)
        if math.isnan(target_nats)
        else _ratio(raw["target_square_sum"], n),
    }


def steps_table(raw: Mapping[str, npt.NDArray[Any]]) -> Table:
    """Return one row per iteration, or per ``steps`` merged iterations.

    Columns: step (first), steps, start_s, end_s, busy_s (seconds); rows, decode_rows, scheduled_tokens, output_tokens,
    paused, preempted (sums over the merged iterations); live (in the system), waiting (live without a seat), pages_used
    (of the pool, by whoever is live): the largest; row_seconds and page_seconds (rows, pages used, times duration);
    kv_bytes (bytes), flops, energy_j; pages_held (by running rows), and of them pages_read, as a pruned layer reads
    them; kept_fraction and pruned_mass_mean (means over decode rows, NaN
    without any), pruned_mass_max, certificate_max (nats).
    """
    derived = ("kept_sum", "mass_sum", "mass_max")
    out: Table = {name: column for name, column in raw.items() if name not in derived}
    decode = raw["decode_rows"].astype(np.float64)
    out["kept_fraction"] = _ratio(raw["kept_sum"], decode)
    out["pruned_mass_mean"] = _ratio(raw["mass_sum"], decode)
    out["pruned_mass_max"] = raw["mass_max"]
    return out
