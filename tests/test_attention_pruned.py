"""The certificate against the truth: random and adversarial keys, queries, dtypes; A2 on a transformers model."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from backends.attention import PagedBatch, register  # noqa: E402
from backends.attention.audit import audit_certificate  # noqa: E402
from backends.attention.pruned import page_bounds, pruned_decode, true_page_mass  # noqa: E402
from backends.attention.reference import Scoring  # noqa: E402
from backends.attention.rows import single_row_plan  # noqa: E402
from backends.kv_cache import PagedKVCache  # noqa: E402
from backends.models import wrap  # noqa: E402
from entropic_ctl.errors import BadInputError  # noqa: E402
from entropic_ctl.pruning.base import PruningConfig  # noqa: E402

KEYS = {
    "normal": lambda x: x,
    "constant pages": lambda x: x[:, :, :1].expand_as(x).clone(),
    "constant everywhere": lambda x: x[:1, :, :1].expand_as(x).clone(),
    "constant and large": lambda x: 100 + x[:1, :1, :1].expand_as(x).clone(),
    "common offset": lambda x: 20.0 + 0.1 * x,
    "outlier channel": lambda x: x * torch.where(torch.arange(x.shape[-1]) == 1, 60.0, 0.5),
    "tiny": lambda x: x * 1e-5,
    "heavy tails": lambda x: x**3,
}


@pytest.mark.parametrize("keys", KEYS)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    shape=st.tuples(st.sampled_from([8, 40, 64]), st.sampled_from([0.3, 1.0, 4.0])),
    theta=st.sampled_from([1e-6, 1e-3, 0.01, 0.2, 2.0]),
    options=st.tuples(st.sampled_from([None, None, 5.0]), st.integers(0, 2**31 - 1)),
)
@settings(max_examples=15)
def test_no_true_mass_exceeds_its_certificate(keys, dtype, shape, theta, options) -> None:
    """Page intervals hold in float64, the certificate bounds every head's true mass, and the budget is kept."""
    (dim, size), (softcap, seed) = shape, options
    kv_heads, group, pages, page = 2, 3, 9, 16
    g = torch.Generator().manual_seed(seed)
    cache = PagedKVCache(1, kv_heads, dim, pages, page, dtype)
    cache.k[0] = KEYS[keys](torch.randn(pages, kv_heads, page, dim, generator=g, dtype=torch.float64)).to(dtype)
    cache.v[0] = torch.randn(cache.v[0].shape, generator=g).to(dtype)
    cache.seal_pages(np.arange(pages - 1))
    q = (size * torch.randn(kv_heads * group, dim, generator=g)).to(dtype)
    scoring = Scoring(dim**-0.5, softcap)
    length = pages * page - int(torch.randint(0, page, (1,), generator=g))

    table = torch.arange(pages - 1)
    lower, upper = page_bounds(cache, 0, table, q.float().reshape(1, kv_heads, group, dim), scoring)
    k = cache.k[0].double().repeat_interleave(group, dim=1)
    s = torch.einsum("hd,bhtd->hbt", q.double(), k) * scoring.scale
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    true = torch.logsumexp(s, -1)[:, :-1].numpy().T
    assert (lower <= true).all()
    assert (true <= upper).all()

    rule = PruningConfig(sink_pages=0, recent_pages=1, dense_layers=0)
    batch = PagedBatch.from_plan(single_row_plan(length - 1, 1, range(pages), theta_nats=theta), cache, rule)
    batch.audit = True
    assert batch.rows[0].candidates.tolist() == list(range(pages - 1))
    pruned_decode(batch, 0, q[None], scoring)
    audit = batch.audits[0]
    assert (audit.true_mass <= audit.certified_mass).all()
    assert (audit.certified_mass[audit.true_mass > 0] < 1).all()
    assert batch.statistics().certificate_max[0] <= theta
    mass = true_page_mass(cache, 0, batch.rows[0], q, scoring)
    np.testing.assert_allclose(mass.sum(axis=1), 1.0, rtol=1e-12)


def test_bounds_are_tight_for_ordinary_keys() -> None:
    """8-bit codes: the interval is a few hundredths of a nat wide, not a few tenths."""
    g = torch.Generator().manual_seed(0)
    cache = PagedKVCache(1, 1, 64, 50, 16, torch.float32)
    cache.k[0] = torch.randn(cache.k[0].shape, generator=g)
    cache.v.zero_()
    cache.seal_pages(np.arange(50))
    lower, upper = page_bounds(cache, 0, torch.arange(50), torch.randn(1, 1, 3, 64, generator=g), Scoring(0.125))
    assert 0.01 < (upper - lower).mean() < 0.12


def test_a_query_that_overflows_reads_everything() -> None:
    cache = PagedKVCache(1, 1, 4, 3, 4, torch.float32)
    cache.k.fill_(2.0)
    cache.v.fill_(1.0)
    cache.seal_pages(np.arange(2))
    batch = PagedBatch.from_plan(single_row_plan(9, 1, range(3), theta_nats=1.0), cache, PruningConfig(dense_layers=0))
    assert batch.rows[0].theta_nats == 0.0  # all three pages are protected
    rule = PruningConfig(sink_pages=0, recent_pages=1, dense_layers=0)
    batch = PagedBatch.from_plan(single_row_plan(9, 1, range(3), theta_nats=1.0), cache, rule)
    pruned_decode(batch, 0, torch.full((1, 2, 4), torch.inf), Scoring(0.5))
    assert batch.statistics().kept_fraction[0] == 1.0
    assert batch.statistics().certificate_max[0] == 0.0


