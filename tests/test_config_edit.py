"""Fields by path: change one, and only that one changes; a law's parameters follow its name."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl import config as configs
from entropic_ctl import config_edit
from entropic_ctl.config_edit import differences, flat, kind, value_of, with_fields
from entropic_ctl.errors import BadInputError

BASE = configs.from_mapping(
    {
        "loop": {
            "temperature": {"law": "feedback", "gain": 0.03, "t_min": 0.5},
            "pruning": {"law": "budget"},
            "scheduling": {"policy": "entropic", "wait_limit_steps": 77},
        }
    }
)
CHANGES = {
    "seed": st.integers(0, 9),
    "workload.rate_per_s": st.floats(0.1, 9.0),
    "engine.max_batch": st.integers(1, 8),
    "engine.prefix_caching": st.booleans(),
    "loop.temperature.gain": st.floats(-1.0, 1.0),
    "loop.temperature.phi": st.sampled_from(("linear", "tanh")),
    "scheduling.gamma": st.floats(0.0, 5.0),
}


@given(st.fixed_dictionaries({}, optional=CHANGES))
def test_exactly_the_named_fields_change(changes: dict[str, object]) -> None:
    made = with_fields(BASE, changes)
    for path, value in changes.items():
        assert value_of(made, path) == value
    moved = {line.partition(":")[0] for line in differences(configs.resolve(BASE), configs.resolve(made))}
    assert moved == {config_edit.full_path(p) for p, v in changes.items() if value_of(BASE, p) != v}


def test_a_new_law_keeps_what_it_shares_and_takes_its_own_defaults_for_the_rest() -> None:
    made = with_fields(BASE, {"loop.temperature.law": "fixed", "loop.scheduling.policy": "fcfs"})
    assert made.loop.temperature.config.t_min == 0.5
    assert not hasattr(made.loop.temperature.config, "gain")
    assert made.loop.scheduling.config.wait_limit_steps == 77
    back = with_fields(made, {"loop.temperature.law": "feedback", "loop.temperature.gain": 0.01})
    assert back.loop.temperature.config.gain == 0.01
    assert back.loop.temperature.config.target_nats == 1.5  # the law's default


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"loop.temperature.gian": 0.1}, "gian"),
        ({"wrkload.rate_per_s": 1.0}, "did you mean 'workload.rate_per_s'"),
        ({"loop.temperature": 1}, "no such field"),
        ({"workload": 1}, "no such field"),
        ({"loop.scheduling.policy": "fcsf"}, "no such law"),
        ({"loop.temperature.gain": "high"}, "not a number"),
        ({"engine.max_batch": 2.5}, "not an integer"),
        ({"workload.rate_per_s": -1.0}, "out of range"),
        ({"loop.temperature.law": "fixed", "loop.temperature.gain": 0.1}, "unknown key"),
        ({"seed.x": 1}, "no such field"),
    ],
)
def test_bad_changes_name_the_field(changes: dict[str, object], needle: str) -> None:
    with pytest.raises(BadInputError, match=needle):
        with_fields(BASE, changes, where="here")


def test_every_field_of_the_resolved_run_has_a_kind() -> None:
    for path in flat(configs.resolve(BASE)):
        assert kind(path) in ("number", "numbers", "integer", "choice", "text", "flag"), path


def test_differences_see_what_is_absent_on_one_side() -> None:
    assert differences({"a": {"b": 1}}, {"a": {"b": 1}}) == []
    assert differences({"a": {"b": 1}, "c": 0}, {"a": {"b": 2}}) == ["a.b: 1 -> 2", "c: 0 -> '(absent)'"]


def test_docstring_examples() -> None:
    assert doctest.testmod(config_edit).failed == 0
    assert config_edit.parse_values("1e-3, 'a b',false") == [1e-3, "a b", False]
    assert config_edit.parse_values("a.csv,b.csv") == ["a.csv", "b.csv"]
