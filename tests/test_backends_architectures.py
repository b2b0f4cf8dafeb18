"""Which decoders run on the paged cache: greedy text equals transformers' own `generate`, or the model is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_model import tiny_llama

from backends import models
from backends.engine import Engine
from backends.sampling import SamplingParams
from entropic_ctl import config as configs
from entropic_ctl.errors import BadInputError, EntropicError
from entropic_ctl.signals import FinishReason

BASE: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 256, "bos_token_id": None,
    "pad_token_id": 0, "initializer_range": 0.3, "tie_word_embeddings": False,
}  # fmt: skip
RUNS = {
    "Qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 9},
    "Gemma2": {"head_dim": 16, "sliding_window": 9, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "Phi3": {"sliding_window": 9},
    "Olmo2": {},
    "GptOss": {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 9},  # learned sinks
}
REFUSED = {
    "StableLm": ({}, "attention interface"),
    "Llama4Text": ({"head_dim": 16, "attention_chunk_size": 8, "num_local_experts": 2, "moe_layers": []}, "chunked"),
    "Qwen3Next": ({"head_dim": 16}, "linear_attention"),
    "Lfm2": ({"full_attn_idxs": [1, 3]}, "conv"),
}


def build(name: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**BASE, **changes})
    with models.quiet():
        return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def prompt(n: int) -> list[int]:
    return np.random.default_rng(n).integers(0, 256, n).tolist()


def engine_of(network: Any) -> Engine:
    limits = {"pages": 256, "page_tokens": 4, "max_batch_tokens": 16, "prefill_chunk": 7}
    return Engine(configs.from_mapping({"engine": limits}), models.wrap(network, None))


@pytest.mark.parametrize("name", RUNS)
def test_greedy_equals_generate(name: str) -> None:
    """Ragged batches, prefill chunks across pages and windows, contexts several windows long."""
    network, prompts = build(name, RUNS[name]), [prompt(n) for n in (1, 17, 40)]
    network.set_attn_implementation("eager")
    want = []
    for ids in prompts:
        x = torch.tensor([ids])
        with models.quiet():
            out = network.generate(
                x, attention_mask=torch.ones_like(x), max_new_tokens=25, do_sample=False, pad_token_id=0
            )
        want.append(out[0, len(ids) :].tolist())
    engine = engine_of(network)
    for ids in prompts:
        engine.submit(ids, SamplingParams(max_new_tokens=25, greedy=True))
    assert [output.token_ids for output in engine.run()] == want
    assert len({token for tokens in want for token in tokens}) > 20


@pytest.mark.parametrize("name", REFUSED)
def test_layers_the_paged_cache_cannot_serve_are_refused(name: str) -> None:
    changes, needle = REFUSED[name]
    network = build(name, changes)
    with pytest.raises(BadInputError, match=needle) as caught:
        engine_of(network)
    assert type(network).__name__ in str(caught.value)


def test_a_recurrent_decoder_is_refused_whatever_its_config_says() -> None:
    network = tiny_llama()
    network._is_stateful = True
    with pytest.raises(BadInputError, match="recurrent state"):
        engine_of(network)


def test_layers_of_unlike_sizes_are_refused() -> None:
    """As Gemma 4's: transformers then refuses to name one head size."""

    class Ambiguous(transformers.LlamaConfig):
        @property
        def head_dim(self) -> int:
            raise RuntimeError("'head_dim' is a per-layer attribute")

    network = tiny_llama()
    network.config.__class__ = Ambiguous
    with pytest.raises(BadInputError, match="differ in size"):
        models.wrap(network, None)


def test_a_layer_that_bypasses_the_paged_attention_is_an_error() -> None:
    network = tiny_llama()
    network.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    engine = engine_of(network)
    engine.submit([1, 2])
    with pytest.raises(EntropicError, match="1 of 2 layers"):
        engine.run()


def test_longrope_ends_where_its_frequencies_switch_for_the_whole_batch() -> None:
    """Beyond the original length one long row would change the angles of every other row of the step."""
    factors = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    network = build(
        "Phi3", {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_parameters": factors}
    )
    assert models.wrap(network, None).max_context == 32
    x = torch.tensor([prompt(4)])
    with models.quiet():
        out = network.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=25, do_sample=False, pad_token_id=0)
    engine = engine_of(network)
    engine.submit(prompt(4), SamplingParams(max_new_tokens=25, greedy=True))
    engine.submit(prompt(17), SamplingParams(max_new_tokens=60, greedy=True))
    short, long = engine.run()
    assert short.token_ids == out[0, 4:].tolist()
    assert long.finish is not None
    assert long.finish.reason is FinishReason.CAPACITY
    assert len(long.token_ids) == 32 - 17 + 1


def test_dynamic_rope_stays_below_its_switch() -> None:
    """Its base grows past ``max_position_embeddings`` only, which no context can exceed."""
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    network = tiny_llama(max_position_embeddings=32, rope_parameters=scaling)
    loaded = dataclasses.replace(models.wrap(network, None), eos_ids=frozenset())
    engine = Engine(configs.from_mapping({"engine": {"pages": 64, "page_tokens": 4}}), loaded)
    engine.submit(prompt(17), SamplingParams(max_new_tokens=60, greedy=True))
    (output,) = engine.run()
    assert output.finish is not None
    assert output.finish.reason is FinishReason.CAPACITY
