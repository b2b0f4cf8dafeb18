from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_driver import Integral, Rows, Scored

from entropic_ctl.config import LoopConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.policy import Policy
from entropic_ctl.temperature.fixed import Config, Fixed

NO = np.zeros(1, np.bool_)


class Widening:
    """A meso law that remembers what it was given: theta is the last entropy, the timer counts."""

    config = LoopConfig().pruning.config

    def start(self) -> tuple[float, int]:
        return 0.25, 3

    def update(self, theta: np.ndarray, timer: np.ndarray, model_entropy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return model_entropy, timer + 1


def policy(lag: int = 0, slots: int = 3, micro: object = None, weight: float = 0.2) -> Policy:
    macro = Scored(lambda v: v.entropy)
    object.__setattr__(macro.config, "reduction_weight", weight)
    return Policy(micro or Integral(), Widening(), macro, slots=slots, observation_lag=lag)  # type: ignore[arg-type]


entropies = st.lists(st.floats(0, 12), min_size=1, max_size=30)


@given(entropies, st.floats(0.01, 1.0))
def test_signals_equal_their_definitions(values: list[float], weight: float) -> None:
    p = policy(weight=weight)
    slot = np.array([1])
    p.start(slot)
    assert np.isnan(p.signals(slot).entropy[0])
    for value in values:
        p.observe(slot, np.array([value]), np.array([1.0]), NO)
    h, n = np.array(values), len(values)
    s = p.signals(slot)
    assert s.seen[0] == n
    assert s.entropy[0] == h[-1]
    assert s.entropy_mean[0] == pytest.approx(h.mean(), abs=1e-9)
    assert s.entropy_var[0] == pytest.approx(h.var(), abs=1e-9)
    centred = h - h.mean()
    assert s.entropy_cov1[0] == pytest.approx((centred[1:] * centred[:-1]).sum() / n, abs=1e-9)
    drops = np.maximum(0.0, h[:-1] - h[1:])
    ewma = drops[0] if n > 1 else 0.0
    for drop in drops[1:]:
        ewma += weight * (drop - ewma)
    assert s.reduction_ewma[0] == pytest.approx(ewma, abs=1e-12)


@given(entropies, st.integers(0, 3))
def test_lag_delays_every_law_by_whole_tokens(values: list[float], lag: int) -> None:
    late, direct = policy(lag), policy()
    slot = np.array([2])
    late.start(slot)
    direct.start(slot)
    for value in values:
        late.observe(slot, np.array([value]), np.array([value / 2]), NO)
    for value in values[: max(0, len(values) - lag)]:
        direct.observe(slot, np.array([value]), np.array([value / 2]), NO)
    assert late.u[2] == direct.u[2]
    assert late.theta[2] == direct.theta[2]
    assert late.timer[2] == direct.timer[2]
    assert np.array_equal(late.stats, direct.stats)
    assert late.temperature.updates == max(0, len(values) - lag)  # type: ignore[attr-defined]


def test_lagged_update_acts_on_the_current_u() -> None:
    """u_{t+1} = update(u_t, H_{t-1}): by hand for three tokens."""
    p = policy(1)
    slot = np.array([0])
    p.start(slot)
    u = np.log(0.8)
    for value in (3.0, 0.5, 2.0):
        p.observe(slot, np.array([value]), np.array([value]), NO)
    u = u - 0.05 * (3.0 - 1.0)
    u = u - 0.05 * (0.5 - 1.0)
    assert p.u[0] == pytest.approx(u, abs=1e-15)


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 9)), min_size=1, max_size=25), st.integers(0, 2))
def test_several_tokens_of_one_slot_in_one_call_equal_one_call_each(tokens: list[tuple[int, float]], lag: int) -> None:
    together, apart = policy(lag), policy(lag)
    for p in (together, apart):
        p.start(np.arange(3))
    slots, h = np.array([t[0] for t in tokens]), np.array([t[1] for t in tokens])
    together.observe(slots, h, h, np.zeros(len(h), np.bool_))
    for i in range(len(h)):
        apart.observe(slots[i : i + 1], h[i : i + 1], h[i : i + 1], NO)
    assert np.array_equal(together.u, apart.u)
    assert np.array_equal(together.theta, apart.theta)
    assert np.array_equal(together.stats, apart.stats)


