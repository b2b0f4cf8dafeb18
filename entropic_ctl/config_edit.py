"""Name one field of a run by its path (``loop.temperature.gain``), change it, compare two runs field by field.

Paths are those of the TOML file: ``seed``, ``table.key``, ``loop.table.key``; ``temperature.gain`` is short for
``loop.temperature.gain``. Changing the name of a law (``loop.scheduling.policy``) keeps the parameters that the old
and the new law share; the others take the new law's defaults. Source: ours.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from typing import Any

from entropic_ctl import config as configs
from entropic_ctl import fields, registry
from entropic_ctl.config import LAWS, TABLES, RunConfig
from entropic_ctl.errors import BadInputError

__all__ = ["check_value", "differences", "flat", "full_path", "kind", "parse_values", "value_of", "with_fields"]


def full_path(path: str) -> str:
    """Return the path with ``loop.`` before a law table.

    Examples
    --------
    >>> full_path("temperature.gain")
    'loop.temperature.gain'
    """
    return f"loop.{path}" if path.partition(".")[0] in LAWS else path


def _declared() -> dict[str, list[Mapping[str, Any]]]:
    """Return every path of every table and law, with what is declared of its values (laws may share a name)."""
    found: dict[str, list[Mapping[str, Any]]] = {}

    def add(table: str, cls: type[Any]) -> None:
        for item in dataclasses.fields(cls):
            if "kind" in item.metadata:
                found.setdefault(f"{table}{item.name}", []).append(item.metadata)

    add("", RunConfig)
    for table, cls in TABLES.items():
        add(f"{table}.", cls)
    for table, (package, key, _) in LAWS.items():
        known = registry.names(package)
        for name in known:
            add(f"loop.{table}.", registry.load(package, name).Config)
        found[f"loop.{table}.{key}"] = [{"kind": "choice", "options": tuple(known), "allowed": ", ".join(known)}]
    return found


def kind(path: str, *, where: str = "settings") -> str:
    """Return the kind of a field: ``number``, ``numbers`` (a list), ``integer``, ``choice``, ``text`` or ``flag``.

    Raises
    ------
    BadInputError
        If no table and no law has such a field.
    """
    return str(_known(path, where)[-1]["kind"])


def check_value(path: str, value: object, *, where: str = "settings") -> None:
    """Refuse a value that the field has under no law; what depends on other fields is not looked at.

    Parameters
    ----------
    path : str
    value : object
    where : str
        What an error names as the place of the value.

    Raises
    ------
    BadInputError
        Naming field, value and allowed range.
    """
    declared = _known(path, where)
    wrong = [fields.problem(meta, value) for meta in declared]
    if all(wrong):
        allowed = " or ".join(dict.fromkeys(str(meta["allowed"]) for meta in declared))
        raise BadInputError(str(wrong[-1]), where=where, field=full_path(path), value=value, allowed=allowed)


def _known(path: str, where: str) -> list[Mapping[str, Any]]:
    known = _declared()
    name = full_path(path)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise BadInputError(
            "no such field",
            where=where,
            field=path,
            allowed="table.key as in the TOML file",
            remedy=f"did you mean {near[0]!r}?" if near else None,
        )
    return known[name]


def value_of(config: RunConfig, path: str) -> Any:
    """Return the value at a path, or None where the law in use has no such parameter."""
    return flat(configs.resolve(config)).get(full_path(path))


def with_fields(config: RunConfig, changes: Mapping[str, Any], *, where: str = "settings") -> RunConfig:
    """Return ``config`` with the fields at the given paths replaced; law names are changed first.

    Parameters
    ----------
    config : RunConfig
    changes : mapping of str to value
        Path to new value.
    where : str
        What an error names as the place of the settings.

    Raises
    ------
    BadInputError
        If a path does not exist in the resulting run, or a value is of the wrong type or out of range.
    """
    values = configs.resolve(config)
    changes = {full_path(path): value for path, value in changes.items()}
    for table, (package, key, _) in LAWS.items():
        path = f"loop.{table}.{key}"
        if path not in changes or changes[path] == values["loop"][table][key]:
            continue
        name = changes[path]
        known = registry.names(package)
        if name not in known:
            raise BadInputError("no such law", where=where, field=path, value=name, allowed=", ".join(known))
        shared = {item.name for item in dataclasses.fields(registry.load(package, name).Config)}
        kept = {k: v for k, v in values["loop"][table].items() if k in shared}
        values["loop"][table] = {key: name, **kept}
    for path, value in changes.items():
        *tables, name = path.split(".")
        place: Any = values
        for table in tables:
            place = place.get(table) if isinstance(place, dict) else None
        if not isinstance(place, dict) or isinstance(place.get(name), dict):
            kind(path, where=where)
            raise BadInputError("a table, not a field", where=where, field=path)
        place[name] = value
    return configs.from_mapping(values, where=where)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping from dotted path to value."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[prefix + str(name)] = value
    return out


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return one line per path whose value differs: ``path: old -> new``."""
    a, b = flat(old), flat(new)
    absent = "(absent)"
    return [
        f"{path}: {a.get(path, absent)!r} -> {b.get(path, absent)!r}"
        for path in dict.fromkeys([*a, *b])
        if path not in a or path not in b or a[path] != b[path]
    ]


def parse_values(text: str) -> list[Any]:
    """Return the values of a comma-separated list: TOML where it is TOML, plain strings otherwise.

    Examples
    --------
    >>> parse_values("1,2.5,true"), parse_values("fcfs,entropic")
    ([1, 2.5, True], ['fcfs', 'entropic'])
    """
    try:
        return list(tomllib.loads(f"v = [{text}]")["v"])
    except tomllib.TOMLDecodeError:
        return [_parse(item.strip()) for item in text.split(",")]


def _parse(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
