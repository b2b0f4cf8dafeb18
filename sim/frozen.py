"""Distributions that stand still (or are recorded), and the shipped control plane run on them: no text, no model.

:func:`drive` runs :class:`entropic_ctl.policy.Policy` itself, with its own implementation of the observation lag, on
any sequence of ``LogitView`` s. :class:`LevelView` is a distribution given by few distinct logits and how often each
occurs, so that vocabularies of any size cost the same; its varentropy is exact. Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from entropic_ctl.bank import Bank
from entropic_ctl.errors import BadInputError
from entropic_ctl.policy import Policy
from entropic_ctl.pruning.laws import off
from entropic_ctl.scheduling import fcfs
from entropic_ctl.signals import FloatArray, IntArray, LogitView
from entropic_ctl.temperature.base import TemperatureLaw
from sim.trajectories import BankView

__all__ = ["LevelView", "Views", "drive", "recorded", "still"]

Views = Callable[[int, int], LogitView]
"""``views(t, rows)``: the distributions of token t, the same for each of ``rows`` rows."""


class LevelView:
    """Softmax of K distinct logits, logit i occurring ``count[i]`` times (implements ``LogitView``).

    Parameters
    ----------
    logits : array_like, shape (K,)
        Finite.
    count : array_like, shape (K,)
        Tokens at each level, >= 1 in all (any positive weight will do).
    rows : int
        Rows M that share it.
    """

    def __init__(self, logits: npt.ArrayLike, count: npt.ArrayLike, rows: int = 1) -> None:
        z, weight = np.asarray(logits, np.float64), np.asarray(count, np.float64)
        if z.ndim != 1 or z.shape != weight.shape or not np.isfinite(z).all() or not (weight > 0).all():
            raise BadInputError("not levels", where="LevelView", field="logits", allowed="finite, one count > 0 each")
        self._gap, self._weight, self._rows = z - z.max(), weight, rows

    @property
    def model_entropy(self) -> FloatArray:
        """Entropy at temperature 1, shape (M,), nats."""
        return self.at(np.ones(self._rows))[0]

    def at(self, temperature: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return entropy (nats) and varentropy (nats squared), each (M,), at ``temperature``, shape (M,)."""
        x = self._gap / np.asarray(temperature)[:, None]
        weight = self._weight * np.exp(x)
        total = weight.sum(1)
        mean = (weight * x).sum(1) / total
        return np.log(total) - mean, (weight * (x - mean[:, None]) ** 2).sum(1) / total


def still(logits: npt.ArrayLike, count: npt.ArrayLike) -> Views:
    """Return the views of one distribution that never changes; see :class:`LevelView`.

    Parameters
    ----------
    logits, count : array_like, shape (K,)
    """
    return lambda _, rows: LevelView(logits, count, rows)


def recorded(bank: Bank, tokens: IntArray) -> Views:
    """Return the views of recorded tokens: token t shows bank row ``tokens[t]``, the last one for ever after."""
    grid, size = np.log(bank.grid), int(bank.meta.get("vocab_size", 0))

    def views(t: int, rows: int) -> BankView:
        row = int(tokens[min(t, tokens.shape[0] - 1)])
        model = np.full(rows, float(bank.model_entropy[row]))
        return BankView(model, bank.entropy_grid, bank.varentropy_grid, grid, np.full(rows, row), None, size)

    return views


def drive(
    law: TemperatureLaw | Callable[[int], TemperatureLaw], views: Views, starts: npt.ArrayLike, steps: int, lag: int = 0
) -> tuple[FloatArray, FloatArray]:
    """Run the shipped policy on given distributions.

    Parameters
    ----------
    law : TemperatureLaw, or callable(t) -> TemperatureLaw
        A callable may change the law between tokens (a step of the target).
    views : Views
    starts : array_like, shape (S,)
        Initial u = ln T.
    steps : int
        Accepted tokens.
    lag : int
        Observation lag d.

    Returns
    -------
    u, entropy : FloatArray, shape (steps, S)
        State and tempered entropy (nats) of each token.
    """
    u0 = np.asarray(starts, np.float64)
    laws = law if callable(law) else lambda _: law
    policy = Policy(laws(0), off.build(off.Config()), fcfs.build(fcfs.Config()), slots=u0.shape[0], observation_lag=lag)
    slots, greedy = np.arange(u0.shape[0]), np.zeros(u0.shape[0], np.bool_)
    policy.start(slots)
    policy.u[:] = u0
    u, entropy = np.empty((steps, u0.shape[0])), np.empty((steps, u0.shape[0]))
    for t in range(steps):
        policy.temperature = laws(t)
        u[t] = policy.u
        tempered = policy.temper(slots, greedy, views(t, u0.shape[0]))
        entropy[t] = tempered.tempered_entropy
        policy.observe(slots, tempered.model_entropy, tempered.tempered_entropy, greedy, distinct=True)
    return u, entropy
