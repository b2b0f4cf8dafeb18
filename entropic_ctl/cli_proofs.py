"""Commands about stability proofs: ``entropic prove``, ``check``, ``margins``, ``phase`` and ``region``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from entropic_ctl.cli_options import Config, Force, Json, Out

__all__ = ["check", "margins", "phase", "prove", "region", "register"]

Vocab = Annotated[
    int | None, typer.Option("--vocab", min=2, help="Vocabulary size; that of the config's entropy bank if absent.")
]
Assume = Annotated[
    list[str] | None,
    typer.Option("--assume", metavar="NAME=VALUE", help="An assumption, in place of its default; repeat for more."),
]


class FrozenPlant(enum.StrEnum):
    """Which frozen logits."""

    TARGET = "target"
    SHARPEST = "sharpest"
    RECORDED = "recorded"


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


def margins(
    config: Config,
    varentropy: Annotated[
        list[float] | None,
        typer.Option("--varentropy", metavar="V", help="Also look at this varentropy, nats²; repeat for more."),
    ] = None,
    ema: Annotated[
        float, typer.Option("--ema", metavar="B", help="As if entropies were averaged with this weight; 1 is none.")
    ] = 1.0,
    vocab: Vocab = None,
    assume: Assume = None,
    out: Out = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Write the loops as state spaces: .json (python-control), .mat."),
    ] = None,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Gain, phase, delay and disk margins of the linear temperature loop, its step responses and its poles.

    Looked at where logits are steepest (V_max), at the target, at the assumed least varentropy; then the loop coupled
    with the budget. Exit 1 if one of them is unstable, V_max aside where no equilibrium of the target is as steep.
    `proofs.margins.load(FILE, NAME)` reads an exported loop back; take its margins with `proofs.margins`, since
    `control.margin` and `control.stability_margins` (0.10) miss the crossing at z = -1.

    Example: `entropic margins run.toml --out out/margins --export loops.json`
    """
    from entropic_ctl import cli_margins

    status = cli_margins.margins(
        config,
        given=varentropy or [],
        ema=ema,
        vocab=vocab,
        assume=assume or [],
        out=out,
        export=export,
        force=force,
        json_file=json_file,
    )
    raise typer.Exit(status)


def phase(
    config: Config,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for tables and figures.")],
    plant: Annotated[FrozenPlant, typer.Option("--plant", help="Which frozen logits.")] = FrozenPlant.TARGET,
    gain: Annotated[
        list[float] | None,
        typer.Option("--gain", metavar="K", help="In place of 0.5, 0.95 and 1.2 times the limit; repeat for more."),
    ] = None,
    lag: Annotated[
        list[int] | None, typer.Option("--lag", min=0, max=1, help="Observation lag; repeat for more, both if absent.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=4, max=100_000, help="Length of the trajectories.")] = 60,
    model_entropy: Annotated[
        float | None,
        typer.Option("--model-entropy", metavar="H", help="Coupled loop: its level, nats; the budget's band's middle."),
    ] = None,
    vocab: Vocab = None,
    assume: Assume = None,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Phase portrait of the nonlinear loop: the shipped laws on frozen logits, at several gains and lags.

    `phase-lag<d>.png` shows u = ln T now and after an update; `coupled.png` u and the budget theta with the switching
    band, if the config has a budget that moves.

    Example: `entropic phase run.toml --out out/phase --plant sharpest`
    """
    from entropic_ctl import cli_margins

    cli_margins.phase(
        config,
        out,
        plant=str(plant),
        gains=gain or [],
        lags=sorted(set(lag)) if lag else [0, 1],
        tokens=tokens,
        level=model_entropy,
        vocab=vocab,
        assume=assume or [],
        force=force,
        json_file=json_file,
    )


def region(
    config: Config,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the table and the picture.")],
    vocab: Vocab = None,
    assume: Assume = None,
    cells: Annotated[int, typer.Option("--cells", min=2, max=200, help="Cells along each axis of a slice.")] = 24,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Map where temperature and budget together are stable, and where one quadratic function shows it, as a picture.

    Exit 1 if a cell contradicts the small-gain theorem.

    Example: `entropic region run.toml --out out/region`
    """
    from entropic_ctl import cli_region_run

    raise typer.Exit(
        cli_region_run.region(
            config, out, vocab=vocab, assume=assume or [], cells=cells, force=force, json_file=json_file
        )
    )


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(prove)
    app.command()(check)
    app.command()(margins)
    app.command()(phase)
    app.command()(region)
