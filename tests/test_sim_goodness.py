"""The goodness-of-fit report: it accepts the model's own banks and finds what is wrong with another's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from command import entropic
from synthetic_bank import make_bank

from entropic_ctl import bank as banks
from entropic_ctl import results
from sim import goodness, parametric
from sim.regimes import Regimes
from sim.trajectories import load_bank

BANK, _ = make_bank(prompts=8, lengths=(60, 90), temperatures=(0.5, 1.2))
MODEL = parametric.fit_model(BANK, 2)
OWN = parametric.generate(MODEL, seed=1234, prompts=10)


def test_a_bank_the_model_made_agrees_with_it() -> None:
    _, summary = goodness.check_fit(OWN, MODEL, draws=60)
    assert summary["inside_share"] > 0.8  # 0.95 in the mean, over dependent statistics
    assert min(summary["ks_p"].values()) > 0.01


def changed(**values: np.ndarray) -> parametric.EntropyModel:
    laws: list[Regimes] = [dataclasses.replace(law, **values) for law in MODEL.regimes]
    return dataclasses.replace(MODEL, regimes=tuple(laws))


@pytest.mark.parametrize(
    ("model", "statistic", "least"),
    [
        (changed(phi=np.array([0.9, 0.9]), level=np.zeros(2)), "autocorrelation", 0.3),
        (changed(sigma=np.array([0.3, 0.3])), "sd entropy", 0.9),
        (dataclasses.replace(MODEL, hazard=np.array([-1.0, 0.0, 0.0, 0.0])), "mean length", 0.9),
        (
            dataclasses.replace(MODEL, curves=dataclasses.replace(MODEL.curves, mean=MODEL.curves.mean + 1.5)),
            "varentropy at entropy fifth",
            0.5,
        ),
    ],
)
def test_a_wrong_model_is_found_out_by_the_statistic_it_is_wrong_in(
    model: parametric.EntropyModel, statistic: str, least: float
) -> None:
    table, _ = goodness.check_fit(OWN, model, draws=40)
    chosen = table["statistic"] == statistic
    assert (~table["inside"][chosen]).mean() >= least


def test_a_wrong_marginal_is_far_away() -> None:
    _, summary = goodness.check_fit(OWN, changed(level=MODEL.regimes[0].level + 2.0), draws=40)
    assert max(summary["ks_p"].values()) < 0.1
    assert min(summary["ks_distance"].values()) > 0.2


def test_distance_and_correlation_in_closed_form() -> None:
    assert goodness._distance(np.array([0.0, 1.0]), np.array([0.0, 1.0])) == 0.0
    assert goodness._distance(np.array([0.5]), np.array([0.0, 1.0])) == 0.5
    assert goodness._distance(np.array([0.0, 0.0, 0.0, 1.0]), np.array([0.0, 1.0])) == 0.25  # atoms
    assert goodness._distance(np.array([5.0]), np.array([0.0, 1.0])) == 1.0
    texts = [np.array([1.0, -1.0] * 50), np.array([1.0, -1.0] * 20)]
    assert goodness._correlation(texts, 1) == pytest.approx(-1.0)
    assert goodness._correlation(texts, 2) == pytest.approx(1.0)


def test_left_out_prompts_prefer_the_true_number_of_regimes() -> None:
    two = Regimes(
        np.array([-3.0, 2.0]),
        np.array([0.0, 0.3]),
        0.2,
        np.array([0.6, 0.4]),
        np.array([[0.9, 0.1], [0.1, 0.9]]),
        np.array([0.5, 0.5]),
    )
    bank = parametric.generate(dataclasses.replace(MODEL, regimes=(two, two)), prompts=9)
    compared = parametric.held_out(bank, (1, 2))
    assert compared["bic"][1] < compared["bic"][0]
    assert compared["held_out_nats"][1] > compared["held_out_nats"][0] + 0.1


def test_the_command_writes_model_tables_and_picture(tmp_path: Path) -> None:
    banks.save(BANK, tmp_path / "b.npz")
    arguments = ("fit-entropy", tmp_path / "b.npz", "--out", tmp_path / "m.json", "--report", tmp_path / "fit")
    status, out, err = entropic(*arguments, "--regimes", 2, "--draws", 20, "--json", tmp_path / "s.json")
    assert status == 0, err
    assert "inside_share" in out
    table, stamp = results.read_table(tmp_path / "fit" / "goodness.parquet")
    assert {"observed", "low", "high", "inside"} <= table.keys()
    assert stamp["config"]["command"] == "fit-entropy"
    assert (tmp_path / "fit" / "entropy_fit.png").stat().st_size > 10_000
    assert load_bank(str(tmp_path / "m.json"), prompts=2).meta["synthetic"] is True


@pytest.mark.parametrize(
    ("arguments", "needle"),
    [
        (("absent.npz", "--out", "m.json"), "absent.npz"),
        (("shipped", "--out", "m.npz"), "FILE.json"),
        (("shipped", "--out", "m.json", "--regimes", "0"), "--regimes"),
        (("shipped", "--out", "m.json", "--regimes", "some"), "--regimes"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], needle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = entropic("fit-entropy", *arguments)
    assert status == 2
    assert needle in err
    assert not list(tmp_path.iterdir())
