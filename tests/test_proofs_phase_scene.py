"""Phase portraits of a config: the shipped laws, on the plants the command offers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from synthetic_bank import make_bank

from entropic_ctl import config as configs
from entropic_ctl.errors import BadInputError
from entropic_ctl.policy import Policy
from entropic_ctl.scheduling import fcfs
from entropic_ctl.temperature import feedback
from proofs import phase_coupled, phase_scene
from proofs.check import Assumptions
from proofs.theory import delay_limit
from sim.stability import reachable_token

N = 49_152


def make(lag: int = 0, pruning: dict[str, Any] | None = None, **law: Any) -> configs.RunConfig:
    table = {"law": "feedback", "target_nats": 1.0, "gain": 0.02, **law}
    return configs.from_mapping(
        {
            "engine": {"observation_lag": lag},
            "loop": {"temperature": table, "pruning": {"law": "budget", **(pruning or {})}},
        }
    )


@pytest.mark.parametrize("kind", ["target", "sharpest"])
@pytest.mark.parametrize("lag", [0, 1])
def test_the_limit_of_a_scene_is_where_the_shipped_law_starts_to_cycle(kind: str, lag: int) -> None:
    run = make(rate_limit=0.0)
    made = phase_scene.scene(run, N, kind)
    assert made.at == pytest.approx(math.log(math.sqrt(0.3 * 1.6)))
    assert made.plant(np.array([made.at]))[0] == pytest.approx(made.law.target_nats, abs=1e-9)
    near = made.plant(np.array([made.at - 1e-5, made.at + 1e-5]))
    assert (near[1] - near[0]) / 2e-5 == pytest.approx(made.varentropy, rel=1e-6)
    limit = made.limit(lag)
    assert limit == pytest.approx(delay_limit(lag) / made.varentropy)
    _, _, findings = phase_scene.study(run, N, made, gains=[0.98 * limit, 1.02 * limit], lags=[lag], tokens=8)
    assert [each["settles"] for each in findings] == [True, True, False]
    assert findings[2]["status"] == "refuted"


def test_default_arms_maps_and_tables() -> None:
    made = phase_scene.scene(make(), N)
    table, maps, findings = phase_scene.study(make(), N, made, tokens=12)
    assert len(findings) == 8
    assert {len(column) for column in table.values()} == {2 * 4 * 6 * 13}
    arm = findings[1]["arm"]
    mine = maps["arm"] == arm
    law = feedback.build(dataclasses.replace(made.law, gain=findings[1]["gain"]))
    np.testing.assert_array_equal(maps["next"][mine], law.update(maps["u"][mine], made.plant(maps["u"][mine])))
    assert np.unique(table["lag"]).tolist() == [0, 1]


def test_recorded_plant_and_one_out_of_reach() -> None:
    bank, _ = make_bank()
    run = make()
    row = reachable_token(bank, run.loop.temperature.config)
    made = phase_scene.scene(run, 64, "recorded", (bank.grid, bank.entropy_grid[row]))
    assert made.at is not None
    assert made.plant(np.array([made.at]))[0] == pytest.approx(1.0)
    assert made.varentropy == pytest.approx(
        float(np.interp(made.at, np.log(bank.grid), bank.varentropy_grid[row])), rel=0.3
    )
    far = make(target_nats=4.9)
    row = reachable_token(bank, far.loop.temperature.config)
    made = phase_scene.scene(far, 64, "recorded", (bank.grid, bank.entropy_grid[row]))
    assert (made.at, made.varentropy, made.limit(0)) == (None, None, None)
    _, _, findings = phase_scene.study(far, 64, made, lags=[0], tokens=5)
    assert findings[0]["at_clamp"] == 1.0
    assert findings[0]["settles"]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: phase_scene.scene(configs.RunConfig(), N), "law"),
        (lambda: phase_scene.scene(make(t_min=0.8, t_max=0.8), N), "t_min"),
        (lambda: phase_scene.scene(make(target_nats=9.0), 64), "target_nats"),
        (lambda: phase_scene.scene(make(), N, "recorded"), "plant"),
        (lambda: phase_scene.study(make(), N, phase_scene.scene(make(), N), gains=[20.0]), "gain"),
    ],
)
def test_bad_input(call: Any, field: str) -> None:
    with pytest.raises(BadInputError, match=field):
        call()


# -- the coupled loop --------------------------------------------------------------------------------------------------

STRONG = Assumptions(rho=20.0, r=2.0, s=4.0)


@pytest.mark.parametrize("lag", [0, 1])
def test_coupled_trajectories_are_those_of_the_shipped_policy(lag: int) -> None:
    run = make(lag, {"theta_nats": 0.02, "theta_wide_nats": 0.03})
    made = phase_scene.scene(run, N)
    found = phase_coupled.coupled(run, made, STRONG, tokens=40)
    moves = found.trajectories
    starts = moves["token"] == 0
    count = int(starts.sum())
    temperature, pruning, _ = run.loop.build()
    policy = Policy(temperature, pruning, fcfs.build(fcfs.Config()), slots=count, observation_lag=lag)
    slots = np.arange(count)
    policy.start(slots)
    policy.u[:], policy.theta[:], policy.timer[:] = (moves[name][starts] for name in ("u", "theta", "timer"))
    before = policy.u.copy()  # the first text was written at the temperature of the start
    for token in range(41):
        here = moves["token"] == token
        for name, state in (("u", policy.u), ("theta", policy.theta), ("timer", policy.timer)):
            np.testing.assert_array_equal(moves[name][here], state, err_msg=f"{name} at {token}")
        tempered = np.maximum(made.plant(policy.u) + 20.0 * policy.theta, 0.0)
        model = np.maximum(found.level_nats + 4.0 * (before - made.at) + 2.0 * policy.theta, 0.0)
        before = policy.u.copy()
        policy.observe(slots, model, tempered, np.zeros(count, np.bool_), distinct=True)


def test_nullclines_band_and_field() -> None:
    run = make(0, {"widen_after": 4})
    made = phase_scene.scene(run, N)
    found = phase_coupled.coupled(run, made, STRONG, level_nats=1.75, tokens=30)
    c = run.loop.pruning.config
    settled = found.curves["curve"] == "settled budget"
    u, theta = found.curves["u"][settled], found.curves["theta"][settled]
    _, pruning, _ = run.loop.build()
    np.testing.assert_allclose(pruning.wanted(1.75 + 4 * (u - made.at) + 2 * theta), theta, atol=1e-12)
    meets = found.curves["curve"] == "target"
    reached = made.plant(found.curves["u"][meets]) + 20 * found.curves["theta"][meets]
    np.testing.assert_allclose(reached, 1.0, atol=0.02)
    low, high = found.band
    assert 1.75 + 4 * (low - made.at) + 2 * 0.025 == pytest.approx(c.entropy_low_nats)
    assert 1.75 + 4 * (high - made.at) + 2 * 0.025 == pytest.approx(c.entropy_high_nats)
    field = found.field
    assert (field["holding"] <= 0).all()  # a timer just reset never widens
    assert (field["widening"] > 0).any()
    np.testing.assert_array_equal(field["holding"][field["holding"] < 0], field["widening"][field["holding"] < 0])
    assert phase_coupled.coupled(run, made, Assumptions(s=0.0), tokens=5).band is None


def test_no_coupled_portrait_without_a_moving_budget_or_an_equilibrium() -> None:
    made = phase_scene.scene(make(), N)
    for pruning in ({"theta_nats": 0.02, "theta_wide_nats": 0.02}, {"law": "off"}):
        run = make(pruning=pruning)
        with pytest.raises(BadInputError, match="theta is constant"):
            phase_coupled.coupled(run, made, STRONG)
    with pytest.raises(BadInputError, match="cannot reach"):
        phase_coupled.coupled(make(), dataclasses.replace(made, at=None), STRONG)
    with pytest.raises(BadInputError, match="model entropy"):
        phase_coupled.coupled(make(), made, STRONG, level_nats=math.nan)


def test_what_has_not_come_to_rest_is_not_said_to_settle() -> None:
    """A gain so small that u creeps by less than the threshold in 64 tokens is still moving after 3000."""
    run = make()
    place = phase_scene.scene(run, N, "target")
    findings = phase_scene.study(run, N, place, gains=(0.0, 1e-6, 0.001), lags=(0,))[2]
    said = {each["gain"]: each["ends"] for each in findings}
    assert said[0.0] == "stays where it starts"
    assert said[1e-6] == "still moving"
    assert said[0.001].startswith("settles by token ")
