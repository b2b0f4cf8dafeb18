"""The random numbers of sampling: counter-based Gumbel noise, one number per (request seed, new token, vocabulary id).

A token is drawn by **Gumbel-max**: argmax over tokens of (z - max z) / T + g with independent Gumbel g is a draw from
softmax(z / T). One pass, no normalisation, no order: the noise of a token is a pure function of its arguments, so every
engine, batch, device and kernel draws the same token (up to ties within rounding). This text is the specification that
the torch reference below, the C++ and the Triton kernel implement; all arithmetic is float32 unless it says otherwise.

1. Word. w = output word ``token & 3`` of Philox4x32-10 (Salmon et al. 2011: multipliers D2511F53, CD9E8D57, key
   increments 9E3779B9, BB67AE85, ten rounds) with key (seed mod 2^32, seed >> 32) and counter (token >> 2, index, 0,
   stream). ``index`` counts the request's new tokens from 0; ``stream`` is 0 for the draw of the token (other uses of
   randomness take other streams). One call serves four neighbouring tokens.
2. Uniform. v = min((float32(w) + 1/2) 2^-32, 1 - 2^-24), in [2^-33, 1 - 2^-24]. float32(w) rounds to nearest; small
   words are exact, so the resolution is 2^-32 absolute near 0, where a large Gumbel comes from.
3. Exponential. E = v (1 + v (1/2 + v/3)) if v < 2^-8, else E = -ln(1 - v). The series is off by at most 2^-26
   relative, the logarithm of the rounded 1 - v by 2^-17 relative at worst (at v = 2^-8, less above).
4. Gumbel. g = -ln E, in [-ln(24 ln 2), 33 ln 2] = [-2.8115, 22.8739].
5. Key. x = (z - max z) r with r = float32(1 / max(T, 2^-126)) (the quotient in float64), and y = x + g. The token with
   the largest y wins, of equal ones the lowest id. T = 0 is no draw: the most likely token, of equal ones the lowest.

What the 32 bits do to the probabilities. With exact arithmetic after step 2 the winner differs from that of an ideal
race only if some token's exponential lies within 2^-32 of overtaking the winner's; at unit rate per token that has
probability at most n 2^-32 in total variation (n = 151,936: 3.6e-5; 49,152: 1.2e-5). 24-bit uniforms would give
256 times that, and with u in place of 1 - u (g = -ln(-ln u), u = 1 - 2^-24 at most) no Gumbel above 16.6. A token with
x < -(22.8739 + 2.8115) cannot win, whatever the words: kernels may leave it out.

Verification of drafts. The noise belongs to the position, not to the attempt: a drafted token is accepted exactly if it
is the token that this draw gives at its position. The text with speculation is then the text without, sampled or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["GUMBEL_MAX", "GUMBEL_MIN", "MARGIN", "choose", "gumbel", "philox", "scale_of"]

GUMBEL_MAX = 33 * math.log(2.0)
GUMBEL_MIN = -math.log(24 * math.log(2.0))
MARGIN = GUMBEL_MAX - GUMBEL_MIN + 1e-3
"""A token whose scaled logit is further below the largest than this cannot be drawn (rounding included)."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four output words of Philox4x32-10.

    Parameters
    ----------
    seed : Tensor, int64
        Key: low word first.
    counter : four Tensors, int64 in [0, 2^32), broadcastable with ``seed``

    Returns
    -------
    four Tensors, int64 in [0, 2^32)
        Products wrap around in int64; their bits are those of unsigned arithmetic.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel_of_words(words: Tensor) -> Tensor:
    """Map 32-bit words (int64) to Gumbel noise (float32): steps 2 to 4 of the specification."""
    v = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    near = v * (1.0 + v * (0.5 + v * (1.0 / 3.0)))
    return -torch.log(torch.where(v < 2.0**-8, near, -torch.log(1.0 - v)))


def gumbel(seed: Sequence[int], index: Sequence[int], n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the noise of a batch of draws, float32 (M, n).

    Parameters
    ----------
    seed, index : sequence of int, length M
        Request seed in [0, 2^63) and number of the new token, from 0.
    n : int
        Vocabulary size.
    device : torch.device
    """
    rows = torch.tensor(list(seed), dtype=torch.int64, device=device)[:, None]
    step = torch.tensor(list(index), dtype=torch.int64, device=device)[:, None]
    group = torch.arange(-(-n // 4), dtype=torch.int64, device=device)[None, :]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    words = torch.stack(torch.broadcast_tensors(*philox(rows, (group, step & _MASK, zero, zero))), dim=-1)
    return gumbel_of_words(words.reshape(len(rows), -1)[:, :n])


def scale_of(temperature: Tensor) -> Tensor:
    """Return r = float32(1 / max(T, 2^-126)) of temperatures (M,), the quotient taken in float64."""
    return (1.0 / temperature.double().clamp(min=2.0**-126)).float()


def choose(logits: Tensor, temperature: Tensor, seed: Sequence[int], index: Sequence[int]) -> Tensor:
    """Draw one token per row: the specification, for T > 0.

    Parameters
    ----------
    logits : Tensor, float32, shape (M, n)
        Each row with a finite maximum; ``-inf`` is never drawn.
    temperature : Tensor, float64, shape (M,)
        Positive.
    seed, index : sequence of int, length M

    Returns
    -------
    Tensor, int64, shape (M,)
    """
    x = (logits - logits.amax(dim=-1, keepdim=True)) * scale_of(temperature)[:, None]
    return torch.argmax(x + gumbel(seed, index, logits.shape[-1], logits.device), dim=-1)
