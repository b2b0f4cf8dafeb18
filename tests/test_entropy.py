from __future__ import annotations

import math
import warnings
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from entropic_ctl.entropy import ArrayLogitView, entropy_varentropy
from entropic_ctl.errors import BadInputError

torch = pytest.importorskip("torch")

LOGITS = hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-60, 60))
TEMPERATURES = st.floats(0.05, 20.0)


def exact(logits: Any, T: float = 1.0) -> tuple[float, float]:
    """H and V at 60 digits."""
    with mpmath.workdps(60):
        z = [mpmath.mpf(float(x)) / mpmath.mpf(T) for x in logits if x != -math.inf]
        top = max(z)
        w = [mpmath.exp(x - top) for x in z]
        total = mpmath.fsum(w)
        lp = [x - top - mpmath.log(total) for x in z]
        H = -mpmath.fsum(a / total * b for a, b in zip(w, lp, strict=True))
        V = mpmath.fsum(a / total * (b + H) ** 2 for a, b in zip(w, lp, strict=True))
        return float(H), float(V)


@given(LOGITS, TEMPERATURES)
def test_agrees_with_sixty_digits(z: np.ndarray[Any, Any], T: float) -> None:
    H, V = entropy_varentropy(z, T)
    exact_H, exact_V = exact(z, T)
    np.testing.assert_allclose(H, exact_H, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(V, exact_V, rtol=1e-11, atol=1e-14)
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.float64, 1e-13)):
        t = torch.tensor(z, dtype=dtype)
        ours = entropy_varentropy(t, T)
        theirs = exact(t.double().numpy(), T)
        for value, right in zip(ours, theirs, strict=True):
            assert float(value) == pytest.approx(right, rel=tolerance, abs=tolerance)


@given(LOGITS, st.floats(-1e3, 1e3), st.randoms(use_true_random=False))
def test_shift_and_order_do_not_matter_and_bounds_hold(z: np.ndarray[Any, Any], shift: float, random: Any) -> None:
    order = list(range(len(z)))
    random.shuffle(order)
    H, V = entropy_varentropy(z)
    H2, V2 = entropy_varentropy(z[order] + shift)
    np.testing.assert_allclose((H2, V2), (H, V), atol=1e-9)
    assert 0 <= H <= math.log(len(z)) + 1e-12
    assert 0 <= V <= 0.25 * math.log(max(len(z) - 1, 1)) ** 2 + 1 + 1e-9


@given(hnp.arrays(np.float64, st.integers(2, 20), elements=st.floats(-20, 20)), st.floats(-1.5, 1.5))
def test_varentropy_is_the_slope_in_log_temperature(z: np.ndarray[Any, Any], u: float) -> None:
    """dH/du = V, u = ln T: the plant gain of the thermostat."""
    h = 1e-5
    ends = entropy_varentropy(np.stack([z, z]), np.exp(np.array([u - h, u + h])))[0]
    assert (ends[1] - ends[0]) / (2 * h) == pytest.approx(float(entropy_varentropy(z, math.exp(u))[1]), abs=1e-5)


def test_e3_the_two_measuring_points() -> None:
    """E3: the model entropy ignores the temperature and the processing, the tempered one sees both."""
    z = np.array([[2.0, 1.0, 0.0]])
    view = ArrayLogitView(z)
    assert view.at(np.array([0.5]))[0] == pytest.approx(0.44105744, abs=1e-8)  # the case's 0.441056 is cut, not rounded
    assert view.at(np.array([1.0]))[0] == pytest.approx(0.832396, abs=1e-6)
    assert view.model_entropy == pytest.approx(0.832396, abs=1e-6)
    masked = ArrayLogitView(z, np.array([[2.0, -np.inf, 0.0]]))
    assert masked.model_entropy == pytest.approx(0.832396, abs=1e-6)
    assert masked.at(np.array([1.0]))[0] == pytest.approx(exact([2.0, 0.0])[0])


def test_e4_equal_bfloat16_logits() -> None:
    """E4: 16-bit input, float32 inside."""
    H, V = entropy_varentropy(torch.full((32_000,), 3.1, dtype=torch.bfloat16))
    assert float(H) == pytest.approx(10.373491, abs=1e-4)
    assert H.dtype == torch.float32
    assert float(V) == pytest.approx(0.0, abs=1e-6)
    assert entropy_varentropy(np.zeros(32_000, np.float16))[0].dtype == np.float64


