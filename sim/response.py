"""The measured response to pruning, as a function of context length and budget.

Kept share, certificates, KL and the shift of the entropy are bilinear in (context, theta); the certificate in nats is
interpolated as such, which is never below -ln(1 - m) of the interpolated mass (a convex function). Below the first
recorded context they go to those of dense attention at context 0, where nothing can be pruned. Nothing is extrapolated:
a context above the last recorded one, a theta beyond the recorded ones and a pruning rule other than the recorded one
(page size, dense layers, protected pages, selection) are errors, found before the first step. With ``cost.beyond_bank
= "dense"`` rows of longer context run dense instead, which is what their kept share is then known to be; they are
counted. The entropy shift is added to the model entropy and to the tempered one, floored at 0.

The interpolation and its edges are ours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from entropic_ctl.bank import Bank
from entropic_ctl.compiled import compiled, faster
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


class Responses(NamedTuple):
    """The response to pruning, per row (columns of shape (R,)); a row that is not pruned has 1 and zeros."""

    kept: FloatArray
    certificate_mean: FloatArray
    certificate_max: FloatArray
    certificate_nats: FloatArray
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
        nats = -np.log1p(-np.minimum(bank.certificate_max, 1.0 - 1e-12))
        columns = vars(bank) | {"certificate_nats": nats}
        table = np.stack([columns[name] for name in Responses._fields])  # (7, C, A)
        dense = np.zeros((table.shape[0], 1, bank.theta.shape[0]))
        dense[0] = 1.0
        self._context = np.concatenate(([0.0], bank.context))
        self._theta = bank.theta
        full = np.concatenate((dense, table), axis=1).reshape(table.shape[0], -1)
        self._table = np.ascontiguousarray(full.T)  # one row per (context, theta)
        self.last_context = float(bank.context[-1])
        self.may_leave = False
        """True if rows can be longer than ``last_context`` and then run dense."""
        self.beyond_context = 0
        """Rows so far that ran dense for that reason."""

    @property
    def columns(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Contexts, budgets, and the table of :func:`bilinear_loop`."""
        return self._context, self._theta, self._table

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

    def __call__(self, context: IntArray, theta: FloatArray, decode: npt.NDArray[np.bool_]) -> Responses:
        """Interpolate at (context in tokens, theta in nats), each of shape (R,); only ``decode`` rows are pruned.

        Raises
        ------
        BadInputError
            If a theta or a context lies outside the recorded ones.
        """
        out, beyond, inside = _look_up(self._context, self._theta, self._table, context, theta, decode)
        if not inside:
            raise BadInputError(
                "theta outside the recorded response",
                where="entropy bank",
                field="theta_nats",
                value=[float(theta.min()), float(theta.max())],
                allowed=f"[0, {self._theta[-1]:g}]",
            )
        if beyond and not self.may_leave:
            raise BadInputError(
                "context beyond the recorded response",
                where="entropy bank",
                field="context",
                value=int(context.max()),
                allowed=f"<= {self.last_context:g} tokens",
            )
        self.beyond_context += beyond
        return Responses(*out)


def _bilinear(
    contexts: FloatArray,
    thetas: FloatArray,
    table: FloatArray,
    context: IntArray,
    theta: FloatArray,
    decode: npt.NDArray[np.bool_],
) -> tuple[FloatArray, int, bool]:
    """Return the columns, shape (7, R), how many rows were too long and so are dense, if every theta is inside."""
    wide, wanted = thetas.shape[0], decode & (theta != 0.0)
    beyond = wanted & (context > contexts[-1])
    rows = np.flatnonzero(wanted & ~beyond)
    out = np.zeros((table.shape[1], context.shape[0]))
    out[0] = 1.0
    c, t = context[rows], theta[rows]
    i, j = cell(contexts, c), cell(thetas, t)
    left, below = contexts[i], thetas[j]
    x = (c - left) / (contexts[i + 1] - left)  # in [0, 1]
    y = np.minimum((t - below) / (thetas[j + 1] - below), 1.0)
    at, xy = i * wide + j, x * y
    values = table[at] * (1.0 - x - y + xy)[:, None]
    values += table[at + 1] * (y - xy)[:, None]
    values += table[at + wide] * (x - xy)[:, None]
    values += table[at + wide + 1] * xy[:, None]
    out[:, rows] = values.T
    asked = theta[wanted]
    inside = bool(((asked >= 0.0) & (asked <= thetas[-1] * (1 + _SLACK))).all())
    return out, int(np.count_nonzero(beyond)), inside


@compiled
def bilinear_loop(
    contexts: FloatArray,
    thetas: FloatArray,
    table: FloatArray,
    context: IntArray,
    theta: FloatArray,
    decode: npt.NDArray[np.bool_],
) -> tuple[FloatArray, int, bool]:
    """Twin of :func:`_bilinear`."""
    rows, columns, wide = context.shape[0], table.shape[1], thetas.shape[0]
    out = np.empty((columns, rows))
    beyond, inside = 0, True
    for r in range(rows):
        i = j = 0
        pruned = theta[r] != 0.0 and decode[r]
        if pruned:
            inside &= theta[r] >= 0.0 and theta[r] <= thetas[-1] * (1 + _SLACK)
        if not pruned or context[r] > contexts[-1]:
            beyond += pruned
            out[0, r] = 1.0
            out[1:, r] = 0.0
            continue
        while i < contexts.shape[0] - 2 and contexts[i + 1] <= context[r]:
            i += 1
        while j < wide - 2 and thetas[j + 1] <= theta[r]:
            j += 1
        x = (context[r] - contexts[i]) / (contexts[i + 1] - contexts[i])
        y = min((theta[r] - thetas[j]) / (thetas[j + 1] - thetas[j]), 1.0)
        at, xy = i * wide + j, x * y
        a, b, c = 1.0 - x - y + xy, y - xy, x - xy
        for k in range(columns):
            value = table[at, k] * a
            value += table[at + 1, k] * b
            value += table[at + wide, k] * c
            out[k, r] = value + table[at + wide + 1, k] * xy
    return out, beyond, inside


_look_up = faster(bilinear_loop, _bilinear)
