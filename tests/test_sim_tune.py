"""The tuner finds a known optimum, never leaves its ranges, and is deterministic."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_bank import make_bank

from entropic_ctl import config as configs
from entropic_ctl.config import LoopConfig
from entropic_ctl.errors import BadInputError
from sim.replica import SimulationResult
from sim.tune import Gain, tune, with_gains

BANK, _ = make_bank()
CONFIG = configs.from_mapping(
    {
        "seed": 5,
        "workload": {"n_requests": 2, "prompt_tokens": 8.0, "output_tokens": 30.0},
        "loop": {"temperature": {"law": "feedback", "gain": 0.01, "target_nats": 2.0}},
    }
)
GAIN = Gain("temperature.gain", 0.005, 0.06, log=True)


def spread(result: SimulationResult, given: SimulationResult) -> float:
    return float(result.summary["tempered_target_mean_square"])


def test_best_trial_is_returned_and_never_worse_than_the_start() -> None:
    result = tune(CONFIG, [GAIN], trials=8, gain_limit=0.0717, objective=spread, bank=BANK)
    trials = result.trials
    assert len(trials["trial"]) == 8
    assert trials["temperature.gain"][0] == 0.01  # the configuration as given comes first
    assert result.objective == trials["objective"].min() <= trials["objective"][0]
    best = trials["temperature.gain"][trials["objective"].argmin()]
    assert result.loop.temperature.config.gain == best
    assert ((trials["temperature.gain"] >= 0.005) & (trials["temperature.gain"] <= 0.06)).all()
    again = tune(CONFIG, [GAIN], trials=8, gain_limit=0.0717, objective=spread, bank=BANK)
    for name, column in trials.items():
        np.testing.assert_array_equal(column, again.trials[name])


def test_default_objective_is_zero_for_the_configuration_as_given() -> None:
    result = tune(CONFIG, [GAIN], trials=1, bank=BANK)
    assert result.objective == 0.0
    assert result.loop == CONFIG.loop


def test_every_trial_asks_for_its_own_verdict() -> None:
    asked: list[float] = []

    def certify(loop: LoopConfig) -> None:
        asked.append(loop.temperature.config.gain)
        raise BadInputError("stop here")

    with pytest.raises(BadInputError, match="stop here"):
        tune(CONFIG, [GAIN], trials=2, bank=BANK, certify=certify)  # type: ignore[arg-type]
    assert asked == [0.01]


@pytest.mark.parametrize(
    ("gain", "needle"),
    [
        (Gain("temperature.gain", 0.01, 0.08), r"inside \(0, 0.0717"),
        (Gain("temperature.gain", -0.01, 0.05), r"inside \(0, 0.0717"),
        (Gain("temperature.gian", 0.01, 0.05), "temperature.gian: no such parameter"),
        (Gain("scheduler.x", 0.01, 0.05), "scheduler.x: no such parameter"),
    ],
)
def test_bad_ranges_are_refused_before_anything_runs(gain: Gain, needle: str) -> None:
    with pytest.raises(BadInputError, match=needle):
        tune(CONFIG, [gain], gain_limit=0.0717, bank=BANK)


def test_bad_gains() -> None:
    with pytest.raises(BadInputError, match="empty range"):
        Gain("temperature.gain", 0.2, 0.1)
    with pytest.raises(BadInputError, match="logarithmic"):
        Gain("temperature.gain", 0.0, 0.1, log=True)
    with pytest.raises(BadInputError, match="at least one"):
        tune(CONFIG, [], bank=BANK)
    with pytest.raises(BadInputError, match="trials"):
        tune(CONFIG, [GAIN], trials=0, bank=BANK)


def test_with_gains_changes_only_what_it_names() -> None:
    loop = with_gains(CONFIG.loop, {"temperature.gain": 0.02})
    assert loop.temperature.config.gain == 0.02
    assert loop.temperature.config.target_nats == 2.0
    assert loop.pruning == CONFIG.loop.pruning


def test_fields_that_move_along_keep_their_ratio() -> None:
    """Tuning the budget must not turn an entropy-driven one (wide above narrow) into a constant."""
    budget = {"law": "budget", "theta_nats": 0.02, "theta_wide_nats": 0.03}
    run = configs.from_mapping({**configs.resolve(CONFIG), "loop": {"pruning": budget}})
    width = Gain("pruning.theta_nats", 0.004, 0.008, log=True, also=("pruning.theta_wide_nats",))
    tried: list[LoopConfig] = []

    def narrowest(result: SimulationResult, given: SimulationResult) -> float:
        return 0.0 if result is given else -1.0

    found = tune(run, [width], trials=2, objective=narrowest, bank=BANK, certify=tried.append)  # type: ignore[arg-type]
    rule = found.loop.pruning.config
    assert 0.004 <= rule.theta_nats <= 0.008
    assert rule.theta_wide_nats == pytest.approx(1.5 * rule.theta_nats)
    with pytest.raises(BadInputError, match="by itself"):
        tune(CONFIG, [Gain("pruning.sink_pages", 1, 2, also=("temperature.gain",))], gain_limit=0.07, bank=BANK)
