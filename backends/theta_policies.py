"""What a rule for the budget would have cost, read off a response surface; comparisons at equal bytes.

A rule is a multiplier m_t per position: its budget is theta_0 m_t, and sweeping theta_0 gives its curve of mean KL
against mean KV bytes. Constant theta is m = 1. Between two rungs of the measured ladder KL grows like theta squared,
so the square root of KL is interpolated, linearly in theta, and bytes linearly in ln theta; every curve is averaged
over many theta_0 between the rungs, so that interpolation touches all rules alike.

The ceiling. With KL_t = c_t theta_t^2 and bytes falling linearly in ln theta, equal mean bytes means equal mean ln m,
and the least mean KL of any rule that knows only x is exp(E ln c(x)) / E c(x) of the constant rule's, c(x) = E[c | x]:
the geometric over the arithmetic mean, reached by m proportional to c(x)^(-1/2) *(ours; Jensen)*. Two halves that
differ by a factor 1.25 leave 0.6% to win.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entropic_ctl.errors import BadInputError
from entropic_ctl.pruning.laws.budget import Budget, Config
from entropic_ctl.signals import FloatArray, IntArray

__all__ = [
    "Curve",
    "Effect",
    "Surface",
    "best_strength",
    "block_weights",
    "byte_levels",
    "ceiling",
    "compare",
    "hindsight",
    "law_multipliers",
    "log_linear",
    "predicted_entropy",
    "shuffled",
    "sweep",
]

SWEEP = 48
"""Values of theta_0 on a curve."""


@dataclass(frozen=True)
class Surface:
    """N measured positions under A budgets.

    Parameters
    ----------
    theta : FloatArray, shape (A,)
        Increasing, nats.
    kl, nll, bytes : FloatArray, shape (N, A)
        KL to dense, change of the next token's negative log-likelihood (nats), KV bytes as a share of dense.
    block, text : IntArray, shape (N,)
        Which stretch of consecutive positions, and which text, a position belongs to: 0, 1, ...
    """

    theta: FloatArray
    kl: FloatArray
    nll: FloatArray
    bytes: FloatArray
    block: IntArray
    text: IntArray

    def __post_init__(self) -> None:
        if self.theta.shape[0] < 2 or not (np.diff(self.theta) > 0).all() or not self.theta[0] > 0:
            raise BadInputError("not a ladder", field="theta", value=self.theta.tolist(), allowed="increasing, above 0")

    @property
    def text_of_block(self) -> IntArray:
        """Text of each block."""
        out = np.zeros(int(self.block.max()) + 1, np.int64)
        out[self.block] = self.text
        return out

    def at(self, theta: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return (kl, nll, bytes), each (N,), under these budgets (N,), clipped to the ladder."""
        log_t, log_ladder = np.log(theta), np.log(self.theta)
        i = np.clip(np.searchsorted(log_ladder, log_t, side="right") - 1, 0, self.theta.shape[0] - 2)
        row = np.arange(theta.shape[0])
        share = np.clip((log_t - log_ladder[i]) / (log_ladder[i + 1] - log_ladder[i]), 0.0, 1.0)
        mixed = (1 - share) * self.bytes[row, i] + share * self.bytes[row, i + 1]
        low, high = self.theta[i], self.theta[i + 1]
        part = np.clip((theta - low) / (high - low), 0.0, 1.0)
        kl = ((1 - part) * np.sqrt(self.kl[row, i]) + part * np.sqrt(self.kl[row, i + 1])) ** 2
        nll = (1 - part) * self.nll[row, i] + part * self.nll[row, i + 1]
        return kl, nll, mixed


