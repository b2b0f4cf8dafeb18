"""Configs and files at the edge of what is allowed: no claim crashes, none promises what float64 cannot do."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_claims import claim, micro

from entropic_ctl import certificates, config
from entropic_ctl.errors import BadInputError
from entropic_ctl.temperature import feedback
from proofs.check import Assumptions, Hints, Subject, dwell, pruning, scheduling, small_gain
from proofs.check.interleavings import claims as interleavings
from proofs.check.interleavings import scaled
from proofs.enclosures import exp, log, shown
from proofs.small_pool import explore

N = 500


@pytest.mark.parametrize(
    ("value", "spec", "text"),
    [
        (Fraction(1, 3), ".4g", "0.3333"),
        (Fraction(0), ".4f", "0.0000"),
        (Fraction(10) ** 400, ".4g", "10^400"),
        (-Fraction(1, 10**400), ".3g", "-10^-400"),
        (Fraction(1, 10**19), ".6f", "1e-19"),
        (Fraction(10) ** 300, ".4f", "1e+300"),
        (Fraction(1, 2), "", "0.5"),
    ],
)
def test_any_rational_can_be_shown(value: Fraction, spec: str, text: str) -> None:
    assert shown(value, spec) == text


def test_enclosures_of_what_no_float_holds() -> None:
    found = log(Fraction(10) ** 700)
    assert found.lo <= 700 * log(Fraction(10)).hi
    assert found.hi >= 700 * log(Fraction(10)).lo
    with pytest.raises(BadInputError, match=r"10\^400"):
        exp(Fraction(10) ** 400)
    with pytest.raises(BadInputError, match=r"-10\^-400"):
        log(Fraction(-1, 10**400))


TINY = 5e-324


@pytest.mark.parametrize("law", ["feedback", "solve", "damped"])
@pytest.mark.parametrize(("t_min", "target"), list(itertools.product([TINY, 1e-308, 0.3], [TINY, 1e-12, 1.0, 20.0])))
def test_temperature_claims_at_the_edges(law: str, t_min: float, target: float) -> None:
    run = micro(law, t_min=t_min, t_max=10.0, temperature=t_min, target_nats=target)
    for theorem in ("floor", "wrong-sign", "delay"):
        assert claim(theorem, run, N).reason


@pytest.mark.parametrize(("theta", "high"), [(10.0, 1e-320), (10.0, TINY), (1e-19, 3.0), (TINY, 3.0)])
def test_budget_claims_at_the_edges(theta: float, high: float) -> None:
    table = {"law": "budget", "theta_nats": 0.0, "theta_wide_nats": theta, "entropy_low_nats": 0.0}
    loop = {"pruning": table | {"entropy_high_nats": high}, "temperature": {"law": "solve"}}
    given = Assumptions(varentropy_min=TINY, rho=1e3, s=1e3, r=0.05)
    subject = Subject(config.from_mapping({"loop": loop}), N, given)
    found = [*dwell.claims(subject, Hints({})), *pruning.claims(subject, Hints({}))]
    found += [small_gain.small_gain(subject, None), small_gain.pairing(subject)]
    assert all(each.reason for each in found)
    assert small_gain.pairing(dataclasses.replace(subject, assumptions=Assumptions(r=TINY))).status == "unknown"


@pytest.mark.parametrize("theta", [TINY, 1e-300, 1e-19, 1e-9, 0.02, 10.0])
@pytest.mark.parametrize("selection", ["union", "group_mean"])
def test_the_mass_of_a_budget_is_positive_and_at_most_the_budget(theta: float, selection: str) -> None:
    table = {"law": "budget", "theta_nats": 0.0, "theta_wide_nats": theta, "selection": selection}
    found = pruning.claims(Subject(config.from_mapping({"loop": {"pruning": table}}), N), Hints({}))[0]
    assert found.status == "proved"
    mass = Fraction(found.numbers["mass"])
    assert Fraction(-math.expm1(-theta)) * Fraction(999999, 10**6) < mass <= Fraction(theta) + Fraction(1, 10**15)
    assert "0.000000 of the attention" not in found.reason


def test_the_queue_at_the_edges() -> None:
    run = config.from_mapping({"engine": {"pages": 2**20}})
    for step_s, token_s, rate in itertools.product((TINY, 1e6), (0.0, 1e6), (TINY, 1e9)):
        given = Assumptions(step_s=step_s, token_s=token_s, rate_per_s=rate, prompt_tokens=TINY, output_tokens=TINY)
        assert scheduling.claims(Subject(run, N, given), Hints({}))[1].reason


# a push that float64 loses


@pytest.mark.parametrize(("t_min", "t_max"), [(0.3, 1.6), (1e-5, 10.0), (0.9, 1.1)])
def test_a_push_below_the_spacing_of_u_is_not_promised(t_min: float, t_max: float) -> None:
    """The shipped law, from the clamp where u is largest: it never moves at half a spacing, and does at a whole one."""
    target, end = 1.0, math.log(t_min)
    spacing = math.ulp(max(-end, math.log(t_max)))
    for factor, status in ((0.24, "unknown"), (0.98, "unknown"), (1.02, "proved")):
        gain = factor * spacing / (target / 2)  # at the floor, H* / 2, the error is H* / 2
        found = claim("floor", micro(gain=gain, t_min=t_min, t_max=t_max, temperature=t_min, target_nats=target), N)
        assert found.status == status
        law = feedback.build(
            feedback.Config(target_nats=target, gain=gain, t_min=t_min, t_max=t_max, temperature=t_min)
        )
        moved = float(law.update(np.array([end]), np.array([target / 2]))[0]) - end
        if factor < 0.25:
            assert moved == 0
            assert "be lost" in found.reason
        if status == "proved":
            assert moved > 0
    assert claim("floor", micro(rate_limit=TINY), N).status == "unknown"
    for gain, status in ((1e-17, "unknown"), (-1e-17, "unknown"), (1e-9, "proved"), (-1e-9, "proved")):
        assert claim("wrong-sign", micro(gain=gain), N).status == status


# the small pool


@pytest.mark.parametrize("batch", [3, 8])
@pytest.mark.parametrize("tokens", [8, 16, 24])
def test_tokens_a_row_cannot_use_go_to_the_rows_behind_it(batch: int, tokens: int) -> None:
    """Without that a page holder with a place is left out: a chunk before it had the step's tokens, but no pages."""
    run = config.from_mapping({"engine": {"max_batch": batch, "max_batch_tokens": tokens}})
    (found,) = interleavings(Subject(run, N), Hints({}))
    assert found.status == "proved", found.reason


