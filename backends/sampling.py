"""Choose the next token of each row: penalties and masks, temperature, truncation, a seeded draw.

Order inside a step: raw logits -> model entropy -> penalties and masks -> tempered entropy and the temperature law ->
divide by T -> top-k, top-p, min-p -> draw. Greedy is a mode of its own (argmax after penalties and masks); no
temperature enters it.

The draw is Gumbel-max with noise that is a pure function of (request seed, index of the new token, token id): see
:mod:`backends.gumbel`, the specification for every kernel. So batch composition, order, prefill chunks, preemption and
drafts cannot change a sampled text, and CPU and GPU draw the same token up to ties within rounding.

Three kernels share one signature each: moments of a step (:class:`TorchLogitView`, the reference, and the C++
:class:`backends.native.sampling.NativeLogitView`) and the draw (:func:`backends.gumbel.choose`, the reference, and
:func:`backends.native.sampling.choose`; on a GPU :func:`backends.triton.sampling.choose`). :func:`kernels` picks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backends import gumbel
from backends import triton as gpu
from backends.native import reason_unavailable
from backends.native import sampling as native
from entropic_ctl import fields
from entropic_ctl.entropy import moments, shifted
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, LogitView

__all__ = ["Kernels", "SamplingParams", "TorchLogitView", "kernels", "process", "row_maxima", "sample", "to_host"]

Choose = Callable[[Tensor, Tensor, Sequence[int], Sequence[int]], Tensor]
"""``choose(logits, temperature, seed, index)``: one token per row, int64 (M,); see :func:`backends.gumbel.choose`."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Parameters
    ----------
    max_new_tokens : int
        Most tokens to generate.
    seed : int
        Key of the request's random numbers.
    greedy : bool
        Take the most likely token; no temperature law runs.
    top_k : int
        Keep the k most likely tokens (ties: the lower id); 0 keeps all.
    top_p : float
        Keep the smallest set of most likely tokens with at least this mass, after top-k.
    min_p : float
        Drop tokens less likely than this times the most likely one.
    repetition_penalty : float
        Logits of tokens already in prompt or text are divided by it if positive, multiplied if negative; 1 is off.
    stop : tuple of str
        Strings that end the text (they are not part of it).
    allowed : tuple of int, optional
        The only tokens that may be generated.
    """

    max_new_tokens: int = fields.integer(64, 1, 2**31 - 1, "most tokens to generate")
    seed: int = fields.integer(0, 0, 2**63 - 1, "key of the request's random numbers")
    greedy: bool = fields.flag(False, "take the most likely token")
    top_k: int = fields.integer(0, 0, 2**31 - 1, "0 keeps all")
    top_p: float = fields.number(1.0, 0.0, 1.0, "nucleus mass", open_lo=True)
    min_p: float = fields.number(0.0, 0.0, 1.0, "share of the most likely token's probability")
    repetition_penalty: float = fields.number(1.0, 0.01, 100.0, "1 is off")
    stop: tuple[str, ...] = ()
    allowed: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        fields.check(self)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(item, str) and item for item in stop):
            raise BadInputError("stop strings", field="stop", value=self.stop, allowed="non-empty strings")
        object.__setattr__(self, "stop", stop)
        if self.allowed is not None:
            object.__setattr__(self, "allowed", tuple(int(token) for token in self.allowed))
            if not self.allowed:
                raise BadInputError("no token may be generated", field="allowed", allowed="at least one, or None")

    @property
    def plain(self) -> bool:
        """True if the logits need no penalty and no mask."""
        return self.repetition_penalty == 1.0 and self.allowed is None

    @property
    def truncates(self) -> bool:
        """True if top-k, top-p or min-p can drop a token."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def process(logits: Tensor, params: Sequence[SamplingParams], seen: Sequence[Any]) -> Tensor:
    """Apply penalties and masks.

    Parameters
    ----------
    logits : Tensor, float32, shape (M, n)
        Raw logits; not modified.
    params : sequence of SamplingParams, length M
    seen : sequence of integer array-likes, length M
        Token ids in prompt and text of each row (read only where a penalty applies).

    Returns
    -------
    Tensor, float32, shape (M, n)
        ``logits`` itself when no row needs any processing.
    """
    if all(p.plain for p in params):
        return logits
    out = logits.clone()
    for row, p in enumerate(params):
        if p.repetition_penalty != 1.0:
            ids = torch.as_tensor(np.unique(np.asarray(seen[row], np.int64)), device=out.device)
            values = out[row, ids]
            out[row, ids] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        if p.allowed is not None:
            mask = torch.ones(out.shape[1], dtype=torch.bool, device=out.device)
            mask[torch.as_tensor(p.allowed, dtype=torch.long, device=out.device)] = False
            out[row].masked_fill_(mask, -math.inf)
    return out


