from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from entropic_ctl import registry
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.scores import entropic_share, mass


def concentrated(peak: float, pages: int, page_tokens: int = 16) -> np.ndarray:
    """Page 0 holds ``peak`` on one token; ``pages`` diffuse ones share the rest evenly."""
    weights = np.full((pages + 1, page_tokens), (1 - peak) / (pages * page_tokens))
    weights[0] = 0.0
    weights[0, 5] = peak
    return weights


def test_both_scores_are_on_offer() -> None:
    assert registry.names("entropic_ctl.pruning.scores") == ("entropic_share", "mass")


def test_a15_mass_on_one_token_ranks_first_by_mass_and_last_by_entropic_share() -> None:
    weights = concentrated(0.99, 9)
    assert int(np.argmax(mass.importance(weights))) == 0
    literal = entropic_share.importance(weights)
    assert int(np.argmin(literal)) == 0
    assert literal[0] == pytest.approx(-0.99 * np.log(0.99))


def test_a15_absolute_threshold_keeps_the_page_by_mass_and_drops_it_by_entropic_share() -> None:
    weights = concentrated(1 - 1e-6, 200)
    assert mass.importance(weights)[0] > 1e-5
    assert entropic_share.importance(weights)[0] < 1e-5


weights = hnp.arrays(np.float64, (5, 4), elements=st.floats(0, 1)).filter(lambda a: a.sum() > 1e-3)


@given(weights)
def test_shares_add_up_to_the_attention_entropy(raw: np.ndarray) -> None:
    a = raw / raw.sum()
    flat = a[a > 0]
    assert entropic_share.importance(a).sum() == pytest.approx(-(flat * np.log(flat)).sum(), abs=1e-12)
    m = mass.importance(a)
    inside = a / np.where(m > 0, m, 1.0)[:, None]
    page_entropy = -(inside * np.log(np.where(inside > 0, inside, 1.0))).sum(axis=1)
    literal = -m * np.log(np.where(m > 0, m, 1.0)) + m * page_entropy
    np.testing.assert_allclose(entropic_share.importance(a), literal, atol=1e-12)


@given(
    hnp.arrays(np.float64, (4, 8), elements=st.floats(-200, 200)),
    hnp.arrays(np.float64, (4, 8), elements=st.floats(-1, 1)),
    st.floats(0, 5),
)
def test_interval_contains_every_log_mass_within_the_error(
    exact: np.ndarray, direction: np.ndarray, error: float
) -> None:
    lower, upper = mass.interval(exact + direction * error * (1 - 1e-9), error)
    true = mass.log_mass(exact)
    assert (lower <= true).all()
    assert (true <= upper).all()


def test_empty_pages_and_unknown_errors() -> None:
    lower, upper = mass.interval([[-np.inf, -np.inf], [0.0, -np.inf]], [1.0, np.inf])
    assert lower[0] == upper[0] == -np.inf
    assert lower[1] == -np.inf
    assert upper[1] == np.inf
    with pytest.raises(BadInputError, match="error"):
        mass.interval([[0.0]], [-1.0])
