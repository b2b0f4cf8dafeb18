from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_claims import claim, micro

from entropic_ctl import config, registry
from entropic_ctl.entropy import ArrayLogitView, entropy_varentropy
from entropic_ctl.errors import BadInputError
from entropic_ctl.policy import Policy
from entropic_ctl.temperature.base import TemperatureLaw
from proofs.check import Hints, Subject, floor
from proofs.phase import trajectory, two_level_plant

N = 500
Path = npt.NDArray[np.float64]


def law_of(run: config.RunConfig) -> TemperatureLaw:
    spec = run.loop.temperature
    law: TemperatureLaw = registry.load("entropic_ctl.temperature", spec.name).build(spec.config)
    return law


def temper(run: config.RunConfig, z: Path) -> tuple[Path, Path]:
    """T and tempered entropy of each row of logits under the shipped law, from its start."""
    law = law_of(run)
    T, H, _ = law.temper(np.full(len(z), law.start()), ArrayLogitView(z))
    return T, H


def test_statuses() -> None:
    for law in ("feedback", "solve", "damped"):
        assert claim("floor", micro(law), N).status == "proved"
    for run in (micro(gain=-0.05), micro(gain=0.0), micro("solve", tolerance_nats=1.0)):
        assert claim("floor", run, N).status == "refuted"
    for run in (micro("fixed"), micro(temperature=0.0), micro(t_min=0.8, t_max=0.8), micro("solve", target_nats=0.0)):
        assert claim("floor", run, N).status == "not applicable"
    assert claim("floor", micro(gain=0.0, temperature=1.6), N).status == "not applicable"
    assert claim("floor", micro("damped", tolerance_nats=1.0), N).status == "unknown"
    for rest in ({"max_iterations": 5}, {"tolerance_nats": 1e-12, "t_min": 1e-40}):
        assert claim("floor", micro("solve", **rest), N).status == "unknown"
    assert floor.claims(Subject(micro(gain=-1.0), N), Hints({}))[0].status == "unknown"
    with pytest.raises(BadInputError, match="floor_mass"):
        floor.claims(Subject(micro(), N), Hints({"floor_mass": ["1/4", "1/3"]}))


# feedback


LAWS = st.fixed_dictionaries(
    {
        "gain": st.floats(0.005, 0.5),
        "phi": st.sampled_from(["linear", "tanh"]),
        "phi_scale_nats": st.floats(0.05, 3.0),
        "rate_limit": st.sampled_from([0.0, 0.01, 0.25]),
        "target_nats": st.floats(0.4, 6.0),
        "t_min": st.floats(0.05, 0.7),
        "t_max": st.floats(0.9, 5.0),
    }
)


@given(LAWS, st.integers(0, 2**32))
def test_a_run_of_tokens_below_the_floor_ends_at_t_max(given_: dict[str, Any], seed: int) -> None:
    """Any entropies below h, from anywhere: the shipped law is at T_max after the stated number of tokens."""
    run = micro(**given_)
    tokens = claim("floor", run, N).numbers["tokens"]
    rng = np.random.default_rng(seed)
    law, c = law_of(run), run.loop.temperature.config
    u = rng.uniform(math.log(c.t_min), math.log(c.t_max), 8)
    u[0] = math.log(c.t_min)
    h = c.target_nats / 2
    draws = rng.uniform(0, h, (tokens, 8))
    draws[:, 0] = h
    for H in draws:
        u = law.update(u, H)
    assert u == pytest.approx(np.full(8, math.log(c.t_max)), abs=1e-9)


@given(LAWS)
def test_one_token_less_is_not_enough(given_: dict[str, Any]) -> None:
    """Sharp: entropy at h all the time, from T_min; two tokens less, so that rounding cannot decide."""
    run = micro(**given_)
    tokens = claim("floor", run, N).numbers["tokens"]
    law, c = law_of(run), run.loop.temperature.config
    u = np.array([math.log(c.t_min)])
    for _ in range(tokens - 2):
        u = law.update(u, np.array([c.target_nats / 2]))
    assert tokens < 2 or u[0] < math.log(c.t_max)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("drafts", [0, 3])
def test_lag_and_drafts_delay_it_by_as_many_tokens(lag: int, drafts: int) -> None:
    """The shipped policy, steps of 1 + drafts accepted tokens on one u, high entropies before the run below h."""
    run = micro(lag=lag, drafts=drafts, gain=0.1, rate_limit=0.0)
    tokens, plain = (claim("floor", found, N).numbers["tokens"] for found in (run, micro(gain=0.1, rate_limit=0.0)))
    assert tokens == plain + lag + drafts
    worst = 0
    for before in range(1, 2 * (drafts + 1)):  # the run starts anywhere within a step
        off, fcfs = (
            registry.load(package, name)
            for package, name in (("entropic_ctl.pruning.laws", "off"), ("entropic_ctl.scheduling", "fcfs"))
        )
        policy = Policy(law_of(run), off.build(off.Config()), fcfs.build(fcfs.Config()), slots=1, observation_lag=lag)
        slot = np.array([0])
        policy.start(slot)
        policy.u[0] = math.log(0.3)
        entropies = [9.0] * before + [0.749999] * 400
        sampled: list[float] = []
        while len(sampled) < 300:
            block = np.array(entropies[len(sampled) : len(sampled) + 1 + drafts])
            sampled += [float(policy.u[0])] * len(block)
            rows = np.zeros(len(block), np.int64)
            policy.observe(rows, block, block, np.zeros(len(block), np.bool_))
        inside = np.array(sampled[before:]) < math.log(1.6)
        assert not inside[int(inside.sum()) :].any()
        worst = max(worst, int(inside.sum()))
    assert tokens - 1 <= worst <= tokens


