from __future__ import annotations

import json
import math
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.config import LawSpec, LoopConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.temperature import feedback

pytest.importorskip("scipy")

from paper_repro import claims, experiments, explain, page, sections, setup, statements, verdicts
from paper_repro.arms import TABLE_OF, arms
from paper_repro.outcome import as_rows
from paper_repro.report import Report, number, with_interval
from paper_repro.verdicts import Effect, judge, paired

positive = st.floats(0.01, 100.0)
pairs = st.lists(st.tuples(positive, positive), min_size=2, max_size=12)


def effect(low: float, high: float) -> Effect:
    return Effect(math.sqrt(low * high), low, high, 5, identical=False)


def full_loop() -> LoopConfig:
    return LoopConfig(temperature=LawSpec("feedback", feedback.Config(temperature=0.9, gain=0.01)))


# -- the paper's numbers ----------------------------------------------------------------------------------------------


def test_the_papers_table_multiplies_as_the_specification_says() -> None:
    """0.98*0.88*0.85 = 0.73, 1.02*1.15*1.20 = 1.41, 1.08*1.12*1.25 = 1.51: super in latency and efficiency only."""
    for metric, product, full in (("latency", 0.73, 0.70), ("throughput", 1.41, 1.40), ("efficiency", 1.51, 1.55)):
        parts = [claims.claim(arm, metric) for arm in claims.ARMS[1:-1]]
        assert math.prod(part.paper for part in parts if part) == pytest.approx(product, abs=0.005)
        whole = claims.claim("full loop", metric)
        assert whole is not None
        assert whole.paper == full


def test_the_claims_table_is_labelled_and_complete() -> None:
    table = claims.table()
    assert set(table["source"].tolist()) == {"paper"}
    assert len(table["arm"]) == len(claims.ARMS) * 4
    assert all(claims.claim("baseline", metric).paper == 1.0 for metric in ("latency", "quality"))  # type: ignore[union-attr]
    assert claims.claim("full loop", "TTFT") is None


# -- intervals --------------------------------------------------------------------------------------------------------


def test_every_metric_that_answers_a_claim_has_the_papers_number_to_draw() -> None:
    table = experiments.claims_by_metric()
    for metric in experiments.METRICS:
        own = table["metric"] == metric.name
        assert own.sum() == (len(claims.ARMS) if metric.claim else 0)
        for arm, paper in zip(table["arm"][own], table["paper"][own], strict=True):
            assert paper == claims.claim(arm, metric.claim).paper
    assert set(table["source"]) == {"paper"}


def test_paired_interval_by_hand() -> None:
    """d = (ln 2, ln 8): mean ln 4, s = ln 2 * sqrt 2, half width t(1; .975) ln 2 = 12.7062 ln 2."""
    got = paired([2.0, 8.0], [1.0, 1.0])
    assert got.ratio == pytest.approx(4.0)
    assert math.log(got.high / got.ratio) == pytest.approx(12.7062047 * math.log(2), rel=1e-6)
    assert got.pairs == 2


@given(pairs, positive)
def test_scaling_both_arms_changes_nothing_and_scaling_one_scales_the_ratio(
    values: list[tuple[float, float]], c: float
) -> None:
    x, y = map(np.array, zip(*values, strict=True))
    base, both, one = paired(x, y), paired(c * x, c * y), paired(c * x, y)
    assert both.ratio == pytest.approx(base.ratio, rel=1e-9)
    assert one.ratio == pytest.approx(c * base.ratio, rel=1e-9)
    assert one.high == pytest.approx(c * base.high, rel=1e-6)
    swapped = paired(y, x)
    assert swapped.low == pytest.approx(1 / base.high, rel=1e-6)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    common = rng.normal(0, 1, (2000, 1))  # what the pairs share must not matter
    noise = rng.normal(0, 0.1, (2, 2000, 4))
    hits = 0
    for shared, a, b in zip(common, noise[0], noise[1], strict=True):
        got = paired(np.exp(0.3 + shared + a), np.exp(shared + b))
        hits += got.low <= math.exp(0.3) <= got.high
    assert 0.93 <= hits / 2000 <= 0.97


