r"""The trusted checker: which theorems of the proof book hold for a config, decided from the config alone.

Nothing is believed. Every inequality is rebuilt from the *config* (and the stated assumptions) in exact rationals, with
logarithms and exponentials enclosed by :mod:`proofs.enclosures`; the certificate contributes only hints, which are
verified before use. Then the whole document is rebuilt and must be equal to the one given, value by value and type by
type, so no edit that changes its meaning survives. Nothing of ``proofs.search`` is imported.

One module per group of theorems, each with ``claims(subject, hints)``; the proof book is ``proofs/README.md``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from entropic_ctl import fields
from entropic_ctl.certificates import Verdict, micro_digest
from entropic_ctl.config import RunConfig, digest
from entropic_ctl.errors import BadInputError
from proofs.check import (
    changing,
    coupled,
    delay,
    dwell,
    floor,
    gain,
    interleavings,
    pruning,
    scheduling,
    solver,
    target,
    topk,
    wrong_sign,
)
from proofs.check.base import Assumptions, Claim, Hints, Subject, refuse
from proofs.check.gain import gain_ceiling, v_max_bounds

__all__ = [
    "KIND",
    "SCHEMA",
    "Assumptions",
    "Checked",
    "Claim",
    "Hints",
    "Subject",
    "check",
    "document",
    "gain_ceiling",
    "judge",
    "recognise",
    "v_max_bounds",
    "verdict",
]

KIND, SCHEMA = "entropic-ctl", 2

THEOREMS: tuple[Callable[[Subject, Hints], list[Claim]], ...] = (
    gain.claims,
    delay.claims,
    target.claims,
    floor.claims,
    wrong_sign.claims,
    changing.claims,
    solver.claims,
    topk.claims,
    pruning.claims,
    dwell.claims,
    scheduling.claims,
    coupled.claims,
    interleavings.claims,
)
"""The gain first, because a run depends on it; the expensive ones last."""

_HEX = re.compile(r"[0-9a-f]{64}")
_GATES = ("gain-lag-0", "gain-lag-1", "gain-drafts", "gain-at-target", "stateless", "pinned")


@dataclass(frozen=True)
class Checked:
    """What a certificate soundly says.

    Parameters
    ----------
    claims : tuple of Claim
        Every theorem, decided.
    verdict : Verdict
        The word on the temperature loop, which a run depends on.
    """

    claims: tuple[Claim, ...]
    verdict: Verdict


def judge(subject: Subject, hints: Hints, *, only: int | None = None) -> tuple[Claim, ...]:
    """Decide every theorem for a subject (the first ``only`` groups of them), with the help of ``hints``.

    Raises
    ------
    BadInputError
        If a hint is not what a theorem needs, or no theorem reads it.
    """
    return tuple(claim for group in _groups(subject, hints, only) for claim in group)


def _groups(subject: Subject, hints: Hints, only: int | None = None) -> Iterator[tuple[Claim, ...]]:
    """Decide group by group, the cheap ones first; refuse hints that none of them all has read."""
    for decide in THEOREMS[:only]:
        yield tuple(decide(subject, hints))
    if only is None and (extra := hints.unread()):
        raise refuse("hints." + ", ".join(sorted(extra)), "no theorem reads it")


def verdict(subject: Subject, claims: tuple[Claim, ...]) -> Verdict:
    """Return the word on the temperature loop."""
    gate = next(claim for claim in claims if claim.theorem in _GATES)
    config = subject.config
    limit = gate.numbers.get("limit")
    return Verdict(
        status=gate.status,
        theorem=gate.theorem,
        subject=micro_digest(
            config.loop.temperature, config.engine.observation_lag, subject.vocab_size, config.speculation
        ),
        limit=math.nan if limit is None else limit,
        reason=gate.reason,
    )


def document(subject: Subject, hints: Hints, claims: tuple[Claim, ...]) -> dict[str, Any]:
    """Lay out a certificate (JSON-able, without ``provenance``): ``subject``, ``hints``, ``claims``."""
    about = subject.describe()
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "subject": digest(about),
        "about": about,
        "hints": hints.describe(),
        "claims": [_laid_out(claim) for claim in claims],
    }


def _laid_out(claim: Claim) -> dict[str, Any]:
    return {"theorem": claim.theorem, "status": claim.status, "reason": claim.reason, "numbers": claim.numbers}


def recognise(certificate: object) -> None:
    """Refuse what is no certificate of this kind and schema, which is all an old one can be told."""
    if not isinstance(certificate, Mapping):
        raise refuse("", "not an object", certificate)
    for field, expected in (("kind", KIND), ("schema", SCHEMA)):
        if _differs(certificate.get(field), expected, field):
            raise BadInputError(
                f"unknown {field}",
                where="certificate",
                field=field,
                value=certificate.get(field),
                allowed=repr(expected),
                remedy="make it anew with `entropic prove`",
            )


def check(certificate: Mapping[str, Any], config: RunConfig, vocab_size: int) -> Checked:
    """Check a certificate against a config.

    Parameters
    ----------
    certificate : Mapping
        Parsed JSON, as :func:`entropic_ctl.certificates.read_certificate` returns it.
    config : RunConfig
        The run it is to cover: its laws and engine limits.
    vocab_size : int

    Returns
    -------
    Checked
        Every claim, and the verdict on the temperature loop.

    Raises
    ------
    BadInputError
        If it is malformed, of another schema, about another config, or if any value is not what the proofs give.
    """
    recognise(certificate)
    _check_provenance(certificate.get("provenance"))
    keys = {"kind", "schema", "subject", "about", "hints", "claims", "provenance"}
    if wrong_keys := certificate.keys() ^ keys:
        raise refuse(", ".join(sorted(map(str, wrong_keys))), "unknown or missing")
    subject = Subject(config, vocab_size, _assumptions(certificate["about"]))
    about = subject.describe()
    if certificate["subject"] != digest(about) or _differs(certificate["about"], about, "about"):
        field, value, own = _differs(certificate["about"], about, "about") or ("subject", certificate["subject"], None)
        if field == "about.vocab_size":
            raise _other_vocabulary(value, vocab_size)
        has = "" if own is None else f", which has {own!r}"
        raise refuse(field, f"about other laws, limits, lag or vocabulary than this config{has}", value)
    hints = Hints(certificate["hints"])
    given = certificate["claims"]
    if not isinstance(given, list):
        raise refuse("claims", "not a list", given)
    claims: tuple[Claim, ...] = ()
    for found in _groups(subject, hints):  # an edit is found before the expensive groups are decided
        for i, new in enumerate(found, len(claims)):
            name = f"claims[{i}] ({new.theorem})"
            if i >= len(given):
                raise refuse("claims", f"{name} is missing", len(given))
            if wrong := _differs(given[i], _laid_out(new), name):
                raise refuse(wrong[0], "not what the proof gives", wrong[1])
        claims += found
    if len(given) != len(claims):
        raise refuse("claims", "too many", len(given))
    return Checked(claims, verdict(subject, claims))


def _other_vocabulary(value: object, own: int) -> BadInputError:
    """Return the error that refuses a certificate about another vocabulary than the run's."""
    return BadInputError(
        f"about another vocabulary than the {own:,} tokens of this run (of its entropy bank or its model)",
        where="certificate",
        field="about.vocab_size",
        value=value,
        allowed=str(own),
        remedy=f"make it with `entropic prove --vocab {own}`, or run with a `cost.bank` or model of that vocabulary",
    )


