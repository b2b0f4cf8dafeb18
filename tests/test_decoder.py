"""The fused decoder: products against float64, rows that do not see each other, and transformers' own results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model_breadth import RUNS, build, prompt
from tiny_model import tiny_llama

from backends import decoder as decoders
from backends import models, native
from backends.decoder import FusedDecoder, runner
from backends.decoder_abi import linear
from backends.decoder_witness import plain_attention
from backends.engine import Engine
from backends.sampling import SamplingParams
from entropic_ctl import config as configs
from entropic_ctl.errors import BadInputError

if native.reason_unavailable() is not None:
    pytest.skip(str(native.reason_unavailable()), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}),
    "dynamic rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    **{name.lower(): (name, RUNS[name]) for name in ("Qwen2", "Qwen3", "Mistral", "Gemma2", "Phi3", "Olmo2")},
    "partial rotary": ("Phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma3": ("Gemma3Text", {"head_dim": 24, "sliding_window": 9, "query_pre_attn_scalar": 16}),
}
REFUSED = {
    "Mixtral": ({}, "MLP"),
    "StableLm": ({}, "LayerNorm"),
    "Glm": ({"head_dim": 16}, "queries differ"),  # rotary pairs lie side by side
    "SmolLM3": ({"no_rope_layers": [1, 1, 1, 0]}, "layer 3: queries differ"),
}


def covered(network: Any) -> FusedDecoder:
    decoder, reason = FusedDecoder.of(network)
    assert decoder is not None, reason
    return decoder


def alone(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """In place of attention: something of each token's own queries, keys and values."""
    group = query.shape[1] // key.shape[1]
    mixed = query + (key - value).repeat_interleave(group, dim=1)
    return mixed.transpose(1, 2)


def logits_of(decoder: FusedDecoder, tokens: list[int], positions: list[int]) -> torch.Tensor:
    n = len(tokens)
    with torch.inference_mode():
        return decoder._forward(torch.tensor(tokens), torch.tensor(positions), torch.arange(n), alone)


