"""Decode attention on a GPU: dense and pruned, timed against PyTorch's and FlashAttention's, on synthetic caches.

Keys of a page share a direction, so that page masses spread as they do in real text (log-normal; the kept share is
measured, not assumed). One CUDA graph holds several layers with caches of their own, so that nothing is left in the
second-level cache from one to the next; times are per layer.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backends.attention.reference import Scoring
from backends.triton.cache import LayerShadow, record_bytes, seal_pages
from backends.triton.dispatch import Decoded, Pruning, budget_ratio, decode

__all__ = ["LLAMA_8B", "Shape", "bytes_dense", "bytes_pruned", "measure", "synthetic"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads, KV heads, head size and page size of a layer."""

    heads: int
    kv_heads: int
    dim: int
    page: int


LLAMA_8B = Shape(32, 8, 128, 16)


def bytes_dense(shape: Shape, tokens: int) -> int:
    """Return the bytes of K and V of ``tokens`` tokens in 16 bits."""
    return 4 * tokens * shape.kv_heads * shape.dim


def bytes_pruned(shape: Shape, tokens: int, *, kept: float, refined: float) -> float:
    """Return the bytes of all records, the low planes of a share ``refined``, K and V of a share ``kept`` of pages."""
    pages = tokens / shape.page * shape.kv_heads
    low = 64 * -(-shape.page // 16) * -(-shape.dim // 8)
    return pages * (record_bytes(shape.dim, shape.page) + refined * low) + kept * bytes_dense(shape, tokens)


@dataclass
class Cache:
    """One layer's synthetic cache for ``batch`` rows of ``context`` tokens each."""

    query: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    shadow: LayerShadow
    candidates: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Query, pools, table and lengths."""
        return self.query, self.k, self.v, self.table, self.lengths


def synthetic(shape: Shape, batch: int, context: int, device: torch.device, *, seed: int) -> Cache:
    """Return a sealed cache whose page masses spread; 16 bits on a GPU, float32 elsewhere."""
    made = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    per_row = -(-context // shape.page)
    total = batch * per_row
    size = (shape.kv_heads, shape.page, shape.dim)
    query = torch.randn(batch, shape.heads, shape.dim, generator=made, device=device, dtype=dtype)
    k, v = (torch.empty((total, *size), dtype=dtype, device=device) for _ in range(2))
    table = torch.randperm(total, generator=made, device=device).reshape(batch, per_row).to(torch.int32)
    group = shape.heads // shape.kv_heads
    leader = query.reshape(batch, shape.kv_heads, group, shape.dim).mean(dim=2)
    leader = leader / leader.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    for r in range(batch):
        ids = table[r].long()
        along = 3.0 * torch.randn(per_row, shape.kv_heads, 1, 1, generator=made, device=device, dtype=dtype)
        noise = torch.randn((per_row, *size), generator=made, device=device, dtype=dtype)
        k[ids] = noise + along * leader[r][None, :, None, :]
        v[ids] = torch.randn((per_row, *size), generator=made, device=device, dtype=dtype)
    groups, blocks = -(-shape.dim // 8), -(-shape.page // 16)
    shadow = LayerShadow(
        torch.empty((total, shape.kv_heads, record_bytes(shape.dim, shape.page)), dtype=torch.uint8, device=device),
        torch.empty((total, shape.kv_heads, blocks, groups, 16), dtype=torch.int32, device=device),
    )
    sealed = torch.ones(total, dtype=torch.uint8, device=device)
    centre = torch.empty((total, shape.kv_heads, shape.dim), dtype=torch.float16, device=device)
    radius = torch.empty((total, shape.kv_heads), dtype=torch.float32, device=device)
    seal_pages(k, v, torch.arange(total, device=device), shadow, centre, radius, sealed)
    candidates = torch.ones((batch, per_row), dtype=torch.uint8, device=device)
    candidates[:, 0] = 0
    candidates[:, -min(4, per_row) :] = 0
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    return Cache(query, k, v, table, lengths, shadow, candidates)


def timed(work: Callable[[], Any], device: torch.device, *, repeats: int) -> float:
    """Return the median seconds of one call: replays of a CUDA graph, or plain calls elsewhere."""
    if device.type != "cuda":
        work()
        spent = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            spent.append(time.perf_counter() - start)
        return statistics.median(spent)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events))


def _contiguous(cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V as (batch, n_kv_heads, context, D)."""
    batch, heads, dim = cache.table.shape[0], cache.k.shape[1], cache.k.shape[3]

    def gathered(pool: torch.Tensor) -> torch.Tensor:
        pages = pool[cache.table.long()]  # (batch, P, heads, page, D)
        return pages.transpose(1, 2).reshape(batch, heads, -1, dim)[:, :, : int(cache.lengths[0])].contiguous()

    return gathered(cache.k), gathered(cache.v)


def _peers(caches: list[Cache]) -> dict[str, Callable[[], Any]]:
    """Return what else can attend here, over contiguous caches: SDPA, and FlashAttention where it is installed."""
    whole = [_contiguous(cache) for cache in caches]
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def torch_sdpa() -> list[torch.Tensor]:
        return [sdpa(c.query[:, :, None], k, v, enable_gqa=True) for c, (k, v) in zip(caches, whole, strict=True)]

    found: dict[str, Callable[[], Any]] = {"sdpa": torch_sdpa}
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return found
    swapped = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in whole]

    def flash() -> list[torch.Tensor]:
        return [
            flash_attn_with_kvcache(c.query[:, None], k, v, cache_seqlens=c.lengths)
            for c, (k, v) in zip(caches, swapped, strict=True)
        ]

    found["flash_attn"] = flash
    return found


