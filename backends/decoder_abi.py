"""The structs of ``native/src/decoder.h``, filled from tensors.

A struct holds bare addresses: whoever fills one keeps its tensors alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from backends import native
from entropic_ctl.errors import BadInputError

__all__ = ["Layer", "Matrix", "Model", "Step", "address", "linear", "matrix"]

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class Matrix(ctypes.Structure):
    """A row-major weight (rows, depth) and its bias; ``stride`` in elements."""

    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("rows", _INT), ("depth", _INT), ("stride", _INT)]


class Layer(ctypes.Structure):
    """The weights of one layer; a null norm is left out. ``rope`` chooses the angles of the step."""

    _fields_ = [
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *(
            (name, _POINTER)
            for name in ("attention_norm", "q_norm", "k_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
        ),
        ("rope", _INT),
    ]


class Model(ctypes.Structure):
    """A stack of layers, its sizes and its conventions."""

    _fields_ = [
        ("layers", ctypes.POINTER(Layer)),
        ("final_norm", _POINTER),
        ("head", Matrix),
        *(
            (name, _INT)
            for name in ("n_layers", "hidden", "heads", "kv_heads", "head_dim", "rotary", "whole_qk_norm", "exact_rope")
        ),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("norm", "activation", "bf16")),
    ]


class Step(ctypes.Structure):
    """The activations of one forward pass."""

    _fields_ = [
        ("tokens", _INT),
        ("sampled", _INT),
        ("angles", _POINTER),
        ("last", _POINTER),
        ("cos", _POINTER * 2),
        ("sin", _POINTER * 2),
        *((name, _POINTER) for name in ("x", "h", "q", "k", "v", "mlp", "attention", "logits")),
    ]


def address(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a contiguous tensor's first element; None for None."""
    if tensor is None:
        return None
    if not tensor.is_contiguous():
        raise BadInputError("not contiguous", field="tensor", value=tuple(tensor.stride()), allowed="row-major memory")
    return tensor.data_ptr()


def matrix(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
    """Describe a weight (rows, depth) whose rows are contiguous, and its bias (rows,)."""
    rows, depth = weight.shape
    if weight.stride(1) != 1:
        raise BadInputError("rows are not contiguous", field="weight", value=weight.stride(), allowed="(stride, 1)")
    return Matrix(weight.data_ptr(), address(bias), rows, depth, weight.stride(0))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + bias, accumulated in float32; a row's result does not depend on the other rows.

    Parameters
    ----------
    x : tensor, shape (m, depth)
        bfloat16 or float32, contiguous.
    weight : tensor, shape (rows, depth), dtype of ``x``
    bias : tensor, shape (rows,), dtype of ``x``, optional

    Returns
    -------
    float32 tensor, shape (m, rows)
    """
    tensors: Sequence[Any] = (x, weight) if bias is None else (x, weight, bias)
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1 or not dtypes <= {torch.bfloat16, torch.float32}:
        raise BadInputError("dtypes", field="x, weight, bias", value=dtypes, allowed="one of bfloat16, float32")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise BadInputError("shapes", field="x, weight", value=(tuple(x.shape), tuple(weight.shape)))
    out = torch.empty(x.shape[0], weight.shape[0])
    native.library().entropic_linear(
        _POINTER(address(x)),
        _INT(x.shape[0]),
        ctypes.byref(matrix(weight, bias)),
        _POINTER(out.data_ptr()),
        int(x.dtype == torch.bfloat16),
        torch.get_num_threads(),
    )
    return out
