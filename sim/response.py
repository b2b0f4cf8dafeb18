"""The measured response to pruning, as a function of context length and budget.

Kept share, certificates, KL and the shift of the entropy are bilinear in (context, theta). Below the first recorded
context they go to those of dense attention at context 0, where nothing can be pruned. Nothing is extrapolated: a
context above the last recorded one, a theta beyond the recorded ones and a pruning rule other than the recorded one
(page size, dense layers, protected pages, selection) are errors, found before the first step. With ``cost.beyond_bank
= "dense"`` rows of longer context run dense instead, which is what their kept share is then known to be; they are
counted. The entropy shift is added to the model entropy and to the tempered one, floored at 0.

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
        self.last_context = float(bank.context[-1])
        self.may_leave = False
        """True if rows can be longer than ``last_context`` and then run dense."""
        self.beyond_context = 0
        """Rows so far that ran dense for that reason."""

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
                    remedy="use the recorded value, or record a bank under this rule (entropic record --config)",
                )

    def require_contexts(self, law: LawSpec, longest: int, beyond: str) -> None:
        """Decide, before a run, what happens to rows longer than the recorded contexts.

        Parameters
        ----------
        law : LawSpec
            Meso law; ``off`` reads no response.
        longest : int
            Largest context a decode row of the run can have, tokens.
        beyond : {"error", "dense"}
            ``cost.beyond_bank``.

        Raises
        ------
        BadInputError
            If there can be such rows, the law prunes, and ``beyond`` is ``error``.
        """
        if law.name == "off" or longest <= self.last_context:
            return
        if beyond == "error":
            raise BadInputError(
                "contexts can grow beyond those at which the entropy bank's response to pruning was recorded",
                field="cost.beyond_bank",
                value=longest,
                allowed=f"contexts up to {self.last_context:g} tokens",
                remedy="set beyond_bank = 'dense' to run longer rows dense, shorten prompts, outputs or "
                "engine.max_context, or record a longer bank (entropic record --contexts)",
            )
        self.may_leave = True

    def dense_beyond(self, context: IntArray, theta: FloatArray) -> FloatArray:
        """Return theta with 0 for rows beyond the last recorded context, (R,), and count those that had a budget."""
        beyond = (context > self.last_context) & (theta > 0.0)
        count = int(np.count_nonzero(beyond))
        if not count:
            return theta
        self.beyond_context += count
        return np.where(beyond, 0.0, theta)

    def __call__(self, context: IntArray, theta: FloatArray) -> Responses:
        """Interpolate at (context in tokens, theta in nats), each of shape (R,).

        Raises
        ------
        BadInputError
            If a theta or a context lies outside the recorded ones.
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
        if x.size and x.max() > 1.0:
            raise BadInputError(
                "context beyond the recorded response",
                where="entropy bank",
                field="context",
                value=int(context.max()),
                allowed=f"<= {self.last_context:g} tokens",
            )
        y = np.minimum((theta - below) / (self._theta[j + 1] - below), 1.0)
        at, table, xy = i * wide + j, self._table, x * y
        out = table[at] * (1.0 - x - y + xy)[:, None]
        out += table[at + 1] * (y - xy)[:, None]
        out += table[at + wide] * (x - xy)[:, None]
        out += table[at + wide + 1] * xy[:, None]
        return Responses(*out.T)
