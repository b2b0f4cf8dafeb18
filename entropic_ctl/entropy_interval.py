"""Certified interval of the entropy when only the k most likely of n tokens are known.

Every distribution that agrees with what is given has its entropy in [lower, upper]. Let p_1 >= ... >= p_k be given and
e the mass of the m = n - k unseen tokens, each at most p_k. Entropy is concave and symmetric, so

- upper: e spread evenly adds e ln(m / e);
- lower: e packed under the cap adds floor(e / p_k) tokens of p_k and one of the rest.

It needs e <= m p_k, else no distribution agrees: such a row is flagged and widened to [0, ln n].

**Rounding** *(ours)*. If each p_i is only known to lie in [l_i, h_i] (an API's log-probabilities have two to six
digits, and may sum to more than 1), both ends stay exact: the upper end is the water level, sum clip(x, l_i, h_i) +
m min(x, h_k) = 1; the lower end raises the most likely tokens first, then packs the tail, which majorises every other
choice because l and h are sorted alike. A declared rounding is taken 5% larger: what was rounded was itself computed
in 16 or 32 bits. The tail is 1 - sum(p) where it cannot be seen, and is read from the tail itself where it can
(:func:`interval_from_logits`; in float32, 1 - sum would shift H by about 2e-6).

**Tempered.** With weights w_i = p_i^(1/T) the unseen weight W lies between its even and its packed value. Unseen tokens
are the least likely ones, so H grows with W: lower end at the least W packed, upper end at the largest W spread evenly
(valid; each end is attained only if one tail has both properties). With a declared rounding and T != 1 the normaliser
is bounded first and the box argument applied to the normalised weights: valid, wider. NumPy, float64 inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.entropy import moments, shifted
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray

__all__ = ["TopKInterval", "interval_from_logits", "interval_from_logprobs", "interval_from_probabilities"]

_SLACK = 2.0**-44
"""Outward rounding per unit of 1 + ln n; above the rounding of any k probabilities at T = 1 (proved: proof book, 8)."""

_GUARD = 1.05
"""Factor on a declared rounding."""


@dataclass(frozen=True, slots=True)
class TopKInterval:
    """A certified interval of an entropy, one entry per row.

    Parameters
    ----------
    lower, upper : FloatArray, shape (...), nats
        Within [0, ln n]; NaN for a row that is not a distribution (empty support, NaN).
    tail_mass : FloatArray, shape (...)
        Probability of the unseen tokens, at the temperature asked for if they were seen (logits), else at T = 1.
    feasible : bool array, shape (...)
        False where no distribution agrees with the input; the interval is then [0, ln n] (or NaN).
    """

    lower: FloatArray
    upper: FloatArray
    tail_mass: FloatArray
    feasible: npt.NDArray[np.bool_]


def _surprisal(p: FloatArray) -> FloatArray:
    """Return -p ln p, 0 at 0."""
    out: FloatArray = -p * np.log(np.where(p > 0, p, 1.0))
    return out


def _sum(x: FloatArray) -> FloatArray:
    """Return the sum over the last axis in pairs: an entry passes through at most ceil(log2 k) additions."""
    if x.shape[-1] == 0:
        return np.zeros(x.shape[:-1])
    while x.shape[-1] > 1:
        pairs = x[..., :-1:2] + x[..., 1::2]
        x = np.concatenate([pairs, x[..., -1:]], -1) if x.shape[-1] % 2 else pairs
    return x[..., 0]


def _sums_before(x: FloatArray) -> FloatArray:
    """Return the sum of the entries before each one, and of all (k + 1 columns); additions as in :func:`_sum`."""
    total, reach = x, 1
    while reach < x.shape[-1]:
        total = np.concatenate([total[..., :reach], total[..., reach:] + total[..., :-reach]], -1)
        reach *= 2
    return np.concatenate([np.zeros((*x.shape[:-1], 1)), total], -1)


def _even(e: FloatArray, m: float) -> FloatArray:
    """Return the entropy of mass e spread evenly over m tokens."""
    out: FloatArray = _surprisal(e) + e * np.log(max(m, 1.0))
    return out


def _pack(e: FloatArray, cap: FloatArray, m: float) -> tuple[FloatArray, FloatArray]:
    """Return (number of tokens at the cap, rest) of mass e packed onto m tokens under a cap; what is over is left out.

    Without the limit m, a mass e that is rounding alone would be packed onto any number of tokens of a tiny cap.
    """
    safe = np.where(cap > 0, cap, 1.0)
    with np.errstate(over="ignore"):
        full = np.where(cap > 0, np.minimum(np.floor(e / safe), m), 0.0)
    return full, np.where(full < m, np.clip(e - full * cap, 0.0, cap), 0.0)


def _packed(e: FloatArray, cap: FloatArray, m: float) -> FloatArray:
    """Return the entropy of mass e packed onto m tokens under a cap."""
    full, rest = _pack(e, cap, m)
    out: FloatArray = full * _surprisal(cap) + _surprisal(rest)
    return out


def _box(low: FloatArray, high: FloatArray, m: float) -> tuple[FloatArray, FloatArray, npt.NDArray[np.bool_]]:
    """Return (lower, upper, feasible) over p in [low, high] (columns sorted, falling) and m tokens in [0, p_k]."""
    cap = high[..., -1]
    spare = 1.0 - _sum(low)
    room = high - low
    before = _sums_before(room)
    feasible = (spare >= -_SLACK) & (spare <= before[..., -1] + m * cap + _SLACK)
    added = np.clip(spare[..., None] - before[..., :-1], 0.0, room)
    e = np.clip(spare - before[..., -1], 0.0, None)
    lower = _sum(_surprisal(low + added)) + _packed(e, cap, m)
    floor, ceiling = np.zeros(cap.shape), np.ones(cap.shape)
    for _ in range(90):  # the water level, to the last bit of a level of 1e-10
        level = 0.5 * (floor + ceiling)
        short = _sum(np.clip(level[..., None], low, high)) + m * np.minimum(level, cap) < 1.0
        floor, ceiling = np.where(short, level, floor), np.where(short, ceiling, level)
    upper = _sum(_surprisal(np.clip(ceiling[..., None], low, high))) + m * _surprisal(np.minimum(ceiling, cap))
    return lower, upper, feasible


def _interval(
    ends: tuple[FloatArray, FloatArray], tail: FloatArray, feasible: npt.NDArray[np.bool_], n: int, slack: Any
) -> TopKInterval:
    lower, upper = ends
    top = float(np.log(n))
    bad = np.isnan(lower) | np.isnan(upper)
    lower = np.where(feasible, np.clip(lower - slack, 0.0, top), 0.0)
    upper = np.where(feasible, np.clip(upper + slack, 0.0, top), top)
    lower, upper = np.where(bad, np.nan, lower), np.where(bad, np.nan, upper)
    return TopKInterval(lower, upper, np.clip(tail, 0.0, 1.0), feasible & ~bad)


def _host(values: Any) -> tuple[FloatArray, float]:
    """Return (float64 host copy, machine epsilon of the dtype it came in)."""
    if hasattr(values, "detach"):  # a torch tensor: bfloat16 has no NumPy dtype, and float32 holds it exactly
        name = str(values.dtype)
        eps = {"torch.bfloat16": 2.0**-7, "torch.float16": 2.0**-10, "torch.float32": 2.0**-23}.get(name, 2.0**-52)
        wide = values.detach().cpu()
        return np.asarray(wide if name == "torch.float64" else wide.float(), np.float64), eps
    array = np.asarray(values)
    eps = float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else 2.0**-52
    return array.astype(np.float64), max(eps, 2.0**-52)


def _check_counts(k: int, n: int) -> None:
    if not 1 <= k <= n:
        raise BadInputError("not a number of known tokens", field="k", value=k, allowed=f"[1, n = {n}]")


def interval_from_logits(logits: Any, k: int, temperature: Any = None) -> TopKInterval:
    """Return the interval that the k largest of all n logits leave, with the tail mass read from the tail itself.

    Parameters
    ----------
    logits : array, shape (..., n), any float dtype, NumPy or torch
    k : int
        1 <= k <= n.
    temperature : float or array of shape (...), optional
        T >= 0, default 1.

    Raises
    ------
    BadInputError
        If k is outside [1, n].
    """
    z, _ = _host(logits)
    n = z.shape[-1] if z.ndim else 0
    _check_counts(k, n)
    shift = shifted(z)
    valid = ~np.isnan(moments(shift)[0])
    T = np.asarray(1.0 if temperature is None else temperature, np.float64)
    T = np.broadcast_to(np.maximum(T, np.finfo(np.float64).smallest_normal), shift.shape[:-1])[..., None]
    with np.errstate(invalid="ignore", under="ignore"):
        weights = np.exp(np.maximum(np.partition(shift, n - k, axis=-1), -1e4 * T) / T)
        top, rest = weights[..., n - k :], weights[..., : n - k].sum(-1)
        total = top.sum(-1) + rest
        p, e = top / total[..., None], rest / total
    cap, known = p.min(-1), _surprisal(p).sum(-1)
    nan = np.where(valid, 0.0, np.nan)
    lower, upper = known + _packed(e, cap, float(n - k)) + nan, known + _even(e, float(n - k)) + nan
    return _interval((lower, upper), e, valid, n, _SLACK * (1.0 + np.log(n)))


def interval_from_probabilities(
    probabilities: Any, n: int, *, rounding: float = 0.0, temperature: float = 1.0
) -> TopKInterval:
    """Return the interval for the k most likely tokens' probabilities.

    Parameters
    ----------
    probabilities : array, shape (..., k), any float dtype, NumPy or torch
        The k largest probabilities, in any order.
    n : int
        Vocabulary size, >= k.
    rounding : float
        Largest absolute error of an entry; 0 means none beyond 8 machine epsilons (relative) of the dtype given.
    temperature : float
        T > 0 at which the entropy is wanted; the probabilities are those at T = 1.

    Raises
    ------
    BadInputError
        If an entry is outside [0, 1], k > n, rounding < 0 or T <= 0.

    Examples
    --------
    >>> import numpy as np
    >>> found = interval_from_probabilities(np.array([0.6, 0.2]), 10)
    >>> round(float(found.lower), 6), round(float(found.upper), 6)
    (0.950271, 1.366159)
    """
    p, eps = _host(probabilities)
    if not ((p >= 0) & (p <= 1)).all():
        worst = float(p[~((p >= 0) & (p <= 1))].flat[0])
        raise BadInputError("not a probability", field="probabilities", value=worst, allowed="[0, 1]")
    if not 0.0 <= rounding < 1.0:
        raise BadInputError("not a rounding error", field="rounding", value=rounding, allowed="[0, 1)")
    spread = _GUARD * rounding + 8.0 * eps * p
    relative = None if rounding > 0 else 8.0 * eps
    return _from_bounds(p, (p - spread, p + spread), n, relative, temperature)


def interval_from_logprobs(logprobs: Any, n: int, *, rounding: float = 0.0, temperature: float = 1.0) -> TopKInterval:
    """Return the interval for the k most likely tokens' log-probabilities, which is what an API returns.

    Parameters
    ----------
    logprobs : array, shape (..., k), any float dtype, NumPy or torch
        Natural logarithms of the k largest probabilities, in any order; rounded ones may sum to more than 1.
    n : int
        Vocabulary size, >= k.
    rounding : float
        Largest absolute error of an entry, nats (0.005 for two decimals); 0 means none beyond the dtype's own.
    temperature : float
        T > 0 at which the entropy is wanted.

    Raises
    ------
    BadInputError
        If an entry is above its rounding or NaN, k > n, rounding < 0 or T <= 0.
    """
    lp, eps = _host(logprobs)
    if not 0.0 <= rounding < 100.0:
        raise BadInputError("not a rounding error", field="rounding", value=rounding, allowed="[0, 100)")
    own = 8.0 * eps * (1.0 - np.minimum(np.where(np.isfinite(lp), lp, 0.0), 0.0))
    if not (lp <= rounding + own).all():
        worst = float(lp[~(lp <= rounding + own)].flat[0])
        raise BadInputError("not a log-probability", field="logprobs", value=worst, allowed="at most 0 (+ rounding)")
    spread = _GUARD * rounding + own
    p = np.exp(np.minimum(lp, 0.0))
    relative = None if rounding > 0 else float(own.max(initial=0.0))
    return _from_bounds(p, (np.exp(lp - spread), np.exp(lp + spread)), n, relative, temperature)


def _from_bounds(
    p: FloatArray, bounds: tuple[FloatArray, FloatArray], n: int, relative: float | None, temperature: float
) -> TopKInterval:
    """Return the interval for p within bounds; ``relative``: the entries' own error, None if a rounding is declared."""
    if p.ndim < 1:
        raise BadInputError("no axis of tokens", field="k", value=0, allowed=f"[1, n = {n}]")
    k = p.shape[-1]
    _check_counts(k, n)
    if not 0.0 < temperature < np.inf:
        raise BadInputError("not a temperature", field="temperature", value=temperature, allowed="(0, inf)")
    m = float(n - k)
    order = np.argsort(-p, axis=-1)
    p, low, high = (np.take_along_axis(a, order, -1) for a in (p, *bounds))
    low, high = np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)
    tail = np.clip(1.0 - p.sum(-1), 0.0, None)
    lower, upper, feasible = _box(low, high, m)
    slack: Any = _SLACK * (1.0 + np.log(n))
    if temperature != 1.0:
        beta = 1.0 / temperature
        scale = np.where(high[..., :1] > 0, high[..., :1], 1.0)
        least, most = _tail_weight(low, high, m, beta, scale[..., 0])
        with np.errstate(under="ignore"):
            if relative is None:
                a, b = (low / scale) ** beta, (high / scale) ** beta
                z_low, z_high = (a.sum(-1) + least)[..., None], (b.sum(-1) + most)[..., None]
                z_low = np.maximum(z_low, np.finfo(np.float64).smallest_normal)
                lower, upper, _ = _box(a / z_high, np.minimum(b / z_low, 1.0), m)
            else:
                w = (p / scale) ** beta
                z_low, z_high = (w.sum(-1) + least)[..., None], (w.sum(-1) + most)[..., None]
                lower = _surprisal(w / z_low).sum(-1) + _packed(least / z_low[..., 0], w[..., -1] / z_low[..., 0], m)
                upper = _surprisal(w / z_high).sum(-1) + _even(most / z_high[..., 0], m)
                slack = slack + 8.0 * beta * relative * (1.0 + np.log(n))
    return _interval((lower, upper), tail, feasible, n, slack)


def _tail_weight(
    low: FloatArray, high: FloatArray, m: float, beta: float, scale: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the least and the largest sum of (q / scale)^beta over the unseen probabilities q <= p_k."""
    if m == 0:
        return np.zeros(scale.shape), np.zeros(scale.shape)
    cap = high[..., -1] / scale
    e_low, e_high = (np.clip(1.0 - a.sum(-1), 0.0, None) / scale for a in (high, low))

    def packed(e: FloatArray) -> FloatArray:
        full, rest = _pack(e, cap, m)
        return full * cap**beta + rest**beta

    def even(e: FloatArray) -> FloatArray:
        return m * (e / m) ** beta

    with np.errstate(under="ignore"):
        return (even(e_low), packed(e_high)) if beta > 1.0 else (packed(e_low), even(e_high))