def test_greedy_and_invalid_rows() -> None:
    p = policy()
    slots = np.arange(3)
    p.start(slots)
    greedy = np.array([True, False, False])
    t = p.temper(slots, greedy, Rows(np.array([1.0, np.nan, 2.0])))
    assert t.temperature.tolist() == [0.0, 1.0, pytest.approx(0.8)]
    assert t.tempered_entropy[[0, 2]].tolist() == [0.0, pytest.approx(1.6)]
    assert t.varentropy[0] == 0.0
    assert t.valid.tolist() == [True, False, True]
    before = p.u.copy()
    p.observe(slots, t.model_entropy, t.tempered_entropy, greedy)
    assert p.u[:2].tolist() == before[:2].tolist()  # E7: nothing updated with NaN; greedy: no micro update
    assert p.u[2] != before[2]
    assert p.seen.tolist() == [1, 0, 1]
    assert p.theta.tolist() == [1.0, 0.25, 2.0]
    assert p.temperature.updates == 1  # type: ignore[attr-defined]
    p.observe(slots, np.ones(3), np.ones(3), greedy, np.array([False, True, False]))
    assert p.seen.tolist() == [1, 1, 1]


def test_greedy_rows_survive_a_law_that_answers_nan() -> None:
    class Broken(Integral):
        def temper(self, u: np.ndarray, view: Rows) -> tuple[np.ndarray, ...]:
            return u * np.nan, u * np.nan, u * np.nan

    p = policy(micro=Broken())
    p.start(np.arange(2))
    t = p.temper(np.arange(2), np.array([True, False]), Rows(np.ones(2)))
    assert t.valid.tolist() == [True, False]
    assert t.temperature.tolist() == [0.0, 1.0]


def test_numpy_and_torch_views_give_the_same_answer() -> None:
    torch = pytest.importorskip("torch")
    p = policy()
    slots = np.arange(3)
    p.start(slots)
    p.u[:] = [-0.3, 0.0, 0.2]
    h = np.array([0.5, 2.0, 7.0], np.float32)
    greedy = np.array([False, True, False])
    seen = []

    class TorchRows(Rows):
        def at(self, temperature: object) -> tuple[object, object]:
            seen.append(type(temperature))
            return super().at(temperature)

    a = p.temper(slots, greedy, Rows(h.astype(np.float64)))
    b = p.temper(slots, greedy, TorchRows(torch.from_numpy(h)))
    assert seen == [torch.Tensor]
    for name in ("temperature", "model_entropy", "tempered_entropy", "varentropy"):
        left, right = getattr(a, name), getattr(b, name)
        assert isinstance(right, np.ndarray)
        assert right.dtype == np.float64
        assert np.abs(left - right).max() <= 1e-12
    assert b.valid.tolist() == [True, True, True]


def test_float32_entropies_update_in_float64() -> None:
    wide, narrow = policy(), policy()
    h = np.array([1.1, 2.3], np.float32)
    for p, values in ((wide, h.astype(np.float64)), (narrow, h)):
        p.start(np.arange(2))
        for _ in range(3):
            p.observe(np.arange(2), values, values, np.zeros(2, np.bool_))
    assert np.array_equal(wide.stats, narrow.stats)
    assert np.array_equal(wide.u, narrow.u)


def test_no_rows_ask_nothing() -> None:
    class Never:
        @property
        def model_entropy(self) -> np.ndarray:
            raise AssertionError

    t = policy().temper(np.empty(0, np.int64), np.empty(0, np.bool_), Never())  # type: ignore[arg-type]
    assert t.temperature.shape == (0,)


def test_slots_are_started_once_and_forgotten() -> None:
    p = policy()
    p.start(np.array([0, 1]))
    with pytest.raises(BadInputError, match="already holds a request"):
        p.start(np.array([1, 2]))
    p.observe(np.array([0]), np.ones(1), np.ones(1), NO)
    p.stop(np.array([0, 1]))
    assert not p.active.any()
    for column in (p.u, p.theta, p.timer, p.seen, p.stats, p._late):
        assert not column.any()
    with pytest.raises(BadInputError, match="observation_lag"):
        policy(-1)


def test_a_zero_temperature_config_means_greedy() -> None:
    assert policy(micro=Fixed(Config(temperature=0.0))).always_greedy
    assert not policy().always_greedy
