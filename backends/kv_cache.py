"""The paged KV cache: fixed-size pages of keys and values, and a quantised shadow of the keys of every full page.

The shadow is what pruning reads instead of the keys. Per page and KV head, for every token t and channel d,

    k[t, d] ~ m[d] + w[d] a (c[t, d] - 128),    |k[t, d] - (m[d] + w[d] a (c[t, d] - 128))| <= w[d] e,

with codes c of 8 bits, a weight w from 1 to 255 and a centre m of 16 bits per channel, and one step a and one error e
of the page. A step per channel is a product of two small numbers, so a query can be multiplied with the weights in
integers.
A code is two planes of 4 bits, c = 16 h + l. A first look reads h alone and takes l for 7.5: the error is then
w[d] (e + 7.5 a); pages it cannot decide are looked at again with l. *(ours)*

e is *measured* on the page against what is stored, in float64, and rounded up. A page with a value that is not finite,
or beyond float16, is not sealed; it is then always read.

Slots that no token was written to hold whatever was in memory (NaN included); nothing here or in the attention reads
them. Pools are uninitialised memory, so a large pool costs only the pages used (on a CPU, where huge pages are asked
for: the attention jumps between pages).
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from backends import native
from entropic_ctl.errors import BadInputError

if TYPE_CHECKING:
    from backends.attention.batch import PagedBatch

__all__ = ["PagedKVCache", "Quantised", "Shadow", "pack", "quantise", "unpack"]

_HALF_MAX = 65504.0
_HEADER = 16  # bytes of step, error and norm at the head of a record


def _round_up(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round a non-negative float64 tensor up to ``dtype``."""
    near = x.to(dtype)
    return torch.where(near.double() < x, torch.nextafter(near, torch.full_like(near, torch.inf)), near)


class Quantised(NamedTuple):
    """Keys of pages as the shadow holds them; ``...`` is any shape, usually (pages, n_kv_heads).

    ``codes`` uint8 (..., page_tokens, D), ``weight`` uint8 (..., D) from 1, ``centre`` float16 (..., D), ``step``,
    ``error`` and ``norm`` float32 (...). ``norm`` bounds the Euclidean norm of every key, and of |m| + 128 w a.
    """

    codes: torch.Tensor
    weight: torch.Tensor
    centre: torch.Tensor
    step: torch.Tensor
    error: torch.Tensor
    norm: torch.Tensor


def quantise(keys: torch.Tensor) -> Quantised:
    """Quantise keys (..., page_tokens, D), of any float dtype, finite and within float16's range."""
    exact = keys.double()
    low, high = exact.amin(dim=-2), exact.amax(dim=-2)
    centre = (0.5 * (low + high)).float().to(torch.float16)
    m = centre.double()
    radius = torch.maximum(high - m, m - low)
    widest = radius.amax(dim=-1, keepdim=True)
    step = _round_up(widest / (255.0 * 127.5), torch.float32)
    share = torch.where(widest > 0, radius / torch.where(widest > 0, widest, 1.0) * 255.0, 1.0)
    weight = share.ceil().clamp(1.0, 255.0)
    unit = weight * step.double()
    safe = torch.where(unit > 0, unit, 1.0).unsqueeze(-2)
    codes = ((exact - m.unsqueeze(-2)) / safe).round().add(128.0).clamp(0.0, 255.0)
    residue = (exact - (m.unsqueeze(-2) + unit.unsqueeze(-2) * (codes - 128.0))).abs().amax(dim=-2) / weight
    error = residue.amax(dim=-1)
    reach = m.abs() + 128.0 * unit
    square = torch.maximum(reach.square().sum(dim=-1), exact.square().sum(dim=-1).amax(dim=-1))
    # float64 leaves a few 2^-53 of the magnitudes in each residue: covered by 2^-48 of the widest reach
    error = error + torch.where(error > 0, reach.amax(dim=-1) * 2.0**-48, 0.0)
    norm = square.sqrt() * (1.0 + 1e-12)
    return Quantised(
        codes.to(torch.uint8),
        weight.to(torch.uint8),
        centre,
        step.squeeze(-1),
        _round_up(error, torch.float32),
        _round_up(norm, torch.float32),
    )


