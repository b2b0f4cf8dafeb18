"""What ``entropic_ctl/METRICS.md`` defines, by command and heading of a table's first column."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import entropic_ctl

__all__ = ["commands", "defined", "summary_part", "undefined"]

EVERY = "every command"
_WORDS = "words with more than one meaning"
Key = tuple[str, ...]


@functools.cache
def _halves() -> tuple[str, str]:
    text = (Path(entropic_ctl.__file__).parent / "METRICS.md").read_text(encoding="utf-8")
    summary, _, rest = text.partition("\n# Commands\n")
    return summary, rest


def summary_part() -> str:
    """Return the text on the summary of a run."""
    return _halves()[0]


@functools.cache
def _tables() -> dict[str, dict[str, list[str]]]:
    """Title of a section -> heading of a first column -> names in it, with the name of their subsection before."""
    out: dict[str, dict[str, list[str]]] = {}
    for section in _halves()[1].split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        found: dict[str, list[str]] = {}
        head = prefix = ""
        for line in body.splitlines():
            if line.startswith("### "):
                prefix = "".join(f"{name}." for name in re.findall(r"`(.+?)`", line)[:1])
            elif line.startswith("| ") and not line.startswith("| ---"):
                cell = line.split("|")[1].strip()
                if cell.startswith("`") and head:
                    found[head] += [prefix + name for name in re.findall(r"`(.+?)`", cell)]
                else:
                    head = cell.replace("`", "")
                    found.setdefault(head, [])
            elif not line:
                head = ""
        out[title] = found
    return out


def commands() -> list[str]:
    """Return the commands that have a section, in its order."""
    return [name for title in _tables() if title not in (EVERY, _WORDS) for name in title.split(", ")]


def defined(command: str, kind: str = "key") -> list[str]:
    """Return the names in a command's tables whose first column is headed ``kind``."""
    return next((tables.get(kind, []) for title, tables in _tables().items() if command in title.split(", ")), [])


def undefined(command: str, values: Mapping[str, Any]) -> list[str]:
    """Return the keys of what a command wrote as JSON that nothing defines."""
    patterns = [[_pattern(part) for part in name.split(".")] for name in (*defined(EVERY), *defined(command))]
    return sorted(".".join(key) for key in set(_keys(values)) if not any(_matches(key, each) for each in patterns))


def _pattern(part: str) -> re.Pattern[str]:
    """Return what a part of a defined key stands for: itself, with any text for a word in capitals."""
    return re.compile("".join(".+" if word.isupper() and len(word) > 1 else re.escape(word) for word in
                              re.split(r"([A-Z]+)", part)))  # fmt: skip


def _matches(key: Key, patterns: list[re.Pattern[str]]) -> bool:
    anything = patterns[-1].pattern == re.escape("*")
    fixed = patterns[:-1] if anything else patterns
    if len(key) > len(fixed) and not anything:
        return False
    return all(pattern.fullmatch(part) for part, pattern in zip(key, fixed, strict=False))


def _keys(value: Any, before: Key = ()) -> Iterator[Key]:
    """Yield the path to every leaf; an empty or undefined part is one, entries of a list share the path of the list."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _keys(item, (*before, str(name)))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for item in value:
            yield from _keys(item, before)
    else:
        yield before