@pytest.mark.parametrize("gain", [-0.05, 0.0])
def test_a_wrong_gain_never_leaves_the_floor_that_the_right_one_would_leave(gain: float) -> None:
    run = micro(gain=gain)
    numbers = claim("floor", run, N).numbers
    plant = two_level_plant(N, float(Fraction(numbers["logit"])))
    start = [math.log(Fraction(numbers["temperature"]))]
    _, H = trajectory(law_of(run), plant, start, 500)
    assert (H < 0.75).all()
    _, H = trajectory(law_of(micro(gain=0.05)), plant, start, 500)
    assert H[-1] > 0.75


# solve and damped


@given(
    st.sampled_from(["solve", "damped"]),
    st.floats(0.2, 4.0),
    st.floats(0.05, 1.0),
    st.sampled_from([1e-9, 1e-5, 1e-2]),
    st.integers(0, 2**32),
)
def test_same_step_laws_keep_their_lower_bound(law: str, nats: float, share: float, tol: float, seed: int) -> None:
    rest = {"fraction": share} if law == "damped" else {}
    run = micro(law, target_nats=nats, tolerance_nats=tol, max_iterations=300, **rest)
    found = claim("floor", run, N)
    assert found.status == "proved"
    rng = np.random.default_rng(seed)
    z = rng.normal(0, 1, (12, 60)) * rng.uniform(0.2, 9, (12, 1))
    z[0], z[1, 0] = 0.0, 40.0
    c = run.loop.temperature.config
    reference, _ = entropy_varentropy(z, np.full(12, c.t_max if law == "solve" else c.temperature))
    _, H = temper(run, z)
    assert (np.minimum(nats, reference) - tol - 1e-12 <= H).all()


def test_solve_lies_on_its_lower_bound_and_damped_below_that_of_solve() -> None:
    """Sharp: logits beyond reach end at H(T_max); half-way to it, `damped` stays nearer to H(T0)."""
    z = np.zeros((1, N))
    z[0, 0] = 20.0
    _, H = temper(micro("solve"), z)
    assert H[0] == pytest.approx(float(entropy_varentropy(z[0], 1.6)[0]), rel=1e-9)
    assert temper(micro("damped"), z)[1][0] < H[0] - 0.01


def test_a_wide_tolerance_is_refuted_by_its_instance() -> None:
    run = micro("solve", tolerance_nats=1.0)
    numbers = claim("floor", run, N).numbers
    z = np.zeros((1, N))
    z[0, 0] = float(Fraction(numbers["logit"]))
    T, H = temper(run, z)
    assert T[0] == pytest.approx(float(Fraction(numbers["temperature"])))
    assert H[0] < 0.75
    assert temper(micro("solve"), z)[1][0] > 1.4


# beyond the clamp


@given(
    st.sampled_from(["feedback", "solve", "damped"]), st.floats(0.2, 9.0), st.floats(0.1, 1.0), st.integers(0, 2**32)
)
def test_a_lead_beyond_the_clamp_stays_below_the_floor(law: str, nats: float, share: float, seed: int) -> None:
    rest = {"fraction": share} if law == "damped" else {}
    run = micro(law, target_nats=nats, **rest)
    lead = float(claim("floor", run, N).numbers["lost_from_lead"])
    rng = np.random.default_rng(seed)
    z = np.full((3, N), -lead)
    z[:, 0] = 0.0
    z[1, 1:] -= rng.exponential(2.0, N - 1)
    z[2, 5:] = -np.inf
    if law == "feedback":
        u = np.full(3, math.log(run.loop.temperature.config.t_max))
        _, H, _ = law_of(run).temper(u, ArrayLogitView(z))
    else:
        _, H = temper(run, z)
    assert (nats / 2 + 1e-9 >= H).all()


@pytest.mark.parametrize("law", ["feedback", "solve", "damped"])
def test_the_lead_is_sharp(law: str) -> None:
    """Two-level logits with a slightly smaller lead: T_max (for `damped` its highest T) lifts them above h."""
    run = micro(law, **({"fraction": 0.97} if law == "damped" else {}))
    lead = float(claim("floor", run, N).numbers["lost_from_lead"])
    z = np.zeros((1, N))
    z[0, 0] = lead * (1 - 1e-6)
    if law == "feedback":
        view, u = ArrayLogitView(z), np.array([math.log(0.3)])
        for _ in range(400):
            T, H, _ = law_of(run).temper(u, view)
            u = law_of(run).update(u, H)
        assert T[0] == pytest.approx(1.6)
    else:
        _, H = temper(run, z)
    assert 0.75 < H[0] < 0.7501


def test_a_tolerance_a_hair_above_half_the_target_has_no_witness() -> None:
    """The evidence is wider than what the tolerance accepts below H*/2: nothing is refuted."""
    assert claim("floor", micro("solve", tolerance_nats=0.75), N).status != "refuted"
    assert claim("floor", micro("solve", tolerance_nats=math.nextafter(0.75, 1.0)), N).status == "unknown"
    assert claim("floor", micro("solve", tolerance_nats=0.75 + 1e-6), N).status == "refuted"
