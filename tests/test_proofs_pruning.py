"""Theorem 9 against the shipped code: identities, budget, selection, and page intervals in exact rationals."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from entropic_ctl import config
from entropic_ctl.pruning import select as select_module
from entropic_ctl.pruning.laws import budget
from entropic_ctl.pruning.scores import entropic_share, mass
from entropic_ctl.pruning.select import select
from proofs.check import Claim, Hints, Subject, integer_scores, pruning
from proofs.check.integer_scores import exp_error, integer_gaps, per_channel
from proofs.check.pruning import gamma, log_slack, lse_error, lse_slack, merge_error, rounding_gaps, select_slack
from proofs.enclosures import Interval, exp, log

EPS32 = Fraction(1, 2**24)


def claims(law: str = "budget", engine: dict[str, Any] | None = None, **values: Any) -> dict[str, Claim]:
    run = config.from_mapping({"engine": engine or {}, "loop": {"pruning": {"law": law, **values}}})
    return {claim.theorem: claim for claim in pruning.claims(Subject(run, 49_152), Hints({}))}


# what a budget loses


def identities(kept: list[Fraction], dropped: list[Fraction], values: list[Fraction]) -> bool:
    """Verify the three identities on one instance, exactly; ``values`` are those of ``kept``, then of ``dropped``.

    Every kept weight is multiplied by the same 1 / (1 - m), so KL = ln of it = -ln(1 - m).
    """
    m = sum(dropped, Fraction(0))
    full = [*kept, *dropped]
    pruned = [*(a / (1 - m) for a in kept), *(Fraction(0) for _ in dropped)]
    variation = sum((abs(a - b) for a, b in zip(full, pruned, strict=True)), Fraction(0)) / 2
    out, out_pruned = (sum((a * v for a, v in zip(w, values, strict=True)), Fraction(0)) for w in (full, pruned))
    lost = sum((a * v for a, v in zip(dropped, values[len(kept) :], strict=True)), Fraction(0)) / m
    ratios = {b / a for a, b in zip(kept, pruned, strict=False)}
    return (
        sum(full) == sum(pruned) == 1
        and ratios == {1 / (1 - m)}
        and variation == m
        and out - out_pruned == m * (lost - out_pruned)
    )


weights = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(weights, weights, st.lists(st.integers(-9, 9), min_size=12, max_size=12))
def test_identities_hold_exactly_and_the_loss_is_the_divergence(
    kept: list[int], dropped: list[int], v: list[int]
) -> None:
    total = sum(kept) + sum(dropped)
    a, b = [Fraction(w, total) for w in kept], [Fraction(w, total) for w in dropped]
    assert identities(a, b, [Fraction(x) for x in v[: len(a) + len(b)]])
    assert not identities([x / 2 for x in a], b, [Fraction(x) for x in v[: len(a) + len(b)]])  # no distribution
    m = sum(b)
    divergence = [x / (1 - m) * part for x in a for part in (log((x / (1 - m)) / x).lo,)]
    assert float(sum(divergence)) == pytest.approx(-math.log1p(-float(m)), rel=1e-12)


@given(
    st.floats(0.0, 5.0),
    st.floats(0.0, 5.0),
    st.integers(1, 5),
    st.lists(st.floats(0.0, 12.0), min_size=1, max_size=40),
)
def test_shipped_law_never_exceeds_the_wide_budget(a: float, b: float, dwell: int, entropies: list[float]) -> None:
    law = budget.build(budget.Config(theta_nats=min(a, b), theta_wide_nats=max(a, b), widen_after=dwell))
    theta, timer = (np.array([x]) for x in law.start())
    for h in entropies:
        assert theta[0] <= max(a, b)
        theta, timer = law.update(theta, timer, np.array([h]))
    assert min(a, b) <= theta[0] <= max(a, b)


def two_pages(m: float) -> tuple[np.ndarray, np.ndarray]:
    """A candidate page of mass ``m`` and a protected one with the rest, for one head: exact intervals."""
    scores = np.log([[m, 1 - m]])
    return scores, scores


@pytest.mark.parametrize("theta", [1e-6, 0.02, 0.03, 1.0, 5.0])
def test_selection_is_sharp_at_the_budget(theta: float) -> None:
    m = float(claims(theta_nats=theta, theta_wide_nats=theta)["pruning"].numbers["mass"])
    hair = 1e-8 * min(m, 1 - m)
    for mass_, kept in ((m - hair, False), (m + hair, True)):
        got = select(*two_pages(mass_), [False, True], theta, 1)
        assert got.kept.tolist() == [[kept, True]]
        assert got.mass[0] == pytest.approx(0.0 if kept else mass_, rel=1e-11)


@pytest.mark.parametrize("group", [2, 4, 8])
def test_a_group_mean_lets_one_head_lose_more_than_its_size_times_the_budget(group: int) -> None:
    theta = 0.03
    row = claims(theta_wide_nats=theta, selection="group_mean")["pruning"].numbers["of_one_head_by_group"][str(group)]
    m = (1 - 1e-9) * float(row["mass"])
    scores = np.log([[m, 1 - m], *[[1e-14, 1.0]] * (group - 1)])  # one head has all the loss
    mean = select(scores, scores, [False, True], theta, 1, selection="group_mean")
    assert mean.kept.tolist() == [[False, True]]
    loss = -math.log1p(-float(mean.mass[0]))
    assert group * theta < loss <= float(row["loss_nats"]) * (1 + 1e-9)
    assert loss == pytest.approx(float(row["loss_nats"]), rel=1e-7)
    assert select(scores, scores, [False, True], theta, 1).kept.all()  # a union refuses it
    more = np.log([[m * (1 + 1e-6), 1 - m * (1 + 1e-6)], *[[1e-14, 1.0]] * (group - 1)])
    assert select(more, more, [False, True], theta, 1, selection="group_mean").kept.all()


def test_other_configs_other_words() -> None:
    found = claims()["pruning"]
    assert found.numbers["mass"] == "0.029554466451492"
    assert "every query head" in found.reason
    wide = claims(theta_wide_nats=2.0, selection="group_mean")["pruning"].numbers["of_one_head_by_group"]
    assert wide["2"]["loss_nats"] is None  # 2 (1 - e^-2) > 1: one head may lose everything
    assert claims(theta_nats=0.0, theta_wide_nats=0.0)["pruning"].numbers["mass"] == "0"
    assert claims(engine={"max_context": 80})["pruning"].numbers["mass"] == "0"
    assert claims(engine={"max_context": 81})["pruning"].numbers["mass"] != "0"
    assert {claim.status for claim in claims("off").values()} == {"not applicable"}


def test_an_unknown_law_is_never_proved() -> None:
    run = config.from_mapping({"loop": {"pruning": {"law": "budget"}}})
    object.__setattr__(run.loop.pruning, "name", "other")
    assert {claim.status for claim in pruning.claims(Subject(run, 100), Hints({}))} == {"unknown"}


# the literal entropic share


@pytest.mark.parametrize("size", [1, 2, 8, 9, 16, 64, 1024])
def test_literal_share_misranks_for_every_page_size(size: int) -> None:
    claim = claims(engine={"page_tokens": size})["entropic-share-misranks"]
    assert claim.status == "proved"

    def pages(heavy: float, diffuse: int) -> np.ndarray:
        a = np.full((diffuse + 1, size), (1 - heavy) / (diffuse * size))
        a[0] = 0.0
        a[0, 0] = heavy
        return a

    behind = claim.numbers["diffuse_pages"]
    assert behind == (9 if size >= 9 else claim.numbers["diffuse_pages"])
    share = entropic_share.importance(pages(0.99, behind))
    assert share.argmin() == 0
    assert mass.importance(pages(0.99, behind)).argmax() == 0
    assert share[0] == pytest.approx(float(claim.numbers["share_of_0.99"]), rel=1e-12)
    assert share[1] == pytest.approx(float(claim.numbers["share_of_a_diffuse_page"]), rel=1e-12)
    if behind < 9:  # and no further
        assert entropic_share.importance(pages(0.99, behind + 1)).argmin() != 0
    assert entropic_share.importance(pages(1 - 1e-6, 200))[0] < 1e-5 < mass.importance(pages(1 - 1e-6, 200))[0]


# slack


def test_slack_of_select_is_the_shipped_one() -> None:
    for terms in (1, 100, 10**6):
        s = float(select_slack(terms))
        for u, z in ((0.1, 1.0), (1e-6, 3.0)):
            expected = u * (1 + s) / (u * (1 + s) + z * (1 - s))
            got = select_module._mass(np.array([u]), np.array([z]), terms)[0]
            assert got == pytest.approx(expected, rel=2e-15)
            assert got > u / (u + z) * (1 + s * z / (u + z))


@pytest.mark.parametrize("top", [0.0, 50.0, -3.0])
def test_the_log_of_what_is_dropped_has_the_slack_shown_and_holds_where_it_is_longest(top: float) -> None:
    """One page dropped: ln U is its own upper end, exactly. At -708 the logarithm's own rounding counts most."""
    for depth in (-1.0, -300.3, -700.1, -708.1):
        ends = np.array([[top + depth, top]])
        got = select(ends, ends, [False, True], 1e3, 1)
        assert got.kept.tolist() == [[False, True]]
        assert got.log_pruned[0] >= ends[0, 0]
        plain = np.log(np.exp(depth + top - top) * (1 + float(select_slack(2)))) + top
        granted = float(log_slack()) * (745 + abs(top))
        assert got.log_pruned[0] == pytest.approx(plain + granted, abs=3e-13)
        assert abs(got.log_pruned[0] - plain - granted) < granted / 4