@pytest.mark.parametrize("make", [lambda z: np.array(z, np.float16), lambda z: torch.tensor(z, dtype=torch.float16)])
@pytest.mark.parametrize("T", [1e-3, 1e-4, 1e-5, 1e-6, 1e-12, 1e-310, 0.0])
def test_e8_tiny_temperatures(make: Any, T: float) -> None:
    """E8: shifted before the division, so the overflow band above the greedy cut-off gives the greedy limit."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        H, V = entropy_varentropy(make([11.0625, 2.875, -1.9463]), T)
        tied, _ = entropy_varentropy(make([3.0, -1.0, 3.0, 3.0]), T)
    assert float(H) == 0.0
    assert float(V) == 0.0
    assert float(tied) == pytest.approx(math.log(3), abs=1e-6)


def test_temperature_may_differ_by_row_and_be_extreme() -> None:
    z = np.tile(np.array([2.0, 1.0, 0.0]), (5, 1))
    H, V = entropy_varentropy(z, np.array([0.0, 0.5, 1.0, 1e300, np.inf]))
    np.testing.assert_allclose(H, [0.0, 0.441057, 0.832396, math.log(3), math.log(3)], atol=1e-6)
    assert np.isfinite(V).all()
    assert np.isnan(entropy_varentropy(z[:2], np.array([-1.0, np.nan]))).all()


def test_e12_forbidden_tokens_and_gradients() -> None:
    """E12: -inf and the largest float16 logits; the gradient is finite and is -p (ln p + H)."""
    assert float(entropy_varentropy(np.array([0.0, 0.0, -np.inf]))[0]) == pytest.approx(0.693147, abs=1e-6)
    assert float(entropy_varentropy(np.array([65504.0, -65504.0], np.float16))[0]) == 0.0
    assert float(entropy_varentropy(torch.tensor([0.0, 0.0, -math.inf]))[0]) == pytest.approx(0.693147, abs=1e-6)
    assert float(entropy_varentropy(torch.tensor([65504.0, -65504.0], dtype=torch.float16))[0]) == 0.0
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for values in ([0.0, 0.0, -math.inf], [65504.0, -65504.0], [1.5, -0.5, 0.25, -math.inf]):
            z = torch.tensor(values, dtype=dtype, requires_grad=True)
            H, V = entropy_varentropy(z)
            (H + V).backward()
            assert torch.isfinite(z.grad).all()
    z = torch.tensor([1.5, -0.5, 0.25, -math.inf], dtype=torch.float64, requires_grad=True)
    entropy_varentropy(z)[0].backward()
    p = torch.softmax(z.detach(), -1)
    H = entropy_varentropy(z.detach())[0]
    expected = torch.where(p > 0, -p * (torch.log(p) + H), 0.0)
    np.testing.assert_allclose(z.grad.numpy(), expected.numpy(), atol=1e-12)


def test_empty_support_and_nan_are_explicit_and_stay_in_their_row() -> None:
    rows = [[-math.inf] * 3, [0.0, 1.0, 2.0], [math.nan, 0.0, 0.0], [math.inf, 0.0, 0.0]]
    for z in (np.array(rows), torch.tensor(rows)):
        H, V = entropy_varentropy(z)
        assert [bool(x) for x in np.isnan(np.asarray(H))] == [True, False, True, True]
        assert float(H[1]) == pytest.approx(0.832396, abs=1e-6)
        assert math.isfinite(float(V[1]))
        view = ArrayLogitView(z)
        assert [bool(x) for x in np.isnan(np.asarray(view.model_entropy))] == [True, False, True, True]


@pytest.mark.parametrize("n", [2, 1000, 49_152, 151_936])
def test_numpy_and_torch_agree_on_real_sizes(n: int) -> None:
    z = np.random.default_rng(n).normal(size=(2, n)) * np.array([[1.0], [6.0]])
    for T in (0.4, 1.0, 1.7):
        ours, theirs = entropy_varentropy(z, T), entropy_varentropy(torch.tensor(z, dtype=torch.float32), T)
        np.testing.assert_allclose(theirs[0].numpy(), ours[0], atol=1e-5)
        np.testing.assert_allclose(theirs[1].numpy(), ours[1], atol=5e-5)


def test_shapes() -> None:
    H, V = entropy_varentropy(np.zeros((2, 3, 4)), np.ones((3,)))
    assert H.shape == V.shape == (2, 3)
    assert entropy_varentropy(np.zeros((0, 4)))[0].shape == (0,)
    assert entropy_varentropy(torch.zeros((0, 4)), torch.ones(0))[0].shape == (0,)
    for bad in (np.zeros((2, 0)), np.float64(1.0)):
        with pytest.raises(BadInputError, match="no vocabulary axis"):
            entropy_varentropy(bad)
