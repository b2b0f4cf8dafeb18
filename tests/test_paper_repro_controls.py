"""A control says plainly whether entropy had a part in a gain."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_bank import make_bank

from entropic_ctl import config as configs
from entropic_ctl.config import LoopConfig
from paper_repro.arms import arms
from paper_repro.controls import BLIND, blind_sentences, entropy_blind
from sim.replica import simulate


def runs(aware: float, blind: float) -> dict[str, np.ndarray]:
    base, jitter = np.array([10.0, 12.0, 9.0, 11.0]), np.array([1.0, 1.01, 0.99, 1.0])
    columns = {"baseline": base, "scheduling only": base * aware * jitter, BLIND: base * blind}
    return {
        "world": np.repeat("simulation", 12),
        "arm": np.repeat(list(columns), 4),
        "repeat": np.tile(np.arange(4), 3),
        "latency_s": np.concatenate(list(columns.values())),
    }


@pytest.mark.parametrize(
    ("aware", "blind", "words"),
    [(0.8, 0.8, "no part of the gain"), (0.6, 0.8, "entropy has a part"), (0.95, 0.8, "makes it worse")],
)
def test_the_sentence_follows_the_interval_between_aware_and_blind(aware: float, blind: float, words: str) -> None:
    (said,) = blind_sentences(runs(aware, blind))
    assert words in said
    assert "0.800" in said
    without = {name: column[:8] for name, column in runs(aware, blind).items()}
    assert blind_sentences(without) == []


def test_the_blind_scheduler_does_not_react_to_entropy() -> None:
    """Other entropies, same order of service; the aware one serves in another order."""
    loop = configs.from_mapping({"loop": {"scheduling": {"policy": "entropic", "quantum_steps": 1}}}).loop
    (blind,) = entropy_blind(arms(loop)["scheduling only"]).values()
    assert entropy_blind(LoopConfig()) == {}
    tables = {
        "workload": {"n_requests": 24, "prompt_tokens": 20.0, "output_tokens": 30.0, "output_length": "limit"},
        "engine": {"max_batch": 2, "max_live": 24},
    }
    left = {}
    for name, used in (("aware", loop), ("blind", blind)):
        config = configs.from_mapping({**tables, "loop": {"scheduling": configs.resolve_loop(used)["scheduling"]}})
        left[name] = [simulate(config, bank=make_bank(seed)[0]).requests["left_s"].tolist() for seed in (0, 1)]
    assert left["blind"][0] == left["blind"][1]
    assert left["aware"][0] != left["aware"][1]
