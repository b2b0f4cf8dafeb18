r"""A parametric model of entropy trajectories, fitted to a recorded bank, that generates synthetic banks.

Model entropy h >= 0 becomes x = ln(exp(h + 0.002) - 1), which is unbounded: the logarithm of h where h is small, h
itself where it is large. At each recorded sampling temperature x follows a regime-switching autoregression with a
random level per text (:mod:`sim.regimes`), pulled towards the fit of all temperatures together. The levels of one
prompt's texts at different temperatures share the part ``prompt_share`` of their variance. A text ends after token t
with the logistic hazard 1 / (1 + exp(-(a + b ln t + c u + d u^2))), u = ln T; nothing is known beyond the recording
limit, so generated texts are cut off there too. Tempered entropy and varentropy given h: :mod:`sim.curves`. The
response to pruning is the recorded table itself.

What is generated is a :class:`entropic_ctl.bank.Bank`, and the simulator reads it as it reads a recorded one. Source:
ours, from named parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.bank import Bank
from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, IntArray
from sim import regimes
from sim.curves import Curves, draw_curves, fit_curves
from sim.hazard import fit_hazard, hazard
from sim.regimes import Regimes
from sim.streams import stream

__all__ = ["EntropyModel", "fit_model", "from_x", "generate", "held_out", "texts_at", "to_x"]

_FLOOR = 0.002
Progress = Callable[[str, float], None]
RESPONSE = ("kept", "certificate_mean", "certificate_max", "mass_mean", "kl", "entropy_shift")


def to_x(h: npt.NDArray[Any]) -> FloatArray:
    """Return the unbounded form of a model entropy in nats."""
    value: FloatArray = np.log(np.expm1(np.asarray(h, np.float64) + _FLOOR))
    return value


def from_x(x: FloatArray) -> FloatArray:
    """Return the model entropy, nats, >= 0: the inverse of :func:`to_x`."""
    h: FloatArray = np.maximum(np.logaddexp(0.0, x) - _FLOOR, 0.0)
    return h


@dataclass(frozen=True)
class EntropyModel:
    """A fitted model.

    Parameters
    ----------
    meta : dict
        That of the bank it was fitted to: model, vocabulary, pruning rule.
    temperature : FloatArray, shape (J,)
        Increasing.
    regimes : tuple of Regimes, length J
    first : FloatArray, shape (J, 2)
        Mean and standard deviation of a text's first x.
    prompt_share : float
        In [0, 1].
    hazard : FloatArray, shape (4,), or None
        (a, b, c, d); None: no recorded text ended.
    limit : int
        Recording limit, tokens.
    grid : FloatArray, shape (G,)
    curves : Curves
    theta, context, response
        The bank's response to pruning: (A,), (C,), and one (C, A) table per name of ``RESPONSE``.
    """

    meta: dict[str, Any]
    temperature: FloatArray
    regimes: tuple[Regimes, ...]
    first: FloatArray
    prompt_share: float
    hazard: FloatArray | None
    limit: int
    grid: FloatArray
    curves: Curves
    theta: FloatArray
    context: FloatArray
    response: dict[str, FloatArray]


def texts_at(bank: Bank, chosen: npt.NDArray[Any]) -> tuple[FloatArray, IntArray]:
    """Return the texts ``chosen`` (indices) as x, padded (S, L), and their lengths (S,)."""
    length = np.diff(bank.offset)[chosen]
    x = np.zeros((chosen.shape[0], int(length.max())))
    for row, k in enumerate(chosen.tolist()):
        x[row, : length[row]] = to_x(bank.model_entropy[bank.offset[k] : bank.offset[k + 1]])
    return x, length


def _long_enough(bank: Bank, chosen: npt.NDArray[Any]) -> IntArray:
    return np.asarray(chosen[np.diff(bank.offset)[chosen] >= 2], np.int64)


def _fits(
    bank: Bank, k: int, among: IntArray, iterations: int = 200
) -> tuple[regimes.Fit, list[regimes.Fit], list[IntArray]]:
    """Return the pooled fit, the fit at each temperature, and the texts each was made of."""
    pooled = regimes.fit(*texts_at(bank, among), k, iterations=iterations, texts_differ=False)
    groups = [among[bank.temperature[among] == t] for t in np.unique(bank.temperature)]
    fits = [regimes.fit(*texts_at(bank, group), k, prior=pooled, iterations=iterations) for group in groups]
    return pooled, fits, groups


def held_out(
    bank: Bank, choices: Sequence[int] = (1, 2, 3, 4), *, folds: int = 3, progress: Progress | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Compare numbers of regimes: BIC, and the log-likelihood of prompts left out of the fit, per token.

    Parameters
    ----------
    bank : Bank
    choices : sequence of int
        Numbers of regimes.
    folds : int
        Parts into which the prompts fall; each part is left out once.
    progress : callable(what, share), optional

    Returns
    -------
    dict
        Columns ``regimes``, ``parameters``, ``bic`` (of the fits per temperature), ``held_out_nats`` (per token, mean)
        and ``held_out_sem`` (standard error over prompts).
    """
    usable = _long_enough(bank, np.arange(bank.temperature.shape[0]))
    prompts = np.unique(bank.prompt[usable])
    folds = min(folds, prompts.shape[0])
    if folds < 2:
        raise BadInputError("too few prompts to leave some out", where="entropy bank", field="prompt", allowed=">= 2")
    rows: dict[str, list[float]] = {name: [] for name in ("parameters", "bic", "held_out_nats", "held_out_sem")}
    for done, k in enumerate(choices):
        _, fits, _ = _fits(bank, k, usable, 60)
        parameters = sum(f.regimes.parameters for f in fits)
        tokens = int(np.diff(bank.offset)[usable].sum()) - usable.shape[0]
        rows["parameters"].append(parameters)
        rows["bic"].append(parameters * np.log(tokens) - 2.0 * sum(f.log_likelihood[-1] for f in fits))
        score, count = np.zeros(prompts.shape[0]), np.zeros(prompts.shape[0])
        for fold in range(folds):
            if progress is not None:
                progress(f"{k} regimes, fold {fold + 1}", (done + fold / folds) / len(choices))
            out = np.isin(bank.prompt[usable], prompts[fold::folds])
            _, fits, _ = _fits(bank, k, usable[~out], 60)
            for t, fitted in zip(np.unique(bank.temperature[usable[~out]]), fits, strict=True):
                left = usable[out & (bank.temperature[usable] == t)]
                x, length = texts_at(bank, left)
                at = np.searchsorted(prompts, bank.prompt[left])
                np.add.at(score, at, regimes.log_likelihood(fitted.regimes, x, length))
                np.add.at(count, at, length - 1)
        rows["held_out_nats"].append(float(score.sum() / count.sum()))
        rows["held_out_sem"].append(float((score / count).std(ddof=1) / np.sqrt(prompts.shape[0])))
    return {"regimes": np.array(choices)} | {name: np.array(values) for name, values in rows.items()}


