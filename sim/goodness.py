"""How well a fitted entropy model describes the bank it was fitted to: statistics with simulated intervals.

The model draws banks of the same size as the recorded one. Each statistic of the recorded bank is set against its
central 95% interval over these draws, which so allows for the few texts, their lengths and the dependence inside them.
The Kolmogorov-Smirnov distance is to a large draw, and its p-value is the share of draws at least as far away. As the
parameters were fitted to the same texts, agreement is a little too easy; prompts left out of the fit are in
:func:`sim.parametric.held_out`. By chance alone one statistic in twenty lies outside. Ours, after the parametric
bootstrap (Efron and Tibshirani, 1993).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entropic_ctl.bank import Bank
from entropic_ctl.signals import FloatArray
from sim.parametric import EntropyModel, fit_model, generate, held_out

__all__ = ["LAGS", "PROBABILITIES", "Study", "check_fit", "sample_paths", "statistics", "study"]

LAGS = 10
PROBABILITIES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
_PARTS = 5
_TAIL = (0.9, 0.99)
Key = tuple[float, str, float]
Table = dict[str, npt.NDArray[Any]]
Progress = Callable[[str, float], None]
"""Called as ``progress(what, share)``."""


def _correlation(texts: list[FloatArray], lag: int) -> float:
    """Return the autocorrelation at ``lag``: products of deviations from each text's own mean, pooled over texts."""
    above = below = 0.0
    for h in texts:
        if h.shape[0] > lag + 1:
            d = h - h.mean()
            above += float(d[:-lag] @ d[lag:]) / (h.shape[0] - lag)
            below += float(d @ d) / h.shape[0]
    return above / below if below > 0 else 0.0


def statistics(bank: Bank, cuts: dict[float, FloatArray], tails: dict[float, FloatArray]) -> dict[Key, float]:
    """Return the statistics of a bank by (temperature, name, argument).

    Parameters
    ----------
    bank : Bank
    cuts : dict
        By temperature, the entropies that part the recorded tokens into fifths: varentropy is averaged in each.
    tails : dict
        By temperature, the entropies whose upper tail mass is reported.
    """
    out: dict[Key, float] = {}
    near = int(np.argmin(np.abs(np.log(bank.grid))))  # the grid temperature closest to 1
    for t in np.unique(bank.temperature).tolist():
        chosen = np.flatnonzero(bank.temperature == t)
        spans = [slice(int(bank.offset[k]), int(bank.offset[k + 1])) for k in chosen]
        texts = [bank.model_entropy[span].astype(np.float64) for span in spans]
        h = np.concatenate(texts)
        v = np.concatenate([bank.varentropy_grid[span, near] for span in spans])
        length = np.diff(bank.offset)[chosen]
        out[t, "mean entropy", 0.0], out[t, "sd entropy", 0.0] = float(h.mean()), float(h.std())
        out[t, "sd of text means", 0.0] = float(np.std([text.mean() for text in texts]))
        out[t, "mean length", 0.0], out[t, "share ended", 0.0] = float(length.mean()), float(bank.ended[chosen].mean())
        for p, value in zip(PROBABILITIES, np.quantile(h, PROBABILITIES), strict=True):
            out[t, "quantile", p] = float(value)
        for lag in range(1, LAGS + 1):
            out[t, "autocorrelation", float(lag)] = _correlation(texts, lag)
        for p, value in zip(_TAIL, tails[t], strict=True):
            out[t, "tail mass", p] = float((h > value).mean())
        part = np.searchsorted(cuts[t], h, side="right")
        for i in range(_PARTS):
            inside = part == i
            out[t, "varentropy at entropy fifth", i + 1.0] = float(v[inside].mean()) if inside.any() else 0.0
    return out


def _distance(sample: FloatArray, reference: FloatArray) -> float:
    """Return the Kolmogorov-Smirnov distance between two samples (the second sorted)."""
    points = np.sort(sample)
    gaps = [
        np.searchsorted(points, points, side) / points.shape[0]
        - np.searchsorted(reference, points, side) / reference.shape[0]
        for side in ("left", "right")  # just before and at each point: both may have atoms (the cap ln n)
    ]
    return float(np.abs(gaps).max())


def _entropies(bank: Bank, t: float) -> FloatArray:
    return np.asarray(bank.model_entropy[np.repeat(bank.temperature == t, np.diff(bank.offset))], np.float64)


