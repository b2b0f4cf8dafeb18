from __future__ import annotations

import ast
import copy
import json
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import proofs
from entropic_ctl import certificates, config, registry
from entropic_ctl.errors import BadInputError, UncertifiedError
from entropic_ctl.temperature import feedback
from proofs import check, search
from proofs.enclosures import Interval
from proofs.vmax import maximum

N = 32_000
LIMIT = check.gain_ceiling(N, 0, maximum(N).bracket())


def make(gain: float = 0.05, *, law: str = "feedback", lag: int = 0, **rest: Any) -> config.RunConfig:
    table = {"law": law, **({"gain": gain} if law == "feedback" else {}), **rest}
    return config.from_mapping({"engine": {"observation_lag": lag}, "loop": {"temperature": table}})


def through_json(certificate: dict[str, Any]) -> dict[str, Any]:
    out = json.loads(json.dumps(certificate, allow_nan=False))
    assert isinstance(out, dict)
    return out


def judge(run: config.RunConfig, n: int = N) -> certificates.Verdict:
    return check.check(through_json(proofs.prove(run, n)), run, n)


# verdicts


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("phi", ["linear", "tanh"])
@pytest.mark.parametrize("n", [2, 300, N, 151_936, 2**31 - 1])
def test_the_limit_is_exact_to_one_float(n: int, phi: str, lag: int) -> None:
    limit = check.gain_ceiling(n, lag, maximum(n).bracket())
    found = judge(make(limit, lag=lag, phi=phi), n)
    assert (found.status, found.theorem, found.limit) == ("proved", f"gain-lag-{lag}", limit)
    if limit < 10.0:
        above = judge(make(math.nextafter(limit, 11.0), lag=lag, phi=phi), n)
        assert above.status in ("unknown", "refuted")
        assert above.limit == limit


@given(st.floats(1e-6, 1.0), st.sampled_from([0, 1]), st.floats(0.0, 15.0), st.sampled_from(["linear", "tanh"]))
def test_proved_exactly_below_the_limit_for_every_target(gain: float, lag: int, target: float, phi: str) -> None:
    found = judge(make(gain, lag=lag, target_nats=target, phi=phi))
    assert (found.status == "proved") == (gain <= found.limit)
    assert found.limit == pytest.approx((2 - lag) / 27.890300704502482, rel=1e-12)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("n", [2, 32_000, 151_936, 2**20])
def test_the_default_gain_is_certified_for_every_vocabulary_and_lag(n: int, lag: int) -> None:
    run = config.from_mapping({"engine": {"observation_lag": lag}, "loop": {"temperature": {"law": "feedback"}}})
    assert judge(run, n).status == "proved"


@pytest.mark.parametrize("lag", [0, 1])
def test_sharp_target_is_refuted_just_above_the_limit(lag: int) -> None:
    sharp = maximum(N)
    limit = check.gain_ceiling(N, lag, sharp.bracket())
    above = judge(make(1.001 * limit, lag=lag, target_nats=sharp.entropy_nats))
    below = judge(make(0.999 * limit, lag=lag, target_nats=sharp.entropy_nats))
    assert (above.status, below.status) == ("refuted", "proved")
    assert "repels" in above.reason


def test_between_certificate_and_counter_example_is_unknown() -> None:
    found = judge(make(1.2 * LIMIT, target_nats=1.0))
    assert found.status == "unknown"
    assert judge(make(1.2 * LIMIT, target_nats=40.0 / 3)).status == "unknown"  # out of reach: no equilibrium to repel


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("gain", [-0.05, -10.0, 0.0])
def test_wrong_sign_and_no_feedback_are_refuted(gain: float, lag: int) -> None:
    found = judge(make(gain, lag=lag))
    assert found.status == "refuted"
    assert ("apart" in found.reason) == (gain < 0)


@pytest.mark.parametrize("law", ["fixed", "solve", "damped"])
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


def test_unknown_shape_or_law_is_never_proved() -> None:
    run = make(0.01)
    spec = run.loop.temperature
    object.__setattr__(spec.config, "phi", "cubic")
    hints = check.Evidence(maximum(N).bracket())
    assert check.decide(run, N, hints).status == "unknown"
    assert check.decide(make(0.01), N, None).status == "unknown"


