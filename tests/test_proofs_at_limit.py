"""At the largest certified gain no theorem refutes; a float further the gain's own is not proved; the margins agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from entropic_ctl import config
from proofs import check, search
from proofs.check import Assumptions, Claim

MICRO = ("v-max", "gain-lag-0", "gain-lag-1", "gain-at-target", "gain-drafts", "delay", "bounded", "incremental",
         "variance", "small-gain", "switching-theta", "coupled")  # fmt: skip


def make(gain: float, *, lag: int = 0, target: float = 2.0, drafts: int = 0, **law: Any) -> config.RunConfig:
    return config.from_mapping(
        {
            "loop": {
                "temperature": {"law": "feedback", "gain": gain, "target_nats": target, **law},
                "pruning": {"law": "budget", "widen_after": 1},
            },
            "engine": {"observation_lag": lag},
            "speculation": {"draft_tokens": drafts},
        }
    )


def decide(run: config.RunConfig, n: int) -> tuple[dict[str, Claim], float]:
    """Decide the groups that read the gain; return them with the largest certified gain."""
    subject, values = check.Subject(run, n, Assumptions()), {}
    groups = (check.gain, check.delay, check.changing, check.coupled)
    for group in groups:
        values |= search._verified(subject, group.claims, values)
    hints = check.Hints(values)
    found = {claim.theorem: claim for group in groups for claim in group.claims(subject, hints)}
    assert found.keys() - {"pairing"} <= set(MICRO)
    return found, check.verdict(subject, tuple(found.values())).limit


@settings(max_examples=20)
@given(
    st.sampled_from((2, 17, 32_000, 49_152, 151_936)),
    st.floats(0.01, 0.99),
    st.sampled_from(((0, 0), (1, 0), (0, 1), (0, 3), (1, 2))),
    st.sampled_from(({}, {"phi": "tanh"}, {"rate_limit": 0.0})),
)
def test_no_theorem_refutes_the_largest_certified_gain(
    n: int, share: float, late: tuple[int, int], law: dict[str, Any]
) -> None:
    settings_ = {"target": share * math.log(n), "lag": late[0], "drafts": late[1], **law}
    _, limit = decide(make(0.01, **settings_), n)
    assume(limit < 10.0)  # the largest gain a config takes
    at, same = decide(make(limit, **settings_), n)
    gate = next(name for name in at if name.startswith("gain"))
    assert same == limit
    assert at[gate].status == "proved"
    assert [name for name, claim in at.items() if claim.status == "refuted"] == []
    past, _ = decide(make(math.nextafter(limit, 1e3), **settings_), n)
    assert next(claim for name, claim in past.items() if name.startswith("gain")).status != "proved"
    if gate == "gain-at-target":
        bound = ("delay",) if late[1] else ("delay", "variance")  # with drafts `variance` has no model
        assert {at[name].status for name in bound} == {"proved"}
        assert "proved" not in {past[name].status for name in bound}


def test_a_bound_that_was_rounded_up_refutes_nothing() -> None:
    """This gain, a float from the limit, was once called refuted: "2.0000 is not below 2"."""
    found, limit = decide(make(0.1012841166851099), 49_152)
    assert limit == 0.1012841166851099
    assert (found["gain-at-target"].status, found["variance"].status) == ("proved", "proved")
    assert "white entropy varies" in found["gain-at-target"].reason  # what such a gain costs


@pytest.mark.parametrize("gain", [0.09, 0.10])
def test_the_largest_varentropy_of_the_vocabulary_refutes_nothing_where_no_equilibrium_has_it(gain: float) -> None:
    """k V_max(n) > 2 > k V*: unknown, with the reason; past 2 / V* refuted."""
    found, _ = decide(make(gain), 49_152)
    assert found["gain-at-target"].status == "proved"
    for name in ("small-gain", "switching-theta"):
        assert found[name].status == "unknown"
        assert "no equilibrium of this target is known to have that varentropy" in found[name].reason
    past, _ = decide(make(0.12), 49_152)
    for name in ("small-gain", "switching-theta", "coupled"):
        assert past[name].status == "refuted"


def test_the_least_varentropy_that_pairing_names_proves_it() -> None:
    subject = check.Subject(make(0.05), 49_152, Assumptions())
    found = {claim.theorem: claim for claim in check.coupled.claims(subject, check.Hints({}))}["pairing"]
    assert found.status == "unknown"
    value = float(found.reason.partition("varentropy_min=")[2].partition("`")[0])
    better = check.Subject(make(0.05), 49_152, Assumptions(varentropy_min=value))
    again = {claim.theorem: claim for claim in check.coupled.claims(better, check.Hints({}))}["pairing"]
    assert again.status == "proved"
    assert value < 1.01 * float(found.numbers["critical_varentropy"])
