"""The laws whose effect on entropy variance is measured, and what the shipped ones do on texts that stand still."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from entropic_ctl.config import LawSpec, LoopConfig, RunConfig, from_mapping
from entropic_ctl.signals import FloatArray
from paper_repro.variance_readings import Moments, moments
from paper_repro.variance_texts import LinearView, Texts, own_targets
from sim.frozen import drive

__all__ = ["COMMON_NATS", "RUNGS", "Arm", "arms", "at_level", "replayed"]

COMMON_NATS = 1.5
"""The common target: the default of the config."""

RUNGS = ("line, each V", "replay")
"""From linear theory to the recorded curves, one assumption less each; see :func:`replayed`."""


@dataclass(frozen=True)
class Arm:
    """One law.

    Parameters
    ----------
    law : str
        ``feedback``, ``damped`` or ``solve``.
    strength : float
        Gain k, or fraction f.
    own : bool
        H* is each text's own mean entropy at T0; else :data:`COMMON_NATS`.
    live : bool
        Also run on the engine.
    """

    law: str
    strength: float
    own: bool = True
    live: bool = True

    @property
    def name(self) -> str:
        """What tables call it."""
        shown = {"feedback": f"feedback k={self.strength:g}", "damped": f"damped f={self.strength:g}"}
        return shown.get(self.law, self.law) + ("" if self.own else f" H*={COMMON_NATS:g}")

    def spec(self, config: RunConfig) -> LawSpec:
        """Return the law at the operating point of ``config``."""
        own = {"feedback": {"gain": self.strength}, "damped": {"fraction": self.strength}}.get(self.law, {})
        start = config.loop.temperature.config
        table = {"law": self.law, "temperature": start.temperature, "t_min": start.t_min, "t_max": start.t_max}
        made = from_mapping({"loop": {"temperature": {**table, "target_nats": COMMON_NATS, **own}}})
        return made.loop.temperature

    def loop(self, config: RunConfig, target_nats: float) -> LoopConfig:
        """Return the loop that a certificate is asked for: this law with one target."""
        spec = self.spec(config)
        law = LawSpec(spec.name, dataclasses.replace(spec.config, target_nats=target_nats))
        return dataclasses.replace(config.loop, temperature=law)

    def targets(self, base: Moments) -> FloatArray:
        """Return H* of each text, shape (B,)."""
        return base.mean.copy() if self.own else np.full(base.mean.shape[0], COMMON_NATS)


def arms(*, quick: bool) -> tuple[Arm, ...]:
    """Return the arms, weakest first; those beyond every certificate are left out by the caller, not here."""
    if quick:
        return (Arm("feedback", 0.02), Arm("feedback", 0.2), Arm("solve", 1.0))
    return (
        Arm("feedback", 0.005),
        Arm("feedback", 0.01, live=False),
        Arm("feedback", 0.02),
        Arm("feedback", 0.05),
        Arm("feedback", 0.1, live=False),
        Arm("feedback", 0.2),
        Arm("damped", 0.5),
        Arm("solve", 1.0),
        Arm("feedback", 0.02, own=False),
        Arm("feedback", 0.05, own=False),
        Arm("damped", 0.5, own=False, live=False),
        Arm("solve", 1.0, own=False, live=False),
    )


def replayed(texts: Texts, spec: Any, targets: FloatArray, rung: str) -> tuple[Moments, dict[str, float]]:
    """Run a shipped law on recorded texts and return the moments of its tempered entropy.

    Rungs: ``line, each V``: each token's entropy is a line in ln T with the slope it has at T0 (what theory assumes,
    but on this finite text from its start, with this order of V, and the law's clamps and rate limit); ``replay``: the
    recorded curve.

    Parameters
    ----------
    texts : Texts
    spec : LawSpec
    targets : FloatArray, shape (B,)
    rung : str

    Returns
    -------
    Moments, dict
        And ``clamped``, the share of tokens at a clamp, and ``level``, the mean entropy in nats.
    """
    start, last = texts.start[:-1], texts.lengths - 1
    entropy, varentropy = texts.at_start()

    def views(t: int, rows: int) -> Any:  # noqa: ARG001
        at = start + np.minimum(t, last)
        return texts.view(at) if rung == "replay" else LinearView(entropy[at], varentropy[at], texts.temperature)

    law = own_targets(spec, targets)
    first = np.full(targets.shape[0], np.log(texts.temperature))
    u, tempered = drive(law, views, first, int(last.max()) + 1)
    if spec.name != "feedback":
        u = _solved(law, views, first, u.shape[0])
    low, high = np.log(spec.config.t_min), np.log(spec.config.t_max)
    kept = np.arange(u.shape[0])[:, None] <= last
    clamped = float(((u <= low + 1e-9) | (u >= high - 1e-9))[kept].mean())
    found = moments([tempered[: n + 1, i] for i, n in enumerate(last.tolist())])
    return found, {"clamped": clamped, "level": float(np.average(found.mean, weights=found.length))}


def _solved(law: Any, views: Any, first: FloatArray, steps: int) -> FloatArray:
    """Return ln T of a same-step law (its state is not its temperature)."""
    return np.stack([np.log(law.temper(first, views(t, first.shape[0]))[0]) for t in range(steps)])


def at_level(texts: Texts, level: FloatArray) -> Moments:
    """Return the moments at one constant temperature per text, that at which its mean entropy is ``level``.

    A lower level has a smaller variance by itself: what a law does beyond that, it owes to feedback.

    Parameters
    ----------
    texts : Texts
    level : FloatArray, shape (B,)
        Nats; beyond the recorded temperatures the nearest one is taken.
    """
    n = texts.lengths
    low, high = (np.full(n.shape[0], np.log(edge)) for edge in (texts.grid[0], texts.grid[-1]))
    view = texts.view(np.arange(int(texts.start[-1])))
    for _ in range(40):
        middle = 0.5 * (low + high)
        entropy = view.at(np.exp(np.repeat(middle, n)))[0]
        below = np.add.reduceat(entropy, texts.start[:-1]) / n < level
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return moments(texts.split(entropy))
