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
from backends.attention.reference import Scoring, attend, visible, with_sink
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
    cuts: list[int],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    page: int = 16,
    sink_tokens: int = 3,
    **options: Any,
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
        batch.sink_tokens = sink_tokens
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


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sliding_window: int | None = None,
    sink_tokens: int = 3,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention in PyTorch, float32 inside, (T, H, D)."""
    k, v = (x.double().repeat_interleave(q.shape[0] // k.shape[0], dim=0) for x in (k, v))
    state = attend(
        q.double(),
        k,
        v,
        Scoring(q.shape[-1] ** -0.5, softcap),
        visible(0, q.shape[1], q.device, sliding_window, sink_tokens),
    )
    return (state if s_aux is None else with_sink(state, s_aux[:, None])).out.transpose(0, 1)


def chunks(total: int, size: int) -> list[int]:
    return [min(size, total - at) for at in range(0, total, size)]


# of the norm of the output
LIMIT = {torch.bfloat16: 5e-3, torch.float16: 8e-4, torch.float32: 1e-6}


@settings(max_examples=80)
@given(
    heads=st.sampled_from([(9, 3), (4, 4), (8, 1), (5, 1)]),
    dim=st.sampled_from([8, 24, 64, 80, 96, 128]),
    page=st.sampled_from([1, 4, 5, 16, 64]),
    dtype=st.sampled_from(DTYPES),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 100),
    sink_tokens=st.sampled_from([0, 1, 4, 21]),
    softcap=st.none() | st.just(5.0),
    learned=st.booleans(),
)
def test_a_token_gets_what_it_sees_however_its_row_is_cut(
    heads: tuple[int, int],
    dim: int,
    page: int,
    dtype: torch.dtype,
    cuts: list[int],
    window: int | None,
    sink_tokens: int,
    softcap: float | None,
    learned: bool,
) -> None:
    """Bit for bit what it gets as a row of its own, as in decoding."""
    s_aux = torch.linspace(-1, 1, heads[0]) if learned else None
    options = {"sliding_window": window, "sink_tokens": sink_tokens, "softcap": softcap, "s_aux": s_aux}
    total = sum(cuts)
    q, k, v = tokens(*heads, total, dim, dtype)
    alone = layer([1] * total, q, k, v, page=page, **options)
    assert torch.equal(layer(cuts, q, k, v, page=page, **options), alone)
    want = exact(q, k, v, **options)
    assert (alone.double() - want).norm() < LIMIT[dtype] * want.norm()


@pytest.mark.parametrize("window", [None, 600, 1100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_parts_of_a_long_row_are_merged_alike(dtype: torch.dtype, window: int | None) -> None:
    total = 2300
    q, k, v = tokens(2, 1, total, 16, dtype)
    whole = layer([total], q, k, v, sliding_window=window)
    assert torch.equal(layer([600, 1, 1399, 100, *[1] * 60, 140], q, k, v, sliding_window=window), whole)
    want = exact(q, k, v, sliding_window=window)
    assert (whole.double() - want).norm() < LIMIT[dtype] * want.norm()


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
@pytest.mark.parametrize("window", [None, 6, 20])
def test_a_broken_token_spoils_only_those_that_see_it(dtype: torch.dtype, bad: float, window: int | None) -> None:
    q, k, v = tokens(4, 2, 70, 24, dtype)
    clean = layer([70], q, k, v, sliding_window=window)
    v[1, 37] = k[1, 37] = bad
    broken = layer([70], q, k, v, sliding_window=window)
    end = 70 if window is None else 37 + window
    assert torch.equal(broken[:37], clean[:37])
    assert torch.equal(broken[end:], clean[end:])
    assert torch.equal(broken[37:, :2], clean[37:, :2])  # the other KV head's
    assert broken[37:end, 2:].isnan().any(dim=-1).all()


@pytest.mark.parametrize("window", [None, 50])
def test_threads_change_nothing(window: int | None) -> None:
    q, k, v = tokens(6, 2, 200, 32, torch.bfloat16)
    one = layer([200], q, k, v, sliding_window=window)
    torch.set_num_threads(3)
    try:
        assert torch.equal(layer([200], q, k, v, sliding_window=window), one)
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
