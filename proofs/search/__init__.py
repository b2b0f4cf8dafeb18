"""The untrusted search: finds the hints from which :mod:`proofs.check` decides, and writes them as a certificate.

Floating point and solvers are fine here: a bad hint makes the checker refuse, never accept. Source: ours.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from typing import Any

from entropic_ctl.certificates import Verdict
from entropic_ctl.config import RunConfig, digest, resolve
from entropic_ctl.errors import BadInputError
from proofs import check
from proofs.check import Assumptions, Hints, Subject
from proofs.check.base import format_hint
from proofs.search import coupled, gain, target, topk

__all__ = ["HINTERS", "certify", "prove", "tools"]

HINTERS: Mapping[Callable[..., Any], Callable[[Subject], Mapping[str, Any]]] = {
    check.gain.claims: gain.hints,
    check.topk.claims: topk.hints,
    check.target.claims: target.hints,
    check.floor.claims: target.floor_hints,
    check.coupled.claims: coupled.hints,
}
"""Checker's function -> function that finds what it needs: rationals, nested in lists, by name."""


def tools(subject: Subject) -> dict[str, str]:
    """Return names and versions of what makes a subject's certificate; the solver only where it is asked."""
    made = {
        "entropic-ctl search": "2",
        "python": platform.python_version(),
        "python-flint": importlib.metadata.version("python-flint"),
    }
    return made if coupled.asked(subject) is None else made | {"cvxpy": importlib.metadata.version("cvxpy")}


def _verified(subject: Subject, decide: Callable[..., Any], seen: Mapping[str, Any]) -> dict[str, Any]:
    """Find the hints for one group of theorems; one that the checker refuses (the search missed) is dropped."""
    hinter = HINTERS.get(decide)
    found = {} if hinter is None else {name: format_hint(value) for name, value in hinter(subject).items()}
    while found:
        try:
            decide(subject, Hints({**seen, **found}))
        except BadInputError:
            found.popitem()  # what comes later refines what comes first
        else:
            break
    return found


def prove(
    config: RunConfig,
    vocab_size: int,
    assumptions: Assumptions | None = None,
    *,
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, Any]:
    """Make a certificate: every theorem of the proof book, decided for a config.

    Parameters
    ----------
    config : RunConfig
        Its laws and engine limits are what it is about.
    vocab_size : int
        2 <= n < 2^31. Use the size of the model's *output*, padding rows included: the bound grows with n.
    assumptions : Assumptions, optional
        What the theorems take for granted about text, model and machine.
    progress : callable, optional
        ``progress(what, share)``.

    Returns
    -------
    dict
        JSON-able. It counts for nothing until :func:`proofs.check.check` has accepted it.

    Raises
    ------
    BadInputError
        If the vocabulary size is out of range.
    """
    subject = Subject(config, vocab_size, assumptions or Assumptions())
    values: dict[str, Any] = {}
    for index, decide in enumerate(check.THEOREMS):
        if progress is not None:
            progress(decide.__module__.rpartition(".")[2], index / len(check.THEOREMS))
        values |= _verified(subject, decide, values)
    hints = Hints(values)
    certificate = check.document(subject, hints, check.judge(subject, hints))
    certificate["provenance"] = {"config_digest": digest(resolve(config)), "tools": tools(subject)}
    return certificate


def certify(config: RunConfig, vocab_size: int) -> Verdict:
    """Return the checked verdict on the temperature loop alone, which is all a run needs."""
    subject = Subject(config, vocab_size)
    hints = Hints(_verified(subject, check.gain.claims, {}))
    return check.verdict(subject, check.judge(subject, hints, only=1))