# certificates


def test_it_opens_the_gate_for_its_own_loop_only(tmp_path: Path) -> None:
    run = make(0.05)
    path = tmp_path / "gain.json"
    path.write_text(json.dumps(proofs.prove(run, N)))
    verdict = check.check(certificates.read_certificate(path), run, N)

    def gate(other: config.RunConfig, n: int = N) -> None:
        certificates.require(other.loop.temperature, True, other.engine.observation_lag, n, verdict, uncertified=False)

    gate(run)
    for other, n in ((make(0.051), N), (make(0.05, lag=1), N), (run, N + 1), (make(0.05, target_nats=1.0), N)):
        with pytest.raises(UncertifiedError):
            gate(other, n)


@pytest.mark.parametrize(
    ("other", "n"),
    [
        (make(0.0500001), N),
        (make(0.05, lag=1), N),
        (make(0.05), N + 1),
        (make(0.05, t_max=1.7), N),
        (make(law="fixed"), N),
    ],
)
def test_another_config_is_refused(other: config.RunConfig, n: int) -> None:
    certificate = proofs.prove(make(0.05), N)
    with pytest.raises(BadInputError, match="subject"):
        check.check(certificate, other, n)


def test_what_does_not_concern_the_loop_may_differ() -> None:
    run = make(0.05)
    certificate = proofs.prove(run, N)
    other = config.from_mapping({**config.resolve(run), "seed": 99})
    assert check.check(certificate, other, N) == check.check(certificate, run, N)


BASES = {
    "proved": make(0.05),
    "lagged": make(0.03, lag=1, phi="tanh"),
    "refuted": make(0.4),
    "wrong sign": make(-0.05),
    "unknown": make(0.09),
    "stateless": make(law="damped"),
}
CERTIFICATES = {name: through_json(proofs.prove(run, N)) for name, run in BASES.items()}
VERDICTS = {name: check.check(CERTIFICATES[name], run, N) for name, run in BASES.items()}


def test_the_bases_cover_every_claim() -> None:
    assert [v.status for v in VERDICTS.values()] == ["proved", "proved", "refuted", "refuted", "unknown", "proved"]


def paths(node: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield (*prefix, key)
        yield from paths(value, (*prefix, key))


JUNK = st.one_of(
    st.sampled_from([None, True, False, 0, 1, 1.0, 2, -1, "", "0", "1/0", "proved", "linear", math.nan, math.inf]),
    st.sampled_from([[], {}, [[]], "gain-lag-0", "gain-lag-1", "stateless", "feedback", "0/1", "١/٢", 10**400]),
    st.floats(),
    st.text(max_size=8),
)


def same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)


@settings(max_examples=200)
@given(st.data())
def test_no_edit_that_changes_the_meaning_is_accepted(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(BASES)))
    edited = copy.deepcopy(CERTIFICATES[name])
    path = data.draw(st.sampled_from(list(paths(edited))))
    node = edited
    for key in path[:-1]:
        node = node[key]
    kind = data.draw(st.sampled_from(["junk", "nudge", "delete", "extra", "graft"]))
    if kind == "delete":
        del node[path[-1]]
    elif kind == "extra":
        edited[data.draw(st.text(max_size=5))] = data.draw(JUNK)
    elif kind == "nudge":
        value = node[path[-1]]
        if isinstance(value, str) and value:
            at = data.draw(st.integers(0, len(value) - 1))
            value = value[:at] + data.draw(st.sampled_from("0123456789abcdef/. -")) + value[at + 1 :]
        elif isinstance(value, float):
            value = data.draw(st.sampled_from([math.nextafter(value, math.inf), -value, value * 2, int(value)]))
        elif isinstance(value, int):
            value = data.draw(st.sampled_from([value + 1, -value, float(value), str(value)]))
        node[path[-1]] = value
    elif kind == "graft":
        donor = CERTIFICATES[data.draw(st.sampled_from(sorted(BASES)))]
        edited[path[0]] = donor.get(path[0])
    else:
        node[path[-1]] = data.draw(JUNK)
    try:
        verdict = check.check(edited, BASES[name], N)
    except BadInputError as error:
        assert "certificate" in str(error)  # noqa: PT017
        return
    hints = {"provenance", "v_max", "counterexample"}
    assert repr(verdict) == repr(VERDICTS[name])
    for key, value in CERTIFICATES[name].items():
        if key not in hints:
            assert same(edited[key], value)