def check_fit(
    bank: Bank,
    model: EntropyModel,
    *,
    draws: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Table, dict[str, Any]]:
    """Compare a bank with its model.

    Parameters
    ----------
    bank : Bank
    model : EntropyModel
    draws : int
        Synthetic banks, each with as many prompts as the recorded one.
    seed : int
        Draw i has root seed ``seed + i + 1``; the reference has ``seed``.
    progress : callable(what, share), optional

    Returns
    -------
    table : dict
        One row per statistic: ``temperature``, ``statistic``, ``argument``, ``observed``, ``low``, ``middle``, ``high``
        (2.5%, 50%, 97.5% of the draws), ``inside``.
    summary : dict
        ``statistics``, ``inside_share``, ``ks_p`` and ``ks_distance`` by temperature, ``outside`` by name of statistic.
    """
    temperatures = np.unique(bank.temperature).tolist()
    prompts = max(1, round(bank.temperature.shape[0] / len(temperatures)))
    large = generate(model, seed=seed, prompts=40 * prompts)
    reference = {t: np.sort(_entropies(large, t)) for t in temperatures}
    cuts = {t: np.quantile(_entropies(bank, t), np.arange(1, _PARTS) / _PARTS) for t in temperatures}
    tails = {t: np.quantile(reference[t], _TAIL) for t in temperatures}
    observed = statistics(bank, cuts, tails)
    drawn = np.empty((draws, len(observed)))
    distance = np.empty((draws, len(temperatures)))
    for i in range(draws):
        synthetic = generate(model, seed=seed + i + 1, prompts=prompts)
        drawn[i] = list(statistics(synthetic, cuts, tails).values())
        distance[i] = [_distance(_entropies(synthetic, t), reference[t]) for t in temperatures]
        if progress is not None:
            progress(f"draw {i + 1} of {draws}", (i + 1) / draws)
    low, middle, high = np.quantile(drawn, (0.025, 0.5, 0.975), axis=0)
    value = np.array(list(observed.values()))
    inside = (low <= value) & (value <= high)
    names = np.array([name for _, name, _ in observed])
    table: Table = {
        "temperature": np.array([t for t, _, _ in observed]),
        "statistic": names,
        "argument": np.array([a for _, _, a in observed]),
        "observed": value,
        "low": low,
        "middle": middle,
        "high": high,
        "inside": inside,
    }
    own = np.array([_distance(_entropies(bank, t), reference[t]) for t in temperatures])
    p = (1 + (distance >= own).sum(axis=0)) / (draws + 1)
    summary = {
        "statistics": len(observed),
        "inside_share": float(inside.mean()),
        "ks_distance": {f"{t:g}": float(d) for t, d in zip(temperatures, own, strict=True)},
        "ks_p": {f"{t:g}": float(q) for t, q in zip(temperatures, p, strict=True)},
        "outside": {
            n: f"{int((~inside[names == n]).sum())} of {int((names == n).sum())}" for n in dict.fromkeys(names.tolist())
        },
    }
    return table, summary


def sample_paths(bank: Bank, model: EntropyModel, *, seed: int = 0) -> Table:
    """Return one recorded and one generated text per temperature, token by token.

    Parameters
    ----------
    bank : Bank
        Its longest text (the first of them) is taken.
    model : EntropyModel
        So is the longest of as many drawn ones.
    seed : int

    Returns
    -------
    dict
        Columns ``temperature``, ``source`` (recorded or model), ``token``, ``entropy_nats``.
    """
    synthetic = generate(model, seed=seed, prompts=max(1, int(np.unique(bank.prompt).shape[0])))
    columns: dict[str, list[npt.NDArray[Any]]] = {
        name: [] for name in ("temperature", "source", "token", "entropy_nats")
    }
    for t in np.unique(bank.temperature).tolist():
        for source, where in (("recorded", bank), ("model", synthetic)):
            chosen = np.flatnonzero(where.temperature == t)
            k = int(chosen[np.argmax(np.diff(where.offset)[chosen])])
            h = where.model_entropy[where.offset[k] : where.offset[k + 1]]
            columns["temperature"].append(np.full(h.shape[0], t))
            columns["source"].append(np.full(h.shape[0], source))
            columns["token"].append(np.arange(1, h.shape[0] + 1))
            columns["entropy_nats"].append(h.astype(np.float64))
    return {name: np.concatenate(parts) for name, parts in columns.items()}


@dataclass(frozen=True)
class Study:
    """A fitted model with its report: tables by name (``goodness``, ``paths``, ``regimes``) and a summary."""

    model: EntropyModel
    tables: dict[str, Table]
    summary: dict[str, Any]


def study(
    bank: Bank, regimes: int | None = None, *, draws: int = 200, seed: int = 0, progress: Progress | None = None
) -> Study:
    """Choose the number of regimes, fit, and check the fit.

    Parameters
    ----------
    bank : Bank
    regimes : int, optional
        None takes, of 1 to 4, the number with the highest likelihood of prompts left out of the fit.
    draws, seed, progress
        See :func:`check_fit`.

    Raises
    ------
    BadInputError
        If the bank is too small to fit or to compare.
    """
    say = progress or (lambda *_: None)
    tables: dict[str, Table] = {}
    summary: dict[str, Any] = {}
    if regimes is None:
        compared = held_out(bank, progress=lambda what, share: say(what, 0.6 * share))
        regimes = int(compared["regimes"][np.argmax(compared["held_out_nats"])])
        tables["regimes"] = compared
        summary["regimes_by_bic"] = int(compared["regimes"][np.argmin(compared["bic"])])
        summary["held_out_nats_per_token"] = {
            str(k): float(v) for k, v in zip(compared["regimes"], compared["held_out_nats"], strict=True)
        }
    say("fit", 0.6)
    model = fit_model(bank, regimes)
    tables["goodness"], checked = check_fit(
        bank, model, draws=draws, seed=seed, progress=lambda what, share: say(what, 0.7 + 0.3 * share)
    )
    tables["paths"] = sample_paths(bank, model, seed=seed)
    return Study(model, tables, {"regimes": regimes, **summary, **checked})
