"""The comparison of routers: shared randomness, repeats, and the prefix router's one advantage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import entropic
from synthetic_bank import make_bank

from entropic_ctl import config as configs
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from sim import router_study
from sim.arrivals import Workload, make_workload
from sim.replica import simulate
from sim.routers import ROUTERS

BANK, _ = make_bank()
WORK = {"kind": "poisson", "n_requests": 12, "rate_per_s": 40.0, "prompt_tokens": 30.0, "output_tokens": 8.0}
CLUSTER: dict[str, Any] = {"workload": WORK, "engine": {"pages": 30, "max_batch": 3}, "cluster": {"replicas": 2}}


def test_every_router_sees_the_same_requests() -> None:
    config = configs.from_mapping(CLUSTER)
    calls: list[tuple[str, float]] = []
    table = router_study.compare(config, repeats=2, bank=BANK, progress=lambda *args: calls.append(args))
    assert table["router"].tolist() == list(ROUTERS) * 2
    assert table["seed"].tolist() == [0] * 4 + [1] * 4
    assert calls[-1][1] == 1.0
    assert len(calls) == 8
    one = simulate(configs.from_mapping({**CLUSTER, "seed": 1}), bank=BANK).summary
    assert table["e2e_mean_s"][4] == one["e2e_mean_s"]  # round robin, repeat 1
    assert (table["imbalance"] >= 1).all()


def families(config: RunConfig) -> Workload:
    """Requests of eight families; within one, the first four pages of the prompt are shared."""
    work = make_workload(config.workload, config.seed, 4)
    n = len(work)
    work.prompt_tokens = np.full(n, 64 + 8)
    family = np.random.default_rng(config.seed).integers(0, 8, n)
    return Workload(
        config.workload,
        work.arrival_s,
        prompt_tokens=work.prompt_tokens,
        limit_tokens=work.limit_tokens,
        prompt=work.prompt,
        xi=work.xi,
        prefix_hashes=[tuple(int(f) * 100 + page for page in range(1, 5)) for f in family],
    )


def test_prefix_affinity_computes_less_where_prefixes_repeat() -> None:
    """A pool that holds the prefixes of some families only: routing like to like finds more of them cached."""
    config = configs.from_mapping(
        {
            "workload": WORK | {"n_requests": 60},
            "engine": {"pages": 30, "max_batch": 2, "max_live": 2, "prefix_caching": True},
            "cluster": {"replicas": 4, "load_guard": 4.0},
        }
    )
    table = router_study.compare(config, repeats=3, bank=BANK, workload=families)
    computed = {name: table["scheduled_tokens"][table["router"] == name] for name in ROUTERS}
    assert (computed["prefix_affinity"] < 0.9 * computed["round_robin"]).all()


def test_bad_studies_are_refused() -> None:
    config = configs.from_mapping(CLUSTER)
    with pytest.raises(BadInputError, match="no repeats"):
        router_study.compare(config, repeats=0, bank=BANK)
    with pytest.raises(BadInputError, match=r"cluster\.replicas.*>= 2"):
        router_study.compare(configs.from_mapping({}), bank=BANK)


def test_the_command_prints_ratios_and_writes_tables(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[workload]\nkind = 'poisson'\nn_requests = 4\nprompt_tokens = 20\noutput_tokens = 4\n")
    out = ("--out", tmp_path / "res", "--json", tmp_path / "r.json")
    status, text, err = entropic("routers", file, "--replicas", 2, "--repeats", 2, *out)
    assert status == 0, err
    assert "least_loaded / round_robin" in text
    ratios = json.loads((tmp_path / "r.json").read_text())["ratios"]
    assert set(ratios) == set(ROUTERS) - {"round_robin"}
    effect = ratios["entropic"]["e2e_mean_s"]
    assert effect["low"] <= effect["ratio"] <= effect["high"]
    assert (tmp_path / "res" / "routers.csv").is_file()
    status, _, err = entropic("routers", file)
    assert status == 2
    assert "cluster.replicas" in err
