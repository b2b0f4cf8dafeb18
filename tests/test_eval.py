"""The quality harness on a tiny random model: what equals dense, what is measured, and the command around it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("rouge_score")
pytest.importorskip("sacrebleu")

import torch
from command import entropic
from metrics_doc import defined
from tiny_model import byte_tokenizer, save_tiny, tiny_llama

from backends import eval_outputs
from backends.eval import Settings, evaluate, quick
from backends.eval_arms import CONTROL, DENSE, LOOP, arms_of
from backends.eval_forced import Stretch, decode_forced
from backends.eval_long import long_texts
from backends.eval_needle import case, measure_needles
from backends.models import LoadedModel, wrap
from backends.pieces import Pieces
from backends.prompts import Prompt
from entropic_ctl import config as configs
from entropic_ctl import results
from entropic_ctl.errors import BadInputError

pytestmark = pytest.mark.usefixtures("one_thread")

LOOP_TABLES: dict[str, Any] = {
    "temperature": {"law": "solve", "temperature": 0.8, "target_nats": 1.0},
    "pruning": {
        "law": "budget",
        "theta_nats": 0.3,
        "theta_wide_nats": 0.5,
        "entropy_low_nats": 6.0,  # above every entropy of 257 tokens: wide is always asked for
        "entropy_high_nats": 20.0,
        "widen_after": 4,
        "recent_pages": 1,
        "dense_layers": 0,
    },
}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return wrap(tiny_llama(), byte_tokenizer(), name="tiny")


def config(**loop: Any) -> configs.RunConfig:
    return configs.from_mapping({"loop": LOOP_TABLES | loop})


def text(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 256, n).tolist())


def column(table: dict[str, Any], name: str, **where: Any) -> Any:
    mine = np.ones(len(table["arm"]), np.bool_)
    for key, value in where.items():
        mine &= table[key] == value
    return table[name][mine]


@pytest.fixture(scope="module")
def forced(model: LoadedModel) -> dict[str, Any]:
    arms = arms_of(config(), [0.0, 0.5], loop=True)
    assert [arm.name for arm in arms] == [DENSE, CONTROL, LOOP, "theta 0", "theta 0.5"]
    constant = arms[4].config.loop.pruning.config
    assert (constant.theta_nats, constant.theta_wide_nats, constant.recent_pages) == (0.5, 0.5, 1)
    stretches = [Stretch(text(131), 96), Stretch(text(131)[:80], 64), Stretch(text(60, 1), 48)]
    return decode_forced(model, stretches, arms, chunk=40)


def test_budget_0_equals_dense_bit_for_bit(forced: dict[str, Any]) -> None:
    for name in ("nll", "entropy", "nll_tempered", "hit"):
        assert np.array_equal(forced[name][3], forced[name][0], equal_nan=True)
    known = np.isfinite(forced["kl"][3])
    assert (forced["kl"][3][known] == 0.0).all()
    assert (forced["kept"][3][known] == 1.0).all()
    assert known.sum() == 34 + 15 + 11


def test_a_budget_prunes_and_costs_something(forced: dict[str, Any]) -> None:
    kl, kept = (np.nanmean(forced[name], axis=(1, 2)) for name in ("kl", "kept"))
    assert kept[4] < 0.8
    assert kl[4] > 1e-4
    assert kl[1] < 1e-6  # float32: rounding hardly shows
    assert np.nanmax(forced["certificate"][4]) <= 0.5
    assert np.nanmin(forced["kl"]) >= 0.0


def test_the_configured_laws_act(forced: dict[str, Any]) -> None:
    assert (forced["theta"][2, :, :4] == 0.3).all()
    assert (forced["theta"][2, :, 4:11] == 0.5).all()
    assert np.nanmin(forced["theta"][4]) == np.nanmax(forced["theta"][4]) == 0.5
    temperature = forced["temperature"]
    assert np.nanstd(temperature[2]) > 0.0
    assert np.nanmax(np.abs(temperature[[0, 1, 3, 4]] - 0.8)) < 1e-12


def test_dense_agrees_with_one_plain_forward_pass(model: LoadedModel, forced: dict[str, Any]) -> None:
    tokens = text(131)
    model.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        log_p = torch.log_softmax(model.model(torch.tensor([tokens])).logits[0].double(), -1)
    expected = [-float(log_p[i, tokens[i + 1]]) for i in range(96, 130)]
    np.testing.assert_allclose(forced["nll"][0, 0], expected, atol=2e-4)
    scaled = torch.log_softmax(log_p / 0.8, -1)
    expected = [-float(scaled[i, tokens[i + 1]]) for i in range(96, 130)]
    np.testing.assert_allclose(forced["nll_tempered"][0, 0], expected, atol=2e-4)


def test_sharing_prefix_pages_changes_nothing(model: LoadedModel, forced: dict[str, Any]) -> None:
    arms = arms_of(config(), [0.5], loop=False)
    alone = decode_forced(model, [Stretch(text(131)[:80], 64)], arms, chunk=40)
    np.testing.assert_allclose(alone["nll"][2, 0], forced["nll"][4, 1, :15], atol=1e-4)


@pytest.mark.parametrize(("tokens", "start"), [(40, 20), (40, 0), (49, 48)])
def test_a_stretch_needs_whole_pages_and_something_to_predict(model: LoadedModel, tokens: int, start: int) -> None:
    with pytest.raises(BadInputError, match="not a stretch"):
        decode_forced(model, [Stretch(text(tokens), start)], arms_of(config(), [0.1], loop=False))


@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
def test_a_needle_stands_where_it_should(model: LoadedModel, depth: float) -> None:
    filler = model.prompt_ids("a line of filler\n" * 60, chat=False)
    stretch, size = case(model, filler, 640, depth, 48213, 16)
    shown = model.decode(stretch.tokens)
    assert stretch.start == 640
    assert model.decode(stretch.tokens[-size:]) == " 48213"
    assert shown.count("48213") == 2
    assert model.decode(stretch.tokens[:640]).endswith("Answer:")
    room = 640 - len("\n\nThe secret number of the lighthouse is 48213. Remember it.\n\n") - shown[::-1].find("?")
    at = shown.index("\n\nThe secret number")
    assert abs(at - depth * room) <= 64
    if 0 < depth < 1:
        assert shown[at - 1] == "\n"


def test_a_needle_is_scored_by_the_number_alone(model: LoadedModel) -> None:
    filler = model.prompt_ids("a line of filler\n" * 20, chat=False)
    arms = arms_of(config(), [0.0], loop=False)
    options: dict[str, Any] = {"seed": 1, "pieces": Pieces(None, {}), "progress": lambda *_: None}
    table = measure_needles(model, [filler], [192], [0.5], arms, **options)
    stretch, size = case(model, filler, 192, 0.5, int(table["number"][0]), 16)
    model.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        log_p = torch.log_softmax(model.model(torch.tensor([stretch.tokens])).logits[0].double(), -1)
    n = len(stretch.tokens)
    expected = np.mean([float(log_p[i - 1, stretch.tokens[i]]) for i in range(n - size, n)])
    np.testing.assert_allclose(column(table, "log_p", arm=DENSE), expected, atol=2e-4)
    hits = [int(log_p[i - 1].argmax()) == stretch.tokens[i] for i in range(n - size, n)]
    assert column(table, "retrieved", arm=DENSE).tolist() == [float(all(hits))]


def test_a_needle_without_room_is_refused(model: LoadedModel) -> None:
    with pytest.raises(BadInputError, match="no room"):
        case(model, text(64), 64, 0.5, 12345, 16)


SMALL = Settings(
    contexts=(64, 160),
    texts=2,
    positions=12,
    block=4,
    prompts=3,
    prompt_tokens=150,
    new_tokens=10,
    needle_lengths=(192,),
    depths=(1.0,),
    needles=2,
)


@pytest.fixture(scope="module")
def found(model: LoadedModel) -> Any:
    return evaluate(model, arms_of(config(), [0.0, 0.5], loop=True), SMALL, uncertified=True)


def test_every_comparison_of_budget_0_with_dense_is_exact(found: Any) -> None:
    summary = found.tables["summary"]
    zero = {name: values[summary["arm"] == "theta 0"] for name, values in summary.items()}
    exact = {
        "kl": 0.0,
        "kl_p99": 0.0,
        "perplexity_ratio": 1.0,
        "exact": 1.0,
        "rouge_l": 1.0,
        "agrees": 1.0,
        "kept": 1.0,
    }
    for metric, value in exact.items():
        values = zero["value"][zero["metric"] == metric]
        assert values.size
        assert (values == value).all(), metric
    np.testing.assert_allclose(zero["value"][zero["metric"] == "bleu"], 100.0)
    known = np.isfinite(zero["difference"])
    assert known.sum() > 20
    assert (zero["difference"][known] == 0.0).all()
    assert np.array_equal(zero["value"][known], zero["dense"][known])


def test_the_summary_is_what_the_tables_say(found: Any) -> None:
    summary, raw = found.tables["summary"], found.tables["positions"]
    arm = "theta 0.5"

    def at(task: str, metric: str, group: str, name: str = "value") -> float:
        (value,) = column(summary, name, task=task, metric=metric, group=group, arm=arm)
        return float(value)

    kl = column(raw, "kl", arm=arm)
    assert kl.size == 2 * 2 * 12
    assert at("long text", "kl", "all") == pytest.approx(kl.mean())
    assert at("long text", "kl_p99", "all") == pytest.approx(np.quantile(kl, 0.99))
    assert at("long text", "kl", "all", "low") <= kl.mean() <= at("long text", "kl", "all", "high")
    nll, base = (column(raw, "nll", arm=name, context=160) for name in (arm, DENSE))
    assert at("long text", "nll", "context 160", "difference") == pytest.approx((nll - base).mean())
    assert at("long text", "perplexity", "context 160") == pytest.approx(np.exp(nll.mean()))
    texts = found.tables["texts"]
    assert at("texts", "rouge_l", "greedy") == pytest.approx(column(texts, "rouge_l", arm=arm, mode="greedy").mean())
    needles = found.tables["needles"]
    log_p = column(needles, "log_p", arm=arm, depth=1.0)
    assert log_p.size == 2
    assert at("needle", "log_p", "depth 1") == pytest.approx(log_p.mean())
    assert set(needles["retrieved"].tolist()) <= {0.0, 1.0}
    assert (needles["log_p"] < 0).all()


def test_only_an_arm_with_a_moving_temperature_reports_the_tempered_distribution(found: Any) -> None:
    summary = found.tables["summary"]
    assert set(summary["arm"][summary["metric"] == "kl_tempered"]) == {LOOP}


def test_the_verdict_names_every_arm_and_claims_no_more_than_the_intervals(found: Any) -> None:
    lines = found.verdict
    assert lines[0].startswith("resolution")
    assert [line.split(":")[0] for line in lines[1:-1]] == [LOOP, "theta 0", "theta 0.5"]
    assert "nothing about other models" in lines[-1]
    assert "3 of 3 greedy texts equal" in lines[2]
    assert "the same everywhere" in lines[2]


def test_texts_of_the_same_seed_are_the_same_and_others_differ(model: LoadedModel) -> None:
    arms = arms_of(config(), [0.0], loop=False)
    prompts = (Prompt("own", "hello", chat=False), Prompt("own", "world", chat=False))
    keep, quiet = Pieces(None, {}), lambda *_: None
    runs = [
        eval_outputs.write_outputs(model, prompts, 12, arms, seed=seed, pieces=keep, progress=quiet)
        for seed in (5, 5, 6)
    ]
    for name in ("tokens", "length", "kept"):
        assert np.array_equal(runs[0][DENSE][name], runs[1][DENSE][name])
    assert not np.array_equal(runs[0][DENSE]["tokens"], runs[2][DENSE]["tokens"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"contexts": (5000,)}, "beyond the model's context"),
        ({"needle_lengths": (4096,)}, "beyond the model's context"),
        ({"contexts": ()}, "no lengths"),
        ({"needle_lengths": (0,)}, "no lengths"),
        ({"new_tokens": 5000}, r"new_tokens: .*got 5000.*\[1, \d{4}\]"),
    ],
)
def test_lengths_are_checked_before_any_work(model: LoadedModel, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        evaluate(model, arms_of(config(), [0.1], loop=False), dataclasses.replace(SMALL, **changes))


def test_default_lengths_are_cut_to_the_model_and_the_cut_is_said(model: LoadedModel) -> None:
    small = dataclasses.replace(model, max_context=140)
    settings = dataclasses.replace(SMALL, tasks=("long",), positions=2, texts=1, fit_lengths=True)
    found = evaluate(small, arms_of(config(), [0.1], loop=False), settings)
    assert np.unique(found.tables["positions"]["context"]).tolist() == [64]
    assert found.notes == ["contexts end at 64: the model's context"]


def test_settings_and_arms_refuse_nonsense() -> None:
    for wrong in ({"tasks": ("long", "wide")}, {"tasks": ()}, {"depths": (1.5,)}, {"depths": ()}, {"positions": 0}):
        with pytest.raises(BadInputError):
            Settings(**wrong)
    for thetas, loop in (([-0.1], True), ([float("nan")], True), ([11.0], True), ([], False)):
        with pytest.raises(BadInputError):
            arms_of(config(), thetas, loop=loop)
    assert quick(Settings(seed=3)).seed == 3


def test_a_short_file_gives_fewer_texts_and_a_shorter_one_is_refused(model: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_text("x" * 250)
    assert [len(ids) for ids in long_texts(model, 100, 5, file)] == [100, 100]
    with pytest.raises(BadInputError, match=r"250.*>= 300"):
        long_texts(model, 300, 1, file)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    save_tiny(place)
    return place


SHORT = ("--context", 64, "--positions", 4, "--new-tokens", 4, "--needle-length", 192, "--depth", 0.5)


def test_a_short_text_is_refused_before_a_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "t.txt"
    text.write_text("x" * 200)
    monkeypatch.setattr("entropic_ctl.cli_run.load_model", lambda _: pytest.fail("loaded"))
    asked = ("eval", "--model", folder, "--text", text, "--out", tmp_path / "out")
    for options, least in ((("--quick",), 1041), ((), 2097), (("--context", 256), 305)):  # 4,096 tokens: 2,048 fits
        tasks = ("--task", "long")
        status, _, err = entropic(*asked, *tasks, *options)
        assert (status, (tmp_path / "out").exists()) == (2, False)
        assert f">= {least} tokens" in err
    assert "1,041" in " ".join(entropic("eval", "--help")[1].split())


def test_the_command_writes_tables_figures_and_what_it_prints(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, numbers = tmp_path / "out", tmp_path / "n.json"
    options = ("--model", folder, "--theta", 0.5, "--theta", 0, "--quick", *SHORT)
    status, shown, err = entropic("eval", *options, "--out", out, "--json", numbers)
    assert status == 0, err
    assert "theta 0.5" in shown
    assert "nothing about other models" in shown
    assert "peak memory" in err
    names = {"summary", "positions", "texts", "needles"}
    expected = {f"{name}.{suffix}" for name in names for suffix in ("parquet", "csv")}
    expected |= {"summary.json", "quality.png", "needle.png", "run.json"}
    assert {path.name for path in out.iterdir()} == expected
    table, stamp = results.read_table(out / "summary.parquet")
    again, _ = results.read_table(out / "summary.csv")
    assert all(np.array_equal(table[n], again[n], equal_nan=table[n].dtype.kind == "f") for n in table)
    assert stamp["seed"] == 0
    written = json.loads(numbers.read_text())
    assert written["arms"] == [DENSE, CONTROL, "theta 0", "theta 0.5"]
    assert written["peak_rss_mib"] > 0
    assert len(written["comparisons"]) == len(table["arm"])
    assert set(table["metric"].tolist()) <= set(defined("eval", "metric"))
    assert not (tmp_path / "out.parts").exists()


def test_an_interrupted_run_resumes_to_the_same_tables(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    options = ("eval", "--model", folder, "--theta", 0.5, "--quick", *SHORT)
    assert entropic(*options, "--out", tmp_path / "whole")[0] == 0
    from backends import eval as harness

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(harness, "measure_needles", stop)
        status, _, err = entropic(*options, "--out", tmp_path / "out")
    assert (status, "out.parts" in err) == (130, True)
    status, _, err = entropic(*options, "--out", tmp_path / "out")
    assert (status, "--resume" in err) == (2, True)
    with monkeypatch.context() as patched:
        patched.setattr("backends.eval_long.decode_forced", stop)  # what is finished is not measured again
        patched.setattr("backends.eval_outputs._engine", stop)
        assert entropic(*options, "--out", tmp_path / "out", "--resume")[0] == 0
    for name in ("summary", "positions", "texts", "needles"):
        assert (tmp_path / "out" / f"{name}.csv").read_bytes() == (tmp_path / "whole" / f"{name}.csv").read_bytes()


def test_a_config_makes_its_laws_an_arm_and_needs_its_certificate(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("flint")
    file = tmp_path / "run.toml"
    law = "[loop.temperature]\nlaw = 'feedback'\ngain = {}\ntarget_nats = 1.0\n[loop.pruning]\nlaw = 'budget'\n"
    options = ("eval", file, "--model", folder, "--quick", "--task", "long", *SHORT, "--out", tmp_path / "out")
    file.write_text(law.format(9.0))
    status, _, err = entropic(*options)
    assert status == 2
    assert "refuted" in err
    file.write_text(law.format(0.02))
    assert entropic(*options, "--json", tmp_path / "n.json")[0] == 0
    assert json.loads((tmp_path / "n.json").read_text())["arms"] == [DENSE, CONTROL, LOOP]


def test_what_a_user_can_do_wrong_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_text(" \n")
    short.write_text("too short")
    cases = [
        (("--model", tmp_path / "none"), "no such model"),
        (("--model", folder, "--text", empty), "the text is blank"),
        (("--model", folder, "--text", tmp_path / "none.txt"), "cannot read text"),
        (("--model", folder, "--text", short, "--context", 64), "shorter than the longest context"),
        (("--model", folder, "--context", 9999), "--context: with"),
        (("--model", folder, "--needle-length", 9999, "--context", 64), "--needle-length: with"),
        (("--model", folder, "--task", "wide"), "--task: not tasks"),
        (("--model", folder, "--theta", -1), "--theta: not a budget"),
        (("--model", folder, "--depth", 2), "--depth"),
        (("--model", folder, "--positions", 0), "--positions: out of range"),
    ]
    for options, said in cases:
        status, out, err = entropic("eval", "--out", tmp_path / "out", *options)
        assert (status, out) == (2, ""), (options, err)
        assert said in err, err
        assert len(err.strip().splitlines()) == 1

    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    status, _, err = entropic("eval", "--model", folder, "--out", tmp_path / "out")
    assert (status, "pip install 'entropic-ctl[eval]'" in err) == (2, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.model
def test_the_default_model_reads_and_finds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from backends import fetch

    if not fetch.default_folder().is_dir():
        pytest.skip("default model not fetched")
    options = ("--quick", "--theta", 0.02, "--context", 160, "--positions", 6, "--needle-length", 192, "--depth", 0.5)
    tasks = ("--task", "long", "--task", "needle")
    status, _, err = entropic("eval", *options, *tasks, "--out", tmp_path / "out", "--json", tmp_path / "n.json")
    assert status == 0, err
    rows = json.loads((tmp_path / "n.json").read_text())["comparisons"]
    at = {(row["metric"], row["arm"]): row["value"] for row in rows if row["group"] == "all"}
    assert 0.0 <= at["kl", "theta 0.02"] < 0.05
    assert at["nll", DENSE] < 6.0  # it knows the text better than chance (10.8)
    assert at["log_p", DENSE] > -2.0  # ten digits at random: -2.3