class TorchLogitView:
    """This step's distributions as the temperature law sees them (``signals.LogitView`` over torch logits).

    Parameters
    ----------
    raw : Tensor, any float dtype, shape (M, n)
        The model's logits: model entropy is taken from these.
    processed : Tensor, shape (M, n), optional
        The logits after penalties and masks: the tempered entropy is taken from these.
    """

    def __init__(self, raw: Tensor, processed: Tensor | None = None) -> None:
        shift = shifted(raw)
        self._processed = shift if processed is None or processed is raw else shifted(processed)
        self._model_entropy = moments(shift)[0]

    @property
    def model_entropy(self) -> Tensor:
        """Entropy of the raw logits at temperature 1, (M,) on their device, nats; NaN where the support is empty."""
        return self._model_entropy

    def at(self, temperature: Any) -> tuple[Any, Any]:
        """Return (entropy, varentropy) of the processed logits over ``temperature`` (M,).

        NumPy temperatures give NumPy float64 results, torch temperatures torch results.
        """
        on_device = isinstance(temperature, Tensor)
        t = torch.as_tensor(temperature, dtype=self._processed.dtype, device=self._processed.device)
        entropy, varentropy = moments(self._processed, t)
        return (entropy, varentropy) if on_device else (to_host(entropy), to_host(varentropy))


def row_maxima(logits: Tensor) -> npt.NDArray[np.float32]:
    """Return the largest logit of each row, NaN where one is NaN, float32 (M,).

    On the CPU by NumPy: its one thread is done before PyTorch's are awake.
    """
    if logits.device.type == "cpu":
        return np.asarray(logits.detach().float().numpy().max(axis=-1, initial=-np.inf))
    return np.asarray(logits.amax(dim=-1).float().cpu().numpy())


def to_host(values: Tensor) -> FloatArray:
    """Return a tensor as a float64 NumPy array."""
    return values.to(device="cpu", dtype=torch.float64).numpy()


class Kernels(NamedTuple):
    """How a step is looked at and drawn from.

    Parameters
    ----------
    view : callable(raw, processed=None)
        Makes the ``LogitView`` of a step.
    choose : callable(logits, temperature, seed, index)
        Draws.
    """

    view: Callable[..., LogitView]
    choose: Choose


def kernels(name: str = "auto", device: torch.device | str = "cpu") -> Kernels:
    """Return the kernels of that name.

    Parameters
    ----------
    name : str
        ``torch`` (the reference, any device), ``native`` (C++, CPU), ``triton`` (GPU; moments by ``torch``), or
        ``auto``: the kernels of the device where they can run.
    device : torch.device
        Where the logits are.

    Raises
    ------
    BadInputError
        If the name is unknown, or kernels are asked for where they cannot run.
    """
    if name not in ("auto", "native", "triton", "torch"):
        raise BadInputError("no such kernels", field="kernels", value=name, allowed="auto, native, triton, torch")
    on_cpu = torch.device(device).type == "cpu"
    wanted = name if name != "auto" else "native" if on_cpu else "triton"
    why = None
    if wanted == "native":
        why = reason_unavailable() if on_cpu else f"the logits are on {device}"
    elif wanted == "triton":
        why = f"the logits are on {device}" if on_cpu and not gpu.interpreted() else gpu.reason_unavailable()
    if name != "auto" and why is not None:
        raise BadInputError(why, field="kernels", value=name, allowed="torch")
    if wanted == "torch" or why is not None:
        return Kernels(TorchLogitView, gumbel.choose)
    if wanted == "triton":
        from backends.triton.sampling import choose

        return Kernels(TorchLogitView, choose)
    return Kernels(native.NativeLogitView, native.choose)


