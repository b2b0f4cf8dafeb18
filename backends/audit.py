"""Compare pruned with dense attention on the same step: KL of the next-token distributions, and a bound on its mean.

A step is audited by running it dense as well, over the same cache, before the pruned pass: its KL is the effect of that
step's pruning alone. Which steps: every n-th (``engine.audit_every``), or each with probability p by a coin of its own
(``engine.audit_rate``), seeded and independent of requests, text and logits. With coins the audit is *live*: at any
moment it gives an interval for the mean KL of all pruned steps so far, looked at or not, that is true with chance
1 - alpha at all moments at once (:class:`entropic_ctl.confidence.MeanBound`). The loss of a step is the mean KL of its
pruned rows, capped at ``engine.audit_cap_nats``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.sampling import TorchLogitView, to_host
from entropic_ctl.confidence import MeanBound
from entropic_ctl.config import EngineConfig
from entropic_ctl.signals import FloatArray, IntArray, StepPlan

__all__ = ["AuditTable", "LiveAudit", "kl_nats"]

_COLUMNS = ("step", "id", "context", "theta_nats", "kl_nats", "entropy_dense", "entropy_pruned")


def kl_nats(pruned: Tensor, dense: Tensor) -> FloatArray:
    """Return KL(pruned || dense) of each row, nats.

    Parameters
    ----------
    pruned, dense : Tensor, any float dtype, shape (M, n)
        Raw logits of the same positions.

    Returns
    -------
    float64, shape (M,)
    """
    log_p, log_q = torch.log_softmax(pruned.double(), -1), torch.log_softmax(dense.double(), -1)
    terms = torch.where(log_p > -torch.inf, log_p.exp() * (log_p - log_q), 0.0)
    return np.asarray(terms.sum(-1).clamp_min(0.0).cpu().numpy(), np.float64)


class AuditTable:
    """Rows of audited decode steps, as columns."""

    def __init__(self) -> None:
        self._parts: list[tuple[Any, ...]] = []

    def add(
        self, plan: StepPlan, rows: IntArray, kl: FloatArray, dense_entropy: FloatArray, pruned_entropy: FloatArray
    ) -> None:
        """Append the audited rows (``rows`` index the plan; the other arrays have one entry per row)."""
        step = np.full(rows.shape[0], plan.step)
        columns = (plan.ids[rows], plan.context[rows], plan.theta_nats[rows], kl, dense_entropy, pruned_entropy)
        self._parts.append((step, *columns))

    def table(self) -> dict[str, Any]:
        """Return the columns ``step, id, context, theta_nats, kl_nats, entropy_dense, entropy_pruned``."""
        if not self._parts:
            return {name: np.empty(0) for name in _COLUMNS}
        return {name: np.concatenate([part[i] for part in self._parts]) for i, name in enumerate(_COLUMNS)}


class LiveAudit(AuditTable):
    """Decides which steps are audited, runs them dense, and keeps what they showed.

    Parameters
    ----------
    engine : EngineConfig
    seed : int
        Of the coins.
    clock : callable
        Seconds now.

    Attributes
    ----------
    seconds : float
        Time that audits took (left out of the engine's own clock).
    """

    def __init__(self, engine: EngineConfig, seed: int, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self._every, self._rate, self._limit = engine.audit_every, engine.audit_rate, engine.audit_limit_nats
        self._coins = np.random.default_rng([seed, 0xA0D17])
        rate = self._rate or 1.0
        self._bound = MeanBound(engine.audit_cap_nats, alpha=engine.audit_alpha, rate=rate)
        self.seconds = 0.0

    def due(self, step: int) -> bool:
        """Return whether this step, in which rows are pruned, is audited; call it once for each such step."""
        if self._rate:
            looked = bool(self._coins.random() < self._rate)
            if not looked:
                self._bound.skip()
            return looked
        return self._every > 0 and step % self._every == 0

    def dense(self, plan: StepPlan, run: Callable[[StepPlan], Tensor]) -> Tensor | None:
        """Return the dense logits of a step that is audited, else None.

        Parameters
        ----------
        plan : StepPlan
        run : callable(plan)
            Runs the step's tokens and returns the logits of its positions; the pruned pass comes after it, and
            overwrites the new K and V.
        """
        if not (plan.samples & (plan.theta_nats > 0)).any() or not self.due(plan.step):
            return None
        with self._timed():
            return run(plan._replace(theta_nats=np.zeros_like(plan.theta_nats)))

    def compare(self, plan: StepPlan, rows: IntArray, pruned: Tensor, dense: Tensor) -> str | None:
        """Append those of the sampling rows ``rows`` that were pruned, given all their logits (M, n); return an alarm.

        ``rows`` index the plan.
        """
        with self._timed():
            hit = np.flatnonzero((plan.theta_nats[rows] > 0) & (plan.n_tokens[rows] == 1))
            if not hit.size:
                return None
            index = torch.as_tensor(hit, device=pruned.device)
            a, b = pruned[index], dense[index]
            entropies = (to_host(TorchLogitView(x).model_entropy) for x in (b, a))
            self.add(plan, rows[hit], kl_nats(a, b), *entropies)
            return self.alarm

    @contextmanager
    def _timed(self) -> Iterator[None]:
        before = self._clock()
        try:
            yield
        finally:
            self.seconds += self._clock() - before

    def add(
        self, plan: StepPlan, rows: IntArray, kl: FloatArray, dense_entropy: FloatArray, pruned_entropy: FloatArray
    ) -> None:
        """Append the audited rows, and their mean KL to the bound; a row whose KL is NaN (no support) is left out."""
        super().add(plan, rows, kl, dense_entropy, pruned_entropy)
        if self._rate or self._every == 1:
            known = kl[~np.isnan(kl)]
            self._bound.add(float(known.mean()) if known.shape[0] else 0.0)

    @property
    def alarm(self) -> str | None:
        """What to say when the mean KL is above ``engine.audit_limit_nats`` for sure (chance 1 - alpha), else None."""
        low, _ = self._bound.interval
        if not self._limit or not low > self._limit:
            return None
        return f"mean KL of pruned steps is at least {low:.3g} nats, above the limit of {self._limit:g}"

    def report(self) -> dict[str, float | int | None]:
        """Return the bound now, JSON-able.

        ``steps`` with pruned rows, ``audited`` of them; ``mean_kl_nats`` with ``low_nats`` and ``high_nats`` (None
        without a bound: nothing pruned, or a fixed schedule, which may beat in time with the text); ``alpha``,
        ``cap_nats``, ``capped`` (audited steps at the cap), ``seconds`` spent on audits.
        """
        bound, live = self._bound, self._bound.steps > 0
        low, high = bound.interval
        return {
            "steps": bound.steps,
            "audited": bound.looked,
            "mean_kl_nats": bound.mean if live and not math.isnan(bound.mean) else None,
            "low_nats": low if live else None,
            "high_nats": high if live else None,
            "alpha": bound.alpha,
            "cap_nats": bound.cap,
            "capped": bound.capped,
            "seconds": self.seconds,
        }
