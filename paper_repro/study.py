"""Steps that the demonstration and the reproduction share: run, compare, draw, report."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from entropic_ctl import results
from entropic_ctl.certificates import Verdict
from entropic_ctl.config import LoopConfig, RunConfig, resolve, resolve_loop
from figures import ablation as ablation_figure
from figures import generation, phase, pruning_cost
from paper_repro import experiments, page, sections, statements
from paper_repro.claims import ARMS, BASELINE
from paper_repro.experiments import Progress
from paper_repro.outcome import Outcome, as_rows
from paper_repro.worlds import RealEngine

__all__ = ["Study", "not_identifiable", "span"]

_Tables = list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]
_TITLES = {
    "latency": "mean latency (lower is better)",
    "p99 latency": "p99 latency (lower is better)",
    "throughput": "throughput (higher is better)",
    "dτ/d second": "dτ/d second (higher is better)",
    "dτ/d FLOP": "dτ/d FLOP (higher is better)",
    "dτ/d KV byte": "dτ/d KV byte (higher is better)",
}
_QUALITY = (
    "the paper's quality is BLEU/ROUGE and human rating, which we do not run; our column is exp(-KL to dense "
    "attention), which sees pruning only"
)


def span(progress: Progress | None, start: float, end: float) -> Progress:
    """Return a progress callback for a part that covers [start, end] of the whole."""

    def report(what: str, share: float) -> None:
        if progress is not None:
            progress(what, start + (end - start) * share)

    return report


def not_identifiable(config: RunConfig) -> Callable[[str, str, str], str]:
    """Return the rule that says which comparisons an experiment cannot decide, and why."""
    workload = config.workload

    def rule(world: str, arm: str, metric: str) -> str:
        if metric == "quality":
            return _QUALITY
        if world != "simulation":
            return ""
        if metric == "throughput" and workload.open and workload.kind != "burst":
            return "open arrivals below capacity give every policy the same throughput"
        if arm == "sampling only" and workload.runs_to_limit and metric in ("latency", "throughput"):
            return "output lengths are fixed by the workload, so sampling cannot change them"
        return ""

    return rule


@dataclass
class Study:
    """Everything a report is made of, filled step by step.

    Parameters
    ----------
    work : Path
        Folder to write to.
    title : str
    config : RunConfig
        Of the simulated world, stamped into every table.
    arms : dict of str to LoopConfig
    command : str
        Command that reproduces this run.
    engine_config : RunConfig, optional
        Of the real engine, stamped beside ``config``.
    """

    work: Path
    title: str
    config: RunConfig
    arms: Mapping[str, LoopConfig]
    command: str
    engine_config: RunConfig | None = None
    runs: dict[str, np.ndarray] = field(default_factory=dict)
    effects: dict[str, np.ndarray] = field(default_factory=dict)
    synergy: dict[str, np.ndarray] = field(default_factory=dict)
    trials: dict[str, np.ndarray] = field(default_factory=dict)
    certificate: Mapping[str, Any] = field(default_factory=dict)
    certificate_status: str = ""
    certificate_text: str = ""
    replay_text: str = ""
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: list[tuple[Path, str]] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)

    def certify(self, certificate: Mapping[str, Any], verdict: Verdict) -> None:
        """Take in the certificate of the loop that runs, and the independent checker's word on it."""
        self.certificate = certificate
        self.certificate_status = f"{verdict.status} stable ({verdict.theorem})"
        self.certificate_text = f"Gain certificate: {verdict.status} ({verdict.theorem}). {verdict.reason}."

    def compare(self, runs: dict[str, np.ndarray]) -> None:
        """Take in the runs table, compute effects and synergy, note violated guarantees, write all tables."""
        self.runs = runs
        self.effects = experiments.effects(runs, not_identifiable(self.config))
        self.synergy = experiments.synergy(runs)
        if (broken := int(np.nansum(runs.get("violations", np.zeros(1))))) > 0:
            self.violations.append(f"the certified loss exceeded its budget in {broken} decode rows")
        for name, table in (("runs", self.runs), ("effects", self.effects), ("synergy", self.synergy)):
            self.write(name, table)
        self.write("paper_claims", experiments.claims_by_metric())

    @functools.cached_property
    def stamp(self) -> dict[str, Any]:
        """What identifies this run: both worlds' configurations, seed, version, commit, hardware."""
        return {**results.stamp(self.config, self.config.seed), "engine_config": self._engine()}

    def _engine(self) -> dict[str, Any] | None:
        return resolve(self.engine_config) if self.engine_config is not None else None

    def write(self, name: str, table: Mapping[str, np.ndarray]) -> None:
        """Write a table as Parquet and CSV, stamped; an empty one is left out."""
        if not table or not next(iter(table.values())).shape[0]:
            return
        for suffix in ("parquet", "csv"):
            results.write_table(self.work / f"{name}.{suffix}", dict(table), self.stamp)

    def draw(self, engine: RealEngine | None, bank: Any, vocab_size: int) -> None:
        """Draw every figure from the tables on disk."""
        present = set(self.effects["arm"].tolist())
        arms = [arm for arm in ARMS if arm != BASELINE and arm in present]
        self._figure(
            "ablation",
            "Each arm relative to the baseline of its own world: geometric means of paired ratios with 95% intervals; "
            "left of 1 is less. Hollow diamonds: what the paper claims. It claims one dτ/dC without naming the cost, "
            "so the last three panels show the same diamonds. Each panel has its own scale.",
            lambda png: ablation_figure.draw(
                self.work / "effects.parquet",
                self.work / "paper_claims.parquet",
                png,
                arms=arms,
                metrics=_TITLES,
            ),
        )
        if engine is not None:
            self._draw_generation(engine)
        from proofs.phase import sharp_portrait

        self.write("phase", sharp_portrait(vocab_size))
        names = dict.fromkeys(np.asarray(results.read_table(self.work / "phase.parquet")[0]["arm"]).tolist())
        titles = {
            str(name): f"k = {name.replace(' x', ' ×')}: {'certified' if float(name.split()[0]) < 1 else 'refused'}"
            for name in names
        }
        self._figure(
            "phase",
            "The temperature loop on the sharpest logits this vocabulary allows, by gain: below the certified limit it "
            "settles, above it can cycle for ever. Above: each small dot is one update, ln T after it against ln T "
            "before it, joined by the staircase; below: ln T over the updates.",
            lambda png: phase.draw(self.work / "phase.parquet", png, titles=titles),
        )
        if bank is not None:
            self.write("response", response_table(bank))
            self._figure(
                "pruning_cost",
                "What pruning reads, costs and certifies, as recorded from the model on real text.",
                lambda png: pruning_cost.draw(
                    self.work / "response.parquet", png, title=str(bank.meta.get("model", ""))
                ),
            )

    def _draw_generation(self, engine: RealEngine) -> None:
        own = [key for key in engine.tokens if key[0] == ARMS[-1]]
        if not own:
            return
        self.write("tokens", engine.tokens[own[0]])
        request = len(engine.prompts) - 1  # the long prompt: the only one that pruning can do much for
        law = self.arms[ARMS[-1]].temperature.config
        self._figure(
            "generation",
            "One real generation under the full loop (the long prompt): entropies, temperature, budget, pages read. At "
            "token 0 the budget θ is 0 and all pages are read because the first token comes out of the prompt's own "
            "pass (prefill), which is exact; pruning starts with the first decode step.",
            lambda png: generation.draw(
                self.work / "tokens.parquet",
                png,
                request=request,
                target_nats=getattr(law, "target_nats", None),
                title=f"Full loop on the long prompt ({engine.model.name})",
            ),
        )

    def _figure(self, name: str, caption: str, draw: Callable[[Path], None]) -> None:
        png = self.work / f"{name}.png"
        draw(png)
        self.figures.append((png, caption))

    def finish(self, engine: RealEngine | None, focus: list[str]) -> Outcome:
        """Write the report and return the outcome; ``focus`` are the arms whose losses are spelled out."""
        outcome = Outcome(self.config, violations=self.violations)
        measured: _Tables = []
        beside: _Tables = []
        for world in dict.fromkeys(self.runs["world"].tolist()):
            where = f"cost model {self.config.cost.preset}" if world == "simulation" else "this machine"
            header, rows = sections.world_table(self.runs, world)
            measured.append((f"{world} ({where})", header, rows))
            beside.append(
                (
                    f"{world}: ratios to its baseline, beside the paper's",
                    sections.EFFECT_HEADER,
                    sections.effect_rows(self.effects, world, claimed_only=True),
                )
            )
        outcome.tables = measured + beside
        losses = statements.worse(self.effects, focus, self.runs)
        gains = statements.improved(self.effects, focus)
        open_ = statements.unresolved(self.effects, focus)
        pruned = int(np.nansum(self.runs.get("pruned_rows", np.zeros(1))))
        share = self.runs.get("worst_share", np.zeros(1))
        promises = statements.guarantees(
            pruned,
            int(np.nansum(self.runs.get("violations", np.zeros(1)))),
            float(np.nanmax(share)) if np.isfinite(share).any() else 0.0,
            self.replay_text,
        )
        outcome.sentences = [("What got worse", losses), ("What improved", gains)]
        if open_:
            outcome.sentences.append(("Not resolved", open_))
        outcome.sentences.append(("Guarantees", promises))
        if self.notes:
            outcome.sentences.append(("Notes", self.notes))
        outcome.numbers = {
            "runs": as_rows(self.runs),
            "effects": as_rows(self.effects),
            "synergy": as_rows(self.synergy),
            "what_got_worse": losses,
            "what_improved": gains,
            "not_resolved": open_,
            "guarantees": promises,
            "violations": self.violations,
            "loop": {arm: resolve_loop(loop) for arm, loop in self.arms.items()},
            "engine_config": self._engine(),
        }
        page.write(self, outcome, measured, beside, engine)
        return outcome


def response_table(bank: Any) -> dict[str, np.ndarray]:
    """Return the response part of an entropy bank as a long table."""
    contexts, thetas = bank.context.shape[0], bank.theta.shape[0]
    table = {
        "context": np.repeat(bank.context, thetas),
        "theta_nats": np.tile(bank.theta, contexts),
    }
    for name in ("kept", "certificate_mean", "certificate_max", "mass_mean", "kl", "entropy_shift"):
        table[name] = np.asarray(getattr(bank, name), float).ravel()
    return table
