"""The roofline against numbers worked by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.errors import BadInputError
from sim.cost import DEVICES, MODELS, PRESETS, DeviceSpec, LinearCost, ModelShape, Roofline, kv_pages, preset
from sim.load import StepLoad, measure

TINY = ModelShape("tiny", 4, 2, 1, 8, 1000.0, 500.0, 3000.0, 50)  # 128 KV bytes per token, 256 FLOPs per query and key
UNIT = DeviceSpec("unit", 1e3, 1e3, 1e6, overhead_s=0.5)


def run(
    model: Roofline, rows: list[tuple[int, int, bool]], theta: float = 0.0, kept: float = 1.0, protected: int = 0
) -> Any:
    context, n, samples = (np.array(column) for column in zip(*rows, strict=True))
    full = np.full(len(rows), 1.0)
    return model.step(measure(context, n, samples.astype(bool), theta * full, kept * full, protected_tokens=protected))


def test_decode_by_hand() -> None:
    cost = run(Roofline(UNIT, TINY), [(10, 1, True), (30, 1, True)])
    assert cost.kv_bytes == 128 * 40
    assert cost.flops == 2 * 1000 * 2 + 2 * 500 * 2 + 256 * 42
    # layers: 4 s of FLOPs over 2 s of bytes; head: 2 over 1; attention: 10.752 of FLOPs over 5.12 of bytes
    assert cost.seconds == pytest.approx(0.5 + 4 + 2 + 10.752)


def test_prefill_by_hand() -> None:
    cost = run(Roofline(UNIT, TINY), [(10, 3, False)])
    assert cost.kv_bytes == 128 * 10
    assert cost.flops == 2 * 1000 * 3 + 256 * (11 + 12 + 13)
    assert cost.seconds == pytest.approx(0.5 + 6 + 256 * 36 / 1000)


def test_overlap_zero_adds_arithmetic_and_traffic() -> None:
    device = DeviceSpec("unit", 1e3, 1e3, 1e6, overlap=0.0)
    assert run(Roofline(device, TINY), [(0, 1, False)]).seconds == pytest.approx(2 + 2 + 0.256 + 0)


@pytest.mark.parametrize(("page", "metadata"), [(16, 0.09375), (32, 0.046875), (64, 0.0234375)])
def test_pruned_bytes_by_hand(page: int, metadata: float) -> None:
    model = Roofline(UNIT, TINY, page, dense_layers=1)
    dense = run(model, [(400, 1, True)])
    pruned = run(model, [(400, 1, True)], theta=0.01, kept=0.2)
    assert pruned.kv_bytes / dense.kv_bytes == pytest.approx(0.25 + 0.75 * (0.25 + metadata + 0.2))
    assert dense.flops - pruned.flops == pytest.approx(256 * 401 * 0.75 * (1 - 0.5 - 0.2))


def test_a_slow_pruning_implementation_is_charged_per_step_and_token() -> None:
    slow = dataclasses.replace(UNIT, pruning_step_s=3.0, pruning_token_s=0.01)
    rows = [(400, 1, True), (100, 1, True), (50, 7, True)]
    for theta, extra in ((0.0, 0.0), (0.02, 3.0 + 0.01 * 500)):  # the prefill row is not pruned
        base, charged = (run(Roofline(device, TINY), rows, theta=theta, kept=0.5) for device in (UNIT, slow))
        assert charged.seconds - base.seconds == pytest.approx(extra)
        assert (charged.flops, charged.kv_bytes) == (base.flops, base.kv_bytes)


def test_a_row_of_protected_pages_only_costs_what_a_dense_one_costs() -> None:
    slow = dataclasses.replace(UNIT, pruning_step_s=3.0)
    model = Roofline(slow, TINY, 16, dense_layers=1)
    assert run(model, [(79, 1, True)], theta=0.02, kept=0.9, protected=80) == run(model, [(79, 1, True)])
    pruned = run(model, [(80, 1, True)], theta=0.02, kept=0.9, protected=80)
    assert pruned.seconds > run(model, [(80, 1, True)]).seconds + 2.9


def test_prefill_is_never_pruned() -> None:
    model = Roofline(UNIT, TINY)
    assert run(model, [(400, 7, True)], theta=0.1, kept=0.1) == run(model, [(400, 7, True)])


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 300), st.booleans()), min_size=1, max_size=12), st.randoms()
)
def test_order_of_rows_does_not_matter_and_work_is_monotone(rows: list[tuple[int, int, bool]], random: Any) -> None:
    model = preset("a100-80-llama-3-8b")
    cost = run(model, rows)
    shuffled = list(rows)
    random.shuffle(shuffled)
    other = run(model, shuffled)
    assert cost.seconds == pytest.approx(other.seconds, rel=1e-9)
    more = run(model, [*rows, (100, 1, True)])
    assert more.seconds > cost.seconds
    assert more.flops > cost.flops
    assert more.kv_bytes > cost.kv_bytes


def test_an_iteration_without_rows_still_takes_its_overhead() -> None:
    cost = preset("cpu2-smollm2-135m").step(StepLoad(0, 0, 0, 0, 0.0))
    assert cost.seconds == DEVICES["cpu2"].overhead_s > 0
    assert cost.flops == cost.kv_bytes == 0


@pytest.mark.parametrize(("rows", "measured_ms"), [(1, 20.0), (8, 22.0), (64, 40.0), (512, 157.0)])
def test_cpu_preset_is_close_to_what_was_measured(rows: int, measured_ms: float) -> None:
    model = preset("cpu2-smollm2-135m")
    n, samples = np.ones(rows, np.int64), np.arange(rows) < 8
    got = model.step(measure(0 * n, n, samples, np.zeros(rows), np.ones(rows))).seconds * 1e3
    assert got == pytest.approx(measured_ms, rel=0.1)


def test_kv_sizes_and_pools() -> None:
    assert MODELS["smollm2-135m"].kv_bytes_per_token == 23_040
    assert MODELS["llama-3-8b"].kv_bytes_per_token == 131_072
    assert kv_pages(DEVICES["a100-80"], MODELS["llama-3-8b"], 16) == 29_205
    with pytest.raises(BadInputError, match="no room"):
        kv_pages(DEVICES["cpu2"], MODELS["llama-3-8b"])


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(BadInputError) as caught:
        preset("h100")
    for needle in ("cost.preset", "h100", *PRESETS):
        assert needle in str(caught.value)


def test_linear_cost() -> None:
    assert LinearCost(1.0, 0.5).step(StepLoad(2, 5, 2, 0, 0.0)).seconds == 3.5
