from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_view import view

from entropic_ctl.scheduling.qoe import Config, QualityGain, build

LAW = QualityGain(Config(ttft_s=1.0, reading_tokens_per_s=5.0, horizon_s=2.0))


@given(st.floats(0, 50), st.integers(1, 100), st.floats(0.1, 20.0))
def test_the_demanded_area_is_the_integral_of_the_demand(until: float, limit: int, rate: float) -> None:
    law = QualityGain(Config(ttft_s=1.0, reading_tokens_per_s=rate))
    t = np.linspace(0, until, 200_001)
    mid = 0.5 * (t[1:] + t[:-1])
    demand = np.where(mid < 1.0, 0.0, np.minimum(1.0 + rate * (mid - 1.0), limit))
    expected = float(demand.sum() * until / 200_000)
    assert law.demanded_area(view(token_limit=limit), until)[0] == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_a_gain_worked_by_hand() -> None:
    """Nobody started, steps of 1 ms, at the time the first token is due: served is d, waiting is nothing.

    Both areas are the triangle-and-strip 2 + 5 * 2^2 / 2 = 12, so the gain is 1; after four times as long, the area
    gained is that of d from 3 s to 5 s at full speed, over that of d up to 5 s: (52 - 24 ... the integrals below).
    """
    columns = {"generated_tokens": 0, "known_tokens": 10, "cached_tokens": 0, "token_limit": 10**6, "step_s": 1e-3}
    (gain,) = LAW.gain(view(now_s=1.0, **columns))
    assert gain == pytest.approx(1.0, abs=1e-3)
    (late,) = LAW.gain(view(now_s=4.0, **columns))

    def area(until: float) -> float:
        return (until - 1.0) + 2.5 * (until - 1.0) ** 2

    assert late == pytest.approx((area(6.0) - area(4.0)) / area(6.0), abs=1e-2)


def test_who_has_enough_to_read_gains_nothing() -> None:
    """At 2 s the reader is at token 6, at 4 s at 16."""
    columns = {"now_s": 2.0, "generated_tokens": [16, 15, 6, 0], "known_tokens": 100, "cached_tokens": 99}
    gain = LAW.gain(view(4, token_limit=1000, **columns))
    assert gain[0] == 0.0
    assert 0 < gain[1] < gain[2]
    assert (LAW.gain(view(4, token_limit=16, **columns)) > 0).tolist() == [False, True, True, True]


def test_nothing_is_gained_before_the_first_token_is_due_or_while_the_prompt_takes_the_horizon() -> None:
    early = {"now_s": 0.0, "arrival_s": 5.0, "generated_tokens": 0}
    assert LAW.score(view(**early)).tolist() == [0.0]
    slow = {"now_s": 5.0, "generated_tokens": 0, "known_tokens": 6400, "cached_tokens": [0, 6399], "step_s": 0.5}
    gain = LAW.gain(view(2, token_limit=1000, **slow))
    assert gain[0] == 0.0  # 100 steps of prefill
    assert gain[1] > 0.0


def test_a_gain_costs_the_memory_it_takes() -> None:
    columns = {"now_s": 2.0, "generated_tokens": 0, "cached_tokens": 99, "known_tokens": 100}
    one, two = LAW.score(view(2, **(columns | {"known_tokens": [100, 200], "cached_tokens": [99, 199]})))
    assert one == pytest.approx(2 * two)


def test_before_the_first_step_a_request_is_served_as_fast_as_it_is_read() -> None:
    columns = {"now_s": 1.0, "generated_tokens": 0, "cached_tokens": 29}
    assert LAW.gain(view(step_s=0.0, **columns)) == LAW.gain(view(step_s=0.2, **columns))


@given(st.integers(0, 50), st.floats(0.001, 1.0), st.floats(0.0, 30.0))
def test_gains_lie_between_0_and_1(generated: int, step_s: float, now: float) -> None:
    (gain,) = LAW.gain(view(generated_tokens=generated, step_s=step_s, now_s=now))
    assert 0.0 <= gain <= 1.0 + 0.1 / 16


def test_build() -> None:
    assert isinstance(build(Config()), QualityGain)
