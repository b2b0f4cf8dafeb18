"""What pruning costs: pages read, KL to dense attention and certificate against the information-loss budget."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

from figures import style

__all__ = ["draw"]

NEEDS = ("context", "theta_nats", "kept", "certificate_mean", "certificate_max", "mass_mean", "kl")


def draw(
    response: Mapping[str, Any] | str | os.PathLike[str], path: str | os.PathLike[str], *, title: str = ""
) -> None:
    """Draw the recorded response to the budget theta, one line per context length.

    Parameters
    ----------
    response : table
        One row per (context, budget): ``context`` (tokens), ``theta_nats``, ``kept`` (share of pages read),
        ``certificate_mean``, ``certificate_max`` (certified bounds on pruned softmax mass), ``mass_mean`` (true),
        ``kl`` (nats per token).
    path : path
        PNG to write.
    title : str
        Figure title (which model, which page size).
    """
    table = style.columns(response)
    style.require(table, NEEDS, "response")
    contexts = np.unique(table["context"])
    palette = [style.COLOURS[name] for name in ("sky", "blue", "green", "orange", "vermillion", "purple")]
    with style.canvas(path, cols=3, size=(11.4, 3.9)) as (figure, axes):
        figure.get_layout_engine().set(wspace=0.06)  # type: ignore[union-attr]
        if title:
            figure.suptitle(title, fontsize=10, x=0.01, ha="left")
        for number, context in enumerate(contexts):
            pick = (table["context"] == context) & (table["theta_nats"] > 0)
            order = np.argsort(table["theta_nats"][pick], kind="stable")
            theta, kept, kl, mass, certified = (
                table[name][pick][order].astype(float)
                for name in ("theta_nats", "kept", "kl", "mass_mean", "certificate_mean")
            )
            look = {"color": palette[number % len(palette)], "marker": style.MARKERS[number % len(style.MARKERS)]}
            axes[0].plot(theta, kept, label=f"{context:g} tokens", **look)
            axes[1].plot(kept, np.maximum(kl, 1e-7), **look)
            axes[2].plot(theta, certified, **look)
            axes[2].plot(theta, mass, ls=":", mfc="white", **look)
        axes[0].set_xscale("log")
        axes[0].set_ylim(0, 1.02)
        axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes[0].set_xlabel("budget θ (nats)")
        axes[0].set_ylabel("pages read (pruned layers)")
        axes[0].legend(title="context")
        axes[1].set_yscale("log")
        axes[1].xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes[1].set_xlabel("pages read (pruned layers)")
        axes[1].set_ylabel("KL to dense (nats per token)")
        axes[2].set_xscale("log")
        axes[2].set_yscale("log")
        whole_decades(axes[1])
        axes[2].set_xlabel("budget θ (nats)")
        axes[2].set_ylabel("pruned softmax mass, mean over heads")
        axes[2].plot([], [], color="black", label="certified bound")
        axes[2].plot([], [], color="black", ls=":", label="true mass")
        axes[2].legend()
        style.label_panels(axes, ("what is read", "what it costs", "what is certified"))


def whole_decades(axis: Any) -> None:
    """Widen a logarithmic y axis to whole decades, so that every end of it carries a label."""
    low, high = axis.get_ylim()
    axis.set_ylim(10.0 ** np.floor(np.log10(low)), 10.0 ** np.ceil(np.log10(high)))
    axis.yaxis.set_major_locator(LogLocator(10.0))
    axis.yaxis.set_minor_locator(LogLocator(10.0, subs=(2.0, 5.0)))
    axis.yaxis.set_minor_formatter(NullFormatter())
