"""The sampling kernel in Triton against NumPy in float64; run by test_triton.py in a process of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from paged_layer import DEVICE

from backends.triton.sampling import Sampled, Target, sample_rows
from entropic_ctl.entropy import entropy_varentropy

INF = math.inf
MASK = np.uint64(0xFFFFFFFF)


def words(seed: int, index: int, n: int) -> np.ndarray:
    """Philox4x32-10, written out: one word per token."""
    group = np.arange(-(-n // 4), dtype=np.uint64)
    c = [group, np.full_like(group, index), np.zeros_like(group), np.zeros_like(group)]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ key[0], b & MASK, (a >> np.uint64(32)) ^ c[3] ^ key[1], a & MASK]
        key = [(key[0] + np.uint64(0x9E3779B9)) & MASK, (key[1] + np.uint64(0xBB67AE85)) & MASK]
    return np.stack(c, axis=1).reshape(-1)[:n]


def race(logits: np.ndarray, temperature: float, seed: int, index: int) -> np.ndarray:
    v = np.minimum((words(seed, index, logits.shape[0]).astype(np.float32) + np.float32(0.5)) / 2.0**32, 1 - 2.0**-24)
    return (logits.astype(np.float64) - logits.max()) / temperature - np.log(-np.log1p(-v.astype(np.float64)))


def test_philox_is_the_published_generator() -> None:
    """Known answer of the authors' test vectors: key 0, counter 0."""
    assert [int(w) for w in words(0, 0, 4)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def draw(logits: np.ndarray, seeds: list[int], index: list[int], **options: object) -> Sampled:
    return sample_rows(
        torch.from_numpy(logits).to(DEVICE),
        torch.tensor(seeds, device=DEVICE),
        torch.tensor(index, device=DEVICE),
        **options,
    )


def ones(rows: int) -> torch.Tensor:
    return torch.ones(rows, dtype=torch.float64, device=DEVICE)


@pytest.mark.parametrize("n", [3, 997, 4096, 9001])
def test_the_draw_is_the_specified_race(n: int) -> None:
    rng = np.random.default_rng(n)
    logits = (rng.normal(size=(4, n)) * 3).astype(np.float32)
    logits[1, : n // 2] = -INF
    seeds, index, heat = [0, 7, 2**62 + 12345, 2**33], [0, 3, 100, 2**20], np.array([1.0, 0.5, 2.0, 0.01])
    got = draw(logits, seeds, index, temperature=torch.from_numpy(heat).to(DEVICE))
    for r in range(4):
        y = race(logits[r], heat[r], seeds[r], index[r])
        token = int(got.token[r])
        assert y.max() - y[token] < 1e-4  # the winner, or one within rounding of it
        assert token == int(np.argmax(y)) or np.partition(y, -2)[-1] - np.partition(y, -2)[-2] < 1e-4
        H, V = entropy_varentropy(logits[r], float(heat[r]))
        assert float(got.entropy[r]) == pytest.approx(float(H), abs=1e-5, rel=1e-5)
        assert float(got.varentropy[r]) == pytest.approx(float(V), abs=1e-4, rel=1e-3)
        assert float(got.model_entropy[r]) == pytest.approx(float(entropy_varentropy(logits[r])[0]), abs=1e-5)


def test_model_entropy_comes_from_the_raw_logits() -> None:
    rng = np.random.default_rng(1)
    raw = rng.normal(size=(2, 300)).astype(np.float32)
    masked = raw.copy()
    masked[:, 10:] = -INF
    got = draw(masked, [1, 2], [0, 0], temperature=ones(2), raw=torch.from_numpy(raw).to(DEVICE))
    np.testing.assert_allclose(got.model_entropy.cpu(), entropy_varentropy(raw)[0], atol=1e-5)
    np.testing.assert_allclose(got.entropy.cpu(), entropy_varentropy(masked)[0], atol=1e-5)
    assert (got.token < 10).all()


def test_temperature_zero_takes_the_first_of_the_most_likely_and_an_empty_row_is_flagged() -> None:
    logits = np.zeros((3, 5000), np.float32)
    logits[0, [4500, 4800]] = 3.0
    logits[1] = -INF
    got = draw(
        logits, [5, 5, 5], [0, 0, 0], temperature=torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64, device=DEVICE)
    )
    assert got.token.tolist() == [4500, -1, 0]
    assert float(got.model_entropy[2]) == pytest.approx(math.log(5000), abs=1e-4)


@pytest.mark.parametrize("goal", [0.5, 2.0, 30.0])
def test_the_solve_meets_its_target_or_its_clamp(goal: float) -> None:
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(3, 2000)) * np.array([[1.0], [4.0], [15.0]])).astype(np.float32)
    got = draw(logits, [1, 2, 3], [0, 1, 2], target=Target(goal, 0.05, 5.0))
    for r in range(3):
        t = float(got.temperature[r])
        H = float(entropy_varentropy(logits[r], t)[0])
        edges = [float(entropy_varentropy(logits[r], edge)[0]) for edge in (0.05, 5.0)]
        if edges[0] < goal < edges[1]:
            assert pytest.approx(goal, abs=5e-5) == H
        else:
            assert t == pytest.approx(0.05 if goal <= edges[0] else 5.0, rel=1e-5)
        y = race(logits[r], t, r + 1, r)
        assert y.max() - y[int(got.token[r])] < 1e-3


def test_draws_follow_the_distribution() -> None:
    p = np.array([0.5, 0.25, 0.15, 0.1])
    rows = 600
    logits = np.broadcast_to(np.log(p).astype(np.float32), (rows, 4)).copy()
    got = draw(logits, list(range(rows)), [9] * rows, temperature=ones(rows))
    count = np.bincount(got.token.cpu().numpy(), minlength=4)
    chi = ((count - rows * p) ** 2 / (rows * p)).sum()
    assert chi < 16.3  # 99.9% of three degrees of freedom