def test_the_largest_exploration_is_bounded() -> None:
    engine = {"max_batch": 1, "max_batch_tokens": 8, "prefill_chunk": 1, "max_live": 256}
    loop = {"scheduling": {"quantum_steps": 1, "wait_limit_steps": 200}}
    pool = scaled(Subject(config.from_mapping({"engine": engine, "loop": loop}), N))
    assert pool.wait_limit_steps == 2
    assert explore(pool, 15_000).fault == ""


# files


def test_a_certificate_is_a_small_regular_file(tmp_path: Path) -> None:
    fifo, large = tmp_path / "fifo", tmp_path / "large.json"
    os.mkfifo(fifo)
    large.write_bytes(b" " * 1_000_001)
    for path, says in ((fifo, "regular"), (Path("/dev/zero"), "regular"), (large, "1,000,000"), (tmp_path, "cannot")):
        with pytest.raises(BadInputError, match=says):
            certificates.read_certificate(path)
    large.write_bytes(b"{}" + b" " * 999_998)
    assert certificates.read_certificate(large) == {}


def test_unknown_hints_are_refused_unparsed() -> None:
    class Never(str):
        __slots__ = ()

        def __eq__(self, other: Any) -> bool:
            raise AssertionError

        __hash__ = str.__hash__

    with pytest.raises(BadInputError, match=r"hints\.luck"):
        Hints({"luck": Never("1"), "top_k": "no number"})
    with pytest.raises(BadInputError, match="top_k"):
        Hints({"top_k": [[["1"]]]})
