from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from backends.attention import PagedBatch, paged_attention  # noqa: E402
from backends.attention.forward import gather  # noqa: E402
from backends.attention.rows import single_row_plan  # noqa: E402
from backends.kv_cache import PagedKVCache  # noqa: E402
from entropic_ctl.errors import BadInputError  # noqa: E402
from entropic_ctl.pruning.base import PruningConfig  # noqa: E402
from entropic_ctl.signals import StepPlan  # noqa: E402

LAYER0 = SimpleNamespace(layer_idx=0)
TIGHT = PruningConfig(sink_pages=1, recent_pages=1, dense_layers=0)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """(H, n, D), (n_kv, T, D) -> (H, n, D) in float64; the last n tokens are the queries."""
    group, n, total = q.shape[0] // k.shape[0], q.shape[1], k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=0) for x in (k, v))
    s = q.double() @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    causal = torch.arange(total) <= torch.arange(total - n, total)[:, None]
    s = s.masked_fill(~(causal if mask is None else causal & mask), -torch.inf)
    return torch.softmax(s, -1) @ v


def poisoned(
    kv_heads: int, dim: int, pages: int, page: int, *, dtype: torch.dtype = torch.float32, poison: float = torch.nan
) -> PagedKVCache:
    cache = PagedKVCache(1, kv_heads, dim, pages, page, dtype)
    cache.k.fill_(poison)
    cache.v.fill_(poison)
    return cache


