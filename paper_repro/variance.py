"""What entropy feedback does to the variance of tempered entropy on real text, and whether linear theory predicts it.

Worlds: *replay* (the laws read recorded distributions; the text is fixed) on the bank's texts and on the engine's own,
and *live* (the engine decodes the same prompts and seeds under each law; the text reacts). Prediction: from each text
at fixed T alone, its autocovariance and the moments of V. Source: ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.pieces import Pieces
from entropic_ctl import results
from entropic_ctl.bank import Bank
from entropic_ctl.config import digest, from_mapping
from entropic_ctl.errors import BadInputError
from figures import variance as drawing
from paper_repro import variance_live as live_world
from paper_repro.claims import VARIANCE_CUT
from paper_repro.outcome import Outcome
from paper_repro.variance_arms import Arm
from paper_repro.variance_memory import memory
from paper_repro.variance_readings import Moments, draws, moments, predict
from paper_repro.variance_study import DRAWS, Source, Study
from paper_repro.variance_texts import LEAST_TOKENS, Texts, from_bank, own_targets
from paper_repro.variance_words import sentences, tables
from paper_repro.worlds import Certifier
from proofs.theory import phi_for_cut

__all__ = ["FULL", "QUICK", "Size", "run"]

Progress = Callable[[str, float], None]
Table = dict[str, np.ndarray]
_MEMORY_GAIN = 0.02


@dataclass(frozen=True, slots=True)
class Size:
    """How much a run does: texts and tokens of each on the engine."""

    texts: int
    tokens: int


QUICK, FULL = Size(8, 64), Size(24, 224)


def _columns(rows: list[dict[str, Any]]) -> Table:
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def run(
    work: Path,
    *,
    quick: bool = False,
    replay_only: bool = False,
    uncertified: bool = False,
    temperature: float = 0.8,
    seed: int = 0,
    size: Size | None = None,
    progress: Progress | None = None,
    parts: Path | None = None,
    model: Any = None,
    bank: Bank | None = None,
) -> Outcome:
    """Measure, predict, and write tables, ``findings.json`` and ``variance.png`` into ``work``.

    Parameters
    ----------
    work : Path
        Existing folder.
    quick : bool
        Few arms on few and short texts.
    replay_only : bool
        Without the engine.
    uncertified : bool
        Also run arms whose gain no theorem covers; else they are left out, and named.
    temperature : float
        T0, one of those the bank's texts were sampled at.
    seed : int
        Of the engine's sampling and of the bootstrap.
    size : Size, optional
        In place of the version's own.
    progress : callable, optional
        (what, share of the whole).
    parts : Path, optional
        Folder that keeps every finished run of the engine for a later call to go on with; the caller removes it.
    model, bank : optional
        In place of the embedded default model and the shipped bank.

    Raises
    ------
    BadInputError
        If the bank holds no text at T0, there are fewer than 2 texts, or ``parts`` holds those of other settings.
    """
    from sim.trajectories import load_bank

    say = progress or (lambda *_: None)
    size = size or (QUICK if quick else FULL)
    if not replay_only and (size.texts < 2 or size.tokens < 2):
        raise BadInputError("too little text", field="size", value=(size.texts, size.tokens), allowed=">= 2 each")
    bank = load_bank() if bank is None else bank
    config = from_mapping(
        {"seed": seed, "loop": {"temperature": {"law": "fixed", "temperature": temperature}}}, where="variance"
    )
    certifier = Certifier(config, int(bank.meta["vocab_size"]))
    study = Study(config, certifier, quick=quick, uncertified=uncertified)
    source = Source("bank", from_bank(bank, temperature), seed)
    engine = None if replay_only else _engine(study, model, size, parts, say)
    climbs = [(source, study.replay("replay, bank", source, lambda name: say(f"replay the bank: {name}", 0.02)))]
    say("memory of the texts", 0.03)
    about = {"gain": _MEMORY_GAIN, "certified": study.limit, "seed": seed}
    remembered = [memory(texts, "bank", **about) for texts in _bank_texts(bank)]
    if engine is not None:
        own, rungs = _live(study, engine, say)
        climbs.append((own, rungs))
        remembered.append(memory(own.texts, "engine", **about))
    for where, rungs in climbs:
        for name, on in rungs.items():
            study.climb(where, name, on)
    found = {"ratios": _columns(study.ratios), "ladder": _columns(study.ladder), "texts": _columns(study.texts)}
    found["memory"] = {name: np.concatenate([part[name] for part in remembered]) for name in remembered[0]}
    say("write and draw", 0.98)
    return _finish(work, study, found)


def _bank_texts(bank: Bank) -> list[Texts]:
    """Return the bank's texts at every recorded temperature that has long ones."""
    long = np.diff(bank.offset) >= LEAST_TOKENS
    return [from_bank(bank, float(t)) for t in np.unique(bank.temperature[long])]


@dataclass(frozen=True)
class _Engine:
    """The model, the prompts, how many tokens of each, and the runs that are done."""

    model: Any
    texts: list[tuple[str, list[int]]]
    tokens: int
    pieces: Pieces