def test_pairs_that_cannot_be_used_are_left_out() -> None:
    got = paired([1.0, np.nan, 2.0, 3.0], [1.0, 1.0, 0.0, 1.5])
    assert got.pairs == 2
    assert paired([], []).pairs == 0
    assert math.isnan(paired([1.0], [2.0]).low)
    with pytest.raises(BadInputError):
        paired([1.0], [1.0, 2.0])


# -- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "paper", "higher", "verdict", "why"),
    [
        (0.998, 0.999, 1.25, True, "not reproduced", "no effect: within 2% (none larger than 0.2%)"),
        (0.985, 1.004, 1.25, True, "not reproduced", "no effect: within 2%"),
        (1.002, 1.015, 1.25, True, "not reproduced", "no effect: within 2%"),
        (0.95, 0.99, 1.25, True, "not reproduced", "not surely by more than 2%"),
        (0.95, 0.979, 1.25, True, "refuted", "by more than 2%"),
        (1.012, 1.018, 1.02, True, "partly", "short of"),  # a claim of 2% gets a band of 1%
        (0.995, 1.005, 1.02, True, "not reproduced", "no effect: within 1%"),
        (0.60, 0.80, 0.70, False, "reproduced", "at least half"),
        (0.50, 0.60, 0.70, False, "reproduced", "not short of"),
        (0.85, 0.95, 0.70, False, "partly", "short of"),
        (0.85, 1.05, 0.70, False, "not reproduced", "excluded"),
        (0.60, 1.10, 0.70, False, "not reproduced", "undecided"),
        (1.03, 1.10, 0.70, False, "refuted", "opposite"),
        (1.30, 1.60, 1.40, True, "reproduced", "not short of"),
        (1.05, 1.20, 1.40, True, "partly", "short of"),
        (0.80, 0.95, 1.40, True, "refuted", "opposite"),
        (0.99, 1.01, 1.00, True, "reproduced", "unchanged"),
        (1.10, 1.20, 1.00, True, "reproduced", "no worse"),
        (0.80, 0.90, 1.00, True, "refuted", "worse by more"),
        (0.90, 1.10, 1.00, True, "not reproduced", "undecided"),
        (0.96, 0.985, 0.98, True, "reproduced", "not short of"),
        (0.96, 0.99, 0.98, True, "partly", "less than half"),
        (0.60, 0.95, 0.70, False, "partly", "less than half"),
        (1.015, 1.03, 0.98, True, "refuted", "opposite"),
    ],
)
def test_verdicts(*, low: float, high: float, paper: float, higher: bool, verdict: str, why: str) -> None:
    got = judge(effect(low, high), paper, higher_is_better=higher)
    assert got.verdict == verdict
    assert why in got.reason


def test_what_an_experiment_cannot_decide_gets_no_verdict_on_the_claim() -> None:
    same = paired([1.0, 2.0], [1.0, 2.0])
    assert judge(same, 0.9, higher_is_better=False).verdict == "not identifiable"
    assert judge(paired([], []), 0.9, higher_is_better=False).verdict == "not identifiable"
    assert judge(effect(0.6, 0.8), 0.7, higher_is_better=False, not_identifiable="why").reason == "why"
    single = judge(paired([0.5], [1.0]), 0.7, higher_is_better=False)
    assert single.verdict == "not reproduced"
    assert "no interval" in single.reason


@given(st.floats(0.2, 5.0), st.floats(1.001, 3.0), st.floats(0.3, 3.0))
def test_judging_is_symmetric_in_direction(middle: float, half: float, paper: float) -> None:
    """A lower-is-better ratio r against claim c is a higher-is-better 1/r against 1/c."""
    down = judge(effect(middle / half, middle * half), paper, higher_is_better=False)
    up = judge(effect(1 / (middle * half), half / middle), 1 / paper, higher_is_better=True)
    assert down.verdict == up.verdict


