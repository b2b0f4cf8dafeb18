"""The tuner finds a known optimum, never leaves its ranges, resumes exactly, and knows a Pareto set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_bank import make_bank

from entropic_ctl import config as configs
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from sim.carry_out import Memory
from sim.journal import Journal
from sim.objectives import OBJECTIVES, Objective, named
from sim.space import Choice, Range
from sim.tune import held_out, tune
from sim.tune_space import default_space, settings_of
from sim.tune_trials import pareto

BANK, _ = make_bank()
CONFIG = configs.from_mapping(
    {
        "seed": 5,
        "workload": {"n_requests": 2, "prompt_tokens": 8.0, "output_tokens": 30.0},
        "loop": {"temperature": {"law": "feedback", "gain": 0.01, "target_nats": 2.0}},
    }
)
GAIN = Range("temperature.gain", 0.005, 0.06, log=True)
SPREAD = Objective("spread", lambda trial, given, target: float(trial["tempered_target_mean_square"]))


def test_best_trial_is_returned_and_never_worse_than_the_start() -> None:
    options: dict[str, Any] = {"trials": 8, "gain_limit": 0.0717, "objectives": [SPREAD], "scalar": True, "bank": BANK}
    result = tune(CONFIG, [GAIN], **options)
    table = result.table()
    gains = table["loop.temperature.gain"]
    assert len(table["trial"]) == 8
    assert gains[0] == 0.01  # the configuration as given comes first
    assert result.objective == table["objective"].min() <= table["objective"][0]
    assert result.loop.temperature.config.gain == gains[table["objective"].argmin()]
    assert ((gains >= 0.005) & (gains <= 0.06)).all()
    assert len(set(gains.tolist())) == 8
    again = tune(CONFIG, [GAIN], **options).table()
    for name, column in table.items():
        np.testing.assert_array_equal(column, again[name])


def test_costs_are_zero_for_the_configuration_as_given() -> None:
    result = tune(
        CONFIG, [GAIN], trials=1, bank=BANK, repeats=2, objectives=named(["latency", "throughput", "quality"])
    )
    assert (result.trials[0].cost == 0.0).all()
    assert result.config == CONFIG
    assert result.objective == 0.0


def test_every_trial_asks_for_its_own_verdict() -> None:
    asked: list[float] = []

    def certify(run: RunConfig) -> None:
        asked.append(run.loop.temperature.config.gain)
        raise BadInputError("stop here")

    with pytest.raises(BadInputError, match="stop here"):
        tune(CONFIG, [GAIN], trials=2, bank=BANK, certify=certify)  # type: ignore[arg-type]
    assert asked == [0.01]


def test_laws_can_be_switched_off_and_their_gains_go_with_them() -> None:
    space = default_space(CONFIG, gain_limit=0.07, laws=("temperature", "scheduling"))
    assert list(space) == ["temperature", "scheduling"]
    found = tune(CONFIG, [d for dims in space.values() for d in dims], trials=14, gain_limit=0.07, bank=BANK, batch=3)
    laws = {trial.config.loop.temperature.name for trial in found.trials if trial.config}
    assert laws == {"feedback", "fixed"}
    table = found.table()
    off = table["loop.temperature.law"] == "fixed"
    assert np.isnan(table["loop.temperature.gain"][off]).all()
    assert np.isfinite(table["loop.temperature.gain"][~off]).all()
    assert len(set(table["loop.scheduling.policy"].tolist())) > 1


def test_law_by_law_keeps_what_the_earlier_laws_found() -> None:
    stages = default_space(CONFIG, gain_limit=0.07, laws=("temperature", "scheduling"))
    cool = Objective("cool", lambda trial, given, target: float(trial["tempered_entropy_mean_nats"]))
    found = tune(CONFIG, stages, trials=9, gain_limit=0.07, objectives=[cool], scalar=True, bank=BANK)
    assert [t.stage for t in found.trials] == ["given"] + ["temperature"] * 4 + ["scheduling"] * 4
    best = min(found.trials[:5], key=found.weighted)
    assert best.number > 0
    for trial in found.trials[5:]:
        assert trial.config is not None
        assert trial.config.loop.temperature == best.config.loop.temperature  # type: ignore[union-attr]


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_cut_off_anywhere_it_resumes_to_the_same_trials(tmp_path: Path, sampler: str) -> None:
    options: dict[str, Any] = {
        "trials": 7,
        "repeats": 2,
        "batch": 2,
        "sampler": sampler,
        "bank": BANK,
        "gain_limit": 0.07,
        "objectives": named(["latency", "quality"]),
    }
    path = tmp_path / "runs.jsonl"
    with Journal(path) as journal:
        first = tune(CONFIG, [GAIN], journal=journal, **options)
    whole = path.read_bytes()
    for share in (0.1, 0.5, 0.93):
        path.write_bytes(whole[: int(share * len(whole))])
        with Journal(path) as journal:
            again = tune(CONFIG, [GAIN], journal=journal, **options)
        assert path.read_bytes() == whole
        np.testing.assert_array_equal([t.cost for t in again.trials], [t.cost for t in first.trials])
    record = json.loads(whole.splitlines()[-1])
    record["set"]["loop.temperature.gain"] = 0.0123
    path.write_bytes(b"\n".join([*whole.splitlines()[:-1], json.dumps(record).encode()]) + b"\n")
    with Journal(path) as journal, pytest.raises(BadInputError, match="other settings"):
        tune(CONFIG, [GAIN], journal=journal, **options)


def test_held_out_uses_fresh_seeds_and_the_same_costs() -> None:
    goals, journal = named(["latency", "quality"]), Memory()
    found = tune(CONFIG, [GAIN], trials=4, repeats=2, gain_limit=0.07, objectives=goals, bank=BANK, journal=journal)
    judged = held_out(CONFIG, found, goals, repeats=3, first=2, bank=BANK, journal=journal)
    assert {repeat for _, repeat in journal.records} == {0, 1, 2, 3, 4}
    assert set(judged.costs) == {"latency", "quality"}
    assert judged.weighted.n == 3
    assert judged.weighted.mean == pytest.approx(sum(interval.mean for interval in judged.costs.values()))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_the_pareto_set_is_what_nothing_dominates(rows: list[tuple[int, int, int]]) -> None:
    points = np.array(rows, float)
    kept = pareto(points)
    assert kept.any()
    for i, row in enumerate(rows):
        beaten = any(all(a <= b for a, b in zip(o, row, strict=True)) and o != row for o in rows)
        assert kept[i] == (not beaten)
    assert not pareto(np.vstack([points, [np.nan, 0, 0]]))[-1]


def test_quality_sees_pruning_and_a_moved_target() -> None:
    quality = OBJECTIVES["quality"].cost
    metrics = {
        "kl_nats_mean": 0.001,
        "output_tokens": 101,
        "tempered_variance_pooled": 1.01,
        "tempered_entropy_mean_nats": 2.0,
    }
    assert quality(metrics, metrics, 2.0) == 0.0
    assert quality({**metrics, "kl_nats_mean": 0.002}, metrics, 2.0) == pytest.approx(0.1)
    assert quality({**metrics, "tempered_entropy_mean_nats": 3.0}, metrics, 2.0) == pytest.approx(0.5 * np.log(2.0))
    assert quality({**metrics, "tempered_entropy_mean_nats": 3.0}, metrics, None) == pytest.approx(0.5 * np.log(2.0))


def test_log_ratios_have_the_better_side_below_zero() -> None:
    given_ = {"latency_per_token_s": 1.0, "throughput_tokens_per_s": 10.0}
    trial = {"latency_per_token_s": 0.5, "throughput_tokens_per_s": 20.0}
    for name in ("latency", "throughput"):
        assert OBJECTIVES[name].cost(trial, given_, None) == pytest.approx(-np.log(2))
    assert np.isnan(OBJECTIVES["energy"].cost(trial, given_, None))
    with pytest.raises(BadInputError, match="no such objective"):
        named(["latencie"])
    with pytest.raises(BadInputError, match="energy is undefined"):
        tune(CONFIG, [GAIN], trials=2, bank=BANK, objectives=[Objective("energy", lambda *_: float("nan"))])


@pytest.mark.parametrize(
    ("gain", "needle"),
    [
        (Range("temperature.gain", 0.01, 0.08), r"inside \(0, 0.0717"),
        (Range("temperature.gain", -0.01, 0.05), r"inside \(0, 0.0717"),
        (Range("temperature.gian", 0.01, 0.05), r"temperature\.gian: no such field"),
        (Range("temperature.fraction", 0.01, 0.05), "no such parameter of the laws in use"),
        (Range("scheduler.x", 0.01, 0.05), r"scheduler\.x: no such field"),
        (Range("pruning.sink_pages", 1, 2, also=("temperature.gain",)), "by itself"),
    ],
)
def test_bad_ranges_are_refused_before_anything_runs(gain: Range, needle: str) -> None:
    with pytest.raises(BadInputError, match=needle):
        tune(CONFIG, [gain], gain_limit=0.0717, bank=BANK)


@pytest.mark.parametrize(
    ("dimension", "needle"),
    [
        (Choice("scheduling.policy", ("fcfs", "zzz")), r"loop\.scheduling\.policy.*got 'zzz'.*fcfs"),
        (Choice("scheduling.policy", ([],)), r"loop\.scheduling\.policy: not a string"),
        (Choice("engine.max_batch", (4, "many")), r"engine\.max_batch.*got 'many'.*\[1, 65536\]"),
        (Choice("seed", (1, 2)), "seed is not tuned"),
        (Range("seed", 1, 2), "seed is not tuned"),
        (Range("engine.max_batch", 0, 4), r"engine\.max_batch.*got 0.*\[1, 65536\]"),
    ],
)
def test_values_no_configuration_has_are_refused_before_anything_runs(dimension: Choice | Range, needle: str) -> None:
    with pytest.raises(BadInputError, match=needle):
        tune(CONFIG, [dimension], bank=BANK)


def test_bad_options() -> None:
    with pytest.raises(BadInputError, match="empty range"):
        Range("temperature.gain", 0.2, 0.1)
    with pytest.raises(BadInputError, match="at least one"):
        tune(CONFIG, [], bank=BANK)
    for option in ({"trials": 0}, {"repeats": 0}, {"batch": 0}, {"sampler": "best"}, {"weights": {"latency": -1.0}}):
        with pytest.raises(BadInputError, match=next(iter(option)).removesuffix("s")):
            tune(CONFIG, [GAIN], bank=BANK, **option)  # type: ignore[arg-type]


def test_fields_that_move_along_keep_their_ratio() -> None:
    """Tuning the budget must not turn an entropy-driven one (wide above narrow) into a constant."""
    budget = {"law": "budget", "theta_nats": 0.02, "theta_wide_nats": 0.03}
    run = configs.from_mapping({**configs.resolve(CONFIG), "loop": {"pruning": budget}})
    width = Range("pruning.theta_nats", 0.004, 0.008, log=True, also=("pruning.theta_wide_nats",))
    settings = settings_of(run, [width], {"loop.pruning.theta_nats": 0.006})
    assert settings["loop.pruning.theta_wide_nats"] == pytest.approx(0.009)
    found = tune(run, [width], trials=2, bank=BANK)
    rule = found.trials[1].config.loop.pruning.config  # type: ignore[union-attr]
    assert 0.004 <= rule.theta_nats <= 0.008
    assert rule.theta_wide_nats == pytest.approx(1.5 * rule.theta_nats)


def test_a_trial_that_cannot_run_fails_alone() -> None:
    beyond = Choice("loop.temperature.t_max", (1.6, 9.0))  # 9 is outside the bank
    found = tune(CONFIG, [beyond], trials=6, bank=BANK, gain_limit=0.07)
    failed = [t for t in found.trials if t.error]
    assert failed
    assert all(t.settings["loop.temperature.t_max"] == 9.0 and "entropy bank" in t.error for t in failed)
    assert not found.best.error
