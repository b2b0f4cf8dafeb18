"""Lyapunov exponent of the temperature loop against its gain, the certified region shaded, for each observation lag."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from figures import style

__all__ = ["draw"]

NEEDS = ("lag", "gain", "equilibrium", "attractor", "linear", "kind", "period", "amplitude")
_FLOOR = -2.5  # the exponent falls without bound where k V = 1
_LOOK = {"settles": "blue", "cycles": "vermillion", "wanders": "purple", "clamped": "black"}


def draw(
    sweep: Mapping[str, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    certified: Mapping[int, float],
    gain: float | None = None,
    title: str = "",
) -> None:
    """Draw exponents (top) and the amplitude of what remains (bottom) over the gain, one column per lag.

    Parameters
    ----------
    sweep : table
        Columns ``lag``, ``gain``, ``equilibrium``, ``attractor``, ``linear`` (exponents, nats per token), ``kind``,
        ``period``, ``amplitude`` (of u in the long run).
    path : path
        PNG to write.
    certified : mapping of int to float
        Lag to the supremum of certified gains; the region below it is shaded.
    gain : float, optional
        The configured gain, marked.
    title : str
        Figure title.
    """
    table = style.columns(sweep)
    style.require(table, NEEDS, "sweep")
    lags = np.unique(table["lag"]).tolist()
    with style.canvas(
        path, rows=2, cols=len(lags), size=(4.6 * len(lags), 6.0), sharex="col", gridspec_kw={"height_ratios": [2, 1]}
    ) as (figure, axes):
        if title:
            figure.suptitle(title, fontsize=10.5, x=0.01, ha="left")
        for column, lag in enumerate(lags):
            mine = table["lag"] == lag
            k = table["gain"][mine].astype(float)
            values, left = axes[column], axes[len(lags) + column]
            limit = certified.get(int(lag))
            for axis in (values, left):
                if limit is not None:
                    axis.axvspan(0, limit, color=style.COLOURS["green"], alpha=0.12, lw=0)
                    axis.axvline(limit, color=style.COLOURS["green"], lw=1.2)
                if gain is not None:
                    axis.axvline(gain, color=style.GREY, ls=":", lw=1.2)
            shown = {name: table[name][mine].astype(float) for name in NEEDS[2:5]}
            values.plot(k, shown["linear"], color=style.GREY, ls="--", label="linear theory")
            values.plot(k, shown["attractor"], ".", ms=4, color=style.COLOURS["orange"], label="along the attractor")
            values.plot(
                k, shown["equilibrium"], "o", mfc="none", color=style.COLOURS["blue"], label="at the equilibrium"
            )
            values.axhline(0, color="black", lw=0.8)
            values.set_ylim(_FLOOR - 0.05, 0.75)
            values.set_title(f"{chr(97 + column)}  observation lag {lag}")
            kinds = table["kind"][mine].astype(str)
            amplitude = table["amplitude"][mine].astype(float)
            for kind, name in _LOOK.items():
                pick = kinds == kind
                if pick.any():
                    left.plot(k[pick], amplitude[pick], "o", ms=4, color=style.COLOURS[name], label=kind)
            left.set_xlabel("gain k (u = ln T per nat)")
            left.set_xlim(0, 1.02 * float(k.max()))
            left.legend(loc="upper left")
            if column == 0:
                values.legend(loc="lower right")
                values.set_ylabel("Lyapunov exponent (nats per token)")
                left.set_ylabel("amplitude of u, long run")
            if limit is not None:
                values.annotate(
                    "certified for every logit vector",
                    (0.03 * limit, 0.62),
                    color=style.COLOURS["green"],
                    fontsize=8.5,
                )
