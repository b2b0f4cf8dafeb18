"""``entropic generate``: one prompt through the real engine, watched or streamed."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from entropic_ctl import cli_live, cli_output, cli_run
from entropic_ctl.collectors import Tee
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FinishReason

__all__ = ["generate", "read_prompt"]


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the one prompt that was given.

    Raises
    ------
    BadInputError
        If none or both were given, the file cannot be read as UTF-8, or the prompt is blank.
    """
    if (prompt is None) == (prompt_file is None):
        raise BadInputError("give exactly one prompt", where="generate", allowed="--prompt TEXT or --prompt-file FILE")
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except OSError as error:
            raise BadInputError(f"cannot read prompt: {error.strerror}", where=str(prompt_file)) from None
        except UnicodeDecodeError as error:
            raise BadInputError(f"not UTF-8 at byte {error.start}", where=str(prompt_file)) from None
    if prompt is None or not prompt.strip():
        raise BadInputError("the prompt is blank", where=str(prompt_file or "--prompt"))
    return prompt


def generate(
    *,
    prompt: str | None,
    prompt_file: Path | None,
    config_file: Path | None,
    model: str | None,
    max_tokens: int,
    greedy: bool,
    stop: tuple[str, ...],
    chat: bool,
    json_file: Path | None,
    log: Path | None,
    certificate: Path | None,
    uncertified: bool,
    seed: int | None,
) -> None:
    """Run one request to its end; the text goes to standard output."""
    text = read_prompt(prompt, prompt_file)
    cli_output.check_file(json_file, "--json")
    cli_output.check_file(log, "--log")
    config = cli_run.with_overrides(cli_run.load_config(config_file), seed=seed, model=model)
    loaded = cli_run.load_model(config)
    verdict = cli_run.certify(config, loaded.vocab_size, certificate, uncertified=uncertified)
    metrics = cli_run.need("entropic_ctl.metrics", "").Metrics(config.engine.page_tokens, keep_tokens=True)
    console = Console()
    view = cli_live.GenerationView(console)
    sampling = cli_run.need("backends.sampling", "engine")
    params = sampling.SamplingParams(max_new_tokens=max_tokens, seed=config.seed, greedy=greedy, stop=stop)
    engine = cli_run.need("backends.engine", "engine").Engine(
        config,
        loaded,
        verdict=verdict,
        uncertified=uncertified,
        recorder=cli_run.recorder(log),
        metrics=Tee(metrics, view),
    )
    number = engine.submit(text, params, chat=chat)
    if console.is_terminal:
        with view.showing():
            engine.run(on_text=lambda _, piece: view.add_text(piece))
        console.print(engine.outputs[number].text, markup=False, highlight=False)
    else:
        engine.run(on_text=_stream)
        sys.stdout.write("\n")
    output = engine.outputs[number]
    if output.finish is not None and output.finish.reason is FinishReason.REJECTED:
        raise BadInputError(f"the request can never be served: {output.finish.detail}", where="generate")
    summary = metrics.summary()
    report = {
        "text": output.text,
        "finish": str(output.finish.reason) if output.finish else None,
        "prompt_tokens": len(output.prompt_ids),
        "output_tokens": len(output.token_ids),
        "summary": summary,
    }
    cli_run.write_json(json_file, report, config)
    note = f"{len(output.token_ids)} tokens, finish: {report['finish']}"
    Console(stderr=True, highlight=False).print(note, style="dim")


def _stream(_: int, piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
