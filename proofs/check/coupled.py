"""Theorem `coupled`: one quadratic function falls at every token, whatever the effects are within their bounds.

Where theta follows at once (widen_after = 1) the deviations (x, v, y) of u, of what the last temperature does to the
model entropy, and of theta obey, whatever the signs and however all of it varies (see :mod:`proofs.check.small_gain`),

    x+ = mu ((1 - k lambda V) x - k lambda rho y),   v+ = s x,   y+ = g (v + r y).

The matrix lies in the convex hull of the vertices below, and -A'PA is concave in A: P > 0 and q^2 P - A'PA > 0 at the
vertices make x'Px fall to at most q^2 x'Px at every token. P is a hint. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

from proofs.check.base import Claim, Hints, Subject, format_hint, refuse
from proofs.check.small_gain import Coupling, coupling, pairing, small_gain, switching_theta, uncovered
from proofs.exact import positive_definite

__all__ = ["Matrix", "claims", "falls", "vertices"]

Matrix = Sequence[Sequence[Fraction]]

_GRID = 2**30


def _down(x: Fraction) -> Fraction:
    return Fraction(x.numerator * _GRID // x.denominator, _GRID)


def _up(x: Fraction) -> Fraction:
    return -_down(-x)


def vertices(c: Coupling) -> list[Matrix]:
    """Return matrices whose convex hull holds every A, entries rounded outward to multiples of 2^-30: at most 42.

    Row 1 over (k lambda V, k lambda rho): lambda at its least only matters at V_lo, because (lambda V_max, lambda rho)
    lies between the others. mu = 0, a clamp, is a zero row. Row 3 over (g, g r): at g = 0 both are 0.
    """
    k, s = c.gain, _up(c.s)
    pull = [(_down(k * c.v_min), _up(k * c.rho)), (_up(k * c.v_max), _up(k * c.rho))]
    if c.share < 1:
        pull.append((_down(k * c.share * c.v_min), _up(k * c.share * c.rho)))
    zero, g = Fraction(0), _up(c.slope)
    own = _up(g * c.r)  # of the rounded slope: the triangle (0, 0), (-g, -g r), (-g, g r) grows as a whole
    first = [(1 - a, zero, sign * b) for a, b in pull for sign in (-1, 1)]
    third = [(zero, -g, -own), (zero, -g, own), (zero, zero, zero)]
    return [(u, (sign * s, zero, zero), theta) for u, sign, theta in product([*first, (zero,) * 3], (-1, 1), third)]


def falls(p: Matrix, decay: Fraction, matrices: Sequence[Matrix]) -> bool:
    """Decide exactly whether P > 0 and decay P - A'PA > 0 at every matrix A.

    Parameters
    ----------
    p : Matrix
        Symmetric.
    decay : Fraction
        q^2.
    matrices : sequence of Matrix
        The A, of the size of ``p``.
    """
    if not positive_definite(p):
        return False
    n = range(len(p))
    for a in matrices:
        pa = [[sum((p[i][k] * a[k][j] for k in n), Fraction(0)) for j in n] for i in n]
        rest = [[decay * p[i][j] - sum((a[k][i] * pa[k][j] for k in n), Fraction(0)) for j in n] for i in n]
        if not positive_definite(rest):
            return False
    return True


def _quadratic(subject: Subject, c: Coupling | None, gains: Claim, hints: Hints) -> Claim:
    """Decide `coupled`; a hint that does not verify is refused."""
    law, dwell = subject.config.loop.temperature, subject.config.loop.pruning.config.widen_after
    theorem = "coupled"
    if law.name != "feedback" and subject.integral_action:
        return Claim(theorem, "unknown", f"no theorem covers the law {law.name!r}")
    if law.name != "feedback" or subject.law.temperature == 0.0 or subject.law.t_min == subject.law.t_max:
        return Claim(theorem, "not applicable", "u keeps no state: see small-gain")
    if dwell > 1:
        reason = f"theta switches (it waits {dwell} tokens to widen): see small-gain and switching-theta"
        return Claim(theorem, "not applicable", reason)
    if (why := uncovered(subject)) is not None or c is None:
        return Claim(theorem, "unknown", why or "no bound on the varentropy was given")
    if gains.status in ("refuted", "not applicable"):
        no_function = (
            f"no common quadratic function falls: {gains.reason}" if gains.status == "refuted" else gains.reason
        )
        return Claim(theorem, gains.status, no_function)
    p, decay = hints.get("lyapunov"), hints.get("lyapunov_decay")
    if p is None or decay is None:
        return Claim(theorem, "unknown", "no common quadratic function was found")
    shaped = isinstance(p, tuple) and len(p) == 3 and all(isinstance(row, tuple) and len(row) == 3 for row in p)
    if not shaped or not all(isinstance(x, Fraction) for row in p for x in row) or not isinstance(decay, Fraction):
        raise refuse("hints.lyapunov", "not a 3 x 3 matrix and a rate", format_hint(p))
    if not 0 < decay < 1 or any(p[i][j] != p[j][i] for i in range(3) for j in range(i)):
        raise refuse("hints.lyapunov", "not symmetric, or a rate outside (0, 1)", format_hint(p))
    corners = vertices(c)
    if not falls(p, decay, corners):
        raise refuse("hints.lyapunov", "does not fall at every vertex", format_hint(p))
    reason = (
        f"a quadratic function of (u, text effect, theta) falls by a share of {float(1 - decay):.3g} or more at every "
        f"token, at all {len(corners)} vertices, while |H - H*| <= {subject.assumptions.error_nats:g} nats"
    )
    return Claim(
        theorem, "proved", reason, {"decay_squared": str(decay), "vertices": len(corners), "incremental": c.share == 1}
    )


def claims(subject: Subject, hints: Hints) -> list[Claim]:
    """Decide `coupled`, `small-gain`, `switching-theta` and `pairing`."""
    pruning = subject.config.loop.pruning.name
    if pruning != "budget":
        why = f"the pruning law {pruning!r} has no budget that moves with entropy: nothing couples"
        return [Claim(name, "not applicable", why) for name in ("coupled", "small-gain", "switching-theta", "pairing")]
    c = coupling(subject, hints) if subject.config.loop.temperature.name == "feedback" else None
    gains = small_gain(subject, c)
    return [_quadratic(subject, c, gains, hints), gains, switching_theta(subject, c), pairing(subject)]
