"""The attention function that transformers calls in every layer, for a packed batch over the paged cache."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from backends.attention.batch import RUNNING, PagedBatch
from backends.attention.decoding import decode_rows, decodes_together
from backends.attention.pruned import pruned_decode
from backends.attention.reference import Scoring, State, attend, visible, window_pages, with_sink
from backends.attention.rows import Row
from backends.native import LayerRule
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.select import heads_per_group

__all__ = ["NAME", "gather", "layer_rule", "paged_attention", "register"]

NAME = "entropic_paged"


def register() -> str:
    """Register :func:`paged_attention` with transformers and return its name; calling it again changes nothing.

    No mask function is registered, so transformers builds no mask and passes None.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
    return NAME


def gather(pool: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first ``length`` tokens of a page list: pool (pages, n_kv_heads, page, D) -> (n_kv_heads, length, D).

    Slots past ``length`` are cut off, so whatever they hold never enters arithmetic.
    """
    pages = pool.index_select(0, table).transpose(0, 1)
    return pages.reshape(pages.shape[0], -1, pages.shape[-1])[:, :length]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedBatch | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write K and V of the packed tokens to the cache, then attend row by row.

    Parameters
    ----------
    module : torch.nn.Module
        Its ``layer_idx`` chooses the layer of the cache.
    query : tensor, shape (1, H, T, D)
    key, value : tensor, shape (1, n_kv_heads, T, D)
        Values may be smaller than keys.
    attention_mask : None
        Causality follows from the positions in ``paged``.
    paged : PagedBatch
    scaling : float, optional
        Default D ** -0.5.
    sliding_window, softcap, s_aux
        Layer options of the model: window in tokens, score cap, learned sink logit per query head.

    Returns
    -------
    tensor, shape (1, T, H, D of the values), and None

    Raises
    ------
    BadInputError
        If ``paged`` is missing, head counts do not divide, or the model asks for something unsupported.
    """
    paged = RUNNING.get() if paged is None else paged
    if paged is None:
        raise BadInputError(
            "the paged attention was called without its batch",
            where=NAME,
            field="paged",
            remedy="call PagedBatch.run, or the model with paged=PagedBatch.from_plan(...) and use_cache=False",
        )
    _refuse(attention_mask, dropout, kwargs)
    layer, cache = int(module.layer_idx), paged.cache
    heads_per_group(query.shape[1], key.shape[1])
    value_dim = value.shape[-1]  # latent attention has smaller values than keys: zeros fill the cache's slots
    value = pad(value, (0, key.shape[-1] - value_dim)) if value_dim < key.shape[-1] else value
    if key.shape[1:] != (cache.n_kv_heads, paged.n_tokens, cache.head_dim) or value.shape != key.shape:
        raise BadInputError(
            "keys or values do not fit the cache",
            where=f"layer {layer}",
            field="key, value",
            value=(tuple(key.shape), tuple(value.shape)),
            allowed=f"(1, {cache.n_kv_heads}, {paged.n_tokens}, {cache.head_dim})",
        )
    scoring = Scoring(cache.head_dim**-0.5 if scaling is None else float(scaling), softcap)
    cache.write(layer, key[0], value[0], paged.page, paged.offset)
    paged.layer_calls += 1
    out = torch.empty(query.shape[2], query.shape[1], query.shape[3], dtype=query.dtype, device=query.device)
    prunes = layer >= paged.pruning.dense_layers and sliding_window is None
    together = decodes_together(paged, query.dtype)
    if together:
        decode_rows(paged, layer, query[0], out, scoring, prunes=prunes, window=sliding_window, s_aux=s_aux)
    for row in paged.rows:
        if together and (cache.kernels == "native" or row.stop - row.start == 1):
            continue
        if not (prunes and row.theta_nats > 0.0):
            q = query[0, :, row.start : row.stop]
            o = _dense(paged, layer, row, q, scoring, window=sliding_window, s_aux=s_aux)
            out[row.start : row.stop] = o.transpose(0, 1)
    if not together and prunes and any(row.theta_nats > 0.0 for row in paged.rows):
        at = paged.pruned.tokens
        out[at] = pruned_decode(paged, layer, query[0].transpose(0, 1)[at], scoring, s_aux=s_aux)
    return out[..., :value_dim].unsqueeze(0), None


def layer_rule(
    head_dim: int,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> LayerRule:
    """Return what a layer asks of its attention, from the keywords that :func:`paged_attention` is called with."""
    _refuse(None, dropout, kwargs)
    sinks = None if s_aux is None else s_aux.detach().to("cpu", torch.float32).contiguous()
    return LayerRule(head_dim**-0.5 if scaling is None else float(scaling), softcap, sliding_window, sinks)


def _refuse(attention_mask: torch.Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    asked = {
        "attention_mask": attention_mask is not None,
        "dropout": bool(dropout),
        "position_bias": kwargs.get("position_bias") is not None,
        "output_attentions": bool(kwargs.get("output_attentions")),
    }
    for name, wanted in asked.items():
        if wanted:
            raise BadInputError(
                "not supported by paged attention",
                where=NAME,
                field=name,
                remedy="call the model in eval mode with paged=... and no mask",
            )


def _dense(
    paged: PagedBatch,
    layer: int,
    row: Row,
    query: torch.Tensor,
    scoring: Scoring,
    *,
    window: int | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """Exact causal attention of one row, (H, n, D) -> (H, n, D); float32 accumulation."""
    cache, n = paged.cache, row.stop - row.start
    size, table, length = cache.page_tokens, row.table, row.length
    mask: torch.Tensor | None = None
    if window is not None and n == 1:
        pages = window_pages(length, window, size, paged.sink_tokens)
        index = torch.tensor(pages, device=table.device)
        slot = (index.unsqueeze(1) * size + torch.arange(size, device=table.device)).reshape(-1)
        table, length = table[index], length - (pages[-1] + 1 - len(pages)) * size
        mask = ((slot >= row.length - window) | (slot < paged.sink_tokens))[None, :length]
    elif n > 1:
        mask = visible(row.context, n, query.device, window, paged.sink_tokens)
    k, v = gather(cache.k[layer], table, length), gather(cache.v[layer], table, length)
    paged.record_dense(row.length if window is None or n > 1 else min(row.length, window + paged.sink_tokens))
    if n == 1 or all(bool(x[:, row.context :].isfinite().all()) for x in (k, v)):
        return _exact(query, k, v, scoring, mask, causal=n > 1 and row.context == 0 and window is None, s_aux=s_aux)
    # Later tokens of the chunk are masked, and 0 * NaN is NaN: a bad one would spoil pages that others may share.
    bad = ~(k.isfinite() & v.isfinite()).all(dim=-1).all(dim=0)
    k, v = (x.masked_fill(bad[None, :, None], 0.0) for x in (k, v))
    seen = visible(row.context, n, query.device, window, paged.sink_tokens) & bad
    out = _exact(query, k, v, scoring, mask, causal=False, s_aux=s_aux)
    return out.masked_fill(seen.any(dim=-1)[None, :, None], torch.nan)


def _exact(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scoring: Scoring,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of (H, n, D) queries over gathered (n_kv_heads, T, D) tokens where ``mask`` (n, T) is true."""
    (n_heads, n, dim), scale = query.shape, scoring.scale
    group = n_heads // k.shape[0]
    if scoring.softcap is None and s_aux is None:
        if causal:
            o = scaled_dot_product_attention(
                query[None],
                k[None].to(query.dtype),
                v[None].to(query.dtype),
                is_causal=True,
                scale=scale,
                enable_gqa=True,
            )[0]
        elif n > 1:
            k, v = (x.to(query.dtype).repeat_interleave(group, dim=0)[None] for x in (k, v))
            o = scaled_dot_product_attention(query[None], k, v, attn_mask=mask, scale=scale)[0]
        else:  # the query heads of a group as queries of their KV head
            q = query.reshape(1, k.shape[0], group, dim)
            o = scaled_dot_product_attention(q, k[None].to(q.dtype), v[None].to(q.dtype), attn_mask=mask, scale=scale)
            o = o.reshape(n_heads, 1, dim)
        return o
    grouped = query.reshape(k.shape[0], group * n, dim)
    if mask is not None:
        mask = mask.repeat(group, 1)  # (group * n, T): query heads outer, tokens inner
    state = attend(grouped, k, v, scoring, mask)
    out = State(state.out.reshape(n_heads, n, dim), state.lse.reshape(n_heads, n))
    if s_aux is not None:
        out = with_sink(out, s_aux.reshape(n_heads, 1))
    return out.out.to(query.dtype)
