from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from loop_claims import DECIDES, certified, claim, micro

from entropic_ctl import config
from entropic_ctl.entropy import ArrayLogitView, entropy_varentropy
from entropic_ctl.errors import BadInputError
from entropic_ctl.temperature import solve
from proofs.check import Hints, Subject, target
from proofs.vmax import two_level_logit

N = 32_000


# dH/du = V


@dataclass(frozen=True)
class Dual:
    """a + b eps with eps^2 = 0: a value and its derivative, exact."""

    value: Fraction
    slope: Fraction

    def __add__(self, other: Dual) -> Dual:
        return Dual(self.value + other.value, self.slope + other.slope)

    def __mul__(self, other: Dual) -> Dual:
        return Dual(self.value * other.value, self.value * other.slope + self.slope * other.value)

    def __truediv__(self, other: Dual) -> Dual:
        value = self.value / other.value
        return Dual(value, (self.slope - value * other.slope) / other.value)


def total(parts: Sequence[Dual]) -> Dual:
    out = Dual(Fraction(0), Fraction(0))
    for part in parts:
        out = out + part
    return out


RATIONALS = st.lists(
    st.tuples(st.fractions(-9, 9, max_denominator=30), st.fractions("1/50", 9, max_denominator=50)),
    min_size=1,
    max_size=7,
)


@given(RATIONALS)
def test_the_derivative_of_entropy_is_varentropy_as_an_identity_of_rational_functions(
    pairs: list[tuple[Fraction, Fraction]],
) -> None:
    """H = ln S - sum(w x)/S with x' = -x, w' = -w x in u; x and w = e^x are independent rationals: an identity."""
    x = [Dual(a, -a) for a, _ in pairs]
    w = [Dual(b, -b * a) for a, b in pairs]
    S = total(w)
    mean = total([b * a for a, b in zip(x, w, strict=True)]) / S
    slope = S.slope / S.value - mean.slope
    variance = sum(b * (a - mean.value) ** 2 for a, b in pairs) / S.value
    assert slope == variance


@given(st.integers(2, 40), st.floats(-1.5, 1.5), st.integers(0, 2**32))
def test_the_shipped_entropy_has_the_shipped_varentropy_as_slope_and_never_falls(n: int, u: float, seed: int) -> None:
    z = np.random.default_rng(seed).normal(0, 3, n)
    h = 1e-5
    H, V = entropy_varentropy(np.stack([z] * 3), np.exp(np.array([u - h, u, u + h])))
    assert (H[2] - H[0]) / (2 * h) == pytest.approx(V[1], rel=1e-4, abs=1e-6)
    grid, _ = entropy_varentropy(np.stack([z] * 60), np.exp(np.linspace(-3, 3, 60)))
    assert (np.diff(grid) > -1e-12).all()


# existence and uniqueness


@pytest.mark.parametrize("n", [2, 300, N, 2**31 - 1])
@pytest.mark.parametrize(
    "run",
    [
        micro(),
        micro("solve", target_nats=0.3),
        micro("damped", target_nats=12.0),
        micro("fixed"),
        micro(gain=-0.1, phi="tanh", lag=1),
        micro(gain=0.5, drafts=2, temperature=1e-9, t_min=1e-9, rate_limit=0.0),
        micro(temperature=0.0, target_nats=5e-324),
        micro(target_nats=1e-12, gain=1e-9, t_min=0.8, t_max=0.8),
    ],
)
def test_prove_and_check_agree_with_the_single_claims(run: config.RunConfig, n: int) -> None:
    found = certified(run, n)
    assert {name: found[name] for name in DECIDES} == {name: claim(name, run, n) for name in DECIDES}


def test_statuses() -> None:
    assert claim("target", micro(target_nats=1.5), N).status == "proved"
    assert claim("target", micro(target_nats=11.0), N).status == "refuted"  # ln 32,000 = 10.37
    assert claim("target", micro(target_nats=0.0), N).status == "refuted"
    assert claim("target", micro("fixed"), N).status == "not applicable"
    assert claim("target", micro(temperature=0.0), N).status == "not applicable"
    assert claim("target-in-clamps", micro("solve"), N).status == "proved"
    assert claim("target-in-clamps", micro(target_nats=11.0), N).status == "refuted"
    assert claim("target-in-clamps", micro(t_min=0.8, t_max=0.8), N).status == "not applicable"
    subject = Subject(micro(), N)
    assert [found.status for found in target.claims(subject, Hints({}))] == ["proved", "unknown"]


@pytest.mark.parametrize("n", [2, 3, 17, N, 2**20])
def test_the_largest_target_is_exact_to_a_few_floats(n: int) -> None:
    top = math.log(n)
    assert claim("target", micro(target_nats=top * (1 + 1e-15)), n).status == "refuted"
    found = claim("target", micro(target_nats=top * (1 - 1e-15)), n)
    assert (found.status, found.numbers["tied_maxima_at_most"]) == ("proved", n - 1)


@pytest.mark.parametrize("m", [1, 2, 3, 1000])
def test_the_number_of_ties_is_exact_to_a_few_floats(m: int) -> None:
    for nats, ties in ((math.log(m) + 1e-14, m), (math.log(m + 1) - 1e-14, m), (math.log(m + 1) + 1e-14, m + 1)):
        assert claim("target", micro(target_nats=nats), N).numbers["tied_maxima_at_most"] == ties


def test_extreme_targets_are_decided() -> None:
    assert claim("target", micro(target_nats=5e-324), N).numbers["tied_maxima_at_most"] == 1
    assert claim("target", micro(target_nats=20.0), 2**31 - 1).numbers["finite_at_least"] == math.ceil(math.exp(20))