def test_interaction_is_one_when_effects_multiply() -> None:
    rng = np.random.default_rng(1)
    base = rng.uniform(1, 2, 6)
    parts = [base * factor for factor in (0.9, 0.8, 1.1)]
    full = base * 0.9 * 0.8 * 1.1
    got = verdicts.interaction(full, parts, base)
    assert got.ratio == pytest.approx(1.0)
    assert verdicts.interaction(full * 0.5, parts, base).ratio == pytest.approx(0.5)


# -- the experiment ---------------------------------------------------------------------------------------------------


def test_each_arm_switches_on_exactly_its_law() -> None:
    full = full_loop()
    table = arms(full)
    base = table["baseline"]
    assert list(table) == list(claims.ARMS)
    assert base.temperature.name == "fixed"
    assert base.temperature.config.temperature == 0.9  # the same starting temperature
    for arm, switched in TABLE_OF.items():
        for name in ("temperature", "pruning", "scheduling"):
            expected = full if name == switched else base
            assert getattr(table[arm], name) == getattr(expected, name)
    assert table["full loop"] == full


def test_arms_share_seeds_rotate_and_lose_no_number() -> None:
    calls: list[tuple[str, int]] = []

    def world(arm: str, loop: LoopConfig, seed: int) -> dict[str, float]:
        calls.append((arm, seed))
        return {"latency_s": 1.0 + seed % 7, "only_full": 3.0} if arm == "full loop" else {"latency_s": 2.0 + seed % 7}

    shares: list[float] = []
    table = arms(full_loop())
    runs = experiments.ablation({"engine": world}, table, {"engine": 4}, 11, lambda _, share: shares.append(share))
    assert len(calls) == 20 == runs["arm"].shape[0]
    by_arm = {arm: sorted(seed for a, seed in calls if a == arm) for arm in table}
    assert len({tuple(seeds) for seeds in by_arm.values()}) == 1  # common random numbers
    assert len({arm for arm, _ in calls[::5]}) == 4  # a different arm goes first in each repeat
    assert shares == sorted(shares)
    assert np.isnan(runs["only_full"][runs["arm"] == "baseline"]).all()
    assert experiments.seeds(11, 4) == experiments.seeds(11, 9)[:4]
    assert experiments.seeds(11, 4) != experiments.seeds(12, 4)


def test_no_baseline_is_refused() -> None:
    with pytest.raises(BadInputError, match="no baseline"):
        experiments.ablation({}, {"full loop": full_loop()}, {}, 0)


def fake_runs(factor: dict[str, float], repeats: int = 5) -> dict[str, np.ndarray]:
    def world(arm: str, loop: LoopConfig, seed: int) -> dict[str, float]:
        rng = np.random.default_rng(seed)
        base = rng.uniform(1, 3)
        noise = math.exp(np.random.default_rng([seed, zlib.crc32(arm.encode())]).normal(0, 0.005))
        slow = factor[arm] * noise
        return {
            "latency_s": base * slow,
            "throughput_tok_s": base / slow,
            "kl_nats": 0.01 if arm == "full loop" else 0.0,
        }

    return experiments.ablation({"engine": world}, arms(full_loop()), {"engine": repeats}, 3)


FASTER = {"baseline": 1.0, "sampling only": 0.98, "scheduling only": 1.2, "attention only": 0.8, "full loop": 0.65}


def test_effects_recover_known_factors_and_verdicts_follow() -> None:
    table = experiments.effects(fake_runs(FASTER))
    pick = {(a, m): i for i, (a, m) in enumerate(zip(table["arm"].tolist(), table["metric"].tolist(), strict=True))}
    for arm, factor in FASTER.items():
        if arm != "baseline":
            i = pick[arm, "latency"]
            assert table["ratio"][i] == pytest.approx(factor, rel=0.03)
    assert table["verdict"][pick["full loop", "latency"]] == "reproduced"
    assert table["verdict"][pick["scheduling only", "latency"]] == "refuted"
    assert table["verdict"][pick["full loop", "TTFT"]] == ""  # the paper claims nothing
    assert table["verdict"][pick["full loop", "dτ/d FLOP"]] == "not identifiable"  # not measured here


