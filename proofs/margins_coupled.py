r"""The coupled loop of u = ln T, filtered model entropy f and budget theta as a two-channel feedback loop.

Plant, in the shipped order (section 12 of the proof book): u tempers a token, whose text sets the model entropy of the
*next* token; theta prunes now and shifts both entropies of the same token. Laws, with entropies d tokens late:

    y = V u + rho theta,    h = text + r theta,     text+ = s u,
    u+ = u - k y,           f+ = (1-b) f + b h,     theta+ = (1-c) theta + c g f+.

At d = 0, b = c = 1 the closed loop has the eigenvalues of the checker's matrix (:mod:`proofs.check.coupled`), and a 0
for f, which is then a copy of h.

The shipped ``budget`` law reads the last model entropy (b = 1) and, where it follows its band, sets theta at once
(c = 1) with a slope g between -(wide - narrow) / (high - low) and 0; its dwell timer only ever holds theta back and is
a switch, which no linear margin covers. phi, rate limit and clamps scale k down and are left out: lambda = 1.

A **multi-loop disk margin** alpha lets both channels carry any gain and phase of the balanced disk at once:
1 / alpha is the largest structured singular value of S - I/2 over frequency. For two 1x1 blocks it is
min over d of the largest singular value of diag(1, d) M diag(1, 1/d) (Doyle 1982: exact up to three blocks), and the
best d = sqrt(|M21| / |M12|) in closed form: a scaling leaves |det M|, so the largest singular value is least where the
Frobenius norm is. The laws are diagonal, so a cut at the sensors and one at the actuators give the same M up to such a
scaling, and the same margin. (python-control needs slycot for this, which has no wheels.) Source: ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from proofs.check import Assumptions
from proofs.linear_loop import frequencies, gain_of, response

if TYPE_CHECKING:
    import control

__all__ = ["Plant", "coupled", "disk_margin", "slope_of", "structured", "vertices"]

FloatArray = npt.NDArray[np.float64]
ComplexArray = npt.NDArray[np.complex128]


@dataclass(frozen=True)
class Plant:
    """Effects of (u, theta) on (tempered, model) entropy, and the slope of the budget.

    Parameters
    ----------
    varentropy : float
        V, nats squared (nats per unit of u).
    rho, r : float
        Effect of theta on the tempered and on the model entropy of the same token, nats per nat.
    s : float
        Effect of u on the model entropy of the next token, through the text, nats per unit.
    slope : float
        g <= 0: d theta / d (filtered model entropy).
    """

    varentropy: float
    rho: float
    r: float
    s: float
    slope: float

    def relative_gain(self) -> float:
        """Return the relative gain (Bristol 1966) of u on the tempered entropy, V r / (V r - rho s); NaN if singular.

        At rest, where no delay counts, and if the other loop holds the model entropy exactly; the budget does not
        (:meth:`effective`).
        """
        det = self.varentropy * self.r - self.rho * self.s
        return self.varentropy * self.r / det if det else math.nan

    def effective(self) -> float:
        """Return the varentropy that the temperature loop meets once the budget has reacted: V + rho g s / (1 - g r).

        The slow gain alone: the budget answers two tokens after u moved.
        """
        return self.varentropy + self.rho * self.slope * self.s / (1.0 - self.slope * self.r)


def slope_of(config: RunConfig) -> float:
    """Return the steepest slope g <= 0 of the budget; 0 where theta is constant."""
    law = config.loop.pruning
    if law.name != "budget":
        return 0.0
    c = law.config
    return -float((c.theta_wide_nats - c.theta_nats) / (c.entropy_high_nats - c.entropy_low_nats))


def coupled(
    config: RunConfig, plant: Plant, *, at: str = "closed", b: float = 1.0, c: float = 1.0
) -> control.StateSpace:
    """Return the coupled loop, closed or cut.

    Parameters
    ----------
    config : RunConfig
        With the ``feedback`` law; gain and observation lag are used.
    plant : Plant
    at : str
        ``sensors``: cut where the entropies are read, L = plant times laws (negative feedback). ``actuators``: cut
        where u and theta act. ``closed``: from added (tempered, model) entropy to both entropies, u and theta.
    b, c : float
        Filter weights of f and theta.

    Returns
    -------
    control.StateSpace
        dt = 1. States ``u``, ``f``, ``theta``, ``text`` (s times the u before), then for each token of lag
        ``late_tempered<i>``, ``late_model<i>``.

    Raises
    ------
    BadInputError
        As :func:`proofs.margins.gain_of`, or for another ``at``.
    """
    import control

    if at not in ("closed", "sensors", "actuators"):
        raise BadInputError("no such cut", field="at", value=at, allowed="closed, sensors, actuators")
    k, lag, g = gain_of(config), config.engine.observation_lag, plant.slope
    size = 4 + 2 * lag
    laws = np.array([[-k, 0.0], [0.0, b], [0.0, c * g * b]])  # what (y, h), as seen, adds to (u, f, theta)
    G = np.array([[plant.varentropy, plant.rho], [0.0, plant.r]])  # (u, theta) to (y, h) of the same token
    A = np.zeros((size, size))
    A[0, 0], A[1, 1], A[2, 1], A[2, 2] = 1.0, 1.0 - b, c * g * (1.0 - b), 1.0 - c
    enter = np.zeros((size, 2))  # where fresh entropies enter
    if lag:
        enter[4:6] = np.eye(2)
        for i in range(1, lag):
            A[4 + 2 * i : 6 + 2 * i, 2 + 2 * i : 4 + 2 * i] = np.eye(2)
        A[:3, -2:] = laws
    else:
        enter[:3] = laws
    acts, reads, writes = np.zeros((2, size)), np.zeros((2, size)), np.zeros((size, 2))
    acts[0, 0] = acts[1, 2] = reads[1, 3] = 1.0  # text is read in the model entropy
    writes[3, 0] = plant.s  # u writes the text
    states = [
        "u",
        "f",
        "theta",
        "text",
        *(f"late_{what}{i}" for i in range(1, lag + 1) for what in ("tempered", "model")),
    ]
    said: dict[str, Any] = {"states": states, "remove_useless_states": False, "name": f"coupled_{at}"}
    entropies = ["tempered_entropy", "model_entropy"]
    if at == "sensors":
        A += writes @ acts
        return control.StateSpace(A, -enter, G @ acts + reads, 0.0, 1, inputs=entropies, outputs=entropies, **said)
    if at == "actuators":
        names = ["u", "theta"]
        A += enter @ reads
        return control.StateSpace(A, enter @ G + writes, -acts, 0.0, 1, inputs=names, outputs=names, **said)
    return control.StateSpace(
        A + writes @ acts + enter @ (G @ acts + reads),
        enter,
        np.vstack((G @ acts + reads, acts)),
        np.vstack((np.eye(2), np.zeros((2, 2)))),
        1,
        inputs=["added_tempered", "added_model"],
        outputs=[*entropies, "u", "theta"],
        **said,
    )


def structured(M: npt.NDArray[Any]) -> FloatArray:
    """Return the structured singular value of 2x2 matrices for two complex scalar blocks.

    Parameters
    ----------
    M : array, shape (..., 2, 2)

    Returns
    -------
    ndarray, shape (...)
    """
    across = np.abs(M[..., 0, 1] * M[..., 1, 0])
    square = np.abs(M[..., 0, 0]) ** 2 + np.abs(M[..., 1, 1]) ** 2 + 2.0 * across
    det = np.abs(M[..., 0, 0] * M[..., 1, 1] - M[..., 0, 1] * M[..., 1, 0])
    return np.asarray(np.sqrt(0.5 * (square + np.sqrt(np.maximum(square**2 - 4.0 * det**2, 0.0)))), np.float64)


def disk_margin(L: control.StateSpace, w: FloatArray) -> FloatArray:
    """Return the multi-loop balanced disk margin alpha at each frequency, shape (len(w),); its least is *the* margin.

    It says something only if the closed loop is stable.

    Parameters
    ----------
    L : control.StateSpace
        Two channels, cut.
    w : FloatArray
        Rad per token, in (0, pi].
    """
    value = response(L, w)
    S = np.linalg.inv(np.eye(2) + value)
    return 1.0 / structured(S - 0.5 * np.eye(2))


def vertices(config: RunConfig, varentropies: Sequence[float], assumptions: Assumptions) -> tuple[dict[str, Any], ...]:
    """Return what each corner of the assumptions gives: one dict per corner.

    Parameters
    ----------
    config : RunConfig
    varentropies : sequence of float
        Ends of the interval of V, nats squared.
    assumptions : Assumptions
        Bounds on |rho|, |r| and |s|.

    Returns
    -------
    tuple of dict
        The plant's fields; ``spectral_radius`` and ``poles`` of the closed loop; ``relative_gain``; ``effective``;
        ``alpha``, the disk margin at each of ``w`` (NaN where the closed loop is unstable).
    """
    slopes = sorted({slope_of(config), 0.0})
    signs = [sorted({-float(x), float(x)}) for x in (assumptions.rho, assumptions.r, assumptions.s)]
    w = frequencies(gain_of(config) * max(min(varentropies), 1e-4), 300)
    rows = []
    for V, rho, r, s, slope in itertools.product(varentropies, *signs, slopes):
        plant = Plant(V, rho, r, s, slope)
        poles = np.asarray(coupled(config, plant).poles(), np.complex128)
        radius = float(np.abs(poles).max())
        stable = radius < 1.0 - 1e-12
        alpha = disk_margin(coupled(config, plant, at="sensors"), w) if stable else np.full(w.shape, math.nan)
        rows.append(
            {
                "varentropy": V,
                "rho": rho,
                "r": r,
                "s": s,
                "slope": slope,
                "spectral_radius": radius,
                "relative_gain": plant.relative_gain(),
                "effective": plant.effective(),
                "poles": poles,
                "w": w,
                "alpha": alpha,
            }
        )
    return tuple(rows)
