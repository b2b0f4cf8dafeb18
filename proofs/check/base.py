"""What every check of a theorem shares: the subject, its assumptions, hints, and the claim that comes out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from entropic_ctl import fields, registry
from entropic_ctl.config import RunConfig, resolve
from entropic_ctl.errors import BadInputError
from proofs.enclosures import Interval, log

__all__ = ["STATUSES", "Assumptions", "Claim", "Hints", "Subject", "decimal", "format_hint", "refuse", "rounded"]

STATUSES = ("proved", "refuted", "unknown", "not applicable")
HINTS = frozenset({"floor_mass", "log_odds", "lyapunov", "lyapunov_decay", "tail_mass", "top_k"})
"""Names of all hints that theorems read; others are refused unparsed."""

_RATIONAL = re.compile(r"-?[0-9]{1,60}(/[1-9][0-9]{0,59})?")


def refuse(field: str, problem: str, value: object = None) -> BadInputError:
    """Return the error that refuses a certificate: ``problem`` with ``value`` at ``field``."""
    return BadInputError(
        problem, where="certificate", field=field, value=value, remedy="make it anew with `entropic prove`"
    )


@dataclass(frozen=True)
class Assumptions:
    """What a theorem takes for granted about text, model and machine, and no config says.

    They are part of a certificate's subject: a claim reads *if these hold, then ...*. The effects are bounds over
    all steps; ``entropic identify`` measures them.
    """

    varentropy_min: float = fields.number(0.1, 0.0, 1e3, "V_lo: least varentropy between temperatures in play, nats^2")
    rho: float = fields.number(0.05, 0.0, 1e3, "rho: largest effect of theta on the tempered entropy, nats per nat")
    r: float = fields.number(0.05, 0.0, 1e3, "r: largest effect of theta on the next model entropy, nats per nat")
    s: float = fields.number(0.15, 0.0, 1e3, "s: largest effect of u = ln T on the next model entropy, nats per unit")
    error_nats: float = fields.number(4.0, 0.0, 100.0, "largest |H - H*| in the coupled model, nats", open_lo=True)
    step_s: float = fields.number(0.1, 0.0, 1e6, "longest mean duration of an iteration under load, s", open_lo=True)
    token_s: float = fields.number(0.0, 0.0, 1e6, "what each prompt token in it may add to step_s, s")
    rate_per_s: float = fields.number(0.0, 0.0, 1e9, "rate of a Poisson stream of arrivals, 1/s; 0: no such stream")
    prompt_tokens: float = fields.number(128.0, 0.0, 1e9, "mean prompt length, tokens", open_lo=True)
    output_tokens: float = fields.number(64.0, 0.0, 1e9, "mean output length, tokens", open_lo=True)
    longest_tokens: int = fields.integer(1024, 1, 2**31 - 1, "longest prompt and output together, tokens")
    recomputed_tokens: float = fields.number(0.0, 0.0, 1e9, "most tokens recomputed of any request; 0: no bound")

    def __post_init__(self) -> None:
        fields.check(self)


@dataclass(frozen=True)
class Subject:
    """What a certificate is about: a config, the vocabulary, and the assumptions.

    Parameters
    ----------
    config : RunConfig
        Its three laws and its engine limits matter; workload, cost, model and seed do not.
    vocab_size : int
        Tokens in the model's output, padding rows included.
    assumptions : Assumptions
    """

    config: RunConfig
    vocab_size: int
    assumptions: Assumptions = dataclasses.field(default_factory=Assumptions)

    def __post_init__(self) -> None:
        n = self.vocab_size
        if isinstance(n, bool) or not isinstance(n, int) or not 2 <= n < 2**31:
            raise BadInputError("not a vocabulary size", field="vocab_size", value=n, allowed=f"[2, {2**31 - 1}]")

    @property
    def law(self) -> Any:
        """Parameters of the temperature law."""
        return self.config.loop.temperature.config

    @property
    def integral_action(self) -> bool:
        """Whether the temperature law feeds back a past error."""
        law = self.config.loop.temperature
        return bool(registry.load("entropic_ctl.temperature", law.name).build(law.config).integral_action)

    @property
    def always_drafts(self) -> bool:
        """Whether nothing keeps a step from drafting: neither rule nor entropy (over the vocabulary at most ln n)."""
        drafts = self.config.speculation
        return (
            drafts.rule == "fixed"
            and drafts.draft_tokens > 0
            and drafts.draft_below_nats > log(Fraction(self.vocab_size)).hi
        )

    def describe(self) -> dict[str, Any]:
        """Return what a certificate says it is about, JSON-able."""
        resolved = resolve(self.config)
        return {
            "loop": resolved["loop"],
            "engine": resolved["engine"],
            "speculation": resolved["speculation"],
            "vocab_size": self.vocab_size,
            "assumptions": dataclasses.asdict(self.assumptions),
        }


@dataclass(frozen=True)
class Claim:
    """One theorem of the proof book, decided for one subject.

    Parameters
    ----------
    theorem : str
        Its name in the proof book.
    status : str
        ``proved``, ``refuted``, ``unknown`` or ``not applicable``.
    reason : str
        One or two sentences for people, with the numbers.
    numbers : dict
        What the proof gives, JSON-able: exact rationals as strings, bounds rounded outward.
    """

    theorem: str
    status: str
    reason: str
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"no such status: {self.status!r}")


class Hints:
    """What the search proposes, parsed strictly; nothing here is believed, and what nobody reads is refused.

    Parameters
    ----------
    values : mapping
        Name -> rational, or nested lists of them; a rational is a string in lowest terms.
    """

    def __init__(self, values: object) -> None:
        if not isinstance(values, Mapping):
            raise refuse("hints", "not an object", values)
        if extra := {str(name) for name in values} - HINTS:
            raise refuse("hints." + ", ".join(sorted(extra)[:8]), "no theorem reads it")
        self._values = {str(name): _parse(value, f"hints.{name}", 2) for name, value in values.items()}
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """Return a hint (Fractions in nested tuples), or None if there is none."""
        self._read.add(name)
        return self._values.get(name)

    def interval(self, name: str) -> Interval | None:
        """Return a hint that is a pair lo < hi, or None if there is none."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, tuple) or len(value) != 2 or not all(isinstance(end, Fraction) for end in value):
            raise refuse(f"hints.{name}", "not a pair of rationals", format_hint(value))
        if not value[0] < value[1]:
            raise refuse(f"hints.{name}", "an empty interval", format_hint(value))
        return Interval(*value)

    def unread(self) -> set[str]:
        """Return the names that no theorem asked for."""
        return self._values.keys() - self._read

    def describe(self) -> dict[str, Any]:
        """Return the hints as a certificate holds them."""
        return {name: format_hint(value) for name, value in self._values.items()}


