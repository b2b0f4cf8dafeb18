"""Draft-length rules on recorded texts: what each would have drafted, and what it would gain at any cost of verifying.

Drafting changes no text, so a text decoded once, with the model entropy of each token, says what every rule would have
drafted, what of it would have been accepted, and how many steps it would have taken. Only the costs are assumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from backends.drafting import TokenIndex
from entropic_ctl.config import SpeculationConfig
from entropic_ctl.drafting import rule_of
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["Recorded", "fit_acceptance", "replayed", "sensitivity"]

COSTS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5)


class Recorded(NamedTuple):
    """One decoded text: its mode and kind, prompt and new tokens, model entropy of each new token (nats), its limit."""

    mode: str
    kind: str
    prompt: list[int]
    tokens: list[int]
    entropy: FloatArray
    limit: int


def replayed(text: Recorded, config: SpeculationConfig) -> IntArray:
    """Return (tokens drafted, of them accepted) of each decode step, shape (steps, 2), with prompt lookup.

    Parameters
    ----------
    text : Recorded
    config : SpeculationConfig
    """
    rule, index, slot = rule_of(config, 1), TokenIndex(), np.zeros(1, np.int64)
    steps, at = [], 1  # the first token comes with the prefill
    while at < len(text.tokens):
        entropy = text.entropy[at - 1 : at]
        most = 0
        if config.draft_tokens and not entropy[0] >= config.draft_below_nats:
            most = min(int(rule.lengths(entropy)[0]), text.limit - at - 1)
        draft = index.draft(text.prompt + text.tokens[:at], most) if most > 0 else []
        right = 0
        while right < len(draft) and at + right < len(text.tokens) and draft[right] == text.tokens[at + right]:
            right += 1
        rule.observe(slot, np.array([len(draft)]), np.array([right]))
        steps.append((len(draft), right))
        at += right + 1
    return np.array(steps, np.int64).reshape(-1, 2)


def sensitivity(
    texts: Sequence[Recorded],
    arms: Mapping[str, Mapping[str, Any]],
    *,
    costs: Sequence[float] = COSTS,
    start: float = 0.0,
) -> list[dict[str, Any]]:
    """Return the speed of each arm relative to no drafts, by mode and cost of a drafted token; rules know the cost.

    Parameters
    ----------
    texts : sequence of Recorded
    arms : mapping of str to ``[speculation]`` settings
    costs : sequence of float
        c: cost of one more drafted and verified token, in one-token steps.
    start : float
        What verifying costs besides.

    Returns
    -------
    list of dict
        ``mode``, ``cost``, ``arm``, ``speedup``: pooled over the mode's texts.
    """
    rows = []
    for mode in dict.fromkeys(text.mode for text in texts):
        mine = [text for text in texts if text.mode == mode]
        for cost in costs:
            for arm, settings in arms.items():
                config = SpeculationConfig(**{**settings, "rule_cost": cost, "rule_start": start})
                drafted = [replayed(text, config)[:, 0] for text in mine]
                spent = sum(float((1.0 + (d > 0) * start + cost * d).sum()) for d in drafted)
                tokens = sum(len(text.tokens) - 1 for text in mine)
                rows.append({"mode": mode, "cost": cost, "arm": arm, "speedup": tokens / max(spent, 1e-12)})
    return rows


def fit_acceptance(entropy: FloatArray, accepted: FloatArray) -> tuple[float, float]:
    """Return the (a_0, h) of a(H) = a_0 exp(-H / h) that make the outcomes most likely (grid search).

    Parameters
    ----------
    entropy : FloatArray, shape (K,)
        Last model entropy before a draft, nats.
    accepted : FloatArray, shape (K,)
        1 if the first drafted token was accepted.
    """
    best, found = -np.inf, (0.0, 1.0)
    for a in np.linspace(0.02, 0.99, 98):
        for h in np.geomspace(0.1, 100.0, 61):
            p = np.clip(a * np.exp(-entropy / h), 1e-9, 1 - 1e-9)
            value = float((accepted * np.log(p) + (1 - accepted) * np.log1p(-p)).sum())
            if value > best:
                best, found = value, (float(a), float(h))
    return found
