"""The one family of errors a caller can cause: bad input, refused work, uncertified gains.

Every message answers five questions: where (file, line), which field, what value, what is allowed, what to do.
The command line prints these errors without a traceback and exits with status 2.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BadInputError", "EntropicError", "NoProgressError", "UncertifiedError", "one_line"]

_UNSET: Any = object()
_LONGEST = 120


def one_line(message: str) -> str:
    r"""Return a message with everything that would break or colour a line (in names a user chose) written as escapes.

    Examples
    --------
    >>> print(one_line("a" + chr(10) + "b"))
    a\nb
    """
    return "".join(c if c.isprintable() or c == "\xa0" else repr(c)[1:-1] for c in message)


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except ValueError:  # an integer with more digits than Python is willing to write
        shown = f"a huge {type(value).__name__}"
    except RecursionError:
        shown = f"a {type(value).__name__} nested too deeply"
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 3] + "..."


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
        self.value, self.allowed, self.remedy = value, allowed, remedy
        place = where or ""
        if line is not None:
            place = f"{place}:{line}" if place else f"line {line}"
        parts = [f"{place}: " if place else "", f"{field}: " if field else "", problem]
        if value is not _UNSET:
            parts.append(f" (got {_shown(value)})")
        if allowed:
            parts.append(f"; allowed: {allowed}")
        if remedy:
            parts.append(f"; {remedy}")
        super().__init__(one_line("".join(parts)))

    def inside(self, where: str, *, line: int | None = None, field: str | None = None) -> BadInputError:
        """Return the same error placed in a file: ``where`` goes before its own, ``line`` and ``field`` are replaced.

        Parameters
        ----------
        where : str
            File that carried the value.
        line : int, optional
        field : str, optional
        """
        return BadInputError(
            self.problem,
            where=f"{where}: {self.where}" if self.where else where,
            line=line,
            field=field or self.field,
            value=self.value,
            allowed=self.allowed,
            remedy=self.remedy,
        )


class UncertifiedError(EntropicError):
    """A loop was asked to run at a gain that no accepted certificate covers."""


class NoProgressError(EntropicError):
    """A driver iterated without time advancing or any request progressing."""
