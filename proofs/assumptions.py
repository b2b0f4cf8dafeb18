"""Read assumptions as people write them: NAME=VALUE."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from entropic_ctl import fields
from entropic_ctl.errors import BadInputError
from proofs.check import Assumptions

__all__ = ["parse"]


def parse(given: Sequence[str], known: Mapping[str, Any] | None = None) -> Assumptions:
    """Return assumptions from ``NAME=VALUE`` texts.

    Parameters
    ----------
    given : sequence of str
    known : mapping, optional
        What replaces the defaults where ``given`` says nothing.

    Raises
    ------
    BadInputError
        On an unknown name, a value that is no number, or one outside its range.
    """
    types = {item.name: item.type for item in dataclasses.fields(Assumptions)}
    values: dict[str, Any] = dict(known or {})
    for text in given:
        name, equals, value = text.partition("=")
        try:
            values[name.strip()] = int(value) if types.get(name.strip()) == "int" else float(value)
        except ValueError:
            raise BadInputError(
                "not NAME=VALUE" if not equals else "not a number",
                where="--assume",
                field=name.strip(),
                value=value if equals else text,
                allowed=", ".join(sorted(types)),
            ) from None
    return fields.parse(Assumptions, values, where="--assume", table="")
