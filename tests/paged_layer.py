"""A random layer of a paged cache for kernel tests, and plain float64 answers about it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from backends.attention.reference import Scoring

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@dataclass
class Layer:
    query: torch.Tensor  # (n, H, D)
    k: torch.Tensor  # (pages, n_kv_heads, page, D)
    v: torch.Tensor
    table: torch.Tensor  # int32 (n, P)
    lengths: torch.Tensor  # int32 (n,)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.k, self.v, self.table, self.lengths

    def row(self, r: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query (n_kv_heads, G, D), keys and values (n_kv_heads, length, D) of a row, float64 on the CPU."""
        heads, size, dim = self.k.shape[1:]
        length = int(self.lengths[r])
        pages = self.table[r, : -(-length // size)].long().cpu()

        def tokens(pool: torch.Tensor) -> torch.Tensor:
            return pool.cpu()[pages].double().transpose(0, 1).reshape(heads, -1, dim)[:, :length]

        return self.query[r].cpu().double().reshape(heads, -1, dim), tokens(self.k), tokens(self.v)

    def scores(self, r: int, scoring: Scoring) -> torch.Tensor:
        """Return (H, length) in float64."""
        q, k, _ = self.row(r)
        s = torch.matmul(q, k.transpose(1, 2)) * scoring.scale
        if scoring.softcap is not None:
            s = scoring.softcap * torch.tanh(s / scoring.softcap)
        return s.reshape(-1, s.shape[-1])

    def page_mass(self, r: int, scoring: Scoring) -> torch.Tensor:
        """Return ln of each page's sum of exp(score), (H, pages of the row), float64."""
        size = self.k.shape[2]
        s = self.scores(r, scoring)
        padded = torch.nn.functional.pad(s, (0, -s.shape[1] % size), value=-torch.inf)
        return torch.logsumexp(padded.reshape(s.shape[0], -1, size), dim=-1)


def layer(
    *,
    n_heads: int = 6,
    heads: int = 2,
    dim: int = 64,
    page: int = 16,
    lengths: tuple[int, ...] = (17, 133),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spread: float = 1.0,
) -> Layer:
    """Random pages in random places of the pool; everything no token was written to is NaN or infinite."""
    made = torch.Generator().manual_seed(seed)
    need = [-(-length // page) for length in lengths]
    total, capacity = sum(need) + 3, max(need) + 2
    order = torch.randperm(total, generator=made)
    k = torch.full((total, heads, page, dim), torch.nan)
    v = torch.full((total, heads, page, dim), torch.inf)
    table = torch.full((len(lengths), capacity), 2**31 - 1, dtype=torch.int32)
    start = 0
    for r, length in enumerate(lengths):
        ids = order[start : start + need[r]]
        table[r, : need[r]] = ids
        start += need[r]
        shift = spread * torch.randn(heads, need[r], 1, dim, generator=made)
        for p, page_id in enumerate(ids.tolist()):
            n = min(page, length - p * page)
            k[page_id, :, :n] = torch.randn(heads, n, dim, generator=made) + shift[:, p]
            v[page_id, :, :n] = torch.randn(heads, n, dim, generator=made)
    query = torch.randn(len(lengths), n_heads, dim, generator=made)
    return Layer(
        query.to(dtype).to(DEVICE),
        k.to(dtype).to(DEVICE),
        v.to(dtype).to(DEVICE),
        table.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
    )
