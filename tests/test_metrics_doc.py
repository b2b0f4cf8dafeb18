"""``METRICS.md`` has a section for every command that writes numbers, and every number is in it.

``command.entropic`` checks the file of every ``--json`` that any test asks for; here is the rest.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import typer.main
from metrics_doc import commands, defined, undefined

from entropic_ctl.cli import app
from entropic_ctl.replay import ReplayReport


def _with_json(group: Any, before: str = "") -> list[str]:
    found = []
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found += _with_json(command, f"{before}{name} ")
        elif any("--json" in parameter.opts for parameter in command.params):
            found.append(before + name)
    return found


def test_every_command_that_writes_numbers_has_a_section_in_alphabetical_order() -> None:
    assert set(_with_json(typer.main.get_command(app))) | {"bench steps"} == set(commands())
    firsts = [name for name in commands() if name not in ("repro", "check")]  # these share a section with another
    assert firsts == sorted(firsts)


@pytest.mark.parametrize(
    ("values", "unknown"),
    [
        ({"trials": [{"rate": 1.0, "margin_mean": 2.0}], "slo": {"ttft_s": None}}, []),
        ({"trials": [{"rate": 1.0}, {"speed": 2.0}]}, ["trials.speed"]),
        ({"trials": None, "slo": {}, "stamp": {"config": {"any": {"thing": 1}}}}, []),
        ({"rate": {"mean": 1.0}, "rates": 2.0}, ["rate.mean", "rates"]),
    ],
)
def test_a_key_that_nothing_defines_is_found(values: dict[str, Any], unknown: list[str]) -> None:
    assert undefined("capacity", values) == unknown


def test_words_in_capitals_stand_for_names_and_nothing_else_does() -> None:
    assert undefined("bench engine", {"batches": {"8": {"engine_ms": 1.0}}}) == []
    assert undefined("bench engine", {"batches": {"8": {"engine_s": 1.0}}}) == ["batches.8.engine_s"]
    assert undefined("calibrate", {"calibration": {"step of 12 tokens, ms": "1", "step of 12 rows, ms": "1"}}) == [
        "calibration.step of 12 rows, ms"
    ]


def test_the_fields_of_results_are_defined_and_no_others() -> None:
    """Results whose commands need a model, from the classes that hold them."""
    pytest.importorskip("torch")
    from backends.attention.audit import CertificateAudit
    from backends.decode_table import Row
    from backends.eval import Settings
    from backends.eval_summary import COLUMNS

    def fields(kind: Any) -> set[str]:
        return {field.name for field in dataclasses.fields(kind)}

    def under(command: str, prefix: str) -> set[str]:
        names = defined(command)
        return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}

    assert set(defined("bench certificate")) == fields(CertificateAudit)
    assert set(defined("replay")) == fields(ReplayReport)
    assert under("bench decode", "rows.") == fields(Row)
    assert under("eval", "settings.") == fields(Settings)
    assert under("eval", "comparisons.") == set(COLUMNS)


def test_the_numbers_of_the_engine_benchmark_are_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from tiny_model import byte_tokenizer, tiny_llama

    from backends import bench, models

    monkeypatch.setattr(bench, "copy_bandwidth", lambda *_: 1e10)
    model = models.wrap(tiny_llama(), byte_tokenizer(), name="tiny")
    assert not undefined("bench engine", bench.bench_engine(model, batches=(1, 2), context=8, steps=2))
