"""One study: every empirical finding about a configuration's stability beside what a certificate or theory says of it.

A finding *contradicts* a certificate when the certificate covers exactly what was run and says otherwise: a proved
gain that does not settle on frozen logits, a gain proved for every target (lag 0) under which temperatures on the same
recorded logits move apart, a refuted gain that settles on the sharpest logits of its target. Where no theorem
applies (the queue, a lagged loop on changing logits, the speed of a response) theory is quoted and nothing can be
contradicted. Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropic_ctl.bank import Bank
from entropic_ctl.certificates import Verdict
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from sim.cycles import Behaviour
from sim.drift import queue_drift
from sim.frozen import recorded
from sim.replica import simulate
from sim.stability import (
    FACTORS,
    Report,
    Sharpest,
    find_onset,
    gain_sweep,
    long_run,
    on_recordings,
    typical_token,
)
from sim.step_response import step_response

__all__ = ["Claims", "Study", "study"]

_CLOSED = ("burst", "closed")


@dataclass(frozen=True)
class Claims:
    """What the proofs say.

    Parameters
    ----------
    sharp : Sharpest
        The sharpest logits of the vocabulary.
    verdict : Verdict
        Of the configuration.
    certified : mapping of int to float
        Lag to the largest gain certified for every target, one update a token.
    own : Sharpest, optional
        The sharpest logits with the configured target: what the verdict is about. ``sharp`` where the target is out of
        reach.
    """

    sharp: Sharpest
    verdict: Verdict
    certified: Mapping[int, float]
    own: Sharpest | None = None


@dataclass(frozen=True)
class Study:
    """Rows (``property``, ``found``, ``expected``, ``agrees``: True, False or None) and tables by name."""

    rows: list[dict[str, Any]]
    tables: dict[str, dict[str, np.ndarray]]

    @property
    def contradictions(self) -> int:
        """Findings that contradict a certificate."""
        return sum(row["agrees"] is False for row in self.rows)


def _said(found: Behaviour) -> str:
    if found.kind == "cycles":
        return f"{found.period}-cycle, amplitude {found.amplitude:.3g} in u (p = {found.p_value:.1e})"
    if found.kind == "clamped":
        return f"at a clamp {100 * found.at_clamp:.0f}% of the time"
    return f"{found.kind}, amplitude {found.amplitude:.2g}"


def study(
    config: RunConfig,
    bank: Bank,
    claims: Claims,
    *,
    queue: bool = True,
    factors: Sequence[float] = FACTORS,
    steps: int = 1200,
    run_steps: int = 8192,
    progress: Report | None = None,
) -> Study:
    """Measure everything about one configuration with the ``feedback`` law.

    Parameters
    ----------
    config : RunConfig
    bank : Bank
        Recorded logits.
    claims : Claims
    queue : bool
        Also simulate the workload and test its queue.
    factors : sequence of float
        Gains of the sweep in units of the linear limit.
    steps, run_steps : int
        Tokens per gain of the sweep and of the onset; tokens per long run.
    progress : callable, optional
        ``progress(what, share)``.
    """
    law, lag, sharp = config.loop.temperature.config, config.engine.observation_lag, claims.sharp
    say: Report = progress if progress is not None else lambda _what, _share: None
    rows: list[dict[str, Any]] = []

    def add(name: str, found: str, expected: str, agrees: bool | None = None) -> None:
        rows.append({"property": name, "found": found, "expected": expected, "agrees": agrees})

    status = claims.verdict.status
    lags = tuple(claims.certified)
    sweep = gain_sweep(
        law, sharp, lags=lags, factors=factors, steps=steps, progress=lambda what, share: say(what, 0.5 * share)
    )
    for d, ceiling in claims.certified.items():
        inside = (sweep["lag"] == d) & (sweep["gain"] <= ceiling)
        bad = inside & ((sweep["equilibrium"] > 0) | (sweep["kind"] != "settles"))
        add(
            f"gains below the certified limit, lag {d}",
            f"{int(inside.sum() - bad.sum())} of {int(inside.sum())} settle",
            f"gain-lag-{d}: all below {ceiling:.6g} do",
            not bad.any(),
        )
        at = find_onset(law, sharp, d, steps=steps) * sharp.limit(d)
        say(f"onset, lag {d}", 0.55 + 0.05 * d)
        add(
            f"onset of instability, lag {d}",
            f"k = {at:.6g}, k V = {at * sharp.v_max:.4f}",
            f"certified below {ceiling:.6g}; linear limit k V = {sharp.limit(d) * sharp.v_max:.4g}",
            at >= ceiling * 0.99,
        )
        below, above = (long_run(law, sharp, x * sharp.limit(d), lag=d, steps=run_steps) for x in (0.999, 1.001))
        add(f"0.999 of the limit, lag {d}", _said(below), f"gain-lag-{d}: settles", below.kind == "settles")
        add(f"1.001 of the limit, lag {d}", _said(above), "linear theory: the equilibrium repels")
    say("configured gain", 0.7)
    own = long_run(law, claims.own or sharp, law.gain, lag=lag, steps=run_steps)
    agrees = {"proved": own.kind == "settles", "refuted": own.kind != "settles" or law.gain == 0}.get(status)
    if claims.verdict.theorem == "gain-drafts" and status == "refuted" and law.gain > 0:
        agrees = None  # the counter-example drafts; this run does not
    at = claims.own.entropy_nats if claims.own else sharp.entropy_nats
    add(
        f"configured gain {law.gain:g}, sharpest logits of entropy {at:.4g}",
        _said(own),
        f"{status} ({claims.verdict.theorem})",
        agrees,
    )
    if law.gain != 0:
        wrong = long_run(law, sharp, -abs(law.gain), lag=lag, steps=2048)
        add(
            f"wrong sign, gain {-abs(law.gain):g}",
            _said(wrong),
            "refuted: pushes temperatures apart",
            wrong.kind != "settles",
        )
    mean, recordings = on_recordings(law, bank, lag=lag)
    covered = status == "proved" and lag == 0 and 0 < law.gain <= claims.certified.get(0, 0.0)
    add(
        "temperatures on the same recorded logits",
        f"exponent {mean.value:.4f} nats per token, at most {recordings['value'].max():.4f}",
        f"mean ln|1 - k V| = {mean.linear:.4f}" if lag == 0 else "no theorem for a lagged loop on changing logits",
        bool(recordings["value"].max() <= 1e-6) if covered else None,
    )
    tables = {"sweep": sweep, "recordings": recordings}
    _step(config, bank, add, tables)
    if queue:
        say("queue", 0.8)
        _queue(config, bank, add)
    return Study(rows, tables)


def _step(config: RunConfig, bank: Bank, add: Any, tables: dict[str, dict[str, np.ndarray]]) -> None:
    law, lag = config.loop.temperature.config, config.engine.observation_lag
    token = typical_token(bank, law.temperature if law.temperature > 0 else 1.0)
    try:
        found = step_response(law, recorded(bank, np.array([token])), lag=lag)
    except BadInputError as error:
        add("step of the target", f"not measured: {error.problem}", "")
        return
    tables["step"] = {
        "token": np.arange(found.u.shape[0]),
        "u": found.u,
        "entropy": found.entropy,
        "target": np.full(found.u.shape, found.target_nats[1]),
    }
    settled = f"{found.settling_tokens:.0f} tokens" if math.isfinite(found.settling_tokens) else "does not settle"
    add(
        "step of the target, {:.2f} to {:.2f} nats (V = {:.2f})".format(*found.target_nats, found.varentropy),
        f"overshoot {100 * found.overshoot:.1f}%, settling (2%) {settled}",
        f"linear loop: {found.expected_tokens:.0f} tokens",
    )


def _queue(config: RunConfig, bank: Bank, add: Any) -> None:
    if config.workload.kind in _CLOSED:
        add("queue", f"not tested: a {config.workload.kind} workload bounds it by itself", "")
        return
    result = simulate(config, uncertified=True, bank=bank)  # what is tested here is the queue, whatever the gain
    try:
        drift = queue_drift(result.requests["arrival_s"], result.requests["left_s"])
    except BadInputError as error:
        add("queue", f"not tested: {error}", "")
        return
    add(
        "queue at the configured load",
        f"{drift.verdict}: {drift.rate:+.3g} requests/s [{drift.low:+.3g}, {drift.high:+.3g}], "
        f"when long {drift.busy_rate:+.3g} [{drift.busy_low:+.3g}, {drift.busy_high:+.3g}]",
        "claim `queue` of `entropic prove`",
    )