def step(cache: PagedKVCache, plan: StepPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> tuple:
    """One layer over packed (heads, T, D) tensors -> ((H, T, D), batch)."""
    layer = {key: options.pop(key) for key in ("sliding_window", "softcap", "s_aux") if key in options}
    batch = PagedBatch.from_plan(plan, cache, options.pop("pruning", TIGHT))
    for key, value in options.items():
        setattr(batch, key, value)
    out, none = paged_attention(LAYER0, q[None], k[None], v[None], None, paged=batch, **layer)
    assert none is None
    cache.seal(batch)
    return out[0].transpose(0, 1), batch


def decode_last(cache: PagedKVCache, pages, q, k, v, *theta: float, **options) -> tuple:
    """Prefill all tokens but the last, then decode the last (dense without ``theta``): ((H, 1, D), batch)."""
    n = k.shape[1] - 1
    step(cache, single_row_plan(0, n, pages, samples=False), q[:, :n], k[:, :n], v[:, :n])
    return step(cache, single_row_plan(n, 1, pages, theta_nats=sum(theta)), q[:, n:], k[:, n:], v[:, n:], **options)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a1_unused_slots_are_never_read(poison: float) -> None:
    cache = poisoned(2, 8, 6, 16, poison=poison)
    q, k, v = randn(4, 17, 8), randn(2, 17, 8, seed=1), randn(2, 17, 8, seed=2)
    out, _ = decode_last(cache, [3, 5], q, k, v)
    torch.testing.assert_close(out.double(), dense(q[:, -1:], k, v), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a1_a_pruned_page_full_of_nan_is_never_read(poison: float) -> None:
    cache = poisoned(1, 8, 6, 16, poison=poison)
    q, k, v = randn(2, 49, 8), randn(1, 49, 8, seed=1), randn(1, 49, 8, seed=2)
    q[:, -1] = 4.0
    k[:, 16:32] = -4.0  # page 1 of the sequence has next to no mass
    n, pages = 48, [3, 5, 0, 2]
    step(cache, single_row_plan(0, n, pages, samples=False), q[:, :n], k[:, :n], v[:, :n])
    cache.k[0, 5] = cache.v[0, 5] = poison
    out, batch = step(cache, single_row_plan(n, 1, pages, theta_nats=1e-3), q[:, n:], k[:, n:], v[:, n:])
    expected = dense(q[:, -1:], k, v, torch.arange(49) // 16 != 1)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    assert batch.statistics().kept_fraction[0] == 0.75


def test_a3_windowed_layers_with_sinks_match_masked_dense_attention() -> None:
    total = 208
    q, k, v = randn(2, total, 8), randn(1, total, 8, seed=1), randn(1, total, 8, seed=2)
    cache, pages = poisoned(1, 8, 13, 16), list(range(12, -1, -1))
    step(cache, single_row_plan(0, 192, pages), q[:, :192], k[:, :192], v[:, :192], sliding_window=64, sink_tokens=4)
    for n in range(193, total + 1):
        plan = single_row_plan(n - 1, 1, pages, theta_nats=0.5)
        now = slice(n - 1, n)
        out, batch = step(cache, plan, q[:, now], k[:, now], v[:, now], sliding_window=64, sink_tokens=4)
        j = torch.arange(n)
        expected = dense(q[:, now], k[:, :n], v[:, :n], (j >= n - 64) | (j < 4))
        torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
        assert batch.kv_bytes == (64 + 4) * cache.token_bytes  # what it sees, whatever else lies in those pages


@pytest.mark.parametrize("theta", [0.0, 4.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(48, 2), (40, 2), (28, 4), (24, 8)])
def test_a4_every_query_head_reads_its_own_kv_head(heads: int, kv_heads: int, theta: float) -> None:
    n = 70
    q, k = randn(heads, n, 8) * 0.1, randn(kv_heads, n, 8, seed=1)
    v = torch.arange(kv_heads, dtype=torch.float32)[:, None, None].expand(kv_heads, n, 8)
    out, batch = decode_last(poisoned(kv_heads, 8, 8, 16), [7, 1, 2, 3, 4], q, k, v, theta)
    expected = torch.arange(heads) // (heads // kv_heads)
    torch.testing.assert_close(out[:, 0, 0], expected.float(), atol=1e-5, rtol=1e-5)
    assert (batch.statistics().kept_fraction[0] < 1) == (theta > 0)


def test_a4_33_heads_over_2_are_refused() -> None:
    with pytest.raises(BadInputError, match="33"):
        step(poisoned(2, 8, 1, 16), single_row_plan(0, 3, [0]), randn(33, 3, 8), randn(2, 3, 8), randn(2, 3, 8))


@pytest.mark.parametrize("dim", [40, 80, 96, 120])
def test_a6_head_dims_that_are_no_power_of_two(dim: int) -> None:
    q, k, v = (randn(h, 60, dim, seed=h, dtype=torch.float16) for h in (4, 2, 2))
    expected = dense(q[:, -1:], k, v)
    for theta in (0.0, 1e-9):
        out, _ = decode_last(poisoned(2, dim, 4, 16, dtype=torch.float16), [0, 1, 2, 3], q, k, v, theta)
        torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)


def rows_plan(context, n_tokens, theta, table) -> StepPlan:
    rows = len(context)
    none = np.empty(0, np.int64)
    return StepPlan(
        step=0,
        now_s=0.0,
        ids=np.arange(rows),
        slots=np.arange(rows)[::-1].copy(),
        context=np.array(context),
        n_tokens=np.array(n_tokens),
        samples=np.ones(rows, np.bool_),
        greedy=np.ones(rows, np.bool_),
        theta_nats=np.array(theta, np.float64),
        n_draft=np.zeros(rows, np.int64),
        paused=none,
        preempted=none,
        rejected=(),
        block_table=np.asarray(table, np.int32)[::-1],
        allocated=np.empty((0, 3), np.int32),
    )


@given(st.integers(0, 2**31 - 1), st.sampled_from([1, 3, 16]), st.booleans())
@settings(max_examples=25)
def test_ragged_batches_and_any_chunking_equal_dense_attention(seed: int, page: int, window: bool) -> None:
    """Rows of different lengths, packed, in random chunks over shuffled pages, slots not in row order."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 4))
    total = rng.integers(1, 40, rows)
    per_row = 40 // page + 1
    table = rng.permutation(rows * per_row).reshape(rows, per_row)
    cache = poisoned(2, 4, rows * per_row, page)
    q, k, v = ([randn(h, int(n), 4, seed=seed % 1000 + 7 * h + i) for i, n in enumerate(total)] for h in (4, 2, 2))
    options = {"sliding_window": 5} if window else {}
    done = np.zeros(rows, np.int64)
    while (done < total).any():
        live = np.flatnonzero(done < total)
        n = np.array([rng.integers(1, total[r] - done[r] + 1) for r in live])
        part = [[x[r][:, done[r] : done[r] + m] for r, m in zip(live, n, strict=True)] for x in (q, k, v)]
        plan = rows_plan(done[live], n, np.zeros(len(live)), table[live])
        out, batch = step(cache, plan, *(torch.cat(x, dim=1) for x in part), **options)
        assert batch.cu_tokens.tolist() == [0, *np.cumsum(n)]
        assert batch.last_index.tolist() == (np.cumsum(n) - 1).tolist()
        assert batch.positions.tolist() == [
            p for r, m in zip(live, n, strict=True) for p in range(done[r], done[r] + m)
        ]
        for i, r in enumerate(live):
            end = done[r] + n[i]
            j, p = torch.arange(end), torch.arange(done[r], end)[:, None]
            mask = j > p - 5 if window else None
            expected = dense(q[r][:, done[r] : end], k[r][:, :end], v[r][:, :end], mask)
            got = out[:, batch.cu_tokens[i] : batch.cu_tokens[i + 1]]
            torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-5)
        done[live] += n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"s_aux": torch.tensor([0.5, 1.0, -torch.inf, 2.0])}])
def test_a_tiny_budget_equals_dense_and_layer_options_hold_in_both(dtype: torch.dtype, options: dict) -> None:
    q, k, v = (randn(h, 100, 16, seed=h, dtype=dtype) for h in (4, 2, 2))
    k[:, 20:40] *= 8
    pages = list(range(7))
    a, _ = decode_last(poisoned(2, 16, 7, 16, dtype=dtype), pages, q, k, v, 0.0, **options)
    b, batch = decode_last(poisoned(2, 16, 7, 16, dtype=dtype), pages, q, k, v, 1e-9, **options)
    c, loose = decode_last(poisoned(2, 16, 7, 16, dtype=dtype), pages, q, k, v, 1.0, audit=True, **options)
    rounding = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(a.float(), b.float(), atol=rounding, rtol=rounding)
    assert batch.statistics().certificate_max[0] <= 1e-9
    assert loose.statistics().kept_fraction[0] < 1
    assert (loose.audits[0].true_mass <= loose.audits[0].certified_mass).all()
    assert (a.float() - c.float()).abs().max() > rounding


@pytest.mark.parametrize("seed", range(4))
def test_pruned_rows_of_different_lengths_in_one_step_equal_their_solo_runs(seed: int) -> None:
    """Five decode rows, one dense, one too short to prune, with unlike budgets, lengths and page lists."""
    rng = np.random.default_rng(seed)
    total, theta, per_row = [90, 30, 200, 64, 150], [0.3, 0.5, 0.02, 0.0, 3.0], 13
    table = rng.permutation(5 * per_row).reshape(5, per_row)
    q, k, v = ([randn(h, n, 8, seed=10 * seed + h + i) * 2 for i, n in enumerate(total)] for h in (4, 2, 2))
    q[4][:, -1] *= 0  # uniform attention
    cache = poisoned(2, 8, 5 * per_row, 16)
    for r, n in enumerate(total):
        past = slice(0, n - 1)
        step(cache, single_row_plan(0, n - 1, table[r], samples=False), q[r][:, past], k[r][:, past], v[r][:, past])
    solo = []
    for r, n in enumerate(total):
        plan = single_row_plan(n - 1, 1, table[r], theta_nats=theta[r])
        solo.append(step(cache, plan, q[r][:, n - 1 :], k[r][:, n - 1 :], v[r][:, n - 1 :], audit=True))
    together = [torch.cat([x[r][:, n - 1 :] for r, n in enumerate(total)], dim=1) for x in (q, k, v)]
    plan = rows_plan([n - 1 for n in total], [1] * 5, theta, table)
    out, batch = step(cache, plan, *together, audit=True, want_output_error=True)
    stats = batch.statistics()
    assert [a.row for a in batch.audits] == [0, 2, 4]
    for r, (alone, its) in enumerate(solo):
        torch.testing.assert_close(out[:, r : r + 1], alone, atol=1e-6, rtol=1e-5)
        mine = its.statistics()
        for name in ("kept_fraction", "pruned_mass_mean", "pruned_mass_max", "certificate_max"):
            assert getattr(stats, name)[r] == pytest.approx(getattr(mine, name)[0], rel=1e-5)
        for a, b in zip(its.audits, [x for x in batch.audits if x.row == r], strict=True):
            np.testing.assert_array_equal(a.kept, b.kept)
            assert (b.true_mass <= b.certified_mass).all()
    assert (stats.output_error_max[[0, 2, 4]] > 0).all()
    assert (stats.output_error_max[[1, 3]] == 0).all()
    scored = sum(row.candidates.shape[0] for row in batch.rows)
    alone_bytes = sum(its.statistics().kv_bytes for _, its in solo)
    assert stats.kv_bytes == pytest.approx(alone_bytes + scored * cache.value_page_bytes)


@pytest.mark.parametrize("poison", [0.0, torch.nan])
@pytest.mark.parametrize("wanted", [([], [1]), ([3], [1, 4]), ([1, 2, 3, 4, 5], [])])
def test_a5_kv_heads_that_keep_unlike_numbers_of_pages_down_to_none(wanted: tuple, poison: float) -> None:
    """The empty state merges away, and neither dropped pages nor the padding of the shorter list is ever a value."""
    q, k, v = torch.ones(2, 100, 8), randn(2, 100, 8, seed=1) * 0.1, randn(2, 100, 8, seed=2)
    page = torch.arange(100) // 16
    cache, pages = poisoned(2, 8, 7, 16), torch.tensor([6, 5, 4, 3, 2, 1, 0])
    keep = [(page == 0) | (page == 6) | torch.isin(page, torch.tensor(w, dtype=torch.int64)) for w in wanted]
    for h in range(2):
        k[h, ~keep[h]] = -30.0
    step(cache, single_row_plan(0, 99, pages, samples=False), q[:, :99], k[:, :99], v[:, :99])
    for h in range(2):
        gone = pages[[b for b in range(1, 6) if b not in wanted[h]]]
        cache.k[0, gone, h] = cache.v[0, gone, h] = poison
    batch = PagedBatch.from_plan(single_row_plan(99, 1, pages, theta_nats=0.01), cache, TIGHT)
    out, _ = paged_attention(LAYER0, q[None, :, 99:], k[None, :, 99:], v[None, :, 99:], None, paged=batch)
    for h in range(2):
        expected = dense(q[h : h + 1, 99:], k[h : h + 1], v[h : h + 1], keep[h])
        torch.testing.assert_close(out[0, :, h].double(), expected[0], atol=1e-6, rtol=1e-5)
    assert batch.statistics().kept_fraction[0] == pytest.approx((4 + len(wanted[0]) + len(wanted[1])) / 14)


def test_a_row_that_overflows_is_dense_and_leaves_its_neighbour_alone() -> None:
    q, k, v = randn(2, 200, 8), randn(1, 200, 8, seed=1), randn(1, 200, 8, seed=2)
    cache, table, total = poisoned(1, 8, 26, 16), np.arange(26).reshape(2, 13), [100, 200]
    for r, n in enumerate(total):
        past = slice(0, n - 1)
        step(cache, single_row_plan(0, n - 1, table[r], samples=False), q[:, past], k[:, past], v[:, past])
    now = [n - 1 for n in total]
    q[:, now[0]] = torch.inf
    plan = rows_plan(now, [1, 1], [0.5, 0.5], table)
    out, batch = step(cache, plan, q[:, now], k[:, now], v[:, now])
    stats = batch.statistics()
    assert stats.kept_fraction[0] == 1.0
    assert stats.pruned_mass_max[0] == 0.0
    assert 0 < stats.kept_fraction[1] < 1
    assert out[:, 1].isfinite().all()


def test_pruned_output_is_dense_attention_over_the_kept_pages_and_its_error_is_bounded() -> None:
    n = 200
    q, k, v = randn(6, n, 16) * 2, randn(2, n, 16, seed=1), randn(2, n, 16, seed=2) + 3
    cache = poisoned(2, 16, 13, 16)
    pages = np.random.default_rng(0).permutation(13).tolist()
    out, batch = decode_last(cache, pages, q, k, v, 0.2, audit=True, want_output_error=True)
    kept = torch.from_numpy(batch.audits[0].kept)
    assert (~kept).sum() > 0
    full, worst = dense(q[:, -1:], k, v), 0.0
    for j in range(2):
        heads = slice(3 * j, 3 * j + 3)
        mask = kept[j].repeat_interleave(16)[:n]
        expected = dense(q[heads, -1:], k[j : j + 1], v[j : j + 1], mask)
        torch.testing.assert_close(out[heads].double(), expected, atol=1e-5, rtol=1e-5)
        worst = max(worst, float((full[heads] - expected).norm(dim=-1).max()))
    stats = batch.statistics()
    assert 0 < worst <= stats.output_error_max[0] + 1e-5
    assert stats.certificate_max[0] <= 0.2
    assert stats.pruned_mass_max[0] == batch.audits[0].certified_mass.max()
    assert stats.pruned_mass_mean[0] == pytest.approx(batch.audits[0].certified_mass.mean())
    assert stats.kept_fraction[0] == batch.audits[0].kept.mean()


def test_bytes_read_are_the_shadow_of_the_candidates_plus_the_kept_pages() -> None:
    n = 100  # 7 pages: the sink, 5 candidates, the page being written (4 tokens)
    q, k, v = randn(2, n, 8), randn(1, n, 8, seed=1), randn(1, n, 8, seed=2)
    _, batch = decode_last(poisoned(1, 8, 7, 16), list(range(7)), q, k, v, 0.3, audit=True)
    kept = int(batch.audits[0].kept.sum())
    assert 2 < kept < 7
    cache = batch.cache
    tokens = (kept - 1) * 16 + 4
    fixed = tokens * cache.token_bytes + 5 * cache.score_page_bytes
    low_planes = (batch.statistics().kv_bytes - fixed) / cache.low_page_bytes
    assert low_planes.is_integer()
    assert 7 - kept <= low_planes < 5  # dropped by both planes; some pages are read at once, none dropped by one
    _, full = decode_last(poisoned(1, 8, 7, 16), list(range(7)), q, k, v)
    assert full.statistics().kv_bytes == n * cache.token_bytes


def test_statistics_of_dense_rows_are_one_and_zero() -> None:
    q, k, v = randn(2, 40, 8), randn(1, 40, 8, seed=1), randn(1, 40, 8, seed=2)
    for theta, changes in ((0.0, {}), (0.5, {"recent_pages": 9}), (0.5, {"dense_layers": 1}), (0.5, {"sink_pages": 3})):
        rule = PruningConfig(**{"sink_pages": 1, "recent_pages": 1, "dense_layers": 0, **changes})
        _, batch = decode_last(poisoned(1, 8, 3, 16), [0, 1, 2], q, k, v, theta, pruning=rule)
        stats = batch.statistics()
        assert [stats.kept_fraction[0], stats.pruned_mass_mean[0], stats.pruned_mass_max[0]] == [1.0, 0.0, 0.0]
        assert stats.certificate_max[0] == 0.0


def test_prefill_is_exact_whatever_the_budget_even_a_chunk_of_one_token() -> None:
    cache = poisoned(1, 8, 7, 16)
    cache.sealed[:6] = True
    for n, samples, theta in ((1, False, 0.0), (2, True, 0.0), (1, True, 0.4)):
        plan = single_row_plan(100 - n, n, range(7), theta_nats=0.4, samples=samples)
        assert PagedBatch.from_plan(plan, cache, TIGHT).rows[0].theta_nats == theta


def test_pages_without_a_seal_are_read_in_full() -> None:
    q, k, v = randn(2, 100, 8), randn(1, 100, 8, seed=1), randn(1, 100, 8, seed=2)
    cache = poisoned(1, 8, 7, 16)
    k[0, 50, 3] = 1e5  # page 3 of the sequence cannot be bounded in float16
    _, batch = decode_last(cache, list(range(7)), q, k, v, 5.0, audit=True)
    assert batch.audits[0].kept[0, 3]
    assert not batch.audits[0].kept.all()


def test_group_mean_reads_no_more_than_union() -> None:
    q, k, v = randn(6, 400, 16) * 1.5, randn(2, 400, 16, seed=1), randn(2, 400, 16, seed=2)
    kept = {}
    for selection in ("union", "group_mean"):
        rule = PruningConfig(sink_pages=1, recent_pages=1, dense_layers=0, selection=selection)
        _, batch = decode_last(poisoned(2, 16, 25, 16), list(range(25)), q, k, v, 0.1, pruning=rule, audit=True)
        kept[selection] = batch.statistics().kept_fraction[0]
        assert (batch.audits[0].true_mass <= batch.audits[0].certified_mass).all()
    assert kept["group_mean"] < kept["union"]


def test_a_head_that_loses_everything_is_certified_and_audited_as_one() -> None:
    """Under the group's mean one of three heads may lose all its mass; the audit's own rounding must not exceed 1."""
    rule = PruningConfig(sink_pages=0, recent_pages=1, dense_layers=0, selection="group_mean")
    for seed in range(12):
        q, k = torch.zeros(3, 49, 4), torch.zeros(1, 49, 4)
        q[0, :, 0], q[1:, :, 1] = 2.0, 2.0
        k[0, :48, 0] = randn(48, seed=seed)
        k[0, 48] = torch.tensor([-60.0, 60.0, 0.0, 0.0])
        _, batch = decode_last(poisoned(1, 4, 4, 16), [0, 1, 2, 3], q, k, k, 1.0, pruning=rule, audit=True)
        (audit,) = batch.audits
        assert not audit.kept[0, :3].any()
        assert audit.certified_mass[0] == 1.0
        assert (audit.true_mass <= audit.certified_mass).all()


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        ({"attention_mask": torch.zeros(1)}, "attention_mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"output_attentions": True}, "output_attentions"),
        ({"paged": None}, "paged=PagedBatch"),
        ({"key": randn(1, 1, 3, 4)}, "fit the cache"),
    ],
)
def test_unsupported_calls_are_refused(options: dict, needle: str) -> None:
    cache = poisoned(1, 8, 1, 16)
    batch = PagedBatch.from_plan(single_row_plan(0, 3, [0]), cache, TIGHT)
    call = {"query": randn(1, 2, 3, 8), "key": randn(1, 1, 3, 8), "value": randn(1, 1, 3, 8), "attention_mask": None}
    with pytest.raises(BadInputError) as caught:
        paged_attention(LAYER0, **{**call, "paged": batch, **options})
    assert needle in str(caught.value)


def test_gather_cuts_off_unused_slots() -> None:
    pool = torch.arange(3 * 2 * 4, dtype=torch.float32).reshape(3, 1, 2, 4)
    assert torch.equal(gather(pool, torch.tensor([2, 0]), 3)[0, :, 0], torch.tensor([16.0, 20.0, 0.0]))


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sliding_window": 5}])
@pytest.mark.parametrize("context", [0, 6])
@pytest.mark.parametrize("which", [1, 2])
def test_a_bad_token_of_a_chunk_spoils_only_those_that_see_it(options: dict, context: int, which: int) -> None:
    """A NaN key or value is masked for the tokens before it, and those end up in pages that other requests share."""
    n, bad = 20, context + 7
    qkv = [randn(h, n, 8, seed=h) for h in (4, 2, 2)]
    outputs = []
    for poison in (False, True):
        q, k, v = (x.clone() for x in qkv)
        if poison:
            (q, k, v)[which][:, bad] = torch.nan
        cache, pages = poisoned(2, 8, 5, 4), range(5)
        if context:
            head = (x[:, :context] for x in (q, k, v))
            step(cache, single_row_plan(0, context, pages, samples=False), *head, **options)
        rest = (x[:, context:] for x in (q, k, v))
        outputs.append(step(cache, single_row_plan(context, n - context, pages), *rest, **options)[0])
    clean, spoilt = outputs
    sees = torch.arange(context, n) >= bad
    if "sliding_window" in options:
        sees &= torch.arange(context, n) < bad + 5
    torch.testing.assert_close(spoilt[:, ~sees], clean[:, ~sees], atol=1e-6, rtol=1e-5)
    assert spoilt[:, sees].isnan().all()
