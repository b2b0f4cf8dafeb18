"""What pruned attention lost, bounded: mass, information, total variation, output error.

For one query head with softmax weights a_i, drop the pages of a set S and renormalise. With m the mass of S,

    KL(pruned || full) = -ln(1 - m) nats,     TV = m,     o - o' = m (mean over S of v - o'),

where o is the dense output, o' the pruned one and the mean over S is weighted by a_i / m *(ours; elementary)*. With U
an upper bound on the unnormalised mass of S and Z a lower bound on that of the kept pages, m <= U / (U + Z).
Everything here rounds outward, away from a certificate that is too small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entropic_ctl.signals import FloatArray

__all__ = ["Certificate", "kl_nats", "mass_bound", "mass_of_kl", "output_error"]

_FEW_ULPS = 8 * np.finfo(np.float64).eps


@dataclass(frozen=True, slots=True)
class Certificate:
    """Bounds for the query heads of one layer and one decode step, relative to the current cache.

    Parameters
    ----------
    mass : FloatArray, shape (H,)
        Upper bound on the softmax mass of the pages not read; also the total-variation bound.
    kept : bool array, shape (n_kv_heads, P)
        Pages read by each KV head.
    output_error : FloatArray or None, shape (H,)
        Upper bound on the Euclidean norm of (dense output - pruned output), in the unit of the values.
    """

    mass: FloatArray
    kept: npt.NDArray[np.bool_]
    output_error: FloatArray | None = None

    @property
    def kl_nats(self) -> FloatArray:
        """Upper bound on KL(pruned || full) per query head, nats, shape (H,)."""
        return kl_nats(self.mass)

    @property
    def total_variation(self) -> FloatArray:
        """Upper bound on the total variation distance per query head, shape (H,)."""
        return self.mass

    @property
    def kept_fraction(self) -> float:
        """Share of (KV head, page) pairs that were read."""
        return float(self.kept.mean()) if self.kept.size else 1.0


def mass_bound(log_pruned: npt.ArrayLike, log_kept: npt.ArrayLike) -> FloatArray:
    """Return U / (U + Z), rounded up, from ln U (upper bound) and ln Z (lower bound), any shape, nats.

    U = 0 gives 0. A kept bound that is not finite (or a NaN on either side) with U > 0 certifies nothing: 1.
    """
    u, z = np.broadcast_arrays(np.asarray(log_pruned, np.float64), np.asarray(log_kept, np.float64))
    with np.errstate(invalid="ignore", over="ignore"):
        gap = z - u  # ln(Z / U); m = 1 / (1 + exp(gap))
        gap = gap - _FEW_ULPS * (np.abs(z) + np.abs(u))
        mass = 1.0 / (1.0 + np.exp(gap))
    # exp, sum and quotient: under 8 ulp together; the tiny constant covers underflow of 1 / exp(gap)
    mass = np.minimum(mass * (1.0 + _FEW_ULPS) + np.finfo(np.float64).tiny, 1.0)
    mass = np.where(np.isnan(mass) | np.isnan(gap), 1.0, mass)
    return np.where(u == -np.inf, 0.0, mass)


def kl_nats(mass: npt.ArrayLike) -> FloatArray:
    """Return -ln(1 - m), rounded up, nats; m >= 1 gives infinity."""
    m = np.minimum(np.asarray(mass, np.float64), 1.0)
    with np.errstate(divide="ignore"):
        loss = -np.log1p(-m)
    return np.where(m > 0, np.nextafter(loss, np.inf), 0.0)


def mass_of_kl(theta_nats: npt.ArrayLike) -> FloatArray:
    """Return the largest mass 1 - exp(-theta) a budget of ``theta_nats`` allows, rounded down."""
    return np.nextafter(-np.expm1(-np.asarray(theta_nats, np.float64)), 0.0)


def output_error(mass: npt.ArrayLike, distance: npt.ArrayLike, radius: npt.ArrayLike) -> FloatArray:
    """Return the bound m * max over pruned pages of (|centre - o'| + radius).

    Parameters
    ----------
    mass : array, shape (H,)
        Bound on the pruned mass.
    distance : array, shape (H, S)
        Euclidean distance between the pruned output and the value centre of each pruned page.
    radius : array, shape (S,) or (H, S)
        Largest distance of a value of that page from its centre.

    Returns
    -------
    FloatArray, shape (H,)
        0 where nothing was pruned (S = 0). The rounding of the outputs themselves is not included.
    """
    reach = np.asarray(distance, np.float64) + np.asarray(radius, np.float64)
    far: FloatArray = reach.max(axis=-1, initial=0.0)
    bound: FloatArray = np.asarray(mass, np.float64) * far * (1.0 + _FEW_ULPS)
    return bound
