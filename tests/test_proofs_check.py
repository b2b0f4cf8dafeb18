"""The trusted checker: verdicts on the temperature loop, what a certificate covers, hints, and the shipped law."""

from __future__ import annotations

import ast
import copy
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certified import BASES, STATUSES, N, accepted, certificate_text, judge, make
from hypothesis import given
from hypothesis import strategies as st

import proofs
from entropic_ctl import certificates, config, registry
from entropic_ctl.config import SpeculationConfig
from entropic_ctl.errors import BadInputError, UncertifiedError
from entropic_ctl.temperature import feedback
from proofs import check, search
from proofs.check import Hints, Subject, gain
from proofs.enclosures import Interval
from proofs.vmax import maximum

LIMIT = check.gain_ceiling(N, 0, maximum(N).bracket())
SHARP = maximum(N).entropy_nats
HIGH = 10.0
"""A target above the edge, 9.57, and below ln n = 10.37: only the limit for every target is known."""


# verdicts


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("phi", ["linear", "tanh"])
@pytest.mark.parametrize("n", [2, 300, N, 151_936, 2**31 - 1])
def test_the_limit_is_exact_to_one_float(n: int, phi: str, lag: int) -> None:
    limit = check.gain_ceiling(n, lag, maximum(n).bracket())
    target = min(0.99 * math.log(n), 20.0)  # no sharper limit there, except for the smallest and the largest n
    found = judge(make(limit, lag=lag, phi=phi, target_nats=target), n)
    assert (found.status, found.theorem) == ("proved", f"gain-lag-{lag}")
    assert found.limit == limit or (n in (2, 2**31 - 1) and lag == 0 and found.limit > limit)
    if found.limit < 10.0:
        above = judge(make(math.nextafter(found.limit, 11.0), lag=lag, phi=phi, target_nats=target), n)
        assert above.status in ("unknown", "refuted")
        assert above.limit == found.limit


@given(st.floats(1e-6, 1.0), st.sampled_from([0, 1]), st.floats(0.0, 15.0), st.sampled_from(["linear", "tanh"]))
def test_proved_exactly_up_to_the_limit_for_every_target(k: float, lag: int, target: float, phi: str) -> None:
    found = judge(make(k, lag=lag, target_nats=target, phi=phi))
    assert (found.status == "proved") == (k <= found.limit)
    every = (2 - lag) / 27.890300704502482
    if lag == 1 or target > 9.6:
        assert found.limit == pytest.approx(every, rel=1e-12)
    else:
        assert found.limit >= every * (1 - 1e-12)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("n", [2, 32_000, 151_936, 2**20])
def test_the_default_gain_is_certified_for_every_vocabulary_and_lag(n: int, lag: int) -> None:
    run = config.from_mapping({"engine": {"observation_lag": lag}, "loop": {"temperature": {"law": "feedback"}}})
    assert judge(run, n).status == "proved"


@pytest.mark.parametrize("lag", [0, 1])
def test_sharp_target_is_refuted_just_above_the_limit(lag: int) -> None:
    limit = check.gain_ceiling(N, lag, maximum(N).bracket())
    above = judge(make(1.001 * limit, lag=lag, target_nats=SHARP))
    below = judge(make(0.999 * limit, lag=lag, target_nats=SHARP))
    assert (above.status, below.status) == ("refuted", "proved")
    assert "repels" in above.reason


@pytest.mark.parametrize(("lag", "target"), [(0, HIGH), (0, 40.0 / 3), (1, 1.0), (1, 40.0 / 3)])
def test_between_certificate_and_counter_example_is_unknown(lag: int, target: float) -> None:
    """A target of 13.3 nats is out of reach for 32,000 tokens: there is no equilibrium to repel."""
    assert judge(make(1.2 * LIMIT / (1 + lag), lag=lag, target_nats=target)).status == "unknown"


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("k", [-0.05, -10.0, 0.0])
def test_wrong_sign_and_no_feedback_are_refuted(k: float, lag: int, drafts: int) -> None:
    found = judge(make(k, lag=lag, drafts=drafts))
    assert found.status == "refuted"
    assert ("apart" in found.reason) == (k < 0)


@pytest.mark.parametrize("law", ["fixed", "solve", "damped", "edt", "dynatemp"])
def test_laws_without_integral_action_have_nothing_to_certify(law: str) -> None:
    found = judge(make(law=law))
    assert (found.status, found.theorem) == ("proved", "stateless")
    assert math.isnan(found.limit)