def format_hint(value: Any) -> Any:
    """Return a hint as JSON: rationals as strings in lowest terms."""
    return [format_hint(part) for part in value] if isinstance(value, tuple | list) else str(Fraction(value))


def _parse(value: object, field: str, depth: int) -> Any:
    if isinstance(value, list) and depth and len(value) <= 64:
        return tuple(_parse(part, field, depth - 1) for part in value)
    if not isinstance(value, str) or not _RATIONAL.fullmatch(value) or str(Fraction(value)) != value:
        raise refuse(field, "not a rational in lowest terms, nor a list of them", value)
    return Fraction(value)


def decimal(value: Fraction, *, up: bool, digits: int = 15) -> str:
    """Return ``value`` as a decimal string with ``digits`` after the point, rounded ``up`` or down."""
    scaled = value * 10**digits
    whole = -((-scaled.numerator) // scaled.denominator) if up else scaled.numerator // scaled.denominator
    sign = "-" if whole < 0 else ""
    return f"{sign}{abs(whole) // 10**digits}.{abs(whole) % 10**digits:0{digits}d}"


def rounded(value: Fraction, *, up: bool, figures: int = 6) -> str:
    """Return a bound for a sentence: ``value`` with at least so many significant figures, rounded ``up`` or down."""
    if value == 0:
        return "0"
    size = abs(value)
    power = len(str(size // 1)) - 1 if size >= 1 else -len(str(1 / size // 1))
    if -5 <= power < 15:
        return decimal(value, up=up, digits=max(1, figures - 1 - power))
    return f"{decimal(value / Fraction(10) ** power, up=up, digits=figures - 1)}e{power}"
