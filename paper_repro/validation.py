"""`entropic validate`: one workload on the real engine and in the simulator, calibrated on a different load.

Composes what others hold: the plan and the order (``sim.validation_plan``, ``sim.validation_run``), timed runs of the
engine (``backends.trials``), the fit (``sim.calibrate``), predictions and errors (``sim.validate``). Every run ends in
the folder's journal, so a validation can be done in pieces.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backends import trials
from entropic_ctl import results
from entropic_ctl.bank import Bank
from entropic_ctl.config import RunConfig, from_mapping, resolve
from entropic_ctl.recording import Recorder
from paper_repro.worlds import Certifier
from sim import calibrate, calibrated, validate
from sim.calibrated import Calibration
from sim.campaign import input_digests
from sim.engine_log import read_logs
from sim.trajectories import bank_of
from sim.validation_plan import BLOCK_KINDS, SETTINGS, Load, Scale, Setting, blocks, configure, validation_load
from sim.validation_run import JOURNAL, Journal, Run, cells, disturbed, next_run, runs

__all__ = ["BASE", "QUICK", "Findings", "Validation"]

BASE = from_mapping(
    {
        "engine": {"pages": 1400, "max_batch": 8, "prefill_chunk": 256},
        "loop": {"temperature": {"law": "fixed", "temperature": 0.8}},
    }
)
"""The base setting: standard inference."""
QUICK = Scale(requests=12, repeats=3, blocks=8, block_requests=8, prompt_max=600, calibration_prompt_max=800)
"""To try the command; too little to be judged."""
_KEPT = (
    *validate.METRICS,
    "output_tokens",
    "requests_finished",
    "iterations",
    "makespan_s",
    "busy_s",
    "kept_fraction_mean",
)
_FEWEST = 2  # undisturbed runs of a cell below which the disturbed ones are compared too


@dataclass(frozen=True)
class Findings:
    """Everything a report needs.

    Parameters
    ----------
    errors : table
        From :func:`sim.validate.compare`.
    rankings : list of Ranking
    runs : table
        One row per run: setting, utilisation, repeat, reference_s, probe_s, foreign_cores, disturbed, used, metrics.
    requests : table
        One row per request and world: world, setting, utilisation, ttft_s, tpot_s, e2e_s.
    calibration : Calibration
    utilisations : dict
        What the rates meant under the final calibration, by nominal utilisation.
    beyond_steps : int
        Simulated iterations outside the calibrated ranges.
    notes : list of str
    """

    errors: dict[str, np.ndarray]
    rankings: list[validate.Ranking]
    runs: dict[str, np.ndarray]
    requests: dict[str, np.ndarray]
    calibration: Calibration
    utilisations: dict[float, float]
    beyond_steps: int
    notes: list[str]

    @property
    def base_ok(self) -> bool:
        """True if the base setting meets every target at every utilisation."""
        mine = (self.errors["setting"] == SETTINGS[0].name) & np.isfinite(self.errors["target"])
        return bool(self.errors["ok"][mine].all())

    @property
    def alike(self) -> float:
        """Share of separated pairs, over the ranked metrics, that the simulator orders as the engine does."""
        apart = sum(r.separated for r in self.rankings)
        return sum(r.alike for r in self.rankings) / apart if apart else float("nan")

    @property
    def ok(self) -> bool:
        """True if all targets are met: those of the base setting and the ranking of all."""
        return self.base_ok and self.alike >= validate.ALIKE


class Validation:
    """A validation in a folder, done in pieces.

    Parameters
    ----------
    folder : Path
    config : RunConfig
        Base setting; its engine limits and laws are what the twelve settings change.
    model : backends.models.LoadedModel
    scale : Scale
    resume : bool
        Go on with what the folder holds.
    bank : Bank, optional
        In place of the configured one.

    Raises
    ------
    BadInputError
        If the folder holds another validation, or one that was begun and ``resume`` is False.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        model: Any,
        *,
        scale: Scale,
        resume: bool = False,
        bank: Bank | None = None,
    ) -> None:
        self.folder, self.config, self.model, self.scale = folder, config, model, scale
        self.bank = bank_of(config) if bank is None else bank
        self.settings = {setting.name: setting for setting in SETTINGS}
        self.blocks = blocks(config.seed, scale)
        self.load = validation_load(config.seed, scale)
        subject = {
            "command": "validate",
            "config": resolve(config),
            "scale": dataclasses.asdict(scale) | {"output_range": list(scale.output_range)},
            "settings": [[s.name, results.plain(s.loop), results.plain(s.engine)] for s in SETTINGS],
            "model": model.name,
        }
        if inputs := input_digests([config]):
            subject["inputs"] = inputs
        self.journal = Journal(folder / JOURNAL, subject, resume)
        self._engine_certifier = Certifier(config, model.vocab_size)
        self._sim_certifier = Certifier(config, int(self.bank.meta["vocab_size"]))

    # -- runs on the engine ---------------------------------------------------------------------------------------

    def measure(self, *, minutes: float | None = None, progress: Callable[[str, float], None] | None = None) -> bool:
        """Do runs until all are done or the time is up; return whether all are done.

        Parameters
        ----------
        minutes : float, optional
            No run starts later than this.
        progress : callable(what, share), optional
        """
        begun = time.monotonic()
        warm = False
        total = sum(len(part) for part in runs(self.config.seed, self.scale))
        while (run := next_run(self.journal, self.config.seed, self.scale)) is not None:
            if minutes is not None and time.monotonic() - begun > 60.0 * minutes:
                return False
            if not warm:
                trials.warm_up(self.model, trials.prompts(self.model, *_warm_lengths(self.load)), self.config)
                warm = True
            if progress is not None:
                done = len({entry["run"] for entry in self.journal.entries})
                what = f"block {run.repeat}" if run.setting == "block" else f"{run.setting} at {run.utilisation:g}"
                progress(f"run {done + 1} of {total}: {what}", done / total)
            self._run(run)
        return True

    def _run(self, run: Run) -> None:
        setting, load = self._what(run)
        seed = self.config.seed + run.repeat
        config = configure(self.config, setting, seed)
        pieces = trials.prompts(self.model, load.prompt_tokens, load.offset)
        log = ""
        if run.setting == "block":  # its log is what the fit reads
            log = f"block-{run.repeat}-{len(self.journal.of(run))}.jsonl"
        target = self.folder / log if log else Path(os.devnull)
        with Recorder(target) as recorder:  # a trial writes its log to nowhere: same work as a block's
            trial = trials.run_trial(
                config,
                self.model,
                pieces,
                load.arrival_s,
                load.output_tokens,
                verdict=self._engine_certifier.verdict(config.loop),
                recorder=recorder,
            )
        foreign = trial.foreign_cores
        self.journal.add(
            run,
            reference_s=trial.reference_s,
            probe_s=trial.probe_s,
            foreign_cores=foreign if np.isfinite(foreign) else None,
            log=log,
            summary=results.plain({name: trial.summary[name] for name in _KEPT}),
            requests=results.plain({name: trial.requests[name] for name in ("ttft_s", "tpot_s", "e2e_s")}),
        )

    def _what(self, run: Run) -> tuple[Setting, Load]:
        if run.setting == "block":
            return self.blocks[run.repeat]
        return self.settings[run.setting], self.load.faster(run.utilisation * self._capacity())

    def _capacity(self) -> float:
        """Return requests per second at utilisation 1: from the first blocks, once, then from the file."""
        path = self.folder / "rate.json"
        if not path.exists():
            first, _ = runs(self.config.seed, self.scale)
            found = self._fit(first)
            rate = validate.capacity_per_s(configure(self.config, SETTINGS[0], 0), self.load, found, bank=self.bank)
            results.write_json(path, {"requests_per_s_at_utilisation_1": rate})
        return float(json.loads(path.read_text(encoding="utf-8"))["requests_per_s_at_utilisation_1"])

    def _fit(self, wanted: Sequence[Run]) -> Calibration:
        """Fit the undisturbed tries of these blocks (of a kind without any, the least disturbed)."""
        names = [self.journal.entries[i]["log"] for i in self._used() if self.journal.entries[i]["run"] in set(wanted)]
        return calibrate.fit(read_logs([self.folder / name for name in names]), source=names)

    def _used(self) -> list[int]:
        """Return which entries count: undisturbed ones, and all of a cell with too few of those."""
        bad = disturbed(self.journal.entries)
        groups: dict[tuple[str, float], list[int]] = {}
        for i, entry in enumerate(self.journal.entries):
            run = entry["run"]
            block = run.setting == "block"
            groups.setdefault(("block", run.repeat % len(BLOCK_KINDS)) if block else run[:2], []).append(i)
        out = []
        for key, members in groups.items():
            quiet = [i for i in members if not bad[i]]
            if key[0] == "block":  # a law must be seen: of a kind without a quiet block, the least disturbed
                out += quiet or [min(members, key=lambda i: self.journal.entries[i]["foreign_cores"] or 0.0)]
            else:
                out += quiet if len(quiet) >= min(_FEWEST, self.scale.repeats) else members
        return sorted(out)

    # -- simulator, comparison ------------------------------------------------------------------------------------

    def judge(self, *, progress: Callable[[str, float], None] | None = None) -> Findings:
        """Fit, simulate every cell and compare; call it when :meth:`measure` returned True."""
        entries, used = self.journal.entries, self._used()
        found = self._fit([Run("block", 0.0, i) for i in range(self.scale.blocks)])
        capacity = self._capacity()
        engine: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
        simulated: dict[tuple[str, float], list[dict[str, Any]]] = {}
        names = ("world", "setting", "utilisation", "ttft_s", "tpot_s", "e2e_s")
        columns: dict[str, list[Any]] = {name: [] for name in names}
        beyond = 0
        for n, cell in enumerate(cells()):
            name, utilisation = cell
            if progress is not None:
                progress(f"simulating {name} at {utilisation:g}", n / len(cells()))
            mine = [entries[i] for i in used if entries[i]["run"][:2] == cell]
            engine[cell] = [entry["summary"] for entry in mine]
            config = configure(self.config, self.settings[name], self.config.seed)
            prediction = validate.predict(
                config,
                self.load.faster(utilisation * capacity),
                found,
                verdict=self._sim_certifier.verdict(config.loop),
                bank=self.bank,
            )
            simulated[cell] = prediction.summaries
            beyond += prediction.beyond_steps
            for world, tables in (("engine", [e["requests"] for e in mine]), ("simulator", [prediction.requests])):
                for table in tables:
                    rows = len(table["ttft_s"])
                    for key, values in (("world", world), ("setting", name), ("utilisation", utilisation)):
                        columns[key] += [values] * rows
                    for key in ("ttft_s", "tpot_s", "e2e_s"):
                        columns[key] += [np.nan if v is None else float(v) for v in table[key]]
        errors = validate.compare(engine, simulated)
        base = configure(self.config, SETTINGS[0], self.config.seed)
        real = validate.capacity_per_s(base, self.load, found, bank=self.bank)
        return Findings(
            errors=errors,
            rankings=[validate.rank(errors, metric) for metric in validate.RANKED],
            runs=self._runs_table(used),
            requests={name: np.array(values) for name, values in columns.items()},
            calibration=found,
            utilisations={u: u * capacity / real for _, u in cells()[: len({u for _, u in cells()})]},
            beyond_steps=beyond,
            notes=self._notes(used, beyond),
        )

    def _runs_table(self, used: Sequence[int]) -> dict[str, np.ndarray]:
        entries, bad, counted = self.journal.entries, disturbed(self.journal.entries), set(used)
        table: dict[str, Any] = {
            "setting": [e["run"].setting for e in entries],
            "utilisation": [e["run"].utilisation for e in entries],
            "repeat": [e["run"].repeat for e in entries],
            "reference_s": [e["reference_s"] for e in entries],
            "probe_s": [e["probe_s"] for e in entries],
            "foreign_cores": [np.nan if e["foreign_cores"] is None else e["foreign_cores"] for e in entries],
            "disturbed": bad,
            "used": [i in counted for i in range(len(entries))],
        }
        for name in _KEPT:
            table[name] = [np.nan if e["summary"][name] is None else float(e["summary"][name]) for e in entries]
        return {name: np.array(values) for name, values in table.items()}

    def _notes(self, used: Sequence[int], beyond: int) -> list[str]:
        entries, bad = self.journal.entries, disturbed(self.journal.entries)
        references = np.array([e["reference_s"] for e in entries])
        low, middle, high = (1e3 * float(np.quantile(references, q)) for q in (0.1, 0.5, 0.9))
        probes = np.array([e["probe_s"] for e in entries])
        fast, slow = (1e3 * float(np.quantile(probes, q)) for q in (0.1, 0.9))
        noisy = f"{sum(bad)} of {len(entries)} runs were disturbed (others used the CPU, or the machine was slow)"
        speed = (
            f"Reference decode (slower of before and after): median {middle:.1f} ms, 10-90% {low:.1f}-{high:.1f} ms; "
            f"the probe during a run: 10-90% {fast:.2f}-{slow:.2f} ms."
        )
        out = [
            f"{noisy}; {sum(bad[i] for i in used)} of them had to be used all the same.",
            speed,
        ]
        if beyond:
            out.append(f"{beyond} simulated iterations lay outside the calibrated ranges.")
        return out

    def write(self, findings: Findings) -> None:
        """Write tables, the calibration, the figure and the report into the folder."""
        from figures import validation as figure
        from paper_repro import validation_report

        stamp = results.stamp(self.config, self.config.seed)
        results.write_json(self.folder / "calibration.json", calibrated.to_json(findings.calibration))
        for name, table in (
            ("errors", findings.errors),
            ("runs", findings.runs),
            ("requests", findings.requests),
        ):
            results.write_table(self.folder / f"{name}.csv", table, stamp)
        figure.draw(findings.errors, findings.requests, self.folder / "validation.png")
        validation_report.write(findings, self.folder, stamp)


def _warm_lengths(load: Load) -> tuple[np.ndarray, np.ndarray]:
    return load.prompt_tokens[:4], load.offset[:4]
