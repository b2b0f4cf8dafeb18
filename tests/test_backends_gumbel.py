"""The random numbers of sampling, and the draw, against their specification and the softmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends import gumbel


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(key: int, counter: tuple[int, ...], words: tuple[int, ...]) -> None:
    """Vectors of the authors' library (Random123)."""
    found = gumbel.philox(torch.tensor(key), tuple(torch.tensor(c) for c in counter))  # type: ignore[arg-type]
    assert tuple(int(w) for w in found) == words


def test_noise_follows_the_specification_word_by_word() -> None:
    """Token 6 of draw 3 reads word 2 of counter (1, 3, 0, 0)."""
    seed = 7 << 32 | 5
    words = gumbel.philox(torch.tensor(seed), (torch.tensor(1), torch.tensor(3), torch.tensor(0), torch.tensor(0)))
    v = np.float64((int(words[2]) + 0.5) * 2.0**-32)
    assert float(gumbel.gumbel([seed], [3], 9)[0, 6]) == pytest.approx(-math.log(-math.log1p(-v)), abs=2e-6)


def test_noise_is_a_pure_function_of_seed_index_and_token() -> None:
    whole = gumbel.gumbel([5, 9, 5], [0, 7, 1], 103)
    assert torch.equal(whole[1], gumbel.gumbel([9], [7], 103)[0])
    assert torch.equal(whole[0, :50], gumbel.gumbel([5], [0], 50)[0])
    assert not torch.equal(whole[0], whole[2])


def test_the_map_from_words_is_accurate_and_monotone_and_bounded() -> None:
    ends = torch.tensor([0, 1, 2**24 - 1, 2**24, 2**32 - 1])
    words = (
        torch.cat([ends, torch.randint(0, 2**32, (20000,), generator=torch.Generator().manual_seed(0))]).sort().values
    )
    words = torch.cat([words, (2.0 ** torch.linspace(0, 31.9, 4000, dtype=torch.float64)).long()]).sort().values
    g = gumbel.gumbel_of_words(words)
    v = (words.double() + 0.5) * 2.0**-32
    exact = -torch.log(-torch.log1p(-v))
    assert float((g.double() - exact)[v < 0.999].abs().max()) < 1e-5
    assert bool((g[1:] - g[:-1] <= 1e-5).all())
    assert float(g.max()) == pytest.approx(gumbel.GUMBEL_MAX, abs=1e-5)
    assert float(g.min()) == pytest.approx(gumbel.GUMBEL_MIN, abs=1e-5)
    assert pytest.approx(22.8739, abs=1e-4) == gumbel.GUMBEL_MAX


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    g = gumbel.gumbel(range(8), [0] * 8, 50_000).double()
    n = g.numel()
    assert float(g.mean()) == pytest.approx(0.57721566, abs=4 * math.pi / math.sqrt(6 * n))
    assert float(g.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert float((g > 5).double().mean()) == pytest.approx(-math.expm1(-math.exp(-5)), rel=0.1)


def _inverse_cdf(p: np.ndarray, count: int, seed: int) -> np.ndarray:
    return np.searchsorted(np.cumsum(p), np.random.default_rng(seed).random(count), side="right").clip(max=p.size - 1)


def test_draws_have_the_distribution_of_the_inverse_cdf() -> None:
    """20,000 draws over 40 tokens: chi-square against the softmax, and against as many draws by inversion."""
    z = torch.from_numpy(np.random.default_rng(3).normal(0, 2, 40).astype(np.float32))
    count, t = 20_000, 0.9
    drawn = gumbel.choose(z.expand(count, -1), torch.full((count,), t, dtype=torch.float64), [1] * count, range(count))
    p = torch.softmax(z.double() / t, 0).numpy()
    big = p * count >= 10
    assert big.sum() > 15
    counts = np.bincount(drawn.numpy(), minlength=40).astype(float)
    other = np.bincount(_inverse_cdf(p, count, 4), minlength=40).astype(float)
    pool = [np.append(x[big], x[~big].sum()) for x in (counts, other, p * count)]
    cells = pool[0].size
    limit = (cells - 1) + 4 * math.sqrt(2 * (cells - 1))  # mean and 4 standard deviations of chi-square, fixed numbers
    assert ((pool[0] - pool[2]) ** 2 / pool[2]).sum() < limit
    assert ((pool[0] - pool[1]) ** 2 / (pool[0] + pool[1])).sum() < limit


def test_rare_tokens_are_drawn_as_often_as_they_should_be() -> None:
    """P(g > x) = 1 - exp(-e^-x) up to the last word: how many words give more than x, counted exactly."""
    for x in (5.0, 12.0, 16.6, 18.0, 20.0, 21.0):
        low, high = 0, 2**32 - 1  # the largest word whose noise is above x: noise falls in the word
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if float(gumbel.gumbel_of_words(torch.tensor([middle]))[0]) > x else (low, middle - 1)
            )
        assert (low + 1) * 2.0**-32 == pytest.approx(-math.expm1(-math.exp(-x)), abs=2.0**-32, rel=2e-5)


def test_a_long_thin_tail_wins_as_often_as_it_should() -> None:
    """65,536 tokens, together as likely as the first one."""
    n, count = 65_537, 400
    z = torch.zeros((40, n))
    z[:, 0] = math.log(n - 1)
    hits = 0
    for start in range(0, count, 40):
        drawn = gumbel.choose(z, torch.ones(40, dtype=torch.float64), [9] * 40, range(start, start + 40))
        hits += int((drawn > 0).sum())
    assert abs(hits / count - 0.5) < 4 * 0.5 / math.sqrt(count)


@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40), st.floats(0.05, 5), st.integers(0, 2**63 - 1))
def test_a_draw_maximises_scaled_logit_plus_noise_and_shifts_change_nothing(
    logits: list[float], t: float, seed: int
) -> None:
    z = torch.tensor([logits], dtype=torch.float32)
    temperature = torch.tensor([t], dtype=torch.float64)
    token = int(gumbel.choose(z, temperature, [seed], [2])[0])
    y = (z[0].double() - z[0].double().max()) / t + gumbel.gumbel([seed], [2], len(logits))[0].double()
    assert float(y.max() - y[token]) <= 1e-4
    assert (float(z[0].max()) - logits[token]) / t <= gumbel.MARGIN
    assert int(gumbel.choose(z.round() + 64.0, temperature, [seed], [2])[0]) == int(
        gumbel.choose(z.round(), temperature, [seed], [2])[0]
    )


def test_forbidden_tokens_are_never_drawn_and_equal_maxima_share() -> None:
    z = torch.tensor([[0.0, -math.inf, 0.0]]).expand(2000, -1)
    drawn = gumbel.choose(z, torch.full((2000,), 1e-300, dtype=torch.float64), [0] * 2000, range(2000))
    counts = np.bincount(drawn.numpy(), minlength=3)
    assert counts[1] == 0
    assert abs(counts[0] - 1000) < 4 * math.sqrt(500)