@pytest.mark.parametrize("name", ["log_slack", "select_slack", "lse_slack"])
def test_a_part_of_the_slack_of_each_kind_is_not_shown_to_be_enough(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `log_slack` half is what was granted before: 8 of the 10 units in the last place needed."""
    whole = getattr(pruning, name)
    monkeypatch.setattr(pruning, name, lambda *given: whole(*given) / (2 if name == "log_slack" else 5))
    assert min(rounding_gaps(16, 8192, 512).values()) < 0
    assert claims()["page-interval"].status == "unknown"


def test_the_needed_slack_is_its_parts_added_up_again() -> None:
    """The table of the proof book, part by part, so that a part left out is seen."""
    u, gaps = float(EPS32), rounding_gaps(16, 8192, 512, 256)
    for n in (1, 2, 16, 1024, 10**5):
        needed = (n - 1 + 4 + 5 * math.log(n)) * u  # additions, exp to 2 ulp, max - score, log to 2 ulp
        assert needed * (1 - 1e-6) <= float(lse_error(n)) <= needed + ((n + 8) * u) ** 2 + 1e-20
    x = np.linspace(0.0, 10.0, 100_001)
    amplified = float((x / np.cosh(x) ** 2).max())  # what a relative error of the argument does to tanh
    needed = (amplified + 4 + 1) * u  # division; tanh to 2 ulp of at most 1; product
    assert needed <= 8 * u - float(gaps["the score cap"]) < 8 * u
    flushed = 10.0**-30 - float(gaps["underflow of the products"])
    assert flushed >= 0.9 * 256 * 264 * float(np.finfo(np.float32).tiny)
    assert float(gaps["underflow of the products"]) > 0


@pytest.mark.parametrize("page_tokens", [1, 16, 1024])
@pytest.mark.parametrize("tokens", [2, 8192, 2**20, 2**24])
def test_granted_slack_covers_the_rounding(page_tokens: int, tokens: int) -> None:
    for head in (1, 64, 256):
        gaps = rounding_gaps(page_tokens, tokens, -(-tokens // page_tokens), head)
        assert {name: gap for name, gap in gaps.items() if gap < 0} == {}


def test_beyond_what_is_shown_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    huge = {"page_tokens": 1024, "pages": 2**24, "max_context": 2**31 - 1}
    assert claims()["page-interval"].status == "proved"
    assert claims(engine=huge)["page-interval"].status == "unknown"
    monkeypatch.setattr(pruning, "lse_slack", lambda n: n * EPS32)  # the sum's rounding alone
    found = claims()["page-interval"]
    assert found.status == "unknown"
    assert "log-sum-exp of a page" in found.reason
    monkeypatch.setattr(pruning, "lse_slack", lambda n: (n + 32) * EPS32)  # a constant in place of ln n: fails from
    assert rounding_gaps(16, 10**5, 10**4)["the log-sum-exp of all that is read"] < 0  # some length on


def test_constants_of_the_integer_scores_are_those_of_the_sources() -> None:
    folder = Path(__file__).resolve().parents[1] / "backends/native/src"
    source = {name: (folder / f"{name}.cpp").read_text(encoding="utf-8") for name in ("score", "attend", "pruned")}
    for name, pattern, times in (
        ("score", r"kChord = 0\.0598f", 1),
        ("score", r"kChordRounding = 132\.0f", 1),
        ("score", r"kFlushed = 2e-38f", 1),
        ("score", r"1\.02f \* ", 2),
        ("score", r"\(dim \+ 32\.0f\) \* kUnit \* 1\.01f", 1),
        ("score", r"8\.0f \* kUnit \* std::fabs\(reference\[g\]\) \+ \(terms \+ 24\.0f \+ below\) \* kUnit", 1),
        ("score", r"unit \* \(1\.0f \+ 32\.0f \* kUnit\)", 1),
        ("attend", r"\* \(1\.0 \+ 1e-5\) \+ 4e-18", 2),
        ("attend", r"top >= 1e-30f", 1),
        ("attend", r"top / 32767\.0f", 1),
        ("pruned", r"1e-36 \* \(query_norm \+ key_norm\)", 1),
        ("pruned", r"\(static_cast<double>\(capacity\) \+ 64\.0\) \* kUnit", 1),
        ("pruned", r"\(1\.0 - 8\.0 \* summing\(count_\)\)", 1),
        ("pruned", r"\(1\.0 \+ summing\(of\.capacity\)\)", 1),
        ("pruned", r"\(1\.0 - summing\(low_\.capacity\)\)", 1),
        ("pruned", r"\(1\.0 \+ 2e-9\) <= ratio_of", 1),
        ("pruned", r"mass \* \(1\.0 - 2e-15\) / \(std::exp\(-theta\) \+ mass \* 2e-15\)", 1),
        ("pruned", r"ratio / \(1\.0 \+ ratio\) \* \(1\.0 \+ 1e-15\) \+ 1e-300", 1),
        ("pruned", r"std::min<double>\(sum_over\(taken_, .*\), kMost\)", 1),
        ("pruned", r"/ least_\[g\] \* \(1\.0 \+ 1e-9\)", 1),
    ):
        assert len(re.findall(pattern, source[name])) == times, pattern
    assert 8 * (integer_scores.MOST_PAGES + 64) * EPS32 >= 1  # no budget is left from there on


def test_weighted_queries_in_integers_are_off_by_at_most_one_unit() -> None:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(300, 256)).astype(np.float32)
    w = rng.integers(1, 256, (300, 256))
    alpha = np.abs(q).max(axis=1, keepdims=True) / np.float32(32767)
    whole = np.rint(q * (np.float32(1) / alpha)).clip(-32767, 32767).astype(np.int64)
    weighted = (whole * (w * 128) + 16384) >> 15
    off = np.abs(q.astype(float) * w / (256.0 * alpha.astype(float)) - weighted)
    assert 0.9 < off.max() <= float(per_channel())
    assert np.abs(weighted).max() <= (32767 * 255 * 128 + 16384) // 32768
    assert (
        integer_gaps(16, 64, 257)["dot products fit in 31 bits"]
        > 0
        > integer_gaps(16, 64, 259)["dot products fit in 31 bits"]
    )


def test_two_to_the_x_from_above_falls_short_by_its_rounding_only() -> None:
    """The rounding is larger than the slack of a sum over 16 tokens, 40 units: it has a term of its own."""
    x = np.random.default_rng(1).uniform(-60.0, 6.0, 300_000).astype(np.float32)
    steps = np.arange(300, dtype=np.float32) * np.float32(2.0**-23)
    x = np.concatenate([x, 1 + steps, steps - 1, np.arange(-60, 6, dtype=np.float32)])
    bits = (x.astype(np.float64) * 2.0**23 + 1065353216.0).astype(np.float32).astype(np.int32)  # one rounding
    ratio = bits.view(np.float32).astype(float) / np.exp2(x.astype(float))
    assert 1 - 132 * float(EPS32) < ratio.min() < 1 - 80 * float(EPS32)
    assert 0.0595 < np.log(ratio.max()) < 0.0598


def test_the_polynomial_of_exp_is_within_two_ulp() -> None:
    """In float32 and without fused steps, which only add roundings."""
    assert exp_error() < 4 * EPS32
    f = np.float32
    x = np.random.default_rng(2).uniform(-87.0, 88.0, 200_000).astype(f)
    n = np.rint(x * f(1.44269504088896341))
    r = ((x.astype(float) - n * 0.693359375).astype(f).astype(float) + n * float(f(2.12194440e-4))).astype(f)
    p = np.full_like(r, f(1 / 5040))
    for k in (720, 120, 24, 6, 2, 1, 1):
        p = (p.astype(float) * r + float(f(1 / k))).astype(f)
    off = np.abs(p.astype(float) * np.exp2(n.astype(float)) / np.exp(x.astype(float)) - 1)
    assert float(EPS32) < off.max() <= float(exp_error())


torch = pytest.importorskip("torch")

from backends.attention import PagedBatch  # noqa: E402
from backends.attention import pruned as shipped  # noqa: E402
from backends.attention.reference import Scoring, State, attend, merge  # noqa: E402
from backends.attention.rows import single_row_plan  # noqa: E402
from backends.kv_cache import PagedKVCache, quantise, unpack  # noqa: E402
from entropic_ctl.pruning.base import PruningConfig  # noqa: E402


def test_constants_are_the_shipped_ones() -> None:
    assert Fraction(shipped._U) == EPS32
    for n in (7, 70, 262):
        assert shipped._gamma(n) == pytest.approx(float(gamma(n)), rel=1e-15)
    for n in (1, 16, 1024, 10**6):
        for value in (0.0, -7.0, 1e4):
            got = shipped._lse_slack(np.array([value]), n)[0]
            assert got == pytest.approx(float(lse_slack(n) + 4 * EPS32 * Fraction(abs(value))), rel=1e-14)
    exact = shipped._exact_slack(np.array([[3.0]]), np.array([[5.0]]), np.array([[0.0]]), np.array([100]), 64)[0, 0]
    g = float(gamma(70))
    assert shipped._gamma(256 + 32) == pytest.approx(float(gamma(288)), rel=1e-15)
    assert exact == pytest.approx(15 * g * (1 + 8 * g) + float(lse_slack(108)), rel=1e-14)


def true_lse(x: np.ndarray) -> float:
    top = x.max()
    return float(top + np.log(np.exp((x - top).astype(np.longdouble)).sum()))


@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("n", [1, 16, 1000, 100_000])
def test_float32_log_sum_exp_is_within_its_bound(n: int, spread: float) -> None:
    g = torch.Generator().manual_seed(n)
    worst = 0.0
    for offset in (0.0, -3.3, 50.0):
        s = torch.randn(n, generator=g) * spread + offset
        got, true = float(torch.logsumexp(s, -1)), true_lse(s.double().numpy())
        assert abs(got - true) <= float(lse_error(n)) + float(EPS32) * abs(got)
        worst = max(worst, abs(got - true))
        one = torch.ones(1, n, 1)
        halves = [
            attend(torch.ones(1, 1, 1), part[None, :, None], one[:, : len(part)], Scoring(1.0))
            for part in s.split(n // 2 + 1)
        ]
        both: State = merge(halves[0], halves[-1]) if len(halves) > 1 else halves[0]
        assert abs(float(both.lse) - true) <= float(merge_error(n)) + 2 * float(EPS32) * abs(float(both.lse))
    assert n == 1 or worst > 0  # there is rounding to cover


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
KEYS = {
    "normal": lambda x: x,
    "constant page": lambda x: x[:1].expand_as(x).clone(),
    "large and constant": lambda x: 100 + x[:1].expand_as(x).clone(),
    "offset": lambda x: 20 + 0.1 * x,
    "tiny": lambda x: x * 1e-6,
    "wide": lambda x: x**5,
}


def exact(x: torch.Tensor) -> list[Any]:
    rows = x.double().tolist()
    return [[Fraction(v) for v in row] for row in rows] if x.ndim == 2 else [Fraction(v) for v in rows]


@pytest.mark.parametrize("keys", KEYS)
@given(dtypes, st.sampled_from([3, 8]), st.sampled_from([0.3, 3.0]), st.integers(0, 2**31 - 1))
@settings(max_examples=40)
def test_stored_error_and_page_interval_hold_in_exact_rationals(
    keys: str, dtype: torch.dtype, dim: int, size: float, seed: int
) -> None:
    g, page = torch.Generator().manual_seed(seed), 4
    cache = PagedKVCache(1, 1, dim, 1, page, dtype)
    cache.k[0, 0, 0] = KEYS[keys](torch.randn(page, dim, generator=g, dtype=torch.float64)).to(dtype)
    cache.v.zero_()
    assume(bool((cache.k.abs() <= 65504).all()))
    k = exact(cache.k[0, 0, 0])
    shadow = quantise(cache.k[0, 0, 0])
    weight, centre, a, e = exact(shadow.weight), exact(shadow.centre), Fraction(shadow.step.item()), shadow.error.item()
    for row, code in zip(k, exact(shadow.codes), strict=True):
        for d in range(dim):
            away, high = row[d] - centre[d], code[d] // 16 * 16 + Fraction(15, 2)
            assert abs(away - weight[d] * a * (code[d] - 128)) <= weight[d] * Fraction(e)
            assert abs(away - weight[d] * a * (high - 128)) <= weight[d] * (Fraction(e) + Fraction(15, 2) * a)
    cache.seal_pages(np.arange(1))
    query = (torch.randn(1, 1, 1, dim, generator=g) * size).to(dtype).float()
    scale = 1 / math.sqrt(dim)
    looks = [shipped.page_bounds(cache, 0, torch.arange(1), query, Scoring(scale), coarse=c) for c in (True, False)]
    q = exact(query[0, 0, 0])
    scores = [Fraction(scale) * sum((a * b for a, b in zip(q, row, strict=True)), Fraction(0)) for row in k]
    top = max(scores)
    parts = [exp(s - top, 64) for s in scores]
    total = Interval(sum((p.lo for p in parts), Fraction(0)), sum((p.hi for p in parts), Fraction(0)))
    for lower, upper in looks:
        assert Fraction(float(lower[0, 0])) <= top + log(total.lo, 64).lo
        assert top + log(total.hi, 64).hi <= Fraction(float(upper[0, 0]))


def test_without_float_slack_constant_float32_pages_break_the_interval() -> None:
    """The hard case: every key of a page equal, so the stored error is next to nothing and rounding is all there is."""
    g, dim, page, trials = torch.Generator().manual_seed(3), 64, 16, 200
    cache = PagedKVCache(1, 1, dim, trials, page, torch.float32)
    cache.k[0] = torch.randn(trials, 1, 1, dim, generator=g).half().float().expand(trials, 1, page, dim)
    cache.v.zero_()
    cache.seal_pages(np.arange(trials))
    query = torch.randn(trials, 1, 1, dim, generator=g)
    lower, upper = shipped.page_bounds(cache, 0, torch.arange(trials), query, Scoring(0.125))
    s = torch.einsum("thgd,thpd->tp", query.double(), cache.k[0].double()) * 0.125
    true = torch.logsumexp(s, -1).numpy()
    assert (lower[:, 0] <= true).all()
    assert (true <= upper[:, 0]).all()
    keys = unpack(cache.shadow.record[0], cache.shadow.low[0], page, dim)
    stored = (query[:, 0, 0].double().abs() * keys.weight[:, 0].double()).sum(-1) * keys.error[:, 0].double() * 0.125
    outside = np.abs((lower + upper)[:, 0] / 2 - true) > stored.numpy()
    assert outside.mean() > 0.2


@pytest.mark.parametrize("tokens", [79, 80, 81, 96])
def test_contexts_up_to_the_protected_pages_stay_dense(tokens: int) -> None:
    protected = claims()["pruning"].numbers["dense_tokens"]
    assert protected == 80
    cache = PagedKVCache(1, 1, 4, 6, 16, torch.float32)
    cache.k.normal_()
    cache.v.zero_()
    cache.seal_pages(np.arange(5))
    rule = PruningConfig()
    batch = PagedBatch.from_plan(
        single_row_plan(tokens - 1, 1, range(6)[: -(-tokens // 16)], theta_nats=1.0), cache, rule
    )
    assert (batch.rows[0].theta_nats > 0) == (tokens > protected)
