"""Options that several commands share."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from entropic_ctl.errors import BadInputError

__all__ = [
    "Certificate",
    "Config",
    "Force",
    "Json",
    "MaybeConfig",
    "Model",
    "Out",
    "Perfetto",
    "PerfettoSeconds",
    "Seed",
    "Switch",
    "Uncertified",
    "within",
]

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the numbers as JSON.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write result tables into this folder.")]
Force = Annotated[bool, typer.Option("--force", help="Replace results of another configuration in that folder.")]
Certificate = Annotated[
    Path | None,
    typer.Option("--certificate", metavar="FILE", help="Gain certificate; made and checked anew if absent."),
]
Uncertified = Annotated[bool, typer.Option("--uncertified", help="Run a gain that nothing proves stable.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Root seed, in place of the one in the config.")]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="DIR", help="Hugging Face folder or GGUF file; the embedded default if absent."),
]
Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file that describes the run.")]
MaybeConfig = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML file that describes the run.")]

Perfetto = Annotated[
    Path | None,
    typer.Option("--perfetto", metavar="FILE", help="Also write a timeline for https://ui.perfetto.dev (JSON)."),
]
PerfettoSeconds = Annotated[
    float | None,
    typer.Option("--perfetto-seconds", metavar="S", help="Only the first S seconds of the run in that timeline."),
]


class Switch(enum.StrEnum):
    """On or off."""

    ON = "on"
    OFF = "off"


def within(option: str, values: Iterable[float | None], lo: float, hi: float) -> None:
    """Refuse a NaN, an infinity and what lies outside [lo, hi], before anything is computed; None passes.

    Raises
    ------
    BadInputError
        Naming the option.
    """
    for value in values:
        if value is not None and not lo <= value <= hi:  # false for NaN
            raise BadInputError("out of range", where=option, value=value, allowed=f"[{lo:g}, {hi:g}]")
