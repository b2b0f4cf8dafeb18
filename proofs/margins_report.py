"""Everything ``entropic margins`` shows of one config, as tables and python-control objects. Computes, never draws.

The linear loop is looked at where it matters: at V_max(n), the steepest plant any logits of the vocabulary make; at the
two-level logits whose entropy is the target (the steepest equilibrium for it); at the assumed least varentropy, where
it is slowest; and at whatever the caller names. Then the coupled loop at the corners of the assumptions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from proofs.check import Assumptions, Subject
from proofs.linear_loop import closed, frequencies, gain_of, loop, response, step
from proofs.margins import Margins, margins
from proofs.margins_coupled import Plant, coupled, slope_of, vertices
from proofs.search import certify
from proofs.search.gain import equilibrium_tail_mass, steepest
from proofs.vmax import maximum, two_level

if TYPE_CHECKING:
    import control

__all__ = ["STATIC", "Loop", "Study", "places", "static", "study"]

STATIC = {
    "fixed": "the temperature never moves: the tempered entropy is that of the text (S = 1)",
    "solve": "deadbeat within the token: the entropy is H* wherever the clamps reach it (S = 0), else at a clamp",
    "edt": "static, within the token: T follows the model entropy, with no target",
    "dynatemp": "static, within the token: T follows the entropy at temperature 1, with no target",
    "mirostat2": "a past error is fed back through mu; no margins are computed for it",
    "damped": "static, within the token: the deviation from H* is multiplied by about 1 - f, its variance by (1 - f)^2",
}
"""What a law other than ``feedback`` has instead of margins."""


@dataclass(frozen=True)
class Loop:
    """One varentropy at which the loop is looked at.

    Parameters
    ----------
    name : str
        ``v_max``, ``target``, ``v_min``, ``given1`` ...
    what : str
        Which logits, in words.
    margins : Margins
    judged : bool
        It counts towards the verdict: no equilibrium of the target is steeper, or the caller named it.
    """

    name: str
    what: str
    margins: Margins
    judged: bool = True


@dataclass(frozen=True)
class Study:
    """What ``entropic margins`` found.

    Parameters
    ----------
    loops : tuple of Loop
    certified : (float, float) or None
        Largest certified gain, and the loop gain it has at the steepest of the loops it covers; None with a filter.
    coupled : dict
        Summary over the corners; empty where theta is constant.
    tables : dict
        Name -> columns.
    systems : dict
        Name -> control.StateSpace: ``<loop>_L``, ``_S``, ``_T``, and ``coupled``, ``coupled_L``.
    notes : tuple of str
        What was left out, and why.
    """

    loops: tuple[Loop, ...]
    certified: tuple[float, float] | None
    coupled: dict[str, Any]
    tables: dict[str, dict[str, npt.NDArray[Any]]]
    systems: dict[str, control.StateSpace]
    notes: tuple[str, ...]

    @property
    def stable(self) -> bool:
        """Whether every loop that is judged, and every corner of the coupled one, is stable."""
        alone = all(each.margins.stable for each in self.loops if each.judged)
        return alone and self.coupled.get("stable") == self.coupled.get("corners")


def static(config: RunConfig) -> dict[str, Any] | None:
    """Return what a law other than ``feedback`` has instead of margins; None for ``feedback``.

    Parameters
    ----------
    config : RunConfig
    """
    law = config.loop.temperature
    if law.name == "feedback":
        return None
    said: dict[str, Any] = {
        "law": law.name,
        "margins": None,
        "instead": STATIC.get(law.name, "no past error is fed back"),
    }
    share = {"fixed": 1.0, "solve": 0.0}.get(law.name)
    if law.name == "damped":
        share = 1.0 - law.config.fraction
    return {**said, "sensitivity": share}


def places(
    config: RunConfig, vocab_size: int, assumptions: Assumptions, given: Sequence[float] = ()
) -> tuple[list[tuple[str, str, float]], list[str]]:
    """Return ((name, what, varentropy), ...) at which to look, and notes on what there is not.

    Parameters
    ----------
    config : RunConfig
    vocab_size : int
    assumptions : Assumptions
    given : sequence of float
        Further varentropies, nats squared.
    """
    target = float(config.loop.temperature.config.target_nats)
    found = [("v_max", f"sharpest logits of {vocab_size:,} tokens", float(maximum(vocab_size).upper))]
    notes = []
    r = equilibrium_tail_mass(vocab_size, target)
    V = 0.0 if r is None else two_level(vocab_size, r)[1]
    if V > 0.0:
        found.append(("target", f"two-level logits at H* = {target:g} nats", V))
    else:
        notes.append(f"no two-level logits over {vocab_size:,} tokens have the target entropy {target:g} nats")
    if assumptions.varentropy_min > 0.0:
        found.append(("v_min", "assumed least varentropy", assumptions.varentropy_min))
    else:
        notes.append("least varentropy assumed 0: with V = 0 the entropy does not answer, the pole stays at 1")
    found += [(f"given{i}", "given", float(value)) for i, value in enumerate(given, 1)]
    return found, notes


def _curves(name: str, L: control.StateSpace, w: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[Any]]:
    S, T = closed(L)
    value = response(L, w)
    return {
        "loop": np.full(w.shape, name),
        "w": w,
        "re": value.real,
        "im": value.imag,
        "magnitude": np.abs(value),
        "phase_deg": np.degrees(np.unwrap(np.angle(value))),
        "sensitivity": np.abs(response(S, w)),
        "complementary": np.abs(response(T, w)),
    }


def _locus(config: RunConfig, ema: float, limit: float, most: float) -> dict[str, npt.NDArray[Any]]:
    """Poles over the loop gain k V up to ``most``, for this lag and one token more; it rings at ``limit``."""
    import control

    g = np.unique(np.concatenate((np.linspace(0.0, max(1.5 * limit, most), 301), np.geomspace(1e-3, 1.0, 60) * limit)))
    if ema == 1.0:  # where two real poles of z^d (z - 1) + g meet, so that the branches join
        lags = config.engine.observation_lag, config.engine.observation_lag + 1
        g = np.union1d(g, [d**d / (d + 1) ** (d + 1) for d in lags if d])
    parts = []
    for lag in (config.engine.observation_lag, config.engine.observation_lag + 1):
        L = loop(config, 1.0, ema=ema, gain=1.0, lag=lag)
        loci = np.asarray(control.root_locus_map(L, gains=g).loci)
        count = loci.shape[1]
        parts.append(
            {
                "lag": np.full(g.shape[0] * count, lag),
                "branch": np.tile(np.arange(count), g.shape[0]),
                "loop_gain": np.repeat(g, count),
                "re": loci.real.ravel(),
                "im": loci.imag.ravel(),
            }
        )
    return _stack(parts)


def _stack(parts: Sequence[Mapping[str, npt.NDArray[Any]]]) -> dict[str, npt.NDArray[Any]]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _number(value: Any) -> Any:
    return math.nan if value is None else value


def _coupled(
    config: RunConfig, highest: float, assumptions: Assumptions
) -> tuple[dict[str, Any], dict[str, dict[str, npt.NDArray[Any]]], dict[str, control.StateSpace]]:
    ends = sorted({float(assumptions.varentropy_min), highest})
    rows = vertices(config, ends, assumptions)
    scalars = ("varentropy", "rho", "r", "s", "slope", "spectral_radius", "relative_gain", "effective")
    least = np.array([row["alpha"].min() for row in rows])
    table: dict[str, npt.NDArray[Any]] = {"corner": np.arange(len(rows))}
    table |= {name: np.array([row[name] for row in rows]) for name in scalars}
    table["disk_margin"] = least
    poles = {
        "corner": np.repeat(np.arange(len(rows)), [len(row["poles"]) for row in rows]),
        "varentropy": np.repeat(table["varentropy"], [len(row["poles"]) for row in rows]),
        "re": np.concatenate([row["poles"].real for row in rows]),
        "im": np.concatenate([row["poles"].imag for row in rows]),
    }
    curve = {"w": rows[0]["w"], "alpha": np.min([row["alpha"] for row in rows], axis=0)}
    stable = table["spectral_radius"] < 1.0 - 1e-12
    worst = float(least.min()) if stable.all() else math.nan
    plant = Plant(highest, assumptions.rho, assumptions.r, assumptions.s, slope_of(config))
    summary = {
        "corners": len(rows),
        "stable": int(stable.sum()),
        "spectral_radius": float(table["spectral_radius"].max()),
        "disk_margin": None if math.isnan(worst) else worst,
        "gain_both_low": None if math.isnan(worst) else (1 - worst / 2) / (1 + worst / 2),
        "gain_both_high": None if math.isnan(worst) or worst >= 2 else (1 + worst / 2) / (1 - worst / 2),
        "phase_both_deg": None if math.isnan(worst) else math.degrees(2 * math.atan(worst / 2)),
        "relative_gain": [float(table["relative_gain"].min()), float(table["relative_gain"].max())],
        "effective_share": [
            float(np.min(table["effective"] / np.maximum(table["varentropy"], 1e-300))),
            float(np.max(table["effective"] / np.maximum(table["varentropy"], 1e-300))),
        ],
        "slope": slope_of(config),
    }
    systems = {"coupled": coupled(config, plant), "coupled_L": coupled(config, plant, at="sensors")}
    return summary, {"coupled": table, "coupled_poles": poles, "coupled_frequency": curve}, systems


def study(
    config: RunConfig,
    vocab_size: int,
    assumptions: Assumptions | None = None,
    *,
    given: Sequence[float] = (),
    ema: float = 1.0,
) -> Study:
    """Look at the linear loop of a config with the ``feedback`` law.

    Parameters
    ----------
    config : RunConfig
    vocab_size : int
        Tokens in the model's output, padding rows included.
    assumptions : Assumptions, optional
    given : sequence of float
        Varentropies to look at besides the usual ones, nats squared.
    ema : float
        Weight of the newest entropy in a filter that no shipped law has; 1 is none.

    Raises
    ------
    BadInputError
        For another law, a gain that is not positive, or a varentropy, weight or vocabulary size out of range.
    """
    assumed = assumptions or Assumptions()
    gain_of(config)
    Subject(config, vocab_size, assumed)
    for value in given:
        if not 0.0 < value <= 1e6:
            raise BadInputError("not a varentropy", where="--varentropy", value=value, allowed="(0, 1e6] nats^2")
    where, notes = places(config, vocab_size, assumed, given)
    ceiling = steepest(vocab_size, float(config.loop.temperature.config.target_nats))
    loops = tuple(
        Loop(name, what, margins(config, V, ema=ema), ceiling is None or name != "v_max") for name, what, V in where
    )
    systems: dict[str, control.StateSpace] = {}
    curves, steps, poles = [], [], []
    gains = [each.margins.loop_gain for each in loops]
    w = frequencies(min(gains), 500)
    for each in loops:
        L = loop(config, each.margins.varentropy, ema=ema)
        S, T = closed(L)
        systems |= {f"{each.name}_{letter}": system for letter, system in (("L", L), ("S", S), ("T", T))}
        curves.append(_curves(each.name, L, w))
        settle = each.margins.settling_tokens
        horizon = int(min(20_000, max(60, 1.6 * settle))) if settle is not None else 60
        y = step(T, horizon)
        keep = np.unique(np.concatenate((np.arange(min(60, horizon)), np.geomspace(1, horizon - 1, 300).astype(int))))
        steps.append({"loop": np.full(keep.shape, each.name), "token": keep, "entropy": y[keep]})
        found = np.asarray(T.poles(), np.complex128)
        poles.append({"loop": np.full(found.shape, each.name), "re": found.real, "im": found.imag})
    limit = loops[0].margins.gain_margin * loops[0].margins.loop_gain
    rows = [
        {"loop": e.name, "what": e.what, **{k: _number(v) for k, v in dataclasses.asdict(e.margins).items()}}
        for e in loops
    ]
    tables = {
        "loops": {name: np.array([row[name] for row in rows]) for name in rows[0]},
        "frequency": _stack(curves),
        "step": _stack(steps),
        "poles": _stack(poles),
        "locus": _locus(config, ema, limit, max(gains)),
    }
    both: dict[str, Any] = {}
    if slope_of(config) == 0.0:
        notes.append("theta is constant: no coupled loop")
    elif ema < 1.0:
        notes.append("the coupled loop is that of the shipped laws, without the filter")
    if slope_of(config) != 0.0:
        highest = loops[0].margins.varentropy
        if (
            ceiling is not None and not loops[0].margins.stable
        ):  # no corner there is stable, and no equilibrium is there
            highest = ceiling
            notes.append(f"coupled corners up to V = {ceiling:.4g}, the largest at the target: at v_max u is unstable")
        both, more, others = _coupled(config, highest, assumed)
        tables |= more
        systems |= others
    # the certificate is about the shipped law, without a filter
    k, slack = float(certify(config, vocab_size).limit) if ema == 1.0 else math.nan, limit * (1.0 + 1e-9)
    covered = [k * each.margins.varentropy for each in loops[:2] if k * each.margins.varentropy <= slack]
    return Study(loops, (k, max(covered)) if covered else None, both, tables, systems, tuple(notes))
