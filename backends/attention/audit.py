"""Is the certificate true, and is it tight? Measured on a real model over real text.

A text is prefilled exactly; then its last tokens are decoded one by one (teacher forced) with pruning. In every pruned
layer the mass that was really lost is computed densely in float64 from the same cache and query and compared with the
certificate, head by head. Each position is also decoded densely, to measure the KL of the next-token distribution.
What later tokens see of a position is what the pruned pass made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backends.audit import kl_nats
from backends.filled import FilledCache
from backends.models import LoadedModel
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig

__all__ = ["CertificateAudit", "audit_certificate"]


@dataclass(frozen=True, slots=True)
class CertificateAudit:
    """Certificates against truth, over (position, pruned layer, query head).

    Parameters
    ----------
    context, positions, heads : int
        Longest context in tokens; decoded positions; number of (position, layer, head) triples.
    theta_nats : float
        The budget.
    violations : int
        Triples whose true pruned mass exceeds the certificate. Must be 0.
    over_budget : int
        Triples whose certified -ln(1 - m) exceeds theta; 0 under the union selection.
    mean_certificate, mean_true_mass, ratio : float
        Means of the certified and of the true pruned mass, and their quotient (1 is perfectly tight).
    max_certificate_nats, max_true_nats : float
        Largest certified and true -ln(1 - m).
    kept_fraction : float
        Mean share of pages read in pruned layers.
    kv_bytes, dense_kv_bytes : float
        KV-cache bytes read per position, with pruning and without.
    kl_nats_mean, kl_nats_max : float
        KL(pruned || dense) of the next-token distribution, as everywhere in this project.
    """

    context: int
    positions: int
    heads: int
    theta_nats: float
    violations: int
    over_budget: int
    mean_certificate: float
    mean_true_mass: float
    ratio: float
    max_certificate_nats: float
    max_true_nats: float
    kept_fraction: float
    kv_bytes: float
    dense_kv_bytes: float
    kl_nats_mean: float
    kl_nats_max: float

    @property
    def holds(self) -> bool:
        """True if no certificate was exceeded and none exceeded the budget."""
        return self.violations == 0 and self.over_budget == 0


def audit_certificate(
    model: LoadedModel,
    tokens: Sequence[int],
    theta_nats: float,
    *,
    positions: int = 8,
    page_tokens: int = 16,
    pruning: PruningConfig | None = None,
    chunk: int = 512,
) -> CertificateAudit:
    """Decode the last ``positions`` tokens of a text with pruning and compare every certificate with the truth.

    Parameters
    ----------
    model : LoadedModel
        Its attention is switched to the paged one, and stays so.
    tokens : sequence of int
        The text; more tokens than ``positions``.
    theta_nats : float
        Budget, > 0.
    positions, page_tokens, chunk : int
        Tokens decoded; tokens per page; tokens per prefill chunk.
    pruning : PruningConfig, optional
        Protected pages, dense layers, selection.

    Raises
    ------
    BadInputError
        If the text is too short or the budget is not positive.
    """
    if not 1 <= positions < len(tokens):
        raise BadInputError("text too short", field="positions", value=positions, allowed=f"[1, {len(tokens) - 1}]")
    if not theta_nats > 0:
        raise BadInputError("nothing to audit", field="theta_nats", value=theta_nats, allowed="> 0")
    prefix = len(tokens) - positions
    filled = FilledCache(model, tokens[:prefix], page_tokens=page_tokens, chunk=chunk, room=len(tokens))
    true, certified, kept, kl = [], [], [], []
    bytes_pruned = bytes_dense = 0.0
    for passes in filled.decode(tokens[prefix:], [0.0, theta_nats], pruning or PruningConfig(), audit_every=1):
        dense, pruned = passes[0.0], passes[theta_nats]
        bytes_dense += dense.batch.kv_bytes
        bytes_pruned += pruned.batch.kv_bytes
        true += [a.true_mass for a in pruned.batch.audits]
        certified += [a.certified_mass for a in pruned.batch.audits]
        kept += [a.kept.mean() for a in pruned.batch.audits]
        kl.append(kl_nats(pruned.logits, dense.logits)[0])
    if not true:
        raise BadInputError(
            "no page could be pruned",
            field="tokens",
            value=len(tokens),
            remedy="pass a longer text or protect fewer pages and layers",
        )
    lost, bound = np.concatenate(true), np.concatenate(certified)
    return CertificateAudit(
        context=len(tokens),
        positions=positions,
        heads=lost.size,
        theta_nats=theta_nats,
        violations=int((lost > bound).sum()),
        over_budget=int((-np.log1p(-bound) > theta_nats).sum()),
        mean_certificate=float(bound.mean()),
        mean_true_mass=float(lost.mean()),
        ratio=float(bound.mean() / lost.mean()) if lost.any() else float("inf"),
        max_certificate_nats=float(-np.log1p(-bound.max())),
        max_true_nats=float(-np.log1p(-lost.max())),
        kept_fraction=float(np.mean(kept)),
        kv_bytes=bytes_pruned / positions,
        dense_kv_bytes=bytes_dense / positions,
        kl_nats_mean=float(np.mean(kl)),
        kl_nats_max=float(np.max(kl)),
    )
