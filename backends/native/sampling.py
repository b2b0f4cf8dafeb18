"""Moments and draws over the vocabulary in C++: same signatures as the torch reference, few passes over the logits.

Passes over a row of n logits: one for the maximum of each block of 1,024, in the view and again in the draw, whose rows
may be others or truncated; one per temperature asked for (entropy and varentropy together); one for the draw, in which
blocks that cannot win are not read. A row that asks for the same
temperature again is not read at all, and once the temperature is low enough that half of the logits are without effect,
a copy of the others is read instead:

    |dH|, |dV| <= n e^-C (C + ln n + 2)^2   if tokens with (z - max z) / T < -C are left out,

since each weighs at most e^-C against at least 1, and x e^x and x^2 e^x fall in |x| there. C is the smallest with this
bound at most 1e-7 (35.9 at n = 151,936, 34.6 at 49,152). It helps cold rows only: at T = 1 real logits lie within C of
their maximum, and their tail matters (T = 1, 49,152 tokens 20 below the maximum: 0.002 nats).

Accuracy against float64: entropy within 1e-5 nats, varentropy within 1e-4 of itself plus 1e-5 (tested).
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.native.build import library
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray

__all__ = ["NativeLogitView", "choose", "reach"]

_BLOCK = 1024  # kBlock of sampling.cpp


@functools.cache
def reach(n: int, tolerance: float = 1e-7) -> float:
    """Return C: leaving out tokens with (z - max z) / T < -C moves H and V by at most ``tolerance``; see the module."""
    c = 1.0
    for _ in range(50):
        c = math.log(n / tolerance) + 2 * math.log(c + math.log(n) + 2)
    return c


def _rows(logits: Tensor) -> Tensor:
    if logits.device.type != "cpu" or logits.ndim != 2 or logits.shape[1] < 1:
        raise BadInputError(
            "not rows of logits on the CPU",
            field="logits",
            value=(str(logits.device), tuple(logits.shape)),
            allowed="a CPU tensor of shape (M, n), n >= 1",
        )
    z = logits.detach().float()
    return z if z.stride(1) == 1 else z.contiguous()


@functools.cache
def _kernels() -> ctypes.CDLL:
    kernels, at, size, threads = library(), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    rows = [at, size, size, size]
    kernels.entropic_moments.argtypes = [*rows, *[at] * 4, ctypes.c_double, at, at, threads]
    kernels.entropic_choose.argtypes = [*rows, *[at] * 4, threads]
    return kernels


def _place(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _described(z: Tensor) -> tuple[int, int, int, int]:
    """Return where rows of logits lie, their number, length and stride."""
    return z.data_ptr(), *z.shape, z.stride(0)


class _Moments:
    """Entropies of rows of logits at any temperature, with what the kernel remembers between calls."""

    def __init__(self, z: Tensor) -> None:
        rows, n = z.shape
        self._state = np.full((rows, 6), np.nan)
        self._copies = torch.empty((rows, n), dtype=torch.float32)  # touched only where a row is cold
        self._counts = np.empty((rows, -(-n // _BLOCK)), np.int32)
        self._z, self._rows, self._reach = z, _described(z), reach(n)

    def at(self, temperature: FloatArray) -> tuple[FloatArray, FloatArray]:
        rows = self._z.shape[0]
        t, entropy, varentropy = np.full(rows, temperature, np.float64), np.empty(rows), np.empty(rows)
        _kernels().entropic_moments(
            *self._rows, _place(t), _place(self._state), self._copies.data_ptr(),
            _place(self._counts), self._reach, _place(entropy), _place(varentropy), torch.get_num_threads(),
        )  # fmt: skip
        return entropy, varentropy


class NativeLogitView:
    """This step's distributions as the temperature law sees them, in C++ on the CPU; results are NumPy float64.

    A row's results depend on its logits and on the temperatures it was asked for, not on batch or threads.

    Parameters
    ----------
    raw : Tensor, any float dtype, shape (M, n)
        The model's logits, on the CPU: model entropy is taken from these.
    processed : Tensor, shape (M, n), optional
        The logits after penalties and masks: the tempered entropy is taken from these.

    Raises
    ------
    BadInputError
        If the logits are not rows on the CPU.
    NativeUnavailableError
        If the kernels cannot be built.
    """

    def __init__(self, raw: Tensor, processed: Tensor | None = None) -> None:
        own = _Moments(_rows(raw))
        self._processed = own if processed is None or processed is raw else _Moments(_rows(processed))
        self._model_entropy = own.at(np.ones(raw.shape[0]))[0]

    @property
    def model_entropy(self) -> FloatArray:
        """Entropy of the raw logits at temperature 1, (M,), nats; NaN where the support is empty."""
        return self._model_entropy

    def at(self, temperature: Any) -> tuple[Any, Any]:
        """Return (entropy, varentropy) of the processed logits over ``temperature`` (M,), in its own array type."""
        if isinstance(temperature, Tensor):
            found = self._processed.at(temperature.detach().double().cpu().numpy())
            return torch.from_numpy(found[0]), torch.from_numpy(found[1])
        return self._processed.at(temperature)


def choose(logits: Tensor, temperature: Tensor, seed: Sequence[int], index: Sequence[int]) -> Tensor:
    """Draw one token per row; see :func:`backends.gumbel.choose`, which it equals up to ties within rounding."""
    z = _rows(logits)
    t = np.ascontiguousarray(temperature.double().numpy())
    seeds, steps = np.array(seed, np.int64), np.array(index, np.int64)
    tokens = torch.empty(z.shape[0], dtype=torch.int64)
    _kernels().entropic_choose(
        *_described(z), _place(t), _place(seeds), _place(steps), tokens.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return tokens
