"""Step response of the temperature loop: the target jumps, on logits that stand still. Source: ours."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray
from entropic_ctl.temperature import feedback
from sim.frozen import Views, drive
from sim.lyapunov import linear_exponent

__all__ = ["StepResponse", "step_response"]

_SETTLED = 0.02


@dataclass(frozen=True)
class StepResponse:
    """Response of the entropy to a step of the target, on logits that stand still.

    Parameters
    ----------
    overshoot : float
        Largest excess over the step, as a share of it; 0 without.
    settling_tokens : float
        First token from which the entropy stays within 2% of the step; NaN if it never does.
    expected_tokens : float
        The same from the linear loop at the new equilibrium's varentropy (lag 0: ln 0.02 / ln |1 - k V|).
    varentropy : float
        There.
    u, entropy : FloatArray, shape (N,)
        From the token at which the target moves.
    target_nats : (float, float)
        Before and after.
    """

    overshoot: float
    settling_tokens: float
    expected_tokens: float
    varentropy: float
    u: FloatArray
    entropy: FloatArray
    target_nats: tuple[float, float]


def step_response(
    law: feedback.Config, views: Views, *, step_nats: float = 0.3, lag: int = 0, steps: int = 2000
) -> StepResponse:
    """Settle at the entropy of the law's starting temperature, then move the target.

    Parameters
    ----------
    law : feedback.Config
        Its target is replaced.
    views : Views
        Must not change with t.
    step_nats : float
        Step of the target; the new one must be within reach of the clamps.
    lag : int
        Observation lag.
    steps : int
        Tokens after the step.

    Raises
    ------
    BadInputError
        If the clamps cannot reach the new target.
    """
    start = feedback.Feedback(law).start()
    view = views(0, 1)
    before = float(view.at(np.array([math.exp(start)]))[0][0])
    after = before + step_nats
    reach = [float(view.at(np.array([t]))[0][0]) for t in (law.t_min, law.t_max)]
    if not reach[0] < after < reach[1]:
        raise BadInputError(
            "the clamps cannot reach this target", field="step_nats", value=step_nats, allowed=f"H* in {reach}"
        )
    old, new = (feedback.Feedback(dataclasses.replace(law, target_nats=h)) for h in (before, after))
    wait = 1 + lag
    u, entropy = drive(lambda t: old if t < wait else new, views, [start], wait + steps, lag)
    u, entropy = u[wait:, 0], entropy[wait:, 0]
    done = (entropy - before) / step_nats
    outside = np.flatnonzero(np.abs(done - 1.0) > _SETTLED)
    settled = (
        float(outside[-1] + 1) if outside.size and outside[-1] + 1 < steps else 0.0 if not outside.size else math.nan
    )
    _, varentropy = view.at(np.array([math.exp(float(u[-1]))]))
    rate = linear_exponent(law.gain * float(varentropy[0]), lag)
    expected = math.log(_SETTLED) / rate if rate < 0 else math.nan
    return StepResponse(
        max(0.0, float(done.max()) - 1.0), settled, expected, float(varentropy[0]), u, entropy, (before, after)
    )