@dataclass(frozen=True)
class Curve:
    """Sums over the positions of each block, shape (SWEEP, blocks), by theta_0; ``count`` (blocks,) positions."""

    kl: FloatArray
    nll: FloatArray
    bytes: FloatArray
    count: FloatArray

    def means(self, weight: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return mean (kl, nll, bytes), each (B, SWEEP), with block weights (B, blocks)."""
        total = (weight @ self.count)[:, None]
        return tuple(weight @ part.T / total for part in (self.kl, self.nll, self.bytes))  # type: ignore[return-value]


def sweep(surface: Surface, multiplier: FloatArray, *, span: tuple[float, float] | None = None) -> Curve:
    """Return the curve of a rule.

    Parameters
    ----------
    surface : Surface
    multiplier : FloatArray, shape (N,)
        Positive; only its shape over positions matters.
    span : (float, float), optional
        Range of theta_0; default that of the ladder.
    """
    low, high = span or (float(surface.theta[0]), float(surface.theta[-1]))
    blocks = int(surface.block.max()) + 1
    sums = np.zeros((3, SWEEP, blocks))
    for g, base in enumerate(np.geomspace(low, high, SWEEP)):
        for part, values in zip(sums, surface.at(base * multiplier), strict=True):
            part[g] = np.bincount(surface.block, values, minlength=blocks)
    count = np.bincount(surface.block, minlength=blocks).astype(np.float64)
    return Curve(sums[0], sums[1], sums[2], count)


def hindsight(surface: Surface) -> Curve:
    """Return the curve of the rule that knows every position's own response: a bound on all rules, noise included.

    At each position the rung that minimises KL + price x bytes, for a range of prices.
    """
    blocks = int(surface.block.max()) + 1
    sums, row = np.zeros((3, SWEEP, blocks)), np.arange(surface.kl.shape[0])
    for g, price in enumerate(np.geomspace(1e-6, 1.0, SWEEP)):
        rung = np.argmin(surface.kl + price * surface.bytes, axis=1)
        for part, values in zip(sums, (surface.kl, surface.nll, surface.bytes), strict=True):
            part[g] = np.bincount(surface.block, values[row, rung], minlength=blocks)
    return Curve(sums[0], sums[1], sums[2], np.bincount(surface.block, minlength=blocks).astype(np.float64))


def law_multipliers(
    entropy: FloatArray, at: IntArray, ratio: float, *, reverse: bool = False, d: int = 4
) -> FloatArray:
    """Return what the shipped ``budget`` law asks at some positions of one text, relative to its narrow budget.

    Parameters
    ----------
    entropy : FloatArray, shape (N,)
        Model entropy of every decode step, in order, nats.
    at : IntArray, shape (M,)
        Steps wanted: the law has seen the entropies of all steps before, and not this one's.
    ratio : float
        Wide over narrow budget, >= 1.
    reverse : bool
        Wide where the entropy is *high*: the band is mirrored.
    d : int
        Steps that must ask for wider before it widens.
    """
    narrow = 0.02
    law = Budget(Config(theta_nats=narrow, theta_wide_nats=narrow * ratio, widen_after=d))
    c = law.config
    seen = c.entropy_low_nats + c.entropy_high_nats - entropy if reverse else entropy
    theta, timer = (np.array([value]) for value in law.start())
    asked = np.empty(entropy.shape[0] + 1)
    asked[0] = theta[0]
    for t in range(entropy.shape[0]):
        theta, timer = law.update(theta, timer, seen[t : t + 1])
        asked[t + 1] = theta[0]
    return np.asarray(asked[at] / narrow, np.float64)


def log_linear(signal: FloatArray, strength: float, *, most: float = 3.0) -> FloatArray:
    """Return exp(-strength z), z the standardised signal (N,), NaN and beyond ``most`` deviations tamed."""
    known = np.isfinite(signal)
    scale = float(signal[known].std()) or 1.0
    z = np.where(known, (signal - signal[known].mean()) / scale, 0.0)
    return np.asarray(np.exp(-strength * np.clip(z, -most, most)), np.float64)


def predicted_entropy(
    signals: Mapping[str, FloatArray], histories: Sequence[Mapping[str, FloatArray]], text: IntArray
) -> FloatArray:
    """Return the best guess of each step's own entropy from what is known before it, each text guessed from the others.

    Least squares on: the mean entropy after the token just read (in the other texts, shrunk to their mean by 4
    observations), the last step's entropy and surprise, and the last step's spread of mass.

    Parameters
    ----------
    signals : mapping of FloatArray (N,)
        ``token``, ``entropy``, ``surprise``, ``spread`` (NaN: unknown), and ``own_entropy`` to learn from.
    histories : sequence of mappings
        ``token`` and ``entropy`` of every step of each text.
    text : IntArray, shape (N,)

    Returns
    -------
    FloatArray, shape (N,)
        NaN if there is only one text.
    """
    out = np.full(text.shape[0], np.nan)
    spread = np.where(np.isfinite(signals["spread"]), signals["spread"], np.nanmean(signals["spread"]))
    for number in range(len(histories) if len(histories) > 1 else 0):
        others = [history for j, history in enumerate(histories) if j != number]
        token = np.concatenate([history["token"] for history in others]).astype(np.int64)
        entropy = np.concatenate([history["entropy"] for history in others])
        size = 1 + max(int(token.max()), int(signals["token"].max()))
        mean, count = entropy.mean(), np.bincount(token, minlength=size)
        after = (np.bincount(token, entropy, minlength=size) + 4 * mean) / (count + 4)
        known = [after[signals["token"].astype(np.int64)], signals["entropy"], signals["surprise"], spread]
        x, train = np.column_stack([np.ones(text.shape[0]), *known]), text != number
        weights = np.linalg.lstsq(x[train], signals["own_entropy"][train], rcond=None)[0]
        out[~train] = x[~train] @ weights
    return out


def shuffled(multiplier: FloatArray, text: IntArray, rng: np.random.Generator) -> FloatArray:
    """Return the same multipliers in another order, inside each text: all of the rule but its information."""
    out = multiplier.copy()
    for number in np.unique(text):
        where = np.flatnonzero(text == number)
        out[where] = multiplier[rng.permutation(where)]
    return out


@dataclass(frozen=True)
class Effect:
    """A rule against another at equal bytes, averaged over levels of bytes.

    ``change`` is the ratio of mean KL minus 1 (negative: better), ``low``/``high`` its 95% interval over blocks,
    ``nll``, ``nll_low``, ``nll_high`` the difference of mean NLL, nats, ``by_text`` the change in each text.
    """

    change: float
    low: float
    high: float
    nll: float
    nll_low: float
    nll_high: float
    by_text: FloatArray


def _gap(a: Curve, b: Curve, weight: FloatArray, levels: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return mean over byte levels of (ln KL_a - ln KL_b, NLL_a - NLL_b), each (B,)."""
    out = np.empty((2, weight.shape[0]))
    parts = [curve.means(weight) for curve in (a, b)]
    for i in range(weight.shape[0]):
        found = []
        for kl, nll, size in parts:
            order = np.argsort(size[i])
            log_kl = np.log(np.maximum(kl[i][order], 1e-12))
            found.append((np.interp(levels, size[i][order], log_kl), np.interp(levels, size[i][order], nll[i][order])))
        out[0, i] = (found[0][0] - found[1][0]).mean()
        out[1, i] = (found[0][1] - found[1][1]).mean()
    return out[0], out[1]


def block_weights(surface: Surface, draws: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return bootstrap weights (draws, blocks): blocks drawn with replacement inside each text."""
    home = surface.text_of_block
    weight = np.zeros((draws, home.shape[0]))
    for number in np.unique(home):
        mine = np.flatnonzero(home == number)
        weight[:, mine] = rng.multinomial(mine.shape[0], np.full(mine.shape[0], 1 / mine.shape[0]), size=draws)
    return weight


def byte_levels(surface: Surface, theta: tuple[float, float], count: int = 9) -> FloatArray:
    """Return equally spaced levels of mean bytes between those of two constant budgets."""
    n = surface.kl.shape[0]
    ends = [float(surface.at(np.full(n, t))[2].mean()) for t in theta]
    return np.linspace(min(ends), max(ends), count)


def compare(
    surface: Surface, rule: Curve, other: Curve, levels: FloatArray, weight: FloatArray, *, level: float = 0.95
) -> Effect:
    """Compare two rules at equal bytes.

    Parameters
    ----------
    surface : Surface
    rule, other : Curve
    levels : FloatArray
        Mean bytes at which KL is compared (:func:`byte_levels`).
    weight : FloatArray, shape (draws, blocks)
        From :func:`block_weights`; the same for all comparisons (paired).
    level : float
        Coverage of the intervals.
    """
    home = surface.text_of_block
    texts = np.unique(home)
    whole = np.ones((1, home.shape[0]))
    each = np.stack([(home == number).astype(np.float64) for number in texts])
    kl, nll = _gap(rule, other, whole, levels)
    boot_kl, boot_nll = _gap(rule, other, weight, levels)
    by_text = np.array(
        [_gap(rule, other, each[i : i + 1], _own(other, each[i], levels))[0][0] for i in range(len(texts))]
    )
    tails = [50 * (1 - level), 100 - 50 * (1 - level)]
    low, high = np.percentile(np.expm1(boot_kl), tails)
    nll_low, nll_high = np.percentile(boot_nll, tails)
    return Effect(
        float(np.expm1(kl[0])),
        float(low),
        float(high),
        float(nll[0]),
        float(nll_low),
        float(nll_high),
        np.expm1(by_text),
    )


def _own(curve: Curve, weight: FloatArray, levels: FloatArray) -> FloatArray:
    """Return the byte levels of one text that correspond, by theta_0, to those of all texts."""
    _, _, everywhere = curve.means(np.ones((1, curve.count.shape[0])))
    _, _, here = curve.means(weight[None])
    order = np.argsort(everywhere[0])
    return np.asarray(np.interp(levels, everywhere[0][order], here[0][order]), np.float64)


def ceiling(
    surface: Surface, signal: FloatArray, *, theta: tuple[float, float], bins: int = 5
) -> tuple[float, FloatArray]:
    """Return the most any rule that knows ``signal`` alone could change mean KL at equal bytes, and c(x) by bin.

    Parameters
    ----------
    surface : Surface
    signal : FloatArray, shape (N,)
    theta : (float, float)
        Rungs between which c = KL / theta^2 is averaged.
    bins : int
        Equally filled bins of the signal (in sample: a few percent optimistic with few positions).
    """
    known = np.isfinite(signal)
    rungs = (surface.theta >= theta[0]) & (surface.theta <= theta[1])
    c = (surface.kl[:, rungs] / surface.theta[rungs] ** 2).mean(axis=1)[known]
    order = np.argsort(signal[known], kind="stable")
    means = np.array([c[part].mean() for part in np.array_split(order, bins)])
    if not means.all():
        return 0.0 if not means.any() else -1.0, means
    return float(np.exp(np.log(means).mean()) / means.mean() - 1.0), means


def best_strength(
    surface: Surface, curves: Sequence[Curve], constant: Curve, levels: FloatArray
) -> tuple[list[int], Curve]:
    """Choose a strength without seeing the text it is judged on: per text the best of all others.

    Returns the choice (index into ``curves``) for each text, and the curve put together from them.
    """
    home = surface.text_of_block
    picks, parts = [], {name: np.array(getattr(constant, name)) for name in ("kl", "nll", "bytes")}
    for number in np.unique(home):
        others = (home != number).astype(np.float64)[None]
        pick = int(np.argmin([_gap(curve, constant, others, levels)[0][0] for curve in curves]))
        picks.append(pick)
        for name, values in parts.items():
            values[:, home == number] = getattr(curves[pick], name)[:, home == number]
    return picks, Curve(parts["kl"], parts["nll"], parts["bytes"], constant.count)