def _engine(study: Study, model: Any, size: Size, parts: Path | None, say: Progress) -> _Engine:
    """Load the model and open ``parts``, which must be of these settings, this version and this machine."""
    if model is None:
        from backends import fetch, models

        fetch.fetch(lambda line: say(f"model: {line}", 0.0))
        model = models.load()
    texts = live_world.prompts(model, size.texts)
    settings = {
        "size": asdict(size),
        "arms": [asdict(arm) for arm in study.arms],
        "uncertified": study.uncertified,
        "model": {"name": model.name, "vocab_size": model.vocab_size, "dtype": str(model.model.dtype)},
        "prompts": digest({"ids": [ids for _, ids in texts]}),
        "threads": torch.get_num_threads(),
        **results.stamp(study.config, study.config.seed),
    }
    return _Engine(model, texts, size.tokens, Pieces(parts, settings))


def _live(study: Study, engine: _Engine, say: Progress) -> tuple[Source, dict[str, dict[str, Moments]]]:
    """Run the engine: fixed T, fixed T with other seeds, then every live arm; add their rows."""
    config, seed, texts = study.config, study.config.seed, engine.texts
    runs = 2 + sum(arm.live for arm in study.arms)
    done = 0

    def decode(name: str, **settings: Any) -> live_world.Live:
        nonlocal done
        first = done
        done += 1
        keyed = {"tokens": engine.tokens, "seed": seed, **settings}

        def tell(part: float) -> None:
            say(f"engine: {name}", 0.05 + 0.92 * (first + part) / runs)

        made = engine.pieces.get(
            f"{first:02d}-" + re.sub(r"[^\w.=]+", "-", name),
            lambda: vars(live_world.decode(config, engine.model, texts, progress=tell, **keyed)),
        )
        return live_world.Live(**made)

    fixed = decode("fixed T", tabulate=True)
    source = Source("engine", live_world.tabulated(fixed, texts, config.loop.temperature.config.temperature), seed)
    rungs = study.replay("replay, engine's texts", source, lambda _: None)
    other = decode("fixed T, other seeds", seed=seed + 1_000_003)
    same = Arm("feedback", 0.0)
    study.add(
        "live", source, same, source.base.mean, "stateless", moments(list(other.entropy)), 0.0,
        predicted=source.base, label="fixed T, other seeds",
    )  # fmt: skip
    for arm, targets, word in study.allowed(source):
        if not arm.live:
            continue
        spec = arm.spec(config)
        got = decode(arm.name, law=own_targets(spec, targets))
        edges = np.array([spec.config.t_min, spec.config.t_max])
        clamped = float(np.isclose(got.temperature[..., None], edges, rtol=1e-6).any(-1).mean())
        found = moments(list(got.entropy))
        study.add("live", source, arm, targets, word, found, clamped)
        if arm.name in rungs:
            rungs[arm.name]["live"] = found
        _to_the_end(study, source, arm, targets, word, fixed, got)
    return source, rungs


def _to_the_end(
    study: Study, source: Source, arm: Arm, targets: Any, word: str, fixed: live_world.Live, got: live_world.Live
) -> None:
    """Add the same comparison up to the first end of text, for texts whose both versions are long enough before it."""
    keep = np.flatnonzero((fixed.ended >= LEAST_TOKENS) & (got.ended >= LEAST_TOKENS))
    if keep.size < 2:
        return
    series = [[run.entropy[i, : run.ended[i]] for i in keep] for run in (fixed, got)]
    base, found = moments(series[0]), moments(series[1])
    cut = [source.varentropy[i][: fixed.ended[i]] for i in keep]
    predicted = predict(arm.spec(study.config), series[0], cut, targets[keep])
    drawn = draws(int(keep.size), DRAWS, source.seed)
    study.add(
        "live, to the end of text", source, arm, targets[keep], word, found, float("nan"),
        base=base, drawn=drawn, predicted=predicted,
    )  # fmt: skip


def _finish(work: Path, study: Study, found: dict[str, Table]) -> Outcome:
    stamp = results.stamp(study.config, study.config.seed)
    for name, table in found.items():
        for suffix in ("parquet", "csv"):
            results.write_table(work / f"{name}.{suffix}", table, stamp)
    start = study.config.loop.temperature.config.temperature
    thresholds = [(phi_for_cut(cut), 1.0 - cut) for cut in VARIANCE_CUT]
    drawing.draw(
        found["ratios"], found["ladder"], found["memory"], work / "variance.png", thresholds=thresholds,
        claim=(1.0 - VARIANCE_CUT[1], 1.0 - VARIANCE_CUT[0]),
        title=f"Variance of tempered entropy under entropy feedback, T0 = {start:g}, "
        "95% intervals over texts (paired bootstrap)",
    )  # fmt: skip
    outcome = Outcome(study.config)
    outcome.tables = tables(found)
    outcome.sentences = sentences(found, study.left_out, study.limit)
    said = {heading: list(lines) for heading, lines in outcome.sentences}
    outcome.numbers = {"findings": said, "certified_gain_limit": study.limit, "left_out": study.left_out}
    results.write_json(work / "findings.json", {**outcome.numbers, "stamp": stamp})
    return outcome
