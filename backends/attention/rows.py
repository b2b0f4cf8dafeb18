"""The requests of one packed pass, and the pruned ones among them laid out for one pass over all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from entropic_ctl.signals import FloatArray, IntArray, StepPlan

__all__ = ["PrunedRows", "Row", "rows_plan", "single_row_plan"]


@dataclass(frozen=True)
class Row:
    """One request of the packed batch.

    ``start : stop`` are its tokens in the packed axis, ``pages`` (int64 array) its pages in order, ``length`` the
    tokens it will have cached after this step. ``theta_nats`` > 0 only if this row may be pruned, and then ``free``
    (int64 array) are the indices in ``pages`` of full, sealed, unprotected ones. The same on ``device`` is made on
    first use: the kernels of a GPU take all rows at once and ask for none of it.
    """

    start: int
    stop: int
    context: int
    length: int
    pages: IntArray
    theta_nats: float
    free: IntArray
    device: torch.device

    @cached_property
    def table(self) -> torch.Tensor:
        """``pages`` as an int64 tensor."""
        return torch.from_numpy(self.pages).to(self.device)

    @cached_property
    def candidates(self) -> torch.Tensor:
        """``free`` as an int64 tensor."""
        return torch.from_numpy(self.free).to(self.device)

    @cached_property
    def fixed(self) -> torch.Tensor:
        """The indices that are not in ``free``, of a row that may be pruned; int64 tensor."""
        if self.theta_nats == 0.0:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        return torch.from_numpy(np.setdiff1d(np.arange(self.pages.shape[0]), self.free)).to(self.device)


@dataclass(frozen=True, slots=True)
class PrunedRows:
    """The n rows with a positive budget, ragged page lists padded to rectangles.

    Parameters
    ----------
    rows : int64 array, shape (n,)
        Their index in the batch.
    tokens : int64 tensor, shape (n,)
        Their place in the packed axis.
    length, n_pages, fixed_tokens : int64 array, shape (n,)
        Tokens cached after this step; pages; tokens in fixed pages.
    theta_nats : FloatArray, shape (n,)
    candidates : int64 tensor, shape (S,)
        Page ids of all candidates, row after row.
    candidate_row, candidate_at : int64 array, shape (S,)
        Row (0..n-1) and column of each candidate in ``padded``.
    padded : int64 tensor, shape (n, C)
        Candidate page ids, padded with the row's first one.
    n_candidates : int64 array, shape (n,)
    fixed : int64 tensor, shape (n, F)
        Page ids of the fixed pages in order, padded with the row's first one.
    fixed_valid : bool tensor, shape (n, F * page_tokens)
        True for written slots of fixed pages (padding is False).
    """

    rows: IntArray
    tokens: torch.Tensor
    length: IntArray
    n_pages: IntArray
    fixed_tokens: IntArray
    theta_nats: FloatArray
    candidates: torch.Tensor
    candidate_row: IntArray
    candidate_at: IntArray
    padded: torch.Tensor
    n_candidates: IntArray
    fixed: torch.Tensor
    fixed_valid: torch.Tensor

    @classmethod
    def of(cls, rows: list[Row], page_tokens: int) -> PrunedRows:
        """Lay out the rows whose budget is positive (at least one)."""
        index = [r for r, row in enumerate(rows) if row.theta_nats > 0.0]
        mine = [rows[r] for r in index]
        device = mine[0].table.device

        def pad(lists: list[torch.Tensor]) -> torch.Tensor:
            width = max(x.shape[0] for x in lists)
            return torch.stack([torch.cat([x, x[:1].expand(width - x.shape[0])]) for x in lists])

        count = np.array([row.candidates.shape[0] for row in mine], np.int64)
        length = np.array([row.length for row in mine], np.int64)
        n_fixed = np.array([row.fixed.shape[0] for row in mine], np.int64)
        fixed_tokens = (n_fixed - 1) * page_tokens + (length - 1) % page_tokens + 1  # the page being written is last
        fixed = pad([row.table[row.fixed] for row in mine])
        slot = torch.arange(fixed.shape[1] * page_tokens, device=device)
        return cls(
            rows=np.array(index, np.int64),
            tokens=torch.tensor([row.start for row in mine], device=device),
            length=length,
            n_pages=np.array([row.table.shape[0] for row in mine], np.int64),
            fixed_tokens=fixed_tokens,
            theta_nats=np.array([row.theta_nats for row in mine]),
            candidates=torch.cat([row.table[row.candidates] for row in mine]),
            candidate_row=np.repeat(np.arange(len(mine)), count),
            candidate_at=np.concatenate([np.arange(n) for n in count]),
            padded=pad([row.table[row.candidates] for row in mine]),
            n_candidates=count,
            fixed=fixed,
            fixed_valid=slot < torch.from_numpy(fixed_tokens).to(device).unsqueeze(1),
        )


def rows_plan(
    context: IntArray,
    table: npt.NDArray[np.int32],
    *,
    n_tokens: int = 1,
    shown: int = 1,
    theta_nats: npt.ArrayLike = 0.0,
    samples: bool = True,
) -> StepPlan:
    """Return the plan of R rows that run ``n_tokens`` tokens each and show the logits of the last ``shown``.

    Parameters
    ----------
    context : IntArray, shape (R,)
        Tokens cached before.
    table : int32 array, shape (R, P)
        Page ids.
    n_tokens, shown : int
    theta_nats : array, shape (R,), or float
    samples : bool
        False shows no logits, and prunes nothing.
    """
    rows, none = np.arange(context.shape[0]), np.empty(0, np.int64)
    return StepPlan(
        step=0,
        now_s=0.0,
        ids=rows,
        slots=rows,
        context=context,
        n_tokens=np.full_like(rows, n_tokens),
        samples=np.full(rows.shape, samples),
        greedy=np.ones(rows.shape, np.bool_),
        theta_nats=np.full(rows.shape, theta_nats, np.float64),
        n_draft=np.full_like(rows, shown - 1),
        paused=none,
        preempted=none,
        rejected=(),
        block_table=table,
        allocated=np.empty((0, 3), np.int32),
    )


def single_row_plan(
    context: int, n_tokens: int, pages: Sequence[int], *, theta_nats: float = 0.0, samples: bool = True
) -> StepPlan:
    """Return the plan of one request that runs ``n_tokens`` tokens after ``context`` cached ones on the given pages."""
    table = np.asarray(pages, np.int32)[None]
    return rows_plan(np.array([context]), table, n_tokens=n_tokens, theta_nats=theta_nats, samples=samples)
