from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from schedule_view import view

from entropic_ctl.scheduling.mlfq import Config, FeedbackQueue, build


def levels(config: Config, **columns: object) -> list[int]:
    n = max(np.size(value) for value in columns.values())
    columns = {"prompt_tokens": 0, "prompt_computed": 0, "token_budget": 64} | columns
    return FeedbackQueue(config).level(view(n, **columns)).tolist()


def test_a_level_is_left_when_its_quantum_is_used_up() -> None:
    """b = 4, r = 2: thresholds 4, 12, 28 in steps."""
    config = Config(levels=4, base_steps=4.0, ratio=2.0)
    assert levels(config, generated_tokens=[0, 3, 4, 11, 12, 27, 28, 10**6]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert levels(config, generated_tokens=3, prompt_computed=[0, 63, 64]) == [0, 0, 1]


def test_one_level_is_first_come_first_served() -> None:
    assert levels(Config(levels=1), generated_tokens=[0, 10**6]) == [0, 0]


def test_skip_join_enters_where_the_prefill_fits() -> None:
    """Prompts of 1, 4, 5, 8, 9 and 100 steps; quanta 4, 8, 16: the last level takes whatever does not fit."""
    prompt = np.array([1, 4, 5, 8, 9, 17, 100]) * 64
    config = Config(levels=4, base_steps=4.0, ratio=2.0, entry="skip")
    assert levels(config, generated_tokens=0, prompt_tokens=prompt) == [0, 0, 1, 1, 2, 3, 3]
    top = Config(levels=4, base_steps=4.0, ratio=2.0)
    assert levels(top, generated_tokens=0, prompt_tokens=prompt) == [0] * 7
    served = levels(config, generated_tokens=[0, 11, 12], prompt_tokens=5 * 64)
    assert served == [1, 1, 2]  # in level 1 until the quanta of levels 0 and 1 are used up


def test_a_boost_forgets_what_was_attained_once_per_period() -> None:
    law = FeedbackQueue(Config(levels=4, base_steps=4.0, boost_s=10.0, entry="skip"))

    def at(now_s: float, generated: list[int], order: list[int]) -> list[int]:
        columns = {"generated_tokens": generated, "arrival_order": order, "prompt_tokens": 0, "prompt_computed": 0}
        return law.level(view(len(order), now_s=now_s, **columns)).tolist()

    assert at(9.9, [30, 5], [0, 1]) == [3, 1]
    assert at(12.0, [30, 6], [0, 1]) == [0, 0]
    assert at(13.0, [33, 7, 8], [0, 1, 2]) == [0, 0, 1]  # request 2 came after the boost
    assert at(19.0, [34, 9], [0, 2]) == [1, 1]  # 34 - 30 = 4
    assert at(20.0, [34, 9], [0, 2]) == [0, 0]
    assert at(25.0, [9], [2]) == [0]
    assert law._boosted.tolist() == [2]  # the state of those that left is gone


@given(st.lists(st.integers(0, 500), min_size=2, max_size=8), st.floats(0.5, 40.0), st.floats(1.0, 4.0))
def test_levels_rise_with_attained_service(generated: list[int], base: float, ratio: float) -> None:
    got = levels(Config(levels=5, base_steps=base, ratio=ratio), generated_tokens=np.sort(generated))
    assert got == sorted(got)
    assert set(got) <= set(range(5))


def test_the_score_is_minus_the_level() -> None:
    columns = {"generated_tokens": [0, 9], "prompt_tokens": 0, "prompt_computed": 0}
    assert build(Config(base_steps=4.0)).score(view(2, **columns)).tolist() == [0.0, -1.0]