def measure(
    shape: Shape, batch: int, context: int, theta_nats: float, device: torch.device, *, repeats: int, bandwidth: float
) -> dict[str, Any]:
    """Time one (batch, context), and check dense against SDPA and the certificates against the budget.

    Parameters
    ----------
    shape : Shape
    batch, context : int
        Rows; tokens of each.
    theta_nats : float
    device : torch.device
    repeats : int
    bandwidth : float
        Bytes per second, for the floor.

    Returns
    -------
    dict
        Microseconds per layer of each way, the floor, kept share, largest certificate, largest deviation.
    """
    dense_bytes = bytes_dense(shape, batch * context)
    layers = 1 if device.type != "cuda" else max(1, min(16, math.ceil((256 << 20) / dense_bytes)))
    caches = [synthetic(shape, batch, context, device, seed=i) for i in range(layers)]
    scoring = Scoring(shape.dim**-0.5)
    ratio = budget_ratio(torch.full((batch,), theta_nats, dtype=torch.float64, device=device))

    def ours(*, two_stage: bool | None) -> list[Decoded]:
        return [
            decode(
                *c.inputs,
                scoring,
                pruning=None if two_stage is None else Pruning(c.shadow, ratio, c.candidates, two_stage),
            )
            for c in caches
        ]

    row: dict[str, Any] = {"batch": batch, "context": context, "layers": layers}
    ways: dict[str, Callable[[], Any]] = {
        "dense": lambda: ours(two_stage=None),
        "pruned": lambda: ours(two_stage=True),
        "pruned_8bit": lambda: ours(two_stage=False),
        **_peers(caches),
    }
    for name, work in ways.items():
        row[f"{name}_us"] = 1e6 * timed(work, device, repeats=repeats) / layers
    exact, pruned = ours(two_stage=None)[0], ours(two_stage=True)[0]
    reference = ways["sdpa"]()[0].squeeze(2).float()
    pages = caches[0].table.shape[1]
    kept = float(pruned.pages.count.float().mean()) / pages
    refined = float(pruned.refined.float().mean()) / pages
    row |= {
        "floor_us": 1e6 * dense_bytes / bandwidth,
        "floor_pruned_us": 1e6 * bytes_pruned(shape, batch * context, kept=kept, refined=refined) / bandwidth,
        "kept": kept,
        "refined": refined,
        "bytes_fraction": bytes_pruned(shape, batch * context, kept=kept, refined=refined) / dense_bytes,
        "certificate_max": float(-torch.log1p(-pruned.mass.double()).max()),
        "deviation": float((exact.out.float() - reference).abs().max()),
    }
    if not row["certificate_max"] <= theta_nats or not row["deviation"] < 0.02:
        row["wrong"] = f"certificate {row['certificate_max']:.3g}, deviation {row['deviation']:.3g}"
    return row
