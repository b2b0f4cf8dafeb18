"""What every budget would cost at every position of a text: a response surface, measured once, teacher-forced.

The text is prefilled exactly. Then a position is decoded under each budget of a ladder and dense, all in one pass, over
the same cached keys and values; only the position's own key and value are each row's own. So a difference between rows
is the effect of this step's pruning alone, and any rule that picks budgets from the ladder is afterwards a choice from
the table: the policies compared see the same positions, the same cache and the same noise *(ours)*.

Pages are chosen by the reference :func:`entropic_ctl.pruning.select.select` from the *exact* page masses in float32
(8-bit shadows keep within a percent or two of the same pages). Bytes are those the engine's cache would read for the
pages kept, with the first look at the shadow; the second one, at pages the first leaves undecided, is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from backends.audit import kl_nats
from backends.kv_cache import PagedKVCache
from backends.models import LoadedModel
from backends.pieces import Arrays
from backends.sampling import TorchLogitView, to_host
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.base import PruningConfig
from entropic_ctl.pruning.select import select
from entropic_ctl.signals import FloatArray

__all__ = ["NAME", "SurfaceReader", "register_surface"]

NAME = "entropic_surface"
_CHUNK = 512


def register_surface() -> str:
    """Register the attention of this module with transformers and return its name; calling again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    return NAME


@dataclass
class _Pass:
    """One forward pass: a prefill chunk from ``context`` on, or decode ``rows`` that share one page count."""

    keys: list[Tensor]
    values: list[Tensor]
    context: int
    rows: _Rows | None = None


