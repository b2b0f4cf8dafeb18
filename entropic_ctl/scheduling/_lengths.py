"""How long a request is, for the policies that order by size: predicted output lengths and work in steps (ours).

The unit of work is a *step*: an output token takes one, a prompt token the share of a step's token budget that it
fills. It needs no machine constants, and with one row at a time it is the number of iterations up to rounding.

Predictions are ``Request.expected_tokens``. Where a request has none (0), its remaining output is taken as memoryless:
``prior_tokens`` more, whatever it has generated. A request that outlives its prediction gets twice the prediction, and
again, until that lies ahead: without this, the shortest-remaining rule would serve underestimated requests first for as
long as they last. Nothing goes beyond the token limit, which is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from entropic_ctl import fields
from entropic_ctl.errors import BadInputError
from entropic_ctl.scheduling.base import ScheduleView, SchedulingConfig
from entropic_ctl.signals import FloatArray

__all__ = ["LengthConfig", "output_length", "remaining_steps", "total_steps"]


@dataclass(frozen=True)
class LengthConfig(SchedulingConfig):
    """Where output lengths come from."""

    lengths: str = fields.choice(
        "predicted",
        ("predicted", "oracle"),
        "predicted: the request's expected_tokens, or the prior; oracle: the true length, which only the simulator has",
    )
    prior_tokens: float = fields.number(128.0, 1.0, 1e9, "output tokens a request without a prediction goes on for")


def output_length(view: ScheduleView, config: LengthConfig) -> FloatArray:
    """Return the output tokens each request is expected to have in the end, at most its limit.

    More than it has generated, except at the limit.

    Parameters
    ----------
    view : ScheduleView
    config : LengthConfig

    Returns
    -------
    FloatArray, shape (L,), tokens

    Raises
    ------
    BadInputError
        If ``lengths`` is ``oracle`` and a request does not come with its length.
    """
    expected, generated = view.expected_tokens.astype(np.float64), view.generated_tokens
    unknown = expected <= 0
    if config.lengths == "oracle" and unknown.any():
        raise BadInputError(
            "a request without its true length",
            field="loop.scheduling.lengths",
            value="oracle",
            allowed="in the simulator only, which knows how each request will end",
            remedy='set lengths = "predicted"',
        )
    times = (generated + 1.0) / np.where(unknown, 1.0, expected)
    mantissa, exponent = np.frexp(np.maximum(times, 1.0))
    ahead = np.ldexp(1.0, exponent - (mantissa == 0.5))  # the least power of two >= times, exactly
    length = np.where(unknown, generated + config.prior_tokens, expected * ahead)
    return np.minimum(length, view.token_limit)


def remaining_steps(view: ScheduleView, config: LengthConfig) -> FloatArray:
    """Return the work left: tokens to (re)compute over the token budget, and output tokens to come; shape (L,), steps.

    A pending token that the next decode step computes anyway is not counted twice.
    """
    pending = np.maximum(view.known_tokens - view.cached_tokens - 1, 0)
    steps: FloatArray = pending / view.token_budget + (output_length(view, config) - view.generated_tokens)
    return steps


def total_steps(view: ScheduleView, config: LengthConfig) -> FloatArray:
    """Return the work of the whole request: prompt over the token budget, and all output tokens; shape (L,), steps.

    While the prediction holds it does not change as the request runs.
    """
    steps: FloatArray = (view.prompt_tokens - 1) / view.token_budget + output_length(view, config)
    return steps
