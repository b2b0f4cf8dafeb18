"""Simulated time: no drift, never backwards."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.errors import NoProgressError
from sim.clock import Clock


@given(st.lists(st.floats(0, 1e6), max_size=50), st.floats(0, 1e9))
def test_s9_the_clock_never_runs_backwards(steps: list[float], jump: float) -> None:
    clock, before = Clock(), 0.0
    for step in steps:
        assert clock.advance(step) >= before
        before = clock.now_s
    assert clock.jump(jump) == max(before, jump)
    with pytest.raises(NoProgressError):
        clock.advance(-1e-9)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=300))
def test_s9_sums_are_exact_to_the_last_place(steps: list[float]) -> None:
    clock = Clock()
    for step in steps:
        clock.advance(step)
    assert clock.now_s == pytest.approx(math.fsum(steps), rel=3e-16)
