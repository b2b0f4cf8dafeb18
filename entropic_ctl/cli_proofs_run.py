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
from entropic_ctl.cli_run import bank_vocabulary, load_config, need, placed, write_json
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
    given = need("proofs.assumptions", "proofs").parse(assume, need("sim.load_bounds", "sim").assumed(config, told))
    vocab = vocab if vocab is not None else bank_vocabulary(config)
    with cli_live.progress("prove") as report:
        certificate = need("proofs.search", "proofs").prove(config, vocab, given, progress=report)
    checked = need("proofs.check", "proofs").check(certificate, config, vocab)  # what is refused is not written
    need("entropic_ctl.results", "sim").write_json(out, certificate)
    return _tell(checked, json_file, config)


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
    return _tell(checked, json_file, config)


def _tell(checked: Any, json_file: Path | None, config: RunConfig) -> int:
    """Print what was decided, write it, and return the exit status."""
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
    limit = "" if verdict["limit"] is None else f" (largest certified gain: {gate.limit!r})"
    screen.print(f"temperature loop: {gate.status} by {gate.theorem}{limit}", style=_COLOURS[gate.status])
    refuted = any(claim.status == "refuted" for claim in checked.claims)
    return 0 if gate.status == "proved" and not refuted else 1
