from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from entropic_ctl.ordering import draw_order, share_tokens, wait_bound

rows = st.lists(
    st.tuples(st.integers(-1, 9), st.integers(0, 15), st.sampled_from([-1.0, 0.0, 0.5, np.inf])), min_size=1, max_size=9
)


@given(rows, st.integers(1, 6))
def test_order_equals_a_plain_sort_of_the_stated_rule(columns: list[tuple[int, int, float]], limit: int) -> None:
    step = 10
    last_run, protected, score = (np.array(column) for column in zip(*columns, strict=True))

    def key(i: int) -> tuple[int, float, int]:
        waited = step - 1 - last_run[i]
        if protected[i] > step:
            return (0, protected[i], i)
        return (1, -waited, i) if waited >= limit else (2, -score[i], i)

    order, group = draw_order(
        step,
        last_run=last_run,
        protected=protected > step,
        protected_until=protected,
        arrival_order=np.arange(len(columns)),
        score=score.astype(float),
        wait_limit_steps=limit,
    )
    expected = sorted(range(len(columns)), key=key)
    assert order.tolist() == expected
    assert group.tolist() == [key(i)[0] for i in expected]


@pytest.mark.parametrize(("score", "match"), [([0.0, np.nan], "NaN score"), ([0.0], "wrong shape")])
def test_bad_scores_are_refused(score: list[float], match: str) -> None:
    columns = np.zeros(2, np.int64)
    with pytest.raises(BadInputError, match=match):
        draw_order(
            1,
            last_run=columns,
            protected=columns > 0,
            protected_until=columns,
            arrival_order=columns,
            score=np.array(score),
            wait_limit_steps=3,
        )


@given(
    st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=8),
    st.integers(0, 60),
    st.integers(1, 20),
)
def test_token_shares(rows_: list[tuple[int, bool]], spare: int, chunk: int) -> None:
    need = np.array([row[0] for row in rows_])
    first = np.array([row[1] for row in rows_])
    budget = int(first.sum()) + spare
    n = share_tokens(need, first, budget, chunk)
    assert n.sum() == min(budget, int(np.minimum(need, chunk).sum()))  # nothing wasted, nothing exceeded
    assert (n[first] >= 1).all()
    assert (n <= np.minimum(need, chunk)).all()
    short = np.flatnonzero(n < np.minimum(need, chunk))
    if short.size:  # in order: behind a row that got less than it wanted, only the guaranteed tokens
        assert (n[short[0] + 1 :] == first[short[0] + 1 :]).all()


def test_wait_bound() -> None:
    assert wait_bound(10, 4, 200, 8) == 200 + 3 * 8
