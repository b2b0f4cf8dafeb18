"""Run a command of the command line inside the test process."""

from __future__ import annotations

from typer.testing import CliRunner

from entropic_ctl.cli import app


def entropic(*arguments: object) -> tuple[int, str, str]:
    """Run a command; returns (status, stdout, stderr). An exception the command line let through is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr
