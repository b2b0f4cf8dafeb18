from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from loop_claims import claim, micro

from entropic_ctl.temperature import feedback
from proofs import check
from proofs.check import two_level
from proofs.enclosures import Interval
from proofs.phase import logits_plant, trajectory, two_level_plant

N = 32_000


def found(n: int = N, **rest: Any) -> check.Claim:
    return claim("wrong-sign", micro(**rest), n)


def law_of(numbers: dict[str, Any], run_config: feedback.Config) -> feedback.Feedback:
    """Return the shipped law with the gain the certificate is about."""
    law = feedback.build(dataclasses.replace(run_config, gain=float(Fraction(numbers["gain"]))))
    assert isinstance(law, feedback.Feedback)
    return law


def test_statuses() -> None:
    own, mirrored = found(gain=-0.05), found(gain=0.05)
    assert (own.status, mirrored.status) == ("proved", "proved")
    assert own.numbers == mirrored.numbers
    assert own.reason.startswith("gain -0.05 drives")
    assert "would drive" in mirrored.reason
    for run in ({"gain": 0.0}, {"law": "solve"}, {"temperature": 0.0}, {"t_min": 0.8, "t_max": 0.8}):
        assert found(**run).status == "not applicable"


SETTINGS = [
    {"gain": -0.05},
    {"gain": -0.003, "rate_limit": 0.0},
    {"gain": 0.02, "phi": "tanh", "phi_scale_nats": 0.3},
    {"gain": -0.3, "rate_limit": 0.01, "t_min": 0.05, "t_max": 4.0},
    {"gain": -1.0, "target_nats": 10.5},  # above ln n: no fixed point, both starts fall
    {"gain": -0.04, "target_nats": 0.0},
]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("given_", SETTINGS)
def test_the_shipped_law_is_at_the_stated_clamp_within_the_stated_updates(given_: dict[str, Any], lag: int) -> None:
    run = micro(lag=lag, **given_)
    numbers = claim("wrong-sign", run, N).numbers
    law = law_of(numbers, run.loop.temperature.config)
    plant = two_level_plant(N, float(Fraction(numbers["logit"])))
    for start in numbers["starts"]:
        T, end = float(Fraction(start["temperature"])), float(Fraction(start["ends_at"]))
        most, least = start["at_most_updates"], start["at_least_updates"]
        u, _ = trajectory(law, plant, [math.log(T)], most + 50, lag=lag)
        path = u[:, 0]
        assert (np.diff(path) * math.copysign(1, end - T) >= 0).all()
        assert (path[most:] == math.log(end)).all()
        assert (path[: max(least, 1)] != math.log(end)).all()


def test_the_bound_is_sharp_under_a_rate_limit() -> None:
    """Every update of a saturated law has the same length: both bounds meet."""
    start = found(gain=-5.0, rate_limit=0.01)
    for part in start.numbers["starts"]:
        assert part["at_most_updates"] - part["at_least_updates"] <= 1


def test_the_right_sign_returns_where_the_wrong_one_leaves() -> None:
    run = micro(gain=0.05)
    numbers = claim("wrong-sign", run, N).numbers
    plant = two_level_plant(N, float(Fraction(numbers["logit"])))
    starts = [math.log(Fraction(part["temperature"])) for part in numbers["starts"]]
    config = run.loop.temperature.config
    u, _ = trajectory(feedback.build(config), plant, starts, 400)
    assert u[-1] == pytest.approx(math.log((config.t_min + config.t_max) / 2), abs=1e-6)


@given(
    st.integers(2, 30),
    st.floats(0.05, 2.0),
    st.floats(-1.0, -0.01),
    st.floats(-0.9, 0.4),
    st.lists(st.integers(0, 1), min_size=400, max_size=400),
    st.integers(0, 2**32),
)
def test_every_start_off_the_fixed_point_runs_to_a_clamp_at_any_mix_of_lags(
    n: int, nats: float, gain: float, start: float, lags: list[int], seed: int
) -> None:
    """The theorem itself: random logits; the number of updates follows from the first error."""
    plant = logits_plant(np.random.default_rng(seed).normal(0, 2, n))
    config = feedback.Config(target_nats=nats, gain=gain, rate_limit=0.25)
    law = feedback.build(config)
    error = float(plant(np.array([start]))[0]) - nats
    end = math.log(config.t_max if error > 0 else config.t_min)
    steps = math.ceil(abs(end - start) / min(0.25, abs(gain * error)) + 1e-6) if error else 10**9
    assume(steps < 390)
    u = [np.array([start])]
    for lag in lags[: steps + 5]:
        u.append(law.update(u[-1], plant(u[max(len(u) - 1 - lag, 0)])))
    path = np.concatenate(u)
    assert (np.diff(path) * math.copysign(1, error) >= 0).all()
    assert (path[steps:] == end).all()


@pytest.mark.parametrize(("slack", "status"), [(Fraction(1, 10**6), "proved"), (Fraction(2), "unknown")])
def test_an_error_whose_sign_is_not_sure_decides_nothing(
    slack: Fraction, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entropies enclosed so widely that the error at a start may have either sign."""
    exact = two_level.entropy

    def widened(n: int, y: Fraction) -> Interval:
        found_ = exact(n, y)
        return Interval(found_.lo - slack, found_.hi + slack)

    monkeypatch.setattr(two_level, "entropy", widened)
    assert found(gain=-0.05, t_min=0.7, t_max=0.9).status == status
