"""The engine on the Triton kernels against the engine on PyTorch; run by test_triton.py in a process of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from paged_layer import DEVICE, INTERPRETED
from tiny_model import tiny_llama

from backends import gumbel, models
from backends.attention.batch import PagedBatch
from backends.engine import Engine
from backends.kv_cache import PagedKVCache, pack, quantise, unpack
from backends.sampling import SamplingParams, kernels
from backends.triton.sampling import choose
from entropic_ctl import config as configs
from entropic_ctl.errors import BadInputError


class Watched(Engine):
    """Audits every layer of every pass, and keeps what it found."""

    def _forward(self, batch: Any, tokens: Any) -> torch.Tensor:
        batch.audit, batch.want_output_error = self.audited, self.audited
        logits = super()._forward(batch, tokens)
        self.found.extend(batch.audits)
        return logits


def run(
    kernels: str, theta: float, *, audited: bool = False, lengths: tuple[int, ...] = (90,), layers: int = 2
) -> tuple[list[list[int]], Watched, list[Any]]:
    """Two query heads and one KV head: under the interpreter every head costs."""
    network = tiny_llama(num_attention_heads=2, num_key_value_heads=1, hidden_size=16, num_hidden_layers=layers)
    wrapped = models.wrap(network.to(DEVICE), None)
    engine = {"pages": 64, "page_tokens": 16, "max_batch": 3, "max_batch_tokens": 128, "prefill_chunk": 64}
    law = {"law": "budget", "theta_nats": theta, "theta_wide_nats": theta}
    loop = {"pruning": law | {"dense_layers": 1, "sink_pages": 1, "recent_pages": 1} if theta else {"law": "off"}}
    run_config = configs.from_mapping({"engine": engine | {"kernels": kernels}, "loop": loop})
    made = Watched(run_config, dataclasses.replace(wrapped, eos_ids=frozenset()), uncertified=True)
    made.audited, made.found = audited, []
    rng = np.random.default_rng(0)
    for i, length in enumerate(lengths):
        made.submit(rng.integers(0, 256, length).tolist(), SamplingParams(max_new_tokens=4, seed=i, greedy=i == 0))
    results = []
    while not made.idle:
        result = made.step()
        if result is not None:
            results.append(result)
    return [made.outputs[i].token_ids for i in range(len(lengths))], made, results


def test_the_engine_writes_the_same_tokens_and_reads_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers measured is fetched once per step, for all layers together."""
    fetched: list[int] = []
    original = PagedBatch._settle

    def counted(self: PagedBatch) -> None:
        fetched.extend([len(self.pending)] if self.pending else [])
        original(self)

    with monkeypatch.context() as patched:
        patched.setattr(PagedBatch, "_settle", counted)
        tokens, made, results = run("triton", 0.5, lengths=(90, 5), layers=3)
    want, other, same = run("torch", 0.5, lengths=(90, 5), layers=3)
    assert (made.cache.kernels, other.cache.kernels) == ("triton", "torch")
    assert tokens == want
    assert len(results) == len(same)
    for a, b in zip(results, same, strict=True):
        # Triton looks twice at all it keeps, and so may keep one page more
        np.testing.assert_allclose(a.kept_fraction, b.kept_fraction, atol=0.09)
        assert 0.97 * b.kv_bytes <= a.kv_bytes <= 1.15 * b.kv_bytes
        assert (a.certificate_max <= 0.5).all()
    pruned = sum(bool((r.kept_fraction < 1).any()) for r in results)
    assert pruned >= 2
    assert fetched == [2] * pruned  # three layers, the first one dense


def test_certificates_hold_in_the_engine_and_dense_rows_are_exact() -> None:
    _, made, results = run("triton", 0.5, audited=True)
    assert len(made.found) >= 2
    lost = np.concatenate([a.true_mass for a in made.found])
    bound = np.concatenate([a.certified_mass for a in made.found])
    assert (lost <= bound).all()
    assert lost.max() > 0.01
    assert max(r.certificate_max.max(initial=0.0) for r in results) == pytest.approx(-np.log1p(-bound.max()))
    assert run("triton", 0.0)[0] == run("torch", 0.0)[0]


