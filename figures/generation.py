"""One generation, token by token: entropies, temperature, information-loss budget, share of pages read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from figures import style

__all__ = ["draw"]

NEEDS = ("id", "index", "model_entropy", "tempered_entropy", "temperature", "theta_nats", "kept_fraction")


def draw(
    tokens: Mapping[str, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    request: int | None = None,
    target_nats: float | None = None,
    title: str = "",
) -> None:
    """Draw the control signals of one request against its token index.

    Parameters
    ----------
    tokens : table
        Columns ``id``, ``index`` (position in the output), ``model_entropy``, ``tempered_entropy`` (nats),
        ``temperature``, ``theta_nats`` (nats), ``kept_fraction`` (share of KV pages read).
    path : path
        PNG to write.
    request : int, optional
        Which request; the one with the most tokens (lowest id among equals) by default.
    target_nats : float, optional
        Set point of the micro law, drawn as a dashed line.
    title : str
        Figure title.

    Raises
    ------
    BadInputError
        If a column is missing or the request has no token.
    """
    table = style.columns(tokens)
    style.require(table, NEEDS, "tokens")
    if request is None:
        ids, counts = np.unique(table["id"], return_counts=True)
        request = int(ids[np.argmax(counts)])
    mine = table["id"] == request
    chosen = {name: table[name][mine] for name in NEEDS}
    style.require(chosen, NEEDS, f"tokens of request {request}")
    order = np.argsort(chosen["index"], kind="stable")
    x, model, tempered, temperature, theta, kept = (
        chosen[name][order].astype(float)
        for name in ("index", "model_entropy", "tempered_entropy", "temperature", "theta_nats", "kept_fraction")
    )
    colour = style.COLOURS
    with style.canvas(path, rows=4, size=(7.6, 7.4), sharex=True, gridspec_kw={"height_ratios": [2.2, 1, 1, 1]}) as (
        figure,
        axes,
    ):
        if title:
            figure.suptitle(title, fontsize=10.5, x=0.01, ha="left")
        axes[0].plot(x, model, color=colour["sky"], label="model entropy (T = 1)")
        axes[0].plot(x, tempered, color=colour["blue"], ls="-", lw=1.8, label="tempered entropy (at T)")
        if target_nats is not None:
            axes[0].axhline(target_nats, color=colour["vermillion"], ls="--", label=f"target {target_nats:g} nats")
        axes[0].set_ylabel("entropy (nats)")
        axes[0].set_ylim(bottom=0)
        axes[0].legend(ncols=3, loc="upper right")
        axes[1].plot(x, temperature, color=colour["vermillion"], drawstyle="steps-mid")
        axes[1].set_ylabel("T")
        axes[2].plot(x, theta, color=colour["purple"], drawstyle="steps-mid")
        axes[2].set_ylabel("θ (nats)")
        axes[2].set_ylim(0, max(1e-3, 1.15 * float(theta.max())))
        axes[3].plot(x, 100 * kept, color=colour["green"], drawstyle="steps-mid")
        axes[3].set_ylabel("pages read (%)")
        axes[3].set_ylim(0, 105)
        axes[3].set_xlabel("output token (0 is computed with the prompt, by exact attention: θ = 0, all pages)")
        style.label_panels(
            axes,
            ("uncertainty", "sampling temperature", "information-loss budget", "KV pages read per decode step"),
        )
        top = axes[0].get_ylim()[1]
        axes[0].set_ylim(0, 1.18 * top)
