from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.pruning.certificate import Certificate, kl_nats, mass_bound, mass_of_kl, output_error


@given(st.integers(-1000, 1000), st.integers(-1000, 1000))
def test_mass_bound_is_above_the_exact_quotient_and_tight(u: int, z: int) -> None:
    """Powers of two: U/(U+Z) is known exactly, only ln 2 multiples are rounded."""
    gap = max(-60, min(60, z - u))
    exact = float(Fraction(1, 1) / (1 + Fraction(2) ** gap))
    got = float(mass_bound(u * math.log(2), (u + gap) * math.log(2)))
    assert exact <= got <= exact * (1 + 1e-11)


def test_limits_of_the_mass_bound() -> None:
    inf = math.inf
    u = [-inf, -inf, 0.0, inf, 0.0, math.nan, -5000.0]
    z = [-inf, 0.0, -inf, inf, inf, 0.0, 0.0]
    got = mass_bound(u, z)
    np.testing.assert_array_equal(got[:4], [0.0, 0.0, 1.0, 1.0])
    assert got[4] == 1.0
    assert got[5] == 1.0
    assert 0 < got[6] < 1e-300


@given(st.floats(0, 0.999999))
def test_kl_and_mass_are_inverse_and_rounded_outward(m: float) -> None:
    theta = float(kl_nats(m))
    assert theta >= m  # -ln(1 - m) >= m
    assert float(mass_of_kl(theta)) == pytest.approx(m, rel=1e-9, abs=1e-300)
    assert float(kl_nats(mass_of_kl(m))) <= m * (1 + 1e-9) + 1e-300


def test_certain_loss_is_infinite() -> None:
    assert kl_nats(1.0) == math.inf
    assert kl_nats(0.0) == 0.0


@given(st.integers(0, 2**32 - 1))
def test_output_error_bounds_the_true_change_of_output(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pages, size, dim = 6, 4, 5
    values = rng.normal(size=(pages, size, dim)) * rng.choice([0.1, 1, 10], size=(pages, 1, 1))
    a = rng.dirichlet(np.full(pages * size, 0.3)).reshape(pages, size)
    pruned = rng.random(pages) < 0.5
    if pruned.all() or a[~pruned].sum() == 0:
        pruned[int(np.argmax(a.sum(axis=1)))] = False
    m = a[pruned].sum()
    dense = np.einsum("pt,ptd->d", a, values)
    kept = np.einsum("pt,ptd->d", a[~pruned], values[~pruned]) / a[~pruned].sum()
    centre = values[pruned].mean(axis=1)
    radius = np.linalg.norm(values[pruned] - centre[:, None], axis=-1).max(axis=-1, initial=0)
    distance = np.linalg.norm(centre - kept, axis=-1)
    bound = output_error([m], distance[None], radius)[0]
    assert np.linalg.norm(dense - kept) <= bound + 1e-12
    if not pruned.any():
        assert bound == 0.0


def test_record() -> None:
    record = Certificate(np.array([0.0, 0.5]), np.array([[True, False, True, True]]))
    assert record.kept_fraction == 0.75
    assert record.total_variation[1] == 0.5
    assert record.kl_nats[1] == pytest.approx(math.log(2))
