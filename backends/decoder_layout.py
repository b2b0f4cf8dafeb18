"""Read the layers of a transformers decoder: which weights it has, where its norms sit, which formulas they use.

Names of modules only propose what a part is. Norms and activations are probed with numbers, and the decoder that is
built from a layout is compared with the model's own forward before it is used (:mod:`backends.decoder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LayerParts", "Layout", "NotCoveredError", "read"]

_NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # (x / rms in float32, weight) -> result, in C++ order
    "llama": lambda x, w: w * x.to(w.dtype),
    "olmo": lambda x, w: (w * x).to(w.dtype),
    "gemma": lambda x, w: (x * (1.0 + w.float())).to(w.dtype),
}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # in C++ order
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
_MOST_ROPES = 2  # kinds of rotary angles in one model, as in decoder.h


class NotCoveredError(Exception):
    """The fused decoder cannot run a model; the message says what it does not know."""


Linear = tuple[Tensor, Tensor | None]  # weight (rows, depth), bias (rows,)


@dataclass(frozen=True)
class LayerParts:
    """Weights of one layer, by their place in ``decoder.h``; a norm that is None is left out."""

    linears: dict[str, Linear]
    norms: dict[str, Tensor | None]
    rope: int
    attention: nn.Module


@dataclass(frozen=True)
class Layout:
    """A decoder taken apart.

    ``norm`` and ``activation`` are the numbers of ``rows.h``; ``ropes`` are the layer types the rotary module is called
    with (None: it takes none).
    """

    embedding: nn.Module
    rotary: nn.Module
    ropes: list[str | None]
    layers: list[LayerParts]
    final_norm: Tensor
    head: Linear
    softcap: float | None
    eps: float
    norm: int
    activation: int
    whole_qk_norm: bool
    dtype: torch.dtype


def read(network: Any) -> Layout:
    """Take a model apart.

    Raises
    ------
    NotCoveredError
        With the first part that is not one the fused decoder knows.
    """
    dtype = network.dtype
    if network.device.type != "cpu":
        raise NotCoveredError(f"the model is on {network.device}, and the C++ kernels run on the CPU")
    if dtype not in (torch.bfloat16, torch.float32):
        raise NotCoveredError(f"dtype {dtype}: bfloat16 and float32 are covered")
    overridden = [name for name, part in network.named_modules() if "forward" in vars(part)]
    if overridden:
        raise NotCoveredError(f"{overridden[0]} has a forward of its own")
    _children(network, {"model", "lm_head"}, type(network).__name__)
    body = network.model
    _children(body, {"embed_tokens", "layers", "norm", "rotary_emb"}, "model")
    kinds = _kinds(network.config, len(body.layers), body.rotary_emb)
    ropes = sorted(set(kinds), key=str)
    if len(ropes) > _MOST_ROPES:
        raise NotCoveredError(f"{len(ropes)} kinds of rotary angles")
    try:
        layers = [
            _layer(layer, ropes.index(kind), i) for i, (layer, kind) in enumerate(zip(body.layers, kinds, strict=True))
        ]
    except AttributeError as error:
        raise NotCoveredError(str(error)) from None
    layouts = {tuple(name for name, norm in parts.norms.items() if norm is not None) for parts in layers}
    if len(layouts) > 1:
        raise NotCoveredError("layers with norms in different places")
    norms = [part for part in body.modules() if hasattr(part, "weight") and not list(part.children())]
    norms = [part for part in norms if isinstance(part.weight, Tensor) and part.weight.dim() == 1]
    eps = {float(getattr(part, "variance_epsilon", getattr(part, "eps", float("nan")))) for part in norms}
    if len(eps) != 1:
        raise NotCoveredError(f"norms of different epsilon: {sorted(eps)}")
    head = _linear(network.lm_head, "lm_head")
    sizes = {name: weight.shape[0] for name, (weight, _) in layers[0].linears.items()}
    q_norm = layers[0].norms["q_norm"]
    return Layout(
        embedding=body.embed_tokens,
        rotary=body.rotary_emb,
        ropes=ropes,
        layers=layers,
        final_norm=body.norm.weight.detach(),
        head=head,
        softcap=getattr(network.config, "final_logit_softcapping", None),
        eps=eps.pop(),
        norm=_norm_kind(norms),
        activation=_activation_kind([_activation(layer.mlp) for layer in body.layers]),
        whole_qk_norm=q_norm is not None and q_norm.shape[0] == sizes["q"],
        dtype=dtype,
    )


def _kinds(config: Any, layers: int, rotary: nn.Module) -> list[Any]:
    """Return the layer type each layer asks the rotary module for."""
    if not isinstance(getattr(rotary, "rope_type", None), dict):
        return [None] * layers
    return list(config.layer_types)


def _children(module: nn.Module, names: Iterable[str], where: str, *, optional: Iterable[str] = ()) -> None:
    """Refuse a module whose parts are not the ones named; dropouts do nothing in evaluation."""
    idle = nn.Dropout | nn.Identity
    have = {name for name, child in module.named_children() if not isinstance(child, idle)}
    for name in sorted(set(names) - have):
        raise NotCoveredError(f"{where} has no {name}")
    for name in sorted(have - set(names) - set(optional)):
        raise NotCoveredError(f"{where} has a {name} ({type(getattr(module, name)).__name__})")


def _linear(module: nn.Module, where: str) -> Linear:
    if type(module) is not nn.Linear:
        raise NotCoveredError(f"{where} is a {type(module).__name__}, not a Linear")
    return module.weight.detach(), None if module.bias is None else module.bias.detach()


def _slices(fused: Linear, sizes: list[int], where: str) -> list[Linear]:
    weight, bias = fused
    if sum(sizes) != weight.shape[0]:
        raise NotCoveredError(f"{where} has {weight.shape[0]} rows, not {'+'.join(map(str, sizes))}")
    biases: Iterable[Tensor | None] = [None] * len(sizes) if bias is None else bias.split(sizes)
    return list(zip(weight.split(sizes), biases, strict=True))


def _layer(layer: nn.Module, rope: int, index: int) -> LayerParts:
    where = f"layer {index}"
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    linears: dict[str, Linear] = {}
    if hasattr(attention, "qkv_proj"):
        _children(attention, {"qkv_proj", "o_proj"}, f"{where}'s attention")
        fused = _linear(attention.qkv_proj, "qkv_proj")
        query = attention.o_proj.weight.shape[1]
        rest = (fused[0].shape[0] - query) // 2
        linears |= zip("qkv", _slices(fused, [query, rest, rest], "qkv_proj"), strict=True)
    else:
        names = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
        _children(attention, {*names.values(), "o_proj"}, f"{where}'s attention", optional={"q_norm", "k_norm"})
        linears |= {key: _linear(getattr(attention, name), name) for key, name in names.items()}
    linears["o"] = _linear(attention.o_proj, "o_proj")
    act = "activation_fn" if hasattr(mlp, "activation_fn") else "act_fn"
    if hasattr(mlp, "gate_up_proj"):
        _children(mlp, {"gate_up_proj", "down_proj"}, f"{where}'s MLP", optional={act})
        fused = _linear(mlp.gate_up_proj, "gate_up_proj")
        half = fused[0].shape[0] // 2
        linears |= zip(("gate", "up"), _slices(fused, [half, half], "gate_up_proj"), strict=True)
    else:
        _children(mlp, {"gate_proj", "up_proj", "down_proj"}, f"{where}'s MLP", optional={act})
        linears |= {key: _linear(getattr(mlp, f"{key}_proj"), key) for key in ("gate", "up")}
    linears["down"] = _linear(mlp.down_proj, "down_proj")
    norms: dict[str, Tensor | None] = {
        key: None if name is None else getattr(layer, name).weight.detach()
        for key, name in _norm_places(layer, where).items()
    }
    for key in ("q_norm", "k_norm"):
        norms[key] = getattr(attention, key).weight.detach() if hasattr(attention, key) else None
    return LayerParts(linears, norms, rope, attention)


def _norm_places(layer: nn.Module, where: str) -> dict[str, str | None]:
    """Tell which norm stands before and after attention and MLP: the same name means different things."""
    before, after_attention = "input_layernorm", "post_attention_layernorm"
    before_mlp, after_mlp = "pre_feedforward_layernorm", "post_feedforward_layernorm"
    have = {name for name, child in layer.named_children() if not isinstance(child, nn.Dropout | nn.Identity)}
    have -= {"self_attn", "mlp"}
    known = {
        frozenset({before, after_attention}): (before, None, after_attention, None),
        frozenset({after_attention, after_mlp}): (None, after_attention, None, after_mlp),
        frozenset({before, after_attention, before_mlp, after_mlp}): (before, after_attention, before_mlp, after_mlp),
    }
    if frozenset(have) not in known:
        raise NotCoveredError(f"{where} consists of {', '.join(sorted(have))} besides attention and MLP")
    names = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
    return dict(zip(names, known[frozenset(have)], strict=True))


def _probe(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _norm_kind(norms: list[Any]) -> int:
    """Return which formula all norms follow, by calling one of each class and size on random numbers and weights."""
    kinds = set()
    for norm in {(type(norm), norm.weight.shape[0]): norm for norm in norms}.values():
        n, dtype = norm.weight.shape[0], norm.weight.dtype
        x, weight = _probe(4, n, dtype=dtype) * 3, _probe(n, dtype=dtype)
        eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))
        unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        got = torch.func.functional_call(norm, {"weight": weight}, (x,))
        fits = [i for i, formula in enumerate(_NORMS.values()) if torch.equal(formula(unit, weight), got)]
        if not fits:
            raise NotCoveredError(f"{type(norm).__name__} is none of the known norms ({', '.join(_NORMS)})")
        kinds.add(fits[0])
    if len(kinds) != 1:
        raise NotCoveredError("norms of different formulas")
    return int(kinds.pop())


def _activation(mlp: Any) -> Any:
    return getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)


def _activation_kind(activations: list[Any]) -> int:
    x = torch.linspace(-12.0, 12.0, 4001)
    kinds = set()
    for act in {id(act) if isinstance(act, nn.Module) is False else type(act): act for act in activations}.values():
        got = act(x) if act is not None else x
        fits = [i for i, formula in enumerate(_ACTIVATIONS.values()) if torch.allclose(formula(x), got, 1e-5, 1e-6)]
        if not fits:
            raise NotCoveredError(f"activation {type(act).__name__} is none of {', '.join(_ACTIVATIONS)}")
        kinds.add(fits[0])
    if len(kinds) != 1:
        raise NotCoveredError("layers with different activations")
    return int(kinds.pop())