def _assumptions(about: object) -> Assumptions:
    """Read the assumptions a certificate states; they are the prover's, and part of every claim."""
    values = about.get("assumptions") if isinstance(about, Mapping) else None
    if not isinstance(values, Mapping):
        raise refuse("about.assumptions", "not an object", values)
    return fields.parse(Assumptions, values, where="certificate", table="about.assumptions")


def _differs(given: object, rebuilt: object, field: str) -> tuple[str, object, object] | None:
    """Return the first (field, value, rebuilt value) where type or value differs: 1, 1.0 and True are three values."""
    if isinstance(rebuilt, Mapping) and isinstance(given, Mapping):
        keys = [key for key in rebuilt if key in given]  # a shared key tells more than one that is missing
        found = (_differs(given[key], rebuilt[key], f"{field}.{key}") for key in keys)
        if wrong := next((item for item in found if item is not None), None):
            return wrong
        odd = sorted(map(str, given.keys() ^ rebuilt.keys()))
        return (f"{field}.{odd[0]}", given.get(odd[0]), rebuilt.get(odd[0])) if odd else None
    if isinstance(rebuilt, list) and isinstance(given, list) and len(given) == len(rebuilt):
        found = (_differs(a, b, f"{field}[{i}]") for i, (a, b) in enumerate(zip(given, rebuilt, strict=True)))
        return next((item for item in found if item is not None), None)
    same = type(given) is type(rebuilt) and given == rebuilt and repr(given) == repr(rebuilt)  # 0.0 == -0.0
    return None if same else (field, given, rebuilt)


def _check_provenance(given: object) -> None:
    """Where the certificate comes from: informative only, so checked for form alone."""
    if not isinstance(given, Mapping) or given.keys() != {"config_digest", "tools"}:
        raise refuse("provenance", "not an object with config_digest and tools", given)
    if not isinstance(given["config_digest"], str) or not _HEX.fullmatch(given["config_digest"]):
        raise refuse("provenance.config_digest", "not a SHA-256 in hex", given["config_digest"])
    tools = given["tools"]
    if not isinstance(tools, Mapping) or not all(isinstance(x, str) for pair in tools.items() for x in pair):
        raise refuse("provenance.tools", "not names with versions", tools)
