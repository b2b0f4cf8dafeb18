"""The regime-switching autoregression: likelihood against enumeration, monotone EM, recovery of known parameters."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from sim import regimes
from sim.regimes import Regimes

TRUE = Regimes(
    level=np.array([-1.5, 1.2]),
    phi=np.array([0.3, 0.6]),
    text=0.5,
    sigma=np.array([1.0, 0.4]),
    transition=np.array([[0.8, 0.2], [0.1, 0.9]]),
    start=np.array([0.5, 0.5]),
)


def draw(model: Regimes, texts: int, tokens: int, seed: int = 0) -> np.ndarray:
    """The model's definition, one value at a time."""
    rng = np.random.default_rng(seed)
    x = np.empty((texts, tokens))
    for row in x:
        z, state = rng.standard_normal(), None
        row[0] = rng.standard_normal()
        for t in range(1, tokens):
            state = rng.choice(2, p=model.start if state is None else model.transition[state])
            noise = model.sigma[state] * rng.standard_normal()
            row[t] = model.level[state] + model.phi[state] * row[t - 1] + model.text * z + noise
    return x


def test_the_likelihood_is_the_sum_over_every_path_of_regimes() -> None:
    x, length = draw(TRUE, 3, 6), np.array([6, 4, 2])
    z, w = regimes._nodes(TRUE)
    for text, n, got in zip(x, length, regimes.log_likelihood(TRUE, x, length), strict=True):
        total = 0.0
        for node, share in zip(z, w, strict=True):
            for path in itertools.product((0, 1), repeat=n - 1):
                p, before = share, None
                for t, s in enumerate(path, start=1):
                    p *= TRUE.start[s] if before is None else TRUE.transition[before, s]
                    mean = TRUE.level[s] + TRUE.phi[s] * text[t - 1] + TRUE.text * node
                    d = (text[t] - mean) / TRUE.sigma[s]
                    p *= np.exp(-0.5 * d * d) / (np.sqrt(2 * np.pi) * TRUE.sigma[s])
                    before = s
                total += p
        assert got == pytest.approx(np.log(total), abs=1e-10)


def test_expected_counts_are_those_of_every_path() -> None:
    """Posterior transition counts are the derivative of the likelihood in ln P_ij."""
    x, length = draw(TRUE, 2, 6, seed=1), np.array([6, 5])
    _, _, counts, start, _ = regimes._expect(TRUE, x, length)
    assert counts.sum() == pytest.approx((length - 2).sum())
    assert start.sum() == pytest.approx(2)
    for i, j in itertools.product((0, 1), repeat=2):
        step, values = 1e-6, []
        for sign in (1, -1):
            p = TRUE.transition.copy()
            p[i, j] *= np.exp(sign * step)
            values.append(regimes.log_likelihood(dataclasses.replace(TRUE, transition=p), x, length).sum())
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(counts[i, j], abs=1e-5)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_em_never_lowers_the_likelihood(k: int) -> None:
    x = draw(TRUE, 8, 60)
    history = regimes.fit(x, np.full(8, 60), k, iterations=80, tolerance=0.0).log_likelihood
    assert len(history) == 80
    assert (np.diff(history)[regimes._CENTRING :] > -1e-7).all()
    assert history[-1] > history[0] + 1


def test_padding_is_never_read() -> None:
    x, length = draw(TRUE, 5, 40), np.array([40, 10, 25, 3, 40])
    other = np.where(np.arange(40) < length[:, None], x, 99.0)
    a, b = (regimes.fit(values, length, 2, iterations=10) for values in (x, other))
    assert a.log_likelihood == b.log_likelihood


def test_known_parameters_are_found_again() -> None:
    x = draw(TRUE, 60, 120)
    got = regimes.fit(x, np.full(60, 120), 2).regimes
    np.testing.assert_allclose(got.level, TRUE.level, atol=0.3)  # a mean of 60 texts of sd 0.5 / (1 - phi)
    np.testing.assert_allclose(got.phi, TRUE.phi, atol=0.05)
    np.testing.assert_allclose(got.sigma, TRUE.sigma, rtol=0.05)
    assert abs(abs(got.text) - TRUE.text) < 0.12
    np.testing.assert_allclose(got.transition, TRUE.transition, atol=0.03)


def test_a_prior_of_another_level_does_not_hide_the_level_of_the_texts() -> None:
    """Texts all to one side of the pooled fit: the difference belongs into the level, not into the texts' z."""
    low, high = draw(TRUE, 10, 100), draw(TRUE, 10, 100, seed=1) + 2.0
    length = np.full(20, 100)
    pooled = regimes.fit(np.concatenate((low, high)), length, 2, texts_differ=False)
    assert pooled.regimes.text == 0
    fitted = regimes.fit(high, length[:10], 2, prior=pooled)
    assert abs(fitted.text_effect.mean()) < 0.3
