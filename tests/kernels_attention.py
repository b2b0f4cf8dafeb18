"""Decode attention in Triton against float64; run by test_triton.py in a process of its own."""

from __future__ import annotations

import math

import pytest
import torch
from paged_layer import DEVICE, INTERPRETED, Layer, layer

from backends.attention.reference import Scoring, visible
from backends.triton.attention import PageList, attend_pages
from entropic_ctl.errors import BadInputError

INF = math.inf
LSE = 4e-6 if INTERPRETED else 2e-5
# on a GPU: approximate exponentials, and tensor cores that cut off instead of rounding
TOLERANCE = {torch.float32: 2e-6 if INTERPRETED else 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def expected(
    made: Layer, r: int, scoring: Scoring, mask: torch.Tensor | None = None, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of a row in float64; ``mask`` (length,) True where seen."""
    _, _, v = made.row(r)
    s = made.scores(r, scoring)
    if mask is not None:
        s = s.masked_fill(~mask, -INF)
    lse = torch.logsumexp(s, dim=-1)
    total = lse if sink is None else torch.logaddexp(lse, sink.double().cpu())
    weight = torch.exp(s - total[:, None]).reshape(v.shape[0], -1, s.shape[1])
    return torch.matmul(weight, v).reshape(s.shape[0], -1), lse


def check(made: Layer, scoring: Scoring, **options: object) -> None:
    out, lse, _ = attend_pages(*made.inputs, scoring, **options)
    tolerance = TOLERANCE[made.k.dtype]
    for r in range(out.shape[0]):
        length, mask = int(made.lengths[r]), None
        if options.get("window"):
            mask = visible(length - 1, 1, torch.device("cpu"), options["window"], options.get("sink_tokens", 0))[0]
        want, want_lse = expected(made, r, scoring, mask, options.get("s_aux"))
        torch.testing.assert_close(out[r].cpu().double(), want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse[r].cpu().double(), want_lse, rtol=1e-6, atol=LSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n_heads", "heads", "dim", "page"), [(6, 2, 64, 16), (3, 3, 80, 16), (5, 1, 96, 32)])
def test_ragged_rows_with_nan_in_unused_slots(
    dtype: torch.dtype, n_heads: int, heads: int, dim: int, page: int
) -> None:
    made = layer(n_heads=n_heads, heads=heads, dim=dim, page=page, dtype=dtype, lengths=(17, 133, 1))
    check(made, Scoring(dim**-0.5))


@pytest.mark.parametrize(("dim", "page"), [(40, 64), (120, 16), (128, 16)])
def test_odd_head_sizes_and_large_pages(dim: int, page: int) -> None:
    check(layer(dim=dim, page=page, dtype=torch.float16, lengths=(65, 64, 3)), Scoring(dim**-0.5))


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 16])
def test_any_number_of_splits_gives_the_same(splits: int) -> None:
    made = layer(lengths=(300, 5, 64))  # more splits than pages leaves empty ones: (0, -inf) merges to nothing
    check(made, Scoring(0.125), splits=splits)


@pytest.mark.parametrize("context", [1, 15, 16, 17, 63, 64, 65, 68, 69, 80, 200, 208])
def test_a3_window_and_sink_tokens(context: int) -> None:
    check(layer(lengths=(context, 100)), Scoring(0.125), window=64, sink_tokens=4, splits=2)


def test_a3_pages_outside_the_window_are_not_read() -> None:
    made = layer(lengths=(200,))
    seen = {0, 8, 9, 10, 11, 12}
    for p in set(range(13)) - seen:
        made.k[made.table[0, p].long()] = torch.nan
    out, _, log_mass = attend_pages(*made.inputs, Scoring(0.125), window=64, sink_tokens=4, page_log_mass=True)
    assert torch.isfinite(out).all()
    read = set(torch.nonzero(log_mass[0, 0] > -INF).flatten().tolist())
    assert read == seen


def test_soft_cap_and_learned_sinks() -> None:
    made = layer(lengths=(70, 33), spread=3.0)
    sink = torch.tensor([0.5, 3.0, -INF, 20.0, 0.0, -4.0], device=DEVICE)
    check(made, Scoring(0.7, 5.0), s_aux=sink)


def test_a4_heads_read_their_own_group() -> None:
    for n_heads, heads in [(48, 2), (40, 2), (28, 4), (24, 8)]:
        made = layer(n_heads=n_heads, heads=heads, dim=16, lengths=(20,))
        for j in range(heads):
            made.v[:, j] = j
        out, _, _ = attend_pages(*made.inputs, Scoring(0.25))
        want = torch.arange(n_heads, device=DEVICE) // (n_heads // heads)
        torch.testing.assert_close(out[0], want[:, None].float().expand(-1, 16), atol=1e-5, rtol=1e-6)
    made = layer(n_heads=32, heads=2, dim=16, lengths=(20,))
    with pytest.raises(BadInputError, match="33"):
        attend_pages(made.query.new_zeros(1, 33, 16), *made.inputs[1:], Scoring(0.25))


def test_a5_no_tokens_at_all() -> None:
    made = layer(lengths=(20, 20))
    made.lengths[0] = 0
    out, lse, _ = attend_pages(*made.inputs, Scoring(0.125), splits=3)
    assert not out[0].any()
    assert (lse[0] == -INF).all()
    assert torch.isfinite(out[1]).all()


def test_a7_very_negative_scores() -> None:
    made = layer(n_heads=1, heads=1, dim=16, lengths=(2,))
    made.query.fill_(0.0)
    made.query[..., 0] = 1.0
    page = made.table[0, 0].long()
    made.k[page, 0, :2] = 0.0
    made.k[page, 0, 0, 0], made.k[page, 0, 1, 0] = -100000.0, -100001.0
    made.v[page, 0, :2] = torch.eye(16, device=DEVICE)[:2]
    out, _, _ = attend_pages(*made.inputs, Scoring(1.0))
    torch.testing.assert_close(out[0, 0, :2].cpu(), torch.tensor([0.731059, 0.268941]), atol=1e-5, rtol=0)


def test_page_lists_read_those_pages_alone_with_true_page_masses() -> None:
    made = layer(lengths=(133, 40), dtype=torch.bfloat16)
    n, capacity = made.table.shape
    scoring = Scoring(0.125)
    index = torch.full((n, 2, capacity), 2**30, dtype=torch.int32, device=DEVICE)
    lists = {(0, 0): [0, 3, 8], (0, 1): [8], (1, 0): [0, 1, 2], (1, 1): []}
    count = torch.zeros((n, 2), dtype=torch.int32, device=DEVICE)
    for (r, j), pages in lists.items():
        index[r, j, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        count[r, j] = len(pages)
    out, lse, log_mass = attend_pages(*made.inputs, scoring, pages=PageList(index, count), page_log_mass=True, splits=2)
    for (r, j), pages in lists.items():
        position = torch.arange(int(made.lengths[r]))
        seen = torch.isin(position // 16, torch.tensor(pages, dtype=torch.long))
        want, want_lse = expected(made, r, scoring, seen)
        heads = slice(3 * j, 3 * j + 3)
        if not pages:
            assert not out[r, heads].any()
            assert (lse[r, heads] == -INF).all()
            continue
        torch.testing.assert_close(out[r, heads].cpu().double(), want[heads], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[r, heads].cpu().double(), want_lse[heads], atol=LSE, rtol=1e-6)
        got = log_mass[r, heads].cpu().double()
        truth = made.page_mass(r, scoring)[heads]
        torch.testing.assert_close(got[:, pages], truth[:, pages], atol=LSE, rtol=1e-6)
        others = [p for p in range(capacity) if p not in pages]
        assert (got[:, others] == -INF).all()


def test_page_ids_past_two_to_the_31_elements() -> None:
    heads, page, dim = 1, 16, 64
    stride = 2**26  # a view of the pool so wide that page 40 starts past 2^31 elements; untouched memory costs nothing
    memory = torch.empty(41 * stride, dtype=torch.float16, device=DEVICE)
    pools = [memory[at:].as_strided((40 + 1, heads, page, dim), (stride, page * dim, dim, 1)) for at in (0, 2**25)]
    made = layer(n_heads=2, heads=heads, dim=dim, lengths=(16,), dtype=torch.float16)
    page_id = made.table[0, 0].long()
    pools[0][40], pools[1][40] = made.k[page_id], made.v[page_id]
    assert pools[0].stride(0) * 40 > 2**31
    table = torch.tensor([[40]], dtype=torch.int32, device=DEVICE)
    out, lse, _ = attend_pages(made.query, *pools, table, made.lengths, Scoring(0.125))
    want, want_lse = expected(made, 0, Scoring(0.125))
    torch.testing.assert_close(out[0].cpu().double(), want, atol=3e-3, rtol=3e-3)
    torch.testing.assert_close(lse[0].cpu().double(), want_lse, atol=LSE, rtol=1e-6)


def test_a_query_wider_than_the_cache_is_not_rounded() -> None:
    made = layer(dtype=torch.bfloat16, lengths=(50,))
    made.query = made.query.float() + 2.0**-12
    out, lse, _ = attend_pages(*made.inputs, Scoring(0.125))
    want, want_lse = expected(made, 0, Scoring(0.125))
    torch.testing.assert_close(lse[0].cpu().double(), want_lse, atol=LSE, rtol=1e-6)
    torch.testing.assert_close(out[0].cpu().double(), want, atol=1e-5, rtol=1e-5)


def test_bad_shapes_are_refused() -> None:
    made = layer(lengths=(20,))
    with pytest.raises(BadInputError, match="page_tokens"):
        attend_pages(made.query, made.k[:, :, :12], made.v[:, :, :12], made.table, made.lengths, Scoring(1.0))
    with pytest.raises(BadInputError, match="int32"):
        attend_pages(made.query, made.k, made.v, made.table.long(), made.lengths, Scoring(1.0))