def _prompt_share(bank: Bank, fits: Sequence[regimes.Fit], groups: Sequence[IntArray]) -> float:
    """Return the mean correlation, over pairs of temperatures, of the texts' levels z of the same prompt, in [0, 1]."""
    products: list[float] = []
    tables = [
        dict(zip(bank.prompt[g].tolist(), f.text_effect.tolist(), strict=True))
        for f, g in zip(fits, groups, strict=True)
    ]
    for i, a in enumerate(tables):
        for b in tables[i + 1 :]:
            shared = sorted(a.keys() & b.keys())
            x, y = np.array([a[p] for p in shared]), np.array([b[p] for p in shared])
            if len(shared) >= 3 and x.std() > 0 and y.std() > 0:
                products.append(float(np.corrcoef(x, y)[0, 1]))
    return float(np.clip(np.mean(products), 0.0, 1.0)) if products else 0.0


def fit_model(bank: Bank, k: int = 3) -> EntropyModel:
    """Fit a model of ``k`` regimes to a bank; deterministic.

    Raises
    ------
    BadInputError
        If a temperature has too few tokens.
    """
    usable = _long_enough(bank, np.arange(bank.temperature.shape[0]))
    temperatures, length = np.unique(bank.temperature), np.diff(bank.offset)
    for t in temperatures:
        tokens = int(length[usable][bank.temperature[usable] == t].sum())
        if tokens < 50 * k:
            raise BadInputError(
                f"too few tokens at T = {t:g} for {k} regimes",
                where="entropy bank",
                field="temperature",
                value=tokens,
                allowed=f">= {50 * k}",
                remedy="record more prompts or longer texts, or fit fewer regimes",
            )
    _, fits, groups = _fits(bank, k, usable)
    begin = [to_x(bank.model_entropy[bank.offset[:-1][bank.temperature == t]]) for t in temperatures]
    per_token = np.log(np.repeat(bank.temperature, length))
    vocab = int(bank.meta["vocab_size"])
    return EntropyModel(
        meta=dict(bank.meta),
        temperature=temperatures,
        regimes=tuple(f.regimes for f in fits),
        first=np.array([[x.mean(), max(float(x.std()), 1e-3)] for x in begin]),
        prompt_share=_prompt_share(bank, fits, groups),
        hazard=fit_hazard(bank),
        limit=int(length.max()),
        grid=bank.grid,
        curves=fit_curves(
            bank.grid,
            model_entropy=bank.model_entropy.astype(np.float64),
            table=bank.entropy_grid.astype(np.float64),
            slopes=bank.varentropy_grid.astype(np.float64),
            x=to_x(bank.model_entropy),
            u=per_token,
            vocab_size=vocab,
        ),
        theta=bank.theta,
        context=bank.context,
        response={name: getattr(bank, name) for name in RESPONSE},
    )


