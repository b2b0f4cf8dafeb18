"""The paper's claims as data, labelled as the paper's. No number in this module is, or may become, a result of ours.

Source: arXiv 2603.03310, its table of relative performance and the ranges stated in its prose. Ratios are to its own
baseline (standard inference: dense attention, fixed temperature).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["ARMS", "BASELINE", "CLAIMS", "VARIANCE_CUT", "Claim", "claim", "table"]

BASELINE = "baseline"
ARMS = (BASELINE, "sampling only", "scheduling only", "attention only", "full loop")


@dataclass(frozen=True, slots=True)
class Claim:
    """One number of the paper's table.

    Parameters
    ----------
    arm : str
        Configuration, one of :data:`ARMS`.
    metric : str
        ``latency``, ``throughput``, ``efficiency`` (d tau / dC) or ``quality``.
    paper : float
        Ratio to the paper's baseline.
    higher_is_better : bool
        Direction of improvement.
    """

    arm: str
    metric: str
    paper: float
    higher_is_better: bool

    @property
    def gain(self) -> float:
        """Claimed improvement as a log ratio, positive when the paper says it got better."""
        size = math.log(self.paper)
        return size if self.higher_is_better else -size


_TABLE = {
    "latency": (False, (1.00, 0.98, 0.88, 0.85, 0.70)),
    "throughput": (True, (1.00, 1.02, 1.15, 1.20, 1.40)),
    "efficiency": (True, (1.00, 1.08, 1.12, 1.25, 1.55)),
    "quality": (True, (1.00, 1.00, 1.00, 0.98, 1.00)),
}

CLAIMS: tuple[Claim, ...] = tuple(
    Claim(arm, metric, value, better)
    for metric, (better, row) in _TABLE.items()
    for arm, value in zip(ARMS, row, strict=True)
)


def claim(arm: str, metric: str) -> Claim | None:
    """Return the paper's number for an arm and metric, or None where it gives none."""
    for item in CLAIMS:
        if item.arm == arm and item.metric == metric:
            return item
    return None


def table() -> dict[str, np.ndarray]:
    """Return the paper's table as columns ``arm``, ``metric``, ``paper``, ``source`` (always "paper")."""
    return {
        "arm": np.array([item.arm for item in CLAIMS]),
        "metric": np.array([item.metric for item in CLAIMS]),
        "paper": np.array([item.paper for item in CLAIMS]),
        "source": np.array(["paper"] * len(CLAIMS)),
    }


VARIANCE_CUT = (0.15, 0.20)
"""In prose: by how much sampling is said to cut the variance of entropy (which variance, it does not say)."""
