"""What a configuration says about its load, for a certificate: rate, lengths, length of an iteration.

An iteration that computes g prompt tokens besides its sampling rows is taken to last at most ``step_s + token_s * g``:
``step_s`` is the cost model's charge for a full batch of decode rows at the longest context, ``token_s`` the largest
slope from there to an iteration with g prompt tokens, every row at the longest context. Source: ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from entropic_ctl.config import RunConfig
from sim import calibrated
from sim.arrivals import make_workload
from sim.cost import CostModel, cost_model
from sim.load import StepLoad

__all__ = ["assumed", "longest_step", "token_slope"]

_MOST_DRAWN = 20_000


def assumed(config: RunConfig, given: Collection[str] = ()) -> dict[str, float]:
    """Return assumptions by name: those a workload and a cost model can say.

    Parameters
    ----------
    config : RunConfig
        The workload is drawn as the simulator does (at most 20,000 requests); a trace is read whole.
    given : collection of str
        Names that are known otherwise and left out.

    Returns
    -------
    dict
        ``rate_per_s`` (only of a Poisson stream into one replica: what a router passes on, and every other kind of
        workload, is none), ``prompt_tokens``, ``output_tokens`` (means; the limit, an end of text only shortens it),
        ``longest_tokens``, ``step_s``, ``token_s`` (of one replica; a drafter's own time is not in them).

    Raises
    ------
    BadInputError
        If a trace or the cost model cannot be used.
    """
    work = config.workload
    if not work.replays and work.n_requests > _MOST_DRAWN:
        work = dataclasses.replace(work, n_requests=_MOST_DRAWN)
    drawn = make_workload(work, config.seed, 1, page_tokens=1)
    longest = int((drawn.prompt_tokens + drawn.limit_tokens).max())
    found: dict[str, float] = {
        "prompt_tokens": float(drawn.prompt_tokens.mean()),
        "output_tokens": float(drawn.limit_tokens.mean()),
        "longest_tokens": longest,
    }
    rate = work.mean_rate_per_s
    if work.kind == "poisson" and rate and config.cluster.replicas == 1:
        found["rate_per_s"] = rate
    if not {"step_s", "token_s"} <= set(given):
        cost: CostModel = cost_model(config.cost, config.engine.page_tokens, config.loop.pruning.config)
        if config.cost.calibrated:
            cost = calibrated.load(config, cost)
        found["step_s"] = longest_step(config, cost, longest)
        found["token_s"] = token_slope(config, cost, longest, found["step_s"])
    return {name: value for name, value in found.items() if name not in given}


def _seconds(cost: CostModel, load: StepLoad) -> float:
    """Charge a load; a fitted model without its scatter, and beyond what it was fitted to where need be."""
    fitted = getattr(cost, "fitted_s", None)
    return float(fitted(load)) if fitted is not None else float(cost.step(load).seconds)


def _context(config: RunConfig, longest_tokens: int) -> float:
    engine = config.engine
    return float(max(1, min(longest_tokens - 1, engine.pages * engine.page_tokens, engine.max_context)))


def longest_step(config: RunConfig, cost: CostModel, longest_tokens: int) -> float:
    """Return the seconds of an iteration of B decode rows, each with the longest context, dense or pruned.

    Parameters
    ----------
    config : RunConfig
    cost : CostModel
    longest_tokens : int
        Of a prompt with its output.
    """
    engine, rows = config.engine, config.engine.max_batch
    context = rows * _context(config, longest_tokens)
    tokens = min(engine.max_batch_tokens, rows * (1 + config.speculation.draft_tokens))
    dense = StepLoad(rows, tokens, rows, rows, context)
    loads = [dense]
    if config.loop.pruning.name != "off":  # every page kept: scores are read on top of all of K and V
        kept = float(rows)
        loads.append(
            dense._replace(pruned_rows=rows, pruned_context=context, pruned_kept=kept, pruned_kept_context=context)
        )
    return max(_seconds(cost, load) for load in loads)


def token_slope(config: RunConfig, cost: CostModel, longest_tokens: int, step_s: float) -> float:
    """Return the most seconds that a prompt token adds to :func:`longest_step`, in iterations with 1, 2, 4, ...

    Parameters
    ----------
    config, cost, longest_tokens
        As there.
    step_s : float
        What :func:`longest_step` returned.
    """
    engine, rows = config.engine, config.engine.max_batch
    context = _context(config, longest_tokens)
    pruned = config.loop.pruning.name != "off"
    counts = {2**i for i in range(engine.max_batch_tokens.bit_length())} | {min(rows, engine.max_batch_tokens)}
    slope = 0.0
    for g in sorted(counts | {engine.max_batch_tokens}):
        computed = g + min(rows, g)  # a row that ends its prompt computes one token besides
        load = StepLoad(
            rows,
            min(g + rows, engine.max_batch_tokens),
            rows,
            rows - 1,
            (rows - 1) * context,
            prefill_context=min(rows, g) * context,
            prefill_pairs=computed * context,
        )
        loads = [load]
        if pruned and rows > 1:
            seen = (rows - 1) * context
            kept = float(rows - 1)
            loads.append(
                load._replace(pruned_rows=rows - 1, pruned_context=seen, pruned_kept=kept, pruned_kept_context=seen)
            )
        slope = max(slope, *((_seconds(cost, one) - step_s) / g for one in loads))
    return slope
