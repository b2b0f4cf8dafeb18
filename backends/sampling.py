"""Choose the next token of each row: penalties and masks, temperature, truncation, a seeded draw.

Order inside a step: raw logits -> model entropy -> penalties and masks -> tempered entropy and the temperature law ->
divide by T -> top-k, top-p, min-p -> draw. Greedy is a mode of its own (argmax after penalties and masks); no
temperature enters it.

The draw depends on nothing but the row: its uniform number is Philox(key = seed, counter = index of the new token), so
batch composition, order, prefill chunks and preemption cannot change a sampled text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entropic_ctl import fields
from entropic_ctl.entropy import moments, shifted
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray

__all__ = ["SamplingParams", "TorchLogitView", "process", "sample", "to_host", "uniform"]


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


def to_host(values: Tensor) -> FloatArray:
    """Return a tensor as a float64 NumPy array."""
    return values.to(device="cpu", dtype=torch.float64).numpy()


def uniform(seed: int, index: int) -> float:
    """Return the uniform number in [0, 1) of a request's ``index``-th new token: a pure function of its arguments."""
    word = int(np.random.Philox(key=seed, counter=[index, 0, 0, 0]).random_raw())
    return (word >> 11) * 2.0**-53


def sample(
    logits: Tensor,
    temperature: FloatArray,
    greedy: np.ndarray[Any, Any],
    params: Sequence[SamplingParams],
    index: Sequence[int],
) -> np.ndarray[Any, Any]:
    """Draw one token per row by inverting the cumulative distribution, in float64, each row on its own.

    Parameters
    ----------
    logits : Tensor, float32, shape (M, n)
        Processed logits; every row has at least one finite entry and no NaN.
    temperature : float64, shape (M,)
        Read only where ``greedy`` is False; any non-negative number, 0 included (the limit: the most likely token).
    greedy : bool, shape (M,)
    params : sequence of SamplingParams, length M
    index : sequence of int, length M
        How many tokens the request has generated before this one.

    Returns
    -------
    int64, shape (M,)
    """
    tokens = np.empty(logits.shape[0], np.int64)
    best = torch.argmax(logits, dim=-1).cpu().numpy()
    for row, p in enumerate(params):
        t = float(temperature[row])
        if greedy[row] or t == 0.0:
            tokens[row] = best[row]
            continue
        z = logits[row].double()
        weights = torch.exp((z - z[best[row]]) / t)  # the largest is exactly 1; nothing overflows
        if p.truncates:
            weights = _truncate(weights, p)
        tokens[row] = _invert(weights, uniform(p.seed, index[row]))
    return tokens


def _truncate(weights: Tensor, p: SamplingParams) -> Tensor:
    """Set to 0 the weights (maximum 1) that top-k, then top-p, then min-p drop."""
    if p.top_k > 0 or p.top_p < 1.0:
        ordered, order = torch.sort(weights, descending=True, stable=True)
        if p.top_k > 0:
            ordered = ordered[: p.top_k]
        cumulative = torch.cumsum(ordered, 0)
        count = int((cumulative - ordered < p.top_p * cumulative[-1]).sum())
        kept = torch.zeros_like(weights)
        kept[order[:count]] = ordered[:count]
        weights = kept
    return torch.where(weights >= p.min_p, weights, 0.0)


def _invert(weights: Tensor, u: float) -> int:
    """Return the token at which the cumulative weight first exceeds ``u`` times the total."""
    cumulative = torch.cumsum(weights, 0)
    total = float(cumulative[-1])
    target = min(u * total, math.nextafter(total, 0.0))
    return int(torch.searchsorted(cumulative, target, right=True))
