"""``entropic generate``: one prompt through the real engine, watched or streamed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entropic_ctl import cli_live, cli_output, cli_run
from entropic_ctl.cli_console import console, write
from entropic_ctl.collectors import Tee
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FinishReason

__all__ = ["generate", "read_prompt"]

_TIMES = ("prompt_tokens", "output_tokens", "ttft_s", "gap_sum_s")


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
            prompt = prompt_file.read_text(encoding="utf-8-sig")
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
    perfetto: Path | None = None,
    perfetto_seconds: float | None = None,
    speculation: Mapping[str, Any] | None = None,
    temperature: float | None = None,
    truncation: Mapping[str, Any] | None = None,
) -> None:
    """Run one request to its end; the text goes to standard output, and an interrupt keeps what there is of it."""
    text = read_prompt(prompt, prompt_file)
    config = cli_run.with_overrides(
        cli_run.load_config(config_file), seed=seed, model=model, temperature=temperature, speculation=speculation or {}
    )
    truncated = {name: value for name, value in (truncation or {}).items() if value is not None}
    if greedy and (temperature is not None or truncated):
        given = ["temperature"] * (temperature is not None) + list(truncated)
        raise BadInputError(f"--{given[0].replace('_', '-')} has no effect on greedy decoding", where="--greedy")
    inputs = (prompt_file, config_file, certificate)
    cli_output.check_file(json_file, "--json", *inputs, log)
    cli_output.check_file(log, "--log", *inputs)
    cli_output.check_file(perfetto, "--perfetto", *inputs, log, json_file)
    lines = cli_run.timeline(perfetto, perfetto_seconds)
    cli_run.say(f"loading {config.model.path}")
    loaded = cli_run.load_model(config)
    verdict = cli_run.certify(config, loaded.vocab_size, certificate, uncertified=uncertified)
    metrics = cli_run.need("entropic_ctl.metrics", "").Metrics(
        config.engine.page_tokens, keep_tokens=True, pool_pages=config.engine.pages, slo=config.slo
    )
    screen = console()
    view = cli_live.GenerationView(screen)
    sampling = cli_run.need("backends.sampling", "engine")
    params = sampling.SamplingParams(max_new_tokens=max_tokens, seed=config.seed, greedy=greedy, stop=stop, **truncated)
    recorder = cli_run.recorder(log)
    with lines as drawn:
        tee = Tee(metrics, view, *([] if drawn is None else [drawn.replica(0)]))
        with cli_run.placed(config_file):
            engine = cli_run.need("backends.engine", "engine").Engine(
                config, loaded, verdict=verdict, uncertified=uncertified, recorder=recorder, metrics=tee
            )
        number = engine.submit(text, params, chat=chat)
        output = engine.outputs[number]
        stopped: KeyboardInterrupt | OSError | None = None
        try:
            if screen.is_terminal:
                with view.showing():
                    engine.run(on_text=lambda _, piece: view.add_text(piece))
            else:
                engine.run(on_text=lambda _, piece: write(piece))
        except (KeyboardInterrupt, OSError) as error:  # interrupted, or nobody can read the text any more
            stopped = error
    reason = output.finish.reason if output.finish is not None else None
    if reason is FinishReason.REJECTED:
        raise BadInputError(f"the request can never be served: {output.finish.detail}", where="generate")
    report = {
        "text": output.text,
        "finish": str(reason) if reason is not None else "interrupted",
        "prompt_tokens": len(output.prompt_ids),
        "output_tokens": len(output.token_ids),
        **_speed(metrics),
        "draft_tokens": engine.drafted,
        "draft_tokens_accepted": engine.accepted,
        "loss_nats": output.loss_nats,
        "loss_max_nats": output.loss_max_nats,
        "audit": engine.audit.report(),
        "summary": metrics.summary(),
    }
    cli_run.write_json(json_file, report, config)
    if isinstance(stopped, OSError):
        raise stopped
    write(output.text + "\n" if screen.is_terminal else "\n")
    if stopped is not None:
        raise cli_output.Interrupted(json_file) if json_file is not None else stopped
    if reason is FinishReason.EMPTY_SUPPORT:
        raise BadInputError(
            "the model gave no token a finite logit",
            where=loaded.name,
            remedy="its weights are damaged, or overflow in this dtype: get them again, or set model.dtype = 'float32'",
        )
    note = f"{len(output.token_ids)} tokens, finish: {report['finish']}{_measured(metrics)}"
    if config.speculation.draft_tokens:
        note += f"; {engine.accepted} of {engine.drafted} drafted tokens accepted"
    note += _pruned(output, report["audit"])
    if config_file is None:
        note += "\nstandard inference: no --config, so no law acted (fixed temperature, dense attention)"
    console(stderr=True, soft_wrap=True).print(note, style="dim")


def _speed(metrics: Any) -> dict[str, float | None]:
    """Return seconds to the first token, prompt tokens per second of them, and tokens per second from then on."""
    row = {name: float(column[0]) for name, column in metrics.requests_table().items() if name in _TIMES}
    first, gaps, later = row["ttft_s"], row["gap_sum_s"], row["output_tokens"] - 1
    return {
        "ttft_s": first if later >= 0 else None,
        "prefill_tokens_per_s": row["prompt_tokens"] / first if later >= 0 and first > 0 else None,
        "decode_tokens_per_s": later / gaps if later > 0 and gaps > 0 else None,
    }


def _measured(metrics: Any) -> str:
    """Return what the run measured as the end of a sentence."""
    summary, tokens = metrics.summary(), metrics.tokens_table()
    if not tokens["temperature"].shape[0]:
        return ""
    low, high = tokens["temperature"].min(), tokens["temperature"].max()
    speed = _speed(metrics)
    prefill, decode = speed["prefill_tokens_per_s"], speed["decode_tokens_per_s"]
    prompt = f" (prompt {prefill:,.1f} tokens/s, first use included)" if prefill is not None else ""
    return (
        f"; first token after {speed['ttft_s']:.2f} s{prompt}"
        + (f", then {decode:,.1f} tokens/s" if decode is not None else "")
        + "; mean model entropy "
        f"{summary['model_entropy_mean_nats']:.2f} nats, T {low:.2f} to {high:.2f}, pages read "
        f"{100 * float(tokens['kept_fraction'].mean()):.0f}%"
    )


def _pruned(output: Any, audit: dict[str, Any]) -> str:
    """Return what pruning cost and what the live audit says, a line each where there is something to say."""
    lines = ""
    if output.loss_max_nats > 0:
        lines += (
            f"\npruning: {output.loss_nats:.3g} nats certified loss over all steps, at most "
            f"{output.loss_max_nats:.3g} in one (per head; no bound on the KL of a token)"
        )
    if audit["steps"]:
        lines += (
            f"\naudit: mean KL of {audit['steps']} pruned steps in [{audit['low_nats']:.2g}, {audit['high_nats']:.2g}] "
            f"nats, with chance {100 * (1 - audit['alpha']):g}% at any time; {audit['audited']} also ran dense "
            f"({audit['seconds']:.1f} s, left out of the speed), KL capped at {audit['cap_nats']:g}"
        )
    return lines
