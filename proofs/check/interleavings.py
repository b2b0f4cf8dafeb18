"""Theorem `interleavings`: every run of three requests on a four-page pool ends, and nothing is lost on the way.

The shipped batcher itself is run (:mod:`proofs.small_pool`): all arrivals, all orders a policy may want, all early ends
of text. The config gives seats, token budget, chunk, N, W and q, scaled down to a pool of four pages of two tokens.
Found at once: no deadlock (some row runs whenever something is live), no livelock (no state comes back), no leak (pages
and slots are conserved, none is held in the end), no seat left empty for nothing (work conservation over admissible
rows), and no wait beyond the bound of `wait`. Requests leave by their limit or an end of text: cancellation is not
explored. Source: ours.
"""

from __future__ import annotations

from entropic_ctl import registry
from proofs.check.base import Claim, Hints, Subject
from proofs.check.scheduling import seats, wait_steps
from proofs.small_pool import Pool, explore

__all__ = ["claims", "scaled"]

PAGE, PAGES = 2, 4
REQUESTS = ((3, 4), (2, 3), (4, 3))
"""Prompt and most output tokens: any one fits the pool, no two fit together to their ends."""


def scaled(subject: Subject) -> Pool:
    """Return the small pool of a config: tokens shrink with the page, counts are cut to what three requests can use."""
    engine, spec = subject.config.engine, subject.config.loop.scheduling
    law = registry.load("entropic_ctl.scheduling", spec.name).build(spec.config)
    batch, most = min(engine.max_batch, len(REQUESTS)), PAGE * PAGES
    budget = max(batch, min(most, PAGE * engine.max_batch_tokens // engine.page_tokens))
    chunk = max(1, min(most, PAGE * engine.prefill_chunk // engine.page_tokens))
    wait = 2 if batch == min(chunk, budget) == 1 else 3  # one row, one token at a time: the longest runs, most states
    return Pool(
        page_tokens=PAGE,
        pages=PAGES,
        max_batch=batch,
        max_batch_tokens=budget,
        prefill_chunk=chunk,
        max_live=min(engine.max_live, len(REQUESTS)),
        wait_limit_steps=min(spec.config.wait_limit_steps, wait),
        quantum_steps=min(spec.config.quantum_steps, 2),
        stateful=bool(getattr(law, "stateful", False)),
        requests=REQUESTS,
    )


def claims(subject: Subject, hints: Hints) -> list[Claim]:  # noqa: ARG001
    """Decide `interleavings`."""
    config = subject.config
    if config.engine.prefix_caching or config.speculation.draft_tokens:
        what = "engine.prefix_caching" if config.engine.prefix_caching else "speculation.draft_tokens"
        return [Claim("interleavings", "unknown", f"{what} is on: shared pages and drafts are not explored")]
    pool = scaled(subject)
    found = explore(pool)
    engine = pool.engine
    bound = wait_steps(engine, seats(engine, max(map(sum, REQUESTS))), pool.wait_limit_steps, pool.quantum_steps)
    numbers = {
        "states": found.states,
        "iterations": found.steps,
        "longest_run": found.longest,
        "longest_wait": found.longest_wait,
        "wait_bound": bound,
    }
    told = (
        f"the config scaled to a small pool (B = {pool.max_batch}, W = {pool.wait_limit_steps}, "
        f"q = {pool.quantum_steps}, chunk {pool.prefill_chunk})"
    )
    if found.fault or found.longest_wait > bound:
        why = found.fault or f"a request waits {found.longest_wait} iterations, the bound is {bound}"
        status = "unknown" if found.fault.startswith("given up") else "refuted"
        return [Claim("interleavings", status, f"{told}: {why}", numbers)]
    reason = (
        f"{told}: in all {found.states} states of three requests on {PAGES} pages every run ends within "
        f"{found.longest} iterations; no deadlock, livelock or leak, no wait above {found.longest_wait} (bound "
        f"{bound}); cancellation is not explored"
    )
    return [Claim("interleavings", "proved", reason, numbers)]