@pytest.mark.parametrize("window", [None, 24])
def test_a_windowed_model_with_wide_rows(window: int | None) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    def tokens(kernels: str) -> list[int]:
        torch.manual_seed(1)
        settings = MistralConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=window,
            initializer_range=0.3,
        )
        wrapped = models.wrap(MistralForCausalLM(settings).eval().to(DEVICE), None)
        run_config = configs.from_mapping(
            {"engine": {"pages": 32, "page_tokens": 16, "max_batch_tokens": 64, "kernels": kernels}}
        )
        made = Engine(run_config, dataclasses.replace(wrapped, eos_ids=frozenset()), uncertified=True)
        made.submit(list(range(70)), SamplingParams(max_new_tokens=4, greedy=True))
        return made.run()[0].token_ids

    assert tokens("triton") == tokens("torch")


@pytest.mark.parametrize(
    ("dim", "page", "dtype"),
    [(64, 16, torch.bfloat16), (20, 32, torch.float32), (128, 16, torch.float16)],
)
def test_pages_are_sealed_bit_for_bit_as_the_reference_seals_them(dim: int, page: int, dtype: torch.dtype) -> None:
    caches = [PagedKVCache(2, 2, dim, 5, page, dtype, DEVICE, kernels=name) for name in ("triton", "torch")]
    made = torch.Generator().manual_seed(dim)
    k, v = (2.5 * torch.randn(2, 5, 2, page, dim, generator=made) for _ in range(2))
    k[:, 1, :, :, 3] = -0.7  # a constant channel
    k[:, 2] = 0.0
    k[1, 3, 0, 5, 7] = torch.inf
    for cache in caches:
        cache.k.copy_(k.to(dtype))
        cache.v.copy_(v.to(dtype))
        cache.seal_pages(np.array([4, 1, 3, 2]))
    got, want = caches
    assert got.sealed.tolist() == want.sealed.tolist() == [False, True, True, False, True]
    pages = torch.tensor([1, 2, 4])
    record, low = (getattr(got.shadow, name).cpu()[:, pages] for name in ("record", "low"))
    assert torch.equal(low, want.shadow.low.cpu()[:, pages])
    a = unpack(record, low, page, dim)
    b = quantise(want.k.cpu()[:, pages])
    for name in ("codes", "weight", "centre", "step"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    # sums run in another order, and a GPU may fuse: one unit in the last place, then
    close = {"rtol": 2.0**-22, "atol": 0.0}
    torch.testing.assert_close(a.norm, b.norm, **close)
    torch.testing.assert_close(a.error, b.error, **(close if not INTERPRETED else {"rtol": 0.0, "atol": 0.0}))
    same = pack(b._replace(norm=a.norm, error=a.error))[0]
    assert torch.equal(record, same)  # the padding too
    centre, radius = (getattr(got.shadow, name).cpu()[:, pages] for name in ("value_centre", "value_radius"))
    torch.testing.assert_close(centre, want.shadow.value_centre.cpu()[:, pages], rtol=2.0**-10, atol=1e-6)
    torch.testing.assert_close(radius, want.shadow.value_radius.cpu()[:, pages], rtol=1e-3, atol=0.0)


def test_the_draw_is_the_reference_draw_token_for_token() -> None:
    rows, n = 64, 3001
    made = torch.Generator().manual_seed(3)
    logits = (torch.randn(rows, n, generator=made) * 2.0).to(DEVICE)
    logits[::3, ::2] = -torch.inf
    heat = torch.linspace(0.05, 4.0, rows, dtype=torch.float64, device=DEVICE)
    seeds, index = [7**i % 2**62 for i in range(rows)], list(range(rows))
    assert torch.equal(choose(logits, heat, seeds, index), gumbel.choose(logits, heat, seeds, index))
    assert kernels("triton", DEVICE).choose is choose


def test_caches_the_kernels_cannot_hold_are_refused_by_name() -> None:
    with pytest.raises(BadInputError, match="pages of 16"):
        PagedKVCache(1, 1, 8, 4, 4, device=DEVICE, kernels="triton")
    with pytest.raises(BadInputError, match="256 channels"):
        PagedKVCache(1, 1, 320, 4, 16, device=DEVICE, kernels="triton")
