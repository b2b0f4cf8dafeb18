r"""The trusted checker: it decides whether a certificate proves the temperature loop of a config stable.

Nothing is believed. Every inequality is rebuilt from the *config* in exact rationals, with logarithms and exponentials
enclosed by :mod:`proofs.enclosures`; the certificate contributes only hints (an interval for the maximiser, an interval
for the counter-example) that are verified before use. Then the whole document is rebuilt from config and verified hints
and must be equal to the one given, value by value and type by type, so no edit survives. Nothing of ``proofs.search``
or ``proofs.vmax`` is imported.

What is proved (theorems and proofs in ``proofs/README.md``; source: ours):

- ``gain-lag-0``: 0 < k V_max(n) < 2: for *every* logit vector, the loop u+ = clip(u - sat(k phi(H(u) - H*))) never
  moves two temperatures apart and always settles;
- ``gain-lag-1``: 0 < k V_max(n) < 1, the same loop acting on an entropy one step older (or on a mix of ages 0 and 1):
  it always settles;
- ``stateless``: the law feeds back no past error; ``pinned``: both clamps are equal, u never moves.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from entropic_ctl import registry
from entropic_ctl.certificates import Verdict, micro_digest
from entropic_ctl.config import RunConfig
from entropic_ctl.errors import BadInputError
from proofs.enclosures import Interval, exp, log
from proofs.exact import linear_scalar

__all__ = ["KIND", "SCHEMA", "Evidence", "check", "decide", "document", "gain_ceiling", "linear_scalar", "v_max_bounds"]

KIND, SCHEMA = "gain", 1
SHAPES = ("linear", "tanh")
"""Error shapes phi the theorems cover: odd, non-decreasing, slope in (0, 1], slope 1 at 0."""

_LIMIT = {0: 2, 1: 1}  # lag d -> supremum of k V: 2 sin(pi / (4 d + 2))
_WIDTH = Fraction(1, 2**40)
_RATIONAL = re.compile(r"[0-9]{1,60}(/[1-9][0-9]{0,59})?")
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Evidence:
    """Hints of the search; worthless until verified.

    Parameters
    ----------
    log_odds : Interval
        Should contain the x > 0 with (x + ln(n-1)) tanh(x/2) = 2.
    tail_mass : Interval or None
        Should contain an r whose two-level distribution has the target entropy and a varentropy that breaks the loop.
    """

    log_odds: Interval
    tail_mass: Interval | None = None


def _refuse(field: str, problem: str, value: object = None) -> BadInputError:
    return BadInputError(
        problem, where="certificate", field=field, value=value, remedy="make it anew with `entropic prove`"
    )


def _vocab(n: object) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or not 2 <= n < 2**31:
        raise BadInputError("not a vocabulary size", field="vocab_size", value=n, allowed=f"[2, {2**31 - 1}]")
    return n


def v_max_bounds(n: int, log_odds: Interval) -> Interval:
    """Verify that ``log_odds`` brackets the maximiser and return bounds on V_max(n), nats squared.

    g(x) = (x + c) tanh(x/2), c = ln(n-1), increases on x > 0; at g = 2 the derivative of
    f(x) = (x + c)^2 / (4 cosh^2(x/2)) vanishes and f = (x + c)^2/4 - 1. So g(a) < 2 < g(b) puts V_max between
    (a + c)^2/4 - 1 and (b + c)^2/4 - 1.

    Raises
    ------
    BadInputError
        If the interval is empty, too wide (over 2^-40) or does not bracket the maximiser.
    """
    a, b = log_odds
    if not 0 < a < b or b - a > _WIDTH or b > 64:
        raise _refuse("v_max.log_odds", "not a narrow interval of positive numbers", [str(a), str(b)])
    c = log(Fraction(_vocab(n) - 1))
    at_a, at_b = exp(a), exp(b)
    # tanh(x/2) = 1 - 2 / (e^x + 1), increasing in e^x
    if not (a + c.hi) * (1 - 2 / (at_a.hi + 1)) < 2 < (b + c.lo) * (1 - 2 / (at_b.lo + 1)):
        raise _refuse("v_max.log_odds", "does not bracket the maximiser of varentropy", [str(a), str(b)])
    return Interval((a + c.lo) ** 2 / 4 - 1, (b + c.hi) ** 2 / 4 - 1)


def _tail_entropy(n: int, r: Fraction) -> Interval:
    """Entropy of (1-r, r/(n-1), ...): -(1-r) ln(1-r) - r ln r + r ln(n-1)."""
    stay, leave, c = log(1 - r), log(r), log(Fraction(n - 1))
    return Interval(
        -(1 - r) * stay.hi - r * leave.hi + r * c.lo,
        -(1 - r) * stay.lo - r * leave.lo + r * c.hi,
    )


def _equilibrium_varentropy(n: int, target: Fraction, tail_mass: Interval) -> Fraction:
    """Verify that some r in ``tail_mass`` has entropy ``target``; return a lower bound on varentropy over the interval.

    Entropy is continuous in r, so lying below the target at one end and above at the other is enough.
    r (1-r) ln^2((1-r)(n-1)/r) is bounded factor by factor; the logarithm is positive for r < (n-1)/n.
    """
    low, high = tail_mass
    if not 0 < low < high < Fraction(n - 1, n):
        raise _refuse("counterexample.tail_mass", "not an interval inside (0, (n-1)/n)", [str(low), str(high)])
    if not _tail_entropy(n, low).hi < target < _tail_entropy(n, high).lo:
        raise _refuse("counterexample.tail_mass", "does not bracket the target entropy", [str(low), str(high)])
    ratio = log((1 - high) * (n - 1) / high).lo
    return low * (1 - high) * max(Fraction(0), ratio) ** 2


def _float_below(bound: Fraction) -> float:
    """The largest float strictly below ``bound``."""
    value = float(bound)
    return value if Fraction(value) < bound else math.nextafter(value, -math.inf)


def gain_ceiling(n: int, lag: int, log_odds: Interval) -> float:
    """Return the largest float gain certified for every logit vector: just below 2/V_max (lag 0) or 1/V_max (lag 1).

    Parameters
    ----------
    n : int
        Vocabulary size.
    lag : int
        Observation lag, 0 or 1.
    log_odds : Interval
        Bracket of the maximiser, from the search; verified here.
    """
    return _float_below(_LIMIT[lag] / v_max_bounds(n, log_odds).hi)


def decide(config: RunConfig, vocab_size: int, evidence: Evidence | None) -> Verdict:
    """Return the verdict the evidence supports; with poor evidence this is ``unknown``, never a wrong answer.

    Parameters
    ----------
    config : RunConfig
        Only ``loop.temperature`` and ``engine.observation_lag`` matter.
    vocab_size : int
        Tokens in the model's vocabulary; the theorem covers every smaller support too.
    evidence : Evidence or None
        Needed for ``feedback`` loops only.
    """
    law, lag, n = config.loop.temperature, config.engine.observation_lag, _vocab(vocab_size)
    subject = micro_digest(law, lag, n)

    def verdict(status: str, theorem: str, reason: str, limit: float = math.nan) -> Verdict:
        return Verdict(status=status, theorem=theorem, subject=subject, limit=limit, reason=reason)

    if not registry.load("entropic_ctl.temperature", law.name).build(law.config).integral_action:
        return verdict("proved", "stateless", f"{law.name!r} feeds back no past error, so there is nothing to certify")
    if law.name != "feedback":
        return verdict("unknown", "none", f"no theorem covers the law {law.name!r}")
    theorem = f"gain-lag-{lag}"
    parameters = law.config
    if lag not in _LIMIT:
        return verdict("unknown", theorem, f"no theorem covers an observation lag of {lag}")
    if parameters.t_min == parameters.t_max:
        return verdict("proved", "pinned", "both clamps are equal: the temperature never moves")
    if parameters.phi not in SHAPES:
        return verdict("unknown", theorem, f"no theorem covers the error shape {parameters.phi!r}")
    if evidence is None:
        return verdict("unknown", theorem, "no evidence was given")
    gain, target = Fraction(parameters.gain), Fraction(parameters.target_nats)
    v_max = v_max_bounds(n, evidence.log_odds)
    ceiling = gain_ceiling(n, lag, evidence.log_odds)
    bound = f"k = {parameters.gain!r}, V_max({n}) <= {float(v_max.hi):.6f}"
    if gain <= 0:
        what = "pushes temperatures apart: high entropy must lower T" if gain < 0 else "does not act at all"
        return verdict("refuted", theorem, f"gain {parameters.gain!r} {what}", ceiling)
    if gain * v_max.hi < _LIMIT[lag]:
        return verdict("proved", theorem, f"{bound}, so k V < {_LIMIT[lag]} for every logit vector", ceiling)
    if evidence.tail_mass is not None:
        v = _equilibrium_varentropy(n, target, evidence.tail_mass)
        if gain * v > _LIMIT[lag]:
            reason = (
                f"at the target {parameters.target_nats!r} nats two-level logits (L, 0, ..., 0) have varentropy "
                f"{float(v):.6f}, k V = {float(gain * v):.6f} > {_LIMIT[lag]}: their equilibrium repels"
            )
            return verdict("refuted", theorem, reason, ceiling)
    return verdict(
        "unknown",
        theorem,
        f"{bound}: k V_max is not below {_LIMIT[lag]}, yet no counter-example at this target",
        ceiling,
    )


def document(config: RunConfig, vocab_size: int, evidence: Evidence | None, verdict: Verdict) -> dict[str, Any]:
    """Lay out a certificate (JSON-able, without ``provenance``) from config, *verified* evidence and verdict.

    ``vocab_size`` is the number of tokens the claim is about.
    """
    law = config.loop.temperature
    parameters = dataclasses.asdict(law.config)
    v_max = counterexample = None
    if evidence is not None and verdict.theorem.startswith("gain-"):
        bounds = v_max_bounds(vocab_size, evidence.log_odds)
        v_max = {
            "log_odds": [str(end) for end in evidence.log_odds],
            "lower": _decimal(bounds.lo, up=False),
            "upper": _decimal(bounds.hi, up=True),
        }
        if verdict.status == "refuted" and evidence.tail_mass is not None:
            counterexample = {
                "logits": "T (L, 0, ..., 0) with L = ln((1 - r)(n - 1) / r), for any T strictly inside the clamps",
                "tail_mass": [str(end) for end in evidence.tail_mass],
            }
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "theorem": verdict.theorem,
        "claim": verdict.status,
        "law": law.name,
        "parameters": parameters,
        "gain_exact": str(Fraction(parameters["gain"])) if "gain" in parameters else None,
        "observation_lag": config.engine.observation_lag,
        "vocab_size": vocab_size,
        "v_max": v_max,
        "gain_limit": verdict.limit if math.isfinite(verdict.limit) else None,
        "counterexample": counterexample,
        "subject": verdict.subject,
    }


def _decimal(value: Fraction, *, up: bool, digits: int = 15) -> str:
    scaled = value * 10**digits
    whole = math.ceil(scaled) if up else math.floor(scaled)
    return f"{whole // 10**digits}.{whole % 10**digits:0{digits}d}"


def _ends(value: object, field: str) -> Interval:
    if not isinstance(value, list) or len(value) != 2:
        raise _refuse(field, "not a pair of rationals", value)
    for end in value:
        if not isinstance(end, str) or not _RATIONAL.fullmatch(end) or str(Fraction(end)) != end:
            raise _refuse(field, "not a rational in lowest terms", end)
    return Interval(Fraction(value[0]), Fraction(value[1]))


def _evidence(certificate: Mapping[str, Any]) -> Evidence | None:
    v_max, example = certificate["v_max"], certificate["counterexample"]
    if v_max is None:
        return None
    if not isinstance(v_max, Mapping) or not (example is None or isinstance(example, Mapping)):
        raise _refuse("v_max", "not an object", v_max)
    tail = None if example is None else _ends(example.get("tail_mass"), "counterexample.tail_mass")
    return Evidence(_ends(v_max.get("log_odds"), "v_max.log_odds"), tail)


def _differs(given: object, rebuilt: object, field: str) -> tuple[str, object] | None:
    """Return the first field whose type or value differs (1, 1.0 and True are three different values)."""
    if isinstance(rebuilt, Mapping):
        if not isinstance(given, Mapping) or given.keys() != rebuilt.keys():
            return field, given
        found = (_differs(given[key], rebuilt[key], f"{field}.{key}".lstrip(".")) for key in rebuilt)
        return next((item for item in found if item is not None), None)
    if isinstance(rebuilt, list):
        if not isinstance(given, list) or len(given) != len(rebuilt):
            return field, given
        found = (_differs(a, b, f"{field}[{i}]") for i, (a, b) in enumerate(zip(given, rebuilt, strict=True)))
        return next((item for item in found if item is not None), None)
    return None if type(given) is type(rebuilt) and given == rebuilt else (field, given)


def check(certificate: Mapping[str, Any], config: RunConfig, vocab_size: int) -> Verdict:
    """Check a certificate against a config.

    Parameters
    ----------
    certificate : Mapping
        Parsed JSON, as :func:`entropic_ctl.certificates.read_certificate` returns it.
    config : RunConfig
        The run it is to cover; only its micro law, observation lag and the vocabulary count.
    vocab_size : int

    Returns
    -------
    Verdict
        What the certificate soundly claims: ``proved``, ``refuted`` or ``unknown``.

    Raises
    ------
    BadInputError
        If it is malformed, of another schema, about another config, or if any value is not what the proof gives.
    """
    if not isinstance(certificate, Mapping):
        raise _refuse("", "not an object", certificate)
    for field, expected in (("kind", KIND), ("schema", SCHEMA)):
        if _differs(certificate.get(field), expected, field):
            raise BadInputError(
                f"unknown {field}",
                where="certificate",
                field=field,
                value=certificate.get(field),
                allowed=repr(expected),
            )
    subject = micro_digest(config.loop.temperature, config.engine.observation_lag, _vocab(vocab_size))
    if certificate.get("subject") != subject:
        raise _refuse(
            "subject", "about another law, gain, lag or vocabulary than this config", certificate.get("subject")
        )
    _check_provenance(certificate.get("provenance"))
    if missing := {"v_max", "counterexample", "claim"} - certificate.keys():
        raise _refuse(", ".join(sorted(missing)), "missing")
    evidence = _evidence(certificate)
    verdict = decide(config, vocab_size, evidence)
    rebuilt = document(config, vocab_size, evidence, verdict)
    given = {key: value for key, value in certificate.items() if key != "provenance"}
    if extra := given.keys() ^ rebuilt.keys():
        raise _refuse(", ".join(sorted(map(str, extra))), "unknown or missing")
    if wrong := _differs(given, rebuilt, ""):
        raise _refuse(wrong[0], "not what the proof gives", wrong[1])
    return verdict


def _check_provenance(given: object) -> None:
    """Where the certificate comes from: informative only, so checked for form alone."""
    if not isinstance(given, Mapping) or given.keys() != {"config_digest", "tools"}:
        raise _refuse("provenance", "not an object with config_digest and tools", given)
    if not isinstance(given["config_digest"], str) or not _HEX.fullmatch(given["config_digest"]):
        raise _refuse("provenance.config_digest", "not a SHA-256 in hex", given["config_digest"])
    tools = given["tools"]
    if not isinstance(tools, Mapping) or not all(isinstance(x, str) for pair in tools.items() for x in pair):
        raise _refuse("provenance.tools", "not names with versions", tools)
