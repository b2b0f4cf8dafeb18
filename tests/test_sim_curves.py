"""Curves of entropy against temperature: whatever is drawn is what some distribution could have shown."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_bank import VOCAB, distributions, entropy_varentropy

from sim.curves import Curves, draw_curves, fit_curves
from sim.parametric import to_x

RNG = np.random.default_rng(0)
LOGITS = distributions(RNG, 1500)
H = entropy_varentropy(LOGITS, 1.0)[0]
U = np.log(RNG.choice([0.5, 1.0, 1.5], len(H)))


def fitted(grid: np.ndarray) -> Curves:
    tables = [entropy_varentropy(LOGITS, t) for t in grid]
    table, slopes = (np.stack([pair[i] for pair in tables], axis=1) for i in (0, 1))
    return fit_curves(grid, model_entropy=H, table=table, slopes=slopes, x=to_x(H), u=U, vocab_size=VOCAB)


GRIDS = {
    "holds 1": np.array([0.3, 0.5, 0.75, 1.0, 1.4, 2.0]),
    "passes over 1": np.array([0.3, 0.6, 0.9, 1.2, 2.0]),
    "all below 1": np.array([0.3, 0.5, 0.8]),
    "all above 1": np.array([1.2, 1.5, 2.0]),
}
FITTED = {name: fitted(grid) for name, grid in GRIDS.items()}


@pytest.mark.parametrize("name", GRIDS)
@given(h=st.lists(st.floats(0.0, 4.1), min_size=1, max_size=30), seed=st.integers(0, 2**31))
def test_every_curve_rises_with_temperature_within_its_bounds(name: str, h: list[float], seed: int) -> None:
    entropy, grid, rng = np.array(h), GRIDS[name], np.random.default_rng(seed)
    table, slopes = draw_curves(
        FITTED[name], grid, model_entropy=entropy, x=to_x(entropy), u=0 * entropy, vocab_size=VOCAB, rng=rng
    )
    assert (np.diff(table, axis=1) >= -1e-12).all()
    assert (table >= 0).all()
    assert (table <= np.log(VOCAB) + 1e-12).all()
    assert (slopes >= 0).all()
    assert (table[:, grid <= 1] <= entropy[:, None] + 1e-12).all()
    assert (table[:, grid >= 1] >= entropy[:, None] - 1e-12).all()
    if 1.0 in grid:
        np.testing.assert_allclose(table[:, grid == 1.0][:, 0], entropy)


def test_drawn_curves_have_the_means_and_slopes_of_the_recorded_ones() -> None:
    grid = GRIDS["holds 1"]
    rng = np.random.default_rng(1)
    table, slopes = draw_curves(FITTED["holds 1"], grid, model_entropy=H, x=to_x(H), u=U, vocab_size=VOCAB, rng=rng)
    for j, t in enumerate(grid):
        h, v = entropy_varentropy(LOGITS, t)
        assert abs(table[:, j].mean() - h.mean()) < 0.05
        assert abs(slopes[:, j].mean() - v.mean()) < 0.12 * v.mean() + 0.02
    low, high = np.median(H) > H, np.median(H) <= H
    v = entropy_varentropy(LOGITS, 1.0)[1]
    for part in (low, high):  # given the entropy, too
        assert abs(slopes[part, 3].mean() - v[part].mean()) < 0.15 * v[part].mean() + 0.02
