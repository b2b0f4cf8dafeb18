"""From a step result back to slots: whose tokens were accepted, who is finished, which pages may be shared."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import Finish, FinishReason, IntArray, StepPlan, StepResult
from entropic_ctl.slots import PageTable, SlotTable

__all__ = ["Outcome", "limit_finish", "match_tokens", "publish_prompts"]


class Outcome(NamedTuple):
    """What a step result meant: who left, the slot of each accepted token, the slots that became free.

    ``token_rows`` indexes ``StepResult.token_ids`` (tokens of requests cancelled meanwhile are left out; None: all of
    them), and ``token_slots[i]`` is the slot of that token. ``distinct`` says that no slot occurs twice for sure.
    """

    finished: tuple[Finish, ...]
    token_rows: IntArray | None
    token_slots: IntArray
    freed: IntArray
    distinct: bool = False


def match_tokens(plan: StepPlan, result: StepResult, table: SlotTable) -> tuple[IntArray, IntArray]:
    """Map accepted tokens to slots when they are not simply the sampling rows in order.

    Parameters
    ----------
    plan, result : StepPlan, StepResult
        The same step's.
    table : SlotTable

    Returns
    -------
    rows, slots : IntArray, shape (K,)
        Positions in ``result.token_ids`` and their slots, without requests cancelled since the plan.

    Raises
    ------
    BadInputError
        If a token belongs to a request that was not sampled, a sampled one got neither a token nor a finish, or one
        got more tokens than were drafted plus one.
    """
    sampled = dict(zip(plan.ids[plan.samples].tolist(), plan.slots[plan.samples].tolist(), strict=True))
    tokens = result.token_ids.tolist()
    for request_id in tokens:
        if request_id not in sampled:
            raise BadInputError(
                "token for a request that was not sampled",
                where="StepResult",
                field="token_ids",
                value=request_id,
                allowed="ids of the plan's sampling rows",
            )
    if plan.n_draft.any():
        most = dict(zip(plan.ids.tolist(), (plan.n_draft + 1).tolist(), strict=True))
        for request_id, count in Counter(tokens).items():
            if count > most[request_id]:
                raise BadInputError(
                    f"{count} tokens for request {request_id}",
                    where="StepResult",
                    field="token_ids",
                    value=request_id,
                    allowed=f"at most {most[request_id]}: those drafted and one",
                )
    excused = set(tokens) | {finish.id for finish in result.finished}
    for request_id, slot in sampled.items():
        if request_id not in excused and table.id[slot] == request_id:
            raise BadInputError(
                "a sampled request got neither a token nor a finish",
                where="StepResult",
                field="token_ids",
                value=request_id,
                remedy="report its token, or a Finish with the reason",
            )
    slots = np.array([sampled[request_id] for request_id in tokens], np.int64)
    rows = np.flatnonzero(table.id[slots] == result.token_ids)
    return rows, slots[rows]


def limit_finish(table: SlotTable, slot: int, capacity: int) -> Finish:
    """Return why a request that reached ``stop_at`` ends: its own limit, or the capacity.

    Parameters
    ----------
    table : SlotTable
    slot : int
    capacity : int
        KV tokens one request alone can have.
    """
    request_id = int(table.id[slot])
    if not table.cut[slot]:
        return Finish(request_id, FinishReason.LENGTH)
    detail = (
        f"stopped after {int(table.limit[slot])} tokens: with a prompt of {int(table.prompt[slot])} the capacity of "
        f"{capacity} KV tokens is used up"
    )
    return Finish(request_id, FinishReason.CAPACITY, detail)


def publish_prompts(table: SlotTable, pages: PageTable, slots: IntArray, before: IntArray) -> None:
    """Make prompt pages that became full in this step findable by their hash.

    Parameters
    ----------
    table, pages : SlotTable, PageTable
    slots : IntArray, shape (R,)
    before : IntArray, shape (R,)
        ``cached`` of each slot before the step.
    """
    page = pages.page_tokens
    for slot, was in zip(slots.tolist(), before.tolist(), strict=True):
        hashes = table.hashes.get(slot, ())
        for index in range(was // page, min(int(table.cached[slot]) // page, len(hashes))):
            pages.pool.publish(int(pages.view[slot, index]), hashes[index])