@st.composite
def products(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    m, rows, depth = draw(st.integers(1, 70)), draw(st.integers(1, 70)), draw(st.integers(1, 140))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    x, w, b = (torch.randn(*s, generator=random).to(dtype) for s in ((m, depth), (rows, depth), (rows,)))
    return x, w, b if draw(st.booleans()) else None


@given(products())
def test_a_product_is_as_good_as_float32_sums_allow(case: tuple[torch.Tensor, torch.Tensor, Any]) -> None:
    x, w, bias = case
    exact, size = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    error = (linear(x, w, bias).double() - exact).abs()
    assert (error <= size * (x.shape[1] + 2) * 2.0**-24).all()


@given(products(), st.data())
def test_a_row_of_a_product_ignores_the_others(case: tuple[Any, Any, Any], data: st.DataObject) -> None:
    x, w, bias = case
    pick = data.draw(st.lists(st.integers(0, x.shape[0] - 1), min_size=1, max_size=9))
    assert torch.equal(linear(x[pick].contiguous(), w, bias), linear(x, w, bias)[pick])


def test_a_product_reads_rows_of_a_wider_matrix() -> None:
    wide = torch.randn(12, 40)
    x = torch.randn(3, 24)
    assert torch.equal(linear(x, wide[:, 8:32]), linear(x, wide[:, 8:32].contiguous()))


@pytest.mark.parametrize("bad", [torch.ones(2, 4).half(), torch.ones(2, 5), torch.ones(2, 4).double()])
def test_unlike_operands_are_refused(bad: torch.Tensor) -> None:
    with pytest.raises(BadInputError, match="x, weight"):
        linear(bad, torch.ones(3, 4))


def run_engine(
    network: Any, prompts: list[list[int]], kernels: str, run: Any = None
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Greedy texts of 12 tokens, and the logits of every step of each; prefill in chunks, across pages and windows."""
    seen: list[list[torch.Tensor]] = [[] for _ in prompts]

    def probe(plan: Any, rows: Any, logits: torch.Tensor) -> None:
        for row, values in zip(rows, logits, strict=True):
            seen[int(plan.ids[row])].append(values.clone())

    limits = {"pages": 256, "page_tokens": 4, "max_batch_tokens": 16, "prefill_chunk": 7, "kernels": kernels}
    engine = Engine(configs.from_mapping({"engine": limits}), models.wrap(network, None), probe=probe)
    engine._run = run or engine._run
    for ids in prompts:
        engine.submit(ids, SamplingParams(max_new_tokens=12, greedy=True))
    return [output.token_ids for output in engine.run()], [torch.stack(steps) for steps in seen]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_one_pass_of_the_model(name: str) -> None:
    family, changes = FAMILIES[name]
    network, prompts = build(family, changes), [prompt(n) for n in (1, 17, 40)]
    texts, logits = run_engine(network, prompts, "native")
    network.set_attn_implementation("eager")
    for ids, text, got in zip(prompts, texts, logits, strict=True):
        with torch.inference_mode():
            want = network(input_ids=torch.tensor([[*ids, *text]]), use_cache=False).logits[0, len(ids) - 1 : -1]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4 * float(want.std()))
        assert want.argmax(-1).tolist() == text


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_rounds_where_transformers_does(name: str) -> None:
    """The same attention under both: most logits have the same bits, as one flipped bit changes a whole row."""
    family, changes = FAMILIES[name]
    network, prompts = build(family, changes).bfloat16(), [prompt(n) for n in (1, 17, 40)]
    texts, logits = run_engine(network, prompts, "native")
    same, want = run_engine(network, prompts, "native", lambda batch, tokens: batch.run(network, tokens))
    alike = [sum(np.cumprod(np.equal(a, b))) + 1 for a, b in zip(texts, same, strict=True)]  # the text up to there is
    got, expected = (torch.cat([x[:n] for x, n in zip(xs, alike, strict=True)]) for xs in (logits, want))
    assert got.shape[0] > 20
    assert (got == expected).float().mean() > 0.7
    assert (got - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2"])
def test_a_token_ignores_its_batch_and_the_threads(name: str, dtype: torch.dtype) -> None:
    """Bit for bit: alone, among one to sixty others, in any order, with one thread or three."""
    family, changes = FAMILIES[name]
    network = build(family, changes | {"hidden_size": 48, "intermediate_size": 100, "vocab_size": 301}).to(dtype)
    decoder = covered(network)
    random = np.random.default_rng(0)
    tokens, positions = random.integers(0, 301, 61).tolist(), random.integers(0, 400, 61).tolist()
    everyone = logits_of(decoder, tokens, positions)
    for size in (1, 2, 5, 7, 24, 25, 60):
        pick = random.permutation(61)[:size].tolist()
        some = logits_of(decoder, [tokens[i] for i in pick], [positions[i] for i in pick])
        assert torch.equal(some, everyone[pick])
    try:
        torch.set_num_threads(3)
        assert torch.equal(logits_of(decoder, tokens, positions), everyone)
    finally:
        torch.set_num_threads(1)


def test_a_broken_token_stays_alone() -> None:
    """What is not finite in one row reaches no other."""
    network = build("Llama", {})
    decoder = covered(network)
    tokens, positions = [1, 2, 3, 4, 5, 6, 7, 8], list(range(8))
    clean = logits_of(decoder, tokens, positions)
    with torch.no_grad():
        network.model.embed_tokens.weight[3] = float("nan")
        network.model.embed_tokens.weight[5] = float("inf")
    broken = logits_of(decoder, tokens, positions)  # it reads the model's own weights
    assert broken[[2, 4]].isnan().all()
    rest = [0, 1, 3, 5, 6, 7]
    assert torch.equal(broken[rest], clean[rest])


def test_bfloat16_is_no_further_from_float32_than_transformers() -> None:
    """Same weights; error of the logits against the float32 forward, mean over 3 x 64 tokens."""
    ours, theirs = [], []
    for seed in range(3):
        network = tiny_llama(seed, hidden_size=96, intermediate_size=256, num_hidden_layers=6, initializer_range=0.1)
        half = network.bfloat16()
        decoder = covered(half)
        text = prompt(64 + seed)[:64]
        x = torch.tensor([text])
        with torch.inference_mode():
            attend = lambda _, q, k, v: plain_attention(q, k, v, (96 // 4) ** -0.5)  # noqa: E731
            got = decoder._forward(x[0], torch.arange(64), torch.arange(64), attend)
            eager = half(input_ids=x, use_cache=False).logits[0].float()
            exact = half.float()(input_ids=x, use_cache=False).logits[0]
        ours.append(float((got - exact).norm() / exact.norm()))
        theirs.append(float((eager - exact).norm() / exact.norm()))
    assert 1e-4 < np.mean(ours) < 1.1 * np.mean(theirs)


def test_activations_at_their_ends() -> None:
    """Gates of thousands: the exponential saturates, and nothing becomes NaN."""
    for family, changes in (("Llama", {}), ("Gemma", {"head_dim": 16})):
        network = build(family, changes)
        with torch.no_grad():
            for layer in network.model.layers:
                layer.mlp.gate_proj.weight *= 3000.0
                layer.mlp.up_proj.weight *= 1e-3
        assert logits_of(covered(network), prompt(30), list(range(30))).isfinite().all()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_has_a_reason_and_runs_in_torch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    changes, needle = REFUSED[name]
    network = build(name, changes)
    decoder, reason = FusedDecoder.of(network)
    assert decoder is None
    assert needle in reason
    with pytest.raises(BadInputError, match="kernels"):
        runner(network, "native")
    decoders._announce.cache_clear()
    for _ in range(2):
        runner(network, "auto")
    assert capsys.readouterr().err.count(needle) == 1


def test_parts_of_another_kind_are_refused() -> None:
    for change, needle in (
        (lambda net: net.half(), "float16"),
        (lambda net: setattr(net.model.layers[1].mlp, "act_fn", torch.nn.ReLU()), "ReLU"),
        (lambda net: setattr(net.model.layers[1].self_attn, "forward", lambda *_: None), "layers.1.self_attn"),
        (lambda net: setattr(net.model.layers[0].self_attn, "k_proj", torch.nn.Identity()), "k_proj"),
        (lambda net: setattr(net.model.layers[0].input_layernorm, "variance_epsilon", 0.5), "epsilon"),
    ):
        network = build("Llama", {})
        change(network)
        decoder, reason = FusedDecoder.of(network)
        assert decoder is None
        assert needle in reason


def test_a_decoder_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison at the start notices a wrong formula, here another activation."""
    monkeypatch.setattr("backends.decoder_layout._activation_kind", lambda _: 1)
    decoder, reason = FusedDecoder.of(build("Llama", {}))
    assert decoder is None
    assert "differ" in reason


def test_without_a_compiler_auto_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(native, "reason_unavailable", lambda: "no C++ compiler on the path")
    decoders._announce.cache_clear()
    runner(build("Llama", {}), "auto")
    assert "no C++ compiler" in capsys.readouterr().err
    with pytest.raises(BadInputError, match="no C\\+\\+ compiler"):
        runner(build("Llama", {}), "native")


def test_a_large_model_moves_into_one_block_and_stays_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    network = build("Llama", {"tie_word_embeddings": True})
    x = torch.tensor([prompt(20)])
    with torch.inference_mode():
        before = network(input_ids=x, use_cache=False).logits.clone()
    monkeypatch.setattr("backends.weight_block._LARGE_BYTES", 0)
    covered(network)
    assert len({p.untyped_storage().data_ptr() for p in network.parameters()}) == 1
    assert all(p.data_ptr() % 64 == 0 for p in network.parameters())
    assert network.lm_head.weight is network.model.embed_tokens.weight
    with torch.inference_mode():
        assert torch.equal(network(input_ids=x, use_cache=False).logits, before)


@settings(max_examples=10)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=4))
def test_angles_do_not_depend_on_earlier_positions(order: list[int]) -> None:
    """The tables grow as positions do."""
    network = tiny_llama()
    decoder = covered(network)
    for position in order:
        got = logits_of(decoder, [7], [position])
        assert torch.equal(got, logits_of(covered(network), [7], [position]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_a_pass_in_one_call_is_the_pass_layer_by_layer(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits, bytes, pages and certificates: full and windowed layers, caps, pruned rows and chunks together."""
    family, changes = FAMILIES[name]
    network = build(family, changes).to(dtype)
    pruning = {"law": "budget", "dense_layers": 1, "theta_nats": 0.2, "theta_wide_nats": 0.2}
    engine = {"pages": 256, "page_tokens": 4, "max_batch_tokens": 40, "prefill_chunk": 32, "kernels": "native"}
    config = configs.from_mapping({"engine": engine, "loop": {"pruning": pruning}})
    at_once = []

    def decode() -> tuple[list[list[int]], list[Any]]:
        made, results = Engine(config, models.wrap(network, None), uncertified=True), []
        for n in (200, 150, 60):
            made.submit(prompt(n), SamplingParams(max_new_tokens=8, greedy=True))
        while not made.idle:
            results.append(made.step())
        return [made.outputs[i].token_ids for i in range(3)], results

    original = decoders.run_layers
    monkeypatch.setattr(decoders, "run_layers", lambda *a: (at_once.append(1), original(*a)))
    texts, results = decode()
    assert len(at_once) == len(results)
    monkeypatch.setattr(decoders, "runs_at_once", lambda *_: False)
    same, expected = decode()
    assert len(at_once) == len(results) == len(expected)
    assert texts == same
    for got, want in zip(results, expected, strict=True):
        assert got.kv_bytes == pytest.approx(want.kv_bytes, rel=1e-12)
        for field in ("kept_fraction", "pruned_mass_mean", "pruned_mass_max", "certificate_max", "varentropy"):
            np.testing.assert_allclose(getattr(got, field), getattr(want, field), rtol=1e-12, err_msg=field)
    if name == "llama":  # the others' layers see 9 tokens, at least every second one
        assert min(result.kept_fraction.min() for result in results) < 0.9
