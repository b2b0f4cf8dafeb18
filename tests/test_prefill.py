"""Prefill in C++: what a token gets is a property of the tokens it sees, however its row is cut; and it is right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import tiny_llama

from backends import models, native
from backends.attention import PagedBatch, paged_attention
from backends.attention.rows import single_row_plan
from backends.engine import Engine
from backends.kv_cache import PagedKVCache
from backends.sampling import SamplingParams
from entropic_ctl import config as configs
from entropic_ctl.pruning.base import PruningConfig

if native.reason_unavailable() is not None:
    pytest.skip(str(native.reason_unavailable()), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LAYER0 = SimpleNamespace(layer_idx=0)


def layer(
    cuts: list[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, page: int = 16, **options: Any
) -> torch.Tensor:
    """Run (heads, T, D) tokens through one layer in chunks, over scattered pages full of NaN -> (T, H, D)."""
    total, dim = q.shape[1:]
    pages = np.random.default_rng(0).permutation(-(-total // page) + 2)[: -(-total // page)].tolist()
    cache = PagedKVCache(1, k.shape[0], dim, len(pages) + 2, page, k.dtype)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    out, start = [], 0
    for n in cuts:
        batch = PagedBatch.from_plan(single_row_plan(start, n, pages), cache, PruningConfig(dense_layers=0))
        batch.sink_tokens = 3
        now = slice(start, start + n)
        out.append(
            paged_attention(LAYER0, q[None, :, now], k[None, :, now], v[None, :, now], None, paged=batch, **options)
        )
        start += n
    assert start == total
    return torch.cat([o[0] for o, _ in out])


def tokens(heads: int, kv_heads: int, total: int, dim: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(h, total, dim, generator=random).to(dtype) for h in (heads, kv_heads, kv_heads)]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64, (T, H, D)."""
    k, v = (x.double().repeat_interleave(q.shape[0] // k.shape[0], dim=0) for x in (k, v))
    s = q.double() @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    s = s.masked_fill(~torch.ones(s.shape[1:], dtype=torch.bool).tril(), -torch.inf)
    return (s.softmax(-1) @ v).transpose(0, 1)


def chunks(total: int, size: int) -> list[int]:
    return [min(size, total - at) for at in range(0, total, size)]


@settings(max_examples=25)
@given(
    heads=st.sampled_from([(9, 3), (4, 4), (8, 1)]),
    dim=st.sampled_from([8, 24, 64, 80]),
    page=st.sampled_from([4, 5, 16]),
    dtype=st.sampled_from(DTYPES),
    total=st.integers(2, 90),
    size=st.integers(2, 90),
    option=st.sampled_from(["none", "window", "cap", "sinks"]),
)
def test_a_token_ignores_how_its_row_is_cut(
    heads: tuple[int, int], dim: int, page: int, dtype: torch.dtype, total: int, size: int, option: str
) -> None:
    """Bit for bit what it gets as a row of its own, as in decoding."""
    options = {
        "none": {},
        "window": {"sliding_window": 11},
        "cap": {"softcap": 5.0},
        "sinks": {"s_aux": torch.linspace(-1, 1, heads[0])},
    }[option]
    q, k, v = tokens(*heads, total, dim, dtype)
    alone = layer([1] * total, q, k, v, page=page, **options)
    assert alone.isfinite().all()
    assert torch.equal(layer(chunks(total, size), q, k, v, page=page, **options), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_parts_of_a_long_row_are_merged_alike(dtype: torch.dtype) -> None:
    total = 2300
    q, k, v = tokens(2, 1, total, 16, dtype)
    whole = layer([total], q, k, v)
    assert torch.equal(layer([2000, 100, *[1] * 60, 140], q, k, v), whole)
    limit = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-6}[dtype]
    assert (whole.double() - exact(q, k, v)).norm() < limit * exact(q, k, v).norm()


def test_bfloat16_is_no_further_from_exact_than_eager_attention() -> None:
    """Weights of the values are rounded to bfloat16 in both; here the sum that divides them is the rounded ones'."""
    for seed in range(3):
        q, k, v = tokens(9, 3, 300, 64, torch.bfloat16, seed)
        q = 2 * q
        group = [x.repeat_interleave(3, dim=0) for x in (k, v)]
        s = q @ group[0].transpose(1, 2) * 64**-0.5
        s = s.masked_fill(~torch.ones(300, 300, dtype=torch.bool).tril(), -torch.inf)
        eager = (s.float().softmax(-1).bfloat16() @ group[1]).transpose(0, 1)
        want = exact(q, k, v)
        assert (layer([300], q, k, v).double() - want).norm() < 0.8 * (eager.double() - want).norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_token_spoils_only_those_that_see_it(dtype: torch.dtype, bad: float) -> None:
    q, k, v = tokens(4, 2, 70, 24, dtype)
    clean = layer([70], q, k, v)
    v[1, 37] = k[1, 37] = bad
    broken = layer([70], q, k, v)
    assert torch.equal(broken[:37], clean[:37])
    assert torch.equal(broken[37:, :2], clean[37:, :2])  # the other KV head's
    assert broken[37:, 2:].isnan().any(dim=-1).all()


def test_threads_change_nothing() -> None:
    q, k, v = tokens(6, 2, 200, 32, torch.bfloat16)
    one = layer([200], q, k, v)
    torch.set_num_threads(3)
    try:
        assert torch.equal(layer([200], q, k, v), one)
    finally:
        torch.set_num_threads(1)


def logits_of(network: Any, prompts: list[list[int]], **settings_: Any) -> list[torch.Tensor]:
    """Logits of the tokens of greedy texts, by request."""
    seen: dict[int, list[torch.Tensor]] = {}

    def probe(plan: Any, rows: Any, logits: torch.Tensor) -> None:
        for row, values in zip(rows, logits, strict=True):
            seen.setdefault(int(plan.ids[row]), []).append(values.clone())

    speculation = {"draft_tokens": 5 if settings_.pop("drafts", False) else 0}
    limits = {"pages": 256, "page_tokens": 4, "kernels": "native"} | settings_
    engine = Engine(
        configs.from_mapping({"engine": limits, "speculation": speculation}), models.wrap(network, None), probe=probe
    )
    for ids in prompts:
        engine.submit(ids, SamplingParams(max_new_tokens=24, greedy=True))
    texts = [output.token_ids for output in engine.run()]
    if speculation["draft_tokens"]:
        assert engine.drafted > 0
        return [torch.tensor(text) for text in texts]
    assert all(len(seen[i]) == len(text) for i, text in enumerate(texts))
    return [torch.cat([torch.stack(seen[i]), torch.tensor(text)[:, None].float()], 1) for i, text in enumerate(texts)]


def test_in_bfloat16_neither_batch_nor_chunks_nor_drafts_change_a_text() -> None:
    network = tiny_llama(3, hidden_size=64, initializer_range=0.3).bfloat16()
    random = np.random.default_rng(1)
    prompts = [(random.integers(0, 40, 9).tolist() * 5)[:n] for n in (3, 17, 41)]
    alone = [logits_of(network, [ids])[0] for ids in prompts]
    for limits in ({}, {"max_batch_tokens": 16, "prefill_chunk": 5}):
        for got, want in zip(logits_of(network, prompts, **limits), alone, strict=True):
            assert torch.equal(got, want)
    for text, want in zip(logits_of(network, prompts, drafts=True), alone, strict=True):
        assert text.tolist() == want[:, -1].tolist()