def _planes(page_tokens: int, dim: int) -> tuple[int, int]:
    """Return (blocks of 16 tokens, groups of 8 channels)."""
    return -(-page_tokens // 16), -(-dim // 8)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit numbers (..., page_tokens, D) to int32 (..., blocks, groups, 16); see :class:`Shadow`."""
    page, dim = codes.shape[-2:]
    blocks, groups = _planes(page, dim)
    full = torch.nn.functional.pad(codes, (0, 8 * groups - dim, 0, 16 * blocks - page)).long()
    grid = full.reshape(*codes.shape[:-2], blocks, 16, groups, 8).transpose(-3, -2)  # (..., blocks, groups, 16, 8)
    word = sum(grid[..., j] << (4 * ((j >> 1) + 4 * (j & 1))) for j in range(8))
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)  # the same 32 bits


def _from_nibbles(plane: torch.Tensor, page_tokens: int, dim: int) -> torch.Tensor:
    places = [4 * ((j >> 1) + 4 * (j & 1)) for j in range(8)]
    grid = torch.stack([(plane >> place) & 15 for place in places], dim=-1).transpose(-3, -2)
    blocks, groups = _planes(page_tokens, dim)
    return grid.reshape(*plane.shape[:-3], 16 * blocks, 8 * groups)[..., :page_tokens, :dim].to(torch.uint8)


