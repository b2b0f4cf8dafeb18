"""Write a run as TOML, every default spelled out; :func:`entropic_ctl.config.load` reads back the same run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from entropic_ctl.config import RunConfig, resolve
from entropic_ctl.errors import BadInputError

__all__ = ["to_toml"]


def to_toml(config: RunConfig, comments: Sequence[str] = ()) -> str:
    """Return the TOML text of a run.

    Parameters
    ----------
    config : RunConfig
    comments : sequence of str
        Lines put first, each after ``# ``.

    Raises
    ------
    BadInputError
        If a value has no TOML form.
    """
    lines = [f"# {' '.join(comment.split())}" for comment in comments]
    lines += _table(resolve(config), "")
    return "\n".join(lines).strip() + "\n"


def _table(values: Mapping[str, Any], name: str) -> list[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    lines = ["", f"[{name}]"] if name and plain else []
    lines += [f"{key} = {_value(value, f'{name}.{key}')}" for key, value in plain.items()]
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += _table(value, f"{name}.{key}" if name else key)
    return lines


def _value(value: Any, field: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):  # a JSON string is a TOML basic string, but for DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item, field) for item in value) + "]"
    raise BadInputError("no TOML form", field=field, value=value, allowed="booleans, numbers, strings and lists")
