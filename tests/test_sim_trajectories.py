"""Recorded entropies: interpolation against exact softmax entropies, selection, end of text."""

from __future__ import annotations

import dataclasses
import importlib.resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_bank import entropy_varentropy, make_bank

from entropic_ctl import bank as banks
from entropic_ctl import registry
from entropic_ctl.config import LawSpec, LoopConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.temperature import fixed
from sim.trajectories import TEXT_WEIGHT, BankView, Trajectories, load_bank

BANK, LOGITS = make_bank(temperatures=(0.4, 0.8, 1.2, 1.6))
ROWS = np.arange(0, len(LOGITS), 7)


def view(rows: np.ndarray = ROWS, shift: np.ndarray | None = None) -> BankView:
    trajectories = Trajectories(BANK, np.zeros(1, np.int64), np.zeros(1), base_temperature=1.0, ends=True)
    return trajectories.view(rows, shift)


def columns(n: int, *, xi: float = 0.5, base: float = 0.8, ends: bool = True, prompt: int = 0) -> Trajectories:
    return Trajectories(BANK, np.full(n, prompt), np.full(n, xi), base_temperature=base, ends=ends)


@given(st.floats(0.25, 2.0))
def test_entropy_between_grid_points_is_close_to_the_exact_one(temperature: float) -> None:
    h, v = view().at(np.full(len(ROWS), temperature))
    exact_h, exact_v = entropy_varentropy(LOGITS[ROWS], temperature)
    np.testing.assert_allclose(h, exact_h, atol=0.012)
    np.testing.assert_allclose(v, exact_v, atol=0.25)
    assert np.abs(h - exact_h).mean() < 1e-3


def test_entropy_at_grid_points_is_the_recorded_one() -> None:
    for j, temperature in enumerate(BANK.grid):
        h, _ = view().at(np.full(len(ROWS), temperature))
        np.testing.assert_allclose(h, BANK.entropy_grid[ROWS, j], atol=1e-6)


@given(st.lists(st.floats(0.25, 2.0), min_size=2, max_size=2).map(sorted))
def test_entropy_grows_with_temperature_and_varentropy_is_its_slope(pair: list[float]) -> None:
    low, high = (np.full(len(ROWS), t) for t in pair)
    assert (view().at(high)[0] >= view().at(low)[0] - 1e-9).all()
    u, step = np.log(low[0]), 1e-5
    if np.abs(np.log(BANK.grid) - u).min() > 2 * step:  # inside one cell the interpolant is smooth
        (up, _), (down, _) = view().at(np.exp(u + step + 0 * low)), view().at(np.exp(u - step + 0 * low))
        np.testing.assert_allclose((up - down) / (2 * step), view().at(low)[1], atol=1e-4)


