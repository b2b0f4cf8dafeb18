from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from backends.attention.reference import (  # noqa: E402
    Scoring,
    State,
    attend,
    empty_state,
    merge,
    visible,
    window_pages,
    with_sink,
)

INF = math.inf
UNIT = Scoring(1.0)


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> State:
    s = q.double() @ k.double().transpose(-1, -2)
    if mask is not None:
        s = s.masked_fill(~mask, -INF)
    return State(torch.softmax(s, -1) @ v.double(), torch.logsumexp(s, -1))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a5_merging_states_over_no_tokens() -> None:
    v = torch.tensor([1.0, -2.0])
    empty = State(torch.zeros(2), torch.tensor(-INF))
    full = State(v, torch.tensor(0.7))
    both = merge(empty, empty)
    assert both.lse.item() == -INF
    assert torch.equal(both.out, torch.zeros(2))
    for pair in ((empty, full), (full, empty)):
        got = merge(*pair)
        assert torch.equal(got.out, v)
        assert got.lse.item() == pytest.approx(0.7, abs=1e-7)


def test_a5_attention_over_no_tokens_is_the_empty_state() -> None:
    q, none = random(2, 3, 4), torch.empty(2, 0, 4)
    state = attend(q, none, none, UNIT)
    assert state.out.shape == (2, 3, 4)
    assert not state.out.any()
    assert (state.lse == -INF).all()
    hidden = attend(q, random(2, 5, 4), random(2, 5, 4), UNIT, torch.zeros(3, 5, dtype=torch.bool))
    assert not hidden.out.any()
    assert torch.equal(hidden.lse, empty_state(hidden).lse)


@given(st.integers(0, 2**31 - 1), st.integers(0, 9), st.sampled_from([1.0, 30.0]))
def test_any_split_merges_to_the_whole(seed: int, cut: int, size: float) -> None:
    q, k, v = (random(2, n, 4, seed=seed + i) * size for i, n in enumerate((3, 9, 9)))
    whole = naive(q, k, v)
    got = merge(attend(q, k[:, :cut], v[:, :cut], UNIT), attend(q, k[:, cut:], v[:, cut:], UNIT))
    torch.testing.assert_close(got.out.double(), whole.out, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(got.lse.double(), whole.lse, rtol=1e-5, atol=1e-5)


def test_a7_very_negative_scores_keep_their_softmax() -> None:
    q = torch.tensor([[1.0]])
    k = torch.tensor([[-100000.0], [-100001.0]])
    state = attend(q, k, torch.eye(2), UNIT)
    torch.testing.assert_close(state.out, torch.tensor([[0.731059, 0.268941]]), atol=1e-6, rtol=0)
    assert state.lse.item() == pytest.approx(-100000 + math.log1p(math.exp(-1)), abs=0.01)
    split = merge(attend(q, k[:1], torch.eye(2)[:1], UNIT), attend(q, k[1:], torch.eye(2)[1:], UNIT))
    torch.testing.assert_close(split.out, torch.tensor([[0.731059, 0.268941]]), atol=1e-3, rtol=0)


def test_softcap_bounds_scores_and_is_the_identity_for_small_ones() -> None:
    q, k = torch.tensor([[1.0]]), torch.tensor([[1e6], [0.0]])
    capped = attend(q, k, torch.eye(2), Scoring(1.0, 2.0))
    assert capped.out[0, 0].item() == pytest.approx(1 / (1 + math.exp(-2.0)), rel=1e-6)
    small = attend(random(1, 8) * 0.01, random(5, 8), random(5, 8, seed=1), Scoring(1.0, 1e4))
    plain = attend(random(1, 8) * 0.01, random(5, 8), random(5, 8, seed=1), UNIT)
    torch.testing.assert_close(small.out, plain.out, atol=1e-4, rtol=1e-4)


def test_learned_sink_is_one_more_term_without_a_value() -> None:
    q, k, v = random(2, 1, 4), random(2, 6, 4, seed=1), random(2, 6, 4, seed=2)
    sink = torch.tensor([[0.3], [-INF]])
    got = with_sink(attend(q, k, v, UNIT), sink)
    s = torch.cat([(q @ k.transpose(-1, -2)), sink.unsqueeze(-1)], dim=-1).double()
    expected = torch.softmax(s, -1)[..., :-1] @ v.double()
    torch.testing.assert_close(got.out.double(), expected, atol=1e-6, rtol=1e-5)


def test_a3_window_pages() -> None:
    assert window_pages(200, 64, 16, sink_tokens=4) == [0, 8, 9, 10, 11, 12]


@given(st.integers(1, 300), st.integers(1, 100), st.integers(1, 20), st.integers(0, 40))
def test_window_pages_are_exactly_the_pages_of_visible_tokens(length: int, window: int, page: int, sinks: int) -> None:
    mask = visible(length - 1, 1, torch.device("cpu"), window, sinks)[0]
    seen = sorted({int(i) // page for i in torch.nonzero(mask)})
    assert window_pages(length, window, page, sinks) == seen


def test_visible_is_causal_with_an_offset() -> None:
    expected = [[True, True, True, False], [True, True, True, True]]
    assert visible(2, 2, torch.device("cpu")).tolist() == expected
    assert visible(2, 2, torch.device("cpu"), 2, 0).tolist() == [[False, True, True, False], [False, False, True, True]]
