"""Targets above ln 2 + ln(n-1)/2, up to the edge where the uniform distribution meets the tangent."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from certified import judge, make
from frozen_loops import largest_target, moments, normalised, run, settled, sharp_varentropy, two_levels
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.temperature import feedback
from proofs.check import gain
from proofs.enclosures import Interval
from proofs.search.gain import equilibrium_tail_mass, tail_interval
from proofs.vmax import maximum

N = 32_000


def half(n: int) -> float:
    """The target at which the two-level distribution has half its mass on one token."""
    return math.log(2) + 0.5 * math.log(n - 1)


def sharp(n: int, target: float, tail: Interval | None = None) -> bool:
    tail = tail or tail_interval(n, target)
    assert tail is not None
    return gain.is_sharp(n, Fraction(target), tail, gain.at_target(n, Fraction(target), tail))


@pytest.mark.parametrize("n", [3, 10, 300, N, 151_936, 2**20, 2**31 - 1])
def test_the_edge_is_where_the_tangent_meets_the_uniform_distribution(n: int) -> None:
    edge = largest_target(n)
    assert half(n) < edge < math.log(n)
    assert sharp(n, half(n) + 0.5 * (edge - half(n)))
    assert sharp(n, edge - 1e-6)
    assert not sharp(n, edge + 1e-6)
    assert not sharp(n, 0.5 * (edge + math.log(n)))


def test_two_tokens_have_no_such_target() -> None:
    assert sharp(2, 0.69)


@pytest.mark.parametrize("n", [3, N])
def test_evidence_across_the_edge_or_too_wide_is_not_sharp(n: int) -> None:
    edge = largest_target(n)
    below, above = (equilibrium_tail_mass(n, edge + d) for d in (-0.02, 0.02))
    assert below is not None
    assert above is not None
    assert not sharp(n, edge - 0.01, Interval(Fraction(below), Fraction(above)))
    low, high = (equilibrium_tail_mass(n, half(n) + d) for d in (-1e-4, 1e-4))
    assert low is not None
    assert high is not None
    assert sharp(n, half(n), Interval(Fraction(low), Fraction(high)))  # half the mass, and both rules hold around it
    # wide evidence weakens both rules: at 3/4 the first already fails for three tokens
    if n == 3:
        assert not sharp(3, half(3), Interval(Fraction(1, 4), Fraction(13, 20)))


@given(st.sampled_from([3, 4, 10, 300, N, 151_936]), st.floats(0.0, 1.0), st.integers(0, 2**32))
def test_what_is_called_sharp_has_a_tangent_above_every_distribution(n: int, share: float, seed: int) -> None:
    """Random distributions, the uniform one, and those near it, against the tangent at the claimed point."""
    target = half(n) + share * (largest_target(n) - 1e-9 - half(n))
    tail = equilibrium_tail_mass(n, target)
    assert tail is not None
    x = math.log1p(-tail) - math.log(tail)
    v, lam = sharp_varentropy(n, target), (x + math.log(n - 1)) * math.tanh(x / 2) - 2
    rng = np.random.default_rng(seed)
    levels = min(n, int(rng.integers(2, 5)))
    counts = np.ones((60, levels))
    for row in counts[1:]:
        for j in range(levels - 1):
            row[j] = max(1, int(math.exp(rng.uniform(0, math.log(n)))))
        row[:-1] = np.where(row[:-1].cumsum() < n, row[:-1], 1)
        row[:-1] = np.where(row[:-1].cumsum() < n, row[:-1], 0)
    counts[:, -1] = n - counts[:, :-1].sum(1)
    gaps = rng.normal(0, 1, counts.shape) * np.exp(rng.uniform(-6, 2.5, (60, 1)))
    gaps[0] = 0.0
    entropy, varentropy = moments(normalised(gaps, counts), counts)
    assert (varentropy <= v + lam * (entropy - target) + 1e-9 * (1 + abs(lam))).all()


@pytest.mark.parametrize(("n", "at"), [(3, 1.06), (N, 10.0), (N, 9.7), (151_936, 11.5)])
def test_above_the_edge_the_tangent_is_crossed_by_the_uniform_distribution(n: int, at: float) -> None:
    """What is open there is the proof: the line through the two-level point is no bound."""
    tail = equilibrium_tail_mass(n, max(at, largest_target(n) + 1e-3))
    assert tail is not None
    x, target = math.log1p(-tail) - math.log(tail), max(at, largest_target(n) + 1e-3)
    lam = (x + math.log(n - 1)) * math.tanh(x / 2) - 2
    assert sharp_varentropy(n, target) + lam * (math.log(n) - target) < 0
    assert not sharp(n, target)


@pytest.mark.parametrize(("n", "target"), [(10, 2.0), (N, 7.0), (N, 9.0), (N, 9.57), (151_936, 11.0)])
def test_the_limit_there_is_sharp_on_the_shipped_law(n: int, target: float) -> None:
    k = 2 / sharp_varentropy(n, target)
    assert k > 1.02 * 2 / float(maximum(n).upper)
    plant = two_levels(n, target, np.zeros(1))
    for factor in (0.999, 1.001):
        law = feedback.Config(target_nats=target, gain=factor * k, t_min=0.1, t_max=10.0, rate_limit=0.0)
        u = run(feedback.Feedback(law), plant, np.array([1e-3]), 8000)
        assert bool(settled(u, 1e-7)[0]) == (factor < 1)
        said = judge(make(factor * k, target_nats=target, temperature=0.8), n)
        assert (said.status, said.theorem) == (
            ("proved", "gain-at-target") if factor < 1 else ("refuted", "gain-lag-0")
        )
