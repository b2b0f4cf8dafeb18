"""The tables people read, once for the terminal and once for the report, from the same rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from paper_repro.claims import ARMS, BASELINE, claim
from paper_repro.experiments import METRICS
from paper_repro.report import number, with_interval

__all__ = ["EFFECT_HEADER", "WORLD_HEADER", "effect_rows", "print_table", "synergy_rows", "world_rows"]

_WORLD = (
    ("latency (s)", "latency_s"),
    ("TTFT (s)", "ttft_s"),
    ("TPOT (s)", "tpot_s"),
    ("tokens/s", "throughput_tok_s"),
    ("τ (nats)", "tau_nats"),
    ("dτ/ds", "tau_per_s"),
    ("dτ/GFLOP", "tau_per_flop"),
    ("dτ/MB KV", "tau_per_kv_byte"),
    ("KV read (MB)", "kv_bytes"),
    ("pages read", "kept_fraction"),
    ("KL (nats)", "kl_nats"),
    ("certified mass", "certified_mass_mean"),
)
_SCALE = {"tau_per_flop": 1e9, "tau_per_kv_byte": 1e6, "kv_bytes": 1e-6}
WORLD_HEADER = ("arm", *(title for title, _ in _WORLD))
EFFECT_HEADER = (
    "arm",
    "metric",
    "paper",
    "simulation (ours)",
    "engine (ours)",
    "verdict in simulation",
    "verdict on engine",
)


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else math.nan


def world_rows(runs: Mapping[str, np.ndarray], world: str) -> list[list[str]]:
    """Return one row per arm: means over repeats."""
    out = []
    for arm in ARMS:
        pick = (runs["world"] == world) & (runs["arm"] == arm)
        if not pick.any():
            continue
        cells = [arm]
        for _, column in _WORLD:
            value = _mean(runs[column][pick]) if column in runs else math.nan
            cells.append(number(value * _SCALE.get(column, 1.0)))
        out.append(cells)
    return out


def effect_rows(effects: Mapping[str, np.ndarray], *, claimed_only: bool = False) -> list[list[str]]:
    """Return the paper's number, both worlds with intervals, and the verdicts, one row per arm and metric."""
    out = []
    for arm in [arm for arm in ARMS if arm != BASELINE and (effects["arm"] == arm).any()]:
        for metric in METRICS:
            said = claim(arm, metric.claim) if metric.claim else None
            if claimed_only and said is None:
                continue
            shown, verdict = [], []
            for world in ("simulation", "engine"):
                pick = (effects["world"] == world) & (effects["arm"] == arm) & (effects["metric"] == metric.name)
                if pick.any():
                    i = int(np.flatnonzero(pick)[0])
                    shown.append(with_interval(*(float(effects[name][i]) for name in ("ratio", "low", "high"))))
                    verdict.append(str(effects["verdict"][i]) or "–")
                else:
                    shown.append("–")
                    verdict.append("–")
            out.append([arm, metric.name, f"{said.paper:.2f}" if said else "–", *shown, *verdict])
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
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD)
    for i, name in enumerate(header):
        words = any(row[i][:1].isalpha() for row in rows)
        table.add_column(name, justify="left" if i == 0 or words else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
