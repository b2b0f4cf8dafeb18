"""The commands ``margins`` and ``phase``, end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import entropic

from entropic_ctl.results import read_table
from proofs import margins


@pytest.fixture
def config(tmp_path: Path, bank_file: Path) -> Any:
    def write(law: str = "feedback", lag: int = 0, pruning: str = 'law = "budget"', **more: Any) -> Path:
        values = {"target_nats": 1.0, "gain": 0.02, **more} if law == "feedback" else more
        lines = [f"{key} = {value}" for key, value in values.items()]
        path = tmp_path / "run.toml"
        path.write_text(
            f'[cost]\nbank = "{bank_file}"\n[engine]\nobservation_lag = {lag}\n[loop.pruning]\n{pruning}\n'
            f'[loop.temperature]\nlaw = "{law}"\n' + "\n".join(lines) + "\n"
        )
        return path

    return write


@pytest.mark.parametrize("lag", [1])
def test_margins_writes_tables_figures_and_systems(config: Any, tmp_path: Path, lag: int) -> None:
    out, loops, numbers = tmp_path / "out", tmp_path / "loops.json", tmp_path / "m.json"
    run = config(lag=lag)
    status, shown, error = entropic(
        "margins", run, "--out", out, "--export", loops, "--json", numbers, "--varentropy", 2.5, "--vocab", 49_152
    )
    assert status == 0, error
    assert "gain margin" in shown
    assert "corners stable" in shown
    found = json.loads(numbers.read_text())
    assert list(found["loops"]) == ["v_max", "target", "v_min", "given1"]
    assert found["loops"]["v_max"]["gain_margin"] == pytest.approx((2, 1)[lag] / (0.02 * 30.163347), rel=1e-6)
    table, stamp = read_table(out / "loops.parquet")
    assert table["delay_margin_steps"].tolist() == [each["delay_margin_steps"] for each in found["loops"].values()]
    assert stamp["config"]["engine"]["observation_lag"] == lag
    assert read_table(out / "locus.csv")[0].keys() == read_table(out / "locus.parquet")[0].keys()
    for name in ("margins.png", "coupled.png"):
        assert (out / name).read_bytes()[:4] == b"\x89PNG"
    assert margins.load(loops, "given1_L").nstates == 1 + lag
    again = entropic("margins", config(lag=lag, gain=0.01), "--out", out)
    assert again[0] == 2
    assert "another configuration" in again[2]


def test_margins_of_an_unstable_loop_exit_1(config: Any, tmp_path: Path) -> None:
    run = config(gain=0.5, pruning='law = "off"')
    status, shown, _ = entropic("margins", run, "--out", tmp_path / "out", "--vocab", 49_152)
    assert status == 1
    assert "NO" in shown
    assert (tmp_path / "out" / "margins.png").is_file()


@pytest.mark.parametrize(("law", "says"), [("fixed", "never moves"), ("solve", "deadbeat"), ("damped", "static")])
def test_laws_without_a_loop_are_explained(config: Any, tmp_path: Path, law: str, says: str) -> None:
    status, shown, _ = entropic("margins", config(law), "--json", tmp_path / "m.json")
    assert status == 0
    assert says in " ".join(shown.split())
    assert json.loads((tmp_path / "m.json").read_text())["margins"] is None
    status, _, error = entropic("margins", config(law), "--export", tmp_path / "x.json")
    assert status == 2
    assert "nothing to draw or export" in error
    assert not (tmp_path / "x.json").exists()
    status, _, error = entropic("phase", config(law), "--out", tmp_path / "phase")
    assert status == 2
    assert "does not move" in error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--ema", "0"), "ema"),
        (("--ema", "1e-300"), "--ema: out of range"),
        (("--ema", "nan"), "--ema: out of range"),
        (("--varentropy", "-1"), "varentropy"),
        (("--varentropy", "nan"), "varentropy"),
        (("--export", "x.bin"), ".json, .mat"),
        (("--assume", "nonsense=1"), "nonsense"),
        (("--vocab", "1"), "vocab"),
    ],
)
def test_margins_refuses_what_makes_no_sense(config: Any, options: tuple[str, ...], says: str) -> None:
    status, _, error = entropic("margins", config(), *options)
    assert status == 2
    assert says in error


@pytest.mark.parametrize("gain", [-0.1, 0.0])
def test_no_margin_without_a_pull_towards_the_target(config: Any, gain: float) -> None:
    status, _, error = entropic("margins", config(gain=gain))
    assert status == 2
    assert "no margin exists" in error


def test_a_vocabulary_of_two_and_a_filter(config: Any) -> None:
    assert entropic("margins", config(target_nats=0.5), "--vocab", 2)[0] == 0
    status, shown, _ = entropic("margins", config(), "--vocab", 64, "--ema", 0.25)
    assert status == 0
    assert "certified" not in shown


@pytest.mark.parametrize("plant", ["sharpest", "recorded"])
def test_phase_writes_a_portrait_of_each_plant(config: Any, tmp_path: Path, plant: str) -> None:
    out = tmp_path / "out"
    status, shown, error = entropic(
        "phase", config(), "--out", out, "--plant", plant, "--tokens", 20, "--json", tmp_path / "p.json"
    )
    assert status == 0, error
    assert "settles" in shown
    found = json.loads((tmp_path / "p.json").read_text())
    assert {each["lag"] for each in found["arms"]} == {0, 1}
    assert found["arms"][0]["status"] == "proved"
    for name in ("phase-lag0.png", "phase-lag1.png", "coupled.png"):
        assert (out / name).read_bytes()[:4] == b"\x89PNG"
    assert set(read_table(out / "coupled.parquet")[0]) == {"token", "u", "theta", "timer", "tempered", "model", "start"}


def test_phase_with_given_gains_one_lag_and_no_budget(config: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, _, error = entropic(
        "phase", config(pruning='law = "off"'), "--out", out, "--gain", -0.05, "--gain", 0.1, "--lag", 1, "--tokens", 8
    )
    assert status == 0, error
    arms = json.loads((out / "phase.json").read_text())["arms"]
    assert [each["gain"] for each in arms] == [0.02, -0.05, 0.1]
    assert arms[1]["status"] == "refuted"
    assert arms[1]["at_clamp"] == 1.0  # the wrong sign ends at a clamp
    assert not (out / "coupled.png").exists()
    assert not (out / "phase-lag0.png").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--gain", "50"), "gain"),
        (("--lag", "2"), "lag"),
        (("--plant", "other"), "plant"),
        (("--gain", "nan"), "--gain: out of range"),
        (("--gain", "inf"), "--gain: out of range"),
        (("--model-entropy", "-1"), "--model-entropy"),
        (("--model-entropy", "nan"), "--model-entropy: out of range"),
    ],
)
def test_phase_refuses_what_it_cannot_run(config: Any, tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    status, _, error = entropic("phase", config(), "--out", tmp_path / "out", *options)
    assert status == 2
    assert says in error
    assert not (tmp_path / "out").exists()


def test_phase_of_a_target_out_of_reach(config: Any, tmp_path: Path) -> None:
    run = config(target_nats=4.9)
    status, _, error = entropic("phase", run, "--out", tmp_path / "out")
    assert status == 2
    assert "target_nats" in error
    status, shown, error = entropic("phase", run, "--out", tmp_path / "out", "--plant", "recorded")
    assert status == 0, error
    assert "no equilibrium" in shown


def test_a_certificate_made_for_a_lighter_load_is_not_passed_off(tmp_path: Path, bank_file: Path) -> None:
    def write(name: str, kind: str, rate: float) -> Path:
        path = tmp_path / name
        path.write_text(
            f'[cost]\nbank = "{bank_file}"\n[workload]\nkind = "{kind}"\nrate_per_s = {rate}\nn_requests = 50\n'
        )
        return path

    light, heavy, regular = (
        write("a.toml", "poisson", 0.2),
        write("b.toml", "poisson", 0.3),
        write("c.toml", "gamma", 0.1),
    )
    cert = tmp_path / "cert.json"
    assert entropic("prove", light, "--out", cert)[0] == 0
    assert entropic("check", cert, light)[0] == 0
    status, _, error = entropic("check", cert, heavy)
    assert status == 1
    assert "rate_per_s = 0.2" in error
    assert "0.3" in error
    status, _, error = entropic("check", cert, regular)
    assert status == 1
    assert "Poisson" in error


def test_margins_are_judged_by_what_an_equilibrium_of_the_target_can_have(config: Any, tmp_path: Path) -> None:
    """k V_max > 2 > k V*: stable, exit 0, with v_max shown as the worst case; past 2/V* exit 1."""
    numbers = tmp_path / "m.json"
    run = config(gain=0.1)
    status, shown, error = entropic("margins", run, "--json", numbers, "--vocab", 49_152)
    found = json.loads(numbers.read_text())
    assert status == 0, error
    assert (found["loops"]["v_max"]["stable"], found["loops"]["v_max"]["judged"], found["stable"]) == (
        False,
        False,
        True,
    )
    assert found["coupled"]["stable"] == found["coupled"]["corners"]
    assert "worst case while logits change" in shown
    assert entropic("margins", run, "--vocab", 49_152, "--varentropy", 30.0)[0] == 1  # asked for by name
    out = tmp_path / "out"
    assert entropic("margins", config(gain=0.2), "--vocab", 49_152, "--out", out)[0] == 1
    poles, locus = (read_table(out / f"{name}.parquet")[0] for name in ("poles", "locus"))
    assert locus["re"].min() <= poles["re"].min() + 1e-9


def test_prove_warns_where_simulate_would_refuse(config: Any, tmp_path: Path) -> None:
    wide = config(pruning='law = "budget"\ntheta_nats = 5.0\ntheta_wide_nats = 9.0')
    _, _, error = entropic("prove", wide, "--out", tmp_path / "c.json")
    assert "`entropic simulate` refuses this config" in error
    assert "loop.pruning.theta" in error
    assert "`entropic simulate` refuses" not in entropic("prove", config(), "--out", tmp_path / "d.json")[2]


@pytest.mark.parametrize(
    ("body", "home"),
    [
        ("observation_lag = 1\n", "observation_lag belongs in [engine]"),
        ("[workload]\nobservation_lag = 1\n", "observation_lag belongs in [engine]"),
        ('[loop.temperature]\nlaw = "fixed"\ngain = 0.1\n', "[loop.temperature] with law = 'feedback'"),
        ("[engine]\nseed = 3\n", "the head of the file"),
        ("[engine]\npage = 3\n", "did you mean 'pages'?"),
    ],
)
def test_a_misplaced_key_is_told_where_it_belongs(body: str, home: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(body)
    status, _, error = entropic("simulate", path)
    assert status == 2
    assert home in error
