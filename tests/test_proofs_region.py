from __future__ import annotations

import dataclasses
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import entropic
from metrics_doc import undefined

from entropic_ctl import config, results
from entropic_ctl.errors import BadInputError
from proofs import region
from proofs.check import Assumptions
from proofs.check.small_gain import Coupling
from proofs.search import coupled

N = 32_000
STEEP = {"theta_nats": 0.5, "theta_wide_nats": 1.5, "entropy_low_nats": 1.0, "entropy_high_nats": 2.0}


def make(**pruning: Any) -> config.RunConfig:
    loop = {"temperature": {"law": "feedback"}, "pruning": {"law": "budget", **STEEP, **pruning}}
    return config.from_mapping({"loop": loop})


@pytest.fixture(scope="module")
def table() -> dict[str, np.ndarray]:
    found = region.region(make(), N, Assumptions(rho=0.21, s=0.31, r=0.19), count=6, jobs=1)
    return dict(found)


def test_a_quadratic_function_is_found_exactly_where_small_gain_holds(table: dict[str, np.ndarray]) -> None:
    assert len(table["x"]) == len(region.SLICES) * 36
    for x_name, y_name in region.SLICES:
        mine = (table["x_name"] == x_name) & (table["y_name"] == y_name)
        small = table["loop"][mine] < 1
        assert 0 < small.sum() < 36
        certified = table["outcome"][mine] == "certified"
        if x_name != "share":  # lambda = 1
            assert (certified == small).all()
            assert ((table["spectral_radius"][mine] < 1) == small).all()
        assert not (certified & ~small).any()
    assert [row["contradictions"] for row in region.summary(table)] == [0] * len(region.SLICES)
    assert not undefined("region", {"slices": region.summary(table)})


def test_a_certificate_where_the_theorem_says_unstable_is_counted(table: dict[str, np.ndarray]) -> None:
    edited = {name: values.copy() for name, values in table.items()}
    edited["outcome"][int(np.argmax(table["loop"] >= 1))] = "certified"
    assert sum(row["contradictions"] for row in region.summary(edited)) == 1


def middle(**changed: float) -> Coupling:
    c = region.around(make(), N, Assumptions(rho=0.21, s=0.31, r=0.19))
    return dataclasses.replace(c, **{name: Fraction(value) for name, value in changed.items()})


def test_all_three_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert region.cell(middle())["outcome"] == "certified"
    assert region.cell(middle(s=10.0))["outcome"] == "none"
    assert region.cell(middle(share=0.001, s=0.33))["outcome"] == "none"  # stable, and no common function
    assert region.cell(middle(share=0.001, s=0.33))["spectral_radius"] < 1
    monkeypatch.setattr(region, "solve", lambda matrices: np.eye(3))  # a solver that is wrong, and sure of it
    assert region.cell(middle(s=0.33))["outcome"] == "unverified"


def test_a_solver_that_fails_is_no_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (np.full((3, 3), np.nan), np.zeros((3, 3)), np.diag([1.0, 1e-300, -1.0])):
        monkeypatch.setattr(coupled, "solve", lambda matrices, decay=1.0, p=answer: p)
        monkeypatch.setattr(region, "solve", coupled.solve)
        assert region.cell(middle())["outcome"] != "certified"


@pytest.mark.parametrize(
    ("pruning", "assumed", "field"),
    [
        ({"theta_wide_nats": 0.5}, {}, "slope"),
        ({}, {"rho": 0.0}, "rho"),
        ({}, {"varentropy_min": 0.0}, "varentropy_min"),
        ({}, {"varentropy_min": 100.0}, "varentropy_min"),
    ],
)
def test_what_no_slice_goes_through_is_refused(pruning: Any, assumed: Any, field: str) -> None:
    with pytest.raises(BadInputError) as error:
        region.region(make(**pruning), N, Assumptions(**assumed), count=3, jobs=1)
    assert error.value.field == field


def test_other_laws_and_too_few_cells_are_refused() -> None:
    with pytest.raises(BadInputError, match="nothing couples"):
        region.region(config.RunConfig(), N)
    with pytest.raises(BadInputError, match="too few"):
        region.region(make(), N, count=1)


def test_the_axis_reaches_past_the_end_of_the_region(table: dict[str, np.ndarray]) -> None:
    for name in region.AXES:
        here = {"gain": 0.02, "varentropy_min": 0.1, "rho": 0.21, "s": 0.31, "r": 0.19, "slope": 1.0, "share": 1.0}[
            name
        ]
        values = np.concatenate([table[a][table[f"{a}_name"] == name] for a in "xy"])
        assert values.min() <= here * (1 + 1e-12) <= values.max() * (1 + 2e-12)


def test_figure_draws_every_kind_of_cell(table: dict[str, np.ndarray], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from figures import region as drawing

    edited = {name: values.copy() for name, values in table.items()}
    edited["outcome"] = edited["outcome"].astype("U10")
    edited["outcome"][:3] = "unverified"
    drawing.draw(edited, tmp_path / "region.png", title="a title")
    assert (tmp_path / "region.png").stat().st_size > 10_000
    with pytest.raises(BadInputError, match="column missing"):
        drawing.draw({"x": np.zeros(1)}, tmp_path / "no.png")
    assert drawing._edges(np.array([1.0, 100.0]), True) == pytest.approx([0.1, 10.0, 1000.0])
    assert drawing._kinds(edited)[:3].tolist() == [1, 1, 1]


def test_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = tmp_path / "run.toml"
    run.write_text('[loop.temperature]\nlaw = "feedback"\n[loop.pruning]\nlaw = "budget"\n', encoding="utf-8")
    arguments = ("region", run, "--out", tmp_path / "out", "--vocab", N, "--cells", 3, "--assume", "rho=0.3")
    status, out, err = entropic(*arguments, "--json", tmp_path / "n.json")
    assert status == 0, err
    assert "region.png" in out + err
    table, _ = results.read_table(tmp_path / "out" / "region.parquet")
    assert len(table["x"]) == 9 * len(region.SLICES)
    assert set(np.unique(table["outcome"])) <= set(region.OUTCOMES)
    told = json.loads((tmp_path / "n.json").read_text())
    assert [row["slice"] for row in told["slices"]] == [f"{x} x {y}" for x, y in region.SLICES]
    assert all(math.isclose(x, 0.3) for x in table["x_here"][table["x_name"] == "rho"])


def test_command_refuses_a_config_without_coupling(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text("", encoding="utf-8")
    status, _, err = entropic("region", run, "--out", tmp_path / "out", "--vocab", N)
    assert status == 2
    assert "nothing couples" in err
    assert not (tmp_path / "out").exists()
