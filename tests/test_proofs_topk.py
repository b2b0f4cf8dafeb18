"""Theorem 8: the ends in exact rationals, their witnesses, the shipped float interval and its slack against them."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import proofs
from entropic_ctl import config, entropy_interval
from entropic_ctl.entropy_interval import _box, interval_from_logprobs, interval_from_probabilities
from entropic_ctl.errors import BadInputError
from proofs import check
from proofs.check import Claim, Hints, Subject, topk
from proofs.check.base import format_hint
from proofs.check.topk import SLACK, Top, cut, ends, geometric, rounding_error, surprisal, two_level
from proofs.enclosures import Interval
from proofs.search.topk import hints as search_hints

N = 49_152
TINY = Fraction(1, 2**50)  # far above the width of an enclosure of 64 bits, far below any slack


def entropy(p: list[Fraction]) -> Interval:
    parts = [surprisal(x) for x in p]
    return Interval(sum((x.lo for x in parts), Fraction(0)), sum((x.hi for x in parts), Fraction(0)))


def top_of(p: list[Fraction], n: int) -> Top:
    return Top(entropy(p), 1 - sum(p), min(p), n - len(p))


@st.composite
def tops(draw: st.DrawFn) -> tuple[list[float], int]:
    """Probabilities that are multiples of 2^-30 (their sums are exact) and for which a distribution exists."""
    k, unseen = draw(st.integers(1, 12)), draw(st.integers(0, 40))
    weights = sorted(draw(st.lists(st.integers(1, 1000), min_size=k, max_size=k)), reverse=True)
    most = sum(weights) + unseen * weights[-1]
    share = draw(st.floats(0.0, 1.0))  # how much of what fits is unseen
    total = sum(weights) + share * unseen * weights[-1]
    p = [math.floor(w / total * 2**30) / 2**30 for w in weights]
    n = k + unseen
    assume(p[-1] > 0 and 1 - sum(p) <= unseen * p[-1] and most >= total)
    return p, n


# tops of which the sums are exact, and short in float64
LOW = [0.23704628655328297, 0.1518176648840335, 0.13941320248717262, 0.04104351892498696, 0.010176284674409166, 0.0]
HIGH = [0.4090552736741775, 0.26198181528464, 0.24057624578887485, 0.07082611632744445, 0.017560548924863223, 5e-324]


# the theorem


@given(tops(), st.integers(0, 2**32 - 1))
def test_every_tail_that_fits_lies_between_and_both_witnesses_sit_on_the_ends(
    case: tuple[list[float], int], seed: int
) -> None:
    p, n = [Fraction(x) for x in case[0]], case[1]
    m, cap, e = n - len(p), p[-1], 1 - sum(p)
    found = ends(top_of(p, n))
    assert found is not None
    lower, upper = found
    assert lower.lo <= upper.hi
    full = int(e / cap)
    packed = [cap] * full + ([e - full * cap] if e > full * cap else [])
    even = [e / m] * m if m else []
    for tail, end in ((packed, lower), (even, upper)):
        assert len(tail) <= m
        assert sum(tail, Fraction(0)) == e
        assert all(0 <= x <= cap for x in tail)
        at = entropy([*p, *tail])
        assert abs(at.lo - end.lo) < TINY
        assert end.hi - TINY < at.hi  # so no narrower interval is right
    if m:  # a random tail: from the even one, move mass between pairs as far as cap and 0 allow
        rng = np.random.default_rng(seed)
        tail = even[:]
        for _ in range(20):
            i, j = (int(x) for x in rng.integers(m, size=2))
            if i != j:
                step = min(tail[i], cap - tail[j]) * Fraction(int(rng.integers(9)), 8)
                tail[i], tail[j] = tail[i] - step, tail[j] + step
        at = entropy([*p, *tail])
        assert lower.lo - TINY <= at.lo
        assert at.hi <= upper.hi + TINY


def test_feasible_to_the_last_bit() -> None:
    p = [Fraction(1, 2), Fraction(1, 8)]
    assert ends(top_of(p, 5)) is not None  # 3 unseen tokens of 1/8 hold exactly 3/8
    assert ends(top_of(p, 4)) is None
    assert interval_from_probabilities(np.array([0.5, 0.125]), 5).feasible
    assert not interval_from_probabilities(np.array([0.5, 0.125]), 4).feasible
    over = [Fraction(1, 2), Fraction(1, 8) - Fraction(1, 2**40)]
    assert ends(top_of(over, 5)) is None


@pytest.mark.parametrize("k", [1, 2, 7])
def test_closed_forms_of_the_instances(k: int) -> None:
    n, r = 50, Fraction(3, 5)
    direct = top_of([(1 - r) * r**i for i in range(k)], n)
    closed = geometric(r, n, k)
    assert (closed.tail, closed.cap, closed.unseen) == (direct.tail, direct.cap, direct.unseen)
    assert abs(closed.known.lo - direct.known.lo) < TINY
    level = r / (n - 1)
    direct = top_of([1 - r, *[level] * (k - 1)], n)
    closed = two_level(r, n, k)
    assert closed[1:] == direct[1:]
    assert abs(closed.known.lo - direct.known.lo) < TINY


@pytest.mark.parametrize(("ratio", "n"), [(Fraction(3, 5), 50), (Fraction(9, 10), 30), (Fraction(2, 5), 3)])
def test_the_cut_geometric_law_is_a_distribution_that_agrees_or_none_is_given(ratio: Fraction, n: int) -> None:
    p = [(1 - ratio) * ratio**i for i in range(n - 1)]
    p.append(1 - sum(p))
    at = entropy(p)
    for k in range(1, n):
        found = cut(ratio, n, k)
        assert (found is not None) == (p[-1] <= p[k - 1])
        if found is not None:
            assert found.lo <= at.hi
            assert at.lo <= found.hi
            assert found.hi - found.lo < TINY
            lower, upper = ends(geometric(ratio, n, k)) or (None, None)
            assert lower is not None
            assert upper is not None
            assert lower.lo <= at.hi
            assert at.lo <= upper.hi


@pytest.mark.parametrize("end", [0, 1])
def test_an_interval_that_leaves_a_witness_out_refutes_the_theorem(end: int, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = ends
    row = claims(make(target_nats=3.0))["top-k"].numbers["geometric"][0]
    assert row["contained"] is True
    assert float(row["lower"]) < float(row["witness"]) < float(row["upper"])
    both = (Fraction(row["lower"]), Fraction(row["upper"]))
    gap = abs(Fraction(row["witness"]) - both[end]) * Fraction(101, 100)

    def narrower(top: Top) -> tuple[Interval, Interval] | None:
        found = honest(top)
        if found is None:
            return None
        move = gap if end == 0 else -gap
        moved = Interval(found[end].lo + move, found[end].hi + move)
        return (moved, found[1]) if end == 0 else (found[0], moved)

    monkeypatch.setattr(topk, "ends", narrower)
    found = claims(make(target_nats=3.0))["top-k"]
    assert (found.status, "outside" in found.reason) == ("refuted", True)


# the shipped code against it


def test_the_slack_is_the_shipped_one() -> None:
    assert Fraction(entropy_interval._SLACK) == SLACK


@given(tops())
def test_shipped_interval_encloses_the_exact_one_and_no_more(case: tuple[list[float], int]) -> None:
    p, n = case
    found = ends(top_of([Fraction(x) for x in p], n))
    assert found is not None
    shuffled = np.random.default_rng(n).permutation(p)
    for got in (interval_from_probabilities(shuffled, n), interval_from_logprobs(np.log(shuffled), n)):
        assert got.feasible
        assert 0 <= Fraction(float(got.lower)) <= found[0].lo
        assert found[1].hi <= Fraction(float(got.upper)) or got.upper == math.log(n)
    got = interval_from_probabilities(shuffled, n)
    assert got.lower == pytest.approx(float(found[0].lo), abs=1e-12)
    assert got.upper == pytest.approx(float(found[1].hi), abs=1e-12)


@given(tops(), st.sampled_from([1e-2, 1e-4, 1e-9]), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_shipped_interval_with_a_declared_rounding_holds_for_what_was_rounded(
    case: tuple[list[float], int], rounding: float, seed: int
) -> None:
    p, n = [Fraction(x) for x in case[0]], case[1]
    found = ends(top_of(p, n))
    assert found is not None
    noise = np.random.default_rng(seed).uniform(-1, 1, len(p)) * rounding
    got = interval_from_probabilities(np.clip(np.array(case[0]) + noise, 0, 1), n, rounding=rounding)
    assert got.feasible
    assert Fraction(float(got.lower)) <= found[0].lo
    assert found[1].hi <= Fraction(float(got.upper)) or got.upper == math.log(n)


@given(
    st.integers(1, 100),
    st.sampled_from([0, 1, 5, 10**6]),
    st.sampled_from([0.0, 2.0, 20.0]),
    st.sampled_from([0, 0, 1, 7, 2**20, 2**50]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_rounding_of_the_ends_stays_within_its_bound(k: int, m: int, sharp: float, ulps: int, seed: int) -> None:
    """Hard cases: an unseen mass of 0 or a few units in the last place, next to many terms of every size."""
    z = np.sort(np.random.default_rng(seed).normal(size=k) * sharp)[::-1]
    p = np.exp(z - z[0])
    p /= p.sum()
    rest = Fraction(ulps, 2**53) * (m > 0)
    exact = [Fraction(float(x)) for x in p]
    p[0] = float(exact[0] + (1 - rest - sum(exact)) - Fraction(1, 2**53))  # at most ``rest`` is left, exactly known
    exact[0] = Fraction(p[0])
    assume(p[0] >= p[-1] and sum(exact) <= 1)
    found = ends(top_of(exact, k + m))
    assume(found is not None)
    lower, upper, feasible = _box(p[None], p[None], float(m))
    assert feasible[0]
    bound = rounding_error(k + m, k)
    assert abs(Fraction(float(lower[0])) - found[0].lo) <= bound + TINY
    assert abs(Fraction(float(upper[0])) - found[1].hi) <= bound + TINY


def test_mass_that_is_rounding_alone_is_packed_onto_no_more_tokens_than_there_are() -> None:
    """In float64 1e-16 is left beside the upper bounds, nothing in fact; 2e307 tokens of 5e-324 held 1e-13 nats."""
    low, high = np.array(LOW), np.array(HIGH)
    exact = [Fraction(x) for x in HIGH[:-1]]
    assert sum(exact) == 1  # so the last and all unseen tokens are left with nothing
    assert entropy_interval._sum(low) + entropy_interval._sums_before(high - low)[-1] < 1
    truth = entropy(exact)
    for m in (0, 1):
        n = len(LOW) + m
        lower, upper, feasible = _box(low[None], high[None], float(m))
        assert feasible[0]
        assert abs(Fraction(float(lower[0])) - truth.hi) <= rounding_error(n, len(LOW))
        assert lower[0] <= upper[0] + 1e-13


@pytest.mark.parametrize("n", [2, 256, N, 2**31 - 1])
def test_the_rounding_bound_covers_its_parts_added_up_again(n: int) -> None:
    """The point: spare and prefix sums (4 entries at most), filling and packing. The terms: log, products, sum."""
    u = Fraction(1, 2**53)
    adds = (n - 1).bit_length()
    sums = adds * u / (1 - adds * u)
    moved = (sums + u) + 4 * (sums + u) + 4 * u
    point = moved * (math.log(n) - math.log(moved)) * (1 - 1e-9)
    roundings = 8 + 2 + adds + 1  # logarithm to 4 ulp, two products, the sum over entries, the tail
    terms = roundings * u * math.log(n)
    assert float(rounding_error(n, n)) >= point + terms
    assert float(rounding_error(n, n)) <= 1.6 * (point + terms) + 40 * float(u)  # and grants no more than it says


class Depth:
    """Stands for a number; remembers on how many additions it depends at most."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def __add__(self, other: Depth) -> Depth:
        return Depth(max(self.value, other.value) + 1)


