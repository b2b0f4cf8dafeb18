"""Theorem `variance`: what each law does to the variance of entropy, in the linear model with exogenous entropy.

Model about the mean, per sequence: tempered entropy y = w + V u, w stationary; `feedback` gives u+ = u - k y, so with
g = k V and u measured in nats, u+ = u - g y, y seen d = 0 or 1 tokens late. The ratio is var(y) / var(w). For AR(1) w
with coefficient phi it is a closed form, proved here from the discrete Lyapunov equation.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from proofs.check.base import Claim, Subject, decimal, rounded
from proofs.check.gain import Bounds, loop_limit, varentropy_ceiling
from proofs.check.solver import effort

__all__ = ["ar1_form", "claim", "closed_form_holds", "lyapunov_ratio", "phi_needed"]

_DIGITS = 24
"""After the point of a varentropy: rounding it must not lift k V over the limit that the gain's own bound keeps."""

_CUTS = {"same": Fraction(1), "cut_15": Fraction(17, 20), "cut_20": Fraction(4, 5)}
_DEGREES = {0: (5, 4), 1: (7, 6)}
"""Lag -> degrees in g and in phi that neither side of the cross-multiplied identity exceeds (proof book, section 5)."""


def ar1_form(lag: int, g: Fraction, phi: Fraction) -> tuple[Fraction, Fraction]:
    """Return numerator and denominator (> 0 for 0 < g < limit, |phi| < 1) of the closed form.

    Parameters
    ----------
    lag : int
        Observation lag, 0 or 1 tokens.
    g : Fraction
        Loop gain k V.
    phi : Fraction
        Coefficient of the AR(1) entropy.
    """
    if lag == 0:
        return 2 * (1 - phi), (2 - g) * (1 - (1 - g) * phi)
    return 2 * (1 - phi) * (1 + g * phi), (1 - g) * (2 + g) * (1 - phi + g * phi**2)


def lyapunov_ratio(lag: int, g: Fraction, phi: Fraction) -> Fraction:
    """Solve S = A S A' + e1 e1' exactly for x = (w, u) or (w, u, last y) and return var(w + u) / var(w).

    Parameters
    ----------
    lag : int
    g, phi : Fraction
        As in :func:`ar1_form`.
    """
    if lag == 0:
        A: Sequence[Sequence[Fraction | int]] = ((phi, 0), (-g, 1 - g))
    else:
        A = ((phi, 0, 0), (0, 1, -g), (1, 1, 0))
    n = len(A)
    index = {pair: m for m, pair in enumerate((i, j) for i in range(n) for j in range(i, n))}
    rows = []
    for (i, j), own in index.items():
        row = [Fraction(0)] * (len(index) + 1)
        row[own] += 1
        for a in range(n):
            for b in range(n):
                row[index[min(a, b), max(a, b)]] -= A[i][a] * A[j][b]
        row[-1] = Fraction((i, j) == (0, 0))
        rows.append(row)
    for k in range(len(rows)):  # Gauss and Jordan; a zero pivot everywhere raises StopIteration: no unique solution
        pivot = next(m for m in range(k, len(rows)) if rows[m][k])
        rows[k], rows[pivot] = rows[pivot], rows[k]
        rows[k] = [x / rows[k][k] if x else x for x in rows[k]]
        for m, row in enumerate(rows):
            if m != k and row[k]:
                rows[m] = [x - row[k] * y if y else x for x, y in zip(row, rows[k], strict=True)]
    S = [row[-1] for row in rows]
    return (S[index[0, 0]] + 2 * S[index[0, 1]] + S[index[1, 1]]) / S[index[0, 0]]