@pytest.mark.parametrize("name", registry.names("entropic_ctl.temperature"))
def test_declared_statelessness_is_true(name: str) -> None:
    """A law that says it has no integral action must not move its state with the observed entropy."""
    module = registry.load("entropic_ctl.temperature", name)
    law = module.build(module.Config())
    u = np.linspace(-0.5, 0.3, 7)
    moved = not np.array_equal(law.update(u, np.linspace(0.0, 8.0, 7)), u)
    assert moved == law.integral_action


def test_equal_clamps_pin_the_loop() -> None:
    assert judge(make(9.0, t_min=0.8, t_max=0.8)).theorem == "pinned"


def test_unknown_shape_lag_or_missing_evidence_is_never_proved() -> None:
    hints = Hints({name: [str(end) for end in value] for name, value in search.gain.hints(Subject(make(), N)).items()})
    for table, name, value in (("temperature", "phi", "cubic"), ("engine", "observation_lag", 2)):
        run = make(0.01)
        owner = run.loop.temperature.config if table == "temperature" else run.engine
        object.__setattr__(owner, name, value)
        assert [claim.status for claim in gain.claims(Subject(run, N), hints)] == ["proved", "unknown"]
    (alone,) = gain.claims(Subject(make(0.01), N), Hints({}))
    assert (alone.status, alone.reason) == ("unknown", "no evidence was given")


def test_the_bases_cover_every_verdict() -> None:
    found = {name: (accepted(name).verdict.theorem, accepted(name).verdict.status) for name in BASES}
    assert found == STATUSES


# what a certificate covers


def test_it_opens_the_gate_for_its_own_loop_only(tmp_path: Path) -> None:
    run = BASES["proved"]
    path = tmp_path / "gain.json"
    path.write_text(certificate_text("proved"))
    verdict = check.check(certificates.read_certificate(path), run, N).verdict

    def gate(other: config.RunConfig, n: int = N) -> None:
        spec, lag = other.loop.temperature, other.engine.observation_lag
        certificates.require(spec, True, lag, n, verdict, speculation=other.speculation, uncertified=False)

    gate(run)
    gate(config.from_mapping({**config.resolve(run), "speculation": {"draft_below_nats": 1.0}}))  # nobody drafts
    others = [(make(0.051), N), (make(0.05, lag=1), N), (run, N + 1), (make(0.05, target_nats=1.0), N)]
    for other, n in (*others, (make(0.05, drafts=1), N)):
        with pytest.raises(UncertifiedError, match="about another law, gain, lag, vocabulary or number of drafted"):
            gate(other, n)


@pytest.mark.parametrize("name", ["refuted", "unknown", "wrong sign", "lagged"])
def test_the_gate_names_the_theorem_and_the_nearest_certified_gain(name: str) -> None:
    run, verdict = BASES[name], accepted(name).verdict
    spec, lag = run.loop.temperature, run.engine.observation_lag

    def gate(uncertified: bool) -> None:
        certificates.require(spec, True, lag, N, verdict, speculation=SpeculationConfig(), uncertified=uncertified)

    gate(uncertified=True)
    if verdict.status == "proved":
        gate(uncertified=False)
        return
    with pytest.raises(UncertifiedError, match=f"theorem '{verdict.theorem}' is {verdict.status}") as caught:
        gate(uncertified=False)
    nearest = float(str(caught.value).partition("nearest certified gain is ")[2].partition(",")[0])
    table = config.resolve(run)
    table["loop"]["temperature"]["gain"] = nearest
    assert judge(config.from_mapping(table)).status == "proved"
    table["loop"]["temperature"]["gain"] = math.nextafter(nearest, 1.0)
    assert judge(config.from_mapping(table)).status != "proved"


