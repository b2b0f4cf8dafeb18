from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl import config
from entropic_ctl.errors import BadInputError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_defaults_round_trip(tmp_path: Path) -> None:
    run = config.load(write(tmp_path, "seed = 3\n"))
    again = config.from_mapping(config.resolve(run))
    assert again == run
    assert config.digest(config.resolve(run)) == config.digest(config.resolve(again))


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbfseed = 3\r\n")
    assert config.load(tmp_path / "run.toml").seed == 3


@pytest.mark.parametrize(
    ("text", "needles"),
    [
        ("seed = " + "9" * 400 + "\n", ["run.toml:1", "seed", "out of range"]),
        ("[loop.temperature]\nt_min = 2.0\nt_max = 1.0\n", ["run.toml:2", "t_min", "got 2.0", "<= 1"]),
        ('[model]\npath = "a\\u0000b"\n', ["run.toml:2", "model.path", "NUL"]),
        ("a = " + "{a=" * 3000, ["run.toml", "nested too deeply"]),
        ("sede = 1\n", ["sede", "run.toml"]),
        ("seed = -1\n", ["run.toml:1", "seed", "-1"]),
        ("[engine]\n\npages = 0\n", ["run.toml:3", "engine.pages", "got 0", "[1, "]),
        ("[engine]\npage_token = 16\n", ["run.toml:2", "did you mean 'page_tokens'"]),
        ("[engine]\npages = 1.5\n", ["not an integer", "1.5"]),
        ("[engine]\npages = true\n", ["not a number", "True"]),
        ("[workload]\nrate_per_s = nan\n", ["not finite", "workload.rate_per_s"]),
        ("[workload]\nkind = 'possion'\n", ["poisson", "possion", "run.toml:2"]),
        ("[workload]\nkind = 'azure'\n", ["needs a trace", "workload.trace"]),
        ("[loop.temperature]\nlaw = 'feedbak'\n", ["run.toml:2", "loop.temperature.law", "feedbak"]),
        ("[loop.temprature]\nlaw = 'fixed'\n", ["loop.temprature"]),
        ("[loop.temperature]\nlaw = 'fixed'\ngain = 1\n", ["run.toml:3", "loop.temperature.gain"]),
        ("[loop.temperature]\nt_min = 2.0\nt_max = 1.0\n", ["t_min", "run.toml:2"]),
        ("[engine]\nmax_batch = 8\nmax_batch_tokens = 4\n", ["max_batch_tokens", ">= max_batch = 8"]),
        ("engine = 3\n", ["engine", "not a table"]),
        ("seed = \n", ["not TOML", "line 1"]),
    ],
)
def test_bad_config_names_file_key_value_and_range(tmp_path: Path, text: str, needles: list[str]) -> None:
    with pytest.raises(BadInputError) as caught:
        config.load(write(tmp_path, text))
    for needle in needles:
        assert needle in str(caught.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot read config"):
        config.load(tmp_path / "absent.toml")
    (tmp_path / "bin.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInputError, match="not UTF-8"):
        config.load(tmp_path / "bin.toml")


@given(st.integers(0, 2**63 - 1), st.integers(1, 10**6), st.floats(1e-6, 1e6))
def test_any_valid_values_round_trip(seed: int, pages: int, rate: float) -> None:
    values = {"seed": seed, "engine": {"pages": pages}, "workload": {"rate_per_s": rate}}
    run = config.from_mapping(values)
    assert config.from_mapping(config.resolve(run)) == run


@pytest.mark.parametrize(("field", "name"), [("bank", "b.npz"), ("calibrated", "../cost.json"), ("device", "cpu.json")])
def test_files_of_the_cost_table_are_relative_to_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, name: str
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    write(folder, f"[cost]\n{field} = '{name}'\n")
    monkeypatch.chdir(tmp_path)
    for path in (Path("runs/run.toml"), folder / "run.toml"):
        assert getattr(config.load(path).cost, field) == str(folder / name)
    absolute = str(tmp_path / "elsewhere" / name)
    assert getattr(config.load(write(folder, f"[cost]\n{field} = '{absolute}'\n")).cost, field) == absolute


def test_what_names_no_file_of_the_cost_table_stays(tmp_path: Path) -> None:
    assert config.load(write(tmp_path, "[cost]\ndevice = 'h100'\n")).cost == config.CostConfig(device="h100")
