"""Controls *(ours)*: whether a gain is due to entropy, or to what else the law does.

``entropy-blind scheduling`` is the policy of ``scheduling only`` with E[dH] the same for every request: only its cost
terms (compute, memory, latency) still order the queue. If it does as well, entropy had no part in the gain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from entropic_ctl.config import LawSpec, LoopConfig
from paper_repro import verdicts
from paper_repro.claims import BASELINE
from paper_repro.report import with_interval

__all__ = ["BLIND", "blind_sentences", "entropy_blind"]

BLIND = "entropy-blind scheduling"
_WEIGHT = 1e6
"""Observed reductions the prior is worth: a text of a thousand tokens moves E[dH] by less than 0.1% of itself."""


def entropy_blind(scheduling_only: LoopConfig) -> dict[str, LoopConfig]:
    """Return the control arm, or nothing for a policy without a prediction of entropy."""
    spec = scheduling_only.scheduling
    if spec.name != "entropic":
        return {}
    blind = LawSpec(spec.name, dataclasses.replace(spec.config, prior_weight=_WEIGHT))
    return {BLIND: dataclasses.replace(scheduling_only, scheduling=blind)}


def blind_sentences(runs: Mapping[str, np.ndarray]) -> list[str]:
    """Return what the control says about the simulated latency of ``scheduling only``; nothing without such runs."""

    def latency(arm: str) -> np.ndarray:
        pick = (runs["world"] == "simulation") & (runs["arm"] == arm)
        return runs["latency_s"][pick][np.argsort(runs["repeat"][pick], kind="stable")]

    aware, blind, base = (latency(arm) for arm in ("scheduling only", BLIND, BASELINE))
    if not aware.shape == blind.shape == base.shape or not blind.size:
        return []
    alone, between = verdicts.paired(blind, base), verdicts.paired(aware, blind)
    shown = [with_interval(effect.ratio, effect.low, effect.high) for effect in (alone, between)]
    if not math.isfinite(between.low):
        what = "one pair of runs cannot tell whether entropy has a part in it"
    elif between.high < 1:
        what = "entropy has a part in the gain"
    elif between.low > 1:
        what = "reading entropy makes it worse"
    else:
        what = "no part of the gain is resolved to be due to entropy; the cost terms account for it"
    said = (
        f"Control, simulation: the scheduler with the same expected entropy reduction for every request has latency "
        f"{shown[0]} of the baseline's, and reading entropy changes that by a factor {shown[1]}: {what}."
    )
    return [said]