def pack(keys: Quantised) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (record, low plane) as :class:`Shadow` stores them."""
    pad = (0, -keys.weight.shape[-1] % 8)
    header = torch.stack([keys.step, keys.error, keys.norm, torch.zeros_like(keys.step)], dim=-1)
    parts = (
        header.view(torch.uint8),
        torch.nn.functional.pad(keys.weight, pad),
        torch.nn.functional.pad(keys.centre, pad).view(torch.uint8),
        _nibbles(keys.codes >> 4).flatten(-3).view(torch.uint8),
    )
    return torch.cat(parts, dim=-1), _nibbles(keys.codes & 15)


def unpack(record: torch.Tensor, low: torch.Tensor | None, page_tokens: int, dim: int) -> Quantised:
    """Undo :func:`pack`; without the low plane the codes are multiples of 16."""
    blocks, groups = _planes(page_tokens, dim)
    width = 8 * groups
    header = record[..., :_HEADER].contiguous().view(torch.float32)
    centre = record[..., _HEADER + width : _HEADER + 3 * width].contiguous().view(torch.float16)
    plane = record[..., _HEADER + 3 * width :].contiguous().view(torch.int32)
    codes = _from_nibbles(plane.reshape(*record.shape[:-1], blocks, groups, 16), page_tokens, dim) << 4
    if low is not None:
        codes = codes | _from_nibbles(low, page_tokens, dim)
    weight = record[..., _HEADER : _HEADER + dim]
    return Quantised(codes, weight, centre[..., :dim], header[..., 0], header[..., 1], header[..., 2])


class Shadow:
    """Quantised keys and value summaries, one entry per (layer, page, KV head); see the module docstring.

    ``pool`` is the shape of the key pool, (L, pages, n_kv_heads, page_tokens, D). With B = ceil(page_tokens / 16)
    blocks of tokens and C = ceil(D / 8) groups of channels, a plane is (B, C, 16) words of 32 bits: the word of token
    16 b + i and group g has channel 8 g + j in nibble (j >> 1) + 4 (j & 1), so a shift and a mask give two channels
    side by side as 16-bit numbers.

    ``by_head`` stores the records of one KV head one after the other: the first look of the C++ kernels, which goes
    through one head's pages in order, then reads one stream of memory (155 instead of 176 cycles per page).

    Attributes
    ----------
    record : uint8, (L, pages, n_kv_heads, 16 + 24 C + 64 B C)
        What the first look reads, in one piece: step, error, norm and a zero (float32), the weights (uint8, padded to
        8 C), the centres (float16, likewise), the high plane.
    low : int32, (L, pages, n_kv_heads, B, C, 16)
        The low plane.
    value_centre : float16, (L, pages, n_kv_heads, D)
    value_radius : float32, (L, pages, n_kv_heads)
        Largest Euclidean distance of a value of the page from the stored centre, rounded up.
    """

    def __init__(self, pool: tuple[int, ...], device: torch.device, *, by_head: bool) -> None:
        head = pool[:3]
        blocks, groups = _planes(pool[3], pool[4])
        layers, pages, heads = head
        size = _HEADER + 24 * groups + 64 * blocks * groups
        if by_head:
            self.record = empty((layers, heads, pages, size), torch.uint8, device).transpose(1, 2)
        else:
            self.record = empty((*head, size), torch.uint8, device)
        self.low = empty((*head, blocks, groups, 16), torch.int32, device)
        self.value_centre = torch.empty(*head, pool[-1], dtype=torch.float16, device=device)
        self.value_radius = torch.empty(head, dtype=torch.float32, device=device)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor; on a CPU its memory is asked for in huge pages (Linux)."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type == "cpu" and size > 2 * _HUGE:
        start = -(-tensor.data_ptr() // _HUGE) * _HUGE
        length = (tensor.data_ptr() + size - start) // _HUGE * _HUGE
        madvise = getattr(ctypes.CDLL(None), "madvise", None)
        if madvise is not None:  # advice: where it is not taken, nothing is lost but time
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), 14)
    return tensor


_HUGE = 2 << 20


class PagedKVCache:
    """Keys and values of all layers in pages of ``page_tokens`` tokens.

    Parameters
    ----------
    n_layers, n_kv_heads, head_dim, pages, page_tokens : int
        All at least 1.
    dtype : torch.dtype
        bfloat16, float16 or float32.
    device : torch.device or str
    kernels : {"auto", "native", "triton", "torch"}
        Who reads and writes it: the C++ kernels (on a CPU), those in Triton (on a GPU), or PyTorch. ``auto``: C++ on
        a CPU and Triton on a GPU where they can run, else PyTorch.

    Attributes
    ----------
    k, v : tensor, (n_layers, pages, n_kv_heads, page_tokens, head_dim)
    sealed : bool NumPy array, (pages,)
        True for pages that are full and have a valid shadow.
    kernels : {"native", "triton", "torch"}
        What was chosen.

    Raises
    ------
    BadInputError
        If a size is below 1 or the dtype is not supported.
    """

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        *,
        kernels: str = "auto",
    ) -> None:
        sizes = {
            "n_layers": n_layers,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "pages": pages,
            "page_tokens": page_tokens,
        }
        for name, size in sizes.items():
            if size < 1:
                raise BadInputError("not a size", where="PagedKVCache", field=name, value=size, allowed=">= 1")
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise BadInputError(
                "unsupported dtype",
                where="PagedKVCache",
                field="dtype",
                value=dtype,
                allowed="bfloat16, float16, float32",
            )
        self.n_layers, self.n_kv_heads, self.head_dim = n_layers, n_kv_heads, head_dim
        self.n_pages, self.page_tokens = pages, page_tokens
        self.dtype, self.device = dtype, torch.device(device)
        shape = (n_layers, pages, n_kv_heads, page_tokens, head_dim)
        try:
            self.k = empty(shape, dtype, self.device)
            self.v = empty(shape, dtype, self.device)
        except (RuntimeError, TypeError, MemoryError):  # torch: out of memory, or more bytes than it can count
            raise BadInputError(
                f"no memory for a KV cache of {2 * math.prod(shape) * dtype.itemsize / 2**30:,.1f} GiB",
                where="PagedKVCache",
                field="pages",
                value=pages,
                remedy="lower engine.pages or engine.page_tokens",
            ) from None
        self.sealed: npt.NDArray[np.bool_] = np.zeros(pages, np.bool_)
        self._shadow: Shadow | None = None
        self.kernels = _kernels(kernels, self.device, head_dim, page_tokens)

    @property
    def shadow(self) -> Shadow:
        """The shadow, allocated on first use."""
        if self._shadow is None:
            self._shadow = Shadow(tuple(self.k.shape), self.device, by_head=self.kernels == "native")
        return self._shadow

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer (all KV heads)."""
        return 2 * self.n_kv_heads * self.head_dim * self.k.element_size()

    @property
    def score_page_bytes(self) -> int:
        """Bytes of the first look at one sealed page in one layer: header, weights, centres, high plane (all heads)."""
        blocks, groups = _planes(self.page_tokens, self.head_dim)
        return self.n_kv_heads * (_HEADER + 24 * groups + 64 * blocks * groups)

    @property
    def low_page_bytes(self) -> int:
        """Bytes of the low plane of one page and KV head in one layer."""
        blocks, groups = _planes(self.page_tokens, self.head_dim)
        return 64 * blocks * groups

    @property
    def value_page_bytes(self) -> int:
        """Bytes read to bound the output error of one pruned page in one layer: value centre and radius."""
        return self.n_kv_heads * (2 * self.head_dim + 4)

    @property
    def shadow_overhead(self) -> float:
        """Bytes of shadow per byte of K and V."""
        low = self.n_kv_heads * self.low_page_bytes
        return (self.score_page_bytes + low + self.value_page_bytes) / (self.token_bytes * self.page_tokens)

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, page: torch.Tensor, offset: torch.Tensor
    ) -> None:
        """Store K and V of T packed tokens.

        Parameters
        ----------
        layer : int
        key, value : tensor, shape (n_kv_heads, T, head_dim)
        page, offset : int64, shape (T,)
            Page id and slot within the page of each token.
        """
        if self.kernels == "native":
            native.write(self, layer, key, value, page, offset)
            return
        if self.kernels == "triton":
            from backends.triton import paged

            paged.write(self, layer, key, value, page, offset)
            return
        self.k[layer][page, :, offset] = key.transpose(0, 1).to(self.dtype)
        self.v[layer][page, :, offset] = value.transpose(0, 1).to(self.dtype)

    def seal(self, batch: PagedBatch) -> None:
        """Quantise the pages that the batch's forward pass filled, all layers at once.

        Call it after each forward pass of a loop that prunes. A page that was never sealed is merely read in full.
        """
        self.seal_pages(batch.filled_pages())

    def seal_pages(self, pages: npt.NDArray[np.int64]) -> None:
        """Quantise full pages by id (all ``page_tokens`` slots written in every layer)."""
        if self.kernels != "torch":
            if pages.shape[0]:
                self.sealed[pages] = self._seal_in_kernels(pages)
            return
        for start in range(0, pages.shape[0], 4):  # the float64 workspace stays in cache
            self._seal_some(pages[start : start + 4])

    def _seal_in_kernels(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        if self.kernels == "native":
            return native.seal(self, pages)
        from backends.triton import paged

        return paged.seal(self, pages)

    def _seal_some(self, pages: npt.NDArray[np.int64]) -> None:
        index = torch.from_numpy(np.ascontiguousarray(pages)).to(self.device)
        keys, values, shadow = self.k[:, index], self.v[:, index], self.shadow
        # in float32, as bfloat16 knows no 65504; False for NaN
        within = (keys.abs().float() <= _HALF_MAX).all(dim=-1) & (values.abs().float() <= _HALF_MAX).all(dim=-1)
        good = within.all(dim=-1).all(dim=-1).all(dim=0)
        if not bool(good.all()):
            index, keys, values = index[good], keys[:, good], values[:, good]
        if index.shape[0] == 0:
            return
        shadow.record[:, index], shadow.low[:, index] = pack(quantise(keys))
        exact = values.double()
        centre = exact.mean(dim=-2).float().to(torch.float16)
        away = (exact - centre.double().unsqueeze(-2)).norm(dim=-1).amax(dim=-1)
        shadow.value_centre[:, index] = centre
        shadow.value_radius[:, index] = _round_up(away * (1.0 + 1e-12), torch.float32)
        self.sealed[index.cpu().numpy()] = True


def _kernels(name: str, device: torch.device, head_dim: int, page_tokens: int) -> str:
    """Return which kernels a cache is read and written with."""
    if name not in ("auto", "native", "triton", "torch"):
        raise BadInputError("no such kernels", field="kernels", value=name, allowed="auto, native, triton, torch")
    if name == "torch":
        return name
    wanted = name if name != "auto" else "native" if device.type == "cpu" else "triton"
    problem = f"they hold heads of up to {native.MAX_HEAD_DIM} channels, the model has {head_dim}"
    if head_dim <= native.MAX_HEAD_DIM and wanted == "native":
        problem = "they run on a CPU" if device.type != "cpu" else native.reason_unavailable() or ""
    elif head_dim <= native.MAX_HEAD_DIM:
        problem = _no_triton(device, page_tokens)
    if problem and name != "auto":
        needs = "native (a CPU with a C++ compiler), triton (an NVIDIA GPU), torch, auto"
        raise BadInputError(
            f"the attention in {'C++' if wanted == 'native' else 'Triton'} cannot be used: {problem}",
            field="kernels",
            value=name,
            allowed=needs,
            remedy="set engine.kernels = 'torch'",
        )
    return "torch" if problem else wanted


def _no_triton(device: torch.device, page_tokens: int) -> str:
    from backends.triton import interpreted, reason_unavailable

    if page_tokens < 16 or page_tokens & (page_tokens - 1):
        return f"they take pages of 16, 32, 64, ... tokens, not {page_tokens}"
    if device.type != "cuda" and not (interpreted() and device.type == "cpu"):
        return f"they run on a GPU, the cache is on {device}"
    return reason_unavailable() or ""
