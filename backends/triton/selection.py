"""Which pages to read, chosen on the device without a sort (the reference is ``entropic_ctl.pruning.select``).

Per query head, pages are dropped in ascending order of their upper bound while

    sum over dropped of exp(upper)  <=  (e^theta - 1) * sum over kept of exp(lower).

Left side minus right side grows with every page dropped, so the longest prefix is found by bisection: first on the bit
pattern of the largest weight that may be dropped (31 steps over values in registers), then, among pages of exactly the
next weight, on the place in the block table. The order is the reference's up to rounding of the weights to float32, so
the kept sets are nested in theta; budgets are shrunk and weights enlarged to cover that rounding. A KV head reads the
union of what its query heads need; the list is compacted in place order. Nothing here is looked at by the host.

Rounding, u = 2^-24. Weights are exp(bound - top): subtraction, product by log2 e and a 2^-22 exponential are off by
less than 1e-5 for bounds within 60 nats of the top; further below an upper bound counts as 1e-26 (e^-60) and a lower
one as 0. A sum of P terms is off by at most P u relative; the bisection's one signed sum needs twice that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backends.triton.attention import PageList
from backends.triton.launch import launch
from backends.triton.shapes import block_size
from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.select import heads_per_group

__all__ = ["MAX_PAGES", "budget_ratio", "choose_pages"]

MAX_PAGES = 8192
"""Most pages per row: what fits into the registers of one program (131,072 tokens at 16 tokens per page)."""


@triton.jit
def page_weights(lower, upper, valid, fixed):
    """Return (top, upper weights rounded up, lower weights rounded down, pages that may be dropped)."""
    known = valid & (upper < float("inf")) & (upper > float("-inf"))
    top = tl.max(tl.where(known, upper, float("-inf")), axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    up = tl.where(known, upper - top, -60.0)
    high = tl.where(valid, tl.maximum(tl.exp(tl.minimum(up, 0.0)) * 1.00001, 1e-26), 0.0)
    has_lower = valid & (lower < float("inf")) & (lower > float("-inf"))
    low = tl.where(has_lower, lower - top, -100.0)
    small = tl.where(low > -60.0, tl.exp(tl.minimum(low, 80.0)) * 0.99999, 0.0)
    return top, high, small, valid & ~fixed & (upper < float("inf"))


@triton.jit
def _choose(
    lower_ptr,  # float32 (n, H, P)
    upper_ptr,  # float32 (n, H, P)
    ratio_ptr,  # float32 (n,): budget_ratio
    candidate_ptr,  # uint8 (n, P): 1 where a page may be left out
    length_ptr,  # int32 (n,)
    need_ptr,  # int8 (n, H, P): 1 where the query head needs the page
    n_heads,
    n_pages,
    PAGE: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Mark the pages one query head needs."""
    row = tl.program_id(0).to(tl.int64)
    base = (row * n_heads + tl.program_id(1)) * n_pages
    p = tl.arange(0, BLOCK_P)
    used = (tl.load(length_ptr + row) + PAGE - 1) // PAGE
    valid = p < used
    fixed = tl.load(candidate_ptr + row * n_pages + p, mask=valid, other=0) == 0
    lower = tl.load(lower_ptr + base + p, mask=valid, other=float("-inf"))
    upper = tl.load(upper_ptr + base + p, mask=valid, other=float("-inf"))
    _, high, small, free = page_weights(lower, upper, valid, fixed)
    slack = 3.0 * used * 5.9604644775390625e-08
    cost = high * (1.0 + slack)
    worth = small * (tl.load(ratio_ptr + row) * (1.0 - slack))
    bits = high.to(tl.int32, bitcast=True)

    below = tl.zeros([], tl.int32)  # everything lighter than this may go
    beyond = tl.full([], 0x3F800200, tl.int32)  # more than any weight
    while beyond - below > 1:
        middle = below + (beyond - below) // 2
        excess = tl.sum(tl.where(free & (bits < middle), cost, -worth), axis=0)
        below = tl.where(excess <= 0, middle, below)
        beyond = tl.where(excess <= 0, beyond, middle)
    some = tl.zeros([], tl.int32)  # of the pages of exactly that weight, the first ones may go too
    all_of_them = tl.full([], 0, tl.int32) + used + 1
    while all_of_them - some > 1:
        middle = some + (all_of_them - some) // 2
        dropped = free & ((bits < below) | ((bits == below) & (p < middle)))
        excess = tl.sum(tl.where(dropped, cost, -worth), axis=0)
        some = tl.where(excess <= 0, middle, some)
        all_of_them = tl.where(excess <= 0, all_of_them, middle)
    dropped = free & ((bits < below) | ((bits == below) & (p < some)))
    tl.store(need_ptr + base + p, tl.where(dropped, 0, 1).to(tl.int8), mask=valid)


