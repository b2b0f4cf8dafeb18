"""`entropic generate` on a tiny model: what a user can do wrong, and what an interrupt leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from command import entropic
from safetensors.torch import load_file, save_file
from tiny_model import save_tiny

from backends.engine import Engine
from entropic_ctl.replay import replay


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


def generate(model: Path, *arguments: object) -> tuple[int, str, str]:
    return entropic("generate", "--model", model, *arguments)


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int, error: type[BaseException]) -> None:
    step, count = Engine.step, [0]

    def interrupted(self: Engine, **options: Any) -> Any:
        if count[0] == steps:
            raise error
        count[0] += 1
        return step(self, **options)

    monkeypatch.setattr(Engine, "step", interrupted)


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(model: Path) -> None:
    status, out, err = generate(model, "--prompt", "x" * 5000)
    assert (status, out) == (2, "")
    assert "5000 tokens exceeds max_context = 4096" in err


def test_a_prompt_that_is_no_text_is_refused(model: Path) -> None:
    status, _, err = generate(model, "--prompt", "\udcff")
    assert status == 2
    assert "not Unicode text" in err


def test_a_byte_order_mark_is_not_part_of_the_prompt(model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfhi")
    generate(model, "--prompt-file", tmp_path / "p.txt", "--max-tokens", 1, "--raw", "--json", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["prompt_tokens"] == 2


def test_prompt_and_generation_have_speeds_of_their_own(model: Path, tmp_path: Path) -> None:
    for count in (1, 6):
        asked = ("--prompt", "hello you", "--max-tokens", count, "--raw", "--json", tmp_path / "r.json")
        status, _, err = generate(model, *asked, "--seed", 3)
        report = json.loads((tmp_path / "r.json").read_text())
        summary = report["summary"]
        assert (status, report["output_tokens"]) == (0, count)
        assert report["ttft_s"] == summary["ttft_mean_s"]
        assert report["prefill_tokens_per_s"] * report["ttft_s"] == pytest.approx(9)
        if count == 1:
            assert report["decode_tokens_per_s"] is None
        else:
            assert report["decode_tokens_per_s"] * summary["tpot_mean_s"] == pytest.approx(1)
            assert report["ttft_s"] + 5 / report["decode_tokens_per_s"] == pytest.approx(summary["e2e_mean_s"])
        assert "first token after" in err


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_an_interrupt_keeps_text_json_and_log(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    stop_after(monkeypatch, 4, error)
    files = ("--json", tmp_path / "r.json", "--log", tmp_path / "l.jsonl")
    status, out, err = generate(model, "--prompt", "hello", "--max-tokens", 50, *files)
    report = json.loads((tmp_path / "r.json").read_text())
    assert (report["finish"], report["output_tokens"]) == ("interrupted", 4)
    assert out.rstrip("\n") == report["text"].rstrip("\n")
    assert replay(tmp_path / "l.jsonl").tokens == 4
    assert (status, "r.json" in err) == ((130, True) if error is KeyboardInterrupt else (0, False))


def test_weights_without_a_finite_logit_are_an_error(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    save_tiny(folder)
    weights = {name: torch.full_like(t, torch.nan) for name, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    status, _, err = generate(folder, "--prompt", "hello")
    assert status == 2
    assert "finite logit" in err


def test_a_refused_run_leaves_the_old_log(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("flint")
    log, config = tmp_path / "l.jsonl", tmp_path / "run.toml"
    log.write_text("the log of last week\n")
    config.write_text("[loop.temperature]\nlaw = 'feedback'\ngain = 9.0\n")
    status, _, err = generate(model, "--prompt", "hello", "--config", config, "--log", log)
    assert status == 2, err
    assert log.read_text() == "the log of last week\n"


def test_outputs_do_not_overwrite_inputs_or_each_other(model: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "p.txt"
    prompt.write_text("precious")
    for option in ("--json", "--log"):
        status, _, err = generate(model, "--prompt-file", prompt, option, prompt)
        assert (status, "would overwrite" in err) == (2, True)
    assert prompt.read_text() == "precious"
    status, _, err = generate(model, "--prompt", "hello", "--json", tmp_path / "x", "--log", tmp_path / "x")
    assert (status, "would overwrite" in err) == (2, True)


def test_a_certificate_opens_generation_and_a_refuted_gain_does_not(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("flint")
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    run, cert = tmp_path / "run.toml", tmp_path / "c.json"
    asked = ("--prompt", "hi", "--max-tokens", 2, "--raw", "--config", run, "--certificate", cert)
    for gain, size, status, said in (
        (0.02, vocab, 0, ""),
        (0.02, vocab + 1, 2, f"about.vocab_size: about another vocabulary than the {vocab:,} tokens"),
        (9.0, vocab, 2, "theorem 'gain-lag-0' is refuted"),
    ):
        run.write_text(
            f"[loop.temperature]\nlaw = 'feedback'\ngain = {gain}\ntarget_nats = 1.0\n[model]\ndtype = 'float32'\n"
        )
        entropic("prove", run, "--out", cert, "--vocab", size)
        found, out, err = generate(model, *asked)
        assert found == status, err
        assert said in err
        assert out == "" or status == 0
    assert "the nearest certified gain is " in err
    assert generate(model, *asked[:-2], "--uncertified")[0] == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--draft-rule", "entropy"), "--draft-rule: nothing is drafted"),
        (("--draft-model", "x"), "--draft-model: nothing is drafted"),
        (("--draft", 2, "--draft-rule", "bogus"), "--draft-rule: not one of the choices"),
    ],
)
def test_draft_options_that_cannot_act_are_refused(model: Path, options: tuple[object, ...], said: str) -> None:
    status, out, err = generate(model, "--prompt", "hello", *options)
    assert (status, out) == (2, "")
    assert said in err


def test_the_speculation_benchmark_says_that_a_context_is_too_short(tmp_path: Path) -> None:
    save_tiny(tmp_path / "short", max_position_embeddings=64)
    status, _, err = entropic("bench", "speculation", "--model", tmp_path / "short")
    assert status == 2
    assert "too short" in err


def test_a_needle_without_room_names_the_option(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, _, err = entropic("eval", "--model", model, "--task", "needle", "--needle-length", 10, "--out", out)
    assert (status, out.exists()) == (2, False)
    assert "--needle-length: no room" in err


def test_sampling_options_mean_what_the_config_and_the_engine_mean(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"

    def text(*options: object) -> str:
        status, out, err = generate(model, "--prompt", "hello", "--max-tokens", 12, "--seed", 3, *options)
        assert status == 0, err
        return out

    run.write_text("[loop.temperature]\ntemperature = 1.5\n")
    hot, greedy = text("--temperature", 1.5), text("--greedy")
    assert hot == text("--config", run) == text("--config", run, "--temperature", 1.5)
    assert hot != text("--config", run, "--temperature", 0.3)
    for one in (("--top-k", 1), ("--top-p", 1e-9), ("--min-p", 1.0), ("--temperature", 0)):
        assert text(*one) == greedy != hot
    assert text("--temperature", 1.5, "--top-k", 0, "--top-p", 1, "--min-p", 0) == hot


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--temperature", 99), "--temperature: "),
        (("--temperature", "nan"), "--temperature: "),
        (("--top-p", 0), "top_p"),
        (("--min-p", 2), "min_p"),
        (("--greedy", "--top-p", 0.5), "--top-p has no effect"),
        (("--greedy", "--temperature", 1), "--temperature has no effect"),
        (("--config", "run.toml", "--temperature", 1), "law 'solve' of the config sets the temperature"),
    ],
)
def test_sampling_options_that_cannot_act_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("[loop.temperature]\nlaw = 'solve'\n")
    status, out, err = generate(model, "--prompt", "hello", *options)
    assert (status, out) == (2, "")
    assert said in err
