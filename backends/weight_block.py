"""One block of memory for a model's weights: aligned, in large pages where the system has them."""

from __future__ import annotations

import mmap
from typing import Any

import torch

__all__ = ["gather"]

_LARGE_BYTES = 16 << 20  # smaller models stay where they are
_PAGE_BYTES = 2 << 20
_LINE_BYTES = 64


def gather(network: Any) -> None:
    """Move a large model's parameters into one aligned block of large pages; its tensors become views of it."""
    parameters = list(network.parameters())
    sizes = [-(-p.numel() * p.element_size() // _LINE_BYTES) * _LINE_BYTES for p in parameters]
    if sum(sizes) < _LARGE_BYTES or len({p.untyped_storage().data_ptr() for p in parameters}) == 1:
        return
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory = mmap.mmap(-1, sum(sizes) + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        block = torch.frombuffer(memory, dtype=torch.uint8)
    else:
        block = torch.empty(sum(sizes) + _PAGE_BYTES, dtype=torch.uint8)
    start = -block.data_ptr() % _PAGE_BYTES
    for parameter, size in zip(parameters, sizes, strict=True):
        count = parameter.numel() * parameter.element_size()
        view = block[start : start + count].view(parameter.dtype).view(parameter.shape)
        parameter.data = view.copy_(parameter.data)
        start += size
