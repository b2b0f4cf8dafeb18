"""Theorems `wait` and `queue`: the longest wait of a live request, and stability of the queue below a capacity.

F = min(B, N, floor(pages / pages of the longest request)) rows surely run together. ``wait``: no live request is left
out for more than W + floor((N-1) h / F) iterations in a row (W if N <= F), h = max(q, P), P the longest (re)computation
in iterations. ``queue``: with c = min(prefill_chunk, max_batch_tokens - B + 1) the work

    sum over requests of  outputs left + F (1/c + 1/page) * prompt tokens left   (no 1/page if all N rows fit the pool)

falls by F or more in each iteration with F live requests, whatever the policy; below the capacity a Poisson stream
brings less (Foster-Lyapunov). Where pages may be short, what preemptions make a request compute again must be bounded
by an assumption: it grows with the number of live requests. Source: ours.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from entropic_ctl.config import EngineConfig
from proofs.check.base import Assumptions, Claim, Hints, Subject, decimal
from proofs.enclosures import shown

__all__ = ["Seats", "capacity", "claims", "longest_computation", "seats", "wait_steps", "work_seconds"]


class Seats(NamedTuple):
    """What the pool surely holds.

    Parameters
    ----------
    sure : int
        F: rows that run together whatever their lengths.
    tokens : int
        K: most KV tokens of one request.
    pages : int
        Most pages of one request.
    short : bool
        The N live requests may be more than the pool holds.
    """

    sure: int
    tokens: int
    pages: int
    short: bool


def seats(engine: EngineConfig, longest_tokens: int) -> Seats:
    """Count what surely fits; a request holds at most prompt + output - 1 tokens, and never more than it can alone.

    Parameters
    ----------
    engine : EngineConfig
    longest_tokens : int
        Prompt and output together, of the longest request.
    """
    page = engine.page_tokens
    tokens = max(1, min(longest_tokens - 1, engine.pages * page, engine.max_context))
    pages = -(-tokens // page)
    sure = min(engine.max_batch, engine.max_live, engine.pages // pages)
    return Seats(sure, tokens, pages, engine.max_live * pages > engine.pages)


def longest_computation(engine: EngineConfig, found: Seats) -> int:
    """Return P: most iterations in which a row among the first F computes all it knows.

    It gets at least one token each time: K. If every seated row fits (F = B or N), rows ahead in the order stay ahead,
    the first of them that still computes gets min(chunk, max_batch_tokens - B + 1) tokens, or all up to the end of a
    page where pages are short; so each needs P1 such iterations, F rows F P1, and one in which the order is made up.

    Parameters
    ----------
    engine : EngineConfig
    found : Seats
    """
    share = min(engine.prefill_chunk, engine.max_batch_tokens - engine.max_batch + 1)
    alone = -(-found.tokens // share) + (found.pages - 1 if found.short else 0)
    if found.sure < min(engine.max_batch, engine.max_live):
        return found.tokens
    return min(found.tokens, found.sure * alone + 1)


def wait_steps(engine: EngineConfig, found: Seats, wait_limit_steps: int, quantum_steps: int) -> int:
    """Return the bound on iterations in a row in which a live request is left out.

    Parameters
    ----------
    engine : EngineConfig
    found : Seats
    wait_limit_steps, quantum_steps : int
        W and q.
    """
    others = engine.max_live - 1
    if others < found.sure:
        return wait_limit_steps
    return wait_limit_steps + others * max(quantum_steps, longest_computation(engine, found)) // found.sure


def work_seconds(engine: EngineConfig, found: Seats, given: Assumptions) -> Fraction:
    """Return the mean seconds of work that one request brings, as the Lyapunov function counts it.

    Where pages may be short this holds only if ``given.recomputed_tokens`` bounds what any request computes again.

    Parameters
    ----------
    engine : EngineConfig
    found : Seats
    given : Assumptions
    """
    step_s, token_s = Fraction(given.step_s), Fraction(given.token_s)
    tokens = Fraction(given.prompt_tokens) + (Fraction(given.recomputed_tokens) if found.short else 0)
    per_token = Fraction(1, min(engine.prefill_chunk, engine.max_batch_tokens - engine.max_batch + 1))
    if found.short:
        per_token += Fraction(1, engine.page_tokens)
    return step_s * (Fraction(given.output_tokens) / found.sure + per_token * tokens) + token_s * tokens


def capacity(engine: EngineConfig, given: Assumptions) -> Fraction:
    """Return the certified capacity of ``engine`` under the assumptions ``given``, requests/s: 1 / work_seconds."""
    return 1 / work_seconds(engine, seats(engine, given.longest_tokens), given)


def claims(subject: Subject, hints: Hints) -> list[Claim]:  # noqa: ARG001
    """Decide `wait` and `queue`."""
    engine, law, given = subject.config.engine, subject.config.loop.scheduling.config, subject.assumptions
    found = seats(engine, given.longest_tokens)
    bound = wait_steps(engine, found, law.wait_limit_steps, law.quantum_steps)
    rows = min(engine.max_batch, engine.max_live)
    numbers = {
        "wait_steps": bound,
        "rows_together": found.sure,
        "computation_steps": longest_computation(engine, found),
    }
    reason = (
        f"no live request is left out for more than {bound} iterations in a row: W = {law.wait_limit_steps}, at most "
        f"{engine.max_live - 1} others before it, {found.sure} at a time"
    )
    if found.sure < rows:
        reason += (
            f"; the pool surely holds only {found.sure} of {rows} rows of {found.tokens} tokens "
            f"(engine.pages = {rows * found.pages} would hold all)"
        )
    return [Claim("wait", "proved", reason, numbers), _queue(engine, found, given)]


def _queue(engine: EngineConfig, found: Seats, given: Assumptions) -> Claim:
    work = work_seconds(engine, found, given)
    load = Fraction(given.rate_per_s) * work
    numbers = {
        "rows_together": found.sure,
        "work_s": decimal(work, up=True),
        "load": decimal(load, up=True),
        "capacity_per_s": decimal(1 / work, up=False),
        "drift_s": decimal((load - 1) * Fraction(given.step_s), up=True),
    }
    told = (
        f"{given.rate_per_s:.6g} requests/s (Poisson) against a certified capacity of {shown(1 / work, '.6g')}/s with "
        f"{found.sure} rows together"
    )
    why = None
    if given.rate_per_s == 0.0:
        why = (
            f"the arrivals are no Poisson stream of a known rate, and the proof covers no other (certified capacity "
            f"{shown(1 / work, '.6g')}/s); if they are one, state it: --assume rate_per_s=RATE"
        )
    elif found.short and given.recomputed_tokens == 0.0:
        why = (
            f"engine.pages = {engine.pages} may be short for max_live = {engine.max_live} requests of {found.pages} "
            "pages, and what preemptions make them compute again grows with the number of live requests: give a pool "
            f"of {engine.max_live * found.pages} pages or max_live <= {engine.pages // found.pages}, or bound it for "
            "every request: --assume recomputed_tokens=TOKENS"
        )
    elif load >= 1:
        why = f"{told}: no drift towards empty is proved (the bound is sufficient only)"
    if why is not None:
        return Claim("queue", "unknown", why, numbers)
    reason = (
        f"{told}: while {found.sure} or more requests are in the system, the work left falls by at least "
        f"{shown((1 - load) * Fraction(given.step_s), '.3g')} s per iteration on average: it is positive recurrent"
    )
    return Claim("queue", "proved", reason, numbers)
