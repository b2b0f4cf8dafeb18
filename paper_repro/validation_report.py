"""What a validation says to people: tables on the screen, and ``report.html``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from paper_repro.report import Report, number
from paper_repro.sections import print_table
from sim import calibrate, validate
from sim.validation_plan import SETTINGS

if TYPE_CHECKING:
    from paper_repro.validation import Findings

__all__ = ["numbers", "show", "tables", "verdict", "write"]

Table = tuple[str, Sequence[str], list[list[str]]]

_NAMES = {
    "tpot_mean_s": "TPOT mean, s",
    "tpot_p50_s": "TPOT P50, s",
    "tpot_p99_s": "TPOT P99, s",
    "ttft_mean_s": "TTFT mean, s",
    "ttft_p99_s": "TTFT P99, s",
    "e2e_mean_s": "E2E mean, s",
    "e2e_p99_s": "E2E P99, s",
    "throughput_tokens_per_s": "tokens/s",
}


def _percent(value: float, *, sign: bool = False) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{100 * value:+.1f}%" if sign else f"{100 * value:.1f}%"


def _error_rows(errors: Mapping[str, np.ndarray], pick: np.ndarray, *, name: bool) -> list[list[str]]:
    rows = []
    for i in np.flatnonzero(pick).tolist():
        limit = float(errors["target"][i])
        rows.append(
            [
                str(errors["setting"][i]) if name else f"{errors['utilisation'][i]:g}",
                _NAMES[str(errors["metric"][i])],
                f"{number(errors['engine'][i])} ± {number(errors['engine_half'][i], 2)}",
                _percent(float(errors["noise"][i])),
                number(errors["simulated"][i]),
                _percent(float(errors["error"][i]), sign=True),
                f"{100 * limit:.0f}%" if math.isfinite(limit) else "–",
                ("yes" if errors["ok"][i] else "NO") if math.isfinite(limit) else "",
            ]
        )
    return rows


def tables(findings: Findings) -> list[Table]:
    """Return (title, header, rows): errors of the base setting, of every setting, and the rankings."""
    errors = findings.errors
    header = ("metric", "engine, 95%", "noise", "simulator", "error", "target", "ok")
    base = errors["setting"] == SETTINGS[0].name
    goal = np.isfinite(errors["target"])
    share = []
    for metric in dict.fromkeys(errors["metric"][goal].tolist()):
        mine = goal & ~base & (errors["metric"] == metric)
        size = np.abs(errors["error"][mine])
        share.append(
            [
                _NAMES[metric],
                f"{int(errors['ok'][mine].sum())} of {int(mine.sum())}",
                _percent(float(np.mean(size))),
                _percent(float(np.max(size))),
                str(errors["setting"][mine][int(np.argmax(size))]),
                _percent(float(np.median(errors["noise"][mine]))),
            ]
        )
    ranking = [
        [_NAMES[r.metric], str(r.pairs), str(r.separated), str(r.alike), _percent(r.alike / max(1, r.separated))]
        for r in findings.rankings
    ]
    return [
        ("base setting, by utilisation", ("at", *header), _error_rows(errors, base, name=False)),
        (
            "the other settings at the middle utilisation",
            ("metric", "in target", "mean |error|", "largest", "of", "noise"),
            share,
        ),
        (
            "ranking: pairs whose intervals separate",
            ("metric", "pairs", "separated", "ranked alike", "share"),
            ranking,
        ),
    ]


def numbers(findings: Findings) -> dict[str, Any]:
    """Return the findings for machines."""
    errors = findings.errors
    names = list(errors)
    rows = [dict(zip(names, values, strict=True)) for values in zip(*(errors[n].tolist() for n in names), strict=True)]
    return {
        "ok": findings.ok,
        "base_ok": findings.base_ok,
        "ranked_alike": findings.alike,
        "ranking": [
            {"metric": r.metric, "pairs": r.pairs, "separated": r.separated, "alike": r.alike}
            for r in findings.rankings
        ],
        "errors": rows,
        "utilisation": {f"{k:g}": v for k, v in findings.utilisations.items()},
        "beyond_steps": findings.beyond_steps,
        "notes": findings.notes,
    }


def show(findings: Findings, console: Console) -> None:
    """Print tables, notes and the verdict."""
    for title, header, rows in tables(findings):
        print_table(console, title, header, rows)
        console.print()
    for note in (*findings.notes, verdict(findings)):
        console.print(note, markup=False, soft_wrap=True)


def verdict(findings: Findings) -> str:
    """Return one sentence."""
    return (
        f"Base setting within all targets: {'yes' if findings.base_ok else 'no'}. "
        f"Separated pairs ranked alike: {_percent(findings.alike)} (target {_percent(validate.ALIKE)})."
    )


def write(findings: Findings, folder: Path, stamp: Mapping[str, Any]) -> None:
    """Write ``report.html`` into the folder."""
    report = Report("Simulator against engine", f"seed {stamp['seed']}; every number is from this run")
    report.heading("Summary")
    report.say(verdict(findings), "Verdict")
    report.points(findings.notes)
    meant = ", ".join(f"{k:g} was {v:.2f}" for k, v in findings.utilisations.items())
    report.say(
        "One Poisson trace of requests ran on the real engine and in the simulator, which was calibrated on another "
        "load. Utilisation is the arrival rate over the rate at which the simulator serves the same requests when all "
        f"arrive at once; rates were fixed by the first blocks, and under the final calibration {meant}. Repeat noise "
        "is the relative standard deviation of the engine over its own repeats of the same requests.",
        "What was done",
    )
    report.figure(folder / "validation.png", "Left: each metric of each cell. Right: requests of the base setting.")
    for title, header, rows in tables(findings):
        report.table(header, rows, title)
    for ranking in findings.rankings:
        marks = {1: "=", -1: "≠", 0: "·"}
        rows = [
            [name, *(marks[int(x)] for x in line)] for name, line in zip(ranking.settings, ranking.matrix, strict=True)
        ]
        report.table(
            ("", *ranking.settings), rows, f"{_NAMES[ranking.metric]}: = alike, ≠ the other way round, · not separated"
        )
    report.heading("Every setting")
    pick = np.isfinite(findings.errors["target"]) & (findings.errors["setting"] != SETTINGS[0].name)
    header = ("setting", "metric", "engine, 95%", "repeat noise", "simulator", "error", "target", "ok")
    report.table(header, _error_rows(findings.errors, pick, name=True))
    report.heading("Calibration")
    fitted = calibrate.summary(findings.calibration)
    report.table(("what", "value"), [[k, v if isinstance(v, str) else number(v)] for k, v in fitted.items()])
    report.heading("Every run")
    runs = findings.runs
    shown = (
        *("setting", "utilisation", "repeat", "reference_s", "probe_s", "foreign_cores", "disturbed", "used"),
        "tpot_mean_s",
    )
    rows = [[number(runs[name][i]) for name in shown] for i in range(runs["setting"].shape[0])]
    report.table(shown, rows, "in the order in which they ran")
    report.details("configuration, hardware and versions", dict(stamp))
    report.write(folder / "report.html")
