"""The consoles of the command line: text comes out as it is, and an output that goes away is an error of its own."""

from __future__ import annotations

import contextlib
import os
import sys

from rich.console import Console

__all__ = ["console", "drop_stdout", "tolerate_any_encoding", "write"]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Let the error through (rich would exit with status 1, which means a negative verdict here)."""
        raise  # noqa: PLE0704 - called while a BrokenPipeError is handled


def console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console that interprets nothing in a text: no markup, no emoji codes (``:100:``), no highlighting.

    Parameters
    ----------
    stderr : bool
        Standard error in place of standard output.
    soft_wrap : bool
        Leave long lines whole.
    """
    return _Console(stderr=stderr, soft_wrap=soft_wrap, highlight=False, emoji=False, markup=False)


def write(text: str) -> None:
    """Write to standard output and flush; nothing happens when there is none (``>&-``)."""
    if sys.stdout is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def tolerate_any_encoding() -> None:
    """Write a question mark for what standard output cannot encode, rather than fail half-way through a text."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")


def drop_stdout() -> None:
    """Send what is still buffered nowhere: its reader is gone or its disk is full."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError):  # not a file at all (a test's buffer)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
