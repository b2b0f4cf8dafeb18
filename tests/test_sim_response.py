"""The response to pruning: bounds, monotonicity, and corners worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_bank import make_bank

from entropic_ctl import config as configs
from entropic_ctl.errors import BadInputError
from sim.replica import simulate
from sim.response import Response

BANK, _ = make_bank()


@given(st.floats(0, 4096), st.floats(0, 0.2))
def test_response_is_bounded_and_monotone(context: float, theta: float) -> None:
    response = Response(BANK)
    got = response(np.array([context, context]), np.array([theta, theta / 2]), np.ones(2, np.bool_))
    assert ((got.kept > 0) & (got.kept <= 1)).all()
    assert got.kept[0] <= got.kept[1] + 1e-12
    assert got.kl[0] >= got.kl[1] - 1e-12
    assert (got.certificate_nats <= np.array([theta, theta / 2]) + 1e-12).all()  # never above the budget
    assert (got.certificate_nats >= -np.log1p(-got.certificate_max) - 1e-12).all()  # nor below what the mass means


def test_response_by_hand() -> None:
    response = Response(BANK)
    got = response(np.array([0, 128, 256, 640, 4096]), np.array([0.1, 0.1, 0.1, 0.075, 0.2]), np.ones(5, np.bool_))
    np.testing.assert_allclose(got.kept, [1.0, 0.9, 0.8, (0.825 + 0.45) / 2, 0.11])
    with pytest.raises(BadInputError, match=r"context beyond.*4096"):
        response(np.array([4097]), np.array([0.1]), np.ones(1, np.bool_))
    with pytest.raises(BadInputError, match="theta_nats"):
        response(np.array([10]), np.array([0.21]), np.ones(1, np.bool_))
    prefill = response(
        np.array([640, 640]), np.array([0.1, 0.0]), np.array([False, True])
    )  # nor a row without a budget
    assert (prefill.kept == 1.0).all()
    assert (np.array(prefill[1:]) == 0.0).all()


@pytest.mark.parametrize(
    ("engine", "rule", "field"),
    [
        ({"page_tokens": 32}, {}, "engine.page_tokens"),
        ({}, {"selection": "group_mean"}, "loop.pruning.selection"),
        ({}, {"dense_layers": 0}, "loop.pruning.dense_layers"),
        ({}, {"recent_pages": 1}, "loop.pruning.recent_pages"),
    ],
)
def test_a_pruning_rule_that_was_not_recorded_is_refused(engine: dict, rule: dict, field: str) -> None:
    """The table holds what one rule did; under another the simulator would return that rule's numbers unchanged."""
    tables = {"workload": {"n_requests": 1}, "engine": engine}
    with pytest.raises(BadInputError, match=field):
        simulate(configs.from_mapping({**tables, "loop": {"pruning": {"law": "budget"} | rule}}), bank=BANK)
    simulate(configs.from_mapping({**tables, "loop": {"pruning": rule}}), bank=BANK)  # off: no response is read


def long_run(beyond: str, *, law: str = "budget", max_context: int = 2**24) -> Any:
    """One request of 4,090 prompt tokens and 20 of output: its decode rows hold 4,090 to 4,108 tokens."""
    tables = {
        "workload": {"n_requests": 1, "prompt_tokens": 4090, "prompt_cv": 0, "output_tokens": 20}
        | {"output_length": "limit"},
        "engine": {"max_context": max_context},
        "cost": {"beyond_bank": beyond},
        "loop": {"pruning": {"law": law}},
    }
    return simulate(configs.from_mapping(tables), bank=BANK, keep_tokens=True)


def test_a_workload_that_can_outgrow_the_recorded_contexts_is_refused_at_the_start() -> None:
    with pytest.raises(BadInputError, match=r"cost\.beyond_bank.*4108.*up to 4096.*--contexts"):
        long_run("error")
    long_run("error", law="off")  # nothing is pruned, nothing is read
    assert long_run("error", max_context=4097).summary["requests_in"] == 1  # no row can hold more than 4,096


def test_rows_beyond_the_recorded_contexts_run_dense_when_asked_and_are_counted() -> None:
    """19 decode rows: 4,090 to 4,096 read the response (7), 4,097 to 4,108 run dense (12)."""
    result = long_run("dense")
    assert result.summary["bank_context_beyond"] == 12
    decode = result.steps["decode_rows"] == 1
    assert decode.sum() == 19
    assert ((result.tokens["kept_fraction"][1:] < 1.0) == (np.arange(19) < 7)).all()
    dense = long_run("dense", law="off").steps["kv_bytes"][decode]
    pruned = result.steps["kv_bytes"][decode]
    assert (pruned[:7] < dense[:7]).all()
    np.testing.assert_array_equal(pruned[7:], dense[7:])