@pytest.mark.parametrize("k", [1, 2, 3, 7, 8, 9, 100, 256, 257, 4096])
def test_sums_pass_an_entry_through_no_more_additions_than_the_bound_counts(k: int) -> None:
    depth = math.ceil(math.log2(k))
    entries = np.array([Depth() for _ in range(k)], object)
    assert entropy_interval._sum(entries).item().value <= depth
    before = entropy_interval._sums_before(entries)
    assert len(before) == k + 1
    assert max(x.value for x in before[1:]) <= depth
    numbers = np.arange(1.0, k + 1)
    np.testing.assert_array_equal(entropy_interval._sums_before(numbers), [0, *np.cumsum(numbers)])
    assert entropy_interval._sum(numbers) == k * (k + 1) / 2
    assert entropy_interval._sum(numbers[:0]) == 0.0


# claims


def make(law: str = "feedback", **values: Any) -> config.RunConfig:
    return config.from_mapping({"loop": {"temperature": {"law": law, **values}}})


def claims(run: config.RunConfig, n: int = N, given_hints: dict[str, Any] | None = None) -> dict[str, Claim]:
    subject = Subject(run, n)
    found = search_hints(subject) if given_hints is None else given_hints
    made = topk.claims(subject, Hints({name: format_hint(value) for name, value in found.items()}))
    return {claim.theorem: claim for claim in made}


