"""A view of live requests with plausible values, any of them replaced."""

from __future__ import annotations

from typing import Any

import numpy as np

from entropic_ctl.scheduling.base import Departures, ScheduleView


def view(n: int = 1, **columns: Any) -> ScheduleView:
    values: dict[str, Any] = {
        "now_s": 0.0,
        "arrival_s": 0.0,
        "arrival_order": 0,
        "prompt_tokens": 10,
        "known_tokens": 30,
        "cached_tokens": 29,
        "generated_tokens": 20,
        "token_limit": 60,
        "pages": 4,
        "waited_steps": 0,
        "seated": True,
        "entropy": 2.0,
        "entropy_mean": 1.5,
        "reduction_ewma": 0.4,
        "entropy_cov1": 0.1,
        "entropy_var": 0.5,
        "seen": 20,
        "pool_pages": 100,
        "token_budget": 64,
        "step_s": 0.02,
        "client": -1,
        "expected_tokens": 0,
        "prompt_computed": 10,
        "departed": Departures(*np.empty((4, 0), np.int64)),
    } | columns
    scalar = {"now_s", "pool_pages", "token_budget", "step_s", "departed"}
    return ScheduleView(**{k: v if k in scalar else np.broadcast_to(np.asarray(v), (n,)) for k, v in values.items()})