@settings(max_examples=200)
@given(data=st.data())
def test_text_edits_and_truncations_are_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    name = data.draw(st.sampled_from(sorted(BASES)))
    text = json.dumps(CERTIFICATES[name])
    at = data.draw(st.integers(0, len(text) - 1))
    edited = text[:at] + data.draw(st.sampled_from(["", *'0123456789-+.e/"{}[],: x']))
    if data.draw(st.booleans()):
        edited += text[at + 1 :]
    path = tmp_path_factory.getbasetemp() / "edited.json"
    path.write_text(edited)
    try:
        verdict = check.check(certificates.read_certificate(path), BASES[name], N)
    except BadInputError:
        return
    assert repr(verdict) == repr(VERDICTS[name])


@pytest.mark.parametrize("content", ['{"kind": NaN}', '{"kind": 1, "kind": 2}', "[]", "", "{", '{"kind": Infinity}'])
def test_files_that_are_no_certificates(content: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(BadInputError, match=r"bad\.json"):
        check.check(certificates.read_certificate(path), make(), N)


@pytest.mark.parametrize(
    ("key", "value", "needle"),
    [("schema", 2, "unknown schema"), ("schema", True, "unknown schema"), ("kind", "lyapunov", "unknown kind")],
)
def test_other_schemas_are_named(key: str, value: object, needle: str) -> None:
    with pytest.raises(BadInputError, match=needle):
        check.check({**CERTIFICATES["proved"], key: value}, BASES["proved"], N)


def test_false_hints_prove_nothing() -> None:
    low, high = maximum(N).bracket()
    for shifted in (
        Interval(low + 1, high + 1),
        Interval(low / 2, high / 2),
        Interval(high, low),
        Interval(low, high + 1),
    ):
        with pytest.raises(BadInputError, match="log_odds"):
            check.v_max_bounds(N, shifted)
    with pytest.raises(BadInputError, match="target entropy"):
        check.decide(make(0.4), N, check.Evidence(maximum(N).bracket(), Interval(Fraction(1, 4), Fraction(1, 3))))
    with pytest.raises(BadInputError, match="inside"):
        check.decide(make(0.4), N, check.Evidence(maximum(N).bracket(), Interval(Fraction(1, 4), Fraction(2))))


def test_checker_imports_nothing_of_the_search() -> None:
    for module in ("check", "exact", "enclosures"):
        source = Path(str(proofs.__file__)).with_name(f"{module}.py").read_text()
        names = {
            name
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        }
        assert not names & {"proofs.search", "proofs.vmax", "proofs", "proofs.theory", "proofs.phase"}


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
    st.sampled_from(check.SHAPES),
    st.sampled_from([0.0, 0.05, 0.25]),
    st.floats(0.1, 12.0),
    st.integers(0, 2**32),
)
def test_the_shipped_update_is_the_model_of_the_theorem(
    gain: float, phi: str, rate: float, target: float, seed: int
) -> None:
    c = feedback.Config(gain=gain, phi=phi, rate_limit=rate, target_nats=target, t_min=0.2, t_max=2.0)
    rng = np.random.default_rng(seed)
    u, entropy = rng.uniform(math.log(0.2), math.log(2.0), 64), rng.uniform(0.0, 12.0, 64)
    np.testing.assert_array_equal(feedback.build(c).update(u, entropy), model(c, u, entropy))


def test_every_offered_shape_is_covered_or_named() -> None:
    options = next(f for f in feedback.Config.__dataclass_fields__.values() if f.name == "phi").metadata["options"]
    assert set(options) == set(check.SHAPES)


@pytest.mark.parametrize("phi", check.SHAPES)
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
