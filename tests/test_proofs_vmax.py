from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from entropic_ctl.errors import BadInputError
from proofs import check, vmax

SIZES = [2, 3, 7, 256, 32_000, 49_152, 151_936, 2**20, 2**31 - 1]


def varentropy(p: np.ndarray) -> np.ndarray:
    log_p = np.log(np.where(p > 0, p, 1.0))
    mean = (p * log_p).sum(-1)
    return (p * log_p**2).sum(-1) - mean**2


@pytest.mark.parametrize(("n", "value", "gain"), [(32_000, 27.8903, 0.07171), (151_936, 36.5794, 0.05468)])
def test_published_values(n: int, value: float, gain: float) -> None:
    found = vmax.maximum(n)
    assert float(found.upper) == pytest.approx(value, abs=5e-5)
    assert 2 / float(found.upper) == pytest.approx(gain, abs=5e-6)
    assert float(vmax.maximum(2**20).upper) == pytest.approx(49.0385, abs=5e-5)


@pytest.mark.parametrize(("n", "logit", "entropy"), [(32_000, 10.7499, 4.8975), (151_936, 12.2604, 5.6722)])
def test_published_maximisers(n: int, logit: float, entropy: float) -> None:
    found = vmax.maximum(n)
    assert found.logit == pytest.approx(logit, abs=5e-5)
    assert found.entropy_nats == pytest.approx(entropy, abs=5e-5)


@pytest.mark.parametrize("n", SIZES)
def test_two_derivations_and_scipy_agree(n: int) -> None:
    """Branch and bound, the checker's closed form at the stationary point, and a float optimiser over r."""
    found = vmax.maximum(n)
    closed = check.v_max_bounds(n, found.bracket())
    assert found.lower <= closed.hi
    assert closed.lo <= found.upper
    assert found.upper - found.lower < Fraction(1, 10**13)
    assert closed.hi - closed.lo < Fraction(1, 10**13)
    best = optimize.minimize_scalar(
        lambda x: -vmax.two_level(n, 1 / (1 + math.exp(x)))[1], bounds=(0, 8), method="bounded", options={"xatol": 1e-9}
    )
    assert -best.fun == pytest.approx(float(found.upper), rel=1e-10)
    assert vmax.two_level(n, found.tail_mass)[1] == pytest.approx(float(found.lower), rel=1e-12)


@pytest.mark.parametrize("n", SIZES)
def test_simple_bound(n: int) -> None:
    assert float(vmax.maximum(n).upper) <= math.log(n - 1) ** 2 / 4 + 1


def test_grows_with_the_vocabulary() -> None:
    bounds = [vmax.maximum(n) for n in SIZES]
    assert all(a.upper < b.lower for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_no_distribution_exceeds_it_and_optimisation_reaches_it(n: int) -> None:
    """Theorem 1 without its proof: random distributions stay below, free optimisation climbs to the two-level one."""
    bound = float(vmax.maximum(n).upper)
    rng = np.random.default_rng(n)
    for sharpness in (0.05, 0.3, 1.0):
        assert varentropy(rng.dirichlet(np.full(n, sharpness), 20_000)).max() <= bound + 1e-12

    def negative(z: np.ndarray) -> float:
        w = np.exp(z - z.max())
        return -float(varentropy(w / w.sum()))

    best = min(optimize.minimize(negative, rng.normal(0, 3, n)).fun for _ in range(6))
    assert -best <= bound + 1e-9
    assert -best == pytest.approx(bound, rel=1e-5)


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=40), st.floats(-3, 3))
def test_any_logits_at_any_temperature_stay_below(logits: list[float], u: float) -> None:
    z = np.array(logits) / math.exp(u)
    w = np.exp(z - z.max())
    assert varentropy(w / w.sum()) <= float(vmax.maximum(len(logits)).upper) + 1e-9


@given(st.integers(2, 10**6), st.floats(1e-6, 1 - 1e-6))
def test_two_level_matches_its_logits(n: int, r: float) -> None:
    logit = vmax.two_level_logit(n, r)
    assert 1 / (1 + (n - 1) * math.exp(-logit)) == pytest.approx(1 - r, rel=1e-9)


def test_two_level_matches_the_definition() -> None:
    p = np.array([0.7, *[0.3 / 9] * 9])
    entropy, v = vmax.two_level(10, 0.3)
    assert entropy == pytest.approx(-(p * np.log(p)).sum(), rel=1e-14)
    assert v == pytest.approx(varentropy(p), rel=1e-12)
    assert vmax.two_level(10, 0.0) == (0.0, 0.0)
    assert vmax.two_level(10, 1.0) == (math.log(9), 0.0)


@pytest.mark.parametrize("n", [1, 0, -5, 2**31, True, 3.0, None])
def test_bad_vocabulary(n: object) -> None:
    with pytest.raises(BadInputError, match="vocab_size"):
        vmax.maximum(n)  # type: ignore[arg-type]
