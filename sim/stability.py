r"""Stability seen from simulation, to be set beside what the certificates say. Nothing here imports a proof.

One study of a configuration with the ``feedback`` law measures

- a **gain sweep** on the sharpest logits of the vocabulary, for observation lags 0 and 1: the Lyapunov exponent of the
  equilibrium, the exponent along the attractor, and what the trajectory of the shipped policy does in the long run, at
  gains from 0 to past the linear limit 2 sin(pi / (4 d + 2)) / V; the **onset** of instability by bisection;
- long runs at 0.999 and 1.001 of that limit (**limit cycles**), and at the configured gain, and at its negative (the
  wrong sign must drive the temperature to a **clamp**);
- the exponent on **recorded** logits, where theory says the mean of ln |1 - k V_t|,
and, elsewhere, the **step response** (:mod:`sim.step_response`) and the **queue drift** (:mod:`sim.drift`).

The sharpest logits are T* (L, 0, ..., 0), T* the middle of the clamps, with the target equal to their entropy: no other
distribution of the vocabulary has a larger varentropy. Clamps, rate limit and error shape are the configuration's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropic_ctl.bank import Bank
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import IntArray
from entropic_ctl.temperature import feedback
from sim.cycles import Behaviour, behaviour
from sim.frozen import LevelView, Views, drive, recorded, still
from sim.lyapunov import Exponent, at_equilibrium, exponent, linear_exponent, onset

__all__ = [
    "FACTORS",
    "Sharpest",
    "find_onset",
    "gain_sweep",
    "long_run",
    "on_recordings",
    "reachable_token",
    "typical_token",
    "varentropy_of",
]

FACTORS = tuple(round(0.05 * i, 2) for i in range(1, 27))
"""Gains of the sweep, in units of the linear limit at the sharpest logits."""

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Sharpest:
    """The distribution of largest varentropy over a vocabulary, as the caller found it.

    Parameters
    ----------
    vocab_size : int
    logit : float
        L of (L, 0, ..., 0) at T = 1.
    entropy_nats : float
        Of that distribution.
    v_max : float
        Its varentropy, nats squared.
    """

    vocab_size: int
    logit: float
    entropy_nats: float
    v_max: float

    def limit(self, lag: int) -> float:
        """Return the gain at which the linear loop on these logits loses stability: 2 sin(pi / (4 d + 2)) / V."""
        return 2.0 * math.sin(math.pi / (4 * lag + 2)) / self.v_max

    def scene(self, law: feedback.Config) -> tuple[feedback.Config, Views, float]:
        """Return (the law with this target, the frozen logits, the equilibrium u in the middle of the clamps)."""
        if law.t_min == law.t_max:
            raise BadInputError("both clamps are equal: nothing moves", field="loop.temperature.t_min", value=law.t_min)
        middle = math.sqrt(law.t_min * law.t_max)
        aimed = dataclasses.replace(law, target_nats=self.entropy_nats, temperature=middle)
        return aimed, still([middle * self.logit, 0.0], [1, self.vocab_size - 1]), math.log(middle)


def _clamps(law: feedback.Config) -> tuple[float, float]:
    return math.log(law.t_min), math.log(law.t_max)


def _with_gain(law: feedback.Config, gain: float) -> feedback.Feedback:
    return feedback.Feedback(dataclasses.replace(law, gain=gain))


def gain_sweep(
    law: feedback.Config,
    sharp: Sharpest,
    *,
    lags: Sequence[int] = (0, 1),
    factors: Sequence[float] = FACTORS,
    steps: int = 1200,
    progress: Report | None = None,
) -> dict[str, np.ndarray]:
    """Measure exponents and long-run behaviour over gains.

    Parameters
    ----------
    law : feedback.Config
        Clamps, rate limit and error shape; its gain and target are replaced.
    sharp : Sharpest
    lags : sequence of int
        Observation lags.
    factors : sequence of float
        Gains in units of :meth:`Sharpest.limit` of the lag.
    steps : int
        Tokens of each long run.
    progress : callable, optional
        ``progress(what, share)``.

    Returns
    -------
    dict of str to ndarray
        One row per (lag, factor): ``lag``, ``factor``, ``gain``, ``loop_gain`` (k V), ``equilibrium`` and ``attractor``
        (exponents, nats per token), ``linear`` (theory), ``kind``, ``period``, ``amplitude``, ``at_clamp``.
    """
    aimed, views, middle = sharp.scene(law)
    low, high = _clamps(law)
    rows: list[dict[str, Any]] = []
    for lag in lags:
        for factor in factors:
            gain = factor * sharp.limit(lag)
            built = _with_gain(aimed, gain)
            u, _ = drive(built, views, [min(middle + 0.3, high)], steps, lag)
            found = behaviour(u[:, 0], low, high)
            rows.append(
                {
                    "lag": lag,
                    "factor": factor,
                    "gain": gain,
                    "loop_gain": gain * sharp.v_max,
                    "equilibrium": at_equilibrium(built, views, middle, 400, lag=lag),
                    "attractor": exponent(built, views, float(u[-1, 0]), 400, lag=lag, burn=steps // 4).value,
                    "linear": linear_exponent(gain * sharp.v_max, lag),
                    "kind": found.kind,
                    "period": found.period,
                    "amplitude": found.amplitude,
                    "at_clamp": found.at_clamp,
                }
            )
            if progress is not None:
                progress(f"gain sweep, lag {lag}", len(rows) / (len(lags) * len(factors)))
    return {name: np.asarray([row[name] for row in rows]) for name in rows[0]}


def find_onset(law: feedback.Config, sharp: Sharpest, lag: int, *, steps: int = 1500) -> float:
    """Return the gain at which the equilibrium of the sharpest logits starts to repel, in units of the linear limit.

    Parameters
    ----------
    law : feedback.Config
    sharp : Sharpest
    lag : int
        Observation lag.
    steps : int
        Tokens per exponent.
    """
    aimed, views, middle = sharp.scene(law)

    def measured(factor: float) -> float:
        return at_equilibrium(_with_gain(aimed, factor * sharp.limit(lag)), views, middle, steps, lag=lag)

    return onset(measured, 0.8, 1.25)


def long_run(
    law: feedback.Config, sharp: Sharpest, gain: float, *, lag: int = 0, steps: int = 8192, offset: float = 0.1
) -> Behaviour:
    """Say what the shipped policy does on the sharpest logits in the long run.

    Parameters
    ----------
    law : feedback.Config
    sharp : Sharpest
    gain : float
        In place of the law's.
    lag : int
        Observation lag.
    steps : int
        Tokens; the first half counts as transient.
    offset : float
        Distance of the start from the equilibrium, in u.
    """
    aimed, views, middle = sharp.scene(law)
    low, high = _clamps(law)
    u, _ = drive(_with_gain(aimed, gain), views, [min(middle + offset, high)], steps, lag)
    return behaviour(u[:, 0], low, high)


def on_recordings(
    law: feedback.Config, bank: Bank, *, lag: int = 0, count: int = 12, steps: int = 384
) -> tuple[Exponent, dict[str, np.ndarray]]:
    """Measure the exponent of the configured law on recorded logits.

    Parameters
    ----------
    law : feedback.Config
    bank : Bank
    lag : int
        Observation lag.
    count : int
        Recordings, those sampled nearest to the law's starting temperature first.
    steps : int
        Tokens of each; a recording is read again from its start.

    Returns
    -------
    Exponent, dict of str to ndarray
        The mean over recordings, and one row per recording.
    """
    start = feedback.Feedback(law).start()
    order = np.argsort(np.abs(np.log(bank.temperature) - start), kind="stable")[:count]
    rows = []
    for k in order.tolist():
        tokens: IntArray = bank.offset[k] + np.arange(steps) % int(bank.offset[k + 1] - bank.offset[k])
        found = exponent(feedback.Feedback(law), recorded(bank, tokens), start, steps, lag=lag)
        rows.append({"recording": k, **dataclasses.asdict(found)})
    table = {name: np.asarray([row[name] for row in rows]) for name in rows[0]}
    return Exponent(*(float(table[name].mean()) for name in ("value", "linear", "merged"))), table


def typical_token(bank: Bank, temperature: float) -> int:
    """Return the bank row of median varentropy at ``temperature`` among those with entropy to spare (over 1 nat).

    Parameters
    ----------
    bank : Bank
    temperature : float
    """
    column = int(np.argmin(np.abs(np.log(bank.grid) - math.log(temperature))))
    rows = np.flatnonzero(bank.entropy_grid[:, column] > 1.0)
    if rows.shape[0] == 0:
        rows = np.arange(bank.entropy_grid.shape[0])
    order = np.argsort(bank.varentropy_grid[rows, column], kind="stable")
    return int(rows[order[rows.shape[0] // 2]])


def reachable_token(bank: Bank, law: feedback.Config) -> int:
    """Return the bank row of median varentropy at the target, among those that meet it between the clamps.

    Where none does, the row whose entropy comes nearest.

    Parameters
    ----------
    bank : Bank
    law : feedback.Config
        Target and clamps.
    """
    inside = (bank.grid >= law.t_min) & (bank.grid <= law.t_max)
    inside[:2] |= not inside.any()
    entropy, slope = bank.entropy_grid[:, inside], bank.varentropy_grid[:, inside]
    away = np.abs(entropy - law.target_nats)
    rows = np.flatnonzero((entropy.min(1) < law.target_nats) & (entropy.max(1) > law.target_nats))
    if rows.shape[0] == 0:
        return int(away.min(1).argmin())
    at_target = slope[rows, away[rows].argmin(1)]
    return int(rows[np.argsort(at_target, kind="stable")[rows.shape[0] // 2]])


def varentropy_of(sharp: Sharpest) -> float:
    """Return the varentropy of the logits ``sharp`` names, nats squared: it must equal ``sharp.v_max``."""
    return float(LevelView([sharp.logit, 0.0], [1, sharp.vocab_size - 1]).at(np.ones(1))[1][0])
