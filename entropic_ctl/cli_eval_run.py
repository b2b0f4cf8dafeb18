"""``entropic eval``: load, measure, write tables and figures, print the comparisons and what they say."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from entropic_ctl import certificates, cli_live, cli_output, cli_run
from entropic_ctl import config as configs
from entropic_ctl.cli_console import console
from entropic_ctl.errors import BadInputError

__all__ = ["evaluate"]

_THETAS = (0.01, 0.05)
_OPTIONS = {
    "tasks": "--task",
    "contexts": "--context",
    "positions": "--positions",
    "new_tokens": "--new-tokens",
    "needle_lengths": "--needle-length",
    "length": "--needle-length",
    "depths": "--depth",
    "theta": "--theta",
}
_SHOWN = {
    "long text": ("kept", "kl", "kl_p99", "nll", "perplexity", "agrees", "nll_tempered", "kl_tempered", "temperature"),
    "texts": ("kept", "exact", "rouge_l", "bleu", "repeated_4", "distinct_2", "longest_repeat"),
    "needle": ("kept", "retrieved", "log_p"),
}


def evaluate(
    config_file: Path | None,
    *,
    theta: list[float] | None,
    model: str | None,
    text: Path | None,
    prompts: Path | None,
    wanted: Mapping[str, Any],
    quick: bool,
    out: Path,
    seed: int | None,
    resume: bool,
    certificate: Path | None,
    uncertified: bool,
    force: bool,
    json_file: Path | None,
) -> None:
    """Run the evaluation."""
    config = cli_run.with_overrides(cli_run.load_config(config_file), seed=seed, model=model)
    inputs = (config_file, text, prompts, certificate)
    cli_output.check_file(json_file, "--json", out, *inputs)
    harness, building = cli_run.need("backends.eval", "eval"), cli_run.need("backends.eval_arms", "eval")
    thetas = list(theta or (() if config_file is not None else _THETAS))
    with _named():
        own_lengths = bool(wanted["contexts"] or wanted["needle_lengths"])
        settings = harness.Settings(seed=config.seed, fit_lengths=not own_lengths)
        settings = harness.quick(settings) if quick else settings
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in wanted.items() if value}
        given |= {name: value for name, value in wanted.items() if value == 0}  # refused by its own range
        settings = dataclasses.replace(settings, **given)
        arms = building.arms_of(config, thetas, loop=config_file is not None)
    if "texts" in settings.tasks:
        cli_run.need("backends.eval_overlap", "eval").require_metrics()
    own = cli_run.need("backends.prompts", "engine").read_prompts(prompts) if prompts is not None else None
    if text is not None:
        context = cli_run.need("backends.models", "engine").stated_context(config.model.path)
        harness.check_size(text, settings, config.engine.page_tokens, context)
    subject = {
        "command": "eval",
        "config": configs.resolve(config),
        "thetas": thetas,
        "loop": config_file is not None,
        "settings": dataclasses.asdict(settings),
        "text": str(text or ""),
        "prompts": str(prompts or ""),
    }
    whole = out.resolve()
    parts = whole.with_name(f"{whole.name}.parts")
    results, figure = cli_run.need("entropic_ctl.results", "sim"), cli_run.need("figures.quality", "figures")
    with cli_output.folder(out, subject, force=force, parts=parts) as work, cli_live.progress("eval") as report:
        if parts.exists() and not resume:
            raise BadInputError(
                "an interrupted run is kept here",
                where=str(parts),
                remedy="pass --resume to go on with it, or delete that folder to start anew",
            )
        loaded = cli_run.load_model(config)
        verdict = _certified(config, loaded.vocab_size, certificate, uncertified) if config_file is not None else None
        with _named(), cli_run.placed(config_file):
            found = harness.evaluate(
                loaded,
                arms,
                settings,
                text=text,
                prompts=own,
                verdict=verdict,
                uncertified=uncertified,
                checkpoint=parts,
                progress=report,
            )
        stamp = results.stamp(config, config.seed)
        for name, table in found.tables.items():
            for suffix in ("parquet", "csv"):
                results.write_table(work / f"{name}.{suffix}", table, stamp)
        numbers = {
            "model": loaded.name,
            "arms": list(found.arms),
            "settings": dataclasses.asdict(settings),
            "notes": found.notes,
            "verdict": found.verdict,
            "comparisons": _rows(found.tables["summary"]),
        }
        results.write_json(work / "summary.json", {**numbers, "stamp": stamp})
        title = f"{loaded.name}, {config.model.dtype}, page {config.engine.page_tokens}"
        figure.draw(work / "summary.parquet", work / "quality.png", title=title)
        if "needles" in found.tables:
            figure.draw_needles(work / "needles.parquet", work / "needle.png", title=title)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    cli_run.write_json(json_file, {**numbers, "peak_rss_mib": peak}, config)
    _show(numbers["comparisons"], list(found.arms))
    for line in (*found.notes, *found.verdict):
        console(soft_wrap=True).print(line)
    cli_run.say(f"peak memory {peak:,.0f} MiB; tables and figures: {out}")


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Give errors about a setting the name of its option."""
    try:
        yield
    except BadInputError as error:
        option = _OPTIONS.get(error.field or "")
        if option is None:
            raise
        raise BadInputError(
            error.problem, where=option, value=error.value, allowed=error.allowed, remedy=error.remedy
        ) from None


def _certified(config: configs.RunConfig, vocab: int, certificate: Path | None, uncertified: bool) -> Any:
    """Return the verdict of the configured law, which must hold before minutes of work."""
    verdict = cli_run.certify(config, vocab, certificate, uncertified=uncertified)
    law, _, _ = config.loop.build()
    certificates.require(
        config.loop.temperature,
        law.integral_action,
        config.engine.observation_lag,
        vocab,
        verdict,
        speculation=config.speculation,
        uncertified=uncertified,
    )
    return verdict


def _rows(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = list(table)
    return [dict(zip(names, values, strict=True)) for values in zip(*(table[n].tolist() for n in names), strict=True)]


def _show(rows: list[dict[str, Any]], arms: list[str]) -> None:
    """Print one table: metrics down, arms across, below each value its interval or, where dense has one, the change."""
    table = Table(title="quality against dense attention, 95% intervals", title_justify="left", box=None)
    table.add_column("")
    for arm in arms:
        table.add_column(arm, justify="right")
    at = {(row["task"], row["metric"], row["group"], row["arm"]): row for row in rows}
    for task, metrics in _SHOWN.items():
        groups = dict.fromkeys(row["group"] for row in rows if row["task"] == task)
        for group in (group for group in groups if not group.startswith(("context", "length", "depth"))):
            table.add_row(task if group == "all" else f"{group} {task}", style="bold")
            for metric in metrics:
                cells = [_cell(at.get((task, metric, group, arm))) for arm in arms]
                if any(cells):
                    table.add_row(f"  {metric}", *cells)
    console().print(table)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or math.isnan(row["value"]):
        return ""
    shown = f"{row['value']:.4g}"
    if row["arm"] == "dense":
        return shown
    if math.isfinite(row["difference_low"]):
        change = [row[name] for name in ("difference", "difference_low", "difference_high")]
        return f"{shown}\n{change[0]:+.2g} [{change[1]:+.2g}, {change[2]:+.2g}]" if any(change) else f"{shown}\n="
    return f"{shown}\n[{row['low']:.2g}, {row['high']:.2g}]" if math.isfinite(row["low"]) else shown
