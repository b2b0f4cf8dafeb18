r"""Speculative decoding on paper: which drafted tokens a step accepts, and what drafting costs.

A decode row with m drafted tokens computes 1 + m tokens in one step. Position j = 0 .. m has its own distribution, with
entropy H_j; the draft's token j + 1 is accepted with probability alpha(H_j), independently given the entropies, and
with A the number of leading successes the row yields A + 1 tokens: the accepted ones and one more from the
distribution where it stopped. With constant alpha the expected yield is (1 - alpha^(m + 1)) / (1 - alpha) (Leviathan
et al., 2023). Drafting does not change the text (that is the method's guarantee), so position j shows the recording's
next tokens. All positions of a step are sampled under one state of the temperature law, and read one recording: that
of the temperature before the step.

``prompt_lookup`` finds a draft with probability ``found(H_0)``, else the row computes one token; it costs nothing.
Both alpha and found are piecewise linear in the entropy, through the values measured on a real model
(:func:`load_acceptance`; what was measured: ``backends/acceptance.py``): over the entropy at the row's temperature, for
greedy rows over the model entropy. The curves end at the largest possible entropy, alpha with 1 / n, the only value it
can have there. A constant ``speculation.acceptance`` replaces alpha, and every row then finds a draft.

``model`` runs a second model on the same device: d steps one after another of the drafting rows, and the same prefill
as the target's. Its KV memory is not taken from the pool: subtract it from ``engine.pages``. Its acceptance has to be
given.

The independence given the entropies and the edges are ours.
"""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from entropic_ctl.config import CostConfig, RunConfig, SpeculationConfig
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, IntArray, StepPlan
from sim.cost import CostModel, StepCost, cost_model
from sim.load import StepLoad
from sim.streams import stream

__all__ = ["Curve", "Drafts", "Speculation", "Verified", "load_acceptance"]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Curve(NamedTuple):
    """A share in [0, 1] as a piecewise linear function of an entropy in nats, constant before the first knot."""

    entropy: FloatArray
    share: FloatArray

    def __call__(self, entropy: FloatArray) -> FloatArray:
        """Return the share at each entropy."""
        return np.interp(entropy, self.entropy, self.share)


@dataclass(frozen=True)
class Drafts:
    """What was measured for one way of decoding: acceptance of a drafted token, and how often there is a draft."""

    accepted: Curve
    found: Curve


def load_acceptance() -> dict[str, Drafts]:
    """Return the shipped curves of prompt lookup, for ``sampled`` and ``greedy`` rows."""
    text = (importlib.resources.files("sim") / "data" / "smollm2-135m.acceptance.json").read_text("utf-8")
    values = json.loads(text)
    vocabulary = int(values["vocab_size"])

    def curve(table: dict[str, Any], last: float | None) -> Curve:
        x, y = np.array(table["entropy_nats"]), np.array(table["share"])
        return Curve(np.append(x, np.log(vocabulary)), np.append(y, y[-1] if last is None else last))

    return {
        kind: Drafts(curve(values[kind]["accepted"], 1.0 / vocabulary), curve(values[kind]["found"], None))
        for kind in ("sampled", "greedy")
    }


class Verified(NamedTuple):
    """Outcome of a step with drafts: tokens really drafted per sampling row, and which positions yield a token."""

    drafted: IntArray
    accepted: npt.NDArray[np.bool_]


