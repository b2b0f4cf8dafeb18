"""Every move of the shipped budget law: the finite automaton behind its dwell time, gone through on the law itself.

The law compares what an entropy asks for with theta and counts; it reads nothing else. So a move is a pair of a timer
and an order (want < = > theta), and levels that realise all three orders at every timer realise every move. That the
law reads the order only is read in its code, not checked here. Part of the trusted
code; comparisons of floats only, no arithmetic. Source: ours.
"""

from __future__ import annotations

import itertools

import numpy as np

from entropic_ctl.pruning.laws import budget

__all__ = ["fault"]

_TIMERS = 128


def fault(config: budget.Config, levels: int = 5) -> str:
    """Return the first move of the shipped update that breaks the dwell time, empty if there is none.

    A sound move: a lower want is taken at once; a higher one only from timer d - 1; the timer grows by one where the
    want is higher, else it is 0, and a widening sets it to 0. By induction a widening comes d moves after the last.

    Parameters
    ----------
    config : budget.Config
    levels : int
        Entropies across the band, besides one without an observation (NaN).
    """
    law, d = budget.Budget(config), config.widen_after
    band = np.linspace(config.entropy_low_nats, config.entropy_high_nats, levels)
    entropies = np.append(band, np.nan)
    thetas = np.unique(law.wanted(entropies))
    timers = np.unique(np.concatenate([np.arange(min(d, _TIMERS)), np.arange(max(0, d - _TIMERS), d)]))
    grid = np.array(list(itertools.product(thetas.tolist(), timers.tolist(), entropies.tolist())))
    theta, timer = grid[:, 0], grid[:, 1].astype(np.int64)
    want = law.wanted(grid[:, 2])
    after, count = law.update(theta, timer, grid[:, 2])
    higher, due = want > theta, timer == d - 1
    moved = np.where((want < theta) | (higher & due), want, theta)
    counted = np.where(higher & ~due, timer + 1, 0)
    wrong = np.flatnonzero((after != moved) | (count != counted))
    if wrong.shape[0] == 0:
        return ""
    i = int(wrong[0])
    return f"from theta {theta[i]:g}, timer {timer[i]} a want of {want[i]:g} leads to {after[i]:g}, timer {count[i]}"
