"""Every bound of the checker lies on its side of the number, at 80 digits; evidence too wide proves nothing."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import pytest
from certified import BASES, accepted, certificate_text, judge, make
from frozen_loops import largest_target, sharp_varentropy
from hypothesis import given
from hypothesis import strategies as st
from loop_claims import claim, micro

from entropic_ctl.errors import BadInputError
from proofs import check, enclosures, theory
from proofs.check import Assumptions, Hints, Subject, changing, delay, gain, two_level
from proofs.check.base import decimal, format_hint, rounded
from proofs.enclosures import Interval
from proofs.search.gain import equilibrium_tail_mass, tail_interval
from proofs.vmax import maximum

N = 32_000


def precise(x: Fraction) -> mpmath.mpf:
    return mpmath.mpf(x.numerator) / x.denominator


def encloses(found: Interval, truth: Callable[[], Any]) -> bool:
    """Tell whether an interval holds a number, at 80 digits."""
    with mpmath.workdps(80):
        return bool(precise(found.lo) <= truth() <= precise(found.hi))


# enclosures: the series alone, without the rounding that would hide a missing remainder


@given(st.fractions(-8, 8, max_denominator=10**6), st.integers(2, 60))
def test_the_series_for_exp_bounds_it_before_rounding(x: Fraction, bits: int) -> None:
    kept = enclosures._round
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enclosures, "_round", lambda value, to, *, up: value if to == bits else kept(value, to, up=up))
        found = enclosures._series_exp.__wrapped__(x, bits)
    assert encloses(found, lambda: mpmath.exp(precise(x)))


def test_the_remainder_of_the_series_for_exp_is_needed() -> None:
    """With exact arithmetic nothing but the remainder puts the upper end above e^x."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enclosures, "_round", lambda value, _bits, *, up: value)
        for x in (Fraction(1, 3), Fraction(2, 7)):
            found = enclosures._series_exp.__wrapped__(x, 2)
            assert encloses(found, lambda x=x: mpmath.exp(precise(x)))


@given(st.fractions(Fraction(1, 10**6), Fraction(1, 3), max_denominator=10**9), st.integers(1, 120))
def test_the_series_for_atanh_bounds_it(z: Fraction, work: int) -> None:
    low, high = (enclosures._atanh_series.__wrapped__(z, work, up=up) for up in (False, True))
    assert encloses(Interval(low, high), lambda: mpmath.atanh(precise(z)))


def test_the_remainder_of_the_series_for_atanh_is_needed() -> None:
    """Where z is one unit the series ends at once, and only the remainder lies above z."""
    for z, work in ((Fraction(1, 4), 2), (Fraction(1, 8), 3), (Fraction(1, 4), 8), (Fraction(1, 3), 2)):
        high = enclosures._atanh_series.__wrapped__(z, work, up=True)
        assert encloses(Interval(Fraction(0), high), lambda z=z: mpmath.atanh(precise(z)))


@given(st.fractions(Fraction(1, 1000), 1000, max_denominator=10**6), st.integers(2, 60))
def test_the_series_for_log_bounds_it_before_rounding(x: Fraction, bits: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enclosures, "_round", lambda value, _bits, *, up: value)
        found = enclosures._series_log(x, bits)
    assert encloses(found, lambda: mpmath.log(precise(x)))


# numbers in claims and sentences


@given(st.fractions(-1000, 1000), st.integers(0, 12))
def test_decimals_are_rounded_outward(value: Fraction, digits: int) -> None:
    low, high = (Fraction(decimal(value, up=up, digits=digits)) for up in (False, True))
    assert low <= value <= high
    assert high - low == (0 if (value * 10**digits).denominator == 1 else Fraction(1, 10**digits))


@given(st.fractions(-1000, 1000), st.integers(-40, 40))
def test_bounds_in_sentences_are_rounded_outward(value: Fraction, power: int) -> None:
    value *= Fraction(10) ** power
    low, high = (Fraction(rounded(value, up=up)) for up in (False, True))
    assert low <= value <= high
    assert high - low <= abs(value) / 10**5


@pytest.mark.parametrize("n", [3, 300, N, 151_936, 2**20])
def test_sentences_claim_no_more_than_the_numbers(n: int) -> None:
    subject = Subject(make(0.02), n)
    found = gain.claims(subject, Hints({"log_odds": format_hint(maximum(n).bracket())}))[0]
    said = Fraction(found.reason.split("above ")[1].split()[0])
    assert said >= Fraction(found.numbers["lower"])
    assert said - Fraction(found.numbers["upper"]) < Fraction(1, 1000)


