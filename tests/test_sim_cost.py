"""The roofline against numbers worked by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.config import CostConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig
from sim.cost import (
    DEVICES,
    MODELS,
    PRESETS,
    DeviceSpec,
    LinearCost,
    ModelShape,
    Roofline,
    cost_model,
    idle_power_w,
    kv_pages,
    preset,
    shadow_shares,
)
from sim.load import StepLoad, measure

TINY = ModelShape("tiny", 4, 2, 1, 8, 1000.0, 500.0, 50)  # 128 KV bytes per token, 256 FLOPs per query and key
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
    device = DeviceSpec("unit", 1e3, 1e3, 1e6, overlap=0.0, attention_overlap=0.0)
    assert run(Roofline(device, TINY), [(0, 1, False)]).seconds == pytest.approx(2 + 2 + 0.256 + 0)


@pytest.mark.parametrize(("page", "first", "second"), [(16, 104 / 512, 64 / 512), (48, 232 / 1536, 192 / 1536)])
def test_two_looks_by_hand(page: int, first: float, second: float) -> None:
    """A record of 8 channels: 16 + 8 + 16 bytes and planes of 64 per 16 tokens, against 32 bytes of K and V a token."""
    model = Roofline(UNIT, TINY, page, PruningConfig(dense_layers=1, sink_pages=1, recent_pages=2))
    dense = run(model, [(400, 1, True)])
    pruned = run(model, [(400, 1, True)], theta=0.01, kept=0.2)
    scored, again = (400 - 3 * page) / 400, 1.2 * math.sqrt(0.2) * 0.8
    assert shadow_shares(TINY, page) == pytest.approx((first, second))
    looks = scored * (first + second * again)
    assert pruned.kv_bytes / dense.kv_bytes == pytest.approx(0.25 + 0.75 * (0.2 + looks))
    assert pruned.flops - dense.flops == pytest.approx(256 * 0.75 * (0.2 * 401 + 400 * scored * (1 + again) / 2 - 401))


def test_where_all_is_kept_no_page_is_looked_at_twice() -> None:
    model = Roofline(UNIT, TINY, 16, PruningConfig(dense_layers=0))
    dense, pruned = (run(model, [(400, 1, True)], theta=theta) for theta in (0.0, 0.01))
    assert pruned.kv_bytes / dense.kv_bytes == pytest.approx(1 + 0.8 * shadow_shares(TINY, 16)[0])


def test_a_slow_pruning_implementation_is_charged_per_step_and_token() -> None:
    slow = dataclasses.replace(UNIT, pruning_step_s=3.0, pruning_token_s=0.01)
    rows = [(400, 1, True), (100, 1, True), (50, 7, True)]
    for theta, extra in ((0.0, 0.0), (0.02, 3.0 + 0.01 * (500 - 2 * 80))):  # the prefill row is not pruned
        base, charged = (run(Roofline(device, TINY), rows, theta=theta, kept=0.5) for device in (UNIT, slow))
        assert charged.seconds - base.seconds == pytest.approx(extra)
        assert (charged.flops, charged.kv_bytes) == (base.flops, base.kv_bytes)


def test_a_row_of_protected_pages_only_costs_what_a_dense_one_costs() -> None:
    slow = dataclasses.replace(UNIT, pruning_step_s=3.0)
    model = Roofline(slow, TINY, 16, PruningConfig(dense_layers=1))
    assert run(model, [(79, 1, True)], theta=0.02, kept=0.9, protected=80) == run(model, [(79, 1, True)])
    pruned = run(model, [(80, 1, True)], theta=0.02, kept=1.0, protected=80)  # nothing to score yet
    assert pruned.seconds == pytest.approx(run(model, [(80, 1, True)]).seconds + 3.0)


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


@pytest.mark.parametrize(
    ("rows", "context", "kept", "measured_ms"),
    [
        (1, 128, 1.0, 7.2),
        (8, 128, 1.0, 10.3),
        (8, 2000, 1.0, 21.2),
        (8, 8000, 1.0, 43.7),
        (8, 2000, 0.195, 17.1),
        (8, 8000, 0.126, 32.1),
        (8, 8000, 0.283, 39.8),
    ],
)
def test_cpu_preset_is_close_to_what_was_measured(rows: int, context: int, kept: float, measured_ms: float) -> None:
    """Decode steps of the engine, dense as ``entropic bench decode`` and pruned as ``bench steps`` measured them."""
    theta = 0.1 if kept < 1.0 else 0.0
    cost = run(preset("cpu2-smollm2-135m"), rows * [(context, 1, True)], theta=theta, kept=kept, protected=80)
    assert 1e3 * cost.seconds == pytest.approx(measured_ms, rel=0.12)


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


MOE = ModelShape("moe", 4, 2, 1, 8, 1000.0, 500.0, 50, expert_params=8000.0, experts=8, experts_per_token=2)


def test_experts_by_hand() -> None:
    model = Roofline(dataclasses.replace(UNIT, peak_flops=1e9), MOE)
    one, three = (run(model, [(0, n, False)]) for n in (1, 3))
    # a token uses a quarter of the experts: 2 (1000 + 2000) FLOPs; three touch 1 - (3/4)^3 of their 16,000 bytes
    assert one.flops - 256 * 1 == 2 * 3000
    assert three.flops - 256 * 6 == 3 * 2 * 3000
    assert one.seconds == pytest.approx(0.5 + (2000 + 16_000 / 4) / 1e3, rel=1e-5)
    assert three.seconds == pytest.approx(0.5 + (2000 + 16_000 * (1 - 0.75**3)) / 1e3, rel=1e-5)


def test_experts_read_like_the_active_model_at_one_token_and_like_all_of_it_at_many() -> None:
    slow_memory = dataclasses.replace(UNIT, peak_flops=1e15)
    active = dataclasses.replace(MOE, layer_params=3000.0, expert_params=0.0, experts=0, experts_per_token=0)
    everything = dataclasses.replace(active, layer_params=9000.0)
    for tokens, like in ((1, active), (400, everything)):
        mine, other = (run(Roofline(slow_memory, shape), [(0, tokens, False)]) for shape in (MOE, like))
        assert mine.seconds == pytest.approx(other.seconds, rel=1e-6)


@pytest.mark.parametrize(("bits", "share"), [(8, 0.5), (4, 0.25), (32, 2.0)])
def test_narrow_weights_and_cache_move_fewer_bytes(bits: int, share: float) -> None:
    device = dataclasses.replace(UNIT, peak_flops=1e15, peak_flops_32=1e15, overhead_s=0.0)
    wide, rows = Roofline(device, TINY), [(100, 1, True)]
    weights, cache = (Roofline(device, TINY.stored_as(w, k)) for w, k in ((bits, 0), (0, bits)))
    kv_s = 128 * 100 / 1e3
    weights_s = 2 * 1500 / 1e3
    assert run(wide, rows).seconds == pytest.approx(weights_s + kv_s, rel=1e-6)
    assert run(weights, rows).seconds == pytest.approx(share * weights_s + kv_s, rel=1e-6)
    assert run(cache, rows).seconds == pytest.approx(weights_s + share * kv_s, rel=1e-6)
    assert run(cache, rows).kv_bytes == share * run(wide, rows).kv_bytes


@pytest.mark.parametrize("bits", [8, 16, 32])
def test_the_key_shadow_does_not_shrink_with_the_cache(bits: int) -> None:
    wide, narrow = (np.array(shadow_shares(TINY.stored_as(kv_bits=b), 16)) for b in (16, bits))
    assert narrow * bits == pytest.approx(wide * 16)


def test_the_arithmetic_follows_the_weights_unless_told_otherwise() -> None:
    device = dataclasses.replace(DEVICES["h100"], overhead_s=0.0)
    rows = [(0, 8192, False)]  # bound by arithmetic

    def seconds(weight_bits: int, compute_bits: int) -> float:
        return float(run(Roofline(device, TINY.stored_as(weight_bits), compute_bits=compute_bits), rows).seconds)

    assert seconds(4, 0) == seconds(8, 0) == seconds(16, 0) == seconds(16, 16)
    assert seconds(8, 8) == pytest.approx(seconds(16, 0) * 989.4 / 1978.9)
    assert seconds(32, 0) == pytest.approx(seconds(16, 0) * 989.4 / 66.9)


def test_energy_by_hand() -> None:
    device = dataclasses.replace(
        UNIT, idle_w=1.0, compute_w=10.0, memory_w=5.0, overhead_w=3.0, limit_w=1000.0, pruning_step_s=2.0
    )
    cost = run(Roofline(device, TINY), [(10, 1, True), (30, 1, True)])
    compute_s, memory_s = 4 + 2 + 10.752, 2 + 1 + 5.12
    assert cost.energy_j == pytest.approx(cost.seconds + 10 * compute_s + 5 * memory_s + 3 * 0.5)
    limited = run(Roofline(dataclasses.replace(device, limit_w=4.0), TINY), [(10, 1, True), (30, 1, True)])
    assert limited.energy_j == pytest.approx(4.0 * cost.seconds)
    idle = Roofline(device, TINY).step(StepLoad(0, 0, 0, 0, 0.0))
    assert idle.energy_j == pytest.approx(0.5 * (1 + 3))
    rows = [(400, 1, True)]
    dense, pruned = (
        run(Roofline(device, TINY, 16, PruningConfig(dense_layers=4)), rows, theta=theta) for theta in (0.0, 0.1)
    )
    assert pruned.energy_j - dense.energy_j == pytest.approx(2.0 * (1 + 3))  # all four layers are dense: host time only


@given(
    st.sampled_from(sorted(PRESETS)),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 300), st.booleans()), max_size=12),
    st.floats(0.05, 1.0),
)
def test_energy_lies_between_idle_and_the_power_limit(
    name: str, rows: list[tuple[int, int, bool]], kept: float
) -> None:
    model = preset(name)
    cost = run(model, rows, theta=0.02, kept=kept) if rows else model.step(StepLoad(0, 0, 0, 0, 0.0))
    assert idle_power_w(model) * cost.seconds <= cost.energy_j * (1 + 1e-12)
    assert cost.energy_j <= model.device.limit_w * cost.seconds * (1 + 1e-12)
    assert idle_power_w(LinearCost()) == 0.0


@given(
    st.sampled_from(sorted(PRESETS)),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 40), st.booleans()), min_size=1, max_size=8),
    st.floats(0.05, 0.9),
    st.data(),
)
def test_more_context_tokens_or_pages_never_cost_less(
    name: str, rows: list[tuple[int, int, bool]], kept: float, data: st.DataObject
) -> None:
    model = preset(name)
    base = run(model, rows, theta=0.02, kept=kept)
    i = data.draw(st.integers(0, len(rows) - 1))
    context, n, samples = rows[i]
    longer = [*rows[:i], (context + data.draw(st.integers(1, 1000)), n, samples), *rows[i + 1 :]]
    wider = [*rows[:i], (context, n + data.draw(st.integers(1, 40)), samples), *rows[i + 1 :]]
    others = [run(model, longer, theta=0.02, kept=kept), run(model, rows, theta=0.02, kept=kept + 0.1)]
    if n > 1 or not samples:  # a pruned decode row that becomes a chunk is no longer pruned, and may read less metadata
        others.append(run(model, wider, theta=0.02, kept=kept))
    for other in others:
        for more, less in zip(other, base, strict=True):
            assert more >= less * (1 - 1e-12)


def test_a_configuration_names_device_model_and_widths() -> None:
    model = cost_model(CostConfig(device="h200", model="llama-3-70b", weight_bits=8, kv_bits=8, bandwidth=3e12))
    assert (model.device.name, model.device.bandwidth) == ("h200", 3e12)
    assert (model.model.name, model.model.weight_bits, model.model.kv_bytes_per_token) == ("llama-3-70b", 8, 163_840)
    assert cost_model(CostConfig(device="cpu", cores=16)).device.peak_flops == 16 * DEVICES["cpu"].peak_flops
    with pytest.raises(BadInputError, match=r"cost.model.*141.1 GB of weights"):
        cost_model(CostConfig(device="h200", model="llama-3-70b"))
    for wrong in ({"weight_bits": 5}, {"kv_bits": 64}, {"compute_bits": 4}, {"matmul_efficiency": 1.5}):
        with pytest.raises(BadInputError, match=next(iter(wrong))):
            CostConfig(**wrong)  # type: ignore[arg-type]


def test_every_preset_fits_its_device() -> None:
    for device, model in PRESETS.values():
        assert kv_pages(DEVICES[device], MODELS[model]) > 1000
