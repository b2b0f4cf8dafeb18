"""The report as a page: a summary first, then explanations, tables, figures and what is needed to repeat the run."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from entropic_ctl.config import resolve, resolve_loop
from paper_repro import explain, sections, statements
from paper_repro.claims import ARMS, BASELINE
from paper_repro.outcome import Outcome
from paper_repro.report import Report, number
from paper_repro.worlds import RealEngine

if TYPE_CHECKING:
    from paper_repro.study import Study

__all__ = ["load_note", "reasons", "summary", "tidy", "write"]

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
_SHOWN = (0, 3, 7)
"""Prompts whose texts are printed: a question, a story to continue, the long document."""
_PROMPT_CHARACTERS, _TEXT_CHARACTERS = 160, 400


def tidy(text: str) -> str:
    """Return a sentence with its gain rounded for people; the certificate itself keeps every digit."""
    return re.sub(r"\bk = (\d+\.\d+)", lambda found: f"k = {number(float(found[1]), 4)}", text)


def load_note(effects: Mapping[str, np.ndarray]) -> str:
    """Return the warning that the engine's times are this machine's, with this run's interval; "" without an engine."""
    pick = (effects["world"] == "engine") & (effects["arm"] == ARMS[-1]) & (effects["metric"] == "latency")
    if not pick.any():
        return ""
    shown = sections.with_interval(*(float(effects[name][pick][0]) for name in ("ratio", "low", "high")))
    return (
        "Engine times are wall-clock times: their ratios vary with the machine and with what else it is doing, and its "
        f"intervals cover the noise of this run only. Here the full loop's latency ratio is {shown} over "
        f"{int(effects['pairs'][pick][0])} pairs; run it again on a quiet machine before relying on it."
    )


def summary(study: Study, promises: Sequence[str], engine: RealEngine | None) -> list[str]:
    """Return the opening paragraphs: what was tried, what held, what improved, what got worse, what the paper gets."""
    runs, focus = study.runs, [ARMS[-1]]
    tried = []
    for world in dict.fromkeys(runs["world"].tolist()):
        here = runs["world"] == world
        arms = len(set(runs["arm"][here].tolist()))
        tried.append(f"{arms} arms × {int(runs['repeat'][here].max()) + 1} runs in the {world}")
    goal = (
        "Tried: an inference engine whose temperature, KV reading and scheduling follow the model's entropy, against "
        f"standard inference: {' and '.join(tried)}, paired by seed."
    )
    out = [goal]
    broken = len(study.violations)
    held = promises[0] if not broken else f"{broken} guarantees were VIOLATED: {'; '.join(study.violations)}."
    replayed = " Recorded engine runs replay bit for bit." if study.replay_text and not broken else ""
    certified = f" The gain of the temperature law is {study.certificate_status}." if study.certificate_status else ""
    out.append(f"Held: {held}{replayed}{certified}")
    found = [c for c in statements.changes(study.effects, focus) if not c.small]
    for word, state in (("Improved", "better"), ("Got worse", "worse")):
        parts = []
        for world in dict.fromkeys(runs["world"].tolist()):
            mine = [c.shown for c in found if c.world == world and c.state == state]
            parts.append(f"{world.capitalize()}: {'; '.join(mine[:4]) if mine else 'nothing for sure'}")
        out.append(
            f"{word}: full loop against baseline, the largest sure changes that are not within 2%. {'. '.join(parts)}."
        )
    verdicts = study.effects["verdict"][study.effects["arm"] == ARMS[-1]].tolist()
    counts = {v: verdicts.count(v) for v in dict.fromkeys(verdicts) if v}
    out.append(
        "The paper: its claims for the full loop, held against both worlds, came out as "
        + ", ".join(f"{count} × {verdict}" for verdict, count in sorted(counts.items(), key=lambda item: -item[1]))
        + "."
    )
    if engine is not None and (note := load_note(study.effects)):
        out.append(f"Caution: {note}")
    return out


def reasons(effects: Mapping[str, np.ndarray]) -> list[list[str]]:
    """Return (verdict, why, where) with each reason once; the numbers stand in the tables above."""
    groups: dict[tuple[str, str], dict[str, dict[str, list[str]]]] = {}
    for i in range(effects["verdict"].shape[0]):
        world, arm, metric, verdict, reason = (
            str(effects[name][i]) for name in ("world", "arm", "metric", "verdict", "reason")
        )
        if verdict:
            why = reason.split(": ", 1)[1] if reason[:1].isdigit() else reason
            why = why.split(" (none larger", 1)[0]
            groups.setdefault((verdict, why), {}).setdefault(world, {}).setdefault(arm, []).append(metric)
    return [
        [
            verdict,
            why,
            "; ".join(f"{w}: " + ", ".join(f"{a} ({', '.join(m)})" for a, m in x.items()) for w, x in at.items()),
        ]
        for (verdict, why), at in sorted(groups.items())
    ]