class Speculation:
    """Draws what is accepted; one uniform number per (request, token), so that arms of a comparison share them.

    Parameters
    ----------
    config : SpeculationConfig
    seed : int
        Root seed of the run.
    drafter : CostModel, optional
        What a step of the drafter costs; none for prompt lookup.

    Attributes
    ----------
    drafted, accepted : int
        Tokens drafted and drafted tokens accepted so far.
    """

    def __init__(self, config: SpeculationConfig, seed: int, drafter: CostModel | None = None) -> None:
        self.config, self.drafter = config, drafter
        self._curves = None if config.acceptance else load_acceptance()
        self._keys = stream(seed, "speculation").integers(0, 2**63, 2, dtype=np.uint64)
        self.drafted = self.accepted = 0

    @classmethod
    def of(cls, config: RunConfig, page_tokens: int) -> Speculation | None:
        """Return what a run's configuration asks for, or None without drafts.

        Parameters
        ----------
        config : RunConfig
        page_tokens : int

        Raises
        ------
        BadInputError
            If the draft model is not known or does not fit the device, or its acceptance is not given.
        """
        asked = config.speculation
        if not asked.draft_tokens:
            return None
        if asked.drafter == "model":
            if not asked.acceptance:
                raise BadInputError(
                    "acceptance was measured for prompt lookup only",
                    where="speculation",
                    field="speculation.acceptance",
                    value=asked.acceptance,
                    allowed="(0, 1] with drafter = 'model'",
                    remedy="give the acceptance of your pair of models",
                )
            device = {name: value for name, value in vars(config.cost).items() if name not in ("model", "weight_bits")}
            try:
                return cls(asked, config.seed, cost_model(CostConfig(**device, model=asked.draft_model), page_tokens))
            except BadInputError as error:
                raise error.inside("speculation", field="speculation.draft_model") from None
        return cls(asked, config.seed)

    def _uniform(self, key: int, ids: IntArray, token: IntArray) -> FloatArray:
        """Return uniforms in [0, 1) by (request, token): SplitMix64 finalisers over both (Steele et al., 2014)."""
        with np.errstate(over="ignore"):
            x = self._keys[key] + ids.astype(np.uint64) * _STEP
            for words in (token.astype(np.uint64) * _STEP, np.uint64(0)):
                x = (x ^ (x >> np.uint64(30))) * _MIX[0]
                x = (x ^ (x >> np.uint64(27))) * _MIX[1]
                x = (x ^ (x >> np.uint64(31))) + words
        return np.asarray((x >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def verify(
        self,
        ids: IntArray,
        token: IntArray,
        n_draft: IntArray,
        *,
        greedy: npt.NDArray[np.bool_],
        model_entropy: FloatArray,
        tempered_entropy: FloatArray,
        last: npt.NDArray[np.bool_],
    ) -> Verified:
        """Return what is drafted and accepted; K positions, ``1 + n_draft`` of each of M sampling rows.

        Parameters
        ----------
        ids, token : IntArray, shape (K,)
            Request, and index of the output token at the position.
        n_draft : IntArray, shape (M,)
            Most tokens to draft, by sampling row.
        greedy : bool array, shape (K,)
        model_entropy, tempered_entropy : FloatArray, shape (K,)
            Nats.
        last : bool array, shape (K,)
            The position's token ends the text: nothing after it is accepted.
        """
        start = np.cumsum(n_draft + 1) - n_draft - 1
        offset = np.arange(ids.shape[0]) - np.repeat(start, n_draft + 1)
        drafted = n_draft
        if self._curves is None:
            alpha = np.full(ids.shape[0], self.config.acceptance)
        else:
            sampled, exact = self._curves["sampled"], self._curves["greedy"]
            alpha = np.where(greedy, exact.accepted(model_entropy), sampled.accepted(tempered_entropy))
            found = np.where(greedy[start], exact.found(model_entropy[start]), sampled.found(tempered_entropy[start]))
            drafted = np.where(self._uniform(1, ids[start], token[start]) < found, n_draft, 0)
        goes_on = (self._uniform(0, ids, token) < alpha) & ~last & (offset < np.repeat(drafted, n_draft + 1))
        stops = np.flatnonzero(~goes_on)  # the first of a row's is its last token
        first = stops[np.searchsorted(stops, start)] - start
        self.drafted += int(drafted.sum())
        self.accepted += int(first.sum())
        return Verified(drafted, offset <= np.repeat(first, n_draft + 1))

    def cost(self, plan: StepPlan, drafted: IntArray) -> StepCost:
        """Return what drafting costs beside the target's step: the drafter's own prefill, and a step per drafted token.

        Parameters
        ----------
        plan : StepPlan
        drafted : IntArray, shape (R,)
            By plan row.
        """
        total = StepCost(0.0, 0.0, 0.0)
        if self.drafter is None:
            return total
        loads = [_prefill(plan)]
        for j in range(int(drafted.max(initial=0))):
            context = plan.context[drafted > j] + j
            rows = context.shape[0]
            loads.append(StepLoad(rows, rows, rows, rows, float(context.sum())))
        for part in loads:
            if part.rows:
                total = StepCost(*(a + b for a, b in zip(total, self.drafter.step(part), strict=True)))
        return total


def _prefill(plan: StepPlan) -> StepLoad:
    """Return the rows that fill the drafter's cache with tokens it did not draft: chunks and recomputation."""
    rows = (plan.n_draft == 0) & ~(plan.samples & (plan.n_tokens == 1))
    cached, new = plan.context[rows].astype(np.float64), plan.n_tokens[rows].astype(np.float64)
    pairs = float(np.dot(new, cached + 0.5 * (new + 1.0)))
    return StepLoad(new.shape[0], int(new.sum()), 0, 0, 0.0, prefill_context=float(cached.sum()), prefill_pairs=pairs)
