from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends import gumbel
from backends.sampling import SamplingParams, TorchLogitView, kernels, process, sample
from entropic_ctl.entropy import entropy_varentropy
from entropic_ctl.errors import BadInputError

PLAIN = SamplingParams()


def draw(logits: list[float], t: float, n: int = 1, **params: object) -> list[int]:
    z = torch.tensor([logits], dtype=torch.float32)
    p = SamplingParams(**params)
    return [int(sample(z, np.array([t]), np.array([p.greedy]), [p], [i])[0]) for i in range(n)]


def test_e6_greedy_and_sampled_rows_in_one_batch() -> None:
    z = torch.tensor([[1.0, -math.inf, 3.0], [0.0, 0.0, 0.0]])
    params, greedy = [SamplingParams(greedy=True), PLAIN], np.array([True, False])
    counts = np.zeros(3)
    for i in range(3000):
        tokens = sample(z, np.array([0.0, 1.0]), greedy, params, [i, i])
        assert tokens[0] == 2
        counts[tokens[1]] += 1
    chi2 = ((counts - 1000) ** 2 / 1000).sum()
    assert chi2 < 13.8  # 0.1% point of chi-square with 2 degrees of freedom, on fixed random numbers
    view = TorchLogitView(z)
    assert torch.isfinite(view.model_entropy).all()
    assert np.isfinite(view.at(np.array([1.0, 1.0]))).all()


def test_e7_empty_support_is_flagged_and_leaves_other_rows_alone() -> None:
    view = TorchLogitView(torch.tensor([[-math.inf, -math.inf], [0.0, 1.0]]))
    assert torch.isnan(view.model_entropy[0])
    assert float(view.model_entropy[1]) == pytest.approx(entropy_varentropy(np.array([0.0, 1.0]))[0], abs=1e-6)


@pytest.mark.parametrize("t", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-310, 0.0])
def test_e8_tiny_temperatures(t: float) -> None:
    logits = torch.tensor([[11.0625, 2.875, -1.9463]], dtype=torch.float16).float()
    for i in range(20):
        assert sample(logits, np.array([t]), np.array([False]), [PLAIN], [i])[0] == 0
    entropy, varentropy = TorchLogitView(logits).at(np.array([t]))
    assert entropy[0] == pytest.approx(0.0, abs=1e-6)
    assert varentropy[0] == pytest.approx(0.0, abs=1e-6)


@given(st.permutations(range(4)), st.integers(1, 4))
def test_e9_tokens_do_not_depend_on_batch_or_order(order: list[int], size: int) -> None:
    z = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (4, 500)).astype(np.float32))
    params = [
        SamplingParams(seed=s, top_p=p, top_k=k) for s, p, k in ((42, 1.0, 0), (0, 0.9, 0), (7, 1.0, 5), (42, 0.5, 3))
    ]
    rows = list(order[:size])
    alone = [sample(z[r : r + 1], np.array([0.8]), np.array([False]), [params[r]], [3])[0] for r in rows]
    greedy = np.zeros(size, bool)
    together = sample(z[rows], np.full(size, 0.8), greedy, [params[r] for r in rows], [3] * size)
    assert together.tolist() == alone


def test_sampled_frequencies_match_the_softmax() -> None:
    logits, t, n = [1.0, 0.0, -1.0, -math.inf], 0.7, 4000
    p = np.exp(np.array(logits) / t)
    p /= p.sum()
    counts = np.bincount(draw(logits, t, n), minlength=4)
    assert counts[3] == 0
    assert ((counts[:3] - n * p[:3]) ** 2 / (n * p[:3])).sum() < 13.8


def test_kernels_are_named_and_never_swapped_silently() -> None:
    assert kernels("torch").view is TorchLogitView
    assert kernels("auto", "meta") == kernels("torch")
    for name, device in (("native", "meta"), ("cuda", "cpu")):
        with pytest.raises(BadInputError, match="kernels"):
            kernels(name, device)


def test_truncation_and_temperature_zero_go_to_the_kernel_as_documented() -> None:
    z = torch.tensor([[0.0, 1.0, 3.0, 2.0]] * 4)
    seen: list[torch.Tensor] = []

    def choose(logits: torch.Tensor, t: torch.Tensor, seed: object, index: object) -> torch.Tensor:
        seen.extend([logits, t, torch.tensor(seed), torch.tensor(index)])
        return gumbel.choose(logits, t, seed, index)  # type: ignore[arg-type]

    params = [SamplingParams(seed=s, top_k=k) for s, k in ((5, 0), (6, 2), (7, 0), (8, 1))]
    tokens = sample(
        z, np.array([0.0, 0.7, 0.5, 0.9]), np.array([False, False, True, False]), params, [1, 2, 3, 4], choose
    )
    assert tokens[[0, 2, 3]].tolist() == [2, 2, 2]
    assert seen[0].tolist() == [[-math.inf, -math.inf, 3.0, 2.0], [-math.inf, -math.inf, 3.0, -math.inf]]
    assert (seen[1].tolist(), seen[2].tolist(), seen[3].tolist()) == ([0.7, 0.9], [6, 8], [2, 4])


@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 100}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # after top-k the first token holds 5/8 > 0.6
        ({"allowed": (2, 3)}, {2, 3}),
    ],
)
def test_truncation_keeps_exactly_these_tokens(params: dict[str, object], support: set[int]) -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.14, 0.06]]))
    p = SamplingParams(**params)
    z = process(logits, [p], [[]])
    seen = {int(sample(z, np.array([1.0]), np.array([False]), [p], [i])[0]) for i in range(300)}
    assert seen == support


def test_top_k_breaks_ties_by_the_lower_token() -> None:
    assert set(draw([0.0, 0.0, 0.0, 0.0], 1.0, 100, top_k=2)) == {0, 1}


def test_repetition_penalty_and_masks_leave_raw_logits_alone() -> None:
    raw = torch.tensor([[2.0, -2.0, 1.0]])
    p = SamplingParams(repetition_penalty=2.0)
    out = process(raw, [p], [[0, 1, 1]])
    assert out.tolist() == [[1.0, -4.0, 1.0]]
    assert raw.tolist() == [[2.0, -2.0, 1.0]]
    assert process(raw, [PLAIN], [[0]]) is raw
    view = TorchLogitView(raw, process(raw, [SamplingParams(allowed=(1,))], [[]]))
    assert view.model_entropy[0] > 0.1  # raw
    assert view.at(np.array([1.0]))[0][0] == 0.0  # one allowed token: no uncertainty left


@given(st.integers(2, 200), st.floats(0.05, 5.0), st.integers(0, 10**6))
def test_view_agrees_with_the_host_reference(n: int, t: float, seed: int) -> None:
    z = np.random.default_rng(seed).normal(0, 3, (2, n)).astype(np.float32)
    view, temperature = TorchLogitView(torch.from_numpy(z)), np.array([t, 1.0])
    for got, want in zip(view.at(temperature), entropy_varentropy(z, temperature), strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    on_device = view.at(torch.from_numpy(temperature))
    assert all(isinstance(x, torch.Tensor) for x in on_device)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("seed", -1),
        ("repetition_penalty", 0.0),
        ("top_k", 1.5),
        ("stop", ("",)),
        ("allowed", ()),
    ],
)
def test_bad_sampling_parameters_name_field_and_value(field: str, value: object) -> None:
    with pytest.raises(BadInputError, match=field):
        SamplingParams(**{field: value})