# bounds of single theorems


def largest_varentropy(n: int) -> mpmath.mpf:
    """V_max(n) at 80 digits: (x + c)^2 / 4 - 1 where (x + c) tanh(x/2) = 2."""
    c = mpmath.log(n - 1)
    x = mpmath.findroot(lambda x: (x + c) * mpmath.tanh(x / 2) - 2, mpmath.mpf(float(maximum(n).bracket().lo)))
    return (x + c) ** 2 / 4 - 1


@pytest.mark.parametrize("n", [2, 3, 300, N, 151_936, 2**31 - 1])
def test_v_max_lies_between_its_bounds(n: int) -> None:
    assert encloses(check.v_max_bounds(n, maximum(n).bracket()), lambda: largest_varentropy(n))


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.8), (0.3, 0.6), (0.01, 0.99), (0.45, 0.46), (0.6, 0.7)])
@pytest.mark.parametrize("n", [3000, N, 2**30])
def test_the_varentropy_at_every_tail_mass_of_a_wide_interval(n: int, low: float, high: float) -> None:
    tail = Interval(Fraction(low), Fraction(high))
    middle = gain.two_level_entropy(n, (tail.lo + tail.hi) / 2)
    found = gain.at_target(n, middle.lo, tail)
    for i in range(101):
        r = tail.lo + (tail.hi - tail.lo) * i / 100
        assert encloses(found, lambda r=r: precise(r * (1 - r)) * mpmath.log(precise((1 - r) * (n - 1) / r)) ** 2)


@given(st.fractions(0, 60, max_denominator=10**4), st.floats(0.05, 20.0))
def test_an_update_is_bounded_on_both_sides(error: Fraction, scale: float) -> None:
    law = micro(gain=0.3, phi="tanh", phi_scale_nats=scale, rate_limit=0.0).loop.temperature.config
    found = two_level.push(law, Interval(error, error))
    x = error / Fraction(scale)
    assert encloses(found, lambda: precise(Fraction(0.3) * Fraction(scale)) * mpmath.tanh(precise(x)))


@given(st.floats(0.01, 30.0), st.floats(0.2, 20.0))
def test_the_least_slope_of_tanh_is_not_overstated(error: float, scale: float) -> None:
    loop = changing._Loop(Subject(make(0.02, phi="tanh", phi_scale_nats=scale), N), None)
    found = loop.slope(Fraction(error))
    assert found >= 0
    with mpmath.workdps(80):
        truth = mpmath.sech(precise(Fraction(error) / Fraction(scale))) ** 2
        assert precise(found) <= truth


@given(st.fractions(0, 1), st.fractions(0, 30), st.fractions(0, 3))
def test_a_loop_gain_is_rounded_outward(k: Fraction, v: Fraction, width: Fraction) -> None:
    found = delay._scaled(k, Interval(v, v + width))
    assert found.lo <= k * v
    assert k * (v + width) <= found.hi
    assert found.hi - found.lo <= k * width + Fraction(2, 2**40)


@pytest.mark.parametrize("k", [0.09, 0.13, 0.3])
def test_the_ema_weight_is_the_largest_that_keeps_the_bound_stable(k: float) -> None:
    numbers = claim("delay", micro(gain=k), N).numbers
    weight, g = Fraction(numbers["ema_weight_below"]), Fraction(numbers["loop_gain_at_most"])
    limit = min(Fraction(1), 4 / (2 + g))
    assert limit - Fraction(1, 10**12) < weight <= limit + Fraction(1, 10**14)


# evidence too wide: unknown, never wrong


def wide(target: float) -> dict[str, Any]:
    """Hints with tail masses from 0.95 to 1.05 of the right one."""
    tail = equilibrium_tail_mass(N, target)
    assert tail is not None
    r = Fraction(tail)
    return {
        "log_odds": format_hint(maximum(N).bracket()),
        "tail_mass": format_hint((r * 19 / 20, r * 21 / 20)),
    }


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("factor", [0.995, 1.005])
def test_between_the_bounds_of_wide_evidence_nothing_is_said(factor: float, lag: int) -> None:
    """The true k V lies on either side of the limit, the bounds on both."""
    limit = float(gain.loop_limit(lag))
    run = make(factor * limit / sharp_varentropy(N, 1.5), target_nats=1.5, lag=lag)
    assert gain.claims(Subject(run, N), Hints(wide(1.5)))[-1].status == "unknown"
    assert delay.claims(Subject(run, N), Hints(wide(1.5)))[0].status == "unknown"
    sure = "refuted" if factor > 1 else "unknown" if lag else "proved"
    assert judge(run).status == sure
    assert claim("delay", run, N).status == ("refuted" if factor > 1 else "proved")


