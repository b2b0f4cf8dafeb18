"""Bode plot with coherence: an estimated frequency response, its bounds, and the fitted transfer function."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from figures import style

__all__ = ["draw"]

NEEDS = (
    "output",
    "frequency",
    "gain",
    "gain_low",
    "gain_high",
    "phase_deg",
    "phase_error_deg",
    "coherence",
    "coherence_floor",
    "fit_gain",
    "fit_phase_deg",
)


def draw(
    frequency: Mapping[str, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    title: str = "",
    gain_unit: str = "nats per ln T",
    theory_gain: float | None = None,
    level: float = 0.95,
) -> None:
    """Draw gain, phase and coherence over frequency, one column per output.

    Parameters
    ----------
    frequency : table
        Columns ``output`` (name), ``frequency`` (cycles per token), ``gain``, ``gain_low``, ``gain_high``,
        ``phase_deg``, ``phase_error_deg``, ``coherence``, ``coherence_floor``, ``fit_gain``, ``fit_phase_deg``.
    path : path
        PNG to write.
    title : str
        Figure title.
    gain_unit : str
        Unit of the gain.
    theory_gain : float, optional
        Same-step gain that theory expects of the tempered entropy, drawn as a dashed line.
    level : float
        Confidence of the bounds, for the legend.
    """
    table = style.columns(frequency)
    style.require(table, NEEDS, "frequency")
    names = list(dict.fromkeys(table["output"].tolist()))
    colour = style.COLOURS
    with style.canvas(
        path,
        rows=3,
        cols=len(names),
        size=(4.4 * len(names), 7.0),
        sharex="col",
        gridspec_kw={"height_ratios": [2, 1.3, 1.3]},
    ) as (figure, axes):
        if title:
            figure.suptitle(title, fontsize=10.5, x=0.01, ha="left")
        for column, name in enumerate(names):
            mine = table["output"] == name
            get = {key: table[key][mine].astype(float) for key in NEEDS if key != "output"}
            f = get["frequency"]
            gain, phase, coherence = (axes[row * len(names) + column] for row in range(3))
            gain.fill_between(f, get["gain_low"], get["gain_high"], color=colour["sky"], alpha=0.35, lw=0)
            gain.plot(f, get["gain"], ".", color=colour["blue"], label=f"estimate, {100 * level:g}% bounds")
            gain.plot(f, get["fit_gain"], color=colour["vermillion"], label="fitted transfer function")
            if theory_gain is not None and name == "tempered_entropy":
                gain.axhline(theory_gain, color=style.GREY, ls="--", label=f"theory, same step: V = {theory_gain:.3g}")
            gain.set_ylim(0, 1.25 * max(get["gain_high"].max(), get["fit_gain"].max()))
            gain.legend(loc="upper right")
            gain.set_title(f"{chr(97 + column)}  {name.replace('_', ' ')}")
            phase.errorbar(
                f, get["phase_deg"], np.minimum(get["phase_error_deg"], 180), fmt=".", color=colour["blue"], lw=0.8
            )
            phase.plot(f, get["fit_phase_deg"], color=colour["vermillion"])
            phase.set_ylim(-200, 200)
            phase.set_yticks((-180, -90, 0, 90, 180))
            coherence.plot(f, get["coherence"], color=colour["green"], label="coherence with the excitation")
            coherence.plot(
                f,
                get["coherence_floor"],
                color=style.GREY,
                ls="--",
                label=f"unrelated noise stays below ({100 * level:g}%)",
            )
            coherence.set_ylim(0, 1.35 * max(float(get["coherence"].max()), float(get["coherence_floor"].max())))
            coherence.legend(loc="upper right")
            coherence.set_xlabel("frequency (cycles per token)")
            if column == 0:
                gain.set_ylabel(f"gain ({gain_unit})")
                phase.set_ylabel("phase (degrees)")
                coherence.set_ylabel("coherence")
