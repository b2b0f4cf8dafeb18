"""The measured response to pruning, as a function of context length and budget.

Kept share, certificates, KL and the shift of the entropy are bilinear in (context, theta); the certificate in nats is
interpolated as such, which is never below -ln(1 - m) of the interpolated mass (a convex function). Below the first recorded
context they go to those of dense attention at context 0; above the last they keep its value, which overstates what
is read (the kept share falls with context), and the tokens concerned are counted. The entropy shift is added to the
model entropy and to the tempered one, floored at 0. A theta beyond the recorded ones is an error, and so is a pruning
rule other than the recorded one (page size, dense layers, protected pages, selection): its response was not measured.

The interpolation and its edges are ours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from entropic_ctl.bank import Bank
from entropic_ctl.compiled import compiled
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
        columns = {"certificate_nats": nats}
        table = np.stack([columns.get(name, getattr(bank, name, None)) for name in Responses._fields])  # (7, C, A)
        dense = np.zeros((table.shape[0], 1, bank.theta.shape[0]))
        dense[0] = 1.0
        self._context = np.concatenate(([0.0], bank.context))
        self._theta = bank.theta
        full = np.concatenate((dense, table), axis=1).reshape(table.shape[0], -1)
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

    def __call__(self, context: IntArray, theta: FloatArray, decode: npt.NDArray[np.bool_]) -> Responses:
        """Interpolate at (context in tokens, theta in nats), each of shape (R,); only ``decode`` rows are pruned.

        Raises
        ------
        BadInputError
            If a theta lies outside the recorded ones.
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
    """Return the interpolated columns, shape (7, R), how many contexts lay above the last, if every theta is inside."""
    wide, rows = thetas.shape[0], np.flatnonzero(decode & (theta != 0.0))
    out = np.zeros((table.shape[1], context.shape[0]))
    out[0] = 1.0
    c, t = context[rows], theta[rows]
    i, j = cell(contexts, c), cell(thetas, t)
    left, below = contexts[i], thetas[j]
    x = (c - left) / (contexts[i + 1] - left)  # >= 0
    beyond = x > 1.0
    x[beyond] = 1.0
    y = np.minimum((t - below) / (thetas[j + 1] - below), 1.0)
    at, xy = i * wide + j, x * y
    values = table[at] * (1.0 - x - y + xy)[:, None]
    values += table[at + 1] * (y - xy)[:, None]
    values += table[at + wide] * (x - xy)[:, None]
    values += table[at + wide + 1] * xy[:, None]
    out[:, rows] = values.T
    inside = bool(((t >= 0.0) & (t <= thetas[-1] * (1 + _SLACK))).all())
    return out, int(np.count_nonzero(beyond)), inside


@compiled
def _bilinear_loop(
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
        if theta[r] == 0.0 or not decode[r]:
            out[0, r] = 1.0
            out[1:, r] = 0.0
            continue
        inside &= theta[r] >= 0.0 and theta[r] <= thetas[-1] * (1 + _SLACK)
        while i < contexts.shape[0] - 2 and contexts[i + 1] <= context[r]:
            i += 1
        while j < wide - 2 and thetas[j + 1] <= theta[r]:
            j += 1
        x = (context[r] - contexts[i]) / (contexts[i + 1] - contexts[i])
        if x > 1.0:
            beyond += 1
            x = 1.0
        y = min((theta[r] - thetas[j]) / (thetas[j + 1] - thetas[j]), 1.0)
        at, xy = i * wide + j, x * y
        a, b, c = 1.0 - x - y + xy, y - xy, x - xy
        for k in range(columns):
            value = table[at, k] * a
            value += table[at + 1, k] * b
            value += table[at + wide, k] * c
            out[k, r] = value + table[at + wide + 1, k] * xy
    return out, beyond, inside


_look_up = _bilinear_loop or _bilinear
