"""The C++ decode attention against float64 and the torch reference: outputs, certificates, what is read."""

from __future__ import annotations

import math
import os
import signal
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from backends import native  # noqa: E402
from backends.attention import PagedBatch, paged_attention  # noqa: E402
from backends.attention.pruned import page_bounds, pruned_decode  # noqa: E402
from backends.attention.reference import Scoring  # noqa: E402
from backends.kv_cache import PagedKVCache, unpack  # noqa: E402
from backends.native import build  # noqa: E402
from entropic_ctl.pruning.base import PruningConfig  # noqa: E402
from entropic_ctl.pruning.certificate import kl_nats  # noqa: E402
from entropic_ctl.signals import StepPlan  # noqa: E402

pytestmark = pytest.mark.skipif(native.reason_unavailable() is not None, reason="no C++ compiler")

RULE = PruningConfig(sink_pages=1, recent_pages=1, dense_layers=0)
DIMS = [8, 16, 40, 64, 80, 96, 120, 128, 256]
PAGES = [1, 5, 8, 16, 20, 32, 64]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KEYS = {
    "normal": lambda x: x,
    "pages apart": lambda x: x + 2 * x[:, :, :1],
    "constant pages": lambda x: x[:, :, :1].half().to(x.dtype).expand_as(x).clone(),
    "constant everywhere": lambda x: x[:1, :, :1].expand_as(x).clone(),
    "constant and large": lambda x: 100 + x[:1, :1, :1].expand_as(x).clone(),
    "offset": lambda x: 20.0 + 0.1 * x,
    "outlier channel": lambda x: x * torch.where(torch.arange(x.shape[-1]) == 1, 60.0, 0.5),
    "tiny": lambda x: x * 1e-5,
    "subnormal": lambda x: x * 1e-40,
    "heavy tails": lambda x: x**3,
    "zero": lambda x: 0 * x,
}


