r"""The roofline cost model: seconds, FLOPs, KV bytes and joules of one engine iteration.

A step runs one packed forward pass over rows r with c_r tokens cached, n_r tokens to compute, S positions that need
logits. It has four parts; part i does F_i floating-point operations and moves B_i bytes:

- *layers*: with t = sum n_r tokens, F = 2 (P_layers + P_experts k / E) t, and B = the bytes of the layer weights,
  read once per step, plus those of the experts that t tokens are expected to touch, P_experts (1 - (1 - k / E)^t) (a
  dense model has none; :mod:`sim.model_shapes`);
- *head*: F = 2 P_head S, B = bytes of the output matrix (only if S > 0);
- *prefill attention*: F = 4 L H D sum (n c + n (n + 1) / 2), B = KV read = k sum c;
- *decode attention* (rows that compute one token and sample): dense F = 4 L H D (c + 1) and B = k c. With a budget
  theta > 0 the L' = L - L_dense pruned layers score the a = c - protected tokens of pages that may be dropped, in two
  looks at a shadow of the keys (the second at a share f of them), and then read the kept share p of the pages::

      B = k (L_dense / L c + (L' / L) (p c + (s_1 + f s_2) a))
      F = 4 H D (L_dense (c + 1) + L' (p (c + 1) + (1 + f) a / 2)),    f = 1.2 sqrt(p) (1 - p)

  s_1 and s_2 are the bytes of the looks per byte of K and V (:func:`shadow_shares`): 0.176 and 0.125 at 16 bits, 16
  tokens and D = 64. A look is half of the attention FLOPs: q.k without the values. f is what the engine looks at twice
  with keys of 4 + 4 bits, as a function of the kept share over the rows (what is surely kept is read at once): fitted
  to SmolLM2-135M, contexts of 256 to 8,000 tokens and theta of 0.01 to 0.2, 0.13 (p = 0.91) to 0.53 (p = 0.38) to 0.31
  (p = 0.08); rms error 0.06. The Triton kernels look twice at what they keep, too, which is s_2 p more bytes.

k = 2 L H_kv D b / 8 is the KV size of a token in bytes. Part i takes::

    t_i = max(C_i, M_i) + (1 - o) min(C_i, M_i),   C_i = F_i / (peak * efficiency), M_i = B_i / (bandwidth * efficiency)

with o the overlap of arithmetic and memory traffic (one for attention, one for the rest): 1 is the textbook roofline, 0
their plain sum. A step takes
``overhead_s + sum t_i``; an iteration without rows takes ``overhead_s``. Source: the roofline model (Williams,
Waterman and Patterson, 2009) with the shapes of the model; the overlap factor, the expected experts and the
accounting of pruning are ours. The arithmetic is 16-bit unless weights are stored in 32 bits (weights of 4 or 8 bits
are widened on the fly) or ``compute_bits`` says otherwise.

**Energy** of a step of t seconds (ours; the power numbers are assumptions, :mod:`sim.devices`)::

    E = min(limit * t,  idle * t + compute * sum C_i + memory * sum M_i + overhead_w * (overhead and pruning seconds))

so each operation and each byte has a price, time has another, and a device never draws more than its limit (a real
one would slow down instead). The time between steps is not in it: ``idle_power_w`` times those seconds is charged by
whoever knows them (the metrics of a run).

Presets. ``a100-80-llama-3-8b``: :mod:`sim.devices` says which of its numbers are assumptions. ``cpu2-smollm2-135m``:
fitted to this project's engine with its C++ kernels on 2 cores of an AMD EPYC (batches 1 to 8, contexts 128 to 8,000,
dense and theta 0.02 and 0.1, prefill in chunks of 32 to 512). Arithmetic and traffic add up there (o = 0) but for
attention (o = 1). Its fitted bandwidth is an effective rate: it also pays for what the terms leave out. Beyond the
roofline a step that prunes pays ``pruning_step_s``, and ``pruning_token_s`` per token scored; the accelerators pay
nothing more: they describe a fused kernel. One device runs the whole model: no tensor parallelism.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from entropic_ctl.compiled import compiled
from entropic_ctl.config import CostConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig
from sim.devices import DEVICES, DeviceSpec, device_spec, resized
from sim.load import StepLoad
from sim.model_shapes import MODELS, ModelShape, model_shape

__all__ = [
    "DEVICES",
    "MODELS",
    "PRESETS",
    "CostModel",
    "DeviceSpec",
    "LinearCost",
    "ModelShape",
    "Roofline",
    "RooflineConstants",
    "StepCost",
    "charge",
    "cost_model",
    "idle_power_w",
    "kv_pages",
    "preset",
    "shadow_shares",
]

PRESETS = {
    f"{device}-{model}": (device, model)
    for device, model in (
        ("a100-80", "llama-3-8b"),
        ("a100-80", "qwen3-30b-a3b"),
        ("h100", "llama-3-8b"),
        ("h100", "qwen3-30b-a3b"),
        ("h200", "llama-3-8b"),
        ("h200", "mixtral-8x7b"),
        ("h200", "qwen3-30b-a3b"),
        ("cpu2", "smollm2-135m"),
    )
}
"""Values of ``cost.preset``: (device, model). Any other pair is written as ``cost.device`` and ``cost.model``."""


DEFAULT_RULE = PruningConfig()


class StepCost(NamedTuple):
    """What one iteration costs: seconds, floating-point operations, KV-cache bytes read, joules (0: not modelled)."""

    seconds: float
    flops: float
    kv_bytes: float
    energy_j: float = 0.0


class CostModel(Protocol):
    """Charges for one iteration. A model of power also has ``idle_power_w`` (see :func:`idle_power_w`)."""

    def step(self, load: StepLoad) -> StepCost:
        """Return the cost of one iteration."""
        ...


def idle_power_w(cost: CostModel) -> float:
    """Return the watts drawn between iterations; 0 for a cost model that knows no power."""
    return float(getattr(cost, "idle_power_w", 0.0))


@dataclass(frozen=True)
class LinearCost:
    """Step time = ``base_s + per_token_s * tokens``: timelines that can be worked by hand. No KV bytes, no FLOPs."""

    base_s: float = 0.0
    per_token_s: float = 1e-4

    def step(self, load: StepLoad) -> StepCost:
        """Return the linear cost."""
        return StepCost(self.base_s + self.per_token_s * load.tokens, 0.0, 0.0)


class Roofline:
    """The model of this module for one device, model, page size and pruning rule.

    Parameters
    ----------
    device : DeviceSpec
    model : ModelShape
    page_tokens : int
    pruning : PruningConfig
        Its dense layers (more than the model has means all) and its pages that are always read.
    compute_bits : int
        Width of the arithmetic, 8, 16 or 32; 0: 32 if the weights are stored so, else 16.

    Attributes
    ----------
    idle_power_w : float
        Watts between iterations.

    Raises
    ------
    BadInputError
        If the device has no arithmetic of that width.
    """

    def __init__(
        self,
        device: DeviceSpec,
        model: ModelShape,
        page_tokens: int = 16,
        pruning: PruningConfig = DEFAULT_RULE,
        compute_bits: int = 0,
    ) -> None:
        self.device, self.model, self.idle_power_w = device, model, device.idle_w
        peak = device.peak(compute_bits or (32 if model.weight_bits == 32 else 16))
        first, second = shadow_shares(model, page_tokens)
        byte_s = 1.0 / (device.bandwidth * device.bandwidth_efficiency)
        weight_s = model.weight_bits / 8 * byte_s
        self.constants = RooflineConstants(
            overhead_s=device.overhead_s,
            loose=1.0 - device.overlap,
            attention_loose=1.0 - device.attention_overlap,
            byte_s=byte_s,
            matmul_s=1.0 / (peak * device.matmul_efficiency),
            attention_s=1.0 / (peak * device.attention_efficiency),
            layer_flops=2.0 * (model.layer_params + model.active_expert_params),
            head_flops=2.0 * model.head_params,
            attention_flops=4.0 * model.layers * model.q_heads * model.head_dim,
            layers_s=model.layer_params * weight_s,
            head_s=model.head_params * weight_s,
            experts_s=model.expert_params * weight_s,
            untouched=1.0 - model.experts_per_token / model.experts if model.experts else 1.0,
            kv_bytes=float(model.kv_bytes_per_token),
            pruned_share=1.0 - min(pruning.dense_layers, model.layers) / model.layers,
            protected=float((pruning.sink_pages + pruning.recent_pages) * page_tokens),
            first_look=first,
            second_look=second,
            pruning_step_s=device.pruning_step_s,
            pruning_token_s=device.pruning_token_s,
            idle_w=device.idle_w,
            compute_w=device.compute_w,
            memory_w=device.memory_w,
            overhead_w=device.overhead_w,
            limit_w=device.limit_w,
        )

    def step(self, load: StepLoad) -> StepCost:
        """Return the cost of one iteration."""
        return StepCost(*charge(self.constants, load))


_TWICE = 1.2


class RooflineConstants(NamedTuple):
    """All that :func:`charge` needs of a device and a model: seconds, FLOPs and bytes per unit, and watts."""

    overhead_s: float
    loose: float  # 1 - overlap
    attention_loose: float
    byte_s: float
    matmul_s: float  # per FLOP
    attention_s: float
    layer_flops: float  # per token
    head_flops: float  # per sampling row
    attention_flops: float  # per query and key
    layers_s: float  # to read the weights
    head_s: float
    experts_s: float
    untouched: float  # share of the experts that one token leaves alone
    kv_bytes: float  # per token
    pruned_share: float  # of the layers
    protected: float  # tokens of a row that are not scored
    first_look: float  # bytes per byte of K and V
    second_look: float
    pruning_step_s: float
    pruning_token_s: float
    idle_w: float
    compute_w: float
    memory_w: float
    overhead_w: float
    limit_w: float


def _charge(c: RooflineConstants, load: StepLoad) -> tuple[float, float, float, float]:
    """Return (seconds, FLOPs, KV bytes, joules) of one iteration."""
    host_s, loose = c.overhead_s, c.loose
    flops = kv_bytes = compute_s = memory_s = seconds = 0.0
    if load.rows > 0:
        flops = c.layer_flops * load.tokens
        compute_s, memory_s = flops * c.matmul_s, c.layers_s
        if c.experts_s > 0.0:
            memory_s += c.experts_s * (1.0 - c.untouched**load.tokens)
        seconds = max(compute_s, memory_s) + loose * min(compute_s, memory_s)
    if load.sampling > 0:
        part = c.head_flops * load.sampling
        flops += part
        compute, memory = part * c.matmul_s, c.head_s
        compute_s, memory_s = compute_s + compute, memory_s + memory
        seconds += max(compute, memory) + loose * min(compute, memory)
    if load.decode_rows > 0:
        read, keys = load.decode_context, load.decode_context + load.decode_rows
        if load.pruned_rows > 0:
            pruned, kept = load.pruned_context, load.pruned_kept_context
            scored = max(pruned - c.protected * load.pruned_rows, 0.0)
            share = kept / pruned if pruned > 0.0 else 1.0
            twice = scored * _TWICE * math.sqrt(share) * (1.0 - share)
            keys += c.pruned_share * (kept + load.pruned_kept + 0.5 * (scored + twice) - pruned - load.pruned_rows)
            read += c.pruned_share * (kept + c.first_look * scored + c.second_look * twice - pruned)
            host_s += c.pruning_step_s + c.pruning_token_s * scored
        part, more = c.attention_flops * keys, c.kv_bytes * read
        flops, kv_bytes = flops + part, kv_bytes + more
        compute, memory = part * c.attention_s, more * c.byte_s
        compute_s, memory_s = compute_s + compute, memory_s + memory
        seconds += max(compute, memory) + c.attention_loose * min(compute, memory)
    if load.rows > load.decode_rows:
        part, more = c.attention_flops * load.prefill_pairs, c.kv_bytes * load.prefill_context
        flops, kv_bytes = flops + part, kv_bytes + more
        compute, memory = part * c.attention_s, more * c.byte_s
        compute_s, memory_s = compute_s + compute, memory_s + memory
        seconds += max(compute, memory) + c.attention_loose * min(compute, memory)
    seconds += host_s
    spent = c.idle_w * seconds + c.compute_w * compute_s + c.memory_w * memory_s + c.overhead_w * host_s
    return seconds, flops, kv_bytes, min(spent, c.limit_w * seconds)


charge = compiled(_charge)


def shadow_shares(model: ModelShape, page_tokens: int) -> tuple[float, float]:
    """Return the bytes of the first and of the second look at a page, per byte of its K and V.

    The first reads a header (16 bytes), a weight (8 bits) and a centre (16 bits) per channel, and the high 4 bits of
    the keys; the second the low 4 bits. Planes hold whole blocks of 16 tokens and groups of 8 channels.
    """
    blocks, groups = -(-page_tokens // 16), -(-model.head_dim // 8)
    plane = 64.0 * blocks * groups
    page = 2.0 * page_tokens * model.head_dim * model.kv_bits / 8.0
    return (16.0 + 24.0 * groups + plane) / page, plane / page


def preset(name: str, page_tokens: int = 16, pruning: PruningConfig = DEFAULT_RULE) -> Roofline:
    """Return the cost model called ``name``.

    Parameters
    ----------
    name : str
        A key of ``PRESETS``.
    page_tokens : int
        Page size of the KV pool.
    pruning : PruningConfig

    Raises
    ------
    BadInputError
        If there is no such preset; the message lists those there are.
    """
    return cost_model(CostConfig(preset=name), page_tokens, pruning)


def cost_model(
    config: CostConfig,
    page_tokens: int = 16,
    pruning: PruningConfig = DEFAULT_RULE,
) -> Roofline:
    """Return the cost model a configuration describes: the preset's pair, then its device, model and overrides.

    Parameters
    ----------
    config : CostConfig
    page_tokens : int
        Page size of the KV pool.
    pruning : PruningConfig

    Raises
    ------
    BadInputError
        If a preset, device or model is not known, a file cannot be used, the device lacks the asked arithmetic, or
        its memory is smaller than the weights.
    """
    if config.preset not in PRESETS:
        raise BadInputError(
            "no such cost preset",
            where="cost",
            field="cost.preset",
            value=config.preset,
            allowed=", ".join(sorted(PRESETS)),
            remedy="or name a pair: cost.device and cost.model",
        )
    names = PRESETS[config.preset]
    device = resized(
        device_spec(config.device or names[0]),
        config.cores,
        bandwidth=config.bandwidth,
        matmul_efficiency=config.matmul_efficiency,
        attention_efficiency=config.attention_efficiency,
        bandwidth_efficiency=config.bandwidth_efficiency,
    )
    model = model_shape(config.model or names[1]).stored_as(config.weight_bits, config.kv_bits)
    if model.weight_bytes > device.memory_bytes:
        raise BadInputError(
            f"{model.name} has {model.weight_bytes / 1e9:.1f} GB of weights, {device.name} has "
            f"{device.memory_bytes / 1e9:.1f} GB of memory",
            where="cost",
            field="cost.model",
            value=config.model or names[1],
            remedy="a larger device, a smaller model, or fewer cost.weight_bits",
        )
    return Roofline(device, model, page_tokens, pruning, config.compute_bits)


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