@lru_cache(maxsize=2)
def closed_form_holds(lag: int) -> bool:
    """Prove the closed form for *all* 0 < g < limit, |phi| < 1: equality on a product grid larger than the degrees.

    Both sides are rational in (g, phi); cross-multiplied they are polynomials of at most ``_DEGREES``, and one that
    vanishes on a grid of more points than its degree in each variable is zero. Lag 0 also checks, likewise, the square
    4 phi (2-g)(1-(1-g) phi) = (1+phi)^2 - (2 phi g - (3 phi - 1))^2, from which the best gain follows.
    """
    in_g, in_phi = _DEGREES[lag]
    for g in (loop_limit(lag) * i / (in_g + 2) for i in range(1, in_g + 2)):
        for phi in (Fraction(2 * j, in_phi + 2) - 1 for j in range(1, in_phi + 2)):
            above, below = ar1_form(lag, g, phi)
            if lyapunov_ratio(lag, g, phi) * below != above:
                return False
            if lag == 0 and 4 * phi * below != (1 + phi) ** 2 - (2 * phi * g - (3 * phi - 1)) ** 2:
                return False
    return True


def _root(polynomial: Any, low: Fraction, high: Fraction) -> dict[str, str]:
    """Bracket the one root of a polynomial with opposite signs at the ends, by exact bisection to 2^-30."""
    if polynomial(low) * polynomial(high) >= 0:
        raise ValueError("no change of sign")
    rising = polynomial(low) < 0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if (polynomial(middle) < 0) == rising else (low, middle)
    return {"lower": decimal(low, up=False), "upper": decimal(high, up=True)}


def phi_needed(lag: int, g: Fraction, ratio: Fraction) -> dict[str, str]:
    """Bracket the phi in (0, 1) from which on AR(1) entropy has its variance multiplied by at most ``ratio`` <= 1.

    F = numerator - ratio * denominator has degree 1 or 2 in phi, F(0) > 0 > F(1): one root in between.

    Parameters
    ----------
    lag : int
    g : Fraction
        Loop gain k V, 0 < g < limit.
    ratio : Fraction
        0 < ratio <= 1.
    """
    return _root(lambda phi: _excess(lag, g, phi, ratio), Fraction(0), Fraction(1))


def _excess(lag: int, g: Fraction, phi: Fraction, ratio: Fraction) -> Fraction:
    above, below = ar1_form(lag, g, phi)
    return above - ratio * below


def _best(ratio: Fraction) -> dict[str, str]:
    """Bracket the phi > 1/3 at which the best gain, g = (3 phi - 1) / (2 phi), multiplies the variance by ``ratio``."""
    return _root(lambda phi: ratio * (1 + phi) ** 2 - 8 * phi * (1 - phi), Fraction(1, 3), Fraction(1))


def _at(subject: Subject, varentropy: Fraction) -> dict[str, Any]:
    lag, g = subject.config.engine.observation_lag, Fraction(subject.law.gain) * varentropy
    found: dict[str, Any] = {"varentropy": str(varentropy), "loop_gain": decimal(g, up=True)}
    if not 0 < g < loop_limit(lag):
        return found | {"white_ratio": None}
    above, below = ar1_form(lag, g, Fraction(0))
    found["white_ratio"] = decimal(above / below, up=True)
    if lag == 1:  # entropy that alternates strongly enough varies less too: F(-1) < 0
        found["phi_alternating"] = _root(lambda phi: _excess(1, g, phi, Fraction(1)), Fraction(-1), Fraction(0))
    return found | {f"phi_{name}": phi_needed(lag, g, ratio) for name, ratio in _CUTS.items()}


