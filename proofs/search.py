"""The untrusted search: finds the hints from which :mod:`proofs.check` decides, and writes them as a certificate.

Floating point is fine here: a bad hint makes the checker refuse, never accept. Source: ours.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
from fractions import Fraction
from typing import Any

from entropic_ctl.certificates import Verdict
from entropic_ctl.config import RunConfig, digest, resolve
from entropic_ctl.errors import BadInputError
from proofs.check import Evidence, decide, document
from proofs.enclosures import Interval
from proofs.vmax import maximum, two_level

__all__ = ["equilibrium_tail_mass", "prove", "tools"]


def equilibrium_tail_mass(n: int, target_nats: float) -> float | None:
    """Return r with two-level entropy ``target_nats`` by bisection (entropy increases in r), None if there is none."""
    low, high = 0.0, (n - 1) / n
    if not 0.0 < target_nats < math.log(n):
        return None
    for _ in range(200):
        middle = (low + high) / 2
        if two_level(n, middle)[0] < target_nats:
            low = middle
        else:
            high = middle
    return low if 0.0 < low < (n - 1) / n else None


def _tail_interval(n: int, target_nats: float) -> Interval | None:
    r = equilibrium_tail_mass(n, target_nats)
    if r is None:
        return None
    slack = max(Fraction(r) / 2**36, Fraction(1, 2**80))
    low, high = (Fraction(math.floor((Fraction(r) + d) * 2**96), 2**96) for d in (-slack, slack))
    return Interval(low, high) if low > 0 and high < Fraction(n - 1, n) else None


def tools() -> dict[str, str]:
    """Return names and versions of what made a certificate."""
    return {
        "entropic-ctl search": "1",
        "python": platform.python_version(),
        "python-flint": importlib.metadata.version("python-flint"),
    }


def _decide(config: RunConfig, vocab_size: int) -> tuple[Evidence | None, Verdict]:
    """Find evidence and let the checker's rule decide; a counter-example that does not verify is dropped."""
    if config.loop.temperature.name != "feedback":
        return None, decide(config, vocab_size, None)
    plain = Evidence(maximum(vocab_size).bracket())
    verdict = decide(config, vocab_size, plain)
    if verdict.status != "unknown":
        return plain, verdict
    tail = _tail_interval(vocab_size, config.loop.temperature.config.target_nats)
    if tail is not None:
        try:
            armed = Evidence(plain.log_odds, tail)
            second = decide(config, vocab_size, armed)
        except BadInputError:  # float bisection missed the equilibrium (target at the very edge): nothing is lost
            return plain, verdict
        if second.status == "refuted":
            return armed, second
    return plain, verdict


def prove(config: RunConfig, vocab_size: int) -> dict[str, Any]:
    """Make a certificate for the temperature loop of ``config`` over a vocabulary of ``vocab_size`` tokens.

    Parameters
    ----------
    config : RunConfig
        ``loop.temperature`` and ``engine.observation_lag`` are what it is about.
    vocab_size : int
        2 <= n < 2^31. Use the size of the model's *output*, padding rows included: the bound grows with n.

    Returns
    -------
    dict
        JSON-able; ``claim`` is ``proved``, ``refuted`` or ``unknown``. It counts for nothing until
        :func:`proofs.check.check` has accepted it.

    Raises
    ------
    BadInputError
        If the vocabulary size is out of range.
    """
    evidence, verdict = _decide(config, vocab_size)
    certificate = document(config, vocab_size, evidence, verdict)
    certificate["provenance"] = {"config_digest": digest(resolve(config)), "tools": tools()}
    return certificate
