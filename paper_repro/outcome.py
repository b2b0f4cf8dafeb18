"""What a built-in run hands back to the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from entropic_ctl.config import RunConfig
from paper_repro.sections import print_table

__all__ = ["Outcome", "as_rows"]


def as_rows(table: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return a table as JSON-able rows; NaN becomes None."""
    names = list(table)
    columns = [table[name].tolist() for name in names]
    return [
        {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in zip(names, row, strict=True)}
        for row in zip(*columns, strict=True)
    ]


@dataclass
class Outcome:
    """Result of a demonstration or reproduction.

    Parameters
    ----------
    config : RunConfig
        The configuration that ran, for the stamp.
    violations : list of str
        Guarantees that did not hold; empty on success.
    tables : list of (title, header, rows)
        For people.
    sentences : list of (heading, sentences)
        For people.
    numbers : dict
        For machines.
    """

    config: RunConfig
    violations: list[str] = field(default_factory=list)
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = field(default_factory=list)
    sentences: list[tuple[str, Sequence[str]]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def show(self, console: Console) -> None:
        """Print tables and sentences."""
        for title, header, rows in self.tables:
            print_table(console, title, header, rows)
            console.print()
        for heading, sentences in self.sentences:
            console.print(heading, style="bold", markup=False)
            for sentence in sentences:
                console.print(f"- {sentence}", markup=False, soft_wrap=True)
            console.print()
