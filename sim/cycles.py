r"""Does a series settle, cycle, oscillate or sit at a clamp? With a guard against noise that merely looks periodic.

**Cycle.** A limit cycle of period q keeps its phase for ever; noise that an eager loop colours (it rings at the same
frequency) forgets its phase. So the tail of the series is cut into B blocks, and the complex amplitude c_b at frequency
m/q is taken in each, all phases counted from one origin. Under noise whose memory is short against a block the c_b are
independent with mean 0, and

    F = B |mean c|^2 / (sum |c_b - mean c|^2 / (B - 1))

has an F law with (2, 2B - 2) degrees of freedom ((1, B - 1) at frequency 1/2, where c is real): Hotelling's test. All
fractions m/q with q up to the longest period are tried, and the significance is divided among them (Bonferroni). The
amplitude must also last: the last quarter of the blocks keeps at least half of the first quarter's. The
period is the least common multiple of the q found, those under 5% of the largest amplitude left out.

**Settles**: the last quarter moves less than ``floor``, or less than half as much as the first. Source: ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import fdtrc

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray

__all__ = ["Behaviour", "behaviour", "clamp_share", "find_cycle"]

_MINOR = 0.05


@dataclass(frozen=True)
class Behaviour:
    """What a series does in the long run.

    Parameters
    ----------
    kind : str
        ``settles``, ``cycles``, ``clamped`` or ``wanders`` (it keeps moving, without a period found).
    period : int
        Of the cycle, tokens; 0 without one.
    amplitude : float
        Half the distance between the extremes of the last quarter.
    p_value : float
        Of the cycle, corrected for the number of frequencies tried; 1 without one.
    at_clamp : float
        Share of the series that lies at a clamp.
    """

    kind: str
    period: int
    amplitude: float
    p_value: float
    at_clamp: float


def clamp_share(u: FloatArray, low: float, high: float) -> float:
    """Return the share of entries within 1e-9 of a clamp.

    Parameters
    ----------
    u : FloatArray, any shape
        ln T.
    low, high : float
        Clamps on u.
    """
    return float(np.mean((u <= low + 1e-9) | (u >= high - 1e-9)))


def find_cycle(
    series: FloatArray, *, longest: int = 8, blocks: int = 8, significance: float = 1e-3, floor: float = 1e-9
) -> tuple[int, float]:
    """Return (period, corrected p-value) of a lasting cycle, or (0, 1.0).

    Parameters
    ----------
    series : FloatArray, shape (N,)
        Tail of the series, transients left out.
    longest : int
        Longest period looked for, >= 2 tokens.
    blocks : int
        B >= 4.
    significance : float
        Of all frequencies together.
    floor : float
        Amplitudes below it count as rounding.

    Raises
    ------
    BadInputError
        If a block would be shorter than two of the longest periods.
    """
    x = np.asarray(series, np.float64)
    if blocks < 4 or longest < 2 or x.shape[0] < 2 * longest * blocks:
        raise BadInputError(
            "too short to look for cycles",
            field="series",
            value=x.shape[0],
            allowed=f">= 2 * {longest} * {blocks} tokens in at least 4 blocks",
        )
    tried = [(m, q) for q in range(2, longest + 1) for m in range(1, q // 2 + 1) if math.gcd(m, q) == 1]
    found: list[tuple[float, int, float]] = []
    for m, q in tried:
        length = x.shape[0] // blocks // q * q
        cut = x[x.shape[0] - blocks * length :].reshape(blocks, length)
        cut = cut - cut.mean(1, keepdims=True)
        c = (1 if q == 2 else 2) * (cut * np.exp(-2j * np.pi * m * np.arange(length) / q)).mean(1)
        mean, freedom = complex(c.mean()), 1 if q == 2 else 2
        if abs(mean) <= floor or not _lasts(np.abs(c)):
            continue
        spread = float(np.sum(np.abs(c - mean) ** 2)) / (blocks - 1)
        ratio = blocks * abs(mean) ** 2 / spread if spread > 0 else math.inf
        p = min(1.0, len(tried) * float(fdtrc(freedom, freedom * (blocks - 1), ratio)))
        if p < significance:
            found.append((abs(mean), q, p))
    if not found:
        return 0, 1.0
    strong = [(q, p) for size, q, p in found if size >= _MINOR * max(found)[0]]
    return math.lcm(*(q for q, _ in strong)), min(p for _, p in strong)


def _lasts(size: FloatArray) -> bool:
    quarter = max(1, size.shape[0] // 4)
    return bool(size[-quarter:].mean() >= 0.5 * size[:quarter].mean())


def behaviour(u: FloatArray, low: float, high: float, *, floor: float = 1e-7) -> Behaviour:
    """Say what the tail of a trajectory does.

    Parameters
    ----------
    u : FloatArray, shape (N,), N >= 128
        ln T; the first half counts as transient.
    low, high : float
        Clamps on u.
    floor : float
        Movement below it is none.
    """
    tail = u[u.shape[0] // 2 :]
    quarter = tail.shape[0] // 4
    first, last = float(np.ptp(tail[:quarter])), float(np.ptp(tail[-quarter:]))
    share = clamp_share(tail, low, high)
    if share > 0.99:
        return Behaviour("clamped", 0, 0.5 * last, 1.0, share)
    if last <= floor or last < 0.5 * first:
        return Behaviour("settles", 0, 0.5 * last, 1.0, share)
    period, p = find_cycle(tail)
    return Behaviour("cycles" if period else "wanders", period, 0.5 * last, p, share)