def test_no_number_of_the_paper_enters_a_result_column() -> None:
    table = experiments.effects(fake_runs(FASTER))
    assert not {"paper", "claim"} & set(table)
    ours = experiments.effects(fake_runs(dict.fromkeys(FASTER, 1.0) | {"full loop": 1.37}))
    i = int(np.flatnonzero((ours["arm"] == "full loop") & (ours["metric"] == "latency"))[0])
    assert ours["ratio"][i] == pytest.approx(1.37, rel=0.03)


def test_synergy_says_which_side() -> None:
    table = experiments.synergy(fake_runs(FASTER, repeats=6))
    pick = {metric: i for i, metric in enumerate(table["metric"].tolist())}
    assert table["ratio"][pick["latency"]] == pytest.approx(0.65 / (0.98 * 1.2 * 0.8), rel=0.05)
    assert table["better"][pick["latency"]] == "yes"
    assert table["better"][pick["throughput"]] == "yes"


def test_what_got_worse_is_said_plainly() -> None:
    runs = fake_runs(FASTER)
    said = statements.worse(experiments.effects(runs), ["scheduling only", "full loop"], runs)
    assert any("scheduling only" in line and "latency" in line and "+" in line for line in said)
    assert any("KL" in line and "full loop" in line for line in said)
    assert not any("sampling only" in line for line in said)
    fine = fake_runs(dict.fromkeys(FASTER, 1.0) | {"full loop": 0.5})
    fine["kl_nats"][:] = 0.0
    assert statements.worse(experiments.effects(fine), ["full loop"], fine) == ["No metric surely got worse."]
    assert any("latency -50%" in line for line in statements.improved(experiments.effects(fine), ["full loop"]))


def one_effect(metric: str, ratio: float, low: float, high: float) -> dict[str, np.ndarray]:
    row = {"world": "engine", "arm": "full loop", "metric": metric, "ratio": ratio, "low": low, "high": high}
    return {name: np.array([value]) for name, value in row.items()}


def test_tail_latency_is_compared_and_its_loss_is_said() -> None:
    runs = fake_runs(FASTER)
    runs["latency_p99_s"] = runs["latency_s"] * np.where(runs["arm"] == "full loop", 2.2, 1.0)
    runs["preemptions"] = np.where(runs["arm"] == "full loop", 3.0, 0.0)
    said = statements.worse(experiments.effects(runs), ["full loop"], runs)
    assert any("99th-percentile" in line and "+43%" in line for line in said)
    assert any("3.00 preemptions a run, 0 in the baseline" in line for line in said)
    _, rows = sections.world_table(runs, "engine")
    assert "p99 latency (s)" in [row[0] for row in rows]
    shown = sections.effect_rows(experiments.effects(runs), "engine", claimed_only=True)
    assert "p99 latency" in [row[1] for row in shown]


def test_sure_small_and_unresolved_changes_are_kept_apart() -> None:
    none: dict[str, np.ndarray] = {"world": np.array([]), "arm": np.array([])}
    sure, small, open_ = (
        one_effect("latency", *values) for values in ((1.3, 1.2, 1.4), (1.01, 1.005, 1.015), (1.3, 0.9, 1.9))
    )
    arm = ["full loop"]
    assert "latency +30% [+20%, +40%]" in statements.worse(sure, arm, none)[0]
    assert "no more than 2%" in statements.worse(small, arm, none)[0]
    assert statements.worse(open_, arm, none) == ["No metric surely got worse."]
    assert statements.improved(sure, arm) == ["No metric surely got better."]
    assert statements.unresolved(sure, arm) == []
    assert len(statements.unresolved(open_, arm)) == 1


