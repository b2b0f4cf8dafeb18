"""What ``entropic margins`` and ``entropic phase`` do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from entropic_ctl import cli_live, cli_output
from entropic_ctl import config as configs
from entropic_ctl.cli_console import console
from entropic_ctl.cli_options import within
from entropic_ctl.cli_run import bank_vocabulary, load_config, need, placed, say, write_json
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError

__all__ = ["margins", "phase"]

_SHOWN = (
    ("varentropy", "varentropy V, nats²", "{:.4g}"),
    ("loop_gain", "loop gain k V", "{:.4g}"),
    ("stable", "stable", "{}"),
    ("gain_margin", "gain margin (factor on k)", "{:.4g}"),
    ("gain_limit", "k at the limit", "{:.4g}"),
    ("phase_margin_deg", "phase margin, degrees", "{:.2f}"),
    ("delay_margin", "delay margin, tokens", "{:.3f}"),
    ("delay_margin_steps", "whole tokens of further delay", "{}"),
    ("modulus_margin", "modulus margin |1 + L|", "{:.4g}"),
    ("disk_margin", "disk margin α", "{:.4g}"),
    ("disk_gain_low", "  any gain from", "{:.4g}"),
    ("disk_gain_high", "  any gain up to", "{:.4g}"),
    ("disk_phase_deg", "  or any phase up to, degrees", "{:.2f}"),
    ("sensitivity_peak", "sensitivity peak", "{:.4g}"),
    ("bandwidth", "bandwidth of T, rad per token", "{:.4g}"),
    ("rejection", "disturbances halved in power below", "{:.4g}"),
    ("settling_tokens", "settling to 2%, tokens", "{:.0f}"),
    ("overshoot", "overshoot of a step", "{:.1%}"),
    ("spectral_radius", "largest pole", "{:.6g}"),
)


def margins(
    config_file: Path,
    *,
    given: Sequence[float],
    ema: float,
    vocab: int | None,
    assume: Sequence[str],
    out: Path | None,
    export: Path | None,
    force: bool,
    json_file: Path | None,
) -> int:
    """Compute the margins, show and write them; 1 if a loop is unstable that an equilibrium of the target can have."""
    within("--ema", [ema], 1e-6, 1.0)
    within("--varentropy", given, 1e-6, 1e6)
    config = load_config(config_file)
    inputs: tuple[Path | str, ...] = (config_file, *configs.inputs_of(config))
    cli_output.check_file(json_file, "--json", out, *inputs)
    cli_output.check_file(export, "--export", json_file, out, *inputs)
    if export is not None and export.suffix not in (".json", ".mat"):
        raise BadInputError("unknown kind of file", where="--export", value=export.suffix, allowed=".json, .mat")
    reporting = need("proofs.margins_report", "proofs")
    assumptions = need("proofs.assumptions", "proofs").parse(assume)
    instead = reporting.static(config)
    if instead is not None:
        if out is not None or export is not None:
            raise BadInputError(
                f"nothing to draw or export: {instead['instead']}",
                where=str(config_file),
                field="loop.temperature.law",
                value=instead["law"],
                allowed="feedback",
            )
        write_json(json_file, instead, config)
        console().print(
            f"{instead['law']!r} feeds back no past error: no loop, hence no gain, phase or delay margin that could be "
            f"lost.\n{instead['instead']}"
        )
        return 0
    size = vocab if vocab is not None else bank_vocabulary(config)
    with placed(config_file):
        study = reporting.study(config, size, assumptions, given=given, ema=ema)
    numbers = {
        "vocab_size": size,
        "gain": config.loop.temperature.config.gain,
        "observation_lag": config.engine.observation_lag,
        "ema": ema,
        "largest_certified_gain": None if study.certified is None else study.certified[0],
        "loops": {
            each.name: {"what": each.what, "judged": each.judged, **dataclasses.asdict(each.margins)}
            for each in study.loops
        },
        "stable": study.stable,
        "coupled": study.coupled,
        "assumptions": dataclasses.asdict(assumptions),
        "notes": study.notes,
    }
    if export is not None:
        need("proofs.margins", "proofs").save(export, study.systems)
    if out is not None:
        subject = {
            "command": "margins",
            "settings": {name: numbers[name] for name in ("vocab_size", "ema", "assumptions")},
            "varentropies": list(given),
            "config": configs.resolve(config),
        }
        with cli_output.folder(out, subject, force=force) as work:
            _write_margins(work, study, numbers, config)
    write_json(json_file, numbers, config)
    _tell_margins(study)
    if out is not None:
        say(f"figure: {out / 'margins.png'}")
    if export is not None:
        say(f"state spaces: {export} ({', '.join(study.systems)})")
        say(
            "note: control.margin and control.stability_margins (python-control 0.10) miss the crossing at z = -1, "
            "the gain margin of these loops at lag 0: use proofs.margins.margins, or closed-loop poles over the gain"
        )
    return 0 if study.stable else 1


def _write_margins(work: Path, study: Any, numbers: dict[str, Any], config: RunConfig) -> None:
    results, drawing = need("entropic_ctl.results", "sim"), need("figures.margins", "figures")
    stamp = results.stamp(config, config.seed)
    for name, table in study.tables.items():
        for suffix in ("parquet", "csv"):
            results.write_table(work / f"{name}.{suffix}", table, stamp)
    results.write_json(work / "margins.json", {**numbers, "stamp": stamp})
    worst = study.loops[0].margins
    here = next((each.margins for each in study.loops if each.name == "target"), None)
    filtered = "" if numbers["ema"] == 1.0 else f", entropies averaged with weight {numbers['ema']:g}"
    room = f"unstable: k times {worst.gain_margin:.3g} is the limit"
    if worst.stable:
        room = f"gain margin {worst.gain_margin:.3g}, {worst.delay_margin_steps} more tokens of delay"
    elif here is not None and here.stable and not study.loops[0].judged:
        room += f"; steepest equilibrium of the target: stable, gain margin {here.gain_margin:.3g}"
    drawing.draw(
        *(work / f"{name}.parquet" for name in ("loops", "frequency", "locus", "poles", "step")),
        work / "margins.png",
        title=f"feedback, k = {numbers['gain']:g}, lag {numbers['observation_lag']}{filtered}, "
        f"{numbers['vocab_size']:,} tokens\nsteepest logits: {room}",
        certified=study.certified,
    )
    if study.coupled:
        drawing.draw_coupled(
            *(work / f"{name}.parquet" for name in ("coupled", "coupled_poles", "coupled_frequency")),
            work / "coupled.png",
            title=f"temperature and budget together, k = {numbers['gain']:g}, slope of θ {study.coupled['slope']:.3g}: "
            f"{study.coupled['stable']} of {study.coupled['corners']} corners stable",
        )


def _tell_margins(study: Any) -> None:
    table = Table(title="linear temperature loop", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for each in study.loops:
        table.add_column(each.name, justify="right")
    for name, text, form in _SHOWN:
        values = [getattr(each.margins, name) for each in study.loops]
        yes = {True: "yes", False: "NO"}
        cells = ["–" if v is None else yes[v] if isinstance(v, bool) else form.format(v) for v in values]
        wrong = name == "stable" and any(each.judged and not each.margins.stable for each in study.loops)
        table.add_row(text, *cells, style="red" if wrong else None)
    screen = console()
    screen.print(table)
    for each in study.loops:
        beyond = "" if each.judged else "; worst case while logits change, no equilibrium of this target is as steep"
        screen.print(f"{each.name}: {each.what}{beyond}")
    both = study.coupled
    if both:
        low, high = both["relative_gain"]
        screen.print(
            f"coupled with the budget: {both['stable']} of {both['corners']} corners stable, largest pole "
            f"{both['spectral_radius']:.6g}, relative gain of u on the tempered entropy in [{low:.4g}, {high:.4g}]"
        )
        if both["disk_margin"] is not None:
            top = "any" if both["gain_both_high"] is None else f"{both['gain_both_high']:.4g}"
            screen.print(
                f"both channels at once: disk margin {both['disk_margin']:.4g}: gains from {both['gain_both_low']:.4g} "
                f"to {top}, or phases up to {both['phase_both_deg']:.2f} degrees"
            )
    for note in study.notes:
        screen.print(note)
    if study.certified is not None:
        screen.print(f"largest certified gain: {study.certified[0]:.6g}")
    verdict = "stable" if study.stable else "NOT stable"
    screen.print(f"{verdict}, judged without v_max" if not study.loops[0].judged else verdict)


def phase(
    config_file: Path,
    out: Path,
    *,
    plant: str,
    gains: Sequence[float],
    lags: Sequence[int],
    tokens: int,
    level: float | None,
    vocab: int | None,
    assume: Sequence[str],
    force: bool,
    json_file: Path | None,
) -> None:
    """Run the shipped laws on frozen logits, write tables and pictures."""
    within("--gain", gains, -10.0, 10.0)
    within("--model-entropy", [level], 0.0, 100.0)
    config = load_config(config_file)
    cli_output.check_file(json_file, "--json", out, config_file, *configs.inputs_of(config))
    scenes, portraits = need("proofs.phase_scene", "proofs"), need("proofs.phase_coupled", "proofs")
    assumptions = need("proofs.assumptions", "proofs").parse(assume)
    results, drawing = need("entropic_ctl.results", "sim"), need("figures.phase", "figures")
    size = vocab if vocab is not None else bank_vocabulary(config)
    with placed(config_file):
        scene = scenes.scene(config, size, plant, _recorded(config) if plant == "recorded" else None)
    subject = {
        "command": "phase",
        "settings": {"plant": plant, "gains": list(gains), "lags": list(lags), "tokens": tokens, "level": level},
        "vocab_size": size,
        "assumptions": dataclasses.asdict(assumptions),
        "config": configs.resolve(config),
    }
    pruning = config.loop.pruning
    moves = pruning.name == "budget" and pruning.config.theta_nats < pruning.config.theta_wide_nats
    with cli_output.folder(out, subject, force=force) as work, cli_live.progress("phase") as report:
        report("trajectories", 0.1)
        with placed(config_file):
            table, maps, findings = scenes.study(config, size, scene, gains=gains, lags=lags, tokens=tokens)
        stamp = results.stamp(config, config.seed)
        tables = {"phase": table, "map": maps}
        both = None
        if moves and scene.at is not None:
            with placed(config_file):
                both = portraits.coupled(config, scene, assumptions, level_nats=level, tokens=max(tokens, 120))
            tables |= {"coupled": both.trajectories, "coupled_field": both.field, "coupled_curves": both.curves}
        for name, columns in tables.items():
            for suffix in ("parquet", "csv"):
                results.write_table(work / f"{name}.{suffix}", columns, stamp)
        report("figures", 0.6)
        for lag in lags:
            drawing.draw(
                work / "phase.parquet",
                work / f"phase-lag{lag}.png",
                titles={f["arm"]: f"{f['arm']}\n{_says(f)}" for f in findings if f["lag"] == lag},
                what=f"{scene.what}{'' if plant != 'recorded' else f' (bank of {size:,} tokens)'}, lag {lag}",
                target_nats=scene.law.target_nats,
                maps=work / "map.parquet",
                lag=lag,
            )
        if both is not None:
            need("figures.phase_coupled", "figures").draw(
                *(work / f"coupled{part}.parquet" for part in ("", "_field", "_curves")),
                work / "coupled.png",
                title=f"{scene.what}, k = {config.loop.temperature.config.gain:g}, lag "
                f"{config.engine.observation_lag}, widening after {pruning.config.widen_after} tokens; rho = "
                f"{assumptions.rho:g}, r = {assumptions.r:g}, s = {assumptions.s:g}, model entropy {both.level_nats:g} "
                "nats at the equilibrium",
                band=both.band,
            )
        numbers = {
            "plant": scene.what,
            "target_nats": scene.law.target_nats,
            "equilibrium_temperature": None if scene.at is None else math.exp(scene.at),
            "varentropy": scene.varentropy,
            "limits": {str(lag): scene.limit(lag) for lag in lags},
            "coupled_band_u": None if both is None else both.band,
            "arms": findings,
        }
        results.write_json(work / "phase.json", {**numbers, "stamp": stamp})
    write_json(json_file, numbers, config)
    _tell_phase(numbers)
    if moves and both is None:
        say("no coupled portrait: the clamps cannot reach the target")
    pictures = [*(f"phase-lag{lag}.png" for lag in lags), *(["coupled.png"] if both else [])]
    say("figures: " + ", ".join(str(out / name) for name in pictures))


def _says(finding: dict[str, Any]) -> str:
    return f"{finding['theorem']}: {finding['status']}; {finding['ends']}"


def _recorded(config: RunConfig) -> tuple[Any, Any]:
    """Return temperatures and entropies of a recorded step whose entropy can be brought to the target."""
    if config.loop.temperature.name != "feedback":
        return (), ()
    bank = need("sim.trajectories", "sim").bank_of(config)
    row = need("sim.stability", "sim").reachable_token(bank, config.loop.temperature.config)
    return bank.grid, bank.entropy_grid[row]


def _tell_phase(numbers: dict[str, Any]) -> None:
    table = Table(title=numbers["plant"], title_justify="left", box=None, pad_edge=False)
    for name in ("lag", "gain", "k V", "certificate", "in the end", "half range of u"):
        table.add_column(name, justify="right" if name in ("lag", "gain", "k V", "half range of u") else "left")
    for each in numbers["arms"]:
        loop_gain = "–" if each["loop_gain"] is None else f"{each['loop_gain']:.4g}"
        says = _says(each)
        table.add_row(
            str(each["lag"]), f"{each['gain']:.5g}", loop_gain, *says.split("; "), f"{each['amplitude']:.3g}"
        )  # fmt: skip
    console().print(table)
    if numbers["equilibrium_temperature"] is not None:
        console().print(
            f"equilibrium at T = {numbers['equilibrium_temperature']:.4g}, varentropy {numbers['varentropy']:.4g} nats²"
        )
    else:
        console().print("no equilibrium: the clamps cannot reach the target")
