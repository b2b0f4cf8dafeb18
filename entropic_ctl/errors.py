"""The one family of errors a caller can cause: bad input, refused work, uncertified gains.

Every message answers five questions: where (file, line), which field, what value, what is allowed, what to do.
The command line prints these errors without a traceback and exits with status 2.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BadInputError", "EntropicError", "NoProgressError", "UncertifiedError"]

_UNSET: Any = object()


class EntropicError(Exception):
    """Base of every error this project raises on purpose."""


class BadInputError(EntropicError, ValueError):
    """An input outside its documented domain.

    Parameters
    ----------
    problem : str
        What is wrong, in one clause.
    where : str, optional
        File, directory or argument that carried the value; ``line`` is appended when known.
    line : int, optional
        One-based line number inside ``where``.
    field : str, optional
        Column, key or parameter name.
    value : object, optional
        The value received (shown with ``repr``, shortened).
    allowed : str, optional
        The allowed range or set.
    remedy : str, optional
        What the caller can do about it.
    """

    def __init__(
        self,
        problem: str,
        *,
        where: str | None = None,
        line: int | None = None,
        field: str | None = None,
        value: object = _UNSET,
        allowed: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.problem, self.where, self.line, self.field = problem, where, line, field
        self.allowed, self.remedy = allowed, remedy
        place = where or ""
        if line is not None:
            place = f"{place}:{line}" if place else f"line {line}"
        parts = [f"{place}: " if place else "", f"{field}: " if field else "", problem]
        if value is not _UNSET:
            shown = repr(value)
            parts.append(f" (got {shown if len(shown) <= 120 else shown[:117] + '...'})")
        if allowed:
            parts.append(f"; allowed: {allowed}")
        if remedy:
            parts.append(f"; {remedy}")
        super().__init__("".join(parts))


class UncertifiedError(EntropicError):
    """A loop was asked to run at a gain that no accepted certificate covers."""


class NoProgressError(EntropicError):
    """A driver iterated without time advancing or any request progressing."""
