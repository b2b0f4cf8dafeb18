"""What the commands of :mod:`entropic_ctl.cli_proofs` do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from entropic_ctl import certificates, cli_live, cli_output
from entropic_ctl import config as configs
from entropic_ctl.cli_console import console
from entropic_ctl.cli_run import load_config, need, placed, say, write_json
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError

__all__ = ["check", "prove"]

_COLOURS = {"proved": "green", "refuted": "red", "unknown": "yellow", "not applicable": "dim"}


def prove(config_file: Path, *, out: Path, vocab: int | None, assume: Sequence[str], json_file: Path | None) -> int:
    """Search proofs, check them, write them."""
    config = load_config(config_file)
    inputs: list[Path | str] = [config_file, *configs.inputs_of(config)]
    cli_output.check_file(out, "--out", *inputs)
    cli_output.check_file(json_file, "--json", out, *inputs)
    told = [text.partition("=")[0].strip() for text in assume]
    known = need("sim.load_bounds", "sim").assumed(config, told)
    given = need("proofs.assumptions", "proofs").parse(assume, known)
    if vocab is None:
        bank = need("sim.trajectories", "sim").load_bank(config.cost.bank, prompts=1)
        vocab = int(bank.meta["vocab_size"])
        _warn(config, bank)
    with cli_live.progress("prove") as report:
        certificate = need("proofs.search", "proofs").prove(config, vocab, given, progress=report)
    checked = need("proofs.check", "proofs").check(certificate, config, vocab)  # what is refused is not written
    need("entropic_ctl.results", "sim").write_json(out, certificate)
    filled = dict.fromkeys(known, "workload and cost model") | dict.fromkeys(told, "--assume")
    return _tell(checked, json_file, config, dataclasses.asdict(given), filled)


def check(certificate: Path, config_file: Path | None, *, vocab: int | None, json_file: Path | None) -> int:
    """Check a certificate, against a config if one is given, else against the one written in it."""
    cli_output.check_file(json_file, "--json", certificate, config_file)
    values = certificates.read_certificate(certificate)
    checker = need("proofs.check", "proofs")
    with placed(certificate):
        checker.recognise(values)
    about = values.get("about")
    if not isinstance(about, Mapping) or not {"loop", "engine", "speculation", "vocab_size"} <= about.keys():
        raise BadInputError(
            "not a certificate: no object `about` with loop, engine, speculation and vocab_size",
            where=str(certificate),
            field="about",
            remedy="make one with `entropic prove`",
        )
    own = {name: about[name] for name in ("loop", "engine", "speculation")}
    config = configs.from_mapping(own, where=str(certificate)) if config_file is None else load_config(config_file)
    with placed(certificate):
        size = about["vocab_size"] if vocab is None else vocab
        checked = checker.check(values, config, size)
    exceeded = [] if config_file is None else _exceeded(config, about["assumptions"])
    for line in exceeded:
        say(f"the certificate assumes {line}: claims that rest on it are not about this config's load")
    status = _tell(checked, json_file, config, about["assumptions"], None)
    return 1 if exceeded else status


def _exceeded(config: RunConfig, assumptions: Mapping[str, Any]) -> list[str]:
    """Return the assumptions that this config's own workload and cost model go beyond."""
    implied = need("sim.load_bounds", "sim").assumed(config)
    out = [
        f"{name} = {assumptions[name]:.6g}, and the workload and cost model of the config say {value:.6g}"
        for name, value in implied.items()
        if value > assumptions[name] * (1 + 1e-9)
    ]
    if assumptions["rate_per_s"] > 0 and "rate_per_s" not in implied:
        out.append(f"Poisson arrivals at {assumptions['rate_per_s']:.6g}/s, and those of the config are no such stream")
    return out


def _warn(config: RunConfig, bank: Any) -> None:
    """Say where ``simulate`` refuses what is proved here: a temperature or budget that the bank does not hold."""
    try:
        need("sim.trajectories", "sim").require_range(bank, config.loop)
    except BadInputError as error:
        say(f"note: `entropic simulate` refuses this config: {error}")


def _tell(
    checked: Any,
    json_file: Path | None,
    config: RunConfig,
    assumptions: Mapping[str, Any],
    filled: Mapping[str, str] | None,
) -> int:
    """Print what was decided and assumed (``filled``: by what, defaults aside), write it, return the exit status."""
    verdict = dataclasses.asdict(checked.verdict)
    verdict["limit"] = verdict["limit"] if verdict["limit"] == verdict["limit"] else None
    claims = [dataclasses.asdict(claim) for claim in checked.claims]
    write_json(json_file, {"verdict": verdict, "claims": claims}, config)
    table = Table(box=None, pad_edge=False)
    for name in ("theorem", "status", "why"):
        table.add_column(name, overflow="fold")
    for claim in checked.claims:
        table.add_row(claim.theorem, claim.status, claim.reason, style=None if claim.status == "proved" else "dim")
    screen = console()
    screen.print(table)
    gate = checked.verdict
    _tell_assumptions(screen, assumptions, filled)
    screen.print(f"temperature loop: {gate.status} by {gate.theorem}", style=_COLOURS[gate.status])
    if verdict["limit"] is not None:
        acts = config.loop.temperature.config.gain > 0
        screen.print(f"largest certified gain: {gate.limit!r}" if acts else f"certified gains: 0 < k <= {gate.limit!r}")
    refuted = any(claim.status == "refuted" for claim in checked.claims)
    return 0 if gate.status == "proved" and not refuted else 1


def _tell_assumptions(screen: Any, assumptions: Mapping[str, Any], filled: Mapping[str, str] | None) -> None:
    """Print name = value of each, by what filled it; a certificate does not say that."""
    screen.print("assumptions, part of every claim:")
    by: dict[str, list[str]] = {}
    for name, value in assumptions.items():
        source = "from the certificate" if filled is None else filled.get(name, "default")
        by.setdefault(source, []).append(f"{name} = {value:.6g}")
    for source, parts in by.items():
        screen.print(f"  {source}: {', '.join(parts)}")
