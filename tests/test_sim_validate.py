"""What a validation compares, how it ranks, what it runs, and how it is taken up again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from sim import validate
from sim.validation_plan import SETTINGS, Scale, blocks, configure, validation_load
from sim.validation_run import JOURNAL, Journal, Run, cells, disturbed, held, next_run, runs

SCALE = Scale(requests=6, repeats=2, blocks=9, block_requests=4)


def summary(value: float) -> dict[str, float]:
    return dict.fromkeys(validate.METRICS, value)


def both(engine: dict[str, list[float]], simulated: dict[str, float]) -> dict[str, np.ndarray]:
    return validate.compare(
        {(name, 0.8): [summary(v) for v in values] for name, values in engine.items()},
        {(name, 0.8): [summary(value)] for name, value in simulated.items()},
    )


def test_errors_and_intervals_in_closed_form() -> None:
    table = both({"base": [0.9, 1.0, 1.1]}, {"base": 1.06})
    np.testing.assert_allclose(table["error"], 0.06)
    np.testing.assert_allclose(table["noise"], 0.1)
    np.testing.assert_allclose(table["engine_half"], 4.302653 * 0.1 / 3**0.5, rtol=1e-6)  # t(0.975, 2)
    ok = dict(zip(table["metric"].tolist(), table["ok"].tolist(), strict=True))
    assert not ok["tpot_mean_s"]  # 6% is over 5%
    assert ok["tpot_p99_s"]  # and under 8%
    assert ok["e2e_mean_s"]
    assert not ok["throughput_tokens_per_s"]


def test_targets_are_those_of_the_issue() -> None:
    assert validate.target("ttft_mean_s", 0.8) == 0.12
    assert validate.target("ttft_mean_s", 1.2) == 0.20
    assert validate.target("tpot_p99_s", 0.5) == 0.08
    assert validate.target("tpot_p50_s", 0.5) == np.inf


@given(st.permutations(range(5)), st.lists(st.floats(1.0, 9.0), min_size=5, max_size=5, unique=True))
def test_ranking_is_antisymmetric_and_counts_only_separated_pairs(order: list[int], values: list[float]) -> None:
    names = [f"s{i}" for i in order]
    engine = {name: [v - 0.01, v, v + 0.01] for name, v in zip(names, values, strict=True)}
    alike = validate.rank(both(engine, {n: v**2 for n, v in zip(names, values, strict=True)}), "tpot_mean_s")
    opposite = validate.rank(both(engine, {n: -v for n, v in zip(names, values, strict=True)}), "tpot_mean_s")
    half = 4.302653 * 0.01 / 3**0.5
    apart = sum(abs(a - b) > 2 * half + 1e-9 for i, a in enumerate(values) for b in values[:i])
    assert abs(alike.separated - apart) <= sum(
        abs(abs(a - b) - 2 * half) < 1e-6 for i, a in enumerate(values) for b in values[:i]
    )
    assert alike.alike == alike.separated == opposite.separated
    assert opposite.alike == 0
    np.testing.assert_array_equal(alike.matrix, alike.matrix.T)


def test_one_repeat_separates_nothing() -> None:
    table = both({"a": [1.0], "b": [9.0]}, {"a": 1.0, "b": 9.0})
    assert validate.rank(table, "e2e_mean_s").separated == 0


def test_the_settings_are_twelve_valid_and_different() -> None:
    made = [configure(RunConfig(), setting, 1) for setting in SETTINGS]
    assert len(made) == 12
    assert len({(repr(c.loop), repr(c.engine)) for c in made}) == 12
    assert all(c.seed == 1 for c in made)


def test_calibration_and_validation_loads_differ_and_follow_from_the_seed() -> None:
    load = validation_load(3, Scale())
    again = validation_load(3, Scale())
    np.testing.assert_array_equal(load.prompt_tokens, again.prompt_tokens)
    np.testing.assert_allclose(load.faster(4.0).arrival_s, load.arrival_s / 4.0)
    made = blocks(3, Scale())
    assert {setting.loop.get("temperature", {}).get("law", "fixed") for setting, _ in made} == {
        "fixed",
        "feedback",
        "solve",
    }  # every law of the settings
    for _, block in made:
        assert not np.array_equal(block.prompt_tokens[: len(load.prompt_tokens)], load.prompt_tokens)
        assert (np.diff(block.arrival_s) >= 0).all()
    longest = max(int(block.prompt_tokens.max()) for _, block in made)
    assert longest >= load.prompt_tokens.max()  # contexts lie inside what is calibrated


def finish(journal: Journal, run: Run, *, foreign: float = 0.0, reference_s: float = 0.03) -> None:
    journal.add(run, reference_s=reference_s, probe_s=0.002, foreign_cores=foreign, log="", summary={}, requests={})


def test_every_run_is_done_once_then_the_disturbed_ones_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl", {"a": 1})
    first, rest = runs(0, SCALE)
    assert len(first) == 3
    assert len(first) + len(rest) == SCALE.blocks + SCALE.repeats * len(cells())
    assert sorted(rest) != rest  # in random order
    done = []
    bad = rest[5]
    while (run := next_run(journal, 0, SCALE)) is not None:
        done.append(run)
        finish(journal, run, foreign=0.9 if run == bad else 0.0)
    assert done == [*first, *rest, *[bad] * (SCALE.tries - 1)]
    assert len(cells()) == 14


def test_disturbed_means_foreign_load_or_a_slow_machine() -> None:
    usual = {"reference_s": 0.03, "probe_s": 0.002, "foreign_cores": 0.0}
    changes = ({}, {"foreign_cores": 0.02}, {"foreign_cores": 0.2}, {"foreign_cores": None}, {"reference_s": 0.05})
    entries = [{**usual, **change} for change in (*changes, {"probe_s": 0.00211}, {"probe_s": 0.00209})]
    assert disturbed(entries) == [False, False, True, False, True, True, False]
    assert disturbed([]) == []


def test_a_journal_is_taken_up_again_after_a_kill_and_refuses_another_subject(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    journal = Journal(path, {"a": 1})
    finish(journal, Run("block", 0.0, 0))
    finish(journal, Run("base", 0.8, 1))
    with path.open("a") as handle:
        handle.write('{"run": ["base"')  # killed while it wrote
    again = Journal(path, {"a": 1}, resume=True)
    assert [entry["run"] for entry in again.entries] == [Run("block", 0.0, 0), Run("base", 0.8, 1)]
    finish(again, Run("base", 0.8, 0))
    assert len(Journal(path, {"a": 1}, resume=True).entries) == 3
    with pytest.raises(BadInputError, match="--resume"):
        Journal(path, {"a": 1})
    with pytest.raises(BadInputError, match="another validation"):
        Journal(path, {"a": 2}, resume=True)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{}", *lines[1:]]) + "\n")
    with pytest.raises(BadInputError, match=r"j\.jsonl:2: not a journal line"):
        Journal(path, {"a": 1}, resume=True)
    assert json.loads(lines[1])["reference_s"] == 0.03


def test_the_folder_of_a_validation_holds_nothing_else_and_has_one_writer(tmp_path: Path) -> None:
    with held(tmp_path / "new", resume=False) as folder:
        Journal(folder / JOURNAL, {"a": 1})
        with pytest.raises(BadInputError, match="another run is writing"), held(folder, resume=True):
            pass
    with pytest.raises(BadInputError, match="--resume"), held(folder, resume=False):
        pass
    with held(folder, resume=True) as again:
        assert again == folder
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.md").write_text("mine")
    for resume in (False, True):
        with pytest.raises(BadInputError, match="not empty"), held(tmp_path / "mine", resume=resume):
            pass
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.md"]
