r"""What tuning minimises: named costs of a run relative to the run of the given configuration on the same seed.

Every cost is 0 for the configuration as given and lower is better. With x the trial's metric, x_0 the given one's::

    latency           ln(L / L_0), L = sum of end-to-end times / sum of output tokens (shorter texts are not speed)
    p99_latency       ln of the ratio of the 99th percentiles of the end-to-end time
    ttft              ln of the ratio of mean times to first token
    throughput        -ln of the ratio of output tokens per second of makespan
    tau_per_second    -ln of the ratio of d tau / dC per busy second; tau_per_kv_byte, tau_per_flop alike
    energy            ln of the ratio of joules per output token (presets with a power model only)
    quality           (KL - KL_0) / 0.01 nats + ln(S / S_0) / 2

``quality`` is a proxy (ours): KL is the recorded divergence per token from dense attention, so it sees pruning; S is
the mean square of the tempered entropy about the target of the *given* configuration (about its mean entropy, where it
has no target), so a trial cannot improve by moving its target. No text is judged. A difference of 0.01 is 1% in all
but the last, and 0.0001 nats of KL or 1% of the deviation's root mean square in that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from entropic_ctl.errors import BadInputError

__all__ = ["KL_SCALE_NATS", "OBJECTIVES", "Objective", "named"]

KL_SCALE_NATS = 0.01

Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Objective:
    """A named cost: ``cost(metrics of the trial, metrics of the given configuration, its target or None)``.

    A cost that is not finite makes the trial a failed one.
    """

    name: str
    cost: Callable[[Metrics, Metrics, float | None], float]


def _log_ratio(metric: str, sign: float) -> Callable[[Metrics, Metrics, float | None], float]:
    def cost(trial: Metrics, given: Metrics, target: float | None) -> float:  # noqa: ARG001
        x, x0 = trial.get(metric), given.get(metric)
        return sign * math.log(x / x0) if x and x0 and x > 0 and x0 > 0 else math.nan

    return cost


def _deviation(metrics: Metrics, target: float) -> float:
    """Return S, nats squared: variance of all tokens about their mean, plus the mean's distance from the target."""
    n = int(metrics.get("output_tokens") or 0)
    pooled = float(metrics.get("tempered_variance_pooled") or 0.0)
    mean = metrics.get("tempered_entropy_mean_nats")
    return pooled * (n - 1) / n + (float(mean) - target) ** 2 if n > 1 and mean is not None else 0.0


def _quality(trial: Metrics, given: Metrics, target: float | None) -> float:
    about = target if target is not None else given.get("tempered_entropy_mean_nats")
    cost = (float(trial.get("kl_nats_mean") or 0.0) - float(given.get("kl_nats_mean") or 0.0)) / KL_SCALE_NATS
    if about is None:
        return cost
    spread, reference = _deviation(trial, float(about)), _deviation(given, float(about))
    if spread == reference:
        return cost
    return cost + 0.5 * math.log(spread / reference) if spread > 0 and reference > 0 else math.nan


OBJECTIVES: Mapping[str, Objective] = {
    objective.name: objective
    for objective in (
        Objective("latency", _log_ratio("latency_per_token_s", 1.0)),
        Objective("p99_latency", _log_ratio("e2e_p99_s", 1.0)),
        Objective("ttft", _log_ratio("ttft_mean_s", 1.0)),
        Objective("throughput", _log_ratio("throughput_tokens_per_s", -1.0)),
        Objective("tau_per_second", _log_ratio("tau_per_second", -1.0)),
        Objective("tau_per_kv_byte", _log_ratio("tau_per_kv_byte", -1.0)),
        Objective("tau_per_flop", _log_ratio("tau_per_flop", -1.0)),
        Objective("energy", _log_ratio("energy_per_token_j", 1.0)),
        Objective("quality", _quality),
    )
}


def named(names: Sequence[str]) -> list[Objective]:
    """Return the objectives of the given names.

    Raises
    ------
    BadInputError
        If there is none, one is unknown, or one is named twice.
    """
    for name in names:
        if name not in OBJECTIVES:
            raise BadInputError("no such objective", where="--objectives", value=name, allowed=", ".join(OBJECTIVES))
    if not names or len(set(names)) != len(names):
        raise BadInputError("none, or one named twice", where="--objectives", value=list(names), allowed="distinct")
    return [OBJECTIVES[name] for name in names]
