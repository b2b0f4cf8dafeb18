"""The micro loop's phase portrait: log-temperature now and after one update, at a certified gain and past the limit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from figures import style

__all__ = ["draw"]

NEEDS = ("arm", "start", "step", "u", "temperature", "entropy", "error")


def draw(
    trajectories: Mapping[str, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    titles: Mapping[str, str],
    target_nats: float | None = None,
    maps: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    lag: int | None = None,
    what: str = "",
) -> None:
    """Draw trajectories of the closed micro loop on frozen logits: return map above, log-temperature over steps below.

    The return map shows u(t+1) against u(t) as a staircase between the map and the diagonal: a staircase that shrinks
    to a point converges, one that closes on a rectangle is a 2-cycle. With a lag the pair is the state, and its
    successive values are joined instead: a spiral inward converges, a closed curve is a cycle.

    Parameters
    ----------
    trajectories : table
        Columns ``arm`` (which gain), ``start`` (which trajectory), ``step``, ``u`` (ln T), ``temperature``, ``entropy``
        and ``error`` (entropy minus target, nats).
    path : path
        PNG to write.
    titles : mapping
        Arm to panel title (say the gain and whether it is certified); one column per arm, in this order.
    target_nats : float, optional
        Set point, named in the figure's title.
    maps : table, optional
        Columns ``arm``, ``u`` and ``next``: the update of every u, drawn behind the staircases (no lag).
    lag : int, optional
        Draw the rows with this value in the column ``lag``.
    what : str
        Plant, vocabulary and lag, for the figure's title.
    """
    table = style.columns(trajectories)
    style.require(table, NEEDS if lag is None else (*NEEDS, "lag"), "phase")
    if lag is not None:
        table = {name: values[table["lag"] == lag] for name, values in table.items()}
        style.require(table, NEEDS, "phase")
    curves = None if maps is None or lag else style.columns(maps)
    palette = [style.COLOURS[name] for name in ("blue", "orange", "green", "vermillion", "purple", "sky")]
    arms = list(titles)
    with style.canvas(path, rows=2, cols=len(arms), size=(4.1 * len(arms), 6.2), sharex="row", sharey="row") as (
        figure,
        axes,
    ):
        for column, arm in enumerate(arms):
            plane, time = axes[column], axes[len(arms) + column]
            mine = table["arm"] == arm
            reach = [np.inf, -np.inf]
            for number, start in enumerate(np.unique(table["start"][mine])):
                pick = mine & (table["start"] == start)
                order = np.argsort(table["step"][pick], kind="stable")
                u, step = (table[name][pick][order].astype(float) for name in ("u", "step"))
                look = {"color": palette[number % len(palette)], "alpha": 0.85}
                if lag:
                    plane.plot(u[:-1], u[1:], "-", lw=0.8, **look)
                else:
                    stairs = np.repeat(u, 2)
                    plane.plot(stairs[:-2], stairs[1:-1], "-", lw=0.8, **look)
                plane.plot(u[:-1], u[1:], ".", ms=4, **look)
                plane.plot(u[0], u[0], "o", mfc="white", mec=look["color"], ms=6, zorder=4)
                plane.plot(u[-2:-1], u[-1:], "o", color="black", ms=4.5, zorder=5)
                time.plot(step, u, lw=1.1, **look)
                reach = [min(reach[0], u.min()), max(reach[1], u.max())]
            if curves is not None:
                here = curves["arm"] == arm
                plane.plot(curves["u"][here], curves["next"][here], color="black", lw=1.3, alpha=0.55, zorder=1.5)
            plane.plot(reach, reach, color=style.GREY, ls="--", lw=1, zorder=1)
            plane.set_xlabel("u(t) = ln T")
            plane.xaxis.set_major_locator(MaxNLocator(5))
            time.set_xlabel("step (accepted token)")
            plane.set_title(titles[arm])
        axes[0].set_ylabel("u(t+1)")
        axes[len(arms)].set_ylabel("u = ln T")
        target = f"; target {target_nats:.4g} nats" if target_nats is not None else ""
        curve = "; curve: the update" if curves is not None else ""
        head = f"{what}{target}\n" if what else ""
        figure.suptitle(
            f"{head}open circles: starts; small dots: one update each, (u(t), u(t+1)); black dots: last update; "
            f"dashed: u(t+1) = u(t), where an update changes nothing{curve}{'' if what else target}",
            fontsize=8.5,
            x=0.01,
            ha="left",
        )
