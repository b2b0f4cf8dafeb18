"""What a replica can serve at all: one capacity formula for validation at submission and for admission later.

A request runs ``prompt + max_new - 1`` tokens through the model (the last generated token is never fed back), so that
many tokens need a KV place. Capacity is what one request alone can have: the whole pool, or the model's context.
"""

from __future__ import annotations

from entropic_ctl.config import EngineConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import Finish, FinishReason, Request

__all__ = ["capacity_tokens", "kv_need", "refusal", "token_limit", "validate"]


def capacity_tokens(engine: EngineConfig) -> int:
    """Return the KV tokens one request can have when it is alone."""
    return min(engine.pages * engine.page_tokens, engine.max_context)


def kv_need(request: Request) -> int:
    """Return the KV tokens ``request`` needs if it runs to its limit: prompt + max_new - 1."""
    return request.prompt_tokens + request.max_new_tokens - 1


def token_limit(request: Request, engine: EngineConfig) -> int:
    """Return the effective limit on new tokens: ``max_new_tokens``, cut to what the capacity leaves (at least 1)."""
    return min(request.max_new_tokens, capacity_tokens(engine) - request.prompt_tokens + 1)


def refusal(request: Request, engine: EngineConfig) -> Finish | None:
    """Return why ``request`` can never be served, with the numbers, or None if it can."""
    capacity = capacity_tokens(engine)
    if request.prompt_tokens <= capacity:
        return None
    pool = f"the KV pool's {engine.pages} pages of {engine.page_tokens} = {engine.pages * engine.page_tokens} tokens"
    limit = pool if capacity < engine.max_context else f"max_context = {engine.max_context} tokens"
    detail = f"prompt of {request.prompt_tokens} tokens exceeds {limit}; shorten the prompt or enlarge the limit"
    return Finish(request.id, FinishReason.REJECTED, detail)


def validate(request: Request, engine: EngineConfig) -> None:
    """Raise :class:`BadInputError` if a field of ``request`` is outside its documented domain."""
    where = f"request {request.id}"
    for name, value, least in (
        ("id", request.id, 0),
        ("prompt_tokens", request.prompt_tokens, 1),
        ("max_new_tokens", request.max_new_tokens, 1),
        ("client", request.client, -1),
        ("expected_tokens", request.expected_tokens, 0),
    ):
        if value < least:
            raise BadInputError("out of range", where=where, field=name, value=value, allowed=f">= {least}")
    full = request.prompt_tokens // engine.page_tokens
    if len(request.prefix_hashes) > full:
        raise BadInputError(
            "more hashes than full prompt pages",
            where=where,
            field="prefix_hashes",
            value=len(request.prefix_hashes),
            allowed=f"at most {full} (prompt of {request.prompt_tokens}, pages of {engine.page_tokens})",
            remedy="hash full pages only",
        )
