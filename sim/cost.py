r"""The roofline cost model: seconds, FLOPs and KV bytes of one engine iteration.

A step runs one packed forward pass over rows r with c_r tokens cached, n_r tokens to compute, S rows that sample.
It has four parts; part i does F_i floating-point operations and moves B_i bytes:

- *layers*: F = 2 P_layers sum n_r, B = bytes of the layer weights (read once per step);
- *head*: F = 2 P_head S, B = bytes of the output matrix (only if S > 0);
- *prefill attention*: F = 4 L H D sum (n c + n (n + 1) / 2), B = KV read = k sum c;
- *decode attention* (rows that compute one token and sample): dense F = 4 L H D (c + 1) and B = k c. With a budget
  theta > 0 the L' = L - L_dense pruned layers read scores and then the kept share p of the pages::

      B = k c (L_dense / L + (L' / L) (1/4 + 1.5/page + p))
      F = 4 H D (c + 1) (L_dense + L' (1/2 + p))

  An 8-bit shadow of the keys is a quarter of the 16-bit K and V; its 16-bit step, minimum and measured error, a triple
  per channel and page, are 1.5/page of them (0.094 at 16 tokens). Scoring is half of the attention FLOPs: q.k without
  the values.

k = 2 L H_kv D * bytes per element is the KV size of a token. Part i takes::

    t_i = max(C_i, M_i) + (1 - o) min(C_i, M_i),   C_i = F_i / (peak * efficiency), M_i = B_i / (bandwidth * efficiency)

with o the overlap of arithmetic and memory traffic: 1 is the textbook roofline, 0 their plain sum. A step takes
``overhead_s + sum t_i``; an iteration without rows takes ``overhead_s``. Source: the roofline model (Williams, Waterman
and Patterson, 2009) with the shapes of the model; the overlap factor and the accounting of pruning are ours.

Presets. ``a100-80-llama-3-8b``: peak and bandwidth from the data sheet (A100 SXM 80 GB); efficiencies and overhead are
assumptions in the usual range, not measurements. ``cpu2-smollm2-135m``: fitted to a 2-core AMD EPYC running this
project's engine without attention: 20, 22, 40 and 157 ms for 1, 8, 64 and 512 tokens; read bandwidth 32.9 GB/s; the
model gives 20, 22.5, 37 and 153.5 ms (arithmetic and traffic add up there, hence o = 0). Its attention efficiency is
an assumption. The engine's pruned attention on a CPU is the readable reference, far above any roofline: fitted to the
CPU time of its steps (1 to 8 rows, 256 to 3,000 tokens each, theta 0.02 to 0.03, within 8 ms), an iteration that prunes
takes 29 ms more, and 8.5 us more per context token of the pruned rows. The A100 preset charges nothing beyond the
roofline: it describes a fused kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from entropic_ctl import fields
from entropic_ctl.errors import BadInputError
from sim.load import StepLoad

__all__ = [
    "DEVICES",
    "MODELS",
    "PRESETS",
    "CostModel",
    "DeviceSpec",
    "LinearCost",
    "ModelShape",
    "Roofline",
    "StepCost",
    "kv_pages",
    "preset",
]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model.

    ``layer_params`` counts the parameters of all layers and norms, without the embedding; ``head_params`` the output
    matrix (vocabulary times width); ``weight_bytes`` everything held in memory, a tied matrix once.
    """

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    layer_params: float
    head_params: float
    weight_bytes: float
    vocab_size: int
    element_bytes: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers, bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.element_bytes


@dataclass(frozen=True)
class DeviceSpec:
    """A device and what of its data sheet is reached (see the module for each preset's source)."""

    name: str
    peak_flops: float = fields.number(1e12, 0.0, 1e18, "arithmetic peak, FLOP/s", open_lo=True)
    bandwidth: float = fields.number(1e11, 0.0, 1e15, "memory bandwidth, bytes/s", open_lo=True)
    memory_bytes: float = fields.number(8e9, 0.0, 1e15, "memory, bytes", open_lo=True)
    matmul_efficiency: float = fields.number(1.0, 0.0, 1.0, "share of the peak in the layers", open_lo=True)
    attention_efficiency: float = fields.number(1.0, 0.0, 1.0, "share of the peak in attention", open_lo=True)
    bandwidth_efficiency: float = fields.number(1.0, 0.0, 1.0, "share of the bandwidth", open_lo=True)
    overlap: float = fields.number(1.0, 0.0, 1.0, "o: 1 hides the smaller of arithmetic and traffic, 0 adds them")
    overhead_s: float = fields.number(0.0, 0.0, 60.0, "seconds per iteration, whatever it does")
    pruning_step_s: float = fields.number(0.0, 0.0, 60.0, "more seconds per iteration that prunes, beyond the roofline")
    pruning_token_s: float = fields.number(0.0, 0.0, 1.0, "and per context token of its pruned rows")

    def __post_init__(self) -> None:
        fields.check(self)


MODELS = {
    "llama-3-8b": ModelShape("llama-3-8b", 32, 32, 8, 128, 6.979e9, 0.5253e9, 16.06e9, 128_256),
    "smollm2-135m": ModelShape("smollm2-135m", 30, 9, 3, 64, 106.2e6, 28.31e6, 269.0e6, 49_152),
}
"""Model shapes by name."""

DEVICES = {
    "a100-80": DeviceSpec("a100-80", 312e12, 2.039e12, 80 * 2**30, 0.6, 0.3, 0.8, 1.0, 0.002),
    "cpu2": DeviceSpec("cpu2", 0.82e12, 32.9e9, 8e9, 1.0, 0.1, 1.0, 0.0, 0.0117, 0.029, 8.5e-6),
}
"""Devices by name."""

