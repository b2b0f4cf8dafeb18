from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from backends.attention import PagedBatch  # noqa: E402
from backends.attention.forward import gather  # noqa: E402
from backends.attention.rows import single_row_plan  # noqa: E402
from backends.kv_cache import PagedKVCache, pack, quantise, unpack  # noqa: E402
from entropic_ctl.errors import BadInputError  # noqa: E402
from entropic_ctl.pruning.base import PruningConfig  # noqa: E402
from sim.cost import shadow_shares  # noqa: E402
from sim.model_shapes import ModelShape  # noqa: E402

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def keys_of(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    return {
        "normal": x,
        "constant": x[..., :1, :].expand(shape).clone(),
        "offset": 37.3 + 0.01 * x,
        "far offset": 3000.0 + x,
        "tiny": x * 1e-7,
        "subnormal": x * 1e-41,
        "outlier channel": x * torch.where(torch.arange(shape[-1]) == 0, 900.0, 1.0),
        "two values": torch.where(x > 0, 1.0, 1.0 + 2.0**-7).double(),
        "zero": torch.zeros(shape, dtype=torch.float64),
    }[kind]


KINDS = ["normal", "constant", "offset", "far offset", "tiny", "subnormal", "outlier channel", "two values", "zero"]


@given(st.sampled_from(KINDS), st.sampled_from(DTYPES), st.integers(0, 2**31 - 1))
def test_the_stored_error_bounds_every_token_of_every_channel(kind: str, dtype: torch.dtype, seed: int) -> None:
    keys = keys_of(kind, (3, 16, 8), seed).to(dtype)
    got = quantise(keys)
    assert got.codes.dtype == got.weight.dtype == torch.uint8
    assert got.centre.dtype == torch.float16
    step, error = got.step.double(), got.error.double()
    unit, m = got.weight.double() * step[:, None], got.centre.double()
    away = (keys.double() - (m[:, None] + unit[:, None] * (got.codes.double() - 128.0))).abs()
    reach = (m.abs() + 128.0 * unit).amax(-1)
    room = reach * 2.0**-50  # of the arithmetic here; exact rationals: tests/test_proofs_pruning.py
    assert (away <= (got.weight.double() * error[:, None] + room[:, None])[:, None]).all()
    assert (error <= 0.502 * step + 2.0**-45 * reach + 2.0**-140).all()  # and it is not loose
    coarse = (m[:, None] + unit[:, None] * ((got.codes.double() // 16) * 16 + 7.5 - 128.0)).sub(keys.double()).abs()
    allowed = got.weight.double() * (error + 7.5 * step)[:, None] + room[:, None]
    assert (coarse <= allowed[:, None]).all()
    radius = torch.maximum(keys.double().amax(-2) - m, m - keys.double().amin(-2)).amax(-1)
    assert (step <= radius / (255 * 127.5) * (1 + 2.0**-22) + 2.0**-148).all()


@given(st.sampled_from(KINDS), st.sampled_from([1, 5, 16, 20, 33]), st.sampled_from([1, 8, 40, 67]), st.integers(0, 99))
def test_what_is_packed_comes_back_and_the_first_look_sees_the_high_half(
    kind: str, page: int, dim: int, seed: int
) -> None:
    got = quantise(keys_of(kind, (2, 3, page, dim), seed))
    record, low = pack(got)
    for x, y in zip(unpack(record, low, page, dim), got, strict=True):
        assert torch.equal(x, y)
    assert torch.equal(unpack(record, None, page, dim).codes, got.codes >> 4 << 4)


def test_channels_that_float16_holds_exactly_have_no_error() -> None:
    got = quantise(torch.full((16, 2), 1.25, dtype=torch.bfloat16))
    assert float(got.step) == float(got.error) == 0.0
    assert got.centre.tolist() == [1.25, 1.25]


@pytest.mark.parametrize("dtype", DTYPES)
def test_key_norm_and_value_radius_are_upper_bounds(dtype: torch.dtype) -> None:
    cache = PagedKVCache(2, 3, 8, 5, 4, dtype)
    g = torch.Generator().manual_seed(1)
    cache.k.copy_(torch.randn(cache.k.shape, generator=g))
    cache.v.copy_(5 + torch.randn(cache.v.shape, generator=g))
    cache.seal_pages(np.array([4, 1], np.int64))
    assert cache.sealed.tolist() == [False, True, False, False, True]
    shadow = cache.shadow
    for page in (1, 4):
        norms = cache.k[:, page].double().norm(dim=-1)
        away = (cache.v[:, page].double() - shadow.value_centre[:, page].double().unsqueeze(-2)).norm(dim=-1)
        keys = unpack(shadow.record[:, page], shadow.low[:, page], 4, 8)
        reach = (keys.centre.double().abs() + 128 * keys.weight.double() * keys.step.double().unsqueeze(-1)).norm(
            dim=-1
        )
        for stored, top in (
            (keys.norm, torch.maximum(norms.amax(dim=-1), reach)),
            (shadow.value_radius[:, page], away.amax(dim=-1)),
        ):
            assert (stored.double() >= top).all()
            assert (stored.double() <= top * (1 + 1e-6)).all()


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("where", "value"), [("k", float("nan")), ("v", float("inf")), ("k", 7e4), ("v", -65536.0)])
def test_a_page_that_cannot_be_bounded_is_never_sealed(
    where: str, value: float, dtype: torch.dtype, kernels: str
) -> None:
    """65,504 is the largest float16; in bfloat16 it would be 65,536."""
    cache = PagedKVCache(2, 1, 4, 3, 4, dtype, kernels=kernels)
    cache.k.zero_()
    cache.v.zero_()
    getattr(cache, where)[1, 2, 0, 3, 1] = value  # one value in one layer
    cache.seal_pages(np.array([0, 2], np.int64))
    assert cache.sealed.tolist() == [True, False, False]


def batch_of(cache: PagedKVCache, context: int, n: int, pages: list[int]) -> PagedBatch:
    return PagedBatch.from_plan(single_row_plan(context, n, pages), cache, PruningConfig())


@given(st.integers(1, 40), st.integers(0, 2**31 - 1))
def test_tokens_written_in_chunks_come_back_in_order_and_full_pages_are_sealed(total: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache = PagedKVCache(1, 2, 3, 16, 4, torch.float32)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    pages = rng.permutation(16)[: -(-total // 4)].tolist()
    k, v = (torch.from_numpy(rng.normal(size=(2, total, 3)).astype(np.float32)) for _ in range(2))
    done = 0
    while done < total:
        n = int(rng.integers(1, total - done + 1))
        batch = batch_of(cache, done, n, pages)
        cache.write(0, k[:, done : done + n], v[:, done : done + n], batch.page, batch.offset)
        cache.seal(batch)
        done += n
    table = torch.tensor(pages)
    assert torch.equal(gather(cache.k[0], table, total), k)
    assert torch.equal(gather(cache.v[0], table, total), v)
    assert sorted(np.flatnonzero(cache.sealed)) == sorted(pages[: total // 4])


def test_a_reused_page_loses_its_seal_when_it_is_written_again() -> None:
    cache = PagedKVCache(1, 1, 2, 2, 4, torch.float32)
    cache.k.zero_()
    cache.v.zero_()
    cache.seal_pages(np.array([0, 1], np.int64))
    batch_of(cache, 5, 1, [0, 1])
    assert cache.sealed.tolist() == [True, False]


def test_bytes_per_token() -> None:
    """Page 16, 16-bit K and V: each plane 1/8 of the dense bytes, weights and centres 3/64 of them, plus 16 bytes."""
    cache = PagedKVCache(1, 3, 64, 2, 16, torch.bfloat16)
    dense_page = cache.token_bytes * 16
    assert cache.token_bytes == 2 * 3 * 64 * 2
    assert cache.score_page_bytes == dense_page // 8 + dense_page * 3 // 64 + 3 * 16
    assert cache.low_page_bytes == dense_page // 8 // 3
    shadow = cache.shadow
    stored = sum(t[:, 0].numel() * t.element_size() for t in vars(shadow).values())
    assert stored == cache.score_page_bytes + 3 * cache.low_page_bytes + cache.value_page_bytes
    assert cache.shadow_overhead == stored / dense_page


def test_offsets_past_two_to_the_31() -> None:
    """The pool is untouched memory, so only the written page is ever resident."""
    cache = PagedKVCache(1, 1, 1024, 2049, 1024, torch.bfloat16)
    assert cache.k.numel() > 2**31
    ones = torch.ones(1, 1, 1024)
    cache.write(0, ones, 2 * ones, torch.tensor([2048]), torch.tensor([1023]))
    assert float(cache.k[0, 2048, 0, 1023].sum()) == 1024.0
    assert float(cache.v[0, 2048, 0, 1023].sum()) == 2048.0


@pytest.mark.parametrize(
    ("change", "needles"),
    [
        ({"pages": 0}, ["pages", "got 0", ">= 1"]),
        ({"page_tokens": -1}, ["page_tokens", ">= 1"]),
        ({"dtype": torch.int8}, ["dtype", "int8", "bfloat16"]),
    ],
)
def test_bad_sizes_are_refused(change: dict, needles: list[str]) -> None:
    good = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 4, "pages": 2, "page_tokens": 4, "dtype": torch.float32}
    with pytest.raises(BadInputError) as caught:
        PagedKVCache(**{**good, **change})
    for needle in needles:
        assert needle in str(caught.value)


def test_bad_tables_are_refused() -> None:
    cache = PagedKVCache(1, 1, 4, 4, 4, torch.float32)
    for pages, n, needle in ([[0], 5, "too short"], [[9], 3, r"\[0, 3\]"], [[0], 0, "without tokens"]):
        with pytest.raises(BadInputError, match=needle):
            batch_of(cache, 0, n, pages)


def test_a_pool_larger_than_any_memory_names_the_setting() -> None:
    with pytest.raises(BadInputError, match=r"pages: no memory for a KV cache of .* GiB .*lower engine\.pages"):
        PagedKVCache(1000, 64, 128, pages=2**24, page_tokens=1024)


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("page", [10, 16, 64])
def test_the_simulator_charges_the_bytes_of_both_looks(dim: int, page: int) -> None:
    cache = PagedKVCache(1, 3, dim, pages=1, page_tokens=page)
    dense = cache.token_bytes * page
    shares = cache.score_page_bytes / dense, cache.n_kv_heads * cache.low_page_bytes / dense
    assert shadow_shares(ModelShape("any", 1, 3, 3, dim, 1.0, 1.0, 2), page) == pytest.approx(shares, rel=1e-12)
