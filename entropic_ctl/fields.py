"""Declare a configuration field once (type, default, range, unit) and have every reader enforce it.

``number``, ``numbers``, ``integer``, ``choice``, ``text`` and ``flag`` are ``dataclasses.field`` with the allowed set
in the metadata; ``check`` enforces it on construction and ``parse`` builds a dataclass from a mapping, where an unknown
key, a wrong type or an out-of-range value is a :class:`~entropic_ctl.errors.BadInputError`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from entropic_ctl.errors import BadInputError

__all__ = ["check", "choice", "flag", "integer", "number", "numbers", "parse", "problem", "text"]

T = TypeVar("T")
LineOf = Callable[[str], int | None]


def number(default: float, lo: float, hi: float, doc: str, *, open_lo: bool = False) -> Any:
    """A finite float in [lo, hi], or (lo, hi] with ``open_lo``; integers are accepted and converted.

    Parameters
    ----------
    default : float
    lo, hi : float
        Allowed range; ``hi`` may be infinite.
    doc : str
        One line for people, with the unit.
    open_lo : bool
        Exclude ``lo`` itself.
    """
    bound = f"{'(' if open_lo else '['}{lo:g}, {hi:g}{')' if math.isinf(hi) else ']'}"
    meta = {"kind": "number", "lo": lo, "hi": hi, "open_lo": open_lo, "allowed": bound, "doc": doc}
    return dataclasses.field(default=default, metadata=meta)


def numbers(
    default: Sequence[float], lo: float, hi: float, doc: str, *, open_lo: bool = False, most: int = 1000
) -> Any:
    """A list of at most ``most`` finite floats, each in [lo, hi] (or (lo, hi]); kept as a tuple.

    Parameters
    ----------
    default : sequence of float
    lo, hi : float
        Allowed range of each; ``hi`` may be infinite.
    doc : str
        One line for people, with the unit.
    open_lo : bool
        Exclude ``lo`` itself.
    most : int
        Longest list.
    """
    bound = f"{'(' if open_lo else '['}{lo:g}, {hi:g}{')' if math.isinf(hi) else ']'}"
    allowed = f"a list of at most {most} numbers in {bound}"
    meta = {"kind": "numbers", "lo": lo, "hi": hi, "open_lo": open_lo, "most": most, "allowed": allowed, "doc": doc}
    return dataclasses.field(default=tuple(float(value) for value in default), metadata=meta)


def integer(default: int, lo: int, hi: int, doc: str) -> Any:
    """An integer in [lo, hi]; booleans and floats are refused.

    Parameters
    ----------
    default, lo, hi : int
        Default and allowed range, both ends included.
    doc : str
        One line for people, with the unit.
    """
    meta = {"kind": "integer", "lo": lo, "hi": hi, "allowed": f"integers in [{lo}, {hi}]", "doc": doc}
    return dataclasses.field(default=default, metadata=meta)


def choice(default: str, options: Sequence[str], doc: str) -> Any:
    """One of a fixed set of strings.

    Parameters
    ----------
    default : str
        One of ``options``.
    options : sequence of str
    doc : str
        One line for people.
    """
    meta = {"kind": "choice", "options": tuple(options), "allowed": ", ".join(options), "doc": doc}
    return dataclasses.field(default=default, metadata=meta)


def text(default: str, doc: str) -> Any:
    """Any string (a path or a name that its reader checks)."""
    return dataclasses.field(default=default, metadata={"kind": "text", "allowed": "a string", "doc": doc})


def flag(default: bool, doc: str) -> Any:
    """A boolean."""
    return dataclasses.field(default=default, metadata={"kind": "flag", "allowed": "true or false", "doc": doc})


def problem(meta: Mapping[str, Any], value: object) -> str | None:
    """Return what is wrong with ``value`` under ``meta``, or None."""
    kind = meta["kind"]
    if kind == "flag":
        return None if isinstance(value, bool) else "not a boolean"
    if kind in ("text", "choice"):
        if not isinstance(value, str):
            return "not a string"
        if "\0" in value:
            return "holds a NUL character"
        return "not one of the choices" if kind == "choice" and value not in meta["options"] else None
    if kind == "numbers":
        if not isinstance(value, list | tuple):
            return "not a list of numbers"
        if len(value) > meta["most"]:
            return f"{len(value)} numbers"
        found = ((i, problem({**meta, "kind": "number"}, item)) for i, item in enumerate(value, start=1))
        return next((f"number {i}: {wrong}" for i, wrong in found if wrong), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not a number"
    if kind == "integer" and not isinstance(value, int):
        return "not an integer"
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    below = value <= meta["lo"] if meta.get("open_lo") else value < meta["lo"]
    return "out of range" if below or value > meta["hi"] else None


def check(config: Any, *, where: str | None = None, table: str = "", line_of: LineOf | None = None) -> None:
    """Enforce the declared ranges of a dataclass instance; numbers are normalised to float.

    Parameters
    ----------
    config : dataclass instance
        Checked field by field; fields without a declaration are left alone.
    where, table : str
        File and table that errors name.
    line_of : callable, optional
        Maps a field name to its line in ``where``.

    Raises
    ------
    BadInputError
        Naming field, value and allowed range.
    """
    for item in dataclasses.fields(config):
        if "kind" not in item.metadata:
            continue
        value = getattr(config, item.name)
        wrong = problem(item.metadata, value)
        if wrong is not None:
            raise BadInputError(
                wrong,
                where=where or type(config).__name__,
                line=line_of(item.name) if line_of else None,
                field=f"{table}.{item.name}" if table else item.name,
                value=value,
                allowed=item.metadata["allowed"],
            )
        if item.metadata["kind"] == "number":
            object.__setattr__(config, item.name, float(value))
        elif item.metadata["kind"] == "numbers":
            object.__setattr__(config, item.name, tuple(float(number) for number in value))


def parse(
    cls: type[T],
    values: object,
    *,
    where: str,
    table: str,
    line_of: LineOf | None = None,
    home: Callable[[str], str | None] | None = None,
) -> T:
    """Build dataclass ``cls`` from a mapping, refusing unknown keys (with the nearest known one) and bad values.

    Parameters
    ----------
    cls : dataclass type
    values : mapping
        Keys are field names; absent fields take their defaults.
    where, table : str
        File and table that errors name.
    line_of : callable, optional
        Maps a field name to its line in ``where``.
    home : callable, optional
        Says where a key that is unknown here belongs, or None.

    Raises
    ------
    BadInputError
        If ``values`` is not a mapping, or holds an unknown key or a value outside its declared range.
    """
    if not isinstance(values, Mapping):
        raise BadInputError("not a table", where=where, field=table, value=values, allowed="key = value pairs")
    known = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            remedy = home(str(key)) if home else None
            raise BadInputError(
                "unknown key",
                where=where,
                line=line_of(key) if line_of else None,
                field=f"{table}.{key}" if table else key,
                value=values[key],
                allowed=", ".join(sorted(known)),
                remedy=remedy or (f"did you mean {near[0]!r}?" if near else None),
            )
    probe = object.__new__(cls)  # validate before the class's own __post_init__ runs, so errors carry file and line
    for name, item in known.items():
        default = item.default if item.default is not dataclasses.MISSING else None
        object.__setattr__(probe, name, values.get(name, default))
    check(probe, where=where, table=table, line_of=line_of)
    try:
        return cls(**{name: getattr(probe, name) for name in known})
    except BadInputError as error:  # a cross-field rule: add the file
        raise error.inside(
            where,
            line=line_of(error.field) if line_of and error.field else None,
            field=f"{table}.{error.field}" if table and error.field else error.field,
        ) from None
