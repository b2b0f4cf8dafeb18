"""The C++ moments and draws against float64 and the torch reference."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import gumbel
from backends.native import library, reason_unavailable
from backends.native.sampling import NativeLogitView, choose, reach
from backends.sampling import SamplingParams, TorchLogitView, kernels, sample
from entropic_ctl import registry
from entropic_ctl.entropy import ArrayLogitView, entropy_varentropy
from entropic_ctl.errors import BadInputError

pytestmark = pytest.mark.skipif(reason_unavailable() is not None, reason="no C++ compiler")


def logits(seed: int, rows: int, n: int, spread: float = 3.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    z = (rng.normal(size=(rows, n)) * spread).astype(np.float32)
    z[rng.random((rows, n)) < 0.1] = -np.inf
    z[:, 0] = 1.0
    return torch.from_numpy(z)


@settings(deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 3),
    st.sampled_from([1, 2, 15, 16, 17, 255, 257, 1023, 1024, 1025, 5000, 17_000]),
    st.lists(st.sampled_from([1e-310, 0.05, 0.2, 0.3, 0.7, 1.0, 1.6, 5.0, math.inf, 0.0]), min_size=1, max_size=6),
)
def test_moments_match_float64_at_every_sequence_of_temperatures(
    seed: int, rows: int, n: int, temperatures: list[float]
) -> None:
    z = logits(seed, rows, n, spread=1 + seed % 12)
    view = NativeLogitView(z)
    for t in temperatures:
        T = np.full(rows, t)
        H, V = view.at(T)
        exact_H, exact_V = entropy_varentropy(z.numpy(), T)
        np.testing.assert_allclose(H, exact_H, atol=1e-5)
        np.testing.assert_allclose(V, exact_V, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(view.model_entropy, entropy_varentropy(z.numpy())[0], atol=1e-5)


def test_cold_rows_read_copies_and_stay_within_the_bound() -> None:
    z = logits(0, 2, 20_000)
    view = NativeLogitView(z)
    state = view._processed._state
    for t in (0.4, 0.3, 0.28, 0.25):
        H, V = view.at(np.full(2, t))
        exact = entropy_varentropy(z.numpy(), np.full(2, t))
        np.testing.assert_allclose(H, exact[0], atol=2e-6)
        np.testing.assert_allclose(V, exact[1], rtol=1e-5, atol=1e-6)
    assert (state[:, 3] >= 0.25).all()  # this branch was reached
    assert view._processed._counts.sum() < 2 * 20_000 / 2
    n = 151_936
    c = reach(n)
    assert n * math.exp(-c) * (c + math.log(n) + 2) ** 2 <= 1.0000001e-7
    assert reach(49_152) == pytest.approx(34.64, abs=0.01)


def test_rows_do_not_depend_on_batch_or_threads() -> None:
    z = logits(1, 5, 40_001, 2.0)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            together = NativeLogitView(z)
            for t in (0.9, 0.3, 0.25, 0.25):
                H, V = together.at(np.full(5, t))
                found.append(np.concatenate([H, V]))
            alone = [NativeLogitView(z[r : r + 1]) for r in range(5)]
            for t in (0.9, 0.3, 0.25, 0.25):
                parts = [view.at(np.array([t])) for view in alone]
                found.append(np.concatenate([[h[0] for h, _ in parts], [v[0] for _, v in parts]]))
    finally:
        torch.set_num_threads(before)
    for i, values in enumerate(found):
        np.testing.assert_array_equal(values, found[i % 4])


def test_empty_support_and_nan_are_flagged_and_leave_other_rows_alone() -> None:
    z = logits(2, 5, 3000)
    z[1] = -math.inf
    z[2, 2999] = math.nan
    z[3, 5] = math.inf
    view = NativeLogitView(z)
    for t in (1.0, 0.2, 0.1, 0.1):
        H, V = view.at(np.full(5, t))
        assert np.isnan(H).tolist() == np.isnan(V).tolist() == [False, True, True, True, False]
    assert np.isnan(view.model_entropy).tolist() == [False, True, True, True, False]
    assert np.isnan(view.at(np.array([-1.0, 1, 1, 1, np.nan]))[0]).all() == np.True_


def test_processed_logits_are_tempered_and_raw_ones_are_measured() -> None:
    z = logits(3, 2, 500)
    processed = z.clone()
    processed[:, 3:] = -math.inf
    native, reference = NativeLogitView(z, processed), TorchLogitView(z, processed)
    np.testing.assert_allclose(native.model_entropy, reference.model_entropy.numpy(), atol=1e-5)
    for got, want in zip(native.at(np.ones(2)), reference.at(np.ones(2)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert isinstance(native.at(torch.ones(2))[0], torch.Tensor)
    half = NativeLogitView(z.half())
    np.testing.assert_allclose(half.model_entropy, TorchLogitView(z.half()).model_entropy.numpy(), atol=1e-5)


@pytest.mark.parametrize("law", registry.names("entropic_ctl.temperature"))
def test_every_law_decides_the_same_temperature_as_on_float64(law: str) -> None:
    module = registry.load("entropic_ctl.temperature", law)
    made = module.build(module.Config())
    z = logits(4, 6, 5000, 2.0)
    u = np.full(6, made.start())
    for _ in range(3):
        found, exact = made.temper(u, NativeLogitView(z)), made.temper(u, ArrayLogitView(z.numpy()))
        np.testing.assert_allclose(found[0], exact[0], rtol=2e-5)
        np.testing.assert_allclose(found[1], exact[1], atol=2e-5)
        u = made.update(u, found[1])


@settings(deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 2, 63, 64, 65, 1023, 1025, 20_000]),
    st.floats(0.02, 5.0),
    st.integers(0, 2**63 - 1),
)
def test_draws_are_those_of_the_reference_up_to_ties_in_rounding(seed: int, n: int, t: float, key: int) -> None:
    z = logits(seed, 2, n, spread=1 + seed % 8)
    T = torch.tensor([t, 1.0], dtype=torch.float64)
    keys, steps = [key, key ^ 1], [seed, 2**31 - 2]
    native, reference = choose(z, T, keys, steps), gumbel.choose(z, T, keys, steps)
    x = (z - z.amax(dim=1, keepdim=True)) * gumbel.scale_of(T)[:, None]
    y = x + gumbel.gumbel(keys, steps, n)
    for row in range(2):
        best, mine = y[row, reference[row]], y[row, native[row]]
        assert float(best - mine) <= 4e-6
        if float(torch.topk(y[row], min(2, n)).values[-1]) < float(best) - 1e-5:
            assert int(native[row]) == int(reference[row])


def test_draws_do_not_depend_on_batch_or_threads_and_ties_go_to_the_lowest_token() -> None:
    z = logits(5, 6, 40_001, 2.0)
    T = torch.full((6,), 0.8, dtype=torch.float64)
    before, keys, steps = torch.get_num_threads(), list(range(6)), [3] * 6
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(choose(z, T, keys, steps).tolist())
            found.append([int(choose(z[r : r + 1], T[r : r + 1], [r], [3])[0]) for r in range(6)])
    finally:
        torch.set_num_threads(before)
    assert all(tokens == found[0] for tokens in found)
    assert found[0] == gumbel.choose(z, T, keys, steps).tolist()


def test_frequencies_match_the_softmax() -> None:
    z = torch.tensor([1.0, 0.0, -1.0, -math.inf])
    count = 20_000
    drawn = choose(
        z.repeat(count, 1), torch.full((count,), 0.7, dtype=torch.float64), [11] * count, list(range(count))
    ).numpy()
    p = torch.softmax(z.double() / 0.7, 0).numpy()
    counts = np.bincount(drawn, minlength=4)
    assert counts[3] == 0
    assert ((counts[:3] - count * p[:3]) ** 2 / (count * p[:3])).sum() < 13.8


def test_sample_with_either_kernel_takes_the_same_tokens() -> None:
    z = logits(6, 5, 3000)
    params = [
        SamplingParams(seed=s, top_k=k, top_p=p)
        for s, k, p in ((1, 0, 1.0), (2, 5, 1.0), (3, 0, 0.6), (4, 0, 1.0), (5, 0, 1.0))
    ]
    T, greedy = np.array([0.8, 1.2, 1.0, 0.0, 1.0]), np.array([False, False, False, False, True])
    one, other = (sample(z, T, greedy, params, [4] * 5, kernels(name).choose) for name in ("torch", "native"))
    assert one.tolist() == other.tolist()


def test_exp_and_noise_of_the_kernels_are_accurate() -> None:
    x = np.linspace(-87.0, 0.0, 100_001, dtype=np.float32)
    out = np.empty_like(x)
    library().entropic_exp(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(x.size))
    exact = np.exp(x.astype(np.float64))
    assert np.abs(out / exact - 1).max() < 1.3e-7
    words = np.random.default_rng(0).integers(0, 2**32, 20_000).astype(np.uint32)
    words[:3] = 0, 1, 2**32 - 1
    g = np.empty(words.size, np.float32)
    library().entropic_gumbel(
        ctypes.c_void_p(words.ctypes.data), ctypes.c_void_p(g.ctypes.data), ctypes.c_int64(words.size)
    )
    np.testing.assert_allclose(g, gumbel.gumbel_of_words(torch.from_numpy(words.astype(np.int64))).numpy(), atol=4e-6)


def test_logits_elsewhere_or_without_a_vocabulary_are_refused() -> None:
    for bad in (torch.zeros(3), torch.zeros((2, 0)), torch.zeros((2, 3), device="meta")):
        with pytest.raises(BadInputError, match="logits"):
            NativeLogitView(bad)
