"""Model shapes against published totals, transformers' own modules, and a Monte Carlo of expert routing."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from sim.model_shapes import MODELS, ModelShape, model_shape

SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {"sliding_window": None}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("phi3", {}),
    ("granite", {}),
    ("gemma", {"tie_word_embeddings": True}),
    ("smollm3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("qwen2", {}),
    ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 24}),
    ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2, "qkv_bias": False}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3_moe", {**MOE, "mlp_only_layers": [1]}),
    ("qwen3_moe", {"num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}),
]


@pytest.mark.parametrize(("kind", "more"), KINDS, ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(KINDS)])
def test_counts_equal_those_of_the_transformers_modules(kind: str, more: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**SMALL, **more}
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
    shape = ModelShape.from_hf_config({"model_type": kind, **values})
    assert shape.params == sum(p.numel() for p in module.parameters())
    routed = [p for name, p in module.named_parameters() if ".experts." in name]
    assert shape.expert_params == sum(p.numel() for p in routed)


@pytest.mark.parametrize(
    ("name", "total", "active", "kv"),
    [
        ("llama-3-8b", 8_030_261_248, 8_030_261_248, 131_072),
        ("llama-3-70b", 70_553_706_496, 70_553_706_496, 327_680),
        ("mixtral-8x7b", 46_702_792_704, 12.88e9, 131_072),
        ("qwen3-30b-a3b", 30_532_122_624, 3.35e9, 98_304),
        ("smollm2-135m", 134_515_008, 134_515_008, 23_040),
    ],
)
def test_published_sizes(name: str, total: float, active: float, kv: int) -> None:
    shape = MODELS[name]
    assert shape.params == total
    assert shape.active_params == pytest.approx(active, rel=1e-3)
    assert shape.kv_bytes_per_token == kv
    assert shape.weight_bytes == 2 * total


@given(st.integers(2, 64), st.data())
def test_touched_experts_are_bounded_and_grow(experts: int, data: st.DataObject) -> None:
    used = data.draw(st.integers(1, experts))
    shape = ModelShape("x", 1, 1, 1, 8, 1.0, 1.0, 2, expert_params=8.0, experts=experts, experts_per_token=used)
    share = [shape.touched(t) for t in range(6)]
    assert share[0] == 0.0
    assert share[1] == pytest.approx(used / experts)
    assert all(a <= b <= 1.0 for a, b in itertools.pairwise(share))


@pytest.mark.parametrize(("experts", "used", "tokens"), [(8, 2, 1), (8, 2, 5), (60, 4, 16), (128, 8, 32)])
def test_touched_experts_against_monte_carlo(experts: int, used: int, tokens: int) -> None:
    rng, trials = np.random.default_rng(3), 2000
    picks = rng.random((trials, tokens, experts)).argpartition(used - 1, axis=-1)[..., :used].reshape(trials, -1)
    picks.sort(axis=1)
    distinct = 1 + (np.diff(picks, axis=1) != 0).sum(axis=1)
    shape = ModelShape("x", 1, 1, 1, 8, 1.0, 1.0, 2, expert_params=8.0, experts=experts, experts_per_token=used)
    sem = distinct.std() / np.sqrt(trials)
    assert experts * shape.touched(tokens) == pytest.approx(distinct.mean(), abs=4 * sem + 1e-9)


def test_widths_scale_the_bytes_and_nothing_else() -> None:
    shape = MODELS["llama-3-8b"]
    narrow = shape.stored_as(8, 4)
    assert (narrow.weight_bytes, narrow.kv_bytes_per_token) == (shape.weight_bytes / 2, shape.kv_bytes_per_token / 4)
    assert narrow.params == shape.params
    assert shape.stored_as() == shape
    with pytest.raises(BadInputError, match=r"weight_bits.*12"):
        shape.stored_as(12)


def test_a_folder_and_a_file_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    config = {"model_type": "llama", **SMALL, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    by_folder, by_file = model_shape(str(folder)), model_shape(str(folder / "config.json"))
    assert by_folder == by_file
    assert (by_folder.name, by_folder.weight_bits, by_folder.kv_bits) == ("mine", 32, 32)


@pytest.mark.parametrize(
    ("change", "needles"),
    [
        ({"model_type": "deepseek_v3"}, ("model_type", "deepseek_v3", "mixtral")),
        ({"hidden_size": None}, ("hidden_size", "integers in")),
        ({"num_hidden_layers": -3}, ("num_hidden_layers", "-3")),
        ({"vocab_size": True}, ("vocab_size", "True")),
        ({"tie_word_embeddings": "no"}, ("tie_word_embeddings", "true or false")),
        ({"model_type": "mistral", "sliding_window": 16, "max_position_embeddings": 64}, ("sliding_window", "16")),
        ({"quantization_config": {"bits": 4}}, ("quantization_config", "cost.weight_bits")),
        ({"model_type": []}, ("model_type", "[]")),
        ({"dtype": {}}, (": dtype", "{}", "bfloat16")),
        ({"dtype": [1], "torch_dtype": "float16"}, (": dtype", "[1]")),
        ({"head_dim": 0}, ("head_dim", "got 0", "[1, ")),
        ({"num_key_value_heads": 0}, ("num_key_value_heads", "got 0", "[1, ")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "got 3", "divisor of 4")),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers", "[1, 100000]")),
        ({"model_type": "qwen3_moe", **MOE, "mlp_only_layers": 5}, ("mlp_only_layers", "got 5", "list")),
        ({"model_type": "qwen3_moe", **MOE, "mlp_only_layers": "ab"}, ("mlp_only_layers", "'ab'", "list")),
        ({"model_type": "qwen3_moe", **MOE, "mlp_only_layers": [[]]}, ("mlp_only_layers", "list")),
        ({"torch_dtype": "complex64"}, ("torch_dtype", "complex64")),
        (
            {"model_type": "qwen3_moe", **MOE, "num_experts_per_tok": 9},
            ("num_experts_per_tok", "9", "at most 6"),
        ),
    ],
)
def test_what_cannot_be_modelled_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], needles: tuple[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **SMALL, **change}))
    with pytest.raises(BadInputError) as caught:
        model_shape(str(file))
    for needle in (str(file), *needles):
        assert needle in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(BadInputError, match="JSON"):
        model_shape(str(file))
    with pytest.raises(BadInputError, match=r"cost.model.*llama-3-70b"):
        model_shape(str(tmp_path / "absent"))
