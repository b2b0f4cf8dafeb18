"""What is written is read back as the same run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl import config as configs
from entropic_ctl import registry
from entropic_ctl.config_edit import with_fields
from entropic_ctl.config_toml import to_toml
from entropic_ctl.errors import BadInputError

LAWS = {table: registry.names(package) for table, (package, _, _) in configs.LAWS.items()}
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)


FIELDS = st.fixed_dictionaries(
    {
        "model.path": TEXT,
        "workload.rate_per_s": st.floats(1e-9, 1e6),
        "seed": st.integers(0, 2**63 - 1),
        "loop.temperature.law": st.sampled_from(LAWS["temperature"]),
        "loop.pruning.law": st.sampled_from(LAWS["pruning"]),
        "loop.scheduling.policy": st.sampled_from(LAWS["scheduling"]),
    }
)


@given(FIELDS)
def test_round_trip(changes: dict[str, object]) -> None:
    config = with_fields(configs.RunConfig(), changes)
    assert configs.from_mapping(tomllib.loads(to_toml(config, ["a\nb"]))) == config


def test_the_shipped_examples_survive_a_file(tmp_path: Path) -> None:
    for example in sorted((Path(__file__).parents[1] / "paper_repro" / "configs").glob("*.toml")):
        config = configs.load(example)
        copy = tmp_path / example.name
        copy.write_text(to_toml(config, ["copied"]), encoding="utf-8")
        assert configs.load(copy) == config
        assert copy.read_text(encoding="utf-8").startswith("# copied\n")


def test_what_toml_cannot_say_is_refused() -> None:
    from entropic_ctl import config_toml

    with pytest.raises(BadInputError, match=r"loop\.x: no TOML form"):
        config_toml._value(object(), "loop.x")
    assert config_toml._value((1, 2.5, "a"), "x") == '[1, 2.5, "a"]'
