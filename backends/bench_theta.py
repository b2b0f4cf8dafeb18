"""Does a budget driven by entropy beat a constant one at equal KV bytes? Measured on real text, with intervals.

For blocks of consecutive positions of several texts the response to a ladder of budgets is measured once
(:mod:`backends.surface`); every rule is then read off that table (:mod:`backends.theta_policies`), so all rules see the
same positions and differences are paired. Rules: constant; the shipped ``budget`` law at several ratios of wide to
narrow, forward (wide where the previous entropy was low) and mirrored; each in shuffled order; log-linear rules on what
is known before a step (entropy, varentropy, surprise of the last step, a guess of this step's entropy from them and the
last token) and on what is not (this step's own entropy, its own spread of mass); and the choice in hindsight, which no
rule can beat.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backends import theta_policies as policies
from backends.models import LoadedModel
from backends.pieces import Arrays, Pieces
from backends.prompts import document_ids
from backends.surface import SurfaceReader
from backends.theta_policies import Curve, Effect, Surface
from entropic_ctl import results
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig
from entropic_ctl.signals import FloatArray

__all__ = ["FULL", "QUICK", "Outcome", "Plan", "analyse", "bench_theta", "measure"]

Progress = Callable[[str, float], None]
_SOURCES = ("argparse", "typing", "decimal", "tarfile")
"""Long modules of the standard library: source code as real text."""
RATIOS = (1.25, 1.5, 2.0, 3.0, 5.0)
STRENGTHS = (-0.4, -0.2, -0.1, -0.05, 0.05, 0.1, 0.2, 0.4)
SIGNALS = ("entropy", "varentropy", "top", "surprise", "spread", "predicted_entropy", "own_entropy", "own_spread")
"""Of the step before; the guess of this step's entropy from all of them; this step's own, known only afterwards."""
THETA = (0.01, 0.15)
"""Constant budgets between whose bytes rules are compared, nats."""


@dataclass(frozen=True)
class Plan:
    """What to measure: ``prose`` and ``code`` texts of ``tokens`` tokens; ``blocks`` of ``size`` positions in each.

    The blocks are spread over the last ``1 - first / tokens`` of a text; ``rungs`` budgets from 0.002 to 0.8 nats.
    """

    prose: int
    code: int
    tokens: int
    first: int
    blocks: int
    size: int
    rungs: int

    @property
    def ladder(self) -> FloatArray:
        """The budgets, nats."""
        return np.geomspace(0.002, 0.8, self.rungs)

    def starts(self, page: int) -> list[int]:
        """Return where the blocks begin: each inside one page."""
        pages = np.linspace(self.first // page, (self.tokens - 2) // page - 1, self.blocks).astype(int)
        return [int(p) * page + (page - self.size) // 2 for p in pages]


FULL = Plan(prose=4, code=2, tokens=4096, first=1024, blocks=32, size=8, rungs=16)
QUICK = Plan(prose=1, code=0, tokens=1024, first=512, blocks=6, size=4, rungs=8)


def texts(model: LoadedModel, plan: Plan) -> list[tuple[str, list[int]]]:
    """Return the named texts: stretches of the language reference, and modules of the standard library.

    Raises
    ------
    BadInputError
        If the model's context holds no text of the plan, or a source is too short.
    """
    if model.max_context < plan.tokens:
        enough = model.max_context >= QUICK.tokens
        raise BadInputError(
            f"the model's context is too short for texts of {plan.tokens:,} tokens",
            where=model.name,
            field="context",
            value=model.max_context,
            allowed=f">= {plan.tokens:,} tokens",
            remedy=f"pass --quick: it needs {QUICK.tokens:,}" if enough else "name another --model",
        )
    out = [(f"prose {i}", document_ids(model, plan.tokens, start=i * 2 * plan.tokens)) for i in range(plan.prose)]
    for name in _SOURCES[: plan.code]:
        spec = importlib.util.find_spec(name)
        source = spec.loader.get_source(name) if spec is not None and spec.loader is not None else None  # type: ignore[attr-defined]
        ids = model.prompt_ids(source or "", chat=False)[: plan.tokens] if source else []
        if len(ids) < plan.tokens:
            raise BadInputError("not that long", where=f"module {name}", field="tokens", value=plan.tokens)
        out.append((f"code {name}", ids))
    return out


def measure(
    model: LoadedModel,
    plan: Plan,
    *,
    page_tokens: int = 16,
    pruning: PruningConfig | None = None,
    pieces: Pieces | None = None,
    progress: Progress | None = None,
    given: Sequence[tuple[str, list[int]]] | None = None,
) -> tuple[Surface, dict[str, FloatArray], list[Arrays]]:
    """Measure the response surface.

    Returns
    -------
    surface : Surface
    signals : dict of FloatArray (N,)
        By position: ``entropy`` and others of the *step before* under their own names, this step's own as ``own_...``.
    histories : list of dict
        The dense signals of each text from position ``plan.first`` on.
    """
    say, rule = progress or (lambda *_: None), pruning or PruningConfig()
    kept_pieces = pieces or Pieces(None, {})
    named = list(given) if given is not None else texts(model, plan)
    starts, ladder = plan.starts(page_tokens), plan.ladder
    middle = int(np.argmin(np.abs(ladder - 0.05)))
    columns: dict[str, list[Any]] = {}
    histories: list[Arrays] = []

    def add(name: str, values: Any) -> None:
        columns.setdefault(name, []).append(np.asarray(values))

    for number, (name, ids) in enumerate(named):
        reader: list[SurfaceReader] = []

        def ready(ids: list[int] = ids, reader: list[SurfaceReader] = reader) -> SurfaceReader:
            if not reader:
                reader.append(SurfaceReader(model, ids, page_tokens=page_tokens, pruning=rule))
                reader[0].prefill(len(ids) - 1)
            return reader[0]

        def signals_of(ids: list[int] = ids, reader: list[SurfaceReader] = reader) -> Arrays:
            reader.append(SurfaceReader(model, ids, page_tokens=page_tokens, pruning=rule))
            return reader[0].prefill(plan.first)

        say(f"{name}: prefill of {len(ids):,} tokens", number / len(named))
        history = kept_pieces.get(f"signals-{number}", signals_of)
        histories.append({**history, "token": np.asarray(ids[plan.first :], np.float64)})
        for b, start in enumerate(starts):
            make = functools.partial(_block, ready, start, plan.size, ladder)
            part = kept_pieces.get(f"block-{number}-{b}", make)
            say(f"{name}: block {b + 1} of {len(starts)}", (number + (b + 1) / len(starts)) / len(named))
            at = np.arange(start, start + plan.size) - plan.first
            spread = np.log(np.maximum(part["kept"][:, middle], 1e-6))
            for key in ("kl", "nll", "bytes", "kept"):
                add(key, part[key])
            add("block", np.full(plan.size, number * len(starts) + b))
            add("text", np.full(plan.size, number))
            add("position", at + plan.first)
            for key in ("entropy", "varentropy", "top", "surprise"):
                add(key, history[key][at - 1])
            for key in ("entropy", "varentropy"):
                add(f"own_{key}", history[key][at])
            add("token", np.asarray(ids[start : start + plan.size], np.float64))
            add("own_spread", spread)
            add("spread", np.concatenate([[np.nan], spread[:-1]]))
    table = {name: np.concatenate(parts) for name, parts in columns.items()}
    surface = Surface(ladder, *(table.pop(name) for name in ("kl", "nll", "bytes", "block", "text")))
    if len(named) > 1:
        table["predicted_entropy"] = policies.predicted_entropy(table, histories, surface.text)
    return surface, table, histories


def _block(ready: Callable[[], SurfaceReader], start: int, size: int, ladder: FloatArray) -> Arrays:
    return ready().measure(start, size, ladder.tolist())


@dataclass(frozen=True)
class Outcome:
    """``effects`` and ``curves`` tables, and ``findings``: the answer with its intervals."""

    effects: dict[str, Any]
    curves: dict[str, Any]
    findings: dict[str, Any]


def analyse(
    surface: Surface,
    signals: Mapping[str, FloatArray],
    histories: Sequence[Arrays],
    *,
    first: int,
    seed: int = 0,
    draws: int = 1000,
    permutations: int = 20,
) -> Outcome:
    """Compare every rule with constant theta at equal bytes.

    Parameters
    ----------
    surface, signals, histories
        From :func:`measure`.
    first : int
        Position at which the histories begin.
    seed, draws, permutations : int
        Of the bootstrap and the shuffled controls.
    """
    rng = np.random.default_rng([seed, 0x7E7A])
    weight = policies.block_weights(surface, draws, rng)
    levels = policies.byte_levels(surface, THETA)
    constant = policies.sweep(surface, np.ones(surface.kl.shape[0]))
    rules: list[tuple[str, str, float, Curve, Curve | None]] = [("constant", "", 1.0, constant, None)]
    for ratio in RATIOS:
        for name, reverse, d in (("law", False, 4), ("law, no dwell", False, 1), ("mirrored law", True, 4)):
            m = _by_text(surface, signals, histories, first, ratio, reverse=reverse, d=d)
            control = _mean(
                [policies.sweep(surface, policies.shuffled(m, surface.text, rng)) for _ in range(permutations)]
            )
            rules.append((name, "entropy", ratio, policies.sweep(surface, m), control))
    for signal in _known(signals):
        curves = []
        for strength in STRENGTHS:
            curves.append(policies.sweep(surface, policies.log_linear(signals[signal], strength)))
            rules.append(("log-linear", signal, strength, curves[-1], None))
        if surface.text_of_block.max() > 0:  # judged on a text that did not choose it
            picks, curve = policies.best_strength(surface, [*curves, constant], constant, levels)
            rules.append(
                ("log-linear, s chosen", signal, float(np.mean([(*STRENGTHS, 0.0)[i] for i in picks])), curve, None)
            )
    rules.append(("hindsight", "", 0.0, policies.hindsight(surface), None))
    return _tables(surface, signals, rules, levels, weight)


def _by_text(
    surface: Surface,
    signals: Mapping[str, FloatArray],
    histories: Sequence[Arrays],
    first: int,
    ratio: float,
    *,
    reverse: bool,
    d: int,
) -> FloatArray:
    out = np.empty(surface.kl.shape[0])
    for number, history in enumerate(histories):
        where = np.flatnonzero(surface.text == number)
        at = signals["position"][where].astype(np.int64) - first
        out[where] = policies.law_multipliers(history["entropy"], at, ratio, reverse=reverse, d=d)
    return out


def _known(signals: Mapping[str, FloatArray]) -> list[str]:
    return [name for name in SIGNALS if name in signals]


def _mean(curves: Sequence[Curve]) -> Curve:
    parts = (np.mean([getattr(c, name) for c in curves], axis=0) for name in ("kl", "nll", "bytes"))
    return Curve(*parts, curves[0].count)


def _tables(
    surface: Surface,
    signals: Mapping[str, FloatArray],
    rules: Sequence[tuple[str, str, float, Curve, Curve | None]],
    levels: FloatArray,
    weight: FloatArray,
) -> Outcome:
    constant = rules[0][3]
    effects: list[dict[str, Any]] = []
    lines: dict[str, list[Any]] = {name: [] for name in ("rule", "signal", "strength", "bytes", "kl", "nll")}
    for name, signal, strength, curve, control in rules:
        effect = policies.compare(surface, curve, constant, levels, weight)
        row = {"rule": name, "signal": signal, "strength": strength, **_numbers(effect)}
        other = None if control is None else policies.compare(surface, curve, control, levels, weight)
        shuffle = None if control is None else policies.compare(surface, control, constant, levels, weight)
        for label, found in (("against_shuffled", other), ("shuffled", shuffle)):
            for part in ("change", "low", "high"):
                row[f"{label}_{part}"] = float("nan") if found is None else getattr(found, part)
        effects.append(row | {"texts_better": int((effect.by_text < 0).sum()), "texts": effect.by_text.shape[0]})
        kl, nll, size = curve.means(np.ones((1, curve.count.shape[0])))
        for g in range(kl.shape[1]):
            for key, value in zip(lines, (name, signal, strength, size[0, g], kl[0, g], nll[0, g]), strict=True):
                lines[key].append(value)
    limits = {name: policies.ceiling(surface, signals[name], theta=THETA) for name in _known(signals)}
    table = {key: [row[key] for row in effects] for key in effects[0]}
    findings = {
        "positions": int(surface.kl.shape[0]),
        "texts": int(surface.text.max()) + 1,
        "byte_levels": levels.tolist(),
        "question": "Does the entropy-driven theta beat a constant theta at equal KV bytes?",
        "answer": _answer(effects),
        "ceiling": {
            name: {"change": found[0], "kl_over_theta2_by_bin": found[1].tolist()} for name, found in limits.items()
        },
        "constant_theta": _ladder(surface),
    }
    return Outcome(table, lines, findings)


def _ladder(surface: Surface) -> dict[str, list[float]]:
    return {
        "theta_nats": surface.theta.tolist(),
        **{name: getattr(surface, name).mean(axis=0).tolist() for name in ("bytes", "kl", "nll")},
    }


def _numbers(effect: Effect) -> dict[str, float]:
    names = ("change", "low", "high", "nll", "nll_low", "nll_high")
    return {name: float(getattr(effect, name)) for name in names}


def _answer(effects: Sequence[Mapping[str, Any]]) -> str:
    """Return the verdict on the shipped law (ratio 1.5), from its interval."""
    row = next(e for e in effects if e["rule"] == "law" and e["strength"] == 1.5)
    how = f"KL {100 * row['change']:+.1f}% [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}] at equal bytes"
    if row["high"] < 0:
        return f"yes: {how}"
    return f"no, it is worse: {how}" if row["low"] > 0 else f"no difference shown: {how}"


def bench_theta(
    model: LoadedModel, work: Path, *, quick: bool = False, seed: int = 0, parts: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure, compare, and write ``effects``, ``curves`` and ``surface`` tables and ``findings.json`` to ``work``.

    Parameters
    ----------
    model : LoadedModel
        In float32: differences as small as 1e-6 nats are compared.
    work : Path
        Folder to write to.
    quick : bool
        One short text: to try the command.
    seed : int
        Of bootstrap and permutations; the measurement has no randomness.
    parts : Path, optional
        Folder for finished parts of the measurement.
    progress : callable(what, share done), optional

    Returns
    -------
    dict
        The findings.
    """
    plan = QUICK if quick else FULL
    settings = {"model": model.name, "dtype": str(model.model.dtype), **vars(plan)}
    surface, signals, histories = measure(model, plan, pieces=Pieces(parts, settings), progress=progress)
    outcome = analyse(surface, signals, histories, first=plan.first, seed=seed)
    stamp = results.stamp({"command": "bench theta", "seed": seed, **settings}, seed)
    results.write_table(work / "effects.parquet", outcome.effects, stamp)
    results.write_table(work / "curves.parquet", outcome.curves, stamp)
    results.write_table(work / "surface.parquet", _long(surface, signals), stamp)
    results.write_json(work / "findings.json", {**outcome.findings, "stamp": stamp})
    return {**outcome.findings, "effects": outcome.effects}


def _long(surface: Surface, signals: Mapping[str, FloatArray]) -> dict[str, Any]:
    """Return the surface as a table with one row per (position, budget)."""
    n, a = surface.kl.shape
    out: dict[str, Any] = {"theta_nats": np.tile(surface.theta, n)}
    out |= {name: np.repeat(getattr(surface, name), a) for name in ("text", "block")}
    out |= {name: getattr(surface, name).ravel() for name in ("kl", "nll", "bytes")}
    return out | {
        name: np.repeat(values, a) if values.ndim == 1 else values.ravel() for name, values in signals.items()
    }