@pytest.mark.parametrize("law", ["feedback", "solve"])
def test_the_instances_have_the_target_entropy_and_the_shipped_interval_agrees(law: str) -> None:
    claim = claims(make(law, target_nats=3.0))["top-k"]
    assert claim.status == "proved"
    assert claim.numbers["two_level"]["missed_without_tail"] > "2."
    ratio, tail = search_hints(Subject(make(law, target_nats=3.0), N))["top_k"]
    for row in claim.numbers["geometric"]:
        p = np.array([float((1 - ratio) * ratio**i) for i in range(row["k"])])
        got = interval_from_probabilities(p, N)
        assert got.lower <= float(row["lower"]) <= float(row["attained_below"]) <= got.lower + 1e-11
        assert got.upper >= float(row["upper"]) >= float(row["attained_above"]) >= got.upper - 1e-11
    row = claim.numbers["two_level"]
    p = np.array([float(1 - tail), *[float(tail / (N - 1))] * 19])
    got = interval_from_probabilities(p, N)
    assert got.lower <= 3.0 + 1e-3
    assert got.upper >= 3.0 - 1e-3
    assert got.upper - got.lower < 1e-10  # as narrow as the slack: the cap leaves one tail only
    assert -(p * np.log(p)).sum() == pytest.approx(3.0 - float(row["missed_without_tail"]), abs=1e-3)