def sample(
    logits: Tensor,
    temperature: FloatArray,
    greedy: np.ndarray[Any, Any],
    params: Sequence[SamplingParams],
    index: Sequence[int],
    choose: Choose = gumbel.choose,
    *,
    alive: npt.NDArray[np.bool_] | None = None,
) -> np.ndarray[Any, Any]:
    """Draw one token per row by Gumbel-max, each row on its own.

    Parameters
    ----------
    logits : Tensor, float32, shape (M, n)
        Processed logits; every row that is ``alive`` has at least one finite entry and no NaN.
    temperature : float64, shape (M,)
        Read only where ``greedy`` is False; any non-negative number, 0 included (the limit: the most likely token).
    greedy : bool, shape (M,)
    params : sequence of SamplingParams, length M
    index : sequence of int, length M
        How many tokens the request has generated before this one.
    choose : callable
        The kernel that draws.
    alive : bool, shape (M,), optional
        Rows to draw; default: all.

    Returns
    -------
    int64, shape (M,)
        -1 for rows that are not drawn.
    """
    tokens = np.full(logits.shape[0], -1, np.int64)
    drawn = np.ones(logits.shape[0], np.bool_) if alive is None else alive
    sure = drawn & (np.asarray(greedy, np.bool_) | (np.asarray(temperature) == 0.0))
    if sure.any():
        rows = np.flatnonzero(sure)
        chosen = logits if rows.size == sure.size else logits[torch.as_tensor(rows, device=logits.device)]
        tokens[rows] = torch.argmax(chosen, dim=-1).cpu().numpy()
    rows = np.flatnonzero(drawn & ~sure)
    if rows.size == 0:
        return tokens
    chosen = logits if rows.size == sure.size else logits[torch.as_tensor(rows, device=logits.device)]
    if any(params[row].truncates for row in rows):
        chosen = _truncate(chosen, temperature[rows], [params[row] for row in rows])
    t = torch.as_tensor(np.asarray(temperature)[rows], dtype=torch.float64, device=logits.device)
    tokens[rows] = choose(chosen, t, [params[row].seed for row in rows], [index[row] for row in rows]).cpu().numpy()
    return tokens


def _truncate(logits: Tensor, temperature: FloatArray, params: Sequence[SamplingParams]) -> Tensor:
    """Return the logits with those that top-k, then top-p, then min-p drop at ``-inf``."""
    out = logits.clone()
    for row, (t, p) in enumerate(zip(temperature.tolist(), params, strict=True)):
        if p.truncates:
            z = logits[row].double()
            weights = torch.exp((z - z.max()) / t)  # the largest is exactly 1; nothing overflows
            out[row].masked_fill_(~_kept(weights, p), -math.inf)
    return out


def _kept(weights: Tensor, p: SamplingParams) -> Tensor:
    """Return which weights (maximum 1) top-k, then top-p, then min-p keep, bool (n,)."""
    kept = weights >= p.min_p
    if p.top_k > 0 or p.top_p < 1.0:
        ordered, order = torch.sort(weights, descending=True, stable=True)
        if p.top_k > 0:
            ordered = ordered[: p.top_k]
        cumulative = torch.cumsum(ordered, 0)
        count = int((cumulative - ordered < p.top_p * cumulative[-1]).sum())
        among = torch.zeros_like(kept)
        among[order[:count]] = True
        kept = kept & among
    return kept