@pytest.mark.parametrize(
    ("other", "n", "said"),
    [
        (make(0.0500001), N, r"loop\.temperature\.gain: .*which has 0\.0500001 \(got 0\.05\)"),
        (make(0.05, lag=1), N, r"engine\.observation_lag: .*which has 1 \(got 0\)"),
        (make(0.05), N + 1, r"vocab_size: .*the 32,001 tokens .*\(got 32000\).*--vocab 32001.*cost\.bank"),
        (make(0.05, t_max=1.7), N, r"loop\.temperature\.t_max: .*which has 1\.7 \(got 1\.6\)"),
        (make(law="fixed"), N, r"loop\.temperature\.law: .*which has 'fixed' \(got 'feedback'\)"),
        (make(0.05, drafts=1), N, r"speculation\.draft_tokens: .*which has 1 \(got 0\)"),
    ],
)
def test_another_config_is_refused_by_field_and_values(other: config.RunConfig, n: int, said: str) -> None:
    with pytest.raises(BadInputError, match=r"^certificate: about\." + said):
        check.check(json.loads(certificate_text("proved")), other, n)


def test_what_does_not_concern_the_proofs_may_differ() -> None:
    run = BASES["proved"]
    other = config.from_mapping({**config.resolve(run), "seed": 99, "workload": {"n_requests": 3}})
    assert check.check(json.loads(certificate_text("proved")), other, N) == accepted("proved")


