"""The shipped bank against itself: what a simulated temperature shows is what was recorded at it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from entropic_ctl import config as configs
from entropic_ctl.bank import Bank
from sim.replica import simulate
from sim.trajectories import load_bank

SHIPPED = load_bank()


def texts(bank: Bank, temperature: float) -> list[np.ndarray]:
    """Model entropies of the recordings at a temperature, in the order of their prompts."""
    return [
        bank.model_entropy[bank.offset[k] : bank.offset[k + 1]].astype(float)
        for k in np.flatnonzero(bank.temperature == temperature)
    ]


def lag_one(h: np.ndarray) -> float:
    d = h - h.mean()
    return float(d[1:] @ d[:-1] / (d @ d))


def measures(sample: list[np.ndarray]) -> np.ndarray:
    """Mean over texts of (mean entropy, length, lag-1 autocorrelation)."""
    return np.array([[h.mean(), h.shape[0], lag_one(h)] for h in sample]).mean(axis=0)


def simulated(bank: Bank, temperature: float, n: int = 240) -> list[np.ndarray]:
    limit = bank.meta["max_new_tokens"]
    tables: dict[str, Any] = {
        "workload": {"n_requests": n, "prompt_tokens": 20, "output_tokens": limit, "output_length": "bank"},
        "engine": {"max_batch": 64, "pages": 4096},
        "loop": {"temperature": {"law": "fixed", "temperature": temperature, "t_min": 0.2}},
    }
    tokens = simulate(configs.from_mapping(tables), bank=bank, keep_tokens=True).tokens
    assert tokens is not None
    order = np.lexsort((tokens["index"], tokens["id"]))
    starts = np.flatnonzero(np.diff(tokens["id"][order])) + 1
    return np.split(tokens["model_entropy"][order], starts)


def without(bank: Bank, temperature: float) -> Bank:
    """The bank without the recordings at one temperature."""
    kept = np.flatnonzero(bank.temperature != temperature)
    length = np.diff(bank.offset)
    rows = np.concatenate([np.arange(bank.offset[k], bank.offset[k + 1]) for k in kept])
    return dataclasses.replace(
        bank,
        prompt_kind=bank.prompt_kind[kept],
        prompt=bank.prompt[kept],
        temperature=bank.temperature[kept],
        ended=bank.ended[kept],
        offset=np.concatenate(([0], np.cumsum(length[kept]))),
        model_entropy=bank.model_entropy[rows],
        entropy_grid=bank.entropy_grid[rows],
        varentropy_grid=bank.varentropy_grid[rows],
    )


def interval(bank: Bank, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """99% bootstrap interval of the recorded measures, prompts resampled."""
    rng, sample = np.random.default_rng(0), texts(bank, temperature)
    draws = [measures([sample[i] for i in rng.integers(0, len(sample), len(sample))]) for _ in range(1000)]
    low, high = np.quantile(draws, (0.005, 0.995), axis=0)
    return low, high


@pytest.mark.parametrize("temperature", [0.4, 0.8, 1.3])
def test_at_a_recorded_temperature_the_recordings_come_back(temperature: float) -> None:
    low, high = interval(SHIPPED, temperature)
    got = measures(simulated(SHIPPED, temperature))
    assert (low <= got).all(), (low, got, high)
    assert (got <= high).all(), (low, got, high)


@pytest.mark.parametrize("temperature", [0.4, 0.6, 0.8])
def test_a_temperature_left_out_of_the_bank_is_filled_in_from_its_neighbours(temperature: float) -> None:
    """Mean entropy and length lie in the interval of what was recorded there.

    Not so at 1.0 and 1.3, each 0.9 nats and more off: between them texts lose their thread, the mean entropy goes from
    2.5 to 5.6 nats, and no mixture of the neighbours tells where. The bank is coarse there.
    """
    low, high = interval(SHIPPED, temperature)
    got = measures(simulated(without(SHIPPED, temperature), temperature))
    assert low[0] <= got[0] <= high[0]
    assert low[1] <= got[1] <= high[1]


def test_entropy_and_length_respond_to_temperature_as_recorded() -> None:
    """Entropy rises from 0.4 to 1.6; the model ends fewer of its texts by itself at high temperature."""
    low, high = (measures(simulated(SHIPPED, t)) for t in (0.4, 1.6))
    assert high[0] > 2 * low[0]
    assert high[1] > low[1]
