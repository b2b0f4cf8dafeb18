"""The tables people read, once for the terminal and once for the report, from the same rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from paper_repro.claims import ARMS, claim
from paper_repro.experiments import METRICS
from paper_repro.report import number, with_interval

__all__ = ["EFFECT_HEADER", "effect_rows", "print_table", "synergy_rows", "world_table"]

_WORLD = (
    ("latency (s)", "latency_s"),
    ("p99 latency (s)", "latency_p99_s"),
    ("longest wait (s)", "longest_wait_s"),
    ("preemptions", "preemptions"),
    ("TTFT (s)", "ttft_s"),
    ("TPOT (s)", "tpot_s"),
    ("tokens/s", "throughput_tok_s"),
    ("tokens", "output_tokens"),
    ("τ (nats)", "tau_nats"),
    ("dτ/ds", "tau_per_s"),
    ("dτ/GFLOP", "tau_per_flop"),
    ("dτ/MB KV", "tau_per_kv_byte"),
    ("KV read (MB)", "kv_bytes"),
    ("pages read", "kept_fraction"),
    ("KL (nats)", "kl_nats"),
    ("cert. mass", "certified_mass_mean"),
)
_SCALE = {"tau_per_flop": 1e9, "tau_per_kv_byte": 1e6, "kv_bytes": 1e-6}
_UNCLAIMED = ("p99 latency", "longest wait", "TPOT")
"""Metrics without a claim that stand beside the claimed ones, because they can get worse unnoticed."""
EFFECT_HEADER = ("arm", "metric", "paper", "ours [95% interval]", "verdict")


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else math.nan


def world_table(runs: Mapping[str, np.ndarray], world: str) -> tuple[list[str], list[list[str]]]:
    """Return (header, rows): one column per arm, one row per quantity, means over repeats."""
    arms = [arm for arm in ARMS if ((runs["world"] == world) & (runs["arm"] == arm)).any()]
    rows = []
    for title, column in _WORLD:
        cells = [title]
        for arm in arms:
            pick = (runs["world"] == world) & (runs["arm"] == arm)
            value = _mean(runs[column][pick]) if column in runs else math.nan
            cells.append(number(value * _SCALE.get(column, 1.0)))
        rows.append(cells)
    return ["mean", *arms], rows


def effect_rows(effects: Mapping[str, np.ndarray], world: str, *, claimed_only: bool = False) -> list[list[str]]:
    """Return the paper's number, ours with its interval, and the verdict, one row per arm and metric.

    ``claimed_only`` keeps the metrics the paper claims something about, and the few that guard against hidden losses.
    """
    out = []
    titles = {metric.name: metric.claim for metric in METRICS}
    for i in np.flatnonzero(effects["world"] == world).tolist():
        arm, metric = str(effects["arm"][i]), str(effects["metric"][i])
        said = claim(arm, titles[metric]) if titles[metric] else None
        if claimed_only and said is None and metric not in _UNCLAIMED:
            continue
        ours = with_interval(*(float(effects[name][i]) for name in ("ratio", "low", "high")))
        first = arm if not out or arm not in [row[0] for row in out] else ""
        out.append([first, metric, f"{said.paper:.2f}" if said else "–", ours, str(effects["verdict"][i]) or "–"])
    return out


def synergy_rows(synergy: Mapping[str, np.ndarray]) -> list[list[str]]:
    """Return full loop over the product of its parts, by world and metric."""
    return [
        [
            str(synergy["world"][i]),
            str(synergy["metric"][i]),
            with_interval(*(float(synergy[name][i]) for name in ("ratio", "low", "high"))),
            str(synergy["better"][i]),
        ]
        for i in range(synergy["metric"].shape[0])
    ]


def print_table(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is left-aligned, words too, numbers right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for i, name in enumerate(header):
        words = any(row[i][:1].isalpha() for row in rows)
        table.add_column(
            name.replace(" ", "\n") if i and name in ARMS else name,
            justify="left" if i == 0 or words else "right",
            no_wrap=True,
        )
    for row in rows:
        table.add_row(*row)
    console.print(table)
