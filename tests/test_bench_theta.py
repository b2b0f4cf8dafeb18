from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import entropic
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import byte_tokenizer, save_tiny, tiny_llama

from backends import bench_theta as bench
from backends import models
from backends import theta_policies as policies
from backends.attention import PagedBatch
from backends.attention.rows import single_row_plan
from backends.audit import kl_nats
from backends.kv_cache import PagedKVCache
from backends.pieces import Pieces
from backends.surface import SurfaceReader
from backends.theta_policies import Surface
from entropic_ctl import results
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig

pytestmark = pytest.mark.usefixtures("one_thread")
RULE = PruningConfig(dense_layers=1, recent_pages=1)
THETA = (0.05, 0.3, 1.0)
SMALL = bench.Plan(prose=1, code=0, tokens=160, first=80, blocks=3, size=4, rungs=6)


@pytest.fixture(scope="module")
def model() -> models.LoadedModel:
    return models.wrap(tiny_llama(), byte_tokenizer(), name="tiny")


def ids(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


# -- the surface ----------------------------------------------------------------------------------------------------


def test_the_surface_is_what_an_engine_reads_and_loses(model: models.LoadedModel) -> None:
    """Against passes of one row over a cache of its own, across a page boundary."""
    text, size = ids(90), 4
    reader = SurfaceReader(model, text, page_tokens=size, pruning=RULE)
    dense = reader.prefill(70)
    found = reader.measure(78, 6, THETA)
    shape = model.shape
    cache = PagedKVCache(shape.layers, shape.kv_heads, shape.head_dim, 23, size, torch.bfloat16)
    tokens = torch.tensor(text)

    def run(context: int, n: int, theta: float = 0.0) -> tuple[torch.Tensor, PagedBatch]:
        batch = PagedBatch.from_plan(single_row_plan(context, n, range(23), theta_nats=theta), cache, RULE)
        return batch.run(model.model, tokens[context : context + n]), batch

    with torch.inference_mode():
        cache.seal(run(0, 78)[1])
        for i, position in enumerate(range(78, 84)):
            pruned = [run(position, 1, theta) for theta in THETA]
            exact, batch = run(position, 1)
            cache.seal(batch)
            read = batch.kv_bytes
            log_p = torch.log_softmax(exact[0].double(), -1)
            assert dense["entropy"][position - 70] == pytest.approx(float(-(log_p.exp() * log_p).sum()), abs=1e-4)
            assert dense["surprise"][position - 70] == pytest.approx(float(-log_p[text[position + 1]]), abs=1e-4)
            for a, (logits, batch) in enumerate(pruned):
                lost = log_p[text[position + 1]] - torch.log_softmax(logits[0].double(), -1)[text[position + 1]]
                assert found["kept"][i, a] == batch.statistics().kept_fraction[0]
                assert found["bytes"][i, a] == pytest.approx(batch.kv_bytes / read)
                assert found["kl"][i, a] == pytest.approx(kl_nats(logits, exact)[0], rel=1e-2, abs=1e-7)
                assert found["nll"][i, a] == pytest.approx(float(lost), abs=1e-4)


def test_wider_budgets_read_less_and_a_tiny_one_costs_nothing(model: models.LoadedModel) -> None:
    reader = SurfaceReader(model, ids(120, 1), page_tokens=4, pruning=RULE)
    reader.prefill(119)
    found = reader.measure(100, 4, (1e-12, 0.01, 0.1, 0.5, 2.0))
    assert (np.diff(found["kept"], axis=1) <= 1e-12).all()
    assert found["kl"][:, 0].max() < 1e-9
    assert found["kl"][:, -1].min() > 1e-6
    assert (found["bytes"] > 0.5).all()  # one of two layers is dense


@pytest.mark.parametrize(("start", "count"), [(117, 3), (0, 1), (100, 0)])
def test_positions_outside_the_text_are_refused(model: models.LoadedModel, start: int, count: int) -> None:
    reader = SurfaceReader(model, ids(120), page_tokens=4, pruning=RULE)
    with pytest.raises(BadInputError, match="positions"):
        reader.measure(start, count, THETA)
    with pytest.raises(BadInputError, match="text"):
        SurfaceReader(model, ids(1))


def test_a_short_context_is_named_before_any_work(model: models.LoadedModel, tmp_path: Path) -> None:
    for size, remedy in ((2048, "pass --quick: it needs 1,024"), (512, "another --model")):
        small = dataclasses.replace(model, max_context=size)
        with pytest.raises(BadInputError, match=rf"context: .*got {size}.*4,096.*{remedy}"):
            bench.bench_theta(small, tmp_path)


# -- the comparison -------------------------------------------------------------------------------------------------


def planted(n: int = 1200, texts: int = 3, *, contrast: float = 4.0) -> tuple[Surface, np.ndarray]:
    """KL = c theta^2 with c that depends on a sign, bytes linear in ln theta: everything has a closed form."""
    sign = np.random.default_rng(0).permutation(np.arange(n) % 2 * 2 - 1)
    c = np.where(sign > 0, contrast, 1.0)
    ladder = np.geomspace(0.002, 0.8, 12)
    size = np.broadcast_to(0.5 - 0.1 * np.log(ladder / 0.05), (n, 12))
    kl = 0.1 * c[:, None] * ladder**2
    block = np.arange(n) // 8
    return Surface(ladder, kl, 0.1 * kl, size, block, np.arange(n) * texts // n), sign.astype(float)


def effect(surface: Surface, m: np.ndarray, against: np.ndarray | None = None) -> policies.Effect:
    rng = np.random.default_rng(1)
    weight, levels = policies.block_weights(surface, 200, rng), policies.byte_levels(surface, (0.02, 0.1))
    other = np.ones(m.shape[0]) if against is None else against
    return policies.compare(surface, policies.sweep(surface, m), policies.sweep(surface, other), levels, weight)


def test_the_best_modulation_reaches_the_ceiling_and_shuffling_loses_it() -> None:
    surface, sign = planted()
    best = np.exp(-0.5 * np.log(4.0) / 2 * sign)  # c^(-1/2), up to a constant
    found = effect(surface, best)
    ideal = 2.0 / 2.5 - 1  # geometric over arithmetic mean of (1, 4)
    assert found.change == pytest.approx(ideal, abs=0.01)
    assert found.low < ideal < found.high < 0
    limit, _ = policies.ceiling(surface, sign, theta=(0.01, 0.15), bins=2)
    assert limit == pytest.approx(ideal, abs=0.01)
    shuffle = policies.shuffled(best, surface.text, np.random.default_rng(2))
    assert sorted(shuffle) == sorted(best)
    assert effect(surface, shuffle).change == pytest.approx(1.25 - 1, abs=0.05)  # E m^2 = (2 + 1/2) / 2
    assert effect(surface, best, shuffle).high < -0.2
    assert effect(surface, 1 / best).change == pytest.approx((4 * 2 + 0.5) / 2 / 2.5 - 1, abs=0.05)


def test_without_information_no_rule_wins_and_hindsight_finds_none() -> None:
    surface, sign = planted(contrast=1.0)
    assert policies.ceiling(surface, sign, theta=(0.01, 0.15))[0] == pytest.approx(0.0, abs=1e-9)
    assert effect(surface, np.exp(0.3 * sign)).low > 0
    levels, weight = policies.byte_levels(surface, (0.02, 0.1)), np.ones((1, 150))
    best = policies.compare(
        surface, policies.hindsight(surface), policies.sweep(surface, np.ones(1200)), levels, weight
    )
    assert best.change == pytest.approx(0.0, abs=0.3)  # rungs only: a coarse curve, but not below the constant by much


@given(st.floats(0.5, 2.0))
def test_a_constant_multiplier_is_the_constant_rule(scale: float) -> None:
    surface, _ = planted(80)
    found = effect(surface, np.full(80, scale))
    assert found.change == pytest.approx(0.0, abs=0.01)
    assert found.nll == pytest.approx(0.0, abs=1e-5)


def test_interpolation_is_exact_for_squares_and_rungs() -> None:
    surface, _ = planted(16)
    for theta in (0.002, 0.0333, 0.1, 0.8):
        kl, _, size = surface.at(np.full(16, theta))
        np.testing.assert_allclose(kl, surface.kl[:, 0] * (theta / 0.002) ** 2, rtol=1e-9)
        np.testing.assert_allclose(size, 0.5 - 0.1 * np.log(theta / 0.05), rtol=1e-9)


def test_the_law_sees_only_the_past_and_mirrors() -> None:
    entropy = np.array([0.0] * 6 + [5.0] * 3 + [0.0] * 6)
    m = policies.law_multipliers(entropy, np.arange(15), 2.0)
    assert (
        m.tolist() == [1.0] * 4 + [2.0] * 3 + [1.0] * 6 + [2.0] * 2
    )  # four low ones widen it, the first high one ends it
    mirror = policies.law_multipliers(3.5 - entropy, np.arange(15), 2.0, reverse=True)
    assert mirror.tolist() == m.tolist()
    changed = policies.law_multipliers(np.append(entropy[:-1], 9.0), np.arange(15), 2.0)
    assert changed.tolist() == m.tolist()


def test_a_strength_is_chosen_on_the_other_texts() -> None:
    surface, sign = planted()
    curves = [policies.sweep(surface, np.exp(s * sign)) for s in (0.35, -0.35, 0.0)]
    picks, curve = policies.best_strength(surface, curves, curves[2], policies.byte_levels(surface, (0.02, 0.1)))
    assert picks == [1, 1, 1]
    np.testing.assert_array_equal(curve.kl, curves[1].kl)


# -- the whole ------------------------------------------------------------------------------------------------------


def test_measured_twice_in_parts_is_the_same_and_resumes(model: models.LoadedModel, tmp_path: Path) -> None:
    given_texts = [("a", ids(160, 1)), ("b", ids(160, 2))]
    made = []

    def run(pieces: Pieces | None) -> Any:
        return bench.measure(
            model, SMALL, page_tokens=8, pruning=RULE, pieces=pieces, given=given_texts,
            progress=lambda what, share: made.append((what, share)),
        )  # fmt: skip

    whole = run(None)
    run(Pieces(tmp_path / "parts", {"a": 1}))
    (tmp_path / "parts" / "block-1-2.npz").unlink()
    again = run(Pieces(tmp_path / "parts", {"a": 1}))
    for name in ("kl", "nll", "bytes", "block", "text"):
        np.testing.assert_allclose(getattr(again[0], name), getattr(whole[0], name), atol=1e-9)
    assert whole[0].kl.shape == (2 * 3 * 4, 6)
    assert made[-1][1] == 1.0
    assert np.isnan(whole[1]["spread"]).sum() == 6  # the first position of each block has no measured one before it
    outcome = bench.analyse(*whole, first=SMALL.first, draws=50, permutations=3)
    rules = set(outcome.effects["rule"])
    assert rules == {
        "constant",
        "law",
        "law, no dwell",
        "mirrored law",
        "log-linear",
        "log-linear, s chosen",
        "hindsight",
    }
    assert outcome.findings["answer"].split(":")[0] in ("yes", "no, it is worse", "no difference shown")
    again_outcome = bench.analyse(*whole, first=SMALL.first, draws=50, permutations=3)
    assert again_outcome.effects["low"] == outcome.effects["low"]


def test_the_command_writes_tables_findings_and_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "tiny")
    monkeypatch.setattr(bench, "QUICK", SMALL)
    out = tmp_path / "theta"
    options = ("--quick", "--out", out, "--model", tmp_path / "tiny", "--json", tmp_path / "t.json")
    status, shown = entropic("bench", "theta", *options)[:2]
    assert status == 0, shown
    assert "at equal KV bytes" in shown
    curves, stamp = results.read_table(out / "curves.parquet")
    assert {"constant", "law", "mirrored law", "hindsight"} <= set(curves["rule"].tolist())
    assert stamp["seed"] == 0
    assert (out / "findings.json").is_file()
    assert (out / "theta.png").stat().st_size > 10_000
    assert not (tmp_path / "theta.parts").exists()
