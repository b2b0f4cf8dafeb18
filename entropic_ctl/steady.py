"""The two plans in which nothing has to be decided, as single passes over the rows.

Most iterations of an engine decide nothing: either the same decode rows take one more step (:func:`advance`), or
somebody came or went but every live row can have its seat, its tokens and its pages (:func:`seat_all`). Both are
special cases of the rules in :mod:`entropic_ctl.batching` and give what those would give; where they do not apply they
change nothing and say so. Each has a NumPy reference and a compiled twin.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from entropic_ctl.compiled import compiled, faster
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["Rows", "accept", "advance", "seat_all"]

Bools = npt.NDArray[np.bool_]
Pages = npt.NDArray[np.int32]


class Rows(NamedTuple):
    """Row columns of a plan in which every live row runs, and the pages it took (slot, index, page)."""

    ids: IntArray
    context: IntArray
    n_tokens: IntArray
    samples: Bools
    greedy: Bools
    theta: FloatArray
    allocated: Pages
    decode_only: bool


def _take(
    slots: IntArray, counts: IntArray, held: IntArray, table: Pages, stack: Pages, free: int, refs: Pages
) -> Pages:
    """Give ``counts[i]`` pages from the top of the stack to slot ``slots[i]``; return the triples."""
    total = int(counts.sum())
    log: Pages = np.empty((total, 3), np.int32)
    log[:, 0] = np.repeat(slots, counts)
    log[:, 1] = np.arange(total) + np.repeat(held[slots] - (np.cumsum(counts) - counts), counts)
    log[:, 2] = stack[free - total : free][::-1]
    table[log[:, 0], log[:, 1]] = log[:, 2]
    refs[log[:, 2]] = 1
    held[slots] += counts
    return log


def _advance_columns(
    slots: IntArray,
    before: IntArray,
    step: int,
    page: int,
    held: IntArray,
    table: Pages,
    stack: Pages,
    free: int,
    refs: Pages,
    last_run: IntArray,
    theta: FloatArray,
) -> tuple[bool, IntArray, FloatArray, Pages]:
    """Let these decode rows take one more step, with a new page for those that filled their last one.

    Parameters
    ----------
    slots, before : IntArray, shape (R,)
        The rows, and their contexts in the plan before.
    step, page : int
        Iteration, tokens per page.
    held : IntArray, shape (max_live,)
        Pages held by slot; changed in place, like ``table``, ``refs`` and ``last_run``.
    table : int32 array, shape (max_live, max_pages)
    stack : int32 array
        Free pages, the top at ``free - 1``.
    refs : int32 array
    theta : FloatArray, shape (max_live,)

    Returns
    -------
    done : bool
        False if free pages are short; nothing was changed then.
    context : IntArray, shape (R,)
    budget : FloatArray, shape (R,)
    allocated : int32 array, shape (K, 3)
    """
    context = before + 1
    more = (context == held[slots] * page).astype(np.int64)
    if int(more.sum()) > free:
        return False, context, theta[slots], np.empty((0, 3), np.int32)
    last_run[slots] = step
    return True, context, theta[slots], _take(slots, more, held, table, stack, free, refs)


@compiled
def _advance_loop(
    slots: IntArray,
    before: IntArray,
    step: int,
    page: int,
    held: IntArray,
    table: Pages,
    stack: Pages,
    free: int,
    refs: Pages,
    last_run: IntArray,
    theta: FloatArray,
) -> tuple[bool, IntArray, FloatArray, Pages]:
    """Twin of :func:`_advance_columns`."""
    rows, full = slots.shape[0], 0
    context, budget = np.empty(rows, np.int64), np.empty(rows, np.float64)
    for r in range(rows):
        context[r], budget[r] = before[r] + 1, theta[slots[r]]
        full += context[r] == held[slots[r]] * page
    if full > free:
        return False, context, budget, np.empty((0, 3), np.int32)
    log = np.empty((full, 3), np.int32)
    taken = 0
    for r in range(rows):
        slot = slots[r]
        last_run[slot] = step
        if context[r] == held[slot] * page:
            taken += 1
            new = stack[free - taken]
            table[slot, held[slot]], refs[new] = new, 1
            log[taken - 1, 0], log[taken - 1, 1], log[taken - 1, 2] = slot, held[slot], new
            held[slot] += 1
    return True, context, budget, log


advance = faster(_advance_loop, _advance_columns)


def _seat_all_columns(
    live: IntArray,
    limits: tuple[int, int, int, int, int],
    ids: IntArray,
    prompt: IntArray,
    known: IntArray,
    cached: IntArray,
    greedy: Bools,
    waits: tuple[IntArray, IntArray, Bools],
    held: IntArray,
    table: Pages,
    stack: Pages,
    free: int,
    refs: Pages,
    theta: FloatArray,
) -> tuple[bool, Rows]:
    """Let every live row run with all the tokens it may have, if that needs no decision.

    It needs none if tokens and free pages suffice for all (pages for everything known, as a starting row wants them)
    and no row is overdue or has a protected seat.

    Parameters
    ----------
    live : IntArray, shape (L,)
        Slots, at most ``max_batch``.
    limits : tuple of int
        Iteration, tokens per page, token budget, prefill chunk, waiting limit W.
    ids, prompt, known, cached, greedy : arrays, shape (max_live,)
        Columns of the slot table.
    waits : tuple of arrays, shape (max_live,)
        ``last_run`` (changed in place), ``protected_until``, ``owed``.
    held, table, stack, free, refs, theta
        As in :func:`advance`.

    Returns
    -------
    done : bool
        False if something has to be decided; nothing was changed then.
    rows : Rows
    """
    step, page, budget, chunk, limit = limits
    last_run, protected_until, owed = waits
    need = known[live] - cached[live]
    n = np.minimum(need, chunk)
    lacking = np.maximum(0, -(-known[live] // page) - held[live])
    context = cached[live]
    samples = n == need
    decode = (n == 1) & (context >= prompt[live])
    calm = not (owed[live].any() or (protected_until[live] > step).any() or (step - 1 - last_run[live] >= limit).any())
    done = calm and int(n.sum()) <= budget and int(lacking.sum()) <= free
    log: Pages = np.empty((0, 3), np.int32)
    if done:
        last_run[live] = step
        log = _take(live, np.maximum(0, -(-(context + n) // page) - held[live]), held, table, stack, free, refs)
    budgets = np.where(decode, theta[live], 0.0)
    return done, Rows(ids[live], context, n, samples, greedy[live], budgets, log, bool((decode & samples).all()))


@compiled
def seat_all_loop(
    live: IntArray,
    limits: tuple[int, int, int, int, int],
    ids: IntArray,
    prompt: IntArray,
    known: IntArray,
    cached: IntArray,
    greedy: Bools,
    waits: tuple[IntArray, IntArray, Bools],
    held: IntArray,
    table: Pages,
    stack: Pages,
    free: int,
    refs: Pages,
    theta: FloatArray,
) -> tuple[bool, Rows]:
    """Twin of :func:`_seat_all_columns`."""
    step, page, budget, chunk, limit = limits
    last_run, protected_until, owed = waits
    rows = live.shape[0]
    row_ids, context, n = np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows, np.int64)
    samples, row_greedy, budgets = np.empty(rows, np.bool_), np.empty(rows, np.bool_), np.empty(rows, np.float64)
    done, decode_only = True, True
    tokens = lacking = more = 0
    for r in range(rows):
        slot = live[r]
        need = known[slot] - cached[slot]
        row_ids[r], context[r], n[r], row_greedy[r] = ids[slot], cached[slot], min(need, chunk), greedy[slot]
        samples[r] = n[r] == need
        decode = n[r] == 1 and context[r] >= prompt[slot]
        budgets[r] = theta[slot] if decode else 0.0
        decode_only &= decode and samples[r]
        done &= not (owed[slot] or protected_until[slot] > step or step - 1 - last_run[slot] >= limit)
        tokens += n[r]
        lacking += max(0, -(-known[slot] // page) - held[slot])
        more += max(0, -(-(context[r] + n[r]) // page) - held[slot])
    done &= tokens <= budget and lacking <= free
    if not done:
        more = 0
    log = np.empty((more, 3), np.int32)
    if done:
        taken = 0
        for r in range(rows):
            slot = live[r]
            last_run[slot] = step
            for index in range(held[slot], -(-(context[r] + n[r]) // page)):
                taken += 1
                new = stack[free - taken]
                table[slot, index], refs[new] = new, 1
                log[taken - 1, 0], log[taken - 1, 1], log[taken - 1, 2] = slot, index, new
                held[slot] += 1
    return done, Rows(row_ids, context, n, samples, row_greedy, budgets, log, decode_only)


seat_all = faster(seat_all_loop, _seat_all_columns)


def _accept_columns(
    slots: IntArray,
    ids: IntArray,
    context: IntArray,
    n_tokens: IntArray,
    samples: Bools,
    tokens: IntArray,
    table_ids: IntArray,
    cached: IntArray,
    known: IntArray,
    owed: Bools,
    stop_at: IntArray,
) -> tuple[bool, IntArray, IntArray]:
    """Book one token for each sampling row, if that is what happened and nobody left meanwhile.

    Parameters
    ----------
    slots, ids, context, n_tokens, samples : arrays, shape (R,)
        Columns of the plan.
    tokens : IntArray
        Ids of the accepted tokens.
    table_ids, cached, known, owed, stop_at : arrays, shape (max_live,)
        Columns of the slot table; ``cached``, ``known`` and ``owed`` are changed in place.

    Returns
    -------
    done : bool
        False if the tokens are not the sampling rows in order, or a row was cancelled; nothing was changed then.
    sampling : IntArray
        Slots of the sampling rows.
    full : IntArray
        Slots that reached their limit.
    """
    sampling = slots[samples]
    if not (np.array_equal(table_ids[slots], ids) and np.array_equal(tokens, ids[samples])):
        return False, sampling[:0], sampling[:0]
    cached[slots] = context + n_tokens
    known[sampling] += 1
    owed[sampling] = False
    return True, sampling, sampling[known[sampling] >= stop_at[sampling]]


@compiled
def _accept_loop(
    slots: IntArray,
    ids: IntArray,
    context: IntArray,
    n_tokens: IntArray,
    samples: Bools,
    tokens: IntArray,
    table_ids: IntArray,
    cached: IntArray,
    known: IntArray,
    owed: Bools,
    stop_at: IntArray,
) -> tuple[bool, IntArray, IntArray]:
    """Twin of :func:`_accept_columns`."""
    rows, count, full = slots.shape[0], 0, 0
    sampling = np.empty(tokens.shape[0], np.int64)
    done = True
    for r in range(rows):
        done &= table_ids[slots[r]] == ids[r]
        if samples[r]:
            if count < tokens.shape[0] and tokens[count] == ids[r]:
                sampling[count] = slots[r]
                full += known[slots[r]] + 1 >= stop_at[slots[r]]
            else:
                done = False
            count += 1
    if not done or count != tokens.shape[0]:
        return False, sampling[:0], sampling[:0]
    ended = np.empty(full, np.int64)
    full = 0
    for r in range(rows):
        slot = slots[r]
        cached[slot] = context[r] + n_tokens[r]
        if samples[r]:
            known[slot] += 1
            owed[slot] = False
            if known[slot] >= stop_at[slot]:
                ended[full] = slot
                full += 1
    return True, sampling, ended


accept = faster(_accept_loop, _accept_columns)
