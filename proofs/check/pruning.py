"""Theorems `pruning`, `page-interval` and `entropic-share-misranks`: what a budget of theta nats lets attention lose.

Dropping a set of mass m and renormalising: KL(pruned || full) = -ln(1 - m), total variation m, output error
m (mean of the dropped values - mean of the kept ones). So a budget theta allows m <= 1 - exp(-theta), and selection
under the budget needs bounds on page masses that hold in float32 too: that is `page-interval`. Source: ours.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from proofs.check.base import Claim, Hints, Subject, decimal
from proofs.check.integer_scores import integer_gaps
from proofs.check.topk import surprisal
from proofs.enclosures import Interval, exp, log, shown

__all__ = ["claims", "gamma", "log_slack", "lse_error", "lse_slack", "merge_error", "rounding_gaps", "select_slack"]

GROUPS = (2, 4, 8)
HEAD_SIZE = 256
"""Largest head size covered; the config does not name one."""

_U, _W = Fraction(1, 2**24), Fraction(1, 2**53)  # unit roundoffs of float32 and float64
_BITS = 64


def gamma(n: int, unit: Fraction = _U) -> Fraction:
    """Return n u / (1 - n u): the relative error of n roundings."""
    return n * unit / (1 - n * unit)


def lse_error(n: int) -> Fraction:
    """Bound the rounding of a float32 log-sum-exp of n scores, less u |result|, nats.

    Sums of positive terms lose (1 -+ u) per addition, which the logarithm turns into u / (1 - u) each; exp to 2 ulp;
    subtracting the maximum u times the softmax mean of max - score, at most ln n; log to 2 ulp of at most
    ln n + (n + 8) u; weights flushed to zero.
    """
    top = log(Fraction(n), _BITS).hi
    sums = (n - 1) * _U / (1 - _U) + 4 * _U / (1 - 4 * _U) + _U * top / (1 - _U)
    return sums + 4 * _U * (top + (n + 8) * _U) + n * Fraction(1, 2**125)


def merge_error(n: int) -> Fraction:
    """Bound, less 2 u |result|, the log-sum-exp of n scores merged from two partial ones: once more for two terms."""
    return lse_error(n) + lse_error(2) + _U * log(Fraction(2), _BITS).hi + 2 * _U * lse_slack(n)


def lse_slack(n: int) -> Fraction:
    """What ``backends/attention/pruned.py`` grants a log-sum-exp of n scores besides 4 u |result|, nats, from below."""
    return (n + 5 * log(Fraction(n), _BITS).lo + 16) * _U


def select_slack(pages: int) -> Fraction:
    """What ``entropic_ctl/pruning/select.py`` grants sums over pages, relative."""
    return (2 * pages + 800) * 2 * _W


def log_slack() -> Fraction:
    """What ``select`` grants the logarithm of the dropped sum, per unit of 745 + |largest bound|."""
    return 8 * 2 * _W


def rounding_gaps(page_tokens: int, tokens: int, pages: int, head_size: int = HEAD_SIZE) -> dict[str, Fraction]:
    """Return, by name, granted less needed slack; none may be negative.

    ``page_tokens`` are those of a page, ``tokens`` the longest context, ``pages`` the most pages of one row, and
    ``head_size`` the channels of a head.
    """
    g, p, wide = gamma(head_size + 6), pages + 1, gamma(head_size + 32)
    sums = 1 / ((1 - p * _W) * (1 - 745 * _W) * (1 - 8 * _W))
    return {
        "the products of query and codes": wide - gamma(head_size + 5),  # q w, dot, step, sum, scale and its own
        "the width of a page's scores": (1 - gamma(head_size)) * (1 + 2 * g) * (1 - 4 * _W) - 1,
        "the products of query and keys": (1 - gamma(head_size + 2)) ** 2 * (1 + 8 * g) * (1 - 4 * _W) - 1,
        "the score cap": 8 * _U - (3 * Fraction(9, 20) + 6) * _U / (1 - 8 * _U),  # x / cosh^2 x < 9/20; tanh to 2 ulp
        "underflow of the products": Fraction(1, 10**30) - head_size * 264 * Fraction(1, 2**126),
        "the log-sum-exp of a page": lse_slack(page_tokens) - lse_error(page_tokens),
        "the log-sum-exp of all that is read": lse_slack(tokens + 8) - merge_error(tokens),
        "the sum of dropped pages": (1 + select_slack(p)) * (1 - _W) ** 3 - sums,
        "the sum of kept pages": 1 - sums * (1 - select_slack(p)) * (1 + _W) ** 3,
        # |log| <= 745, to 4 ulp; the largest bound and the slack are added to it
        "the logarithm of the dropped sum": log_slack() * (1 - _W) - (8 + (1 + 8 * _W) + (1 + 32 * _W)) * _W,
        # ln Z - ln U per unit of |ln Z| + |ln U|, and the slack taken off
        "the gap of the final mass": 16 * _W * (1 - _W) ** 2 - (1 + (1 + 32 * _W)) * _W,
        "the final mass": (1 + 16 * _W) * (1 - _W) ** 2 - (1 + 8 * _W) * (1 + _W) ** 2,  # exp to 4 ulp, 1 +, 1 /
        **integer_gaps(page_tokens, pages, head_size),
    }


def _page_interval(subject: Subject) -> Claim:
    engine = subject.config.engine
    tokens = min(engine.max_context, engine.pages * engine.page_tokens)
    pages = min(engine.pages, -(-engine.max_context // engine.page_tokens))
    numbers = {
        "score_per_magnitude": decimal(Fraction(101, 100) * gamma(HEAD_SIZE + 32), up=True, digits=18),
        "page_nats": decimal(lse_slack(engine.page_tokens), up=True, digits=18),
        "context_nats": decimal(lse_slack(tokens + 8), up=True, digits=18),
        "pages_relative": decimal(select_slack(pages + 1), up=True, digits=24),
    }
    short = [name for name, gap in rounding_gaps(engine.page_tokens, tokens, pages).items() if gap < 0]
    told = (
        f"for heads of up to {HEAD_SIZE} channels, pages of {engine.page_tokens} tokens and contexts of {tokens:,} "
        "the float32 slack of the page intervals "
    )
    if short:
        return Claim("page-interval", "unknown", f"{told}is not shown to cover {short[0]}", numbers)
    return Claim("page-interval", "proved", f"{told}covers every rounding: no true mass exceeds its bound", numbers)


def _misranks(page_tokens: int) -> Claim:
    """Verify both counter-examples to the literal share, -sum of a ln a over a page, for this page size."""
    heavy = surprisal(Fraction(99, 100))  # one token of the page holds it all
    for diffuse in range(9, 0, -1):
        each = Fraction(1, 100 * diffuse * page_tokens)
        if heavy.hi < page_tokens * surprisal(each).lo:
            break
    else:
        return Claim("entropic-share-misranks", "unknown", "no counter-example for this page size")
    certain = surprisal(1 - Fraction(1, 10**6)).hi
    if not certain < Fraction(1, 10**5):
        return Claim("entropic-share-misranks", "unknown", "the second counter-example fails")
    reason = (
        f"with pages of {page_tokens} tokens, one with mass 0.99 on one token has share {shown(heavy.hi, '.5f')} and "
        f"ranks behind {diffuse} diffuse pages with the rest; one with 1 - 1e-6 has less than a "
        "threshold of 1e-5: the share measures spread, so no config can select it"
    )
    numbers = {
        "diffuse_pages": diffuse,
        "share_of_0.99": decimal(heavy.hi, up=True),
        "share_of_a_diffuse_page": decimal(page_tokens * surprisal(each).lo, up=False),
        "share_of_1-1e-6": decimal(certain, up=True),
    }
    return Claim("entropic-share-misranks", "proved", reason, numbers)


def _group_loss(mass: Interval) -> dict[str, dict[str, str | None]]:
    """What one head of a group of G may lose if the *mean* mass keeps the budget: mass G m, and -ln(1 - G m) nats."""
    found: dict[str, dict[str, str | None]] = {}
    for size in GROUPS:
        most = min(Fraction(1), size * mass.hi)
        loss = None if most == 1 else decimal(-log(1 - most, _BITS).lo, up=True)
        found[str(size)] = {"mass": decimal(most, up=True), "loss_nats": loss}
    return found


def _loss(subject: Subject) -> Claim:
    """Decide what the budget lets one query head lose, whatever the text."""
    law, engine = subject.config.loop.pruning.config, subject.config.engine
    protected = (law.sink_pages + law.recent_pages) * engine.page_tokens
    tokens = min(engine.max_context, engine.pages * engine.page_tokens)
    dense = f"the first {law.dense_layers} layers and contexts of up to {protected:,} tokens stay dense"
    if law.theta_wide_nats == 0 or tokens <= protected:
        why = "the budget is 0" if law.theta_wide_nats == 0 else f"{dense}, and none is longer than {tokens:,}"
        return Claim("pruning", "proved", f"nothing is ever dropped: {why}", {"mass": "0", "loss_nats": "0"})
    budget = Fraction(law.theta_wide_nats)
    least = exp(-budget, _BITS)
    near = max(budget - budget**2 / 2, Fraction(0))  # budget - budget^2/2 <= 1 - exp(-budget) <= budget, also if tiny
    mass = Interval(max(1 - least.hi, near), min(1 - least.lo, budget))
    numbers: dict[str, Any] = {"budget_nats": str(budget), "mass": decimal(mass.hi, up=True), "dense_tokens": protected}
    share = f"at most {shown(mass.hi, '.6f')} of the attention (total variation)"
    if law.selection == "union":
        numbers["loss_nats"] = str(budget)
        told = f"every query head loses {share}, {law.theta_wide_nats:g} nats; {dense}"
    else:
        numbers["of_one_head_by_group"] = _group_loss(mass)
        told = (
            f"the query heads of a KV head lose in the mean {share}, but one head of a group of G up to G times that "
            f"mass, and more than G times the budget of {law.theta_wide_nats:g} nats; {dense}"
        )
    return Claim("pruning", "proved", told, numbers)


def claims(subject: Subject, hints: Hints) -> list[Claim]:  # noqa: ARG001
    """Decide `pruning`, `page-interval` and `entropic-share-misranks`."""
    name = subject.config.loop.pruning.name
    if name == "budget":
        return [_loss(subject), _page_interval(subject), _misranks(subject.config.engine.page_tokens)]
    status = "not applicable" if name == "off" else "unknown"
    why = "pruning is off: attention is dense" if name == "off" else f"no theorem covers the law {name!r}"
    return [Claim(theorem, status, why) for theorem in ("pruning", "page-interval", "entropic-share-misranks")]
