"""Metrics of the quality harness on closed forms: likeness of texts, self-repetition, bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from backends.eval_intervals import block_statistic, item_statistic, mean_of
from backends.eval_repetition import distinct, longest_repeat, repetition
from entropic_ctl.errors import BadInputError

TEXTS = st.text(alphabet="ab c.é日", max_size=30)
TOKENS = st.lists(st.integers(0, 3), max_size=24)


class TestOverlap:
    @pytest.fixture(autouse=True)
    def packages(self) -> None:
        pytest.importorskip("rouge_score")
        pytest.importorskip("sacrebleu")

    @given(TEXTS)
    def test_a_text_is_exactly_like_itself(self, text: str) -> None:
        from backends.eval_overlap import rouge_l, sentence_bleu

        assert rouge_l(text, text) == 1.0
        assert sentence_bleu(text, text) == pytest.approx(100.0)

    def test_rouge_is_the_f_measure_of_the_longest_common_subsequence(self) -> None:
        from backends.eval_overlap import rouge_l

        # common: "the ship sails", 3 tokens; precision 3/4, recall 3/5
        expected = 2 * (3 / 4) * (3 / 5) / (3 / 4 + 3 / 5)
        assert rouge_l("the ship now sails", "see: the ship sails".replace(":", " -")) == pytest.approx(expected)
        assert rouge_l("a b", "c d") == 0.0

    def test_other_scripts_count(self) -> None:
        from backends.eval_overlap import rouge_l

        assert rouge_l("日 本", "日 語") == pytest.approx(0.5)

    @given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5))
    def test_a_corpus_of_equal_texts_scores_100_and_others_as_sacrebleu_says(
        self, pairs: list[tuple[str, str]]
    ) -> None:
        from sacrebleu.metrics import BLEU

        from backends.eval_overlap import corpus_bleu

        texts, others = (list(side) for side in zip(*pairs, strict=True))
        every = np.arange(len(pairs))
        assert corpus_bleu(texts, texts)(every) == pytest.approx(100.0)
        direct = BLEU(effective_order=True).corpus_score(texts, [others])
        if direct.sys_len or direct.ref_len:
            assert corpus_bleu(texts, others)(every) == pytest.approx(direct.score)

    @given(TOKENS, TOKENS)
    def test_first_difference(self, a: list[int], b: list[int]) -> None:
        from backends.eval_overlap import first_difference

        at = first_difference(a, b)
        if at < 0:
            assert a == b
        else:
            assert a[:at] == b[:at]
            assert a[at : at + 1] != b[at : at + 1]


def test_repetition_on_closed_forms() -> None:
    once, same = list(range(10)), [7] * 10
    assert repetition(once) == {"distinct_1": 1.0, "distinct_2": 1.0, "repeated_4": 0.0, "longest_repeat": 0.0}
    expected = {"distinct_1": 0.1, "distinct_2": 1 / 9, "repeated_4": 6 / 7, "longest_repeat": 0.9}
    assert repetition(same) == pytest.approx(expected)
    assert longest_repeat([1, 2, 3, 9, 1, 2, 3, 8]) == 3
    assert np.isnan([distinct([1], 2), repetition([])["longest_repeat"]]).all()


@given(TOKENS)
def test_the_longest_repeat_is_what_trying_every_pair_finds(tokens: list[int]) -> None:
    n = len(tokens)
    lengths = [
        k
        for i in range(n)
        for j in range(i + 1, n)
        for k in range(1, n - j + 1)
        if tokens[i : i + k] == tokens[j : j + k]
    ]
    assert longest_repeat(tokens) == max(lengths, default=0)


@given(st.floats(-5, 5), st.integers(1, 4), st.integers(2, 30), st.integers(1, 40))
def test_constants_have_intervals_of_no_width(value: float, rows: int, width: int, block: int) -> None:
    found = block_statistic(lambda x: x.mean(axis=-1), np.full((rows, width), value), block=block, draws=20)
    assert found.value == pytest.approx(value)
    if rows * (width - min(block, width) + 1) > 1:
        assert found.low == pytest.approx(value)
        assert found.high == pytest.approx(value)
    else:
        assert np.isnan(found.low)


def test_blocks_widen_the_interval_of_correlated_positions() -> None:
    """An AR(1) series with coefficient 0.9: the mean's standard error is sqrt(19) times that of white noise."""
    rng = np.random.default_rng(0)
    series = np.zeros((4, 1000))
    noise = rng.standard_normal(series.shape)
    for t in range(1, 1000):
        series[:, t] = 0.9 * series[:, t - 1] + noise[:, t]

    def width(block: int) -> float:
        found = block_statistic(lambda x: x.mean(axis=-1), series, block=block, draws=400)
        assert found.low < found.value < found.high
        return found.high - found.low

    assert 2.5 < width(50) / width(1) < 5.5


def test_the_item_interval_of_a_mean_covers_as_it_says() -> None:
    """Of 200 samples of 40 normal numbers, about 95% of the intervals hold the mean (percentile: a little fewer)."""
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        values = rng.standard_normal(40)
        found = item_statistic(mean_of(values), 40, draws=300, seed=trial)
        hits += found.low <= 0.0 <= found.high
    assert 176 <= hits <= 198


def test_nothing_to_summarise_is_an_error() -> None:
    with pytest.raises(BadInputError, match="nothing to summarise"):
        block_statistic(lambda x: x.mean(axis=-1), np.empty((0, 4)))
    with pytest.raises(BadInputError, match="block"):
        block_statistic(lambda x: x.mean(axis=-1), np.ones((1, 4)), block=0)
    with pytest.raises(BadInputError, match="no items"):
        item_statistic(lambda index: np.zeros(index.shape[:-1]), 0)