@given(st.integers(0, 2**31))
def test_interpolant_stays_monotone_on_noisy_half_precision_tables(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grid = np.geomspace(0.3, 2, 6)
    h = np.sort(rng.random((5, 6)) * 8, axis=1).astype(np.float16).astype(float)
    noisy = BankView(
        h[:, 0], h.astype(np.float32), (rng.random((5, 6)) * 30).astype(np.float32), np.log(grid), np.arange(5)
    )
    values = np.stack([noisy.at(np.full(5, t))[0] for t in np.geomspace(0.3, 2, 60)])
    assert (np.diff(values, axis=0) >= -1e-9).all()
    assert (values <= h.max(axis=1) + 1e-9).all()


@pytest.mark.parametrize("temperature", [0.2499, 2.001, 0.0, np.nan, 1e300])
def test_a_temperature_outside_the_grid_is_an_error(temperature: float) -> None:
    with np.errstate(divide="ignore"), pytest.raises(BadInputError, match=r"\[0.25, 2\]"):
        view().at(np.full(len(ROWS), temperature))


def test_shift_adds_to_both_entropies_and_stops_at_zero() -> None:
    temperature = np.full(len(ROWS), 0.7)
    up, down = view(shift=np.full(len(ROWS), 0.3)), view(shift=np.full(len(ROWS), -99.0))
    np.testing.assert_allclose(up.model_entropy, view().model_entropy + 0.3)
    np.testing.assert_allclose(up.at(temperature)[0], view().at(temperature)[0] + 0.3)
    assert not down.model_entropy.any()
    assert not down.at(temperature)[0].any()


def test_empty_view() -> None:
    h, v = view(np.empty(0, np.int64)).at(np.empty(0))
    assert h.shape == v.shape == (0,)


def recording_of(at: np.ndarray) -> np.ndarray:
    return np.searchsorted(BANK.offset, at, side="right") - 1


def test_xi_against_log_weight_chooses_the_neighbour() -> None:
    """At T = sqrt(0.4 * 0.8) the weight is 1/2: half of the requests read each neighbour, none an average."""
    xi = np.linspace(0, 1, 1000, endpoint=False)
    columns = Trajectories(BANK, np.zeros(1000, np.int64), xi, base_temperature=np.sqrt(0.32), ends=True)
    at, _ = columns.select(np.arange(1000))
    chosen = BANK.temperature[recording_of(at)]
    assert set(chosen) == {0.4, 0.8}
    assert (chosen == 0.8).sum() == 500
    assert (chosen[:500] == 0.8).all()


@pytest.mark.parametrize("temperature", [0.4, 0.8, 1.6])
def test_at_a_recorded_temperature_that_recording_is_read(temperature: float) -> None:
    trajectories = columns(3, base=temperature, prompt=2)
    at, _ = trajectories.select(np.arange(3))
    assert (BANK.temperature[recording_of(at)] == temperature).all()
    assert (BANK.prompt[recording_of(at)] == 2).all()


@pytest.mark.parametrize("temperature", [0.3, 1.9])
def test_beyond_the_sampled_temperatures_nothing_is_read(temperature: float) -> None:
    trajectories = columns(3, base=temperature, prompt=2)
    with pytest.raises(BadInputError, match=r"sampled at.*\[0.4, 1.6\]"):
        trajectories.select(np.arange(3))


def test_a_text_follows_its_temperature_as_a_moving_average() -> None:
    """After k tokens at T: u = ln T - (1 - w)^k (ln T - ln base), which selects by xi against the weight in u."""
    recorded = np.log(np.unique(BANK.temperature))
    hot, base = recorded[-1], recorded[0]
    for tokens in (1, 5, 40):
        u = hot - (1.0 - TEXT_WEIGHT) ** tokens * (hot - base)
        j = int(np.searchsorted(recorded, u, side="right")) - 1
        weight = (u - recorded[j]) / (recorded[j + 1] - recorded[j])
        xi = np.array([weight - 1e-9, weight + 1e-9])
        places = Trajectories(BANK, np.zeros(2, np.int64), xi, base_temperature=float(np.exp(base)), ends=False)
        for _ in range(tokens):
            places.advance(np.arange(2), np.full(2, np.exp(hot)))
        at, _ = places.select(np.arange(2))
        assert np.log(BANK.temperature[recording_of(at)]).tolist() == [recorded[j + 1], recorded[j]]


def test_greedy_tokens_draw_a_text_to_the_lowest_temperature() -> None:
    trajectories = Trajectories(BANK, np.zeros(1, np.int64), np.full(1, 0.5), base_temperature=1.6, ends=False)
    for _ in range(400):
        trajectories.advance(np.zeros(1, np.int64), np.zeros(1))
    at, _ = trajectories.select(np.zeros(1, np.int64))
    assert BANK.temperature[recording_of(at)].tolist() == [BANK.temperature.min()]


def walk(trajectories: Trajectories, tokens: int, temperature: float) -> tuple[list[int], int | None]:
    one, places = np.zeros(1, np.int64), []
    for i in range(tokens):
        at, last = trajectories.select(one)
        places.append(int(at[0]))
        trajectories.advance(one, np.full(1, temperature))
        if last[0]:
            return places, i + 1
    return places, None


def test_a_recorded_end_of_text_ends_the_request_after_exactly_its_length() -> None:
    k = 1  # prompt 0 at T = 0.8, ended
    assert BANK.ended[k]
    length = int(BANK.offset[k + 1] - BANK.offset[k])
    places, end = walk(columns(1), 500, 0.8)
    assert end == length
    assert places == list(range(BANK.offset[k], BANK.offset[k + 1]))


def test_a_text_that_is_already_over_is_passed_over_for_the_nearest_still_going() -> None:
    length = int(BANK.offset[2] - BANK.offset[1])
    trajectories, one = columns(1, base=1.2), np.zeros(1, np.int64)
    for _ in range(length + 3):
        trajectories.advance(one, np.full(1, 1.2))
    trajectories.advance(one, np.full(1, 0.8))  # the recording at 0.8 ended before; those at 0.4 and 1.2 have not
    at, last = trajectories.select(one)
    assert not last[0]
    assert BANK.temperature[recording_of(at)].tolist() == [1.2]


def test_a_request_ends_where_all_of_its_recordings_are_over() -> None:
    ended = dataclasses.replace(BANK, ended=np.ones_like(BANK.ended))
    one = np.zeros(1, np.int64)
    trajectories = Trajectories(ended, one, np.full(1, 0.5), base_temperature=0.8, ends=True)
    for _ in range(200):
        trajectories.advance(one, np.full(1, 0.8))
    at, last = trajectories.select(one)
    assert last[0]
    assert at[0] == BANK.offset[2] - 1


def test_moving_the_temperature_does_not_shorten_texts_by_itself() -> None:
    """Toggling between two recordings at random gives the mean of their lengths, as staying with either does."""
    bank, _ = make_bank(prompts=1, temperatures=(0.4, 0.8))
    bank = dataclasses.replace(bank, ended=np.ones(2, np.bool_))
    short, long = sorted(np.diff(bank.offset).tolist())
    assert short < long
    n, rng = 4000, np.random.default_rng(0)
    ids, length = np.arange(n), np.zeros(n, np.int64)
    middle = 0.32**0.5  # as far from 0.4 as from 0.8 in ln T
    trajectories = Trajectories(bank, np.zeros(n, np.int64), np.full(n, 0.5), base_temperature=middle, ends=True)
    while ids.size:
        _, last = trajectories.select(ids)
        length[ids] += 1
        trajectories.advance(ids, rng.choice([0.4, 0.8], ids.size))
        ids = ids[~last]
    assert set(length.tolist()) == {short, long}
    assert abs(length.mean() - (short + long) / 2) < 4 * (long - short) / 2 / np.sqrt(n)


def test_a_censored_recording_wraps_and_never_ends() -> None:
    k = 2  # prompt 0 at T = 1.2, censored
    assert not BANK.ended[k]
    length = int(BANK.offset[k + 1] - BANK.offset[k])
    places, end = walk(columns(1, base=1.2), 3 * length, 1.2)
    assert end is None
    assert places == list(range(BANK.offset[k], BANK.offset[k + 1])) * 3


def test_in_limit_mode_every_recording_wraps() -> None:
    length = int(BANK.offset[2] - BANK.offset[1])
    places, end = walk(columns(1, ends=False), 2 * length, 0.8)
    assert end is None
    assert places[:length] == places[length:]


def test_length_depends_on_temperature() -> None:
    """What makes the length of a text a response to the micro law, not a constant of the workload."""
    ends = {t: walk(columns(1, base=t), 500, t)[1] for t in (0.4, 0.8, 1.6)}
    assert len(set(ends.values())) == 3


def test_law_ranges_are_checked_once_and_name_the_field() -> None:
    trajectories = columns(1)
    trajectories.require_range(LoopConfig())  # a fixed law cannot leave its temperature, whatever its clamps
    for spec, needle in [
        (fixed.Config(temperature=3.0, t_max=3.0), "loop.temperature.temperature"),
        (fixed.Config(temperature=0.2, t_min=0.1), "loop.temperature.temperature"),
    ]:
        with pytest.raises(BadInputError, match=needle):
            trajectories.require_range(LoopConfig(temperature=LawSpec("fixed", spec)))
    with pytest.raises(BadInputError, match=r"loop.temperature.t_max.*\[0.4, 1.6\]"):
        trajectories.require_range(LoopConfig(temperature=LawSpec("solve", fixed.Config(t_min=0.4, t_max=1.8))))
    with pytest.raises(BadInputError, match=r"loop.temperature.t_min.*--temperatures"):  # on the grid, never sampled
        trajectories.require_range(LoopConfig(temperature=LawSpec("solve", fixed.Config(t_min=0.3))))


def test_repeats_of_a_prompt_are_prompts_of_their_own() -> None:
    twice = dataclasses.replace(BANK, prompt=BANK.prompt % 2)  # prompts 0 and 2 become two recordings of prompt 0
    assert Trajectories.count_prompts(BANK) == Trajectories.count_prompts(twice) == 4
    chosen = set()
    for prompt in range(4):
        trajectories = Trajectories(twice, np.array([prompt]), np.zeros(1), base_temperature=0.8, ends=True)
        chosen.add(int(recording_of(trajectories.select(np.zeros(1, np.int64))[0])[0]))
    assert len(chosen) == 4
    assert all(BANK.temperature[k] == 0.8 for k in chosen)


def test_a_prompt_missing_at_one_temperature_is_an_error() -> None:
    temperature = BANK.temperature.copy()
    temperature[0] = 0.8
    with pytest.raises(BadInputError, match="every temperature"):
        Trajectories.count_prompts(dataclasses.replace(BANK, temperature=temperature))


def test_bank_file_round_trip(tmp_path: Path) -> None:
    banks.save(BANK, tmp_path / "b.npz")
    again = load_bank(str(tmp_path / "b.npz"))
    np.testing.assert_allclose(again.entropy_grid, BANK.entropy_grid, rtol=1e-3, atol=1e-4)
    with pytest.raises(BadInputError, match="cannot read entropy bank"):
        load_bank(str(tmp_path / "absent.npz"))


def test_the_shipped_bank_covers_the_default_laws() -> None:
    if not (importlib.resources.files("sim") / "data" / "smollm2-135m.npz").is_file():
        pytest.skip("the recorded bank is not in this checkout")
    bank = load_bank()
    assert Trajectories.count_prompts(bank) >= 2
    trajectories = Trajectories(bank, np.zeros(1, np.int64), np.zeros(1), base_temperature=0.8, ends=True)
    law, scheduling = registry.load("entropic_ctl.pruning.laws", "budget").Config(), LoopConfig().scheduling
    for name in registry.names("entropic_ctl.temperature"):
        spec = LawSpec(name, registry.load("entropic_ctl.temperature", name).Config())
        trajectories.require_range(LoopConfig(temperature=spec, pruning=LawSpec("budget", law), scheduling=scheduling))
    # entropies and varentropies belong together: V is the slope of H between neighbouring grid points
    h, v, u = bank.entropy_grid.astype(float), bank.varentropy_grid.astype(float), np.log(bank.grid)
    slope = np.diff(h, axis=1) / np.diff(u)
    assert (slope > -0.1).all()
    assert np.corrcoef(slope.ravel(), ((v[:, 1:] + v[:, :-1]) / 2).ravel())[0, 1] > 0.9
