"""What a decoder's layers ask of a paged cache, and which weights one token uses: found by running one token.

Configurations call these things by many names (``n_head``, ``kv_channels``, ``moe_topk``), derive some silently, and
carry keys that a model ignores. What its attention layers hand to transformers' attention interface is a fact, and so
is the list of experts that its router hands to an expert layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from entropic_ctl.errors import BadInputError

__all__ = ["AttentionFacts", "active_parameters", "attention_facts", "experts_per_token"]

_NAME = "entropic_probe"
_PAGEABLE = {"full_attention", "sliding_attention"}
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k")


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """Sizes of the attention layers of a decoder, the same in all of them.

    Parameters
    ----------
    layers : int
    heads, kv_heads : int
        Query heads, and KV heads as handed to the attention (a decoder that repeats its own has as many as queries).
    head_dim, value_dim : int
        Size of a query or key, and of a value (at most that: latent attention has smaller values).
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


@dataclass
class _Seen:
    """What the layers asked for, by layer index in order of calls, and the numbers of chosen experts by module name."""

    layers: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    experts: dict[str, int] = field(default_factory=dict)


_SEEN: ContextVar[_Seen | None] = ContextVar("_SEEN", default=None)


def _record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Stand in for the attention of one token over itself: note the sizes, return the values (repeated per head)."""
    seen = _SEEN.get()
    if seen is not None:
        seen.layers.append(
            (int(module.layer_idx), query.shape[1], key.shape[1], key.shape[-1], value.shape[-1])  # type: ignore[arg-type]
        )
        wanted = {
            "an attention mask of its own": attention_mask is not None,
            "a position bias": kwargs.get("position_bias") is not None,
            "attention that is not causal": kwargs.get("is_causal") is False,
        }
        seen.refused |= {name for name, asked in wanted.items() if asked}
    group = max(1, query.shape[1] // key.shape[1])
    return value.repeat_interleave(group, dim=1).transpose(1, 2), None


@contextmanager
def _watched(model: Any, seen: _Seen) -> Iterator[None]:
    """Record into ``seen``; the model's own attention and hooks are put back afterwards."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _record)
    before, token = model.config._attn_implementation, _SEEN.set(seen)  # noqa: SLF001 - no public reader
    hooks = []

    def watch(name: str) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            whole = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and not x.is_floating_point())
            chosen = next(whole, None)
            if chosen is not None and chosen.dim() > 1:
                seen.experts[name] = int(chosen.shape[-1])

        return hook

    try:
        hooks = [
            module.register_forward_pre_hook(watch(name), with_kwargs=True) for name, module, _ in _expert_layers(model)
        ]
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        for handle in hooks:
            handle.remove()
        _SEEN.reset(token)


@torch.inference_mode()
def _run_one_token(model: Any) -> _Seen:
    seen = _Seen()
    zero = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with _watched(model, seen):
        model(input_ids=zero, position_ids=zero, use_cache=False)
    return seen


def attention_facts(model: Any, name: str) -> tuple[AttentionFacts, dict[str, int]]:
    """Return the sizes of a decoder's attention layers, and how many experts its expert layers use per token.

    Parameters
    ----------
    model : transformers decoder, in evaluation mode
    name : str
        For messages.

    Returns
    -------
    AttentionFacts, and dict of expert layer (module name) to experts per token

    Raises
    ------
    BadInputError
        Unless every layer is attention over all, or a window, of the past, called through transformers' interface
        with the same sizes: on a paged cache others would decode, and be wrong.
    """
    kinds = set(getattr(model.config, "layer_types", None) or ()) - _PAGEABLE
    problem, seen = None, _Seen()
    if kinds:
        problem = f"layers of a kind the paged cache does not hold: {', '.join(sorted(kinds))}"
    elif getattr(model, "_is_stateful", False):
        problem = "layers with a recurrent state, which the paged cache does not hold"
    else:
        try:
            seen = _run_one_token(model)
            problem = _problem(seen, int(getattr(model.config, "num_hidden_layers", 0) or 0))
        except Exception as error:  # noqa: BLE001 - models raise anything
            problem = f"it does not run on one token: {' '.join(str(error).split())[:300] or type(error).__name__}"
    if problem is not None:
        raise BadInputError(
            f"unsupported decoder: {problem}",
            where=name,
            field="architecture",
            value=type(model).__name__,
            allowed="decoders of full or sliding-window attention",
            remedy="use a Llama, Qwen, Mistral, Gemma, Phi or similar model",
        )
    return AttentionFacts(len(seen.layers), *seen.layers[0][1:]), seen.experts


def _problem(seen: _Seen, layers: int) -> str | None:
    called, sizes = [index for index, *_ in seen.layers], {tuple(rest) for _, *rest in seen.layers}
    if not called:
        return "its attention is not called through transformers' attention interface"
    if called != list(range(layers)):
        return f"{len(set(called))} of its {layers} layers call transformers' attention interface, {len(called)} times"
    if seen.refused:
        return f"its attention asks for {', '.join(sorted(seen.refused))}"
    if len(sizes) > 1:
        return "its layers differ in size, and the paged cache is one block"
    heads, kv_heads, key, value = next(iter(sizes))
    if heads % kv_heads:
        return f"{heads} query heads cannot share {kv_heads} KV heads equally"
    return f"values of size {value} are larger than keys of size {key}" if value > key else None


def _expert_layers(model: Any) -> Iterator[tuple[str, Any, list[tuple[int, int]]]]:
    """Yield (name, module, [(experts, weights of all of them)]) of every module that stacks the weights of experts."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "experts" and "Experts" not in type(module).__name__:
            continue
        own = [p for p in module.parameters(recurse=False) if p.dim() > 1]
        count = next((int(p.shape[0]) for p in own if p.dim() == 3), 0)
        if count:
            yield name, module, [(count, int(p.numel())) for p in own if p.shape[0] == count]
        elif isinstance(module, torch.nn.ModuleList):
            yield name, module, [(len(module), sum(int(p.numel()) for p in module.parameters()))]


def experts_per_token(model: Any) -> int:
    """Return what the configuration says a token uses of each expert layer; 0 if it says nothing."""
    for key in _EXPERTS_PER_TOKEN:
        value = getattr(model.config, key, None)
        if isinstance(value, list | tuple) and value:
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def active_parameters(model: Any, chosen: dict[str, int]) -> int:
    """Return the weights one token uses: all but the experts it is not sent to *(ours)*.

    sum of all - sum over expert layers of (1 - k / E) times the weights of their E experts. Routers, shared experts and
    embeddings count in full. A layer whose k neither the run of one token nor the configuration tells counts in full.

    Parameters
    ----------
    model : transformers decoder
    chosen : dict of str to int
        k by expert layer, from :func:`attention_facts`.
    """
    total, told = sum(int(p.numel()) for p in model.parameters()), experts_per_token(model)
    for name, _, stacks in _expert_layers(model):
        k = chosen.get(name, told)
        total -= sum(weights * (count - min(k or count, count)) // count for count, weights in stacks)
    return total