@dataclass
class _Rows:
    """R decode rows: each one's position, and its budget in nats (0 is dense).

    ``kept`` (R,) sums the share of pages read over the pruned layers, ``layers`` counts them.
    """

    position: npt.NDArray[np.int64]
    theta: FloatArray
    rule: PruningConfig
    page_tokens: int
    kept: FloatArray = field(init=False)
    layers: int = 0

    def __post_init__(self) -> None:
        self.kept = np.zeros(self.theta.shape[0])


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    surface: _Pass | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend: causal over the text so far in prefill, pruned row by row in decode. Shapes as transformers has them."""
    if surface is None or attention_mask is not None or any(kwargs.get(k) for k in ("sliding_window", "softcap")):
        raise BadInputError("not supported by the response surface", where=NAME, field="attention", allowed="full")
    layer, heads, n_heads = int(module.layer_idx), key.shape[1], query.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if surface.rows is not None:
        out = _decode(surface, surface.rows, layer, query[0] * scale, key[0], value[0])
        return out.transpose(0, 1)[None], None
    n, start = query.shape[2], surface.context
    surface.keys[layer][:, start : start + n], surface.values[layer][:, start : start + n] = key[0], value[0]
    k, v = surface.keys[layer][None, :, : start + n], surface.values[layer][None, :, : start + n]
    if start:
        mask = torch.arange(start + n) <= torch.arange(start, start + n)[:, None]
        k, v = (x.repeat_interleave(n_heads // heads, dim=1) for x in (k, v))
        o = scaled_dot_product_attention(query, k, v, attn_mask=mask.to(query.device), scale=scale)
    else:
        o = scaled_dot_product_attention(query, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return o.transpose(1, 2), None


def _decode(surface: _Pass, rows: _Rows, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend from R rows, (H, R, D) with the scale in it, over the text before each and its own key; (H, R, D)."""
    (n_heads, count, dim), heads = query.shape, key.shape[0]
    group, page = n_heads // heads, rows.page_tokens
    last = int(rows.position.max())
    k, v = surface.keys[layer][:, :last], surface.values[layer][:, :last]
    q = query.reshape(heads, group * count, dim)
    s = torch.matmul(q, k.transpose(1, 2)).reshape(heads, group, count, last)
    behind = torch.from_numpy(np.arange(last) >= rows.position[:, None]).to(s.device)
    s = s.masked_fill(behind, -torch.inf)
    own = (query.reshape(heads, group, count, dim) * key[:, None]).sum(-1, keepdim=True)
    top = torch.maximum(s.amax(-1, keepdim=True), own)
    weight, mine = torch.exp(s - top), torch.exp(own - top)
    if layer >= rows.rule.dense_layers and rows.theta.any():
        pages = -(-(last + 1) // page)
        padded = torch.nn.functional.pad(weight, (0, pages * page - last))
        mass = padded.reshape(heads, group, count, pages, page).sum(-1)
        mass[..., -1] += mine[..., 0]
        kept = torch.from_numpy(_choose(mass, rows)).to(s.device)  # (heads, R, pages)
        weight = weight * kept.repeat_interleave(page, dim=-1)[:, None, :, :last]
    total = weight.sum(-1, keepdim=True) + mine
    out = torch.matmul(weight.reshape(heads, group * count, last), v).reshape(heads, group, count, dim)
    out = (out + mine * value[:, None]) / total
    return out.reshape(n_heads, count, dim)


def _choose(mass: Tensor, rows: _Rows) -> npt.NDArray[np.bool_]:
    """Return the pages that each (KV head, row) reads, bool (n_kv_heads, R, P), and book their share."""
    heads, _, count, pages = mass.shape
    kept = np.ones((heads, count, pages), np.bool_)
    pruned = np.flatnonzero(rows.theta > 0)
    index = np.arange(pages)
    fixed = (index < rows.rule.sink_pages) | (index >= pages - rows.rule.recent_pages)
    by_row = mass.permute(2, 0, 1, 3)[torch.from_numpy(pruned)].reshape(-1, pages)
    log_mass = torch.log(by_row.double()).cpu().numpy()
    chosen = select(
        log_mass,
        log_mass,
        fixed,
        np.repeat(rows.theta[pruned], heads),
        pruned.shape[0] * heads,
        selection=rows.rule.selection,
    )
    kept[:, pruned] = chosen.kept.reshape(pruned.shape[0], heads, pages).transpose(1, 0, 2)
    rows.kept += kept.mean(axis=(0, 2))
    rows.layers += 1
    return kept


class SurfaceReader:
    """One text, prefilled exactly, whose positions can be measured under any budgets.

    Parameters
    ----------
    model : LoadedModel
        Full attention in every layer. Its attention implementation is switched, and stays so.
    text : sequence of int
    page_tokens : int
    pruning : PruningConfig, optional
        Protected pages, dense layers, selection.

    Raises
    ------
    BadInputError
        If the text is longer than the model's context, or shorter than 2 tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        text: Sequence[int],
        *,
        page_tokens: int = 16,
        pruning: PruningConfig | None = None,
    ) -> None:
        if not 2 <= len(text) <= model.max_context:
            raise BadInputError(
                "text of an impossible length", field="text", value=len(text), allowed=f"[2, {model.max_context}]"
            )
        model.model.set_attn_implementation(register_surface())
        self._model, self._page, self._rule = model, page_tokens, pruning or PruningConfig()
        network, shape = model.model, model.shape
        self._ids = torch.tensor(list(text), dtype=torch.long, device=network.device)
        size = (shape.kv_heads, len(text), shape.head_dim)
        self._keys = [torch.zeros(size, dtype=network.dtype, device=network.device) for _ in range(shape.layers)]
        self._values = [torch.zeros_like(x) for x in self._keys]
        bytes_of = PagedKVCache(1, shape.kv_heads, shape.head_dim, 1, page_tokens, torch.bfloat16, "cpu")
        self._token_bytes, self._score_bytes = bytes_of.token_bytes, bytes_of.score_page_bytes

    @torch.inference_mode()
    def prefill(self, first: int) -> Arrays:
        """Read the whole text; return the dense model's signals from position ``first`` on, each float64 (N - first,).

        ``entropy``, ``varentropy`` of the decode step at the position, ``top`` (its largest probability) and
        ``surprise``, the negative log-likelihood of the token that follows (NaN at the end of the text).
        """
        network, n = self._model.model, self._ids.shape[0]
        found: dict[str, list[FloatArray]] = {"entropy": [], "varentropy": [], "top": [], "surprise": []}
        for start in range(0, n, _CHUNK):
            stop = min(start + _CHUNK, n)
            keep = torch.arange(min(max(first, start), stop - 1) - start, stop - start, device=network.device)
            logits = self._run(_Pass(self._keys, self._values, start), self._ids[start:stop], start, keep)
            if stop > first:
                entropy, varentropy = TorchLogitView(logits).at(np.ones(logits.shape[0]))
                found["entropy"].append(np.asarray(entropy, np.float64))
                found["varentropy"].append(np.asarray(varentropy, np.float64))
                log_p = torch.log_softmax(logits, -1)
                found["top"].append(to_host(log_p.amax(-1).exp()))
                following = self._ids[stop - logits.shape[0] + 1 : stop + 1]
                lost = torch.full((logits.shape[0],), torch.nan, device=logits.device)
                lost[: following.shape[0]] = -log_p[torch.arange(following.shape[0]), following]
                found["surprise"].append(to_host(lost))
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def _run(self, surface: _Pass, ids: Tensor, start: int | FloatArray, keep: Tensor | int) -> Tensor:
        n = ids.shape[0]
        at = torch.arange(start, start + n) if isinstance(start, int) else torch.as_tensor(start)
        out = self._model.model(
            input_ids=ids[None],
            position_ids=at.to(ids.device)[None],
            use_cache=False,
            logits_to_keep=keep,
            surface=surface,
        )
        logits: Tensor = out.logits[0].float()
        return logits

    @torch.inference_mode()
    def measure(self, start: int, count: int, thetas: Sequence[float]) -> Arrays:
        """Decode the tokens at ``start .. start + count`` under every budget; :meth:`prefill` comes first.

        Parameters
        ----------
        start, count : int
            Positions within one page, the next token of the last one inside the text.
        thetas : sequence of A floats
            Budgets > 0, nats.

        Returns
        -------
        dict of float64 (count, A)
            ``kl`` of the next token's distribution from the dense one, ``nll`` change of the next token's negative
            log-likelihood (nats), ``kept`` share of pages read in the pruned layers, ``bytes`` KV bytes read as a share
            of dense.

        Raises
        ------
        BadInputError
            If the positions cross a page or the end of the text.
        """
        stop, total = start + count, self._ids.shape[0]
        if count < 1 or start < 1 or stop >= total or start // self._page != (stop - 1) // self._page:
            raise BadInputError(
                "positions outside one page of the text",
                field="start, count",
                value=(start, count),
                allowed=f"[1, {total - 2}], inside one page of {self._page} tokens",
            )
        ladder = np.array([0.0, *thetas])
        position = np.repeat(np.arange(start, stop), ladder.shape[0])
        rows = _Rows(position, np.tile(ladder, count), self._rule, self._page)
        passing = _Pass(self._keys, self._values, start, rows)
        logits = self._run(passing, self._ids[torch.from_numpy(position)], position, 0)
        logits = logits.reshape(count, ladder.shape[0], -1)
        targets = self._ids[start + 1 : stop + 1]
        kl, nll = (np.empty((count, len(thetas))) for _ in range(2))
        for i in range(count):
            pruned, dense = logits[i, 1:], logits[i, :1]
            kl[i] = kl_nats(pruned, dense.expand_as(pruned))
            lost = torch.log_softmax(logits[i].double(), -1)[:, targets[i]]
            nll[i] = to_host(lost[:1] - lost[1:])
        kept = rows.kept.reshape(count, -1)[:, 1:] / max(rows.layers, 1)
        return {"kl": kl, "nll": nll, "kept": kept, "bytes": self._bytes(np.arange(start, stop), kept)}

    def _bytes(self, position: npt.NDArray[np.int64], kept: FloatArray) -> FloatArray:
        """Return KV bytes read over those of dense attention; ``kept`` (n, A) is the share of pages read."""
        layers, rule = self._model.shape.layers, self._rule
        tokens = (position + 1)[:, None].astype(np.float64)
        pages = -(-(position + 1) // self._page)[:, None]
        scored = np.maximum(pages - rule.sink_pages - rule.recent_pages, 0) * self._score_bytes
        pruned = np.minimum(kept * tokens * self._token_bytes + scored, np.inf)
        dense_share = min(rule.dense_layers, layers) / layers
        share: FloatArray = dense_share + (1 - dense_share) * pruned / (tokens * self._token_bytes)
        return share