def _paths(model: EntropyModel, j: int, z: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Return x of texts at temperature j, (S, limit); each is as long as any can be."""
    r, count = model.regimes[j], z.shape[0]
    jump, noise = rng.random((model.limit, count)), rng.standard_normal((model.limit, count))
    upto = np.cumsum(r.transition, axis=1)
    x = np.empty((count, model.limit))
    x[:, 0] = model.first[j, 0] + model.first[j, 1] * noise[0]
    state = np.minimum(np.searchsorted(np.cumsum(r.start), jump[0], side="right"), r.level.shape[0] - 1)
    for t in range(1, model.limit):
        if t > 1:
            state = np.minimum((upto[state] <= jump[t][:, None]).sum(axis=1), r.level.shape[0] - 1)
        x[:, t] = r.level[state] + r.phi[state] * x[:, t - 1] + r.text * z + r.sigma[state] * noise[t]
    return x


def generate(model: EntropyModel, *, seed: int = 0, prompts: int = 32) -> Bank:
    """Draw a synthetic bank: every prompt at every fitted temperature, cut off at the recording limit.

    Parameters
    ----------
    model : EntropyModel
    seed : int
        Root seed; the stream is ``entropy model``.
    prompts : int
    """
    rng = stream(seed, "entropy model")
    share, top = model.prompt_share, float(np.log(model.meta["vocab_size"]))
    own, steps = rng.standard_normal(prompts), np.arange(1, model.limit + 1)
    entropies: list[FloatArray] = []
    lengths: list[IntArray] = []
    ended: list[npt.NDArray[np.bool_]] = []
    for j, temperature in enumerate(model.temperature):
        z = np.sqrt(share) * own + np.sqrt(1 - share) * rng.standard_normal(prompts)
        x = _paths(model, j, z, rng)
        ends = np.zeros((prompts, model.limit), np.bool_)
        chance = rng.random((prompts, model.limit))
        if model.hazard is not None:
            ends = chance < hazard(model.hazard, steps, float(temperature))
        over: npt.NDArray[np.bool_] = np.asarray(ends.any(axis=1))
        length = np.where(over, ends.argmax(axis=1) + 1, model.limit)
        entropies += [np.minimum(from_x(row[:n]), top) for row, n in zip(x, length.tolist(), strict=True)]
        lengths.append(length)
        ended.append(over)
    h, length = np.concatenate(entropies), np.concatenate(lengths)
    temperature = np.repeat(model.temperature, prompts)
    table, slopes = draw_curves(
        model.curves,
        model.grid,
        model_entropy=h,
        x=to_x(h),
        u=np.log(np.repeat(temperature, length)),
        vocab_size=int(model.meta["vocab_size"]),
        rng=rng,
    )
    note = {"command": "generated by a fitted entropy model", "synthetic": True, "seed": seed, "kinds": ["synthetic"]}
    return Bank(
        meta=model.meta | note | {"prompts": prompts},
        grid=model.grid,
        prompt_kind=np.zeros(temperature.shape[0], np.int64),
        prompt=np.tile(np.arange(prompts), model.temperature.shape[0]),
        temperature=temperature,
        offset=np.concatenate(([0], np.cumsum(length))).astype(np.int64),
        ended=np.concatenate(ended),
        model_entropy=h.astype(np.float32),
        entropy_grid=table.astype(np.float32),
        varentropy_grid=slopes.astype(np.float32),
        theta=model.theta,
        context=model.context,
        **model.response,
    )