def test_each_reason_stands_once_without_losing_a_verdict() -> None:
    table = experiments.effects(fake_runs(FASTER))
    rows = page.reasons(table)
    assert len({(row[0], row[1]) for row in rows}) == len(rows) < int((table["verdict"] != "").sum())
    for arm, metric, verdict in zip(table["arm"], table["metric"], table["verdict"], strict=True):
        if verdict:
            assert any(row[0] == verdict and arm in row[2] and metric in row[2] for row in rows)


def test_the_load_note_quotes_this_run() -> None:
    table = experiments.effects(fake_runs(FASTER))
    i = int(np.flatnonzero((table["arm"] == "full loop") & (table["metric"] == "latency"))[0])
    assert with_interval(table["ratio"][i], table["low"][i], table["high"][i]) in page.load_note(table)
    table["world"][:] = "simulated"
    assert page.load_note(table) == ""


def test_people_see_a_short_gain() -> None:
    assert page.tidy("k = 0.012653312345, V_max(49152) <= 30.163347") == "k = 0.01265, V_max(49152) <= 30.163347"


def test_differences_keep_only_what_differs() -> None:
    one = {"a": 1, "b": {"c": 2, "d": 3}, "e": {"f": 4}}
    assert explain.differences(one, {"a": 1, "b": {"c": 9, "d": 3}, "e": {"f": 4}, "g": 5}) == {"b": {"c": 9}, "g": 5}
    assert explain.differences(one, one) == {}


def test_the_workloads_are_described_from_the_config() -> None:
    config = setup.simulation_config(0, setup.Size(sim_requests=17))
    said = explain.workloads_text(config, setup.engine_config(0), 8, 32)
    for part in (
        "17 requests",
        "600 tokens",
        "8 users",
        config.cost.preset,
        "8 built-in prompts",
        "must not be compared",
    ):
        assert part in said
    assert " = 0" not in said
    assert "Engine" not in explain.workloads_text(config, None, 0, 0)


def test_a_violated_guarantee_is_shouted() -> None:
    assert any("held" in line for line in statements.guarantees(10, 0, 0.9, ""))
    assert any("VIOLATED in 2 rows" in line for line in statements.guarantees(10, 2, 1.4, ""))
    assert "nothing to certify" in statements.guarantees(0, 0, 0.0, "")[0]


# -- the report -------------------------------------------------------------------------------------------------------


def test_report_is_one_self_contained_file(tmp_path: Path) -> None:
    png = tmp_path / "x.png"
    png.write_bytes(b"\x89PNG\r\n\x1a\nrest")
    report = Report("Title <1>", "sub")
    report.worse(["it is <slower>"])
    report.table(("arm", "x", "verdict"), [("a & b", 1.5, "refuted"), ("c", float("nan"), "not identifiable")])
    report.figure(png, "caption")
    report.details("config", {"a": 1})
    page = report.write(tmp_path / "r.html").read_text(encoding="utf-8")
    assert "&lt;slower&gt;" in page
    assert "a &amp; b" in page
    assert 'class="v refuted"' in page
    assert "data:image/png;base64," in page
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (1234567.0, "1.23e+06"), (1234.5, "1,234"), (0.012345, "0.0123"), (float("nan"), "–"), (None, "–"),
     (12, "12"), (99999.0, "99,999"), (1e-5, "1.00e-05"), (3.14159, "3.14"), (-2.5, "-2.50")],
)  # fmt: skip
def test_numbers_for_people(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_intervals_for_people() -> None:
    assert with_interval(0.9, 0.8, 1.0) == "0.900 [0.800, 1.000]"
    assert with_interval(0.9, math.nan, math.nan) == "0.900"
    assert with_interval(math.nan, 0.1, 0.2) == "–"


def test_tables_become_json_without_nan() -> None:
    rows = as_rows({"a": np.array([1.0, np.nan]), "b": np.array(["x", "y"]), "c": np.array([1, 2])})
    assert json.loads(json.dumps(rows, allow_nan=False)) == [
        {"a": 1.0, "b": "x", "c": 1},
        {"a": None, "b": "y", "c": 2},
    ]