@given(st.floats(0.1, 4.0), st.integers(0, 2**32))
def test_logits_meet_the_target_exactly_with_the_stated_ties_and_support(nats: float, seed: int) -> None:
    """On shipped entropies between T = 1e-4 and 1e6: both sides of both numbers."""
    numbers = claim("target", micro(target_nats=nats), 128).numbers
    ties, finite = numbers["tied_maxima_at_most"], numbers["finite_at_least"]
    assert finite == ties + 1
    assume(min(abs(nats - math.log(ties)), abs(nats - math.log(finite))) > 1e-3)
    rng = np.random.default_rng(seed)

    def meets(top: int, support: int) -> bool:
        z = np.full(128, -np.inf)
        z[:support] = -rng.uniform(0.5, 4.0, support)
        z[:top] = 0.0
        low, high = entropy_varentropy(np.stack([z, z]), np.array([1e-4, 1e6]))[0]
        return bool(low < nats < high)

    assert meets(ties, finite)
    assert meets(1, 128)
    assert not meets(ties + 1, 128)
    assert not meets(1, ties)


# inside the clamps


def band(law: str = "solve", n: int = 300, **rest: float) -> tuple[dict[str, float], solve.Config]:
    run = micro(law, **rest)
    numbers = claim("target-in-clamps", run, n).numbers
    return {
        name: float(value) for name, value in numbers.items() if isinstance(value, str)
    }, run.loop.temperature.config


@pytest.mark.parametrize("law", ["solve", "damped", "feedback"])
@pytest.mark.parametrize("nats", [0.2, 1.5, 5.0])
def test_two_level_logits_meet_the_target_exactly_in_the_stated_band(law: str, nats: float) -> None:
    numbers, clamps = band(law, target_nats=nats)
    config = solve.Config(0.8, clamps.t_min, clamps.t_max, target_nats=nats, tolerance_nats=1e-9)
    gaps = [numbers["two_level_from"], numbers["two_level_to"]]
    inside = [gaps[0] * (1 + 1e-6), sum(gaps) / 2, gaps[1] * (1 - 1e-6)]
    outside = [numbers["never_below"] * (1 - 1e-6), numbers["never_above"] * (1 + 1e-6)]
    z = np.zeros((5, 300))
    z[:, 0] = inside + outside
    T, H, _ = solve.build(config).temper(np.full(5, math.log(0.8)), ArrayLogitView(z))
    assert (np.abs(H[:3] - nats) <= 1e-9).all()
    assert H[3] > nats
    assert H[4] < nats
    assert T[3:].tolist() == pytest.approx([clamps.t_min, clamps.t_max])


@given(st.floats(0.3, 4.0), st.floats(0.05, 0.5), st.floats(1.0, 5.0), st.integers(0, 3), st.integers(0, 2**32))
def test_any_logits_of_the_stated_class_meet_it(nats: float, low: float, high: float, which: int, seed: int) -> None:
    n = 2000
    numbers = claim("target-in-clamps", micro(target_nats=nats, t_min=low, t_max=high), n).numbers
    within = [(j, float(r)) for j, r in numbers["within_of_top"]]
    j, radius = within[which % len(within)]
    assert math.log1p((j - 1) * math.exp(-radius / high)) == pytest.approx(nats, rel=1e-9)  # -ln p_max at the edge
    lead = float(numbers["two_level_from"])
    assume(lead < radius)
    rng = np.random.default_rng(seed)
    z = np.concatenate([[0.0], -rng.uniform(lead, radius, j - 1), -rng.uniform(lead, 60.0, n - j)])
    if rng.random() < 0.5:  # the extreme members
        z[1:j], z[j:] = (-radius, -60.0) if rng.random() < 0.5 else (-lead, -lead)
    at = entropy_varentropy(np.stack([z, z]), np.array([low, high]))[0]
    assert at[0] <= nats + 1e-9
    assert at[1] >= nats - 1e-9


def test_a_smaller_lead_is_not_enough() -> None:
    numbers, clamps = band(target_nats=1.5)
    z = np.zeros(300)
    z[0] = numbers["two_level_from"] * (1 - 1e-6)
    assert float(entropy_varentropy(z, clamps.t_min)[0]) > 1.5


def test_a_false_hint_is_refused() -> None:
    subject = Subject(micro("solve"), N)
    for pair in (["1/4", "1/3"], ["1/4", "2"]):
        with pytest.raises(BadInputError, match="tail_mass"):
            target.claims(subject, Hints({"tail_mass": pair}))


def test_the_gap_of_a_tail_mass_is_the_logit_of_vmax() -> None:
    numbers = claim("target-in-clamps", micro(), N).numbers
    low, high = (float(end) for end in numbers["tempered_gap"])
    r = 1 / (1 + math.exp(low) / (N - 1))
    assert two_level_logit(N, r) == pytest.approx(low, rel=1e-12)
    assert high - low < 1e-9


def test_no_class_of_logits_is_empty() -> None:
    """The lead asked for never exceeds the distance within which others must lie; an empty class is not told."""
    for clamps in ((0.3, 1.6), (0.7, 0.9), (0.5, 1.0), (0.1, 5.0)):
        for n in (500, 32_000):
            numbers = claim("target-in-clamps", micro(t_min=clamps[0], t_max=clamps[1]), n).numbers
            lead = Fraction(numbers["two_level_from"])
            assert all(Fraction(within) >= lead - Fraction(1, 10**14) for _, within in numbers["within_of_top"])
    close, wide = (
        claim("target-in-clamps", micro(t_min=low, t_max=high), 32_000) for low, high in ((0.7, 0.9), (0.3, 1.6))
    )
    assert close.numbers["within_of_top"] == []
    assert close.status == "proved"
    assert "so do any" not in close.reason
    assert wide.numbers["within_of_top"]
    assert "so do any" in wide.reason
