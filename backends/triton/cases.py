"""The launches that are compiled ahead of time: each entry point on shapes of real models, without memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from backends.attention.reference import Scoring
from backends.triton.attention import PageList, attend_pages
from backends.triton.cache import LayerShadow, record_bytes, seal_pages, write_tokens
from backends.triton.dispatch import Pruning, decode
from backends.triton.launch import Launch, recording
from backends.triton.merging import Certify
from backends.triton.sampling import Target, sample_rows

__all__ = ["launches"]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention() -> Iterator[tuple[str, list[Launch]]]:
    half, single = torch.bfloat16, torch.float32
    shapes = [
        # name, H, n_kv_heads, D, page, dtype, options
        ("llama-8b page 16", 32, 8, 128, 16, half, {}),
        ("llama-8b page 64 fp16", 32, 8, 128, 64, torch.float16, {}),
        ("smollm 135m", 9, 3, 64, 16, half, {}),
        ("head 80 float32", 8, 8, 80, 16, single, {}),
        ("llama-8b float32", 32, 8, 128, 16, single, {}),
        ("head 96", 32, 32, 96, 32, half, {}),
        ("window, sinks, cap", 16, 8, 128, 16, half, {"window": 4096, "sink_tokens": 4, "s_aux": _empty(16)}),
    ]
    for name, n_heads, heads, dim, page, dtype, options in shapes:
        scoring = Scoring(dim**-0.5, 50.0 if "window" in options else None)
        pool = _empty(1024, heads, page, dim, dtype=dtype)
        inputs = (
            _empty(8, n_heads, dim, dtype=dtype),
            pool,
            pool,
            _empty(8, 512, dtype=torch.int32),
            _empty(8, dtype=torch.int32),
        )
        with recording() as seen:
            attend_pages(*inputs, scoring, **options)
        yield f"dense, {name}", seen
        if not options:
            pages = PageList(_empty(8, heads, 512, dtype=torch.int32), _empty(8, heads, dtype=torch.int32))
            certify = Certify(_empty(8, n_heads), _empty(8, n_heads), _empty(8, heads))
            with recording() as seen:
                attend_pages(*inputs, scoring, pages=pages, certify=certify, page_log_mass=name == "smollm 135m")
            yield f"listed, {name}", seen


def _shadow(heads: int, dim: int, page: int) -> LayerShadow:
    groups = -(-dim // 8)
    return LayerShadow(
        _empty(1024, heads, record_bytes(dim, page), dtype=torch.uint8),
        _empty(1024, heads, -(-page // 16), groups, 16, dtype=torch.int32),
    )


def _pruned() -> Iterator[tuple[str, list[Launch]]]:
    shapes = [
        ("llama-8b page 16", 32, 8, 128, 16, 512, torch.bfloat16),
        ("llama-8b page 64", 32, 8, 128, 64, 2048, torch.bfloat16),
        ("llama-8b 128k tokens", 32, 8, 128, 16, 8192, torch.bfloat16),
        ("smollm 135m", 9, 3, 64, 16, 512, torch.bfloat16),
        ("head 80 float32", 8, 8, 80, 32, 64, torch.float32),
    ]
    for name, n_heads, heads, dim, page, capacity, dtype in shapes:
        pool = _empty(1024, heads, page, dim, dtype=dtype)
        shadow = _shadow(heads, dim, page)
        scoring = Scoring(dim**-0.5, 30.0 if dim == 80 else None)
        pruning = Pruning(shadow, _empty(8), _empty(8, capacity, dtype=torch.uint8))
        with recording() as seen:
            decode(
                _empty(8, n_heads, dim, dtype=dtype),
                pool,
                pool,
                _empty(8, capacity, dtype=torch.int32),
                _empty(8, dtype=torch.int32),
                scoring,
                pruning=pruning,
            )
        yield f"pruned, {name}", seen
        with recording() as seen:
            seal_pages(
                pool,
                pool,
                _empty(4, dtype=torch.int64),
                shadow,
                _empty(1024, heads, dim, dtype=torch.float16),
                _empty(1024, heads),
                _empty(4, dtype=torch.uint8),
            )
            new, where = _empty(heads, 8, dim, dtype=dtype), _empty(8, dtype=torch.int64)
            write_tokens(new, new, pool, pool, where, where)
        yield f"cache, {name}", seen


def _sampling() -> Iterator[tuple[str, list[Launch]]]:
    for dtype in (torch.float32, torch.bfloat16):
        logits = _empty(8, 151936, dtype=dtype)
        words, heat = _empty(8, dtype=torch.int64), _empty(8, dtype=torch.float64)
        with recording() as seen:
            sample_rows(logits, words, words, temperature=heat)
            sample_rows(logits, words, words, target=Target(1.5, 0.1, 2.0), raw=logits)
        yield f"sampling {str(dtype).removeprefix('torch.')}", seen


def launches() -> Iterator[tuple[str, Launch]]:
    """Return (case, launch) of every specialisation that is compiled ahead of time."""
    for group in (_attention, _pruned, _sampling):
        for case, seen in group():
            for launch in seen:
                yield case, launch