def claim(subject: Subject, bounds: Bounds | None) -> Claim:
    """Decide `variance`; ``bounds`` are of the ``feedback`` law."""
    name, law, lag = subject.config.loop.temperature.name, subject.law, subject.config.engine.observation_lag
    if name in ("solve", "damped"):
        return _same_step(subject)
    if name not in ("feedback", "fixed") and law.t_min < law.t_max:
        return Claim("variance", "unknown", f"no theorem covers the law {name!r}")
    if name != "feedback" or law.t_min == law.t_max:
        return Claim("variance", "not applicable", "the temperature never moves")
    if law.gain <= 0:
        return Claim(
            "variance", "refuted", f"gain {law.gain!r}: deviations do not die out, no variance is stationary", {}
        )
    if subject.config.speculation.draft_tokens:
        return Claim("variance", "unknown", "drafted tokens: several updates from one temperature are not modelled")
    if not closed_form_holds(lag):
        return Claim("variance", "unknown", "the closed form does not solve the Lyapunov equation")
    most = varentropy_ceiling(subject.vocab_size) if bounds is None else bounds.v_max.hi
    places = {
        "v_lo": Fraction(subject.assumptions.varentropy_min),
        "v_max": Fraction(decimal(most, up=True, digits=_DIGITS)),
    }
    if bounds is not None and bounds.here is not None:
        places["target"] = Fraction(decimal(bounds.here.hi, up=True, digits=_DIGITS))
    numbers: dict[str, Any] = {place: _at(subject, v) for place, v in places.items()}
    if lag == 0:
        numbers["any_gain"] = {f"phi_{cut}": _best(_CUTS[cut]) for cut in ("cut_15", "cut_20")}
    place = "target" if "target" in places else "v_max"
    here = numbers[place]
    if here["white_ratio"] is None:
        least = Fraction(0) if bounds is None or bounds.here is None else Fraction(law.gain) * bounds.here.lo
        if least >= loop_limit(lag):  # the lower bound: an upper one refutes nothing
            reason = f"k V >= {rounded(least, up=False)} is not below {loop_limit(lag)}: no variance is stationary"
            return Claim("variance", "refuted", reason, numbers)
        reason = (
            f"k V <= {rounded(Fraction(here['loop_gain']), up=True)} at V <= {rounded(places[place], up=True)} is not "
            f"known to be below {loop_limit(lag)}"
        )
        return Claim("variance", "unknown", reason, numbers)
    bands = {cut: rounded(Fraction(here[f"phi_{cut}"]["upper"]), up=True, figures=4) for cut in _CUTS}
    same = rounded(Fraction(here["phi_same"]["lower"]), up=False, figures=4)
    v, g, white = (
        rounded(x, up=True) for x in (places[place], *(Fraction(here[x]) for x in ("loop_gain", "white_ratio")))
    )
    reason = (
        f"at V = {v} (g = k V = {g}) the linear loop multiplies the variance of white entropy, about the mean of one "
        f"sequence, by at most {white}; AR(1) entropy, phi >= 0, varies less only above phi = {same}, by 15% from "
        f"{bands['cut_15']}, by 20% from {bands['cut_20']}"
    )
    return Claim("variance", "proved", reason, numbers)


def _same_step(subject: Subject) -> Claim:
    """`solve` and `damped`: the error about H* of one token, from the same token's distribution."""
    law = subject.law
    needed, most, _ = effort(subject)
    if needed is None or needed > law.max_iterations:
        return Claim("variance", "unknown", "the solver may stop short of H*: see theorem solve")
    if subject.config.loop.temperature.name == "solve":
        numbers = {"error_ratio": "0", "error_nats": str(Fraction(law.tolerance_nats))}
        reason = f"on every token whose target lies within reach of the clamps |H - H*| <= {law.tolerance_nats!r} nats"
        return Claim("variance", "proved", reason, numbers)
    f, v_lo = Fraction(law.fraction), Fraction(subject.assumptions.varentropy_min)
    worst = (1 - f) * most / ((1 - f) * most + f * min(v_lo, most)) if f < 1 else Fraction(0)
    numbers = {
        "error_ratio": str(1 - f),
        "error_ratio_worst": decimal(worst, up=True),
        "error_nats": str(Fraction(law.tolerance_nats)),
    }
    reason = (
        f"on every token whose target lies within reach of the clamps f = {law.fraction!r} leaves at most "
        f"{rounded(1 - f, up=True)} of the error at T0 where V is the same all the way, {rounded(worst, up=True)} with "
        f"V in [{float(v_lo)!r}, {rounded(most, up=True)}], plus the tolerance, {law.tolerance_nats!r} nats"
    )
    return Claim("variance", "proved", reason, numbers)