def write(
    study: Study,
    outcome: Outcome,
    measured: Sequence[Table],
    beside: Sequence[Table],
    engine: RealEngine | None,
) -> None:
    """Write ``report.html`` of a study."""
    said = dict(outcome.sentences)
    report = Report(study.title, f"seed {study.config.seed}; every number below is from this run unless it says paper")
    report.heading("Summary")
    for paragraph in summary(study, said["Guarantees"], engine):
        lead, _, text = paragraph.partition(": ")
        report.say(text, lead)
    report.worse(said["What got worse"])
    report.points(said["What improved"], "What improved")
    if said.get("Not resolved"):
        report.small(said["Not resolved"], "Not resolved: the 95% interval includes no change")
    report.heading("What this is")
    report.say(explain.PAPER)
    report.say(explain.TAU)
    report.say(explain.arms_text(study.arms))
    prompts, tokens = (len(engine.prompts), engine.max_new_tokens) if engine is not None else (0, 0)
    report.say(explain.workloads_text(study.config, study.engine_config if engine else None, prompts, tokens))
    report.table(("word", "meaning"), explain.GLOSSARY, "Words used below")
    report.heading("Guarantees")
    report.points(said["Guarantees"])
    if study.certificate_text:
        report.say(tidy(study.certificate_text))
    report.heading("Measured, by world")
    finished = sorted({f"{n:g}" for n in study.runs["requests_finished"].tolist()}, key=float)
    report.say(explain.MEANS.format(requests=" or ".join(finished)))
    for title, header, rows in measured:
        report.table(header, rows, title)
    dense = getattr(study.arms[ARMS[-1]].pruning.config, "dense_layers", 0)
    report.say(explain.PRUNING.format(dense=dense))
    report.heading("Beside the paper")
    report.say(explain.RATIOS)
    for title, header, rows in beside:
        report.table(header, rows, title)
    report.table(("verdict", "why", "where"), reasons(study.effects), "Why each verdict")
    if engine is not None and (note := load_note(study.effects)):
        report.say(note)
    if study.synergy and study.synergy["metric"].shape[0]:
        report.heading("Is the whole more than its parts?")
        report.say(
            "Full loop over the product of the three single-law ratios, paired by seed; 1 is exactly multiplicative. "
            "'better' says whether the interval lies on the better side of 1."
        )
        report.table(("world", "metric", "full / product of parts", "better"), sections.synergy_rows(study.synergy))
    report.heading("Figures")
    for png, caption in study.figures:
        report.figure(png, caption)
    if engine is not None:
        _samples(report, study, engine)
    if study.trials:
        _tuning(report, study.trials)
    if study.notes:
        report.heading("Notes")
        report.points(study.notes)
    _repeat(report, study)
    report.write(study.work / "report.html")


def _tuning(report: Report, trials: Mapping[str, np.ndarray]) -> None:
    report.heading("Tuning")
    report.say(
        "Before the comparison, the gains were searched in simulation. The objective has no unit and is lower the "
        "better; trial 0 is the untuned loop and costs 0. It adds the logarithm of normalised latency (-0.10 is "
        "about 10% less), KL to dense attention in units of 0.01 nats, and half the logarithm of the tempered "
        "entropy's mean square about its target, each relative to trial 0."
    )
    names = [name for name in trials if trials[name].dtype.kind in "fiu"]
    best = int(np.argmin(trials["objective"]))
    rows = [
        [*(number(trials[name][i], 4) for name in names), "chosen" if i == best else ""]
        for i in range(trials["objective"].shape[0])
    ]
    titles = [_UNITS.get(name, name) for name in names]
    report.table((*titles, ""), rows, "every trial, on seeds that no comparison above uses")


_UNITS = {
    "objective": "objective (lower is better)",
    "temperature.gain": "gain k (per nat)",
    "pruning.theta_nats": "θ (nats)",
    "scheduling.gamma": "γ, weight of the latency share (no unit)",
}


def _repeat(report: Report, study: Study) -> None:
    report.heading("How to reproduce")
    report.code(study.command)
    once = ("config", "engine_config")
    report.details("hardware and versions", {k: v for k, v in study.stamp.items() if k not in once})
    mine = resolve(study.config)
    report.details("configuration of the simulated full loop", mine)
    if study.engine_config is not None:
        report.details("engine: only what differs from it", explain.differences(mine, resolve(study.engine_config)))
    plain = explain.differences(mine["loop"], resolve_loop(study.arms[BASELINE])) if BASELINE in study.arms else {}
    report.details("loop of the baseline: only what differs from it", plain)
    if study.certificate:
        report.details("certificate of the full loop's gain", study.certificate)
    report.say(f"Made in {time.perf_counter() - study.started_s:.0f} s.")


def _samples(report: Report, study: Study, engine: RealEngine) -> None:
    report.heading("What the model wrote")
    report.say(
        f"First run of each arm, same prompts and sampling seeds. Texts end where the model ended them or at the "
        f"limit of {engine.max_new_tokens} tokens, which cuts most of them off in mid-sentence; […] marks every cut."
    )
    rows = []
    for number_, (prompt, chat) in enumerate(engine.prompts):
        if number_ not in _SHOWN:
            continue
        for arm in study.arms:
            key = next((key for key in engine.texts if key[0] == arm), None)
            if key is None:
                continue
            shown = _prompt(engine.model, prompt, chat=chat) if not rows or rows[-1][0] != str(number_) else "same"
            rows.append([str(number_), shown, arm, _text(engine, key, number_)])
    report.table(("no.", "prompt", "arm", "text"), rows)


def _prompt(model: Any, prompt: Any, *, chat: bool) -> str:
    kind = "question: " if chat else "text to continue: "
    if isinstance(prompt, str):
        return kind + (prompt if len(prompt) <= _PROMPT_CHARACTERS else prompt[:_PROMPT_CHARACTERS] + " […]")
    text = " ".join(model.decode(prompt[-64:]).split())
    return f"{kind}{len(prompt):,} tokens of the Python language reference, ending: […] {text[-_PROMPT_CHARACTERS:]}"


def _text(engine: RealEngine, key: tuple[str, int], i: int) -> str:
    text, finish = engine.texts[key][i], engine.finishes.get(key, [""] * (i + 1))[i]
    if len(text) > _TEXT_CHARACTERS:
        return f"{text[:_TEXT_CHARACTERS]} […] (cut for display)"
    return f"{text} […] (token limit)" if finish == "length" else text
