"""Hints for the coupled loop: a quadratic Lyapunov function over the vertices, by a linear matrix inequality (cvxpy).

Maximise t subject to P - (A/q)' P (A/q) >= t N at every vertex A and trace P = 3, in balanced units; if t > 0,
then round P to few bits and verify *exactly*. The
solver's status is never taken as proof: what does not verify is not proposed.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from proofs.check import Subject
from proofs.check.base import Hints, format_hint
from proofs.check.coupled import Matrix, falls, vertices
from proofs.check.small_gain import coupling, small_gain, uncovered
from proofs.search.gain import hints as gain_hints

__all__ = ["asked", "hints", "rounded", "solve", "verified"]

_Solver = Callable[[npt.NDArray[np.float64], npt.NDArray[np.float64]], npt.NDArray[np.float64] | None]
_PAIRS = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]
_BITS = (10, 16, 24, 36)
_STEPS = 32


@functools.cache
def _program(count: int) -> _Solver:
    """Return a solver for ``count`` vertices, compiled once: (maps of P to P - A'PA, diagonal of N) -> P, or None."""
    import cvxpy as cp

    basis = [np.zeros((3, 3)) for _ in _PAIRS]
    for matrix, (i, j) in zip(basis, _PAIRS, strict=True):
        matrix[i, j] = matrix[j, i] = 1.0
    p, t = cp.Variable(6), cp.Variable()
    maps, least = [cp.Parameter((6, 6)) for _ in range(count)], cp.Parameter((3, 3), PSD=True)

    def symmetric(v: Any) -> Any:
        return sum(v[k] * basis[k] for k in range(6))

    constraints = [symmetric(m @ p) >> t * least for m in maps] + [symmetric(p) >> 0, p[0] + p[3] + p[5] == 3]
    problem = cp.Problem(cp.Maximize(t), constraints)

    def run(values: npt.NDArray[np.float64], slack: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | None:
        least.value = np.diag(slack)
        for m, value in zip(maps, values, strict=True):
            m.value = value
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                problem.solve(solver=cp.CLARABEL)
        except (cp.error.SolverError, ArithmeticError):
            return None
        if p.value is None or not np.isfinite(p.value).all() or not t.value > 0:
            return None
        return np.asarray(sum(p.value[k] * basis[k] for k in range(6)))

    return run


def solve(matrices: npt.NDArray[np.float64], decay: float = 1.0) -> npt.NDArray[np.float64] | None:
    """Ask the solver for P > 0 with decay P - A'PA > 0 at every vertex; its answer is no proof.

    Parameters
    ----------
    matrices : ndarray, shape (count, 3, 3)
    decay : float
        q^2.

    Returns
    -------
    ndarray, shape (3, 3), or None if the solver has none
    """
    w = _scales(matrices)
    matrices = matrices * w[None, None, :] / w[None, :, None]
    maps = np.empty((len(matrices), 6, 6))
    for column, (i, j) in enumerate(_PAIRS):
        e = np.zeros((3, 3))
        e[i, j] = e[j, i] = 1.0
        image = e - np.einsum("aki,kl,alj->aij", matrices, e, matrices) / decay
        maps[:, :, column] = image[:, [a for a, _ in _PAIRS], [b for _, b in _PAIRS]]
    own = np.abs(np.einsum("aii->ai", matrices)).max(axis=0) ** 2 / decay
    p = _program(len(matrices))(maps, np.maximum(1.0 - own, 1e-12))
    return None if p is None else np.asarray(p / np.outer(w, w), np.float64)


def _scales(matrices: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return units of the states in which the largest entries are balanced: sqrt(right / left Perron vector)."""
    most = np.abs(matrices).max(axis=0) + 1e-9

    def perron(a: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        values, vectors = np.linalg.eig(a)
        vector: npt.NDArray[np.float64] = np.abs(np.real(vectors[:, np.argmax(np.real(values))])) + 1e-12
        return vector

    return np.asarray(np.sqrt(perron(most) / perron(most.T)))


def rounded(p: npt.NDArray[np.float64], bits: int) -> Matrix:
    """Round P to ``bits`` bits per entry, relative to its diagonal entries; scaled to P_11 near 1."""
    size = np.sqrt(np.maximum(np.diag(p), 1e-300))
    scale = 2.0 ** np.round(np.log2(size / size[0]))
    base = 4.0 ** round(math.log2(size[0]))
    exact = [[Fraction(0)] * 3 for _ in range(3)]
    for i, j in _PAIRS:
        unit = float(scale[i] * scale[j])
        whole = round(float(p[i, j]) / (base * unit) * 2**bits)
        exact[i][j] = exact[j][i] = Fraction(whole, 2**bits) * Fraction(unit)
    return exact


def verified(p: npt.NDArray[np.float64], decay: Fraction, matrices: Sequence[Matrix]) -> Matrix | None:
    """Return P rounded to as few bits as the exact check accepts, or None.

    Parameters
    ----------
    p : ndarray, shape (3, 3)
    decay : Fraction
        q^2.
    matrices : sequence of Matrix
        The vertices.
    """
    if not np.isfinite(p).all() or not (np.diag(p) > 0).all():
        return None
    return next((q for q in (rounded(p, bits) for bits in _BITS) if falls(q, decay, matrices)), None)


def _floats(matrices: Sequence[Matrix]) -> npt.NDArray[np.float64]:
    return np.array([[[float(x) for x in row] for row in a] for a in matrices])


def _room(floats: npt.NDArray[np.float64]) -> float:
    """Return 1 - q^2 of the slowest vertex: no P falls faster."""
    return 1.0 - float(np.abs(np.linalg.eigvals(floats)).max()) ** 2


def _fastest(matrices: Sequence[Matrix]) -> tuple[Matrix, Fraction] | None:
    """Return (P, q^2) with nearly the least q^2 that verifies."""
    floats = _floats(matrices)
    best = _room(floats)

    def attempt(step: int) -> tuple[Matrix, Fraction] | None:
        decay = 1 - Fraction(math.floor(best * step / _STEPS * 2**40), 2**40)
        if not 0 < decay < 1:
            return None
        p = solve(floats, float(decay))
        found = None if p is None else verified(p, decay, matrices)
        return None if found is None else (found, decay)

    good, bad, found = 0, _STEPS, attempt(1)
    if found is None:
        return None
    good = 1
    while bad - good > 1:
        middle = (good + bad) // 2
        more = attempt(middle)
        found, good, bad = (found, good, middle) if more is None else (more, middle, bad)
    return found


def asked(subject: Subject) -> list[Matrix] | None:
    """Return the vertices that the solver is asked about; None where it is not asked."""
    law, pruning = subject.config.loop.temperature, subject.config.loop.pruning
    if law.name != "feedback" or pruning.name != "budget" or pruning.config.widen_after > 1:
        return None
    if subject.law.temperature == 0.0 or subject.law.t_min == subject.law.t_max or uncovered(subject) is not None:
        return None
    known = Hints({name: format_hint(value) for name, value in gain_hints(subject).items()})
    c = coupling(subject, known)
    if c is None or c.gain * c.v_max >= 2 or small_gain(subject, c).status in ("refuted", "not applicable"):
        return None
    corners = vertices(c)
    return corners if _room(_floats(corners)) > 0 else None


def hints(subject: Subject) -> dict[str, Any]:
    """Return ``lyapunov`` and ``lyapunov_decay`` where a common quadratic function is found, else nothing."""
    corners = asked(subject)
    found = None if corners is None else _fastest(corners)
    return {} if found is None else {"lyapunov_decay": found[1], "lyapunov": found[0]}
