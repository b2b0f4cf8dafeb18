"""What pruning has cost a request so far, and the limit on it.

A decode step with budget theta > 0 ends with a certificate: the largest -ln(1 - m) over its pruned layers and query
heads, at most theta under the union selection. The accountant sums these over the steps of a request and keeps the
largest *(ours)*. With a limit L > 0 (``total_nats``), a step whose budget theta could carry the sum past L runs dense:

    theta in force = theta   if spent + theta <= L,   else 0.

A step spends at most its theta, and floating-point addition is monotone, so ``spent <= L`` holds exactly, at every step
and for every text; what a step did not use of its theta stays available. The law's own state goes on as if nothing had
happened, so a request may prune again when the law asks for a budget that still fits.

What the sum bounds, and what it does not. For each *single* head it bounds the total over the text of the information
its own attention lost, relative to the cache that was there: sum over steps of KL(pruned || full) of that head's
weights. It does not bound the KL of the next token's distribution, of one step or of the text: heads and layers act
through values and through each other. That KL is measured, by the engine's audit. Pages that an earlier, pruned step
wrote differ from those a dense run would hold; the certificates are about the cache as it is.

What the driver does not report (or reports as NaN) is charged at its upper bound, theta; so is every step of an engine
that sees its results late (``observation_lag`` > 0).
"""

from __future__ import annotations

import numpy as np

from entropic_ctl.compiled import compiled, faster
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["allowed", "allowed_loop", "charge", "charge_loop", "reaching", "reaching_loop"]


def _allowed_columns(theta: FloatArray, spent: FloatArray, total: float) -> FloatArray:
    """Return the budgets in force, shape of ``theta``: 0 where the step could exceed the limit.

    Parameters
    ----------
    theta : FloatArray, shape (slots,)
        What the law asks for, nats.
    spent : FloatArray, shape (slots,)
        Nats so far.
    total : float
        L > 0, nats.
    """
    return np.where(spent + theta <= total, theta, 0.0)


@compiled
def allowed_loop(theta: FloatArray, spent: FloatArray, total: float) -> FloatArray:
    """Twin of :func:`_allowed_columns`."""
    out = np.zeros_like(theta)
    for i in range(theta.shape[0]):
        if spent[i] + theta[i] <= total:
            out[i] = theta[i]
    return out


allowed = faster(allowed_loop, _allowed_columns)


def _reaching_columns(theta: FloatArray, cached: IntArray, least: int) -> FloatArray:
    """Return the budgets in force, shape of ``theta``: 0 where fewer than ``least`` tokens are cached.

    Parameters
    ----------
    theta : FloatArray, shape (slots,)
        Nats.
    cached : IntArray, shape (slots,)
    least : int
        ``min_context``, tokens.
    """
    return np.where(cached >= least, theta, 0.0)


@compiled
def reaching_loop(theta: FloatArray, cached: IntArray, least: int) -> FloatArray:
    """Twin of :func:`_reaching_columns`."""
    out = np.zeros_like(theta)
    for i in range(theta.shape[0]):
        if cached[i] >= least:
            out[i] = theta[i]
    return out


reaching = faster(reaching_loop, _reaching_columns)


def _charge_columns(
    spent: FloatArray, worst: FloatArray, slots: IntArray, theta: FloatArray, certificate: FloatArray
) -> None:
    """Book one step on these distinct slots.

    Parameters
    ----------
    spent, worst : FloatArray, shape (slots,)
        Changed in place.
    slots : IntArray, shape (R,)
    theta : FloatArray, shape (R,)
        Budgets in force in the step; rows at 0 spend nothing.
    certificate : FloatArray, shape (R,)
        Largest certified -ln(1 - m), nats; NaN counts as theta.
    """
    cost = np.where(theta > 0.0, np.where(np.isnan(certificate), theta, certificate), 0.0)
    spent[slots] += cost
    worst[slots] = np.maximum(worst[slots], cost)


@compiled
def charge_loop(
    spent: FloatArray, worst: FloatArray, slots: IntArray, theta: FloatArray, certificate: FloatArray
) -> None:
    """Twin of :func:`_charge_columns`."""
    for i in range(slots.shape[0]):
        if theta[i] > 0.0:
            cost = theta[i] if np.isnan(certificate[i]) else certificate[i]
            spent[slots[i]] += cost
            worst[slots[i]] = max(worst[slots[i]], cost)


charge = faster(charge_loop, _charge_columns)
