"""The rows of a variance study: each law on each source of texts, measured, predicted, judged, explained rung by rung.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from entropic_ctl.config import RunConfig
from paper_repro.claims import VARIANCE_CUT
from paper_repro.variance_arms import RUNGS, Arm, arms, at_level, replayed
from paper_repro.variance_readings import READINGS, Moments, draws, effect, gap, moments, predict, ratios
from paper_repro.variance_texts import Texts
from paper_repro.verdicts import judge
from paper_repro.worlds import Certifier
from proofs.check import gain_ceiling
from proofs.vmax import maximum

__all__ = ["DRAWS", "Source", "Study"]

DRAWS = 2000
"""Bootstrap draws behind every interval."""
_LADDER_GAINS = (0.02, 0.05, 0.2)


@dataclass
class Source:
    """Recorded texts with what every arm is compared with."""

    name: str
    texts: Texts
    seed: int
    entropy: list[Any] = field(init=False)
    varentropy: list[Any] = field(init=False)
    base: Moments = field(init=False)
    drawn: Any = field(init=False)

    def __post_init__(self) -> None:
        self.entropy, self.varentropy = (self.texts.split(part) for part in self.texts.at_start())
        self.base = moments(self.entropy)
        self.drawn = draws(len(self.entropy), DRAWS, self.seed)


class Study:
    """Collects rows; one instance per run."""

    def __init__(self, config: RunConfig, certifier: Certifier, *, quick: bool, uncertified: bool) -> None:
        self.config, self._certifier, self.uncertified = config, certifier, uncertified
        self.arms = arms(quick=quick)
        self.ratios: list[dict[str, Any]] = []
        self.ladder: list[dict[str, Any]] = []
        self.texts: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.limit = gain_ceiling(certifier.vocab_size, 0, maximum(certifier.vocab_size).bracket())

    def certificate(self, arm: Arm, targets: Any) -> str:
        """Return by which theorem an arm may run (asked for its largest target), "" if none and it must not."""
        found = self._certifier.verdict(arm.loop(self.config, float(targets.max())))
        if found.status == "proved":
            return str(found.theorem)
        return f"uncertified ({found.status})" if self.uncertified else ""

    def allowed(self, source: Source) -> list[tuple[Arm, Any, str]]:
        """Return (arm, targets, certificate) of every arm that may run on a source."""
        out = []
        for arm in self.arms:
            targets = arm.targets(source.base)
            if word := self.certificate(arm, targets):
                out.append((arm, targets, word))
            elif arm.name not in self.left_out:
                self.left_out.append(arm.name)
        return out

    def add(
        self, world: str, source: Source, arm: Arm, targets: Any, certificate: str, found: Moments, clamped: float,
        base: Moments | None = None, drawn: Any = None, predicted: Moments | None = None, label: str = "",
        level: Moments | None = None,
    ) -> None:  # fmt: skip
        """Add one row per reading; ``level``: the moments at fixed T with the arm's own mean entropies, if known."""
        base, drawn = (source.base if base is None else base), (source.drawn if drawn is None else drawn)
        if predicted is None:
            predicted = predict(arm.spec(self.config), source.entropy, source.varentropy, targets)
        none = {reading: np.full(1, np.nan) for reading in READINGS}
        alone = none if level is None else ratios(level, base, targets, drawn)
        theory, count = ratios(predicted, base, targets, drawn), found.mean.shape[0]
        for reading, values in ratios(found, base, targets, drawn).items():
            measured, expected = effect(values, count), effect(theory[reading], count)
            apart = gap(values, theory[reading], count)
            verdict = judge(measured, 1.0 - VARIANCE_CUT[0], higher_is_better=False)
            self.ratios.append(
                {
                    "world": world, "arm": label or arm.name, "law": "fixed" if label else arm.law,
                    "strength": arm.strength, "own": arm.own, "certificate": certificate, "reading": reading,
                    "texts": count, "tokens": int(found.length.sum()), "measured": measured.ratio,
                    "low": measured.low, "high": measured.high, "predicted": expected.ratio,
                    "predicted_low": expected.low, "predicted_high": expected.high, "gap": apart.ratio,
                    "gap_low": apart.low, "gap_high": apart.high, "agrees": bool(apart.low <= 0.0 <= apart.high),
                    "level_only": float(alone[reading][0]), "clamped": clamped,
                    "level": float(np.average(found.mean, weights=found.length)),
                    "level_fixed": float(np.average(base.mean, weights=base.length)),
                    "verdict": "" if label else verdict.verdict, "reason": "" if label else verdict.reason,
                }
            )  # fmt: skip
        if base is source.base:
            self.texts += [
                {
                    "world": world, "arm": label or arm.name, "text": source.texts.name[i],
                    "kind": source.texts.kind[i], "target_nats": targets[i], "mean": found.mean[i],
                    "variance": found.variance[i], "mean_fixed": base.mean[i], "variance_fixed": base.variance[i],
                    "variance_predicted": predicted.variance[i],
                }
                for i in range(count)
            ]  # fmt: skip

    def replay(self, world: str, source: Source, tell: Callable[[str], None]) -> dict[str, dict[str, Moments]]:
        """Run every arm on recorded texts; return the moments at each rung of the ladder, by arm."""
        rungs: dict[str, dict[str, Moments]] = {}
        for arm, targets, word in self.allowed(source):
            tell(arm.name)
            spec, on = arm.spec(self.config), {}
            for rung in RUNGS:
                on[rung], about = replayed(source.texts, spec, targets, rung)
            level = at_level(source.texts, on["replay"].mean)
            self.add(world, source, arm, targets, word, on["replay"], about["clamped"], level=level)
            if arm.own and (arm.law != "feedback" or arm.strength in _LADDER_GAINS):
                flat = [np.full(v.shape[0], v.mean()) for v in source.varentropy]
                theory = {"theory, mean V": flat, "theory, random V": source.varentropy}
                of = {rung: predict(spec, source.entropy, v, targets) for rung, v in theory.items()}
                rungs[arm.name] = of | on
        return rungs

    def climb(self, source: Source, arm: str, on: dict[str, Moments]) -> None:
        """Add the ladder of one arm, with the interval of every step."""
        before = None
        for rung, found in on.items():
            values = ratios(found, source.base, source.base.mean, source.drawn)["within, mean"]
            here = effect(values, source.base.mean.shape[0])
            step = gap(values, values if before is None else before, source.base.mean.shape[0])
            row = {"source": source.name, "arm": arm, "rung": rung, "ratio": here.ratio, "low": here.low}
            row |= {"high": here.high, "step": step.ratio, "step_low": step.low, "step_high": step.high}
            self.ladder.append(row)
            before = values
