from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from entropic_ctl.admission import capacity_tokens, kv_need, refusal, token_limit
from entropic_ctl.config import EngineConfig
from entropic_ctl.signals import Request


@given(
    page=st.integers(1, 20),
    pages=st.integers(1, 30),
    context=st.integers(2, 400),
    prompt=st.integers(1, 500),
    output=st.integers(1, 500),
)
def test_s4_refusal_limit_and_need_agree(*, page: int, pages: int, context: int, prompt: int, output: int) -> None:
    engine = EngineConfig(page_tokens=page, pages=pages, max_context=context)
    request, capacity = Request(3, 0.0, prompt, output), capacity_tokens(engine)
    refused = refusal(request, engine)
    assert (refused is None) == (prompt <= capacity)
    if refused is not None:
        assert str(prompt) in refused.detail
        assert str(capacity) in refused.detail
        return
    limit = token_limit(request, engine)
    assert 1 <= limit <= output
    assert (limit == output) == (kv_need(request) <= capacity)
    assert kv_need(Request(3, 0.0, prompt, limit)) <= capacity
    if limit < output:  # cut exactly to the capacity
        assert kv_need(Request(3, 0.0, prompt, limit)) == capacity