@pytest.mark.parametrize("content", ['{"kind": NaN}', '{"kind": 1, "kind": 2}', "[]", "", "{", '{"kind": Infinity}'])
def test_files_that_are_no_certificates(content: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(BadInputError, match=r"bad\.json"):
        check.check(certificates.read_certificate(path), make(), N)


@pytest.mark.parametrize(
    ("key", "value", "needle"),
    [
        ("schema", 1, "unknown schema .got 1.; allowed: 2; make it anew"),
        ("schema", 2.0, "unknown schema"),
        ("schema", True, "unknown schema"),
        ("kind", "lyapunov", "unknown kind"),
    ],
)
def test_other_schemas_are_named(key: str, value: object, needle: str) -> None:
    certificate = json.loads(certificate_text("proved"))
    with pytest.raises(BadInputError, match=needle):
        check.check({**certificate, key: value}, BASES["proved"], N)


def test_the_assumptions_are_the_certificates_own() -> None:
    run = BASES["proved"]
    own = search.prove(run, N, check.Assumptions(rate_per_s=0.5))
    assert own["about"]["assumptions"]["rate_per_s"] == 0.5
    assert check.check(own, run, N).verdict == accepted("proved").verdict  # the loop's theorem assumes none of them
    edited = copy.deepcopy(own)
    edited["about"]["assumptions"]["rate_per_s"] = 0.25
    with pytest.raises(BadInputError, match="subject"):
        check.check(edited, run, N)
    for wrong in (-1.0, "much", None, True):
        edited["about"]["assumptions"]["rate_per_s"] = wrong
        with pytest.raises(BadInputError, match="rate_per_s"):
            check.check(edited, run, N)


# hints


@pytest.mark.parametrize(
    "log_odds",
    [
        lambda low, high: (low + 1, high + 1),
        lambda low, high: (low / 2, high / 2),
        lambda low, high: (high, low),
        lambda low, high: (low, high + 1),
        lambda low, high: (high, high + (high - low)),
        lambda low, high: (low - (high - low), low),
    ],
)
def test_a_false_bracket_proves_nothing(log_odds: Any) -> None:
    with pytest.raises(BadInputError, match="log_odds"):
        check.v_max_bounds(N, Interval(*log_odds(*maximum(N).bracket())))


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ((Fraction(1, 4), Fraction(1, 3)), "target entropy"),
        ((Fraction(1, 4), Fraction(2)), "inside"),
        ((Fraction(-1, 4), Fraction(1, 2)), "inside"),
        ((Fraction(0), Fraction(1, 2)), "inside"),
    ],
)
def test_a_false_tail_mass_proves_nothing(tail: tuple[Fraction, Fraction], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        gain.at_target(N, Fraction(3, 2), Interval(*tail))


def test_a_wide_tail_mass_is_true_and_weaker() -> None:
    r = Fraction(search.gain.equilibrium_tail_mass(N, 1.5))
    exact = gain.at_target(N, Fraction(3, 2), Interval(r - Fraction(1, 2**50), r + Fraction(1, 2**50)))
    wide = gain.at_target(N, Fraction(3, 2), Interval(r / 2, Fraction(3, 4)))
    assert wide.lo <= exact.lo <= exact.hi <= wide.hi
    assert float(exact.hi) == pytest.approx(15.304965, abs=1e-6)


@pytest.mark.parametrize("value", ["0.5", "1/0", "2/4", "٢/٣", " 1", "1 ", "1_0", "+1", "1e3", "9" * 61, 1, None, True])
def test_a_hint_is_a_rational_in_lowest_terms(value: object) -> None:
    for nested in (value, [value], [["1/2"], [value]]):
        with pytest.raises(BadInputError, match=r"hints\.x"):
            Hints({"x": nested})
    with pytest.raises(BadInputError, match=r"hints\.x"):
        Hints({"x": [[[["1"]]]]})


def test_a_hint_nobody_reads_is_refused() -> None:
    for name in ("fixed", "proved"):
        certificate = json.loads(certificate_text(name))
        certificate["hints"]["luck"] = "1"
        with pytest.raises(BadInputError, match=r"hints\.luck: no theorem reads it"):
            check.check(certificate, BASES[name], N)


TRUSTED = ("proofs.check", "proofs.enclosures", "proofs.exact", "proofs.budget_moves", "proofs.small_pool")


def test_checker_imports_nothing_of_the_search() -> None:
    folder = Path(str(proofs.__file__)).parent
    for path in (*sorted((folder / "check").glob("*.py")), folder / "exact.py", folder / "enclosures.py"):
        names = {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        }
        used = {str(name).partition(".")[0] for name in names}
        assert not used & {"numpy", "scipy", "cvxpy", "control", "sim", "backends", "torch"}, path
        ours = {name for name in names if str(name).startswith("proofs")}
        assert all(name.startswith(TRUSTED) for name in ours), path
    for name in ("budget_moves", "small_pool"):  # these run shipped code, which takes arrays, and nothing of ours
        assert "proofs" not in (folder / f"{name}.py").read_text().partition("__all__")[0].partition("import")[2]


def test_bad_vocabulary_is_named() -> None:
    for n in (1, 0, 2**31, True, 2.0):
        with pytest.raises(BadInputError, match="vocab_size"):
            search.prove(make(), n)  # type: ignore[arg-type]


# the tie between the theorem's model and the shipped law


def model(c: feedback.Config, u: np.ndarray, entropy: np.ndarray) -> np.ndarray:
    """Write the update as the theorem does: clip(u - sat(k phi(H - H*)))."""
    error = entropy - c.target_nats
    shaped = c.phi_scale_nats * np.tanh(error / c.phi_scale_nats) if c.phi == "tanh" else error
    push = c.gain * shaped
    saturated = np.clip(push, -c.rate_limit, c.rate_limit) if c.rate_limit > 0 else push
    return np.clip(u - saturated, math.log(c.t_min), math.log(c.t_max))


@given(
    st.floats(-1.0, 1.0),
    st.sampled_from(gain.SHAPES),
    st.sampled_from([0.0, 0.05, 0.25]),
    st.floats(0.1, 12.0),
    st.integers(0, 2**32),
)
def test_the_shipped_update_is_the_model_of_the_theorem(
    k: float, phi: str, rate: float, target: float, seed: int
) -> None:
    c = feedback.Config(gain=k, phi=phi, rate_limit=rate, target_nats=target, t_min=0.2, t_max=2.0)
    rng = np.random.default_rng(seed)
    u, entropy = rng.uniform(math.log(0.2), math.log(2.0), 64), rng.uniform(0.0, 12.0, 64)
    np.testing.assert_array_equal(feedback.build(c).update(u, entropy), model(c, u, entropy))


def test_every_offered_shape_is_covered_or_named() -> None:
    options = next(f for f in feedback.Config.__dataclass_fields__.values() if f.name == "phi").metadata["options"]
    assert set(options) == set(gain.SHAPES)


@pytest.mark.parametrize("phi", gain.SHAPES)
def test_shapes_are_odd_with_slope_between_0_and_1(phi: str) -> None:
    """With k = -1 and no limits the law's step *is* phi."""
    c = feedback.Config(gain=-1.0, phi=phi, rate_limit=0.0, target_nats=10.0, t_min=1e-9, t_max=10.0, temperature=1.0)
    error = np.concatenate([np.linspace(-9, 2, 20_001), [-1e-6, 1e-6]])
    step = feedback.build(c).update(np.zeros_like(error), 10.0 + error)
    slope = np.diff(step[:-2]) / np.diff(error[:-2])
    assert slope.min() > 0
    assert slope.max() <= 1 + 1e-9
    assert step[-1] == pytest.approx(1e-6, rel=1e-6)
    assert step[-2] == pytest.approx(-step[-1], rel=1e-9)
