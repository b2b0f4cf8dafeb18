from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from entropic_ctl.clock import CostLedger, EntropicClock, Runs, filtered_ratchet, noise_ratchet
from entropic_ctl.errors import BadInputError

ENTROPIES = hnp.arrays(np.float64, st.integers(1, 60), elements=st.floats(0, 12))


def run(H: np.ndarray[Any, Any], weight: float = 0.2) -> EntropicClock:
    clock = EntropicClock(1, weight)
    clock.start(0)
    for h in H:
        clock.update(np.array([0]), np.array([h]))
    return clock


@given(ENTROPIES)
def test_tau_is_half_of_total_variation_plus_net_fall(H: np.ndarray[Any, Any]) -> None:
    clock = run(H)
    assert clock.tau[0] == pytest.approx((np.abs(np.diff(H)).sum() + H[0] - H[-1]) / 2, abs=1e-12)
    assert clock.tau[0] >= H[0] - H[-1] - 1e-12
    assert (clock.first[0], clock.last[0], clock.count[0]) == (H[0], H[-1], len(H))


@given(ENTROPIES, st.floats(0.01, 1.0))
def test_filtered_clock_obeys_the_same_identity_on_its_average(H: np.ndarray[Any, Any], w: float) -> None:
    f = [H[0]]
    for h in H[1:]:
        f.append(f[-1] + w * (h - f[-1]))
    clock = run(H, w)
    assert clock.tau_filtered[0] == pytest.approx((np.abs(np.diff(f)).sum() + f[0] - f[-1]) / 2, abs=1e-12)
    assert clock.tau_filtered[0] <= clock.tau[0] + 1e-12
    assert run(H, 1.0).tau_filtered[0] == pytest.approx(clock.tau[0], abs=1e-12)


def test_the_first_token_adds_nothing_and_falling_entropy_counts_in_full() -> None:
    assert run(np.array([5.0])).tau[0] == 0.0
    assert run(np.array([5.0, 3.0, 4.0, 1.0])).tau[0] == 5.0
    assert run(np.linspace(0, 9, 50)).tau[0] == 0.0


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 12)), max_size=50), st.integers(1, 50))
def test_any_grouping_into_calls_gives_the_same_clocks(events: list[tuple[int, float]], size: int) -> None:
    """Repeated slots in one call count in order: the same as one call per token."""
    slots = np.array([s for s, _ in events], np.int64)
    H = np.array([h for _, h in events])
    one, many, rounds = EntropicClock(1), EntropicClock(1), EntropicClock(1)
    for s, h in events:
        one.update(np.array([s]), np.array([h]))
    for a in range(0, len(events), size):
        many.update(slots[a : a + size], H[a : a + size])
    if events:
        rounds.reserve(10)
        for part in Runs.of(slots).rounds():
            rounds._advance(slots[part], H[part])
    for clock in (one, many, rounds):
        clock.reserve(10)
    for name in ("tau", "tau_filtered", "last", "first", "count"):
        a = getattr(one, name)[:10]
        for other in (many, rounds):
            np.testing.assert_allclose(getattr(other, name)[:10], a, atol=1e-12)


def test_one_slot_with_very_many_tokens_needs_no_padding() -> None:
    rng = np.random.default_rng(0)
    H = rng.gamma(2.0, size=1000)
    slots = np.where(np.arange(1000) % 2, np.arange(1000), 0)  # slot 0 five hundred times, others once
    clock = EntropicClock()
    clock.update(slots, H)
    assert clock.tau[0] == pytest.approx(run(H[slots == 0]).tau[0])
    assert clock.tau_filtered[0] == pytest.approx(run(H[slots == 0]).tau_filtered[0])


def test_restart_forgets_and_nan_is_skipped() -> None:
    clock = EntropicClock(2)
    clock.update(np.array([1, 1, 1]), np.array([4.0, np.nan, 1.0]))
    assert (clock.tau[1], clock.count[1]) == (3.0, 2)
    clock.start(1)
    assert (clock.tau[1], clock.tau_filtered[1], clock.count[1]) == (0.0, 0.0, 0)
    clock.update(np.array([1]), np.array([0.5]))
    assert clock.tau[1] == 0.0
    clock.update(np.empty(0, np.int64), np.empty(0))
    clock.start(1000)
    assert clock.tau[1000] == 0.0


@pytest.mark.parametrize("phi", [-0.5, 0.0, 0.4, 0.9])
def test_noise_ratchet_of_an_ar1_process(phi: float) -> None:
    """s sqrt((1 - phi) / pi) nats per step, white noise (s / sqrt(pi)) included."""
    s, n, slots = 0.7, 1000, 400
    rng = np.random.default_rng(1)
    clock = EntropicClock(slots)
    H = s * rng.normal(size=slots)
    for _ in range(n + 1):
        clock.update(np.arange(slots), 5.0 + H)
        H = phi * H + math.sqrt(1 - phi**2) * s * rng.normal(size=slots)
    assert clock.tau.mean() / n == pytest.approx(noise_ratchet(s, phi), rel=0.01)
    if phi == 0.0:
        assert noise_ratchet(s) == pytest.approx(s / math.sqrt(math.pi))
        # the filter starts at H_0, not in its stationary law: a transient of O(1 / (n w))
        assert clock.tau_filtered.mean() / n == pytest.approx(filtered_ratchet(s, 0.2), rel=0.03)
        assert clock.tau_filtered.mean() < 0.2 * clock.tau.mean()


def test_uniform_noise_attains_the_white_bound() -> None:
    """Any white law ratchets at most s / sqrt(3) per step; the uniform law does exactly that."""
    rng = np.random.default_rng(2)
    rates = {}
    for name, sample in {
        "uniform": rng.uniform(0, math.sqrt(12), (1000, 400)),
        "normal": 6 + rng.normal(size=(1000, 400)),
        "exponential": rng.exponential(size=(1000, 400)),
        "rare": 10.0 * (rng.random((1000, 400)) < 0.0101),
    }.items():
        falls = np.maximum(sample[:-1] - sample[1:], 0).mean()
        rates[name] = falls / sample.std()
    assert rates["uniform"] == pytest.approx(1 / math.sqrt(3), rel=0.01)
    assert max(rates.values()) <= 1.01 / math.sqrt(3)


def test_ledger_and_efficiency() -> None:
    ledger = CostLedger()
    assert ledger.efficiency(3.0) == dict.fromkeys(
        ("tau_per_flop", "tau_per_kv_byte", "tau_per_second", "tau_per_joule")
    )
    ledger.add(100.0, 20.0, 0.5)
    ledger.add(100.0, 0.0, 1.5)
    assert ledger.efficiency(4.0) == {
        "tau_per_flop": 0.02,
        "tau_per_kv_byte": 0.2,
        "tau_per_second": 2.0,
        "tau_per_joule": None,
    }
    for bad in ((-1.0, 0.0, 0.0), (0.0, math.nan, 0.0), (0.0, 0.0, math.inf)):
        with pytest.raises(BadInputError, match="not a cost"):
            ledger.add(*bad)


def test_bad_arguments() -> None:
    for bad in (0.0, 1.5, math.nan):
        with pytest.raises(BadInputError, match="weight"):
            EntropicClock(4, bad)
    with pytest.raises(BadInputError, match="slots"):
        EntropicClock(0)
    with pytest.raises(BadInputError, match="one entropy per slot"):
        EntropicClock().update(np.array([1, 2]), np.array([1.0]))
