"""Commands about several replicas: routers compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from entropic_ctl.cli_options import Certificate, Config, Force, Json, Out, Seed, Uncertified

__all__ = ["register"]

_BASE = "round_robin"


def routers(
    config: Config,
    *,
    replicas: Annotated[
        int | None, typer.Option("--replicas", min=2, help="Replicas, in place of cluster.replicas.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs per router, on seeds that all share.")] = 5,
    out: Out = None,
    json_file: Json = None,
    certificate: Certificate = None,
    uncertified: Uncertified = False,
    seed: Seed = None,
    force: Force = False,
) -> None:
    """Compare the routers of a cluster on one workload: ratios to round robin with 95% intervals.

    Example: `entropic routers run.toml --replicas 4 --repeats 8`
    """
    from entropic_ctl import cli_run

    base = cli_run.with_overrides(cli_run.load_config(config), seed=seed)
    if replicas is not None:
        base = dataclasses.replace(base, cluster=dataclasses.replace(base.cluster, replicas=replicas))
    _routers(base, config, repeats, out, json_file, certificate, uncertified=uncertified, force=force)


def _routers(
    config: Any,
    file: Path,
    repeats: int,
    out: Path | None,
    json_file: Path | None,
    certificate: Path | None,
    *,
    uncertified: bool,
    force: bool,
) -> None:
    from entropic_ctl import cli_live, cli_output, cli_run
    from entropic_ctl.config import inputs_of

    cli_output.check_file(json_file, "--json", out, file, certificate, *inputs_of(config))
    vocab = int(cli_run.need("sim.trajectories", "sim").load_bank(config.cost.bank, prompts=1).meta["vocab_size"])
    verdict = cli_run.certify(config, vocab, certificate, uncertified=uncertified)
    study = cli_run.need("sim.router_study", "sim")
    results = cli_run.need("entropic_ctl.results", "sim")
    with cli_live.progress("routers") as report, cli_run.placed(file):
        table = study.compare(config, repeats=repeats, verdict=verdict, uncertified=uncertified, progress=report)
    numbers = ratios(table)
    if out is not None:
        subject = {"command": "routers", "repeats": repeats, "config": results.stamp(config, config.seed)["config"]}
        with cli_output.folder(out, subject, force=force) as work:
            stamp = results.stamp(config, config.seed)
            for suffix in ("parquet", "csv"):
                results.write_table(work / f"routers.{suffix}", table, stamp)
            results.write_json(work / "ratios.json", {"ratios": numbers, "stamp": stamp})
    cli_run.write_json(json_file, {"ratios": numbers, "repeats": repeats}, config)
    shown = {
        name: {
            key: f"{e['ratio']:.3f} [{e['low']:.3f}, {e['high']:.3f}]" for key, e in effects.items() if e is not None
        }
        for name, effects in numbers.items()
    }
    cli_run.show_groups({f"{name} / {_BASE}": effects for name, effects in shown.items()})


def ratios(table: dict[str, Any]) -> dict[str, dict[str, dict[str, float] | None]]:
    """Return, per router and measure, the ratio to round robin with its interval; None where there are not two pairs.

    Parameters
    ----------
    table : dict of str to ndarray
        From :func:`sim.router_study.compare`, whose rows are in order of repeat.
    """
    from entropic_ctl import cli_run

    paired = cli_run.need("sim.intervals", "sim").paired
    base = table["router"] == _BASE
    out: dict[str, dict[str, dict[str, float] | None]] = {}
    for name in dict.fromkeys(table["router"].tolist()):
        if name == _BASE:
            continue
        own = table["router"] == name
        out[name] = {}
        for key in table:
            if key not in ("router", "repeat", "seed"):
                effect = paired(table[key][own], table[key][base])
                known = effect.pairs > 1
                out[name][key] = {"ratio": effect.ratio, "low": effect.low, "high": effect.high} if known else None
    return out


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(routers)
