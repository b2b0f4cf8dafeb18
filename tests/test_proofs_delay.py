from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import loop_claims
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl import config, registry
from entropic_ctl.errors import BadInputError
from entropic_ctl.policy import Policy
from entropic_ctl.temperature import feedback
from proofs import check, exact, theory
from proofs.check import delay
from proofs.phase import two_level_plant
from proofs.vmax import maximum, two_level, two_level_logit

N = 32_000
BEST = maximum(N)


def make(gain: float = 0.02, *, law: str = "feedback", **rest: Any) -> config.RunConfig:
    return loop_claims.micro(law, **({"gain": gain} if law == "feedback" else {}), **rest)


def claim(run: config.RunConfig) -> check.Claim:
    return loop_claims.claim("delay", run, N)


# the exact test of a polynomial


@given(st.lists(st.fractions(-3, 3, max_denominator=20), min_size=1, max_size=6), st.fractions(-3, 3))
def test_schur_stable_decides_products_of_known_roots(roots: list[Fraction], lead: Fraction) -> None:
    if lead == 0:
        return
    p = [lead]
    for root in roots:  # (z - root) p
        p = [a - root * b for a, b in zip([Fraction(0), *p], [*p, Fraction(0)], strict=True)]
    assert exact.schur_stable(p) == all(abs(root) < 1 for root in roots)


@given(st.fractions(-2, 2, max_denominator=50), st.fractions(-2, 2, max_denominator=50))
def test_schur_stable_is_jurys_triangle_for_quadratics(a: Fraction, b: Fraction) -> None:
    """z^2 + a z + b: |b| < 1 and |a| < 1 + b."""
    assert exact.schur_stable([b, a, 1]) == (abs(b) < 1 and abs(a) < 1 + b)


def test_schur_stable_tells_neighbouring_floats_apart_and_refuses_junk() -> None:
    assert exact.schur_stable([math.nextafter(1.0, 0.0), 0, 0, 1])
    assert not exact.schur_stable([1.0, 0, 0, 1])  # roots on the circle
    assert exact.schur_stable([5])
    for bad in ([], [1, 0], [math.nan, 1]):
        with pytest.raises(BadInputError):
            exact.schur_stable(bad)


# the delay limit


@pytest.mark.parametrize("d", range(9))
def test_the_exact_test_agrees_with_the_closed_form_on_both_sides(d: int) -> None:
    limit = theory.delay_limit(d)
    below, above = limit * (1 - 1e-12), limit * (1 + 1e-12)
    assert delay._stable(Fraction(below), d)
    assert not delay._stable(Fraction(above), d)
    assert not delay._stable(Fraction(0), d)


@given(st.floats(0.01, 2.5), st.integers(0, 8))
def test_the_exact_test_agrees_with_the_roots(g: float, d: int) -> None:
    roots = np.roots([1.0, -1.0, *[0.0] * (d - 1), g] if d else [1.0, g - 1.0])
    radius = np.abs(roots).max()
    if abs(radius - 1) > 1e-9:
        assert delay._stable(Fraction(g), d) == (radius < 1)


@given(st.floats(0.001, 30.0), st.floats(0.01, 1.0))
def test_the_ema_limit_is_exact(g: float, share: float) -> None:
    limit = min(Fraction(1), 4 / (2 + Fraction(g)))
    for b, stable in (
        (limit * Fraction(share) * Fraction(999, 1000), True),
        (limit * Fraction(1001, 1000), limit == 1),
    ):
        if b <= 1:
            assert exact.schur_stable([1 - b, -(2 - b - b * Fraction(g)), 1]) == stable


# the claim