@dataclass
class Scene:
    """Rows of a step over random pages; slots that no token was written to hold NaN and infinity."""

    dim: int = 64
    page: int = 16
    heads: int = 2
    group: int = 3
    lengths: tuple[int, ...] = (150,)
    theta: tuple[float, ...] = (0.1,)
    keys: str = "pages apart"
    size: float = 1.0
    dtype: torch.dtype = torch.float32
    query_dtype: torch.dtype = torch.float32
    softcap: float | None = None
    seed: int = 0
    k: torch.Tensor = field(init=False)
    query: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        need = [-(-length // self.page) for length in self.lengths]
        order = torch.randperm(sum(need) + 2, generator=g)
        self.tables = np.zeros((len(need), max(need)), np.int32)
        shape = (len(order), self.heads, self.page, self.dim)
        self.k = KEYS[self.keys](torch.randn(shape, generator=g, dtype=torch.float64)).to(self.dtype)
        self.v = torch.randn(shape, generator=g).to(self.dtype)
        start = 0
        written = torch.zeros(len(order), self.page, dtype=torch.bool)
        for r, n in enumerate(need):
            self.tables[r, :n] = order[start : start + n]
            start += n
            last = int(self.tables[r, n - 1])
            written[self.tables[r, :n].tolist()] = True
            written[last, self.lengths[r] - (n - 1) * self.page :] = False
        empty = ~written[:, None, :, None]
        self.k = self.k.masked_fill(empty, torch.nan)
        self.v = self.v.masked_fill(empty, torch.inf)
        query = torch.randn(len(need), self.heads * self.group, self.dim, generator=g)
        self.query = (self.size * query).to(self.query_dtype)
        self.scoring = Scoring(self.dim**-0.5, self.softcap)

    def cache(self, kernels: str = "native") -> PagedKVCache:
        cache = PagedKVCache(1, self.heads, self.dim, self.k.shape[0], self.page, self.dtype, kernels=kernels)
        cache.k[0], cache.v[0] = self.k, self.v
        full = [t[: n // self.page] for t, n in zip(self.tables, self.lengths, strict=True)]
        cache.seal_pages(np.concatenate(full).astype(np.int64))
        return cache

    def batch(self, cache: PagedKVCache, rows: tuple[int, ...] | None = None) -> PagedBatch:
        index = np.arange(len(self.lengths)) if rows is None else np.array(rows)
        n = len(index)
        length, theta = np.array(self.lengths)[index], np.array(self.theta, float)[index]
        nothing = np.empty(0, np.int64)
        plan = StepPlan(
            0, 0.0, index, np.arange(n), length - 1, np.ones(n, np.int64), np.ones(n, bool), np.zeros(n, bool), theta,
            np.zeros(n, np.int64), nothing, nothing, (), self.tables[index], np.empty((0, 3), np.int32),
        )  # fmt: skip
        sealed = cache.sealed.copy()
        batch = PagedBatch.from_plan(plan, cache, RULE)
        cache.sealed[:] = sealed
        return batch

    def decode(self, cache: PagedKVCache | None = None, rows: tuple[int, ...] | None = None, **options):
        """Return (out (n, H, D), what the kernel says) of the rows."""
        cache = self.cache() if cache is None else cache
        batch = self.batch(cache, rows)
        query = self.query if rows is None else self.query[list(rows)]
        out = torch.full(query.shape, torch.nan, dtype=query.dtype)
        got = native.attend(
            cache, 0, query.transpose(0, 1), out, batch.decoding, self.scoring, prunes=True, want_kept=True, **options
        )
        return out, got

    def scores(self, r: int) -> torch.Tensor:
        """Return (H, length) in float64."""
        k = self.tokens(self.k, r)
        s = torch.einsum("hgd,htd->hgt", self.query[r].double().reshape(self.heads, self.group, -1), k)
        s = s.flatten(0, 1) * self.scoring.scale
        return s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)

    def tokens(self, pool: torch.Tensor, r: int) -> torch.Tensor:
        pages = self.tables[r, : -(-self.lengths[r] // self.page)].tolist()
        return pool[pages].double().transpose(0, 1).flatten(1, 2)[:, : self.lengths[r]]

    def attended(self, r: int, seen: torch.Tensor, sinks: torch.Tensor | None = None):
        """Return (out (H, D), lse (H,)) over the tokens ``seen`` (n_kv_heads, length), float64."""
        s = self.scores(r).masked_fill(~seen.repeat_interleave(self.group, 0), -torch.inf)
        if sinks is not None:
            s = torch.cat([s, sinks.double()[:, None]], dim=1)
        weight = torch.softmax(s, -1)[:, : self.lengths[r]].reshape(self.heads, self.group, -1)
        v = self.tokens(self.v, r)
        return torch.einsum("hgt,htd->hgd", weight, v).flatten(0, 1), torch.logsumexp(s, -1)

    def close(self, out: torch.Tensor, exact: torch.Tensor) -> None:
        room = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-4}[self.query_dtype]
        torch.testing.assert_close(out.double(), exact, atol=room, rtol=0.0)


shapes = st.fixed_dictionaries(
    {
        "dim": st.sampled_from(DIMS),
        "page": st.sampled_from(PAGES),
        "heads": st.sampled_from([1, 2]),
        "group": st.integers(1, 9),
        "dtype": st.sampled_from(DTYPES),
        "query_dtype": st.sampled_from(DTYPES),
        "softcap": st.sampled_from([None, None, 5.0, 50.0]),
        "keys": st.sampled_from(sorted(KEYS)),
        "size": st.sampled_from([1e-6, 0.3, 1.0, 4.0, 100.0]),
        "seed": st.integers(0, 2**31 - 1),
    }
)
budgets = st.sampled_from([1e-6, 1e-3, 0.02, 0.3, 3.0, 12.0])


def page_lengths(page: int, rng: np.random.Generator, rows: int) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.integers(1, 14 * page + 1, rows))


@given(shapes, budgets)
@settings(max_examples=150)
def test_pruned_decode_is_attention_over_the_kept_pages_within_its_budget(shape: dict, theta: float) -> None:
    rng = np.random.default_rng(shape["seed"])
    lengths = page_lengths(shape["page"], rng, 3)
    scene = Scene(**shape, lengths=lengths, theta=(theta, 0.0, theta / 2))
    out, got = scene.decode()
    reference = scene.cache("torch")
    batch = scene.batch(scene.cache())
    for r, length in enumerate(lengths):
        pages = -(-length // scene.page)
        kept = torch.from_numpy(got.kept[r, :, :pages] != 0)
        budget = float(batch.decoding.theta_nats[r])
        if budget == 0.0:
            kept, pruned = torch.ones_like(kept), 0
            assert not got.mass[r].any()
        else:
            assert got.read[r].tolist() == kept.sum(1).tolist()
            pruned = int((~kept).sum())
        seen = kept.repeat_interleave(scene.page, 1)[:, :length]
        exact, lse = scene.attended(r, seen)
        scene.close(out[r], exact)
        slack = 1e-4 + 3e-5 * scene.scores(r).abs().amax() + 1e-5 * scene.size * scene.k.nan_to_num().abs().max()
        assert ((torch.from_numpy(got.lse[r]).double() - lse).abs() <= slack).all()
        mass = torch.softmax(scene.scores(r), -1).masked_fill(seen.repeat_interleave(scene.group, 0), 0.0).sum(-1)
        assert (mass.numpy() <= got.mass[r] + 2e-16).all()
        assert (kl_nats(got.mass[r]) <= budget).all()
        assert (got.mass[r] > 0).any() == (pruned > 0)
        if pruned or budget:
            one = scene.batch(reference, (r,))
            one.audit = True
            pruned_decode(one, 0, scene.query[r : r + 1], scene.scoring)
            more = kept.sum(1).numpy() - one.audits[0].kept.sum(axis=1)
            assert more.min() >= -1
            largest = (
                scene.query[r].norm(dim=-1).max() * scene.tokens(scene.k, r).norm(dim=-1).max() * scene.scoring.scale
            )
            # larger scores: the integers' rounding counts, and beyond e^88 of the fixed pages float32 ends
            assert more.max() <= 1 or largest > 80.0


@given(shapes, st.sampled_from([None, 1, 7, 40, 1000]), st.sampled_from([0, 4, 21]), st.booleans())
@settings(max_examples=60)
def test_exact_rows_see_their_window_their_sink_tokens_and_the_learned_sinks(
    shape: dict, window: int | None, sink_tokens: int, learned: bool
) -> None:
    rng = np.random.default_rng(shape["seed"])
    lengths = page_lengths(shape["page"], rng, 3)
    scene = Scene(**shape, lengths=lengths, theta=(0.0,) * 3)
    sinks = torch.from_numpy(rng.normal(size=scene.query.shape[1])).float() if learned else None
    out, got = scene.decode(window=window, sink_tokens=sink_tokens, sinks=sinks)
    for r, length in enumerate(lengths):
        at = torch.arange(length)
        seen = at >= 0 if window is None else (at >= length - window) | (at < sink_tokens)
        exact, lse = scene.attended(r, seen.expand(scene.heads, -1), sinks)
        scene.close(out[r], exact)
        room = 1e-4 + 3e-5 * scene.scores(r).abs().amax() + 1e-5 * scene.size * scene.k.nan_to_num().abs().max()
        assert ((torch.from_numpy(got.lse[r]).double() - lse).abs() <= room).all()


@given(shapes, budgets)
@settings(max_examples=25)
def test_a_row_does_not_depend_on_its_neighbours_or_on_the_threads(shape: dict, theta: float) -> None:
    rng = np.random.default_rng(shape["seed"])
    scene = Scene(**shape, lengths=page_lengths(shape["page"], rng, 4), theta=(theta, 0.0, theta, 0.0))
    cache, before = scene.cache(), torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            runs.append(scene.decode(cache))
        alone = [scene.decode(cache, (r,)) for r in range(4)]
    finally:
        torch.set_num_threads(before)
    out, got = runs[0]
    for other, said in runs[1:]:
        assert torch.equal(out, other)
        for name in ("mass", "read", "fine", "kept", "lse"):
            np.testing.assert_array_equal(getattr(got, name), getattr(said, name))
    for r, (other, said) in enumerate(alone):
        assert torch.equal(out[r], other[0])
        for name in ("mass", "read", "fine", "lse"):
            np.testing.assert_array_equal(getattr(got, name)[r], getattr(said, name)[0])


@given(shapes, budgets)
@settings(max_examples=15)
def test_a_long_row_shared_by_more_threads_than_it_has_heads_is_the_same(shape: dict, theta: float) -> None:
    pages = -(-2200 // shape["page"])
    scene = Scene(**shape, lengths=(pages * shape["page"] - 3, 90), theta=(theta, theta / 2))
    cache, before = scene.cache(), torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 5):  # four heads at most
            torch.set_num_threads(threads)
            runs.append(scene.decode(cache))
    finally:
        torch.set_num_threads(before)
    (out, got), (other, said) = runs
    assert torch.equal(out, other)
    for name in ("mass", "read", "fine", "kept", "lse"):
        np.testing.assert_array_equal(getattr(got, name), getattr(said, name))


@given(shapes, st.sampled_from([torch.nan, torch.inf, -torch.inf]))
@settings(max_examples=25)
def test_what_is_not_read_is_not_read(shape: dict, poison: float) -> None:
    scene = Scene(**{**shape, "keys": "pages apart", "size": 2.0}, lengths=(11 * shape["page"] + 1,), theta=(0.5,))
    cache = scene.cache()
    out, got = scene.decode(cache)
    dropped = got.kept[0] == 0
    for head, place in np.argwhere(dropped):
        cache.k[0, scene.tables[0, place], head] = poison
        cache.v[0, scene.tables[0, place], head] = poison
    again, said = scene.decode(cache)
    assert torch.equal(out, again)
    np.testing.assert_array_equal(got.mass, said.mass)


@pytest.mark.parametrize("keys", ["constant pages", "constant everywhere", "constant and large"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_pages_never_break_a_certificate(keys: str, dtype: torch.dtype) -> None:
    """Every key of a page equal: no quantisation error, so rounding is all there is."""
    broken = 0
    for seed in range(40):
        scene = Scene(
            keys=keys, dtype=dtype, query_dtype=dtype, lengths=(16 * 30 + 3,), theta=(0.4,), seed=seed, size=3.0
        )
        _, got = scene.decode()
        seen = torch.from_numpy(got.kept[0] != 0).repeat_interleave(16, 1)[:, : scene.lengths[0]]
        weight = torch.softmax(scene.scores(0), -1)
        lost = weight.masked_fill(seen.repeat_interleave(scene.group, 0), 0.0).sum(-1)
        broken += int((lost.numpy() > got.mass[0]).sum())
    assert broken == 0


@pytest.mark.parametrize("theta", [18.0, 25.0, 32.0])
def test_pages_that_outweigh_all_others_are_dropped_only_within_the_budget(theta: float) -> None:
    """Candidates some 20 to 40 nats above the fixed pages: what is left after taking them from a sum is rounding."""
    dropped = 0
    for seed in range(30):
        scene = Scene(dim=8, heads=1, group=1, keys="zero", lengths=(30 * 16 + 1,), theta=(theta,), seed=seed)
        scene.query = torch.zeros_like(scene.query)
        scene.query[..., 0] = 1.0
        height = 20.0 + 20.0 * torch.rand(28, generator=torch.Generator().manual_seed(seed))
        scene.k[scene.tables[0, 1:29].tolist(), :, :, 0] = (height / scene.scoring.scale)[:, None, None]
        _, got = scene.decode()
        assert (kl_nats(got.mass) <= theta).all()
        dropped += int((got.kept[0] == 0).sum())
    assert dropped > 0


@pytest.mark.parametrize("above", [80.0, 88.0])
def test_pages_far_above_the_fixed_ones_do_not_overflow_the_selection(above: float) -> None:
    """33 pages of equal mass, e^88 times the fixed ones' together, 25 that weigh nothing: those are dropped."""
    scene = Scene(dim=8, heads=1, group=1, keys="zero", lengths=(60 * 16 + 1,), theta=(0.5,))
    scene.query = torch.zeros_like(scene.query)
    scene.query[..., 0] = 1.0
    height = torch.full((58,), above)
    height[:25] = 5.0
    scene.k[scene.tables[0, 1:59].tolist(), :, :, 0] = (height / scene.scoring.scale)[:, None, None]
    _, got = scene.decode()
    assert got.read[0, 0] <= 60 - 25


@pytest.mark.parametrize("theta", [0.69, 3.0, 14.0])
@pytest.mark.parametrize("above", [87.0, 88.0])
def test_what_is_kept_may_outweigh_every_float32(theta: float, above: float) -> None:
    """Tokens at the top of a coarse step: pages weigh more than the first look has them, together more than 3e38."""
    scene = Scene(dim=8, heads=1, group=1, keys="zero", lengths=(32 * 16 + 1,), theta=(theta,))
    scene.query = torch.zeros_like(scene.query)
    scene.query[..., 0] = 1.0
    height = torch.full((16,), above)
    height[0] = -42.0
    scene.k[scene.tables[0, 1:31].tolist(), :, :, 0] = height / scene.scoring.scale
    _, got = scene.decode()
    assert got.fine.any()
    seen = torch.from_numpy(got.kept[0] != 0).repeat_interleave(16, 1)[:, : scene.lengths[0]]
    lost = torch.softmax(scene.scores(0), -1).masked_fill(seen, 0.0).sum(-1)
    assert (lost.numpy() <= got.mass[0]).all()
    assert (kl_nats(got.mass) <= theta).all()


@pytest.mark.parametrize("theta", [20.0, 31.0, 36.0, 40.0, 100.0, math.inf])
def test_budgets_beyond_what_float64_tells_from_1_are_kept_to(theta: float) -> None:
    """1 - e^-36 is the last mass below 1: a budget is spent up to where its certificate still says so."""
    dropped = 0
    for above in np.arange(15.0, 60.0, 0.5):
        scene = Scene(dim=8, heads=1, group=1, keys="zero", lengths=(6 * 16 + 1,), theta=(theta,))
        scene.query = torch.zeros_like(scene.query)
        scene.query[..., 0] = 1.0
        height = above + 0.07 * torch.arange(4.0)
        scene.k[scene.tables[0, 1:5].tolist(), :, :, 0] = (height / scene.scoring.scale)[:, None, None]
        _, got = scene.decode()
        assert (kl_nats(got.mass) <= min(theta, 36.0)).all()
        dropped += int((got.kept[0] == 0).sum())
    assert dropped > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process")
def test_a_child_of_fork_has_threads_of_its_own() -> None:
    """Forked while the workers sleep and while they wait for work."""
    scene = Scene(lengths=(3000, 1500), theta=(0.1, 0.0))
    cache = scene.cache()
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        want, _ = scene.decode(cache)
        for pause in (0.0, 0.2):
            time.sleep(pause)
            child = os.fork()
            if child == 0:
                same = all(torch.equal(scene.decode(cache)[0], want) for _ in range(3))
                os._exit(0 if same else 1)
            ends = time.monotonic() + 60
            done = (0, 0)
            while done[0] == 0 and time.monotonic() < ends:
                done = os.waitpid(child, os.WNOHANG)
                time.sleep(0.01)
            if done[0] == 0:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            assert done[0] == child, "the child hangs"
            assert os.waitstatus_to_exitcode(done[1]) == 0
            assert torch.equal(scene.decode(cache)[0], want)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 1e-30, 1e4, 1e18, 1e30, 3e38, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keys", ["pages apart", "tiny", "subnormal"])
def test_queries_of_any_size(size: float, dtype: torch.dtype, keys: str) -> None:
    scene = Scene(keys=keys, dtype=dtype, query_dtype=dtype, lengths=(500,), theta=(0.3,), seed=4)
    scene.query = (scene.query.float().clamp(-1.0, 1.0) * size).to(dtype)
    _, got = scene.decode()
    assert (kl_nats(got.mass) <= 0.3).all()
    kept = torch.from_numpy(got.kept[0] != 0)
    if not scene.query.isfinite().all():
        assert kept.all()
        return
    seen = kept.repeat_interleave(16, 1)[:, :500].repeat_interleave(scene.group, 0)
    lost = torch.softmax(scene.scores(0), -1).masked_fill(seen, 0.0).sum(-1)
    assert (lost.numpy() <= got.mass[0]).all()


def test_a_page_that_could_not_be_sealed_is_read_and_spoils_only_its_own_head() -> None:
    scene = Scene(lengths=(400,), theta=(0.3,))
    scene.k[scene.tables[0, 5], 1, 3, 2] = torch.nan
    out, got = scene.decode()
    assert got.kept[0, :, 5].all()
    assert got.kept[0, 1].all()  # of the head that has it nothing is known
    assert not got.kept[0, 0].all()
    assert out[0, :3].isfinite().all()
    assert out[0, 3:].isnan().all()
    assert (got.mass[0, 3:] == 0).all()


@given(shapes)
@settings(max_examples=40)
def test_seals_equal_those_of_torch(shape: dict) -> None:
    scene = Scene(**shape, lengths=(3 * shape["page"],))
    ours, theirs = scene.cache(), scene.cache("torch")
    np.testing.assert_array_equal(ours.sealed, theirs.sealed)
    pages = torch.from_numpy(np.flatnonzero(ours.sealed))
    a, b = (unpack(c.shadow.record[0, pages], c.shadow.low[0, pages], scene.page, scene.dim) for c in (ours, theirs))
    assert torch.equal(a.weight, b.weight)
    assert torch.equal(a.centre, b.centre)
    assert torch.equal(a.step, b.step)
    assert ((a.codes.int() - b.codes.int()).abs() <= 1).all()
    torch.testing.assert_close(a.error, b.error, rtol=1e-6, atol=1e-44)
    torch.testing.assert_close(a.norm, b.norm, rtol=3e-7, atol=0.0)
    unit, m = a.weight.double() * a.step.double().unsqueeze(-1), a.centre.double()
    back = m.unsqueeze(-2) + unit.unsqueeze(-2) * (a.codes.double() - 128.0)
    room = (m.abs() + 128 * unit) * 2.0**-50
    allowed = a.weight.double() * a.error.double().unsqueeze(-1) + room
    assert ((ours.k[0, pages].double() - back).abs() <= allowed.unsqueeze(-2)).all()
    torch.testing.assert_close(
        ours.shadow.value_centre[0, pages], theirs.shadow.value_centre[0, pages], rtol=2e-3, atol=1e-7
    )
    away = (ours.v[0, pages].double() - ours.shadow.value_centre[0, pages].double().unsqueeze(-2)).norm(dim=-1)
    assert (away.amax(-1) <= ours.shadow.value_radius[0, pages].double()).all()


def test_the_cpp_reads_no_more_than_a_little_more_than_the_reference_bounds_ask() -> None:
    """The integers' rounding costs next to nothing: over many rows the pages read are the same."""
    ours = theirs = 0
    for seed in range(6):
        scene = Scene(lengths=(16 * 60,), theta=(0.05,), seed=seed)
        _, got = scene.decode()
        ours += int(got.read.sum())
        batch = scene.batch(scene.cache("torch"))
        batch.audit = True
        pruned_decode(batch, 0, scene.query, scene.scoring)
        theirs += int(batch.audits[0].kept.sum())
    assert 0 < theirs < 6 * 120
    assert abs(ours - theirs) <= 3


def test_both_paths_of_the_attention_function_agree() -> None:
    """`paged_attention` over a native and a torch cache: outputs and statistics."""
    found = []
    for kernels in ("native", "torch"):
        scene = Scene(lengths=(300, 41, 5), theta=(0.2, 0.0, 0.2), dim=32)
        cache = scene.cache(kernels)
        batch = scene.batch(cache)
        new = [
            torch.stack([scene.tokens(pool, r)[:, -1] for r in range(3)], 1).float()[None]
            for pool in (scene.k, scene.v)
        ]
        query = scene.query.transpose(0, 1)[None]
        out, _ = paged_attention(SimpleNamespace(layer_idx=0), query, *new, None, paged=batch)
        found.append((out, batch.statistics()))
    (a, said), (b, expected) = found
    torch.testing.assert_close(a, b, atol=2e-5, rtol=0.0)
    np.testing.assert_allclose(said.kept_fraction, expected.kept_fraction, atol=0.06)
    np.testing.assert_allclose(said.pruned_mass_max, expected.pruned_mass_max, rtol=0.3)
    assert said.pruned_layers.tolist() == expected.pruned_layers.tolist() == [1, 0, 0]


def test_reference_bounds_hold_the_truth_in_both_looks_for_the_shapes_of_the_kernels() -> None:
    for dim in DIMS:
        for page in (1, 5, 20, 64):
            scene = Scene(dim=dim, page=page, lengths=(4 * page,), seed=dim + page)
            cache = scene.cache("torch")
            table = torch.from_numpy(scene.tables[0].astype(np.int64))
            true = torch.logsumexp(scene.scores(0).reshape(6, 4, page), -1).T.numpy()
            query = scene.query.reshape(1, 2, 3, dim)
            for coarse in (True, False):
                lower, upper = page_bounds(cache, 0, table, query, scene.scoring, coarse=coarse)
                assert (lower <= true).all()
                assert (true <= upper).all()


def broken_cache(folder):
    (folder / "file").write_text("")
    return {"ENTROPIC_CACHE": str(folder / "file")}


def broken_compiler(folder):
    (folder / "cxx").write_text("no program")
    (folder / "cxx").chmod(0o755)
    return {"ENTROPIC_CACHE": str(folder), "CXX": str(folder / "cxx")}


def silent_compiler(folder):
    (folder / "cxx").write_text("#!/bin/sh\n")
    (folder / "cxx").chmod(0o755)
    return {"ENTROPIC_CACHE": str(folder), "CXX": str(folder / "cxx")}


def test_the_compiler_may_bring_arguments(tmp_path, monkeypatch):
    program = tmp_path / "a compiler"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for asked, arguments in ((f"'{program}'", []), (f"'{program}' -O1 -D'A B'", ["-O1", "-DA B"])):
        monkeypatch.setenv("CXX", asked)
        assert build._compiler() == [str(program), *arguments]
    for asked, said in (("no-such-compiler -O1", "named 'no-such-compiler'"), ("g++ '", "not a command")):
        monkeypatch.setenv("CXX", asked)
        with pytest.raises(native.NativeUnavailableError, match=said):
            build._compiler()
    monkeypatch.setenv("CXX", " ")
    assert build._compiler()[1:] == []


@pytest.mark.parametrize("broken", [broken_cache, broken_compiler, silent_compiler])
def test_whatever_keeps_the_kernels_from_being_built_is_said(broken, tmp_path, monkeypatch):
    for name, value in broken(tmp_path).items():
        monkeypatch.setenv(name, value)
    native.library.cache_clear()
    try:
        assert "ENTROPIC_CACHE" in native.reason_unavailable()
    finally:
        native.library.cache_clear()
