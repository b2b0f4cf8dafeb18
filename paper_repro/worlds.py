"""The two worlds an arm can run in. Both take the same ``LoopConfig`` and report the same columns.

- ``Simulation``: the discrete-event simulator on the shipped (or configured) entropy bank;
- ``RealEngine``: real forward passes over built-in prompts, all handed in at time 0, on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from entropic_ctl.certificates import Verdict, micro_digest
from entropic_ctl.collectors import Tee
from entropic_ctl.config import LoopConfig, RunConfig
from entropic_ctl.metrics import Metrics
from paper_repro.arms import with_loop, with_seed
from paper_repro.guarantee import Guarantee

__all__ = ["COLUMNS", "Certifier", "RealEngine", "Simulation", "row"]

COLUMNS: Mapping[str, str] = {
    "latency_s": "e2e_mean_s",
    "latency_p99_s": "e2e_p99_s",
    "longest_wait_s": "longest_wait_s",
    "preemptions": "preemptions",
    "ttft_s": "ttft_mean_s",
    "tpot_s": "tpot_mean_s",
    "throughput_tok_s": "throughput_tokens_per_s",
    "output_tokens": "output_tokens",
    "requests_finished": "requests_finished",
    "tau_nats": "tau_nats",
    "tau_filtered_nats": "tau_filtered_nats",
    "tau_per_s": "tau_per_second",
    "tau_per_flop": "tau_per_flop",
    "tau_per_kv_byte": "tau_per_kv_byte",
    "kv_bytes": "kv_bytes",
    "flops": "flops",
    "entropy_variance": "tempered_variance_within",
    "kept_fraction": "kept_fraction_mean",
    "certified_mass_mean": "pruned_mass_mean",
}
"""Column of the runs table to key of :meth:`entropic_ctl.metrics.Metrics.summary`."""


def row(summary: Mapping[str, Any], guarantee: Guarantee | None, kl_nats: float) -> dict[str, float]:
    """Return one row of the runs table.

    Parameters
    ----------
    summary : mapping
        From :class:`entropic_ctl.metrics.Metrics`.
    guarantee : Guarantee, optional
        What was watched; its columns are NaN without.
    kl_nats : float
        Mean KL to dense attention per decode token; NaN if not measured. ``quality`` = exp(-KL), a proxy.
    """
    out = {name: _float(summary.get(key)) for name, key in COLUMNS.items()}
    out["kl_nats"] = kl_nats
    out["quality"] = math.exp(-kl_nats) if math.isfinite(kl_nats) else math.nan
    if guarantee is not None:
        out["certified_mass_max"] = guarantee.mass_max
        out["certificate_max_nats"] = guarantee.certificate_max
        out["worst_share"] = guarantee.worst_share
        out["pruned_rows"] = float(guarantee.rows)
        out["violations"] = float(guarantee.violations)
    return out


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)


class Certifier:
    """Proves and checks the micro law of a loop once per (law, lag, vocabulary, drafts)."""

    def __init__(self, config: RunConfig, vocab_size: int) -> None:
        self._config, self.vocab_size = config, vocab_size
        self._known: dict[str, Verdict] = {}

    def both(self, loop: LoopConfig) -> tuple[Mapping[str, Any], Verdict]:
        """Return (certificate of every theorem, verdict of the independent checker on the temperature loop)."""
        from proofs import check, search

        config = with_loop(self._config, loop)
        certificate = search.prove(config, self.vocab_size)
        return certificate, check.check(certificate, config, self.vocab_size).verdict

    def verdict(self, loop: LoopConfig) -> Verdict:
        """Return the checked verdict."""
        from proofs import search

        lag = self._config.engine.observation_lag
        key = micro_digest(loop.temperature, lag, self.vocab_size, self._config.speculation)
        if key not in self._known:
            self._known[key] = search.certify(with_loop(self._config, loop), self.vocab_size)
        return self._known[key]


class Simulation:
    """The simulated world of one workload.

    Parameters
    ----------
    config : RunConfig
    certifier : Certifier
        For the vocabulary of the bank.
    bank : entropic_ctl.bank.Bank, optional
        In place of the one the config names.
    """

    def __init__(self, config: RunConfig, certifier: Certifier, bank: Any = None) -> None:
        self.config, self._certifier, self._bank = config, certifier, bank

    def __call__(self, arm: str, loop: LoopConfig, seed: int) -> dict[str, float]:  # noqa: ARG002
        """Run one arm once."""
        from sim.replica import simulate

        config = with_seed(with_loop(self.config, loop), seed)
        result = simulate(config, verdict=self._certifier.verdict(loop), bank=self._bank)
        return row(result.summary, None, _float(result.summary.get("kl_nats_mean")))


@dataclass
class RealEngine:
    """The real world: a model on this machine over fixed prompts.

    Parameters
    ----------
    config : RunConfig
    model : backends.models.LoadedModel
    prompts : sequence of (str or list of int, bool)
        Text or token ids, and whether it is a chat turn.
    certifier : Certifier
    max_new_tokens : int
    log : callable, optional
        (arm, seed) to the file in which that run is recorded for replay, or None.
    """

    config: RunConfig
    model: Any
    prompts: Sequence[tuple[Any, bool]]
    certifier: Certifier
    max_new_tokens: int
    log: Callable[[str, int], Path | None] | None = None
    tokens: dict[tuple[str, int], dict[str, np.ndarray]] = field(default_factory=dict)
    steps: dict[tuple[str, int], dict[str, np.ndarray]] = field(default_factory=dict)
    audits: dict[tuple[str, int], dict[str, np.ndarray]] = field(default_factory=dict)
    texts: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    finishes: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    """Why each text ended: "length" is the limit on its tokens."""

    def warm_up(self, loop: LoopConfig) -> None:
        """Run every prompt for two tokens, unmeasured, so that no arm pays for what happens only once."""
        from backends.engine import Engine
        from backends.sampling import SamplingParams

        engine = Engine(with_loop(self.config, loop), self.model, verdict=self.certifier.verdict(loop))
        for prompt, chat in self.prompts:
            engine.submit(prompt, SamplingParams(max_new_tokens=2), chat=chat)
        engine.run()

    def __call__(self, arm: str, loop: LoopConfig, seed: int) -> dict[str, float]:
        """Run one arm once."""
        from backends.engine import Engine
        from backends.sampling import SamplingParams
        from entropic_ctl.recording import Recorder

        config = with_seed(with_loop(self.config, loop), seed)
        metrics = Metrics(config.engine.page_tokens, keep_tokens=True)
        guarantee = Guarantee()
        path = self.log(arm, seed) if self.log is not None else None
        recorder = Recorder(path) if path is not None else None
        engine = Engine(
            config,
            self.model,
            verdict=self.certifier.verdict(loop),
            recorder=recorder,
            metrics=Tee(metrics, guarantee),
        )
        keys = np.random.SeedSequence(seed).generate_state(len(self.prompts), np.uint32)
        for (prompt, chat), key in zip(self.prompts, keys.tolist(), strict=True):
            params = SamplingParams(max_new_tokens=self.max_new_tokens, seed=key)
            engine.submit(prompt, params, arrival_s=0.0, chat=chat)
        outputs = engine.run()
        if recorder is not None:
            recorder.close()
        audit = engine.audit.table()
        kl = float(np.mean(audit["kl_nats"])) if audit["kl_nats"].size else math.nan
        if not guarantee.rows:
            kl = 0.0  # nothing was pruned: the arm is dense attention itself
        self.tokens[arm, seed] = metrics.tokens_table()
        self.steps[arm, seed] = metrics.steps_table()
        self.audits[arm, seed] = audit
        self.texts[arm, seed] = [output.text for output in outputs]
        self.finishes[arm, seed] = [str(output.finish.reason) if output.finish else "" for output in outputs]
        return row(metrics.summary(), guarantee, kl)
