"""What a budget loses, on real text: KL of the next-token distributions, and every certificate against float64.

A text is prefilled exactly; its last tokens are decoded one by one, teacher forced: dense, then under each budget, from
the same cache. In bfloat16 two ways of adding up the same attention already part by about a thousandth of a nat, as
much as the budgets worth having; so the loss of pruning is measured with the same weights in float32, and beside it, in
the model's own dtype, the certificates and the loss of a budget that leaves out (almost) nothing: rounding. *(ours)*
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from backends.audit import kl_nats
from backends.filled import FilledCache
from backends.models import LoadedModel
from backends.prompts import document_ids
from entropic_ctl.pruning.base import PruningConfig

__all__ = ["ROUNDING_NATS", "Losses", "audit_losses", "decode_text"]

ROUNDING_NATS = 1e-6
"""The budget of the control."""

_TEXT_APART = 12_000  # tokens between the starts of two texts
_AUDIT_EVERY = 8
Say = Callable[[str], None]


@dataclasses.dataclass
class Losses:
    """What one budget lost on one text: ``kl`` per position; per (position, layer, head) true and certified masses."""

    kl: list[float] = dataclasses.field(default_factory=list)
    lost: list[Any] = dataclasses.field(default_factory=list)
    certified: list[Any] = dataclasses.field(default_factory=list)


def decode_text(
    model: LoadedModel,
    tokens: Sequence[int],
    thetas: Sequence[float],
    *,
    positions: int,
    page_tokens: int,
    masses: bool,
    pruning: PruningConfig | None = None,
) -> dict[float, Losses]:
    """Decode the last ``positions`` tokens of a text under each budget, from one prefill.

    Parameters
    ----------
    model : LoadedModel
    tokens : sequence of int
        More than ``positions``.
    thetas : sequence of float
        Budgets, nats.
    positions, page_tokens : int
    masses : bool
        Also compute true pruned masses in float64, of every ``_AUDIT_EVERY``-th position (slower than decoding).
    pruning : PruningConfig, optional
    """
    prefix = len(tokens) - positions
    filled = FilledCache(model, tokens[:prefix], page_tokens=page_tokens, room=len(tokens))
    found = {theta: Losses() for theta in thetas}
    budgets = [*thetas, 0.0]  # dense last: that is what later tokens see
    rule, every = pruning or PruningConfig(), _AUDIT_EVERY if masses else 0
    for passes in filled.decode(tokens[prefix:], budgets, rule, audit_every=every):
        for theta, losses in found.items():
            logits, batch = passes[theta]
            losses.lost += [audit.true_mass for audit in batch.audits]
            losses.certified += [audit.certified_mass for audit in batch.audits]
            losses.kl.append(float(kl_nats(logits, passes[0.0].logits)[0]))
    return found


def audit_losses(
    model: LoadedModel,
    context: int,
    thetas: Sequence[float],
    *,
    texts: int,
    positions: int,
    page_tokens: int,
    pruning: PruningConfig | None = None,
    progress: Say | None = None,
) -> dict[float, dict[str, float]]:
    """Measure what budgets lose at a context, over the last ``positions`` tokens of each of several texts.

    Returns
    -------
    dict
        By budget: ``kl_mean`` (KL(pruned || dense) in float32, nats per token), ``kl_low``, ``kl_high`` (means of the
        best and worst text); ``kl_as_run`` and ``kl_rounding`` (in the model's dtype: this budget, and one of
        ``ROUNDING_NATS``); ``certificate_max`` (nats), ``violations`` (heads that lost more than certified, or more
        than the budget), ``heads`` checked (of every 8th position), ``certificate_ratio`` (mean certificate over mean
        true mass; NaN if nothing was left out), ``positions``.
    """
    say = progress or (lambda _: None)
    plain = model.model.dtype == torch.float32
    exact = model if plain else dataclasses.replace(model, model=copy.deepcopy(model.model).float())
    sizes = {"positions": positions, "page_tokens": page_tokens, "pruning": pruning}
    own: list[dict[float, Losses]] = []
    full: list[dict[float, Losses]] = []
    for i in range(texts):
        ids = document_ids(model, context, start=i * _TEXT_APART if context > 64 else i)
        say(f"loss at {context:,} tokens, text {i + 1} of {texts}: {str(model.model.dtype).removeprefix('torch.')}")
        own.append(decode_text(model, ids, [ROUNDING_NATS, *thetas], masses=True, **sizes))
        say(f"loss at {context:,} tokens, text {i + 1} of {texts}: float32")
        full.append(own[-1] if plain else decode_text(exact, ids, thetas, masses=False, **sizes))
    rounding = statistics.fmean(statistics.fmean(text[ROUNDING_NATS].kl) for text in own)
    found = {}
    for theta in thetas:
        kl = [statistics.fmean(text[theta].kl) for text in full]
        parts = [(text[theta].lost, text[theta].certified) for text in own]
        lost, bound = (np.concatenate([x for part in parts for x in part[k]] or [np.empty(0)]) for k in (0, 1))
        over = (lost > bound) | (-np.log1p(-bound) > theta)
        found[theta] = {
            "kl_mean": statistics.fmean(kl),
            "kl_low": min(kl),
            "kl_high": max(kl),
            "kl_as_run": statistics.fmean(statistics.fmean(text[theta].kl) for text in own),
            "kl_rounding": rounding,
            "certificate_max": float(-np.log1p(-bound.max(initial=0.0))),
            "violations": int(np.count_nonzero(over)),
            "heads": int(lost.size),
            "certificate_ratio": float(bound.mean() / lost.mean()) if lost.any() else math.nan,
            "positions": positions * texts,
        }
    return found
