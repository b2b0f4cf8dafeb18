"""Configs and single claims for the tests of theorems about the temperature loop."""

from __future__ import annotations

import functools
import json
from typing import Any

import proofs
from entropic_ctl import config
from proofs import check, search
from proofs.check import Hints, Subject, delay, floor, target, wrong_sign
from proofs.check.base import format_hint
from proofs.enclosures import Interval
from proofs.vmax import maximum

DECIDES = {
    "delay": delay.claims,
    "target": target.claims,
    "target-in-clamps": target.claims,
    "floor": floor.claims,
    "wrong-sign": wrong_sign.claims,
}


def micro(law: str = "feedback", *, lag: int = 0, drafts: int = 0, **rest: Any) -> config.RunConfig:
    """Return a config with this temperature law, observation lag and number of drafts."""
    return config.from_mapping(
        {
            "engine": {"observation_lag": lag},
            "loop": {"temperature": {"law": law, **rest}},
            "speculation": {"draft_tokens": drafts, "acceptance": 0.5},
        }
    )


@functools.cache
def _log_odds(n: int) -> Interval:
    return maximum(n).bracket()


def claim(theorem: str, run: config.RunConfig, n: int) -> check.Claim:
    """Return one claim, decided on the hints of the search."""
    subject = Subject(run, n)
    values = {"log_odds": format_hint(_log_odds(n))}
    for decide in (target.claims, floor.claims):
        values |= search._verified(subject, decide, values)
    hints = Hints(values)
    return next(one for one in DECIDES[theorem](subject, hints) if one.theorem == theorem)


def certified(run: config.RunConfig, n: int) -> dict[str, check.Claim]:
    """Prove everything, pass through JSON, check, and return the claims by name."""
    certificate = json.loads(json.dumps(proofs.prove(run, n), allow_nan=False))
    return {one.theorem: one for one in check.check(certificate, run, n).claims}
