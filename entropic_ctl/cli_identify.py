"""Commands that look at the loop from outside: ``entropic identify`` and ``entropic stability``."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from entropic_ctl.cli_options import Config, Force, Json, Model, Seed, Uncertified

__all__ = ["identify", "register", "stability"]


class Input(enum.StrEnum):
    """What is moved."""

    TEMPERATURE = "temperature"
    THETA = "theta"


class Signal(enum.StrEnum):
    """Shape of the excitation."""

    PRBS = "prbs"
    CHIRP = "chirp"
    MULTISINE = "multisine"


class Closing(enum.StrEnum):
    """Where the excitation enters."""

    OPEN = "open"
    OUTPUT = "output"
    TARGET = "target"


class World(enum.StrEnum):
    """What runs the requests."""

    SIM = "sim"
    ENGINE = "engine"


Folder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for tables, models and the figure.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command()(identify)
    app.command()(stability)


def identify(
    config: Config,
    out: Folder,
    *,
    input_: Annotated[Input, typer.Option("--input", help="Move u = ln T, or the budget theta.")] = Input.TEMPERATURE,
    signal: Annotated[Signal, typer.Option("--signal", help="Shape of the excitation.")] = Signal.PRBS,
    loop: Annotated[
        Closing, typer.Option("--loop", help="Open, or closed with the excitation added to output or target.")
    ] = Closing.OPEN,
    world: Annotated[World, typer.Option("--world", help="The simulator, or the real engine.")] = World.SIM,
    amplitude: Annotated[
        float, typer.Option("--amplitude", min=0.0, help="In ln T (target: nats; theta: nats); 0 is a default.")
    ] = 0.0,
    requests: Annotated[int, typer.Option("--requests", min=0, help="Requests; 0 is 160 (sim) or 24 (engine).")] = 0,
    tokens: Annotated[int, typer.Option("--tokens", min=0, help="Tokens each; 0 is 256 (sim) or 160 (engine).")] = 0,
    segment: Annotated[int, typer.Option("--segment", min=8, help="Tokens per segment of the spectra, even.")] = 64,
    model: Model = None,
    uncertified: Uncertified = False,
    seed: Seed = None,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Move T or theta on purpose and measure what the entropies do: frequency response, coherence, transfer function.

    The experiment brings its own workload (a burst of equal requests). Writes `frequency`, `impulse` and `tokens`
    tables, `models.json` (read it with `sim.transfer.load`, python-control objects) and `bode.png`.

    Example: `entropic identify run.toml --signal prbs --loop output --out out/identify`
    """
    from entropic_ctl import cli_identify_run

    cli_identify_run.identify(
        config,
        out,
        settings={
            "input": str(input_),
            "signal": str(signal),
            "loop": str(loop),
            "amplitude": amplitude,
            "requests": requests,
            "tokens": tokens,
            "segment": segment,
        },
        real=world is World.ENGINE,
        model=model,
        uncertified=uncertified,
        seed=seed,
        force=force,
        json_file=json_file,
    )


def stability(
    config: Config,
    out: Folder,
    *,
    vocab: Annotated[
        int | None, typer.Option("--vocab", min=2, help="Vocabulary size; that of the config's entropy bank if absent.")
    ] = None,
    queue: Annotated[bool, typer.Option("--queue/--no-queue", help="Simulate the workload and test its queue.")] = True,
    seed: Seed = None,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Measure stability in simulation and set each finding beside the certificate: gains, cycles, clamps, steps, queue.

    Exit 1 if a finding contradicts a certificate.

    Example: `entropic stability run.toml --out out/stability`
    """
    from entropic_ctl import cli_identify_run

    raise typer.Exit(
        cli_identify_run.stability(config, out, vocab=vocab, queue=queue, seed=seed, force=force, json_file=json_file)
    )
