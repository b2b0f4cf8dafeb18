"""The measured response to pruning, as a function of context length and budget.

Kept share, certificates, KL and the shift of the entropy are bilinear in (context, theta). Below the first recorded
context they go to those of dense attention at context 0; above the last they keep its value, which overstates what
is read (the kept share falls with context), and the tokens concerned are counted. The entropy shift is added to the
model entropy and to the tempered one, floored at 0. A theta beyond the recorded ones is an error, and so is a pruning
rule other than the recorded one (page size, dense layers, protected pages, selection): its response was not measured.

The interpolation and its edges are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.bank import Bank
from entropic_ctl.config import LawSpec
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["Response", "Responses", "cell"]

_RULE = ("dense_layers", "sink_pages", "recent_pages", "selection")
_SLACK = 1e-9  # relative distance by which a theta may miss the table


def cell(edges: FloatArray, x: npt.NDArray[Any]) -> IntArray:
    """Return for each x the i with edges[i] <= x < edges[i + 1], or the nearest cell."""
    i = edges[1:-1].searchsorted(x, side="right")
    return np.asarray(i, np.int64)


@dataclass(frozen=True, slots=True)
class Responses:
    """The response to pruning, per row (columns of shape (R,))."""

    kept: FloatArray
    certificate_mean: FloatArray
    certificate_max: FloatArray
    mass_mean: FloatArray
    kl: FloatArray
    entropy_shift: FloatArray


class Response:
    """Bilinear tables of a bank's response to theta.

    Parameters
    ----------
    bank : Bank
    """

    def __init__(self, bank: Bank) -> None:
        self._meta = bank.meta
        names = ("kept", "certificate_mean", "certificate_max", "mass_mean", "kl", "entropy_shift")
        table = np.stack([getattr(bank, name) for name in names])  # (6, C, A)
        dense = np.zeros((len(names), 1, bank.theta.shape[0]))
        dense[0] = 1.0
        self._context = np.concatenate(([0.0], bank.context))
        self._theta = bank.theta
        full = np.concatenate((dense, table), axis=1).reshape(len(names), -1)
        self._table = np.ascontiguousarray(full.T)  # one row per (context, theta)
        self.beyond_context = 0
        """Rows so far whose context lay above the last recorded one."""

    def require_rule(self, law: LawSpec, page_tokens: int) -> None:
        """Refuse a pruning rule under which the response was not recorded.

        Parameters
        ----------
        law : LawSpec
            Meso law and parameters; ``off`` reads no response.
        page_tokens : int

        Raises
        ------
        BadInputError
            Naming the configuration field, its value and the recorded one.
        """
        if law.name == "off":
            return
        asked = {"engine.page_tokens": page_tokens}
        asked |= {f"loop.pruning.{name}": getattr(law.config, name) for name in _RULE}
        for field, value in asked.items():
            name = field.rpartition(".")[2]
            recorded = self._meta.get(name, getattr(PruningConfig(), name, value))  # an older bank: the default rule
            if value != recorded:
                raise BadInputError(
                    "the entropy bank was recorded under another pruning rule",
                    field=field,
                    value=value,
                    allowed=repr(recorded),
                    remedy="use the recorded value, or record a bank under this rule (backends.record.record)",
                )

    def __call__(self, context: IntArray, theta: FloatArray) -> Responses:
        """Interpolate at (context in tokens, theta in nats), each of shape (R,).

        Raises
        ------
        BadInputError
            If a theta lies outside the recorded ones.
        """
        if theta.size and not (theta.min() >= 0.0 and theta.max() <= self._theta[-1] * (1 + _SLACK)):
            raise BadInputError(
                "theta outside the recorded response",
                where="entropy bank",
                field="theta_nats",
                value=[float(theta.min()), float(theta.max())],
                allowed=f"[0, {self._theta[-1]:g}]",
            )
        wide = self._theta.shape[0]
        i, j = cell(self._context, context), cell(self._theta, theta)
        left, below = self._context[i], self._theta[j]
        x = (context - left) / (self._context[i + 1] - left)  # >= 0
        beyond = x > 1.0
        if beyond.any():
            self.beyond_context += int(np.count_nonzero(beyond))
            x[beyond] = 1.0
        y = np.minimum((theta - below) / (self._theta[j + 1] - below), 1.0)
        at, table, xy = i * wide + j, self._table, x * y
        out = table[at] * (1.0 - x - y + xy)[:, None]
        out += table[at + 1] * (y - xy)[:, None]
        out += table[at + wide] * (x - xy)[:, None]
        out += table[at + wide + 1] * xy[:, None]
        return Responses(*out.T)
