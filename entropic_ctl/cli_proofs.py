"""Commands about stability proofs: ``entropic prove`` and ``entropic check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from entropic_ctl.cli_options import Config, Json

__all__ = ["check", "prove", "register"]

Vocab = Annotated[
    int | None, typer.Option("--vocab", min=2, help="Vocabulary size; that of the config's entropy bank if absent.")
]
Assume = Annotated[
    list[str] | None,
    typer.Option("--assume", metavar="NAME=VALUE", help="An assumption, in place of its default; repeat for more."),
]


def prove(
    config: Config,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Certificate to write (JSON).")],
    vocab: Vocab = None,
    assume: Assume = None,
    json_file: Json = None,
) -> None:
    """Decide every theorem of the proof book for a config, and write the proofs as a certificate.

    Exit 0 if the temperature loop is proved to settle and no theorem is refuted, else 1.

    Example: `entropic prove run.toml --out cert.json`
    """
    from entropic_ctl import cli_proofs_run

    raise typer.Exit(cli_proofs_run.prove(config, out=out, vocab=vocab, assume=assume or [], json_file=json_file))


def check(
    certificate: Annotated[Path, typer.Argument(metavar="CERTIFICATE", help="Certificate file (JSON).")],
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The config it must be about; its own if absent.")
    ] = None,
    vocab: Annotated[int | None, typer.Option("--vocab", min=2, help="Vocabulary size it must be about.")] = None,
    json_file: Json = None,
) -> None:
    """Check a certificate independently of whatever made it.

    Exit 0 if it proves its claim (for CONFIG, when given), 1 if it does not, 2 if it is not a certificate.

    Example: `entropic check cert.json run.toml`
    """
    from entropic_ctl import cli_proofs_run

    raise typer.Exit(cli_proofs_run.check(certificate, config, vocab=vocab, json_file=json_file))


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(prove)
    app.command()(check)