def test_reduced_precision_products_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedKVCache(1, 1, 4, 3, 4, torch.float32)
    pruned, dense = single_row_plan(9, 1, range(3), theta_nats=1.0), single_row_plan(9, 1, range(3))
    try:
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            with pytest.raises(BadInputError, match="fp32_precision"):
                PagedBatch.from_plan(pruned, cache, PruningConfig())
            PagedBatch.from_plan(dense, cache, PruningConfig())
    finally:
        torch.set_float32_matmul_precision("highest")
    PagedBatch.from_plan(pruned, cache, PruningConfig())
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    with pytest.raises(BadInputError, match="ONEDNN"):
        PagedBatch.from_plan(pruned, cache, PruningConfig())


def tiny(heads: int, kv_heads: int, layers: int = 1, attention: str | None = None):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16 * heads,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1024,
        attn_implementation=attention or register(),
        initializer_range=0.3,
    )
    return transformers.LlamaForCausalLM(config).eval()


def run(model, ids, plan, cache, rule):
    batch = PagedBatch.from_plan(plan, cache, rule)
    batch.audit = True
    with torch.inference_mode():
        out = model(
            input_ids=ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.last_index,
            paged=batch,
        )
    cache.seal(batch)
    return out.logits[0], batch


def test_a2_decode_after_pruning_sits_at_its_own_position() -> None:
    """300 tokens cached, 128 of them kept, one more decoded: position 300, dense attention over what is kept."""
    model, dense = tiny(1, 1), tiny(1, 1, attention="eager")
    dense.load_state_dict(model.state_dict())
    ids = torch.randint(0, 64, (301,), generator=torch.Generator().manual_seed(4))
    cache, pages = PagedKVCache(1, 1, 16, 24, 16, torch.float32), np.random.default_rng(1).permutation(24)[:19]
    rule = PruningConfig(sink_pages=1, recent_pages=1, dense_layers=0)
    run(model, ids[:300], single_row_plan(0, 300, pages, samples=False), cache, rule)

    kept, theta, low, high = 0, 0.1, 0.0, 10.0
    for _ in range(60):  # sets are nested in theta, so bisection finds 8 whole pages of the past besides the last one
        theta = (low + high) / 2
        logits, batch = run(model, ids[300:], single_row_plan(300, 1, pages, theta_nats=theta), cache, rule)
        kept = int(batch.audits[0].kept[0, :18].sum())
        if kept == 8:
            break
        low, high = (theta, high) if kept > 8 else (low, theta)
    assert kept * 16 == 128
    assert batch.positions.tolist() == [300]
    mask = torch.full((301, 301), 0.0).masked_fill(torch.ones(301, 301).triu(1).bool(), -torch.inf)
    mask[300, ~torch.from_numpy(batch.audits[0].kept[0]).repeat_interleave(16)[:301]] = -torch.inf
    with torch.inference_mode():
        expected = dense(input_ids=ids[None], attention_mask=mask[None, None]).logits[0, -1]
        unpruned = dense(input_ids=ids[None]).logits[0, -1]
    assert (logits[0] - expected).abs().max() < 1e-4
    assert (logits[0] - unpruned).abs().max() > 1e-3


def test_a_transformers_model_with_ragged_rows_equals_its_own_dense_forward() -> None:
    model, dense = tiny(4, 2, layers=2), tiny(4, 2, layers=2, attention="sdpa")
    dense.load_state_dict(model.state_dict())
    ids = torch.randint(0, 64, (50,), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        expected = dense(input_ids=ids[None]).logits[0]
    cache = PagedKVCache(2, 2, 16, 4, 16, torch.float32)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    for start, stop in ((0, 7), (7, 8), (8, 40), (40, 49), (49, 50)):
        plan = single_row_plan(start, stop - start, [2, 0, 3, 1])
        logits, _ = run(model, ids[start:stop], plan, cache, PruningConfig())
        torch.testing.assert_close(logits[-1], expected[stop - 1], atol=2e-5, rtol=1e-4)


def test_audit_on_a_small_model() -> None:
    model = wrap(tiny(4, 2, layers=2), None)
    ids = torch.randint(0, 64, (300,), generator=torch.Generator().manual_seed(4)).tolist()
    rule = PruningConfig(recent_pages=2, dense_layers=1)
    got = audit_certificate(model, ids, 0.05, positions=3, pruning=rule, chunk=100)
    assert got.holds
    assert got.heads == 3 * 1 * 4
    assert got.context == 300
    assert 0 < got.kept_fraction < 1
    assert 1 <= got.ratio < 1.5
    assert got.kv_bytes < got.dense_kv_bytes * 1.3
    for bad in ({"theta_nats": 0.0}, {"theta_nats": 0.1, "positions": 300}):
        with pytest.raises(BadInputError):
            audit_certificate(model, ids, **bad)
    with pytest.raises(BadInputError, match="no page"):
        audit_certificate(model, ids[:40], 0.1, positions=1)


@pytest.mark.model
def test_certificate_holds_and_is_tight_on_real_text_in_the_real_model() -> None:
    """The command ``entropic bench certificate`` does the same over 4,096 tokens."""
    fetch = pytest.importorskip("backends.fetch")
    models, prompts = pytest.importorskip("backends.models"), pytest.importorskip("backends.prompts")
    if not fetch.default_folder().is_dir():
        pytest.skip("the default model is not fetched: run `entropic fetch`")
    loaded = models.load()
    ids = prompts.document_ids(loaded, 1024)
    got = audit_certificate(loaded, ids, 0.01, positions=2)
    assert got.context == 1024
    assert got.heads == 2 * 28 * 9
    assert got.holds
    assert got.ratio <= 1.25
    assert got.kept_fraction < 0.85