def test_statuses() -> None:
    unclear = make(0.09, target_nats=10.0)  # two-level logits are stable, others could have a larger varentropy
    runs = (make(), make(0.3), unclear, make(lag=1, drafts=1), make(law="fixed"), make(-0.02), make(0.0))
    expected = ["proved", "refuted", "unknown", "unknown", "not applicable", "refuted", "refuted"]
    assert [claim(run).status for run in runs] == expected
    assert "EMA" in claim(make(0.3)).reason
    assert "EMA" not in claim(make(0.3, lag=1)).reason


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("gain", [0.003, 0.02, 0.05])
def test_the_number_of_survived_steps_is_exact(gain: float, lag: int) -> None:
    """At the sharp target the bound on V is attained: simulate the loop it is about, stable and one step later."""
    found = claim(make(gain if lag == 0 else gain / 2, lag=lag, target_nats=BEST.entropy_nats))
    most, first = found.numbers["stable_to_delay"], found.numbers["unstable_from_delay"]
    assert found.status == "proved"
    assert most == found.numbers["stable_to_delay_every_target"]
    g = (gain if lag == 0 else gain / 2) * float(BEST.lower)
    stable = [d for d in range(lag, lag + 13) if g < theory.delay_limit(d)]
    assert (most, first) == (stable[-1], None if len(stable) == 13 else stable[-1] + 1)
    for d, settles in ((most, True), *([] if first is None else [(first, False)])):
        u = [1.0] * (d + 1)
        for _ in range(6000):
            u.append(u[-1] - g * u[-1 - d])
            if abs(u[-1]) > 1e6:
                break
        assert (max(map(abs, u[-50:])) < 1e-2) == settles
        assert (max(map(abs, u[-50:])) > 1.0) == (not settles)


def test_the_shipped_loop_at_its_target_has_the_loop_gain_of_the_claim() -> None:
    """Central difference of the shipped update about the equilibrium of two-level logits: 1 - k V."""
    target = 1.5
    low, high = 1e-9, 0.5
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if two_level(N, middle)[0] < target else (low, middle)
    plant = two_level_plant(N, two_level_logit(N, low))
    law = feedback.build(feedback.Config(temperature=1.0, gain=0.02, target_nats=target))
    u = np.array([-1e-5, 1e-5])
    after = law.update(u, plant(u))
    bound = float(claim(make(0.02, target_nats=target)).numbers["loop_gain_at_most"])
    assert 1 - (after[1] - after[0]) / 2e-5 == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize(("drafts", "status"), [(2, "proved"), (3, "refuted")])
def test_drafts_multiply_the_gain_of_the_shipped_policy(drafts: int, status: str) -> None:
    """A step that accepts D drafts updates D + 1 times on one u; k (D + 1) V = 1.67 settles, 2.23 cycles."""
    target = BEST.entropy_nats
    assert claim(make(0.02, drafts=drafts, target_nats=target)).status == status
    off, fcfs = (
        registry.load(package, name)
        for package, name in (("entropic_ctl.pruning.laws", "off"), ("entropic_ctl.scheduling", "fcfs"))
    )
    law = feedback.build(feedback.Config(temperature=1.0, target_nats=target, gain=0.02))
    policy = Policy(law, off.build(off.Config()), fcfs.build(fcfs.Config()), slots=1)
    slot, plant = np.array([0]), two_level_plant(N, BEST.logit)
    policy.start(slot)
    policy.u[0] = 0.05
    trail = []
    for _ in range(300):
        entropy = np.repeat(plant(policy.u[slot]), drafts + 1)
        policy.observe(np.repeat(slot, drafts + 1), entropy, entropy, np.zeros(drafts + 1, bool))
        trail.append(float(policy.u[0]))
    assert (abs(trail[-1] - trail[-2]) > 0.05) == (status == "refuted")
    assert (abs(trail[-1]) < 1e-9) == (status == "proved")


@given(st.floats(1e-4, 0.3), st.floats(0.1, 10.0), st.sampled_from([0, 1]))
def test_stable_to_the_stated_delay_for_every_smaller_varentropy(gain: float, target: float, lag: int) -> None:
    found = claim(make(gain, lag=lag, target_nats=target))
    if found.status == "proved":
        bound = float(found.numbers["loop_gain_at_most"])
        most = found.numbers["stable_to_delay"]
        assert bound * 0.999 < theory.delay_limit(most)
        assert most == lag + 12 or bound * 1.001 > theory.delay_limit(most + 1)