def test_a_delay_is_called_unstable_only_where_two_level_logits_surely_are() -> None:
    """Wide evidence, and a target whose largest varentropy is not known: k V of the two-level logits decides."""
    near = [0.99 * theory.delay_limit(d) / sharp_varentropy(N, 1.5) for d in (2, 3, 5)]
    for k in (0.02, 0.03, 0.05, *near):
        for target in (1.5, 10.0, 10.3):
            run = micro(gain=k, target_nats=target)
            truth = k * sharp_varentropy(N, target)
            sharp = claim("delay", run, N).numbers
            loose = delay.claims(Subject(run, N), Hints(wide(target)))[0].numbers if target == 1.5 else sharp
            for numbers in (sharp, loose):
                first = numbers["unstable_from_delay"]
                assert first is None or not delay._stable(Fraction(truth), first)
                assert first is None or first > numbers["stable_to_delay"]
            assert target > 2 or sharp["unstable_from_delay"] == sharp["stable_to_delay"] + 1 or k == 0.02
    assert claim("delay", micro(gain=0.02, target_nats=10.0), N).numbers["unstable_from_delay"] is None


def test_drafts_that_no_entropy_allows_count_for_nothing() -> None:
    """`delay` and `gain` alike: 3 k V = 2.75 > 2 refutes only where drafting is sure."""
    for below, status in ((100.0, "refuted"), (10.38, "refuted"), (10.37, "unknown"), (0.0, "unknown")):
        run = micro(gain=0.06, drafts=2)
        object.__setattr__(run.speculation, "draft_below_nats", below)
        assert (claim("delay", run, N).status, judge(run).status) == (status, status)
    run = micro(gain=0.4, drafts=2)  # repels without a single draft
    object.__setattr__(run.speculation, "draft_below_nats", 0.0)
    assert (claim("delay", run, N).status, judge(run).status) == ("refuted", "refuted")


# every claim at every limit


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("target", [1.5, 9.0, 10.0, maximum(N).entropy_nats])
def test_at_every_limit_all_claims_are_decided(target: float, drafts: int, lag: int) -> None:
    """The gate's limits and one float to either side."""
    numbers = gain.claims(Subject(make(1e-4, lag=lag, drafts=drafts, target_nats=target), N), hints(target))[-1].numbers
    for limit in {numbers["limit"], numbers["limit_every_target"], numbers["limit_this_target"]} - {None}:
        for k in (limit, math.nextafter(limit, 0.0), math.nextafter(limit, 1.0)):
            subject = Subject(make(k, lag=lag, drafts=drafts, target_nats=target), N, Assumptions())
            for found in check.judge(subject, hints(target)):
                assert found.status in ("proved", "refuted", "unknown", "not applicable")


def hints(target: float) -> Hints:
    """The search's hints for a target, without any matrix."""
    values = {"log_odds": format_hint(maximum(N).bracket())}
    for name, entropy in (("tail_mass", target), ("floor_mass", target / 2)):
        found = tail_interval(N, entropy)
        assert found is not None
        values[name] = format_hint(found)
    return Hints(values)


# the kernel


def test_a_claim_too_many_is_refused() -> None:
    accepted("proved")
    for extra in (lambda claims: claims[-1:], lambda claims: claims[:1], lambda _: ["x"]):
        document = json.loads(certificate_text("proved"))
        document["claims"] += copy.deepcopy(extra(document["claims"]))
        with pytest.raises(BadInputError, match=r"claims.*too many"):
            check.check(document, BASES["proved"], N)


def test_an_empty_interval_is_no_hint() -> None:
    for pair in (["1", "1"], ["2", "1"]):
        with pytest.raises(BadInputError, match="empty interval"):
            Hints({"tail_mass": pair}).interval("tail_mass")


def test_minus_zero_is_not_zero() -> None:
    document = json.loads(certificate_text("proved"))
    assert document["about"]["speculation"]["acceptance"] == 0.0
    document["about"]["speculation"]["acceptance"] = -0.0
    with pytest.raises(BadInputError, match=r"about\.speculation\.acceptance"):
        check.check(document, BASES["proved"], N)


def test_the_edge_of_the_known_targets() -> None:
    assert largest_target(N) == pytest.approx(9.5712, abs=1e-4)
    assert largest_target(151_936) == pytest.approx(11.0983, abs=1e-4)
