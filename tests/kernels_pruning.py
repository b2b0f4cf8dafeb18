"""The shadow, scoring, selection and certified decode in Triton; run by test_triton.py in a process of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from paged_layer import DEVICE, Layer, layer

from backends.attention.reference import Scoring
from backends.triton.cache import LayerShadow, record_bytes, seal_pages, write_tokens
from backends.triton.dispatch import Pruning, budget_ratio, decode
from backends.triton.scoring import score_shadow
from backends.triton.scoring_keys import score_exactly
from backends.triton.selection import choose_pages
from entropic_ctl.pruning.certificate import kl_nats, mass_of_kl
from entropic_ctl.pruning.select import select

INF = math.inf
U = 2.0**-24


def shadow_of(made: Layer) -> tuple[LayerShadow, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seal every page of the pool; return shadow, value centres, value radii and flags."""
    total, heads, page, dim = made.k.shape
    groups, blocks = -(-dim // 8), -(-page // 16)
    shadow = LayerShadow(
        torch.full((total, heads, record_bytes(dim, page)), 77, dtype=torch.uint8, device=DEVICE),
        torch.full((total, heads, blocks, groups, 16), 77, dtype=torch.int32, device=DEVICE),
    )
    centre = torch.zeros((total, heads, dim), dtype=torch.float16, device=DEVICE)
    radius = torch.zeros((total, heads), dtype=torch.float32, device=DEVICE)
    sealed = torch.ones(total, dtype=torch.uint8, device=DEVICE)
    seal_pages(made.k, made.v, torch.arange(total, device=DEVICE), shadow, centre, radius, sealed)
    return shadow, centre, radius, sealed


def unpack(shadow: LayerShadow, dim: int, page: int) -> dict[str, np.ndarray]:
    """Read records byte by byte, in plain NumPy."""
    record, low = shadow.record.cpu().numpy(), shadow.low.cpu().numpy().view(np.uint32)
    groups, blocks = -(-dim // 8), -(-page // 16)
    width, lead = 8 * groups, record.shape[:2]
    scalars = np.ascontiguousarray(record[..., :16]).view(np.float32)
    weight = record[..., 16 : 16 + width]
    centre = np.ascontiguousarray(record[..., 16 + width : 16 + 3 * width]).view(np.float16)
    high = np.ascontiguousarray(record[..., 16 + 3 * width :]).view(np.uint32).reshape(*lead, blocks, groups, 16)

    def nibbles(plane: np.ndarray) -> np.ndarray:
        out = np.empty((*lead, blocks, 16, groups, 8), np.int64)
        for j in range(8):
            out[..., j] = ((plane >> (4 * ((j >> 1) + 4 * (j & 1)))) & 15).swapaxes(-1, -2)
        return out.reshape(*lead, blocks * 16, width)

    return {
        "a": scalars[..., 0],
        "e": scalars[..., 1],
        "norm": scalars[..., 2],
        "spare": scalars[..., 3],
        "w": weight.astype(np.float64),
        "m": centre.astype(np.float64),
        "high": nibbles(high),
        "low": nibbles(low),
    }


@pytest.mark.parametrize(
    ("dim", "page", "dtype"),
    [(64, 16, torch.bfloat16), (80, 32, torch.float16), (128, 16, torch.float32), (20, 64, torch.float32)],
)
def test_sealed_pages_bound_their_keys_and_values(dim: int, page: int, dtype: torch.dtype) -> None:
    made = layer(dim=dim, page=page, lengths=(3 * page, 2 * page), dtype=dtype, spread=4.0)
    first = made.table[0, 0].long()
    made.k[first, :, :, 3] = 1.5  # a constant channel
    made.k[made.table[0, 1].long()] = -2.25  # a constant page
    made.k[made.table[1, 0].long(), 0, 5, 7] = torch.nan
    shadow, centre, radius, sealed = shadow_of(made)
    got = unpack(shadow, dim, page)
    written = made.table[:, :3].flatten()
    written = written[written < made.k.shape[0]].tolist()
    spoilt = made.table[1, 0].item()
    assert {int(p) for p in torch.nonzero(sealed).flatten()} == set(written) - {spoilt}
    for p in set(written) - {spoilt}:
        for h in range(2):
            k, w = made.k[p, h].cpu().double().numpy(), got["w"][p, h, :dim]
            a, e, m = float(got["a"][p, h]), float(got["e"][p, h]), got["m"][p, h, :dim]
            code = 16 * got["high"][p, h, :page, :dim] + got["low"][p, h, :page, :dim]
            assert (w >= 1).all()
            assert (np.abs(k - (m + w * a * (code - 128.0))) <= w * e).all()
            assert e <= 0.51 * a + 1e-9  # as tight as rounding allows
            bound = np.sqrt(((np.abs(m) + 128 * w * a) ** 2).sum())
            assert got["norm"][p, h] >= max(bound, np.linalg.norm(k, axis=1).max())
            assert got["spare"][p, h] == 0
            assert not got["w"][p, h, dim:].any()
            assert not got["high"][p, h, page:].any()
            v = made.v[p, h].cpu().double()
            away = (v - centre[p, h].cpu().double()).norm(dim=-1).max().item()
            assert away <= radius[p, h].item() <= away * (1 + 1e-6) + 1e-30
    constant = int(made.table[0, 1])
    assert got["e"][constant].max() == 0.0


def candidates_of(made: Layer, *, sinks: int = 1, recent: int = 2) -> torch.Tensor:
    page = made.k.shape[2]
    out = torch.zeros(made.table.shape, dtype=torch.uint8, device=DEVICE)
    for r, length in enumerate(made.lengths.tolist()):
        out[r, sinks : max(sinks, -(-length // page) - recent)] = 1
    return out


@pytest.mark.parametrize("both_planes", [False, True])
@pytest.mark.parametrize(
    ("dim", "page", "softcap", "dtype"),
    [(64, 16, None, torch.bfloat16), (80, 32, None, torch.float16), (128, 16, 8.0, torch.float32)],
)
def test_scores_bound_the_page_masses(
    dim: int, page: int, softcap: float | None, dtype: torch.dtype, both_planes: bool
) -> None:
    made = layer(dim=dim, page=page, lengths=(13 * page - 3, 6 * page), dtype=dtype, spread=1.5)
    made.k[made.table[0, 3].long()] = 0.75  # constant keys: an interval of rounding alone
    scoring = Scoring(dim**-0.5, softcap)
    shadow, *_ = shadow_of(made)
    candidates = candidates_of(made)
    n, capacity = made.table.shape
    bounds = torch.full((2, n, 6, capacity), torch.nan, device=DEVICE)
    norms = torch.full((n, 2, capacity), torch.nan, device=DEVICE)
    arguments = (made.table, candidates, made.lengths, scoring, (bounds[0], bounds[1]), norms)
    score_exactly(made.query, made.k, *arguments)
    score_shadow(made.query, shadow, *arguments, page, both_planes=both_planes)
    for r in range(n):
        truth = made.page_mass(r, scoring).numpy()
        used = truth.shape[1]
        lower, upper = bounds[:, r, :, :used].cpu().double().numpy()
        assert (lower <= truth).all()
        assert (truth <= upper).all()
        free = candidates[r, :used].cpu().numpy() == 1
        width = upper - lower
        assert width[:, ~free].max() < 1e-3  # read exactly
        assert width[:, free].max() < (4.0 if not both_planes else 0.3)
        if r == 0:
            assert width[:, 3].max() < 1e-3
        k = made.k[made.table[r, :used].long()].cpu().double()
        true_norm = k.nan_to_num(0.0).norm(dim=-1).amax(dim=-1).T.numpy()
        assert (norms[r, :, :used].cpu().numpy() >= true_norm).all()
    assert torch.isnan(bounds[:, 1, :, 6:]).all()  # nothing is written past a row's pages


def random_bounds(rng: np.random.Generator, n: int, heads: int, pages: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    centre = rng.normal(size=(n, heads, pages)) * {"ties": 0.0, "wide": 20.0}.get(kind, 2.0)
    width = rng.random((n, heads, pages)) * {"exact": 0.0, "ties": 0.0}.get(kind, 0.05)
    lower, upper = (centre - width).astype(np.float32), (centre + width).astype(np.float32)
    if kind == "unknown":
        upper[:, :, ::5], lower[:, :, ::5] = INF, -INF
    return lower, upper


@pytest.mark.parametrize("kind", ["plain", "exact", "ties", "wide", "unknown"])
def test_the_selection_is_the_reference_selection(kind: str) -> None:
    rng = np.random.default_rng(sum(map(ord, kind)))
    n, heads, kv, page, capacity = 3, 6, 2, 16, 61
    lower, upper = random_bounds(rng, n, heads, capacity, kind)
    lengths = torch.tensor([61 * 16, 40 * 16 - 9, 3], dtype=torch.int32, device=DEVICE)
    candidates = torch.from_numpy((rng.random((n, capacity)) < 0.9).astype(np.uint8)).to(DEVICE)
    candidates[0, 60], candidates[1, 39], candidates[2, 0] = 0, 0, 0
    theta = np.array([0.02, 0.3, 0.1])
    ratio = budget_ratio(torch.from_numpy(theta).to(DEVICE))
    given = [torch.from_numpy(x).to(DEVICE) for x in (lower, upper)]
    pages, mass, log_pruned, _ = choose_pages(*given, ratio, candidates, lengths, kv, page)
    for r in range(n):
        used = -(-int(lengths[r]) // page)
        lo, up = (x[r, :, :used].astype(np.float64) for x in (lower, upper))
        fixed = candidates[r, :used].cpu().numpy() == 0
        want = select(lo, up, fixed, float(theta[r]), kv)
        kept = np.zeros((kv, used), bool)
        for j in range(kv):
            kept[j, pages.index[r, j, : int(pages.count[r, j])].cpu().numpy()] = True
        assert (kept >= fixed).all()
        assert np.abs(kept ^ want.kept).sum() <= 1  # a budget met to within rounding may go either way
        got = mass[r].cpu().double().numpy()
        assert (got <= mass_of_kl(theta[r]) * (1 + 1e-7)).all()
        out = np.repeat(~kept, heads // kv, axis=0)
        lost = np.where(out, np.exp(up), 0.0).sum(axis=1)
        rest = np.where(out, 0.0, np.exp(lo)).sum(axis=1)
        exact = lost / np.maximum(lost + rest, 1e-300)
        assert (got >= exact).all()
        assert (got <= exact * 1.0001 + 1e-20).all()
        log_lost = log_pruned[r].cpu().double().numpy()
        assert (np.exp(log_lost) >= lost).all()


def test_a_budget_of_zero_keeps_all_and_a_boundless_one_only_the_fixed() -> None:
    rng = np.random.default_rng(0)
    lower, upper = (torch.from_numpy(x).to(DEVICE) for x in random_bounds(rng, 2, 2, 20, "plain"))
    lengths = torch.tensor([320, 320], dtype=torch.int32, device=DEVICE)
    candidates = torch.ones((2, 20), dtype=torch.uint8, device=DEVICE)
    candidates[:, 0] = candidates[:, 19] = 0
    ratio = budget_ratio(torch.tensor([0.0, INF], device=DEVICE))
    pages, mass, log_pruned, _ = choose_pages(lower, upper, ratio, candidates, lengths, 1, 16)
    assert pages.count.flatten().tolist() == [20, 2]
    assert pages.index[1, 0, :2].tolist() == [0, 19]
    assert mass[0].tolist() == [0.0, 0.0]
    assert (log_pruned[0] == -INF).all()


@pytest.mark.parametrize("theta", [0.1, 5.0, 12.0, 16.0, 40.0])
def test_a_certificate_near_1_is_within_its_budget(theta: float) -> None:
    """One page that takes a budget to within a little: float32 masses near 1 are many nats apart."""
    below = torch.tensor([1e-5, 1e-4, 1e-2, 1.0, 30.0], dtype=torch.float64)
    mass_of_one = torch.stack([torch.zeros(5), (math.log(math.expm1(theta)) - below).float()], dim=1)
    bounds = mass_of_one.unsqueeze(1).contiguous().to(DEVICE)
    candidates = torch.tensor([[0, 1]] * 5, dtype=torch.uint8, device=DEVICE)
    lengths = torch.full((5,), 32, dtype=torch.int32, device=DEVICE)
    ratio = budget_ratio(torch.full((5,), theta, device=DEVICE))
    _, mass, _, _ = choose_pages(bounds, bounds.clone(), ratio, candidates, lengths, 1, 16)
    assert mass.any()
    assert (kl_nats(mass.cpu().double().numpy()) <= theta).all()


@pytest.mark.parametrize("two_stage", [False, True])
@pytest.mark.parametrize(
    ("n_heads", "heads", "dim", "page", "dtype", "softcap"),
    [(6, 2, 64, 16, torch.bfloat16, None), (4, 1, 80, 32, torch.float32, 20.0)],
)
def test_pruned_decode_never_loses_more_than_it_certifies(
    n_heads: int, heads: int, dim: int, page: int, dtype: torch.dtype, softcap: float | None, two_stage: bool
) -> None:
    made = layer(
        n_heads=n_heads, heads=heads, dim=dim, page=page, dtype=dtype, lengths=(24 * page - 7, 14 * page), spread=1.0
    )
    made.k[made.table[0, 5].long()] = 0.5
    scoring = Scoring(2 * dim**-0.5, softcap)
    shadow, *_ = shadow_of(made)
    candidates = candidates_of(made)
    for r in range(2):  # what was never sealed must not be scored, what is dropped not read
        candidates[r, 7] = 0
    theta = torch.tensor([0.05, 0.3], dtype=torch.float64, device=DEVICE)
    got = decode(
        *made.inputs,
        scoring,
        pruning=Pruning(shadow, budget_ratio(theta), candidates, two_stage),
        page_log_mass=True,
    )
    for r in range(2):
        truth = made.page_mass(r, scoring)
        weight = torch.exp(truth - torch.logsumexp(truth, dim=-1, keepdim=True)).numpy()
        used = weight.shape[1]
        kept = np.zeros((heads, used), bool)
        for j in range(heads):
            kept[j, got.pages.index[r, j, : int(got.pages.count[r, j])].cpu().numpy()] = True
        dropped = np.repeat(~kept, n_heads // heads, axis=0)
        assert dropped.any()
        assert kept[:, 7].all()
        lost = np.where(dropped, weight, 0.0).sum(axis=1)
        certified = got.mass[r].cpu().double().numpy()
        assert (lost <= certified).all()
        assert (-np.log1p(-certified) <= theta[r].item()).all()
        tight = certified[lost > 1e-6].mean() / lost[lost > 1e-6].mean()
        assert tight < (1.6 if two_stage else 1.25)
        assert not torch.isfinite(got.log_mass[r, :, :used].cpu()[torch.from_numpy(dropped)]).any()
        _, _, v = made.row(r)
        s = made.scores(r, scoring)
        hidden = torch.from_numpy(np.repeat(dropped, page, axis=1))[:, : s.shape[1]]
        p = torch.softmax(s.masked_fill(hidden, -INF), dim=-1)
        want = torch.matmul(p.reshape(heads, -1, s.shape[1]), v).reshape(n_heads, dim)
        torch.testing.assert_close(got.out[r].cpu().double(), want, atol=2e-2, rtol=2e-2)


def test_a1_dropped_pages_full_of_nan_never_enter() -> None:
    made = layer(lengths=(320,), spread=2.0)
    shadow, *_ = shadow_of(made)
    candidates = candidates_of(made)
    pruning = Pruning(shadow, budget_ratio(torch.tensor([0.5], device=DEVICE)), candidates)
    first = decode(*made.inputs, Scoring(0.3), pruning=pruning)
    kept = {int(p) for j in range(2) for p in first.pages.index[0, j, : int(first.pages.count[0, j])]}
    dropped = set(range(20)) - kept
    assert dropped
    for p in dropped:
        made.k[made.table[0, p].long()] = torch.nan
        made.v[made.table[0, p].long()] = torch.inf
    again = decode(*made.inputs, Scoring(0.3), pruning=pruning)
    assert torch.equal(first.out, again.out)
    assert torch.equal(first.mass, again.mass)


def test_tokens_are_written_where_they_belong() -> None:
    made = layer(lengths=(40,), dtype=torch.float16)  # the interpreter cuts bfloat16 off where a device rounds
    key, value = (torch.randn(7, 2, 64, device=DEVICE).transpose(0, 1) for _ in range(2))  # strides of a model's output
    page = torch.tensor([3, 0, 3, -1, 1, 2, 0], device=DEVICE)
    slot = torch.tensor([0, 15, 1, 5, 7, 8, 2], device=DEVICE)
    k, v = made.k.clone(), made.v.clone()
    write_tokens(key, value, k, v, page, slot)
    want_k, want_v = made.k.clone(), made.v.clone()
    for t in range(7):
        if page[t] >= 0:
            want_k[page[t], :, slot[t]] = key[:, t].to(torch.float16)
            want_v[page[t], :, slot[t]] = value[:, t].to(torch.float16)
    torch.testing.assert_close(k, want_k, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(v, want_v, atol=0, rtol=0, equal_nan=True)
