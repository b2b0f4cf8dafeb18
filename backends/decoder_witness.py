"""What a model's own forward computes: queries, keys and values of every layer, and logits, for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from backends.decoder_layout import NotCoveredError
from entropic_ctl.errors import EntropicError

__all__ = ["Call", "distance", "plain_attention", "witness"]

_WITNESS = "entropic_witness"


def distance(got: Tensor, want: Tensor) -> float:
    """Return the root mean square of the difference over that of ``want``; infinite if shapes differ."""
    if got.shape != want.shape:
        return float("inf")
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


@dataclass(frozen=True)
class Call:
    """What the model's own forward handed to the attention of one layer.

    ``queries``, ``keys`` and ``values`` have shape (1, heads, T, D); ``options`` are those :func:`paged_attention
    <backends.attention.paged_attention>` takes.
    """

    module: Any
    options: dict[str, Any]
    queries: Tensor
    keys: Tensor
    values: Tensor


def plain_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return causal attention over the tokens of one sequence, shape (1, T, H, D)."""
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def _witnessed(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, *, witness: list[Call], **options: Any
) -> tuple[Tensor, None]:
    if options.get("s_aux") is not None:
        raise NotCoveredError("attention with learned sinks")
    kept = {name: options.get(name) for name in ("scaling", "sliding_window", "softcap")}
    witness.append(Call(module, kept, query.clone(), key.clone(), value.clone()))
    return plain_attention(query, key, value, kept["scaling"]).contiguous(), None


def witness(network: Any, tokens: Tensor, positions: Tensor, last: Tensor) -> tuple[list[Call], Tensor]:
    """Run the model's own forward with an attention that records its calls.

    Parameters
    ----------
    network : transformers decoder
    tokens, positions : int64 tensor, shape (T,)
        One sequence.
    last : int64 tensor, shape (M,)
        Tokens whose logits are wanted.

    Returns
    -------
    list of Call, in order, and the logits (M, n)

    Raises
    ------
    NotCoveredError
        If the forward fails, or its attention has learned sinks.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_WITNESS, _witnessed)
    before = network.config._attn_implementation  # noqa: SLF001 - it has no public name
    calls: list[Call] = []
    network.set_attn_implementation(_WITNESS)
    try:
        logits = network(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=last,
            witness=calls,
        ).logits[0]
    except (RuntimeError, TypeError, ValueError, AttributeError, EntropicError) as error:
        raise NotCoveredError(f"its own forward failed on a trial: {error}") from None
    finally:
        network.set_attn_implementation(before)
    return calls, logits