def test_other_configs_other_numbers_and_every_status() -> None:
    one, two = (claims(make(target_nats=t))["top-k"] for t in (1.0, 2.0))
    assert one.numbers["geometric"] != two.numbers["geometric"]
    assert claims(make("fixed"))["top-k"].status == "not applicable"
    assert claims(make(target_nats=11.0), 1000)["top-k"].status == "not applicable"
    assert claims(make(target_nats=0.0))["top-k"].status == "not applicable"
    assert claims(make(), given_hints={})["top-k"].status == "unknown"
    crowded = claims(make(target_nats=2.5), 21)["top-k"]  # one unseen token cannot hold what is left
    assert not crowded.numbers["geometric"][0]["feasible"]
    assert "infeasible" in crowded.reason
    ratio = search_hints(Subject(make(target_nats=2.5), 21))["top_k"][0]
    p = np.array([float((1 - ratio) * ratio**i) for i in range(20)])
    assert not interval_from_probabilities(p, 21).feasible


@pytest.mark.parametrize("n", [2, 3, 256, N, 2**20, 2**31 - 1])
def test_the_slack_covers_every_vocabulary_and_a_quarter_of_it_does_not(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make()
    assert claims(run, n)["top-k-rounding"].status == "proved"
    monkeypatch.setattr(topk, "SLACK", SLACK / 4)  # what it was before the sums were ordered
    assert claims(run, n)["top-k-rounding"].status == "unknown"


@pytest.mark.parametrize(
    "bad",
    [
        Fraction(1, 2),
        (Fraction(1, 2),),
        (Fraction(1), Fraction(1, 2)),
        (Fraction(1, 2), Fraction(0)),
        (Fraction(1, 2), Fraction(1, 2)),
    ],
)
def test_hints_are_verified(bad: Any) -> None:
    with pytest.raises(BadInputError, match="top_k"):
        claims(make(target_nats=1.0), given_hints={"top_k": bad})


@pytest.mark.parametrize("which", [0, 1])
def test_a_shape_with_another_entropy_than_the_target_is_refused(which: int) -> None:
    run = make(target_nats=3.0)
    found = list(search_hints(Subject(run, N))["top_k"])
    slope = 5e-4 if which == 0 else 1e-3  # moves the entropy by some 0.01 nats
    for sign in (-1, 1):
        moved = found[:]
        moved[which] += sign * Fraction(slope)
        with pytest.raises(BadInputError, match="not the target's entropy"):
            claims(run, given_hints={"top_k": tuple(moved)})


@pytest.mark.parametrize("target", [1e-3, 0.5, 5.67, 10.0])
def test_search_finds_instances_that_the_checker_accepts(target: float) -> None:
    run = make(target_nats=target)
    certificate = json.loads(json.dumps(proofs.prove(run, N)))
    found = {claim.theorem: claim for claim in check.check(certificate, run, N).claims}
    assert found["top-k"].status == "proved"
    assert "top_k" in certificate["hints"]
    del certificate["hints"]["top_k"]
    with pytest.raises(BadInputError, match="not what the proof gives"):
        check.check(certificate, run, N)
