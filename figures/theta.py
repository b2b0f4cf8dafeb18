"""Constant against entropy-driven budgets: quality against bytes, and each rule's difference at equal bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from figures import style

__all__ = ["draw"]

_CURVES = ("rule", "signal", "strength", "bytes", "kl")
_EFFECTS = ("rule", "signal", "strength", "change", "low", "high", "shuffled_change", "shuffled_low", "shuffled_high")
_LOOK = {  # rule: (label, colour, marker)
    "law": ("law: wide when the last entropy was low (shipped)", "blue", "o"),
    "mirrored law": ("mirrored law: wide when it was high", "vermillion", "s"),
    "shuffled": ("law, shuffled: the same budgets in random order", "black", "^"),
}
_SIGNALS = {
    "entropy": ("entropy, of the last step", "blue", "o"),
    "predicted_entropy": ("predicted_entropy, of this step", "green", "s"),
    "own_entropy": ("own_entropy, of this step: known too late", "orange", "D"),
}


def draw(
    curves: Mapping[str, Any] | str | os.PathLike[str],
    effects: Mapping[str, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str],
) -> None:
    """Draw the answer of ``entropic bench theta``.

    Parameters
    ----------
    curves : table
        One row per (rule, strength, budget): ``rule``, ``signal``, ``strength``, ``bytes`` (share of dense), ``kl``
        (nats per token).
    effects : table
        One row per (rule, strength): ``change`` of mean KL against constant at equal bytes with ``low`` and ``high``,
        the same as ``shuffled_...`` for the control.
    path : path
        PNG to write.
    """
    lines, table = style.columns(curves), style.columns(effects)
    style.require(lines, _CURVES, "curves")
    style.require(table, _EFFECTS, "effects")
    with style.canvas(path, cols=3, size=(12.6, 4.3)) as (_, axes):
        _quality(axes[0], lines)
        _laws(axes[1], table)
        _signals(axes[2], table)
        style.label_panels(
            axes,
            ("quality against bytes", "the budget law at equal bytes", "log-linear: theta0 exp(-s z)"),
        )


def _quality(axis: Axes, lines: Mapping[str, np.ndarray]) -> None:
    largest = lines["strength"][lines["rule"] == "law"].max(initial=0.0)
    shown = (
        ("constant", 1.0, "constant", "black", "-"),
        ("law", 1.5, "law, wide/narrow 1.5", "blue", "--"),
        ("law", largest, f"law, wide/narrow {largest:g}", "sky", "-"),
        ("mirrored law", largest, f"mirrored law, wide/narrow {largest:g}", "vermillion", "-"),
        ("hindsight", 0.0, "hindsight: the best choice, known too late", "green", ":"),
    )
    for rule, strength, label, colour, dash in shown:
        pick = (lines["rule"] == rule) & (lines["strength"] == strength)
        order = np.argsort(lines["bytes"][pick], kind="stable")
        kl = np.maximum(lines["kl"][pick][order], 1e-7)
        axis.plot(lines["bytes"][pick][order], kl, ls=dash, color=style.COLOURS[colour], label=label)
    axis.set_yscale("log")
    axis.set_ylim(1e-6, 0.1)
    axis.set_xlim(0.4, 1.0)
    axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_xlabel("KV bytes read, share of dense")
    axis.set_ylabel("mean KL to dense (nats per token)")
    axis.legend()


def _bars(axis: Axes, x: np.ndarray, y: np.ndarray, low: np.ndarray, high: np.ndarray, look: tuple[Any, ...]) -> None:
    label, colour, marker = look
    span = np.stack([np.maximum(y - low, 0.0), np.maximum(high - y, 0.0)])
    axis.errorbar(x, y, span, label=label, color=style.COLOURS[colour], marker=marker, ms=4, capsize=2, lw=1.1)


def _laws(axis: Axes, table: Mapping[str, np.ndarray]) -> None:
    for shift, (name, look) in zip((1.0, 1.02, 0.98), _LOOK.items(), strict=True):
        prefix = "shuffled_" if name == "shuffled" else ""
        pick = (table["rule"] == ("law" if prefix else name)) & (table["strength"] <= 3.0)
        values = (table[f"{prefix}{column}"][pick].astype(float) for column in ("change", "low", "high"))
        _bars(axis, table["strength"][pick].astype(float) * shift, *values, look)
    axis.axhline(0.0, color=style.GREY, lw=0.9)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.25 * (high - low))  # room for the legend
    axis.set_xlabel("wide over narrow budget")
    axis.set_ylabel("mean KL against constant theta")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.legend(loc="upper left")


def _signals(axis: Axes, table: Mapping[str, np.ndarray]) -> None:
    for signal, look in _SIGNALS.items():
        pick = (table["rule"] == "log-linear") & (table["signal"] == signal) & (np.abs(table["strength"]) <= 0.2)
        if not pick.any():
            continue
        x = np.append(table["strength"][pick].astype(float), 0.0)
        order = np.argsort(x, kind="stable")
        values = (np.append(table[name][pick].astype(float), 0.0)[order] for name in ("change", "low", "high"))
        _bars(axis, x[order], *values, look)
    axis.axhline(0.0, color=style.GREY, lw=0.9)
    axis.set_ylim(top=axis.get_ylim()[1] * 1.3)
    axis.set_xlabel("s (z: the signal in standard deviations)")
    axis.set_ylabel("mean KL against constant theta")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.legend(loc="upper right")
