"""Run a command of the command line inside the test process."""

from __future__ import annotations

import json
from pathlib import Path

from metrics_doc import undefined
from typer.testing import CliRunner

from entropic_ctl.cli import app

_GROUPS = ("bench", "trace")


def entropic(*arguments: object) -> tuple[int, str, str]:
    """Run a command; returns (status, stdout, stderr). An exception the command line let through is raised.

    Every key that it writes to a ``--json`` file must be in ``entropic_ctl/METRICS.md``.
    """
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if "--json" in words and result.exit_code in (0, 1) and "--help" not in words:
        command = " ".join(words[: 2 if words[0] in _GROUPS else 1])
        file = Path(words[words.index("--json") + 1])
        if file.is_file():
            unknown = undefined(command, json.loads(file.read_text(encoding="utf-8")))
            assert not unknown, f"METRICS.md does not define {unknown} of {command!r}"
    return result.exit_code, result.stdout, result.stderr
