"""Certificates for tests: small configs of every verdict, and the checker's word on them."""

from __future__ import annotations

import functools
import json
from typing import Any

import proofs
from entropic_ctl import certificates, config
from proofs import check, search

N = 32_000


def make(gain: float = 0.05, *, law: str = "feedback", lag: int = 0, drafts: int = 0, **rest: Any) -> config.RunConfig:
    """Return a config with this temperature law."""
    table = {"law": law, **({"gain": gain} if law == "feedback" else {}), **rest}
    return config.from_mapping(
        {
            "engine": {"observation_lag": lag},
            "speculation": {"draft_tokens": drafts},
            "loop": {"temperature": table},
        }
    )


def judge(run: config.RunConfig, n: int = N) -> certificates.Verdict:
    """Return the checked verdict on the temperature loop."""
    return search.certify(run, n)


BASES: dict[str, config.RunConfig] = {
    "proved": make(0.05),
    "lagged": make(0.03, lag=1, phi="tanh"),
    "at target": make(0.09),
    "refuted": make(0.4),
    "wrong sign": make(-0.05),
    "unknown": make(0.04, lag=1, target_nats=1.0),
    "solve": config.from_mapping({"loop": {"temperature": {"law": "solve"}, "pruning": {"law": "budget"}}}),
    "fixed": make(law="fixed"),
    "damped": make(law="damped"),
    "edt": make(law="edt"),
    "dynatemp": make(law="dynatemp"),
    "mirostat2": make(law="mirostat2"),
    "drafts": make(0.02, drafts=2),
    "coupled": config.from_mapping(
        {"loop": {"temperature": {"law": "feedback"}, "pruning": {"law": "budget", "widen_after": 1}}}
    ),
    "every law": config.from_mapping(
        {
            "engine": {"observation_lag": 1},
            "loop": {
                "temperature": {"law": "feedback"},
                "pruning": {"law": "budget"},
                "scheduling": {"policy": "entropic"},
            },
        }
    ),
}
"""A config for each kind of verdict and combination of laws."""

STATUSES = {
    "proved": ("gain-lag-0", "proved"),
    "lagged": ("gain-lag-1", "proved"),
    "at target": ("gain-at-target", "proved"),
    "refuted": ("gain-lag-0", "refuted"),
    "wrong sign": ("gain-lag-0", "refuted"),
    "unknown": ("gain-lag-1", "unknown"),
    "solve": ("stateless", "proved"),
    "fixed": ("stateless", "proved"),
    "damped": ("stateless", "proved"),
    "edt": ("stateless", "proved"),
    "dynatemp": ("stateless", "proved"),
    "mirostat2": ("gain-lag-0", "unknown"),
    "drafts": ("gain-drafts", "proved"),
    "coupled": ("gain-lag-0", "proved"),
    "every law": ("gain-lag-1", "proved"),
}
"""What the checker must say of them."""


@functools.cache
def certificate_text(name: str) -> str:
    """Return the certificate of one of :data:`BASES` as its file holds it."""
    return json.dumps(proofs.prove(BASES[name], N), allow_nan=False, indent=1)


@functools.cache
def accepted(name: str) -> check.Checked:
    """Return what the checker says of an untouched certificate."""
    return check.check(json.loads(certificate_text(name)), BASES[name], N)