@triton.jit
def _compact(
    lower_ptr,  # float32 (n, H, P)
    upper_ptr,  # float32 (n, H, P)
    need_ptr,  # int8 (n, H, P)
    norm_ptr,  # float32 (n, n_kv_heads, P), or None: largest key norm of each page
    length_ptr,  # int32 (n,)
    index_ptr,  # int32 (n, n_kv_heads, P)
    count_ptr,  # int32 (n, n_kv_heads)
    mass_ptr,  # float32 (n, H)
    log_pruned_ptr,  # float32 (n, H)
    key_norm_ptr,  # float32 (n, n_kv_heads), or None: largest over the kept pages
    n_kv_heads,
    n_pages,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Unite what the query heads of a KV head need, list it, and certify what each head loses."""
    row = tl.program_id(0).to(tl.int64)
    both = row * n_kv_heads + tl.program_id(1)
    p = tl.arange(0, BLOCK_P)
    used = (tl.load(length_ptr + row) + PAGE - 1) // PAGE
    valid = p < used
    kept = tl.zeros([BLOCK_P], tl.int32)
    for g in range(GROUP):
        kept |= tl.load(need_ptr + (both * GROUP + g) * n_pages + p, mask=valid, other=0).to(tl.int32)
    place = tl.cumsum(kept, axis=0) - 1
    tl.store(index_ptr + both * n_pages + place, p, mask=kept > 0)
    tl.store(count_ptr + both, tl.sum(kept, axis=0))
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + both * n_pages + p, mask=valid & (kept > 0), other=0.0)
        tl.store(key_norm_ptr + both, tl.max(norm, axis=0))
    slack = 3.0 * used * 5.9604644775390625e-08 + 1e-6
    for g in range(GROUP):
        base = (both * GROUP + g) * n_pages
        lower = tl.load(lower_ptr + base + p, mask=valid, other=float("-inf"))
        upper = tl.load(upper_ptr + base + p, mask=valid, other=float("-inf"))
        top, high, small, _ = page_weights(lower, upper, valid, valid & (kept > 0))
        lost = tl.sum(tl.where(kept > 0, 0.0, high), axis=0) * (1.0 + slack)
        rest = tl.sum(tl.where(kept > 0, small, 0.0), axis=0) * (1.0 - slack)
        mass = tl.where(lost > 0, tl.minimum(lost / (lost + rest) * 1.000001, 1.0), 0.0)
        log_lost = tl.log(lost) + top
        log_lost += 5e-7 * (1.0 + tl.abs(log_lost) + tl.abs(top))
        tl.store(mass_ptr + both * GROUP + g, mass)
        tl.store(log_pruned_ptr + both * GROUP + g, tl.where(lost > 0, log_lost, float("-inf")))


def budget_ratio(theta_nats: torch.Tensor) -> torch.Tensor:
    """Return e^theta - 1 at most, float32: pruned over kept mass that a budget of theta nats allows.

    Once per step. Certificates are float32 and come out up to 5e-6 of the mass too large, which near 1 is many nats:
    what is allowed is the ratio of a mass smaller by 6e-6 of it, at most 1.7e5.
    """
    theta = theta_nats.double()
    mass = -torch.expm1(-theta)
    return (mass * (1.0 - 6e-6) / (torch.exp(-theta) + mass * 6e-6)).float()


def choose_pages(
    lower: torch.Tensor,
    upper: torch.Tensor,
    ratio: torch.Tensor,
    candidates: torch.Tensor,
    lengths: torch.Tensor,
    n_kv_heads: int,
    page_tokens: int,
    *,
    norms: torch.Tensor | None = None,
) -> tuple[PageList, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the pages each KV head must read and what each query head can lose by it.

    Parameters
    ----------
    lower, upper : float32 tensor, shape (n, H, P), contiguous
        Bounds on each page's log-mass, nats; ``upper = inf`` marks an unknown page, which is kept.
    ratio : float32 tensor, shape (n,)
        :func:`budget_ratio` of each row's budget; 0 keeps every page.
    candidates : uint8 tensor, shape (n, P), contiguous
        1 where a page may be left out; at least one page of each row may not.
    lengths : int32 tensor, shape (n,)
    n_kv_heads, page_tokens : int
    norms : float32 tensor, shape (n, n_kv_heads, P), optional
        Largest key norm of each page.

    Returns
    -------
    pages : PageList
        Capacity P.
    mass, log_pruned : float32 tensor, shape (n, H)
        Bound on the pruned softmax mass; ln U of the dropped pages, ``-inf`` if none.
    key_norm : float32 tensor, shape (n, n_kv_heads), or None
        Largest of ``norms`` over the kept pages.

    Raises
    ------
    BadInputError
        If rows may have more than :data:`MAX_PAGES` pages.
    """
    n, n_heads, capacity = lower.shape
    group = heads_per_group(n_heads, n_kv_heads)
    if capacity > MAX_PAGES:
        raise BadInputError(
            "more pages per row than the selection holds",
            field="upper",
            value=capacity,
            allowed=f"at most {MAX_PAGES}",
            remedy="use larger pages (engine.page_tokens)",
        )
    device = lower.device
    need = torch.empty((n, n_heads, capacity), dtype=torch.int8, device=device)
    block = max(32, block_size(capacity))
    warps = max(1, min(16, block // 256))
    launch(
        _choose,
        (n, n_heads),
        num_warps=warps,
        lower_ptr=lower,
        upper_ptr=upper,
        ratio_ptr=ratio,
        candidate_ptr=candidates,
        length_ptr=lengths,
        need_ptr=need,
        n_heads=n_heads,
        n_pages=capacity,
        PAGE=page_tokens,
        BLOCK_P=block,
    )
    index = torch.empty((n, n_kv_heads, capacity), dtype=torch.int32, device=device)
    count = torch.empty((n, n_kv_heads), dtype=torch.int32, device=device)
    mass, log_pruned = torch.empty((2, n, n_heads), dtype=torch.float32, device=device)
    key_norm = None if norms is None else torch.empty((n, n_kv_heads), dtype=torch.float32, device=device)
    launch(
        _compact,
        (n, n_kv_heads),
        num_warps=warps,
        lower_ptr=lower,
        upper_ptr=upper,
        need_ptr=need,
        norm_ptr=norms,
        length_ptr=lengths,
        index_ptr=index,
        count_ptr=count,
        mass_ptr=mass,
        log_pruned_ptr=log_pruned,
        key_norm_ptr=key_norm,
        n_kv_heads=n_kv_heads,
        n_pages=capacity,
        GROUP=group,
        PAGE=page_tokens,
        BLOCK_P=block,
    )
    return PageList(index, count), mass, log_pruned, key_norm
