"""Which decoders run on the paged cache: greedy text equals `generate` and no certificate is violated, or a refusal.

Also what a token of a mixture of experts costs: its active weights, by hand, and as the simulator counts them.
"""

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
from sim.model_shapes import ModelShape

pytestmark = pytest.mark.usefixtures("one_thread")

BASE: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 256, "bos_token_id": None,
    "pad_token_id": 0, "initializer_range": 0.3, "tie_word_embeddings": False,
}  # fmt: skip
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
OLD = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_inner": 64, "num_key_value_heads": None}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 9}
RUNS = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 9},
    "Gemma": {"head_dim": 16},
    "Gemma2": {
        "head_dim": 16,
        "sliding_window": 9,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "Gemma3Text": {"head_dim": 16, "query_pre_attn_scalar": 24, **MIXED},
    "Phi": {"partial_rotary_factor": 0.5},
    "Phi3": {"sliding_window": 9},
    "Olmo": {"clip_qkv": 3.0},
    "Olmo2": {},
    "Olmo3": MIXED,
    "StableLm": {"use_parallel_residual": True, "qk_layernorm": True},  # its layers drop the batch on the way
    "SmolLM3": {"no_rope_layers": [1, 0, 1, 0]},
    "Cohere": {"use_qk_norm": True},
    "Cohere2": MIXED,
    "Granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "Nemotron": {},
    "GPT2": {**OLD, "scale_attn_by_inverse_layer_idx": True},
    "GPTNeoX": {},
    "GPTBigCode": OLD,  # one KV head
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "GptOss": {"head_dim": 16, **LOCAL, "sliding_window": 9},  # learned sinks
    "Mixtral": LOCAL,
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "Qwen3Moe": {**EXPERTS, "head_dim": 16},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Phimoe": LOCAL,
    "GraniteMoe": LOCAL,
    "JetMoe": {**LOCAL, "kv_channels": 8},  # experts in the attention as well
    "DeepseekV3": {**ROUTED, **LATENT},  # values smaller than keys
}
ONLY_WINDOWS = {"Mistral", "Phi3"}  # pruned below without their window
REFUSED = {
    "Bloom": ({"n_layer": 4, "n_head": 4}, "attention interface"),
    "Falcon": ({"alibi": True}, "attention interface"),
    "Gemma4Text": ({}, "differ in size"),
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


def engine_of(network: Any, loop: dict[str, Any] | None = None, kind: type[Engine] = Engine, **engine: Any) -> Any:
    limits = {"pages": 256, "page_tokens": 4, "max_batch_tokens": 16, "prefill_chunk": 7} | engine
    return kind(configs.from_mapping({"engine": limits, "loop": loop or {}}), models.wrap(network, None))


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


class Audited(Engine):
    """Compares every pruned head with dense float64 attention over the same cache."""

    def _forward(self, batch: Any, tokens: Any) -> torch.Tensor:
        batch.audit = True
        logits = super()._forward(batch, tokens)
        self.seen = [*getattr(self, "seen", []), *batch.audits]
        return logits


@pytest.mark.parametrize("name", RUNS)
def test_pruning_a_long_context_violates_no_certificate(name: str) -> None:
    """120 pages of four tokens, two rows: every full-attention layer is pruned, every certificate holds."""
    changes = RUNS[name] | ({"sliding_window": None} if name in ONLY_WINDOWS else {})
    loop = {"pruning": {"law": "budget", "dense_layers": 0, "theta_nats": 0.2, "theta_wide_nats": 0.2}}
    engine = engine_of(build(name, changes), loop, Audited, pages=300, max_batch_tokens=512, prefill_chunk=512)
    for n in (480, 301):
        engine.submit(prompt(n), SamplingParams(max_new_tokens=4, greedy=True))
    engine.run()
    windows = [kind == "sliding_attention" for kind in getattr(engine.model.model.config, "layer_types", None) or ()]
    assert {audit.layer for audit in engine.seen} == {i for i in range(4) if not (windows and windows[i])}
    assert {audit.row for audit in engine.seen} == {0, 1}
    dropped = np.mean([1 - audit.kept.mean() for audit in engine.seen])
    assert dropped > 0.05
    for audit in engine.seen:
        assert (audit.true_mass <= audit.certified_mass).all()
        assert (-np.log1p(-audit.certified_mass) <= 0.2).all()


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_layers_the_paged_cache_cannot_serve_are_refused(name: str) -> None:
    changes, needle = REFUSED[name]
    network = build(name, changes)
    with pytest.raises(BadInputError, match=needle) as caught:
        models.wrap(network, None)
    assert type(network).__name__ in str(caught.value)


def test_a_recurrent_decoder_is_refused_whatever_its_config_says() -> None:
    network = tiny_llama()
    network._is_stateful = True
    with pytest.raises(BadInputError, match="recurrent state"):
        models.wrap(network, None)


@pytest.mark.parametrize(
    ("asked", "needle"),
    [
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "an attention mask of its own"),
        ({"position_bias": torch.zeros(1)}, "a position bias"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_attention_that_asks_for_more_than_the_past_is_refused(asked: dict[str, Any], needle: str) -> None:
    network = tiny_llama()
    for layer in network.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, _inner=inner, **kwargs: _inner(*args, **(kwargs | asked))
    with pytest.raises(BadInputError, match=needle):
        models.wrap(network, None)


def test_a_layer_that_bypasses_the_paged_attention_is_an_error() -> None:
    """Found at loading; and, where someone changes the model under an engine, at the first pass."""
    network = tiny_llama()
    engine = engine_of(network, kernels="torch")
    network.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(BadInputError, match="1 of its 2 layers"):
        models.wrap(network, None)
    engine.submit([1, 2])
    with pytest.raises(EntropicError, match="1 of 2 layers"):
        engine.run()


def test_a_decoder_that_does_not_run_is_refused_with_its_own_words() -> None:
    network = tiny_llama()
    network.model.layers[0].mlp.forward = lambda _: torch.ones(1) @ torch.ones(2)
    with pytest.raises(BadInputError, match="does not run on one token: inconsistent tensor size"):
        models.wrap(network, None)
    assert network.config._attn_implementation == "sdpa"


def test_looking_at_a_model_changes_nothing_in_it() -> None:
    network = build("Mixtral", RUNS["Mixtral"])
    network.set_attn_implementation("eager")
    before = {name: value.clone() for name, value in network.state_dict().items()}
    models.wrap(network, None)
    assert network.config._attn_implementation == "eager"
    assert not any(module._forward_pre_hooks for module in network.modules())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


# -- weights a token uses ---------------------------------------------------------------------------------------------

D, F, HEADS, EMBEDDINGS, FINAL_NORM = 32, 64, 4, 2 * 257 * 32, 32
ATTENTION = D * 32 + 2 * D * 16 + 32 * D  # q, k and v, o: 4 heads of 8, 2 KV heads
NORMS, ROUTER = 2 * D, 4 * D
WIDE = D * 64 + 2 * D * 32 + 64 * D  # heads of 16


def gated(width: int) -> int:
    return 3 * D * width


def of_four(each: int) -> int:
    return 4 * each + FINAL_NORM + EMBEDDINGS


LATENT_ATTENTION = D * 16 + 16 + 16 * HEADS * 16 + D * (16 + 8) + 16 + 16 * HEADS * (8 + 8) + HEADS * 8 * D
BY_HAND = {
    "Llama": of_four(ATTENTION + 32 + 16 + 16 + 32 + gated(F) + 2 * F + D + NORMS),  # every bias
    "Mixtral": of_four(ATTENTION + NORMS + ROUTER + 2 * gated(F)),
    "Qwen2Moe": of_four(ATTENTION + 32 + 16 + 16 + NORMS + ROUTER + 2 * gated(24) + gated(40) + D)
    + (gated(F) - (ROUTER + 2 * gated(24) + gated(40) + D)),  # layer 1 is dense
    "Qwen3Moe": of_four(WIDE + 16 + 16 + NORMS + ROUTER + 2 * gated(24)),
    "Olmoe": of_four(ATTENTION + 32 + 16 + NORMS + ROUTER + 2 * gated(F)),
    "GptOss": of_four(WIDE + (64 + 32 + 32 + D) + HEADS + NORMS + ROUTER + 4 + 2 * (D * 2 * F + 2 * F + F * D + D)),
    "DeepseekV3": of_four(LATENT_ATTENTION + NORMS + ROUTER + 2 * gated(24) + gated(24))
    + (gated(F) - (ROUTER + 3 * gated(24))),  # layer 0 is dense
    "JetMoe": of_four(2 * (D * 16 + 16 * D) + ROUTER + D + D * 2 * 16 + 2 * (D * 2 * F + F * D) + ROUTER + D + NORMS),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_active_parameters_by_hand(name: str) -> None:
    network = build(name, RUNS[name])
    shape = models.wrap(network, None).shape
    assert shape.parameters == sum(p.numel() for p in network.parameters())
    assert shape.active_parameters == BY_HAND[name]
    assert shape.active_body_parameters == BY_HAND[name] - EMBEDDINGS
    assert (shape.active_parameters < shape.parameters) == (name != "Llama")


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "Qwen2Moe", "Qwen3Moe"])
def test_the_simulator_counts_the_same_weights_and_the_same_operations(name: str) -> None:
    network = build(name, RUNS[name])
    modelled = ModelShape.from_hf_config(network.config.to_dict() | {"sliding_window": None})
    engine = engine_of(network, max_batch_tokens=64, prefill_chunk=64)
    shape = engine.model.shape
    assert modelled.params == shape.parameters
    assert modelled.active_params == shape.active_parameters
    assert modelled.layer_params + modelled.active_expert_params == shape.active_body_parameters
    for ids in (prompt(9), prompt(14)):
        engine.submit(ids, SamplingParams(max_new_tokens=3, greedy=True))
    prefill, decode = engine.step(), engine.step()
    n, attention = 9 + 14, 4 * 4 * shape.heads * shape.head_dim
    body = 2 * (modelled.layer_params + modelled.active_expert_params)
    head = 2 * 2 * modelled.head_params
    assert prefill.flops == body * n + head + attention * (9 * 10 // 2 + 14 * 15 // 2)
    assert decode.flops == body * 2 + head + attention * (10 + 15)


def test_positions_looked_up_are_no_operations() -> None:
    """GPT-2's table of positions counts as a weight, not as a product."""
    shape = models.wrap(build("GPT2", RUNS["GPT2"]), None).shape
    layer = D * 3 * D + 3 * D + D * D + D + 2 * D * F + F + D + 4 * D  # qkv, o, mlp, biases, two norms
    assert shape.body_parameters == 4 * layer + 2 * D
    assert shape.parameters == shape.active_parameters == shape.body_parameters + EMBEDDINGS + 512 * D


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