PRESETS = {"a100-80-llama-3-8b": ("a100-80", "llama-3-8b"), "cpu2-smollm2-135m": ("cpu2", "smollm2-135m")}
"""Values of ``cost.preset``: (device, model)."""


class StepCost(NamedTuple):
    """What one iteration costs: seconds, floating-point operations, KV-cache bytes read, joules (0: not modelled)."""

    seconds: float
    flops: float
    kv_bytes: float
    energy_j: float = 0.0


class CostModel(Protocol):
    """Charges for one iteration."""

    def step(self, load: StepLoad) -> StepCost:
        """Return the cost of one iteration."""
        ...


@dataclass(frozen=True)
class LinearCost:
    """Step time = ``base_s + per_token_s * tokens``: timelines that can be worked by hand. No KV bytes, no FLOPs."""

    base_s: float = 0.0
    per_token_s: float = 1e-4

    def step(self, load: StepLoad) -> StepCost:
        """Return the linear cost."""
        return StepCost(self.base_s + self.per_token_s * load.tokens, 0.0, 0.0)


class Roofline:
    """The model of this module for one device, model, page size and number of dense layers.

    Parameters
    ----------
    device : DeviceSpec
    model : ModelShape
    page_tokens : int
    dense_layers : int
        Leading layers that are never pruned; more than the model has means all.
    """

    def __init__(self, device: DeviceSpec, model: ModelShape, page_tokens: int = 16, dense_layers: int = 2) -> None:
        self.device, self.model = device, model
        dense = min(dense_layers, model.layers)
        self._pruned_share = 1 - dense / model.layers
        self._score_bytes = 0.25 + 1.5 / page_tokens
        self._attention_flops = 4.0 * model.layers * model.q_heads * model.head_dim  # per query and key
        self._kv = float(model.kv_bytes_per_token)
        self._bytes_s = device.bandwidth * device.bandwidth_efficiency
        self._matmul_s = device.peak_flops * device.matmul_efficiency
        self._attention_s = device.peak_flops * device.attention_efficiency
        self._head_bytes = model.head_params * model.element_bytes
        self._layer_bytes = model.layer_params * model.element_bytes

    def _time(self, compute_s: float, memory_s: float) -> float:
        if compute_s < memory_s:
            compute_s, memory_s = memory_s, compute_s
        return compute_s + (1.0 - self.device.overlap) * memory_s

    def _decode(self, load: StepLoad) -> tuple[float, float]:
        """Return FLOPs and KV bytes of the attention of decode rows."""
        keys, read, rows = load.decode_context + load.decode_rows, load.decode_context, load.pruned_rows
        if rows:
            kept = load.pruned_kept_context
            pruned_keys = load.pruned_context + rows
            keys += self._pruned_share * (load.pruned_kept_context + load.pruned_kept - 0.5 * pruned_keys)
            read += self._pruned_share * (kept - (1.0 - self._score_bytes) * load.pruned_context)
        return self._attention_flops * keys, self._kv * read

    def step(self, load: StepLoad) -> StepCost:
        """Return the cost of one iteration."""
        if load.rows == 0:
            return StepCost(self.device.overhead_s, 0.0, 0.0)
        layer_flops = 2.0 * self.model.layer_params * load.tokens
        seconds = self.device.overhead_s + self._time(layer_flops / self._matmul_s, self._layer_bytes / self._bytes_s)
        flops, kv_bytes = layer_flops, 0.0
        if load.sampling:
            head_flops = 2.0 * self.model.head_params * load.sampling
            seconds += self._time(head_flops / self._matmul_s, self._head_bytes / self._bytes_s)
            flops += head_flops
        parts = [self._decode(load)] if load.decode_rows else []
        if load.rows > load.decode_rows:
            parts.append((self._attention_flops * load.prefill_pairs, self._kv * load.prefill_context))
        for part_flops, part_bytes in parts:
            seconds += self._time(part_flops / self._attention_s, part_bytes / self._bytes_s)
            flops, kv_bytes = flops + part_flops, kv_bytes + part_bytes
        if load.pruned_rows:
            seconds += self.device.pruning_step_s + self.device.pruning_token_s * load.pruned_context
        return StepCost(seconds, flops, kv_bytes)


def preset(name: str, page_tokens: int = 16, dense_layers: int = 2) -> Roofline:
    """Return the cost model called ``name``.

    Parameters
    ----------
    name : str
        A key of ``PRESETS``.
    page_tokens : int
        Page size of the KV pool.
    dense_layers : int
        Leading layers that are never pruned.

    Raises
    ------
    BadInputError
        If there is no such preset; the message lists those there are.
    """
    if name not in PRESETS:
        raise BadInputError(
            "no such cost preset", where="cost", field="cost.preset", value=name, allowed=", ".join(sorted(PRESETS))
        )
    device, model = PRESETS[name]
    return Roofline(DEVICES[device], MODELS[model], page_tokens, dense_layers)


def kv_pages(device: DeviceSpec, model: ModelShape, page_tokens: int = 16, memory_share: float = 0.9) -> int:
    """Return the KV pages that fit: floor((memory * share - weights) / (page * KV bytes per token)).

    Parameters
    ----------
    device, model : DeviceSpec, ModelShape
    page_tokens : int
    memory_share : float
        Share of the device's memory that weights and pages may take.

    Raises
    ------
    BadInputError
        If the weights leave no room for one page.
    """
    free = device.memory_bytes * memory_share - model.weight_bytes
    pages = int(free // (page_tokens * model.kv_bytes_per_token))
    if pages < 1:
        raise BadInputError(
            f"{model.name} leaves no room for a KV page on {device.name}",
            field="memory_share",
            value=memory_share,
            allowed="a larger share, device, or a smaller model",
        )
    return pages
