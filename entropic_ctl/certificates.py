"""What a stability certificate says, and the rule by which a loop accepts one.

``proofs`` makes and checks certificates; this module only defines the record, reads and writes it, and decides
whether a verdict covers a loop. So simulator and engine can refuse an uncertified gain without importing ``proofs``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropic_ctl.config import LawSpec, SpeculationConfig, digest
from entropic_ctl.errors import BadInputError, UncertifiedError

__all__ = ["Verdict", "micro_digest", "require"]

_MOST = 1_000_000


def micro_digest(
    temperature: LawSpec, observation_lag: int, vocab_size: int, speculation: SpeculationConfig | None = None
) -> str:
    """Identify what a gain certificate is about: micro law, its parameters, lag, vocabulary and drafts, nothing else.

    Parameters
    ----------
    temperature : LawSpec
        Micro law and parameters.
    observation_lag : int
        Steps by which entropies reach the host late.
    vocab_size : int
        Tokens in the vocabulary.
    speculation : SpeculationConfig, optional
        How many tokens a step drafts, and while the entropy is below what; nobody drafts if absent.

    Returns
    -------
    str
        SHA-256, hexadecimal.
    """
    drafts = speculation or SpeculationConfig()
    subject = {
        "law": temperature.name,
        "parameters": dataclasses.asdict(temperature.config),
        "observation_lag": observation_lag,
        "vocab_size": vocab_size,
        "draft_tokens": drafts.draft_tokens,
        "draft_below_nats": drafts.draft_below_nats if drafts.draft_tokens else None,
    }
    if drafts.draft_tokens and drafts.rule != "fixed":  # up to d + 1 updates, by a rule that need not draft at all
        subject["draft_rule"] = drafts.rule
    return digest(subject)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of checking one certificate.

    Parameters
    ----------
    status : str
        ``proved``, ``refuted`` or ``unknown``.
    theorem : str
        Name of the theorem in the proof book.
    subject : str
        :func:`micro_digest` of what was checked.
    limit : float
        Largest certified gain for this subject, its target included: 0 < k <= limit; NaN if there is none.
    reason : str
        One sentence for people.
    """

    status: str
    theorem: str
    subject: str
    limit: float
    reason: str


def require(
    temperature: LawSpec,
    integral_action: bool,
    observation_lag: int,
    vocab_size: int,
    verdict: Verdict | None,
    *,
    speculation: SpeculationConfig | None = None,
    uncertified: bool,
) -> None:
    """Raise :class:`UncertifiedError` unless ``verdict`` proves this micro law, or the law needs no proof.

    A law without integral action (all but ``feedback`` and ``mirostat2``) acts on the current distribution only and
    cannot oscillate across steps; it needs no gain certificate.

    Parameters
    ----------
    temperature : LawSpec
    integral_action : bool
        The law's own ``integral_action``.
    observation_lag, vocab_size : int
        What the loop will run with.
    verdict : Verdict or None
        The checker's word on a certificate.
    speculation : SpeculationConfig, optional
        The loop's drafting, by which up to d + 1 updates follow from one state; off if absent.
    uncertified : bool
        Run without one.
    """
    if not integral_action or uncertified:
        return
    hint = "run `entropic prove` and pass the certificate, or say uncertified=True (--uncertified) out loud"
    if verdict is None:
        raise UncertifiedError(f"temperature law {temperature.name!r} needs a gain certificate; {hint}")
    if verdict.subject != micro_digest(temperature, observation_lag, vocab_size, speculation):
        raise UncertifiedError(
            f"the certificate ({verdict.theorem}) is about another law, gain, lag, vocabulary or number of drafted "
            f"tokens than this config (law {temperature.name!r}, lag {observation_lag}, vocabulary {vocab_size}, "
            f"{speculation.draft_tokens if speculation else 0} drafted); {hint}"
        )
    if verdict.status != "proved":
        remedy = "say uncertified=True (--uncertified) out loud"
        if math.isfinite(verdict.limit):
            remedy = (
                f"the nearest certified gain is {verdict.limit!r}, and any gain above 0 up to it will do; or {remedy}"
            )
        raise UncertifiedError(f"theorem {verdict.theorem!r} is {verdict.status}: {verdict.reason}; {remedy}")


def _regular(path: str | Path) -> bytes:
    """Return the bytes of a regular file of at most :data:`_MOST` bytes; opening a FIFO does not wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BadInputError("not a regular file", where=str(path), remedy="name a file that `entropic prove` wrote")
        raw = file.read(_MOST + 1)
    if len(raw) > _MOST:
        raise BadInputError("too large for a certificate", where=str(path), allowed=f"at most {_MOST:,} bytes")
    return raw


def read_certificate(path: str | Path) -> Mapping[str, Any]:
    """Read a certificate file as JSON; NaN, infinities, duplicate keys and non-objects are refused.

    Only regular files of at most 1 MB (one that `entropic prove` writes has some 20 kB): a FIFO or a device would be
    read for ever.
    """
    where = str(path)

    def no_constant(token: str) -> Any:
        raise BadInputError("not a finite number", where=where, value=token, allowed="finite JSON numbers")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise BadInputError("duplicate key", where=where, value=[key for key, _ in pairs])
        return out

    try:
        raw = _regular(path).decode("utf-8")
        values = json.loads(raw, parse_constant=no_constant, object_pairs_hook=unique)
    except OSError as error:
        raise BadInputError(f"cannot read certificate: {error.strerror}", where=where) from None
    except UnicodeDecodeError:
        raise BadInputError("not UTF-8", where=where, allowed="JSON") from None
    except json.JSONDecodeError as error:
        raise BadInputError(
            f"not JSON: {error.msg}", where=where, line=error.lineno, remedy="make it anew with `entropic prove`"
        ) from None
    except RecursionError:
        raise BadInputError("nested too deeply", where=where) from None
    except BadInputError:
        raise
    except ValueError as error:  # an integer with thousands of digits
        raise BadInputError(f"not JSON: {str(error).partition(':')[0]}", where=where) from None
    if not isinstance(values, dict):
        raise BadInputError("not a JSON object", where=where, value=values)
    return values
