"""Entropy variance: theory against the shipped law on linear texts, the readings, and the command end to end."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("flint")

from metrics_doc import defined, undefined
from synthetic_bank import make_bank
from tiny_model import byte_tokenizer, tiny_llama

from backends import models
from backends.engine import Engine
from backends.sampling import SamplingParams
from entropic_ctl import results
from entropic_ctl.cli import app
from entropic_ctl.config import LawSpec, LoopConfig, RunConfig, from_mapping
from entropic_ctl.errors import BadInputError
from entropic_ctl.metrics import Metrics
from figures import variance as drawing
from paper_repro import variance
from paper_repro import variance_live as live
from paper_repro.variance_arms import Arm, at_level, replayed
from paper_repro.variance_memory import best, memory
from paper_repro.variance_readings import Moments, autocorrelations, draws, effect, moments, predict, ratios
from paper_repro.variance_texts import Texts, from_bank, own_targets
from proofs.theory import ar1_best, ar1_ratio, white_ratio
from sim.frozen import LevelView

T0 = 0.8
FIXED = from_mapping({"loop": {"temperature": {"law": "fixed", "temperature": T0}}})


def ar1(phi: float, n: int, rng: np.random.Generator) -> np.ndarray:
    w, out = 0.0, np.empty(n)
    for t in range(n):
        w = phi * w + math.sqrt(1 - phi**2) * rng.standard_normal()
        out[t] = w
    return out


def linear_texts(entropy: list[np.ndarray], varentropy: list[np.ndarray]) -> Texts:
    """Texts whose recorded curve is a straight line in ln T: linear theory holds on them exactly."""
    h, v = np.concatenate(entropy), np.concatenate(varentropy)
    grid = np.array([0.2, 0.4, T0, 1.2, 2.0])
    return Texts(
        name=tuple(f"t{i}" for i in range(len(entropy))),
        kind=("noise",) * len(entropy),
        start=np.concatenate([[0], np.cumsum([x.shape[0] for x in entropy])]),
        grid=grid,
        entropy=h[:, None] + v[:, None] * (np.log(grid) - math.log(T0)),
        varentropy=np.repeat(v[:, None], grid.shape[0], 1),
        temperature=T0,
    )


# -- the shipped law against the formula ---------------------------------------------------------------------------


@pytest.mark.parametrize(("phi", "gain"), [(0.0, 0.1), (0.7, 0.15), (0.7, 0.5)])
def test_the_shipped_law_multiplies_the_variance_of_ar1_entropy_as_theory_says(phi: float, gain: float) -> None:
    rng, n = np.random.default_rng(3), 12_000
    texts = linear_texts([3.0 + 0.1 * ar1(phi, n, rng)], [np.full(n, 2.0)])
    spec, base = Arm("feedback", gain).spec(FIXED), moments(texts.split(texts.at_start()[0]))
    found, about = replayed(texts, spec, base.mean, "replay")
    ratio = float(found.variance[0] / base.variance[0])
    expected = ar1_ratio(phi, 2.0 * gain)
    assert about["clamped"] == 0.0
    assert ratio == pytest.approx(expected, rel=0.04)
    assert abs(ratio - 1) > 0.5 * abs(expected - 1) > 0.03  # it moved, and in the right direction
    predicted = predict(spec, *([part[0]] for part in map(texts.split, texts.at_start())), base.mean)
    assert predicted.variance[0] / base.variance[0] == pytest.approx(ratio, rel=5e-3)


def test_the_rungs_agree_where_the_text_is_linear_and_differ_by_the_spread_of_v() -> None:
    rng, n = np.random.default_rng(4), 8_000
    texts = linear_texts([3.0 + 0.1 * rng.standard_normal(n)], [rng.choice([1.0, 9.0], n)])
    spec, base = Arm("feedback", 0.1).spec(FIXED), moments(texts.split(texts.at_start()[0]))
    found = {
        rung: float(replayed(texts, spec, base.mean, rung)[0].variance[0] / base.variance[0])
        for rung in ("line, each V", "replay")
    }
    assert found["replay"] == pytest.approx(found["line, each V"], rel=1e-5)
    assert found["line, each V"] > 1.2 * white_ratio(0.1 * 5.0)  # what a constant V would give
    assert found["line, each V"] == pytest.approx(white_ratio(0.1 * 41.0 / 5.0), rel=0.06)
    h, v = ([part[0]] for part in map(texts.split, texts.at_start()))
    assert predict(spec, h, v, base.mean).variance[0] / base.variance[0] == pytest.approx(found["replay"], rel=0.03)


@pytest.mark.parametrize(("law", "fraction"), [("damped", 0.5), ("solve", 1.0)])
def test_same_step_laws_on_linear_texts(law: str, fraction: float) -> None:
    rng = np.random.default_rng(5)
    texts = linear_texts([3.0 + 0.1 * rng.standard_normal(400) for _ in range(3)], [np.full(400, 2.0)] * 3)
    spec, base = Arm(law, fraction).spec(FIXED), moments(texts.split(texts.at_start()[0]))
    targets = base.mean + 0.2
    found, _ = replayed(texts, spec, targets, "replay")
    parts = [texts.split(part) for part in texts.at_start()]
    theory = predict(spec, *parts, targets)
    np.testing.assert_allclose(found.variance, (1 - fraction) ** 2 * base.variance, atol=2e-6)
    np.testing.assert_allclose(found.mean, base.mean + 0.2 * fraction, atol=1e-4)
    np.testing.assert_allclose(theory.mean, found.mean, atol=1e-4)
    np.testing.assert_allclose(theory.variance, found.variance, atol=2e-6)


def test_fixed_temperature_at_a_level_has_that_mean() -> None:
    texts = from_bank(make_bank(lengths=(70, 90), grid=np.geomspace(0.25, 2.0, 13))[0], T0)
    base = moments(texts.split(texts.at_start()[0]))
    lower = at_level(texts, base.mean - 0.2)
    np.testing.assert_allclose(lower.mean, base.mean - 0.2, atol=1e-6)
    same = at_level(texts, base.mean)
    np.testing.assert_allclose(same.variance, base.variance, rtol=1e-4)
    assert (lower.variance != same.variance).all()
    np.testing.assert_array_less(at_level(texts, np.full(4, 99.0)).mean, math.log(64))  # out of reach: the hottest


def test_a_gain_beyond_two_is_predicted_to_diverge() -> None:
    h, v = [np.random.default_rng(0).standard_normal(80)], [np.full(80, 5.0)]
    assert np.isinf(predict(Arm("feedback", 0.5).spec(FIXED), h, v, np.zeros(1)).variance[0])
    assert np.isfinite(predict(Arm("feedback", 0.3).spec(FIXED), h, v, np.zeros(1)).variance[0])


# -- a target per text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["feedback", "damped", "solve"])
def test_a_target_per_text_is_the_shipped_law_with_that_target(law: str) -> None:
    rng = np.random.default_rng(6)
    views = [LevelView(rng.normal(0, 4, 30), rng.integers(1, 9, 30)) for _ in range(5)]
    targets, u = np.array([0.4, 1.7, 1.0, 2.5, 0.9]), rng.uniform(-0.8, 0.3, 5)
    spec = Arm(law, 0.3).spec(FIXED)
    joint = own_targets(spec, targets)

    class Stacked:
        model_entropy = np.zeros(5)

        def at(self, temperature: Any) -> Any:
            parts = [view.at(temperature[i : i + 1]) for i, view in enumerate(views)]
            return tuple(np.concatenate(part) for part in zip(*parts, strict=True))

    temperature, entropy, varentropy = joint.temper(u, Stacked())
    after = joint.update(u, entropy)
    for i, view in enumerate(views):
        own = LawSpec(spec.name, dataclasses.replace(spec.config, target_nats=float(targets[i])))
        alone, _, _ = LoopConfig(temperature=own).build()
        t, h, v = alone.temper(u[i : i + 1], view)
        assert temperature[i] == pytest.approx(t[0], rel=1e-4 if law != "feedback" else 1e-15)
        assert entropy[i] == pytest.approx(h[0], abs=2e-5 if law != "feedback" else 1e-12)
        assert varentropy[i] == pytest.approx(v[0], rel=1e-3)
        assert after[i] == pytest.approx(alone.update(u[i : i + 1], entropy[i : i + 1])[0], abs=1e-12)


# -- readings -------------------------------------------------------------------------------------------------------


def test_autocorrelations_are_the_textbook_ones_and_sum_to_minus_a_half() -> None:
    x = np.random.default_rng(1).standard_normal(50).cumsum()
    w = x - x.mean()
    expected = [(w[:-m] @ w[m:]) / (w @ w) for m in range(1, 50)]
    np.testing.assert_allclose(autocorrelations(x), expected, atol=1e-12)
    assert autocorrelations(x).sum() == pytest.approx(-0.5)
    assert not autocorrelations(np.full(9, 2.0)).any()


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 4), st.integers(2, 50)), min_size=2, max_size=6))
def test_every_reading_is_one_for_equal_moments_and_scales_with_the_variance(rows: list[Any]) -> None:
    mean, var, n = (np.array(part, float) for part in zip(*rows, strict=True))
    base, drawn = Moments(mean, var, n), draws(len(rows), 20, 0)
    for values in ratios(base, base, mean, drawn).values():
        np.testing.assert_allclose(values, 1.0, rtol=1e-9)
    half = ratios(Moments(mean, 0.5 * var, n), base, mean, drawn)
    for reading in ("within, mean", "within, target", "typical text"):
        np.testing.assert_allclose(half[reading], 0.5, rtol=1e-9)


def test_readings_by_hand() -> None:
    """Two texts of 2 tokens: 1, 3 and 5, 7 against 2, 2 and 4, 8 (about H* = 4)."""
    base = moments([np.array([1.0, 3.0]), np.array([5.0, 7.0])])
    arm = moments([np.array([2.0, 2.0]), np.array([4.0, 8.0])])
    found = {name: v[0] for name, v in ratios(arm, base, np.full(2, 4.0), draws(2, 0, 0)).items()}
    assert found["within, mean"] == pytest.approx((0 + 4) / (1 + 1))
    assert found["within, target"] == pytest.approx((4 + 4 + 0 + 16) / (9 + 1 + 1 + 9))
    assert found["pooled, mean"] == pytest.approx(np.var([2, 2, 4, 8]) / np.var([1, 3, 5, 7]))


def test_a_common_target_removes_the_differences_between_texts_from_the_pool_only() -> None:
    base = Moments(np.array([1.0, 2.0, 3.0]), np.ones(3), np.full(3, 100.0))
    level = Moments(np.full(3, 1.5), np.ones(3), np.full(3, 100.0))
    found = {name: v[0] for name, v in ratios(level, base, np.full(3, 1.5), draws(3, 0, 0)).items()}
    assert found["within, mean"] == found["typical text"] == pytest.approx(1.0)
    assert found["pooled, mean"] == pytest.approx(1 / (1 + 2 / 3))


def test_intervals_are_paired_and_cover() -> None:
    rng, hits = np.random.default_rng(9), 0
    for i in range(60):
        var = rng.gamma(4.0, 0.25, 30)
        factor = rng.gamma(20.0, 0.04, 30)  # mean 0.8
        n = np.full(30, 100.0)
        found = ratios(Moments(var, factor * var, n), Moments(var, var, n), var, draws(30, 300, i))["within, mean"]
        e = effect(found, 30)
        assert e.low <= e.ratio <= e.high
        hits += e.low <= 0.8 <= e.high
    assert 50 <= hits <= 60
    exact = effect(ratios(Moments(var, 0.7 * var, n), Moments(var, var, n), var, draws(30, 300, 0))["within, mean"], 30)
    assert exact.high - exact.low < 1e-12  # one factor for all: drawing texts anew changes nothing


# -- memory ---------------------------------------------------------------------------------------------------------


def test_the_best_gain_of_an_ar1_text_is_the_closed_form() -> None:
    rng = np.random.default_rng(2)
    ratio, at = best([ar1(0.7, 60_000, rng)])
    g, expected = ar1_best(0.7)
    assert ratio[0] == pytest.approx(expected, abs=0.02)
    assert at[0] == pytest.approx(g, abs=0.1)
    none, where = best([rng.standard_normal(4000)])
    assert 0.97 < none[0] <= 1.0
    assert where[0] < 0.1
    assert best([ar1(0.7, 4000, rng)], most=1e-3) == (1.0, 0.0)
    noisy, _ = best([ar1(0.7, 4000, rng)], noise=1.4)
    assert expected + 0.1 < noisy[0] < 1.0  # V that differs between tokens leaves less to gain
    assert best([ar1(0.7, 4000, rng)], noise=2.0) == (1.0, 0.0)  # and E[V^2] >= 2 E[V]^2 nothing


def test_memory_tells_a_text_with_memory_from_its_shuffled_self() -> None:
    rng, n = np.random.default_rng(7), 400
    texts = linear_texts([3 + 0.1 * ar1(0.8, n, rng), 3 + 0.1 * rng.standard_normal(n)], [np.full(n, 2.0)] * 2)
    found = memory(texts, "bank", gain=0.02, certified=0.0663, seed=0)
    assert found["best_ratio"][0] < 0.75 < found["shuffled_ratio_5"][0]
    assert found["best_ratio"][1] > 0.97
    assert found["best_ratio"][0] <= found["best_ratio_certified"][0] < 1.0
    assert found["r1"][0] > 0.6
    assert abs(found["r1"][1]) < 0.2
    assert found["sum_initial"][0] > 0.5
    assert found["small_gain_slope"][0] < 0


# -- texts from a bank ----------------------------------------------------------------------------------------------


def test_texts_of_a_bank_are_those_of_one_temperature() -> None:
    bank, _ = make_bank(lengths=(70, 90), grid=np.array([0.25, 0.5, T0, 1.2, 2.0]))
    texts = from_bank(bank, T0)
    assert len(texts.name) == 4
    k = int(np.flatnonzero(bank.temperature == T0)[1])
    own = texts.split(texts.at_start()[0])[1]
    np.testing.assert_allclose(own, bank.entropy_grid[bank.offset[k] : bank.offset[k + 1], 2], atol=1e-6)
    with pytest.raises(BadInputError, match="temperature"):
        from_bank(bank, 0.9)
    with pytest.raises(BadInputError):
        from_bank(bank, T0, least=1000)


# -- the engine -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(one_thread: None) -> Any:
    return models.wrap(tiny_llama(num_hidden_layers=2), byte_tokenizer(), name="tiny")


PIECES = [("a", [(40 + i) % 250 for i in range(n)]) for n in (5, 300, 12, 70)]


def test_a_law_without_gain_changes_no_text(tiny: Any) -> None:
    fixed = live.decode(FIXED, tiny, PIECES, tokens=12, seed=1, tabulate=True)
    still = live.decode(
        FIXED, tiny, PIECES, tokens=12, seed=1, law=own_targets(Arm("feedback", 0.0).spec(FIXED), np.ones(4))
    )
    np.testing.assert_array_equal(fixed.entropy, still.entropy)
    texts = live.tabulated(fixed, PIECES, T0)
    np.testing.assert_allclose(texts.at_start()[0], fixed.entropy.ravel(), atol=1e-5)
    other = live.decode(FIXED, tiny, PIECES, tokens=12, seed=2)
    assert not np.array_equal(other.entropy, fixed.entropy)


@pytest.mark.parametrize("law", ["feedback", "solve"])
def test_each_text_has_its_own_target_on_the_engine(tiny: Any, law: str) -> None:
    """Prompts of other lengths end their prefill at other steps: rows and texts must not be mixed up."""
    spec = Arm(law, 0.05).spec(FIXED)
    targets = np.array([1.0, 3.0, 0.5, 2.0])
    got = live.decode(FIXED, tiny, PIECES, tokens=10, seed=1, law=own_targets(spec, targets))
    keys = np.random.SeedSequence([1, 1]).generate_state(4, np.uint32).tolist()
    for i, (_, ids) in enumerate(PIECES):
        own = LawSpec(spec.name, dataclasses.replace(spec.config, target_nats=float(targets[i])))
        metrics = Metrics(FIXED.engine.page_tokens, keep_tokens=True)
        alone = Engine(
            dataclasses.replace(FIXED, loop=LoopConfig(temperature=own)), live.endless(tiny), metrics=metrics,
            uncertified=True,
        )  # fmt: skip
        alone.submit(ids, SamplingParams(max_new_tokens=10, seed=keys[i]))
        alone.run()
        table = metrics.tokens_table()
        np.testing.assert_allclose(got.temperature[i], table["temperature"], rtol=2e-4)
        np.testing.assert_allclose(got.entropy[i], table["tempered_entropy"], atol=2e-4)


# -- end to end -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bank() -> Any:
    made, _ = make_bank(prompts=5, lengths=(66, 80), temperatures=(0.3, T0, 1.6), grid=np.geomspace(0.2, 2.0, 9))
    return dataclasses.replace(made, meta={**made.meta, "vocab_size": 49152})  # certificates are about this number


def test_a_run_writes_what_it_says(tiny: Any, bank: Any, tmp_path: Path) -> None:
    shares: list[float] = []
    outcome = variance.run(
        tmp_path, quick=True, uncertified=True, seed=4, size=variance.Size(4, 70), model=tiny, bank=bank,
        progress=lambda _, share: shares.append(share),
    )  # fmt: skip
    table, stamp = results.read_table(tmp_path / "ratios.parquet")
    assert stamp["seed"] == 4
    same, _ = results.read_table(tmp_path / "ratios.csv")
    np.testing.assert_array_equal(table["measured"], same["measured"])
    assert {"replay, bank", "replay, engine's texts", "live"} <= set(table["world"].tolist())
    assert not undefined("variance", outcome.numbers)
    for name in ("ratios", "ladder", "memory", "texts"):
        columns, _ = results.read_table(tmp_path / f"{name}.parquet")
        assert set(defined("variance", f"column of {name}")) == set(columns)
    main = table["reading"] == "within, mean"
    at_target = main & (table["law"] == "solve") & (table["world"] == "replay, bank")
    assert 0 <= float(table["measured"][at_target][0]) < 0.9
    control = main & (table["law"] == "fixed")
    assert table["predicted"][control].tolist() == [1.0]
    assert ((table["low"] <= table["measured"]) & (table["measured"] <= table["high"]))[main].all()
    np.testing.assert_array_equal(table["agrees"], (table["gap_low"] <= 0) & (table["gap_high"] >= 0))
    ladder, _ = results.read_table(tmp_path / "ladder.parquet")
    for name in set(ladder["arm"].tolist()):  # the steps add up
        mine = (ladder["arm"] == name) & (ladder["source"] == "engine")
        assert ladder["ratio"][mine][0] + ladder["step"][mine].sum() == pytest.approx(ladder["ratio"][mine][-1])
        assert ladder["rung"][mine][-1] == "live"
    assert (tmp_path / "variance.png").stat().st_size > 30_000
    assert shares == sorted(shares)
    said = json.loads((tmp_path / "findings.json").read_text(encoding="utf-8"))["findings"]
    assert [heading for heading, _ in outcome.sentences] == list(said)
    assert "Memory of real texts" in said


def test_the_figure_refuses_a_table_without_a_column(bank: Any, tmp_path: Path) -> None:
    variance.run(tmp_path, quick=True, replay_only=True, bank=bank)
    names = ("ratios", "ladder", "memory")
    tables = {name: results.read_table(tmp_path / f"{name}.parquet")[0] for name in names}
    drawing.draw(*tables.values(), tmp_path / "again.png")
    assert (tmp_path / "again.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for name, column in (("ratios", "predicted_low"), ("ladder", "rung"), ("memory", "r1")):
        broken = {**tables, name: {k: v for k, v in tables[name].items() if k != column}}
        with pytest.raises(BadInputError, match=f"{column}: column missing"):
            drawing.draw(*broken.values(), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_an_uncertified_gain_is_left_out_unless_said(bank: Any, tmp_path: Path) -> None:
    names = {}
    for said in (False, True):
        (tmp_path / str(said)).mkdir()
        outcome = variance.run(tmp_path / str(said), replay_only=True, uncertified=said, bank=bank)
        table, _ = results.read_table(tmp_path / str(said) / "ratios.parquet")
        names[said] = set(table["arm"].tolist())
        beyond = [name for name in table["certificate"].tolist() if name.startswith("uncertified")]
        assert bool(beyond) is said
        assert bool(outcome.numbers["left_out"]) is not said
    assert names[True] - names[False] == set(outcome_left(tmp_path / "False"))


def outcome_left(folder: Path) -> list[str]:
    return json.loads((folder / "findings.json").read_text(encoding="utf-8"))["left_out"]


def test_too_little_text_is_refused(bank: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="size"):
        variance.run(tmp_path, size=variance.Size(1, 70), bank=bank)


def test_the_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["variance", "--replay", "--quick", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "15 to 20%" in result.output
    assert "feedback k=0.2" in result.output  # said to be left out
    assert (tmp_path / "out" / "variance.png").is_file()
    bad = CliRunner().invoke(app, ["variance", "--replay", "--temperature", "0.77", "--out", str(tmp_path / "none")])
    assert bad.exit_code == 2
    assert not (tmp_path / "none").exists()


def test_the_base_is_the_shipped_default() -> None:
    assert FIXED.loop.temperature.config.temperature == RunConfig().loop.temperature.config.temperature == T0
