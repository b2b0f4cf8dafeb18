"""The fused decoder: everything of a forward pass except attention in C++, on the model's own weights.

transformers runs a layer as some forty small operations; here a layer is one call before its attention and one after,
over the same packed tokens and the same paged attention (:meth:`FusedDecoder.run` stands in for
:meth:`backends.attention.PagedBatch.run`). Where the attention is in C++ too and nobody looks into it, a whole pass is
one call. Results are rounded to the model's dtype where transformers rounds them.

Weights are neither copied into another format nor held twice: the C++ reads rows as the model stores them. A large
model's parameters are moved once into one block of memory, aligned and in large pages (weights read from a
safetensors file lie at odd addresses of a file mapping), and the model's tensors become views of it.

Every sum has one order, so a token's result does not depend on its batch or on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backends import decoder_abi as abi
from backends import native
from backends.attention import PagedBatch, paged_attention, register
from backends.attention.decoding import run_layers, runs_at_once
from backends.attention.forward import layer_rule
from backends.decoder_layout import Layout, NotCoveredError, read
from backends.decoder_witness import distance, plain_attention, witness
from backends.kv_cache import PagedKVCache
from backends.models import LoadedModel
from backends.native import LayerRules
from backends.weight_block import gather
from entropic_ctl.errors import BadInputError

__all__ = ["FusedDecoder", "Runner", "paged", "runner"]

Runner = Callable[[PagedBatch, Tensor], Tensor]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Walk = Callable[[abi.Step, Tensor, Tensor], None]  # (step, queries (T, H, D), attention's outputs (T, H, D))

_ANGLES_FIXED = {"default", "linear", "llama3", "yarn"}  # rotary types whose angles depend on the position only
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the root mean square, against the model's own forward
_FIRST = 0.1  # part of it allowed in the first layer, where no rounding has piled up


class FusedDecoder:
    """A model's forward pass in C++; make it with :meth:`of`.

    Parameters
    ----------
    layout : Layout
    """

    def __init__(self, layout: Layout) -> None:
        self._library = native.library()
        self._layout, self._vocab = layout, layout.head[0].shape[0]
        first = layout.layers[0].linears
        attention = layout.layers[0].attention
        self._dim = int(attention.head_dim)
        self._heads, self._kv_heads = first["q"][0].shape[0] // self._dim, first["k"][0].shape[0] // self._dim
        self._hidden, self._inner = first["q"][0].shape[1], first["gate"][0].shape[0]
        self._options: list[dict[str, Any]] = []
        self._rules = LayerRules([])
        self._tables: tuple[list[Tensor], list[Tensor]] | None = None
        types = getattr(layout.rotary, "rope_type", None)
        self._fixed = set(types.values() if isinstance(types, dict) else [types]) <= _ANGLES_FIXED
        self._exact_rope = False
        embedding = layout.embedding
        self._table = _bits(embedding.weight) if type(embedding) is torch.nn.Embedding else None
        self._room = 0
        self._check_sizes()
        cos, _ = self._angles(torch.arange(1))[1:]
        self._rotary = cos[0].shape[1]
        if self._rotary > self._dim or self._rotary % 2:
            raise NotCoveredError(f"{self._rotary} rotary of {self._dim} head elements")
        self._model = self._describe()

    @classmethod
    def of(cls, network: Any) -> tuple[FusedDecoder | None, str]:
        """Return (decoder, "") if the model is covered, else (None, reason).

        The decoder has been compared with the model's own forward: every layer's queries, keys and values, and the
        logits, on random tokens.
        """
        reason = native.reason_unavailable()
        if reason is not None:
            return None, reason
        try:
            read(network)
            gather(network)
            decoder = cls(read(network))
            decoder._verify(network)
        except NotCoveredError as error:
            return None, str(error)
        return decoder, ""

    @torch.inference_mode()
    def run(self, batch: PagedBatch, tokens: Tensor) -> Tensor:
        """Run the model over a packed pass, as :meth:`backends.attention.PagedBatch.run` does.

        Parameters
        ----------
        batch : PagedBatch
        tokens : int64 tensor of T elements
            Packed tokens of all rows.

        Returns
        -------
        float32 tensor, shape (M, n)
            Raw logits of the sampling rows, in row order, with values of the model's dtype.
        """
        cache = batch.cache
        fits = (cache.n_layers, cache.n_kv_heads, cache.head_dim) == (
            len(self._layout.layers),
            self._kv_heads,
            self._dim,
        )
        if fits and runs_at_once(batch, self._layout.dtype):

            def at_once(step: abi.Step, query: Tensor, out: Tensor) -> None:
                run_layers(batch, self._rules, query.transpose(0, 1), out, self._model, step)

            return self._pass(tokens, batch.positions, batch.last_index, at_once)
        modules, options = [parts.attention for parts in self._layout.layers], self._options

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return paged_attention(modules[layer], query, key, value, None, paged=batch, **options[layer])[0]

        return self._forward(tokens, batch.positions, batch.last_index, attend)

    def _forward(self, tokens: Tensor, positions: Tensor, last: Tensor, attend: Attend) -> Tensor:
        """Run the layers one by one, with an attention in between."""

        def walk(step: abi.Step, query: Tensor, out: Tensor) -> None:
            n = out.shape[0]
            parts = [part[:n].transpose(0, 1)[None] for part in (query, self._k, self._v)]
            model, state, threads = ctypes.byref(self._model), ctypes.byref(step), torch.get_num_threads()
            advance = self._library.entropic_decoder_advance
            for layer in range(len(self._layout.layers)):
                advance(model, state, ctypes.c_int64(layer), threads)
                got = attend(layer, *parts).contiguous()
                step.attention = got.data_ptr()
            advance(model, state, ctypes.c_int64(len(self._layout.layers)), threads)

        return self._pass(tokens, positions, last, walk)

    def _pass(self, tokens: Tensor, positions: Tensor, last: Tensor, walk: Walk) -> Tensor:
        n = tokens.numel()
        self._make_room(n)
        angles, cos, sin = self._angles(positions)
        if self._table is None:
            self._x[:n] = self._layout.embedding(tokens.reshape(-1))
        else:  # PyTorch would wake its threads
            np.take(self._table, tokens.reshape(-1).numpy(), axis=0, out=self._bits[:n])
        logits = torch.empty(last.shape[0], self._vocab)
        step = abi.Step(
            tokens=n,
            sampled=last.shape[0],
            angles=abi.address(angles),
            last=abi.address(last),
            cos=(ctypes.c_void_p * 2)(*(table.data_ptr() for table in cos)),
            sin=(ctypes.c_void_p * 2)(*(table.data_ptr() for table in sin)),
            logits=abi.address(logits),
            **self._places,
        )
        walk(step, self._q[:n], self._attention[:n])
        if self._layout.softcap is not None:
            logits = logits.to(self._layout.dtype)
            logits = (torch.tanh(logits / self._layout.softcap) * self._layout.softcap).float()
        return logits

    def _make_room(self, n: int) -> None:
        if n <= self._room:
            return
        self._room = n
        self._x, self._h, self._mlp, self._q, self._attention, self._k, self._v = (
            torch.empty(n, *shape, dtype=self._layout.dtype)
            for shape in (
                (self._hidden,),
                (self._hidden,),
                (self._inner,),
                (self._heads, self._dim),
                (self._heads, self._dim),
                (self._kv_heads, self._dim),
                (self._kv_heads, self._dim),
            )
        )
        self._bits = _bits(self._x)
        names = ("x", "h", "q", "k", "v", "mlp", "attention")
        self._places = {name: abi.address(getattr(self, f"_{name}")) for name in names}

    def _angles(self, positions: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return (row of each token, cos tables, sin tables), the tables float32 (rows, rotary), one per kind."""
        if not self._fixed:
            return torch.arange(positions.shape[0]), *self._rotate(positions)
        most = int(positions.max()) + 1 if positions.numel() else 1
        if self._tables is None or self._tables[0][0].shape[0] < most:
            self._tables = self._rotate(torch.arange(1 << (most - 1).bit_length()))
        return positions.contiguous(), *self._tables

    def _rotate(self, positions: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        like = torch.empty(1, 1, self._hidden, dtype=self._layout.dtype)
        tables = [
            self._layout.rotary(like, positions[None], *([] if kind is None else [kind])) for kind in self._layout.ropes
        ]
        self._exact_rope = tables[0][0].dtype != self._layout.dtype
        tables *= 2 // len(tables)
        cos, sin = zip(*tables, strict=True)
        return [c[0].float().contiguous() for c in cos], [s[0].float().contiguous() for s in sin]

    def _check_sizes(self) -> None:
        hidden, inner, d = self._hidden, self._inner, self._dim
        want = {
            "q": (self._heads * d, hidden),
            "k": (self._kv_heads * d, hidden),
            "v": (self._kv_heads * d, hidden),
            "o": (hidden, self._heads * d),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }
        heads = {"q_norm": (d, self._heads * d), "k_norm": (d, self._kv_heads * d)}
        for index, parts in enumerate(self._layout.layers):
            for name, (weight, _) in parts.linears.items():
                if tuple(weight.shape) != want[name] or weight.dtype != self._layout.dtype:
                    raise NotCoveredError(f"layer {index}: {name} is {tuple(weight.shape)}, not {want[name]}")
            whole = self._layout.whole_qk_norm
            for name, norm in parts.norms.items():
                size = heads[name][whole] if name in heads else hidden
                if norm is not None and (norm.shape[0] != size or norm.dtype != self._layout.dtype):
                    raise NotCoveredError(f"layer {index}: {name} has {norm.shape[0]} elements, not {size}")

    def _describe(self) -> abi.Model:
        layout = self._layout
        layers = (abi.Layer * len(layout.layers))(
            *(
                abi.Layer(
                    rope=parts.rope,
                    **{name: abi.matrix(*linear) for name, linear in parts.linears.items()},
                    **{name: abi.address(norm) for name, norm in parts.norms.items()},
                )
                for parts in layout.layers
            )
        )
        return abi.Model(
            layers=layers,
            final_norm=abi.address(layout.final_norm),
            head=abi.matrix(*layout.head),
            n_layers=len(layout.layers),
            hidden=self._hidden,
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=self._dim,
            rotary=self._rotary,
            whole_qk_norm=int(layout.whole_qk_norm),
            exact_rope=int(self._exact_rope),
            eps=layout.eps,
            norm=layout.norm,
            activation=layout.activation,
            bf16=int(layout.dtype == torch.bfloat16),
        )

    @torch.inference_mode()
    def _verify(self, network: Any) -> None:
        """Compare with the model's own forward, and learn which options its attention is called with."""
        tokens = torch.randint(0, self._vocab, (16,), generator=torch.Generator().manual_seed(0))
        tokens = tokens.clamp(max=self._layout.embedding.num_embeddings - 1)
        positions, last = torch.arange(16), torch.tensor([7, 15])
        theirs, want = witness(network, tokens, positions, last)
        if [int(call.module.layer_idx) for call in theirs] != list(range(len(self._layout.layers))):
            raise NotCoveredError("its layers do not call the attention once each, in order")
        self._options = [call.options for call in theirs]
        self._rules = LayerRules([layer_rule(self._dim, **options) for options in self._options])
        tolerance = _TOLERANCE[self._layout.dtype]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            for name, got in (("queries", query), ("keys", key), ("values", value)):
                error = distance(got, getattr(theirs[layer], name))
                if not error <= (tolerance if layer else _FIRST * tolerance):
                    raise NotCoveredError(f"layer {layer}: {name} differ by {error:.2g} from the model's own")
            return plain_attention(query, key, value, self._options[layer]["scaling"])

        error = distance(self._forward(tokens, positions, last, attend), want)
        if not error <= tolerance:
            raise NotCoveredError(f"logits differ by {error:.2g} from the model's own")


def _bits(tensor: Tensor) -> npt.NDArray[np.int16]:
    return np.asarray(tensor.detach().view(torch.int16).numpy())


@functools.cache
def _announce(reason: str) -> None:
    """Say once that the slower way is taken, and why."""
    print(f"entropic: running PyTorch's layers instead of the C++ ones: {reason}", file=sys.stderr)  # noqa: T201


def paged(model: LoadedModel, pages: int, page_tokens: int, kernels: str = "auto") -> tuple[PagedKVCache, Runner]:
    """Switch a model to the paged attention; return an empty cache for it, and what runs a pass over that cache.

    Parameters
    ----------
    model : LoadedModel
    pages, page_tokens : int
    kernels : {'auto', 'native', 'triton', 'torch'}
        Of the cache, and of the forward pass (:func:`runner`).

    Raises
    ------
    BadInputError
        If the cache does not fit into memory, or the kernels cannot run here.
    """
    network, shape = model.model, model.shape
    network.set_attn_implementation(register())
    sizes = (shape.layers, shape.kv_heads, shape.head_dim, pages, page_tokens)
    return PagedKVCache(*sizes, network.dtype, network.device, kernels=kernels), runner(network, kernels)


def runner(network: Any, kernels: str) -> Runner:
    """Return what runs a forward pass: the fused decoder's ``run``, or transformers' forward.

    Parameters
    ----------
    network : transformers decoder
    kernels : {'auto', 'native', 'triton', 'torch'}
        ``auto`` takes the fused decoder where it can, and says on stderr, once, where it cannot and why.

    Raises
    ------
    BadInputError
        With ``native``, if the fused decoder cannot run the model here.
    """
    if kernels in ("auto", "native"):
        decoder, reason = FusedDecoder.of(network)
        if decoder is not None:
            return decoder.run
        if kernels == "native":
            raise BadInputError(
                f"the C++ layers cannot run this model: {reason}",
                field="engine.kernels",
                value=kernels,
                allowed="auto, native, triton, torch",
                remedy="use auto or torch",
            )
        if network.device.type == "cpu":
            _announce(reason)
    return lambda batch, tokens: batch.run(network, tokens)
